// C functions that Python calls through ctypes. Functions and structures are mirrored in `bindings.py`.
#include <omp.h>

#include "decoder.hpp"
#include "prefault.hpp"

using namespace minivllm;

namespace {

// Memory and plans that calls reuse. Used by one caller at a time.
struct Workspace {
    explicit Workspace(int threads) : num_threads(threads), scratch(threads) {}
    int num_threads;
    std::vector<AttentionScratch> scratch;               // by thread
    std::map<std::pair<int, int>, AttentionPlan> plans;  // of the current step, by window and number of query heads
    SplitPartials partials;
    DecoderBuffers buffers;
    std::vector<LoopBarrier> barriers;
};

}  // namespace

extern "C" {

// One layer's attention. Strides are in elements; the last dimension is dense.
struct AttentionCall {
    AttentionMetadata metadata;
    const void *query, *key, *value;  // (T, heads, head_size)
    void* output;                     // (T, query heads, head_size), dense
    int64_t query_token_stride, query_head_stride, key_token_stride, key_head_stride, value_token_stride,
        value_head_stride;
    void *key_cache, *value_cache;    // (blocks, KV heads, block_size, head_size)
    int64_t block_stride, head_stride;
    int32_t inputs_are_float32, cache_is_float32, num_query_heads, num_kv_heads, head_size, block_size, window;
    float scale, softcap;
};

void* minivllm_create_workspace(int32_t num_threads) { return new Workspace(num_threads); }

void minivllm_destroy_workspace(void* workspace) { delete (Workspace*)workspace; }

// Discards the plans of the previous step. Called before the first `minivllm_attention` of a step.
void minivllm_begin_step(void* workspace) { ((Workspace*)workspace)->plans.clear(); }

}  // extern "C"

// ---- attention ----

namespace {

const AttentionPlan& plan_of(Workspace& workspace, const AttentionMetadata& metadata, const AttentionParams& params) {
    const std::pair<int, int> key{params.window, params.num_query_heads};
    auto found = workspace.plans.find(key);
    if (found == workspace.plans.end())
        found = workspace.plans.emplace(key, plan_attention(metadata, params, workspace.num_threads)).first;
    return found->second;
}

template <typename Cache>
void attend(Workspace& workspace, const AttentionCall& call) {
    const AttentionMetadata& metadata = call.metadata;
    const AttentionParams params{call.num_query_heads, call.num_kv_heads, call.scale, call.softcap, call.window};
    const CacheView cache{call.key_cache,   call.value_cache, call.block_stride,
                          call.head_stride, call.block_size,  call.head_size};
    const bool is_float32 = call.inputs_are_float32 != 0;
    const QueryView queries{call.query, call.query_token_stride, call.query_head_stride, call.output, is_float32};
    const AttentionPlan& plan = plan_of(workspace, metadata, params);
    for (AttentionScratch& scratch : workspace.scratch) scratch.reserve(cache.head_size);
    workspace.partials.reserve(plan, workspace.scratch[0].padded_size);
    workspace.partials.reset_counters(1);

    const ptrdiff_t element_size = is_float32 ? 4 : 2;
    const char *keys = (const char*)call.key, *values = (const char*)call.value;
    LoopBarrier writing, attending;
#pragma omp parallel num_threads(workspace.num_threads)
    {
        parallel_for(writing, metadata.num_tokens, 8, [&](int64_t token) {
            for (int head = 0; head < params.num_kv_heads; ++head)
                write_kv<Cache>(
                    cache, metadata.slot_mapping[token], head,
                    keys + (token * call.key_token_stride + head * call.key_head_stride) * element_size,
                    values + (token * call.value_token_stride + head * call.value_head_stride) * element_size,
                    is_float32);
        });
        Attention<Cache> attention{metadata, params, cache, queries, plan, workspace.partials,
                                   workspace.partials.counters_of(0), workspace.scratch[omp_get_thread_num()]};
        attention.run_all(attending);
    }
}

}  // namespace

// Writes K and V of the step's tokens to their slots, then attends.
extern "C" void minivllm_attention(void* workspace, const AttentionCall* call) {
    if (call->cache_is_float32)
        attend<Float32Cache>(*(Workspace*)workspace, *call);
    else
        attend<BFloat16Cache>(*(Workspace*)workspace, *call);
}

// ---- prefaulting ----

// Starts to prefault `num_regions` adjacent regions of `region_bytes` in a background thread.
extern "C" void* minivllm_prefault(void* base, int64_t num_regions, int64_t region_bytes) {
    return new Prefaulter((char*)base, num_regions, region_bytes);
}

extern "C" int32_t minivllm_prefault_is_done(const void* prefaulter) {
    return ((const Prefaulter*)prefaulter)->is_done();
}

// Stops the thread; it accesses no memory after this returns.
extern "C" void minivllm_stop_prefault(void* prefaulter) { delete (Prefaulter*)prefaulter; }

// ---- GEMM ----

// Packs w (rows, depth) float32 into data (panels, `minivllm_panel_bytes`), scale (panels, PANEL_WIDTH) and
// compensation (panels, `minivllm_num_segments`, PANEL_WIDTH), which must be zero. Returns PackedLinear::max_norm.
extern "C" float minivllm_pack(int32_t format, const float* weights, int64_t rows, int64_t depth, char* data,
                               float* scale, int32_t* compensation, int32_t num_threads) {
    const NumberFormat number_format = (NumberFormat)format;
    const int64_t panels = (rows + PANEL_WIDTH - 1) / PANEL_WIDTH, segments = num_segments(number_format, depth);
    float max_norm = 0;
#pragma omp parallel for num_threads(num_threads) reduction(max : max_norm)
    for (int64_t panel = 0; panel < panels; ++panel) {
        float panel_norm = 0;
        pack_panel(number_format, weights + panel * PANEL_WIDTH * depth,
                   std::min<int64_t>(PANEL_WIDTH, rows - panel * PANEL_WIDTH), depth,
                   data + panel * panel_bytes(number_format, depth), scale + panel * PANEL_WIDTH,
                   compensation + panel * segments * PANEL_WIDTH, &panel_norm);
        max_norm = std::max(max_norm, panel_norm);
    }
    return max_norm;
}

extern "C" int64_t minivllm_panel_bytes(int32_t format, int64_t depth) {
    return panel_bytes((NumberFormat)format, depth);
}

extern "C" int64_t minivllm_num_segments(int32_t format, int64_t depth) {
    return num_segments((NumberFormat)format, depth);
}

extern "C" int32_t minivllm_has_integer_dot() { return HAS_INTEGER_DOT; }

// Returns whether the CPU has AMX and the operating system permits its use.
extern "C" int32_t minivllm_has_amx() { return amx_is_available(); }

extern "C" void minivllm_disable_amx() { amx_is_disabled = true; }

// out (rows, out_stride), `width` columns = input (rows, depth) float32, dense, times the weight, plus the bias.
extern "C" void minivllm_gemm(void* handle, const PackedLinear* linear, const float* input, int64_t rows, float* out,
                              int64_t out_stride, int64_t width) {
    Workspace& workspace = *(Workspace*)handle;
    const int64_t stride = num_words(linear->format, linear->depth) + LANES;
    Buffer<uint32_t> words = make_buffer<uint32_t>((rows + AMX_MICRO_ROWS) * stride);
    const int64_t scale_stride = num_segments(linear->format, linear->depth);
    Buffer<float> scales = make_buffer<float>(rows * scale_stride);
    LoopBarrier packing, multiplying;
#pragma omp parallel num_threads(workspace.num_threads)
    {
        const AmxScope amx;
        parallel_for(packing, rows, 4, [&](int64_t row) {
            pack_row(linear->format, linear->max_norm, input + row * linear->depth, linear->depth,
                     words.get() + row * stride, scales.get() + row * scale_stride);
        });
        gemm(*linear, PackedActivations{words.get(), stride, scales.get(), scale_stride}, rows,
             Epilogue{Epilogue::Store, out, out_stride, width}, multiplying, workspace.num_threads);
    }
}

// ---- decoder ----

namespace {

template <typename Cache>
void run_forward(Workspace& workspace, const Decoder& decoder, const AttentionMetadata& metadata,
                 const int64_t* input_ids, const int64_t* positions, float* output) {
    workspace.plans.clear();
    workspace.partials.num_reductions = 0;
    for (AttentionScratch& scratch : workspace.scratch) scratch.reserve((int)decoder.head_size);
    for (int64_t i = 0; i < decoder.num_layers; ++i) {
        const AttentionParams params{(int)decoder.num_query_heads, (int)decoder.num_kv_heads, 0, 0,
                                     (int)decoder.layers[i].window};
        workspace.partials.reserve(plan_of(workspace, metadata, params), workspace.scratch[0].padded_size);
    }
    workspace.partials.reset_counters(decoder.num_layers);
    workspace.buffers.reserve(decoder, metadata.num_tokens, workspace.num_threads);
    const size_t num_barriers =
        decoder.num_layers * ForwardPass::BARRIERS_PER_LAYER + ForwardPass::BARRIERS_AROUND_LAYERS;
    if (workspace.barriers.size() < num_barriers) workspace.barriers = std::vector<LoopBarrier>(num_barriers);
    for (LoopBarrier& barrier : workspace.barriers) barrier.reset();
#pragma omp parallel num_threads(workspace.num_threads)
    {
        const AmxScope amx;
        const int thread = omp_get_thread_num();
        ForwardPass pass{decoder,
                         metadata,
                         input_ids,
                         positions,
                         workspace.buffers,
                         workspace.plans,
                         workspace.partials,
                         workspace.scratch[thread],
                         workspace.buffers.normalized_row(thread),
                         workspace.barriers,
                         workspace.num_threads};
        pass.run<Cache>(output);
    }
}

}  // namespace

// output (T, hidden) float32: the hidden states after the final norm. Writes K and V of the tokens to the cache.
extern "C" void minivllm_forward(void* workspace, const Decoder* decoder, const AttentionMetadata* metadata,
                                 const int64_t* input_ids, const int64_t* positions, float* output) {
    if (decoder->cache_is_float32)
        run_forward<Float32Cache>(*(Workspace*)workspace, *decoder, *metadata, input_ids, positions, output);
    else
        run_forward<BFloat16Cache>(*(Workspace*)workspace, *decoder, *metadata, input_ids, positions, output);
}
