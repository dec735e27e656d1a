// The functions that Python calls, by ctypes. Structures mirror those in `bindings.py`.
#include <omp.h>

#include "decoder.hpp"
#include "page_toucher.hpp"

using namespace minivllm;

namespace {

struct Workspace {
    explicit Workspace(int threads) : num_threads(threads), scratch(threads) {}
    int num_threads;
    std::vector<Scratch> scratch;
    std::map<std::pair<int, int>, Plan> plans;  // by window and query heads; of the running step
    Partials partials;
    Buffers buffers;
    std::vector<Stage> stages;
};

}  // namespace

extern "C" {

struct StepCall {
    int64_t num_sequences, num_tokens;
    const int64_t* query_starts;
    const int64_t* context_lens;
    const int32_t* block_tables;
    int64_t block_table_stride;
    const int64_t* slot_mapping;
};

struct AttentionCall {
    StepCall step;
    const void *query, *key, *value;
    void* output;
    int64_t query_token_stride, query_head_stride, key_token_stride, key_head_stride, value_token_stride,
        value_head_stride;
    void *key_cache, *value_cache;
    int64_t block_stride, head_stride;
    int32_t inputs_are_float32, cache_is_float32, num_query_heads, num_kv_heads, head_size, block_size, window;
    float scale, softcap;
};

void* minivllm_create(int num_threads) { return new Workspace(num_threads); }

void minivllm_destroy(void* workspace) { delete (Workspace*)workspace; }

// To be called before the first layer of every step.
void minivllm_begin_step(void* workspace) { ((Workspace*)workspace)->plans.clear(); }

}  // extern "C"

namespace {

const Plan& plan_of(Workspace& workspace, const Layout& layout, const Heads& heads) {
    const std::pair<int, int> key{heads.window, heads.num_query_heads};
    auto found = workspace.plans.find(key);
    if (found == workspace.plans.end())
        found = workspace.plans.emplace(key, make_plan(layout, heads, workspace.num_threads)).first;
    return found->second;
}

template <typename Cache>
void attend(Workspace& workspace, const AttentionCall& call) {
    const Layout layout{(int)call.step.num_sequences, call.step.query_starts, call.step.context_lens,
                        call.step.block_tables, call.step.block_table_stride};
    const Heads heads{call.num_query_heads, call.num_kv_heads, call.scale, call.softcap, call.window};
    const CacheView cache{call.key_cache,   call.value_cache, call.block_stride,
                          call.head_stride, call.block_size,  call.head_size};
    const bool is_float32 = call.inputs_are_float32 != 0;
    const Queries queries{call.query, call.query_token_stride, call.query_head_stride, call.output, is_float32};
    const Plan& plan = plan_of(workspace, layout, heads);
    for (Scratch& scratch : workspace.scratch) scratch.reserve(cache.head_size);
    workspace.partials.reserve(plan, workspace.scratch[0].padded_size);
    workspace.partials.start(1);

    const ptrdiff_t width = is_float32 ? 4 : 2;
    Stage writing, attending;
#pragma omp parallel num_threads(workspace.num_threads)
    {
        share(writing, call.step.num_tokens, 8, [&](int64_t token) {
            for (int head = 0; head < heads.num_kv_heads; ++head)
                write_token<Cache>(
                    cache, call.step.slot_mapping[token], head,
                    (const char*)call.key + (token * call.key_token_stride + head * call.key_head_stride) * width,
                    (const char*)call.value + (token * call.value_token_stride + head * call.value_head_stride) * width,
                    is_float32);
        });
        Attention<Cache> attention{layout, heads, cache, queries, plan, workspace.partials, workspace.partials.counts(0),
                                   workspace.scratch[omp_get_thread_num()]};
        attention.run_all(attending);
    }
}

}  // namespace

extern "C" void minivllm_attention(void* workspace, const AttentionCall* call) {
    if (call->cache_is_float32)
        attend<Float32Cache>(*(Workspace*)workspace, *call);
    else
        attend<BFloat16Cache>(*(Workspace*)workspace, *call);
}

// ---- memory ----

// Touches all pages of `regions` times `region_bytes`, in a thread of its own; the caller goes on at once.
extern "C" void* minivllm_touch_pages(void* base, int64_t regions, int64_t region_bytes) {
    return new PageToucher((char*)base, regions, region_bytes);
}

extern "C" int32_t minivllm_are_touched(const void* toucher) { return ((const PageToucher*)toucher)->is_done(); }

// Returns when no page will be touched any more.
extern "C" void minivllm_stop_touching(void* toucher) { delete (PageToucher*)toucher; }

// ---- weights and products ----

// Packs w (rows, depth) float32. data: panels of `minivllm_panel_bytes`; scale: rounded up to whole panels; offset: the
// same for each of `minivllm_stretches`, zero.
// Returns the largest norm of a row in quantized units.
extern "C" float minivllm_pack(int32_t format, const float* weights, int64_t rows, int64_t depth, char* data,
                               float* scale, int32_t* offset, int32_t num_threads) {
    const int64_t panels = (rows + PANEL - 1) / PANEL, stretches = stretches_of((Format)format, depth);
    float norm = 0;
#pragma omp parallel for num_threads(num_threads) reduction(max : norm)
    for (int64_t panel = 0; panel < panels; ++panel) {
        float own = 0;
        pack_panel((Format)format, weights + panel * PANEL * depth, std::min<int64_t>(PANEL, rows - panel * PANEL),
                   depth, data + panel * panel_bytes((Format)format, depth), scale + panel * PANEL,
                   offset + panel * stretches * PANEL, &own);
        norm = std::max(norm, own);
    }
    return norm;
}

extern "C" int64_t minivllm_panel_bytes(int32_t format, int64_t depth) { return panel_bytes((Format)format, depth); }

extern "C" int64_t minivllm_stretches(int32_t format, int64_t depth) { return stretches_of((Format)format, depth); }

extern "C" int32_t minivllm_has_integer_dot() { return HAS_INTEGER_DOT; }

// Whether the CPU has a matrix unit, and the system lets us use it.
extern "C" int32_t minivllm_has_tiles() { return may_use_tiles(); }

extern "C" void minivllm_forbid_tiles() { tiles_are_forbidden = true; }

// out (rows, out_stride), `width` columns = input (rows, depth) float32, dense, times the matrix.
extern "C" void minivllm_linear(void* handle, const Linear* linear, const float* input, int64_t rows, float* out,
                                int64_t out_stride, int64_t width) {
    Workspace& workspace = *(Workspace*)handle;
    const int64_t stride = words_of(linear->format, linear->depth) + LANES;
    Buffer<uint32_t> words = make_buffer<uint32_t>((rows + TILE_BLOCK_ROWS) * stride);
    const int64_t scale_stride = stretches_of(linear->format, linear->depth);
    Buffer<float> scales = make_buffer<float>(rows * scale_stride);
    Stage packing, multiplying;
#pragma omp parallel num_threads(workspace.num_threads)
    {
        const TileScope tiles;
        share(packing, rows, 4, [&](int64_t row) {
            pack_row(linear->format, linear->largest_norm, input + row * linear->depth, linear->depth,
                     words.get() + row * stride, scales.get() + row * scale_stride);
        });
        multiply(*linear, Activations{words.get(), stride, scales.get(), scale_stride}, rows,
                 Target{Target::Store, out, out_stride, width}, multiplying, workspace.num_threads);
    }
}

namespace {

template <typename Cache>
void decode(Workspace& workspace, const Decoder& decoder, const StepCall& step, const int64_t* input_ids,
            const int64_t* positions, float* out) {
    const Layout layout{(int)step.num_sequences, step.query_starts, step.context_lens, step.block_tables,
                        step.block_table_stride};
    workspace.plans.clear();
    workspace.partials.joins = 0;
    for (Scratch& scratch : workspace.scratch) scratch.reserve((int)decoder.head_size);
    for (int64_t i = 0; i < decoder.num_layers; ++i) {
        const Heads heads{(int)decoder.num_query_heads, (int)decoder.num_kv_heads, 0, 0, (int)decoder.layers[i].window};
        workspace.partials.reserve(plan_of(workspace, layout, heads), workspace.scratch[0].padded_size);
    }
    workspace.partials.start(decoder.num_layers);
    workspace.buffers.reserve(decoder, step.num_tokens, workspace.num_threads);
    const size_t stages = decoder.num_layers * Worker::STAGES_PER_LAYER + Worker::STAGES_AROUND;
    if (workspace.stages.size() < stages) workspace.stages = std::vector<Stage>(stages);
    for (Stage& stage : workspace.stages) stage.reset();
#pragma omp parallel num_threads(workspace.num_threads)
    {
        const TileScope tiles;
        const int thread = omp_get_thread_num();
        Worker worker{decoder,           layout,
                      input_ids,         positions,
                      step.slot_mapping, step.num_tokens,
                      workspace.buffers, workspace.plans,
                      workspace.partials, workspace.scratch[thread],
                      workspace.buffers.row_of(thread), workspace.stages,
                      workspace.num_threads};
        worker.run<Cache>(out);
    }
}

}  // namespace

// out (T, hidden) float32: the last hidden states, after the final norm.
extern "C" void minivllm_decode(void* workspace, const Decoder* decoder, const StepCall* step, const int64_t* input_ids,
                                const int64_t* positions, float* out) {
    if (decoder->cache_is_float32)
        decode<Float32Cache>(*(Workspace*)workspace, *decoder, *step, input_ids, positions, out);
    else
        decode<BFloat16Cache>(*(Workspace*)workspace, *decoder, *step, input_ids, positions, out);
}
