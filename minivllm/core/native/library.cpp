// The functions that Python calls, by ctypes. Structures mirror those in `bindings.py`.
#include <omp.h>

#include "attention.hpp"

using namespace minivllm;

namespace {

struct Workspace {
    explicit Workspace(int threads) : num_threads(threads), scratch(threads) {}
    int num_threads;
    std::vector<Scratch> scratch;
    std::map<std::pair<int, int>, Plan> plans;  // by window and query heads; of the running step
    Partials partials;
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

    const ptrdiff_t width = is_float32 ? 4 : 2;
    std::atomic<int> counter{0};
#pragma omp parallel num_threads(workspace.num_threads)
    {
#pragma omp for schedule(static)
        for (int64_t token = 0; token < call.step.num_tokens; ++token)
            for (int head = 0; head < heads.num_kv_heads; ++head)
                write_token<Cache>(
                    cache, call.step.slot_mapping[token], head,
                    (const char*)call.key + (token * call.key_token_stride + head * call.key_head_stride) * width,
                    (const char*)call.value + (token * call.value_token_stride + head * call.value_head_stride) * width,
                    is_float32);
        Attention<Cache> attention{layout, heads, cache, queries, plan, workspace.partials,
                                   workspace.scratch[omp_get_thread_num()]};
        attention.run_all(counter);
    }
}

}  // namespace

extern "C" void minivllm_attention(void* workspace, const AttentionCall* call) {
    if (call->cache_is_float32)
        attend<Float32Cache>(*(Workspace*)workspace, *call);
    else
        attend<BFloat16Cache>(*(Workspace*)workspace, *call);
}
