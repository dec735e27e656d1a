// Forward pass of a Llama-like decoder in one call: embedding, layers, final norm. It runs in one OpenMP parallel
// region; each operator is a parallel loop with its own barrier (`barrier.hpp`). Activations between the operators are
// float32.
#pragma once

#include <omp.h>

#include <map>
#include <utility>
#include <vector>

#include "attention.hpp"
#include "gemm.hpp"

namespace minivllm {

// Weights and KV cache of one decoder layer. Names as in transformers.
struct Layer {
    PackedLinear qkv_proj, o_proj, gate_up_proj, down_proj;  // gate_up_proj: 16 gate and 16 up columns per panel
    const float* input_layernorm;           // (hidden)
    const float* post_attention_layernorm;  // (hidden)
    const float* q_norm;                    // (head_size) or null
    const float* k_norm;
    void* key_cache;
    void* value_cache;
    int64_t window;                         // 0: no sliding window
};

struct Decoder {
    const Layer* layers;
    const void* embedding;    // (vocabulary, hidden) bfloat16 or float32
    const float* final_norm;  // (hidden)
    const float* rope_cos;    // (positions, rotary_size / 2)
    const float* rope_sin;
    int64_t num_layers, hidden_size, intermediate_size, num_query_heads, num_kv_heads, head_size, rotary_size;
    int64_t block_stride, head_stride, block_size;  // of the KV cache, in elements
    int32_t cache_is_float32, embedding_is_float32;
    float epsilon, scale;
};

// Activations of a step of up to `capacity` tokens, reused by later steps.
struct DecoderBuffers {
    Buffer<float> hidden_states;     // (capacity, hidden): the residual stream
    Buffer<float> qkv;               // (capacity, qkv_stride)
    Buffer<float> attention_output;  // (capacity, query heads * head_size)
    Buffer<float> intermediate;      // (capacity, intermediate_size)
    Buffer<uint32_t> words;          // (capacity + AMX_MICRO_ROWS, word_stride): packed input of the running GEMM
    Buffer<float> scales;            // (capacity, scale_stride), likewise
    Buffer<float> normalized;        // (threads, word_stride)
    int64_t capacity = 0;
    int64_t qkv_stride = 0, word_stride = 0, scale_stride = 0;
    float* normalized_row(int thread) { return normalized.get() + thread * word_stride; }
    void reserve(const Decoder& decoder, int64_t tokens, int threads) {
        if (tokens <= capacity) return;
        capacity = std::max<int64_t>(tokens, std::min<int64_t>(2 * capacity, 1024));
        const int64_t query_size = decoder.num_query_heads * decoder.head_size;
        qkv_stride = query_size + 2 * decoder.num_kv_heads * decoder.head_size;
        // One cache line more than a power of two, so that rows do not map to the same cache sets.
        word_stride = std::max({decoder.hidden_size, decoder.intermediate_size, query_size}) + LANES;
        scale_stride = word_stride / (2 * LANES) + 1;  // segments are at least 2 * LANES long
        hidden_states = make_buffer<float>(capacity * decoder.hidden_size);
        qkv = make_buffer<float>(capacity * qkv_stride);
        attention_output = make_buffer<float>(capacity * query_size);
        intermediate = make_buffer<float>(capacity * decoder.intermediate_size);
        scales = make_buffer<float>(capacity * scale_stride);
        words = make_buffer<uint32_t>((capacity + AMX_MICRO_ROWS) * word_stride);
        normalized = make_buffer<float>(threads * word_stride);
    }
};

// target = source / sqrt(mean(source^2) + epsilon) * weight.
inline void rms_norm(const float* source, const float* weight, int64_t size, float epsilon, float* target) {
    f32x16 square_lanes = {};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        const f32x16 x = load<f32x16>(source + i);
        square_lanes += x * x;
    }
    float sum_squares = reduce_sum(square_lanes);
    for (; i < size; ++i) sum_squares += source[i] * source[i];
    const float factor = 1.0f / std::sqrt(sum_squares / (float)size + epsilon);
    for (i = 0; i + LANES <= size; i += LANES)
        store(target + i, load<f32x16>(source + i) * splat(factor) * load<f32x16>(weight + i));
    for (; i < size; ++i) target[i] = source[i] * factor * weight[i];
}

// Rotates the pairs (i, i + size / 2) of one head by the angles of its position (RoPE, NeoX style).
inline void apply_rope(float* head, const float* cos, const float* sin, int64_t size) {
    const int64_t half = size / 2;
    for (int64_t i = 0; i < half; ++i) {
        const float first = head[i], second = head[i + half];
        head[i] = first * cos[i] - second * sin[i];
        head[i + half] = second * cos[i] + first * sin[i];
    }
}

// The forward pass as one thread of the region runs it. All threads call the same operators in the same order.
struct ForwardPass {
    const Decoder& decoder;
    const AttentionMetadata& metadata;
    const int64_t* input_ids;  // (T)
    const int64_t* positions;  // (T)
    DecoderBuffers& buffers;
    const std::map<std::pair<int, int>, AttentionPlan>& plans;  // by window and number of query heads
    SplitPartials& partials;
    AttentionScratch& scratch;           // of this thread
    float* normalized_row;               // of this thread
    std::vector<LoopBarrier>& barriers;  // reset
    int num_threads;
    int next_barrier = 0;

    static constexpr int BARRIERS_PER_LAYER = 10, BARRIERS_AROUND_LAYERS = 2;

    // Calls body(token) for all tokens, shared with the other threads.
    template <typename Body>
    void for_each_token(Body body) {
        const int64_t num_tokens = metadata.num_tokens;
        const int64_t grain_size = std::max<int64_t>(1, std::min<int64_t>(16, num_tokens / (2 * num_threads)));
        parallel_for(barriers[next_barrier++], num_tokens, grain_size, body);
    }

    // Packs the input of a GEMM, after RMSNorm if `norm` is not null.
    void pack_input(const PackedLinear& linear, const float* source, int64_t stride, const float* norm) {
        for_each_token([&](int64_t token) {
            const float* row = source + token * stride;
            if (norm != nullptr) {
                rms_norm(row, norm, linear.depth, decoder.epsilon, normalized_row);
                row = normalized_row;
            }
            pack_row(linear.format, linear.max_norm, row, linear.depth,
                     buffers.words.get() + token * buffers.word_stride,
                     buffers.scales.get() + token * buffers.scale_stride);
        });
    }

    void multiply(const PackedLinear& linear, Epilogue::Kind kind, float* out, int64_t width) {
        const PackedActivations input{buffers.words.get(), buffers.word_stride, buffers.scales.get(),
                                      buffers.scale_stride};
        gemm(linear, input, metadata.num_tokens, Epilogue{kind, out, width, width}, barriers[next_barrier++],
             num_threads);
    }

    void embed() {
        for_each_token([&](int64_t token) {
            const int64_t first = input_ids[token] * decoder.hidden_size;
            float* target = buffers.hidden_states.get() + token * decoder.hidden_size;
            for (int64_t i = 0; i < decoder.hidden_size; ++i)
                target[i] = decoder.embedding_is_float32
                                ? ((const float*)decoder.embedding)[first + i]
                                : from_bfloat16(((const uint16_t*)decoder.embedding)[first + i]);
        });
    }

    CacheView cache_of(const Layer& layer) const {
        return {layer.key_cache,     layer.value_cache,        decoder.block_stride,
                decoder.head_stride, (int)decoder.block_size, (int)decoder.head_size};
    }

    // Applies the head norms and RoPE to queries and keys in place, and writes K and V to the cache.
    template <typename Cache>
    void rotate_and_write_kv(const Layer& layer) {
        const CacheView cache = cache_of(layer);
        const int64_t size = decoder.head_size, heads = decoder.num_query_heads, kv_heads = decoder.num_kv_heads;
        for_each_token([&](int64_t token) {
            float* head = buffers.qkv.get() + token * buffers.qkv_stride;
            const int64_t rope_row = positions[token] * (decoder.rotary_size / 2);
            for (int64_t i = 0; i < heads + kv_heads; ++i) {
                const float* norm = i < heads ? layer.q_norm : layer.k_norm;
                if (norm != nullptr) rms_norm(head + i * size, norm, size, decoder.epsilon, head + i * size);
                apply_rope(head + i * size, decoder.rope_cos + rope_row, decoder.rope_sin + rope_row,
                           decoder.rotary_size);
            }
            const float* key = head + heads * size;
            const float* value = key + kv_heads * size;
            for (int64_t i = 0; i < kv_heads; ++i)
                write_kv<Cache>(cache, metadata.slot_mapping[token], (int)i, key + i * size, value + i * size, true);
        });
    }

    template <typename Cache>
    void attend(const Layer& layer, int64_t index) {
        const AttentionParams params{(int)decoder.num_query_heads, (int)decoder.num_kv_heads, decoder.scale, 0.0f,
                                     (int)layer.window};
        const CacheView cache = cache_of(layer);
        const QueryView queries{buffers.qkv.get(), buffers.qkv_stride, decoder.head_size,
                                buffers.attention_output.get(), true};
        const AttentionPlan& plan = plans.at({params.window, params.num_query_heads});
        Attention<Cache> attention{metadata, params, cache, queries, plan, partials, partials.counters_of(index),
                                   scratch};
        attention.run_all(barriers[next_barrier++]);
    }

    template <typename Cache>
    void run_layer(const Layer& layer, int64_t index) {
        const int64_t hidden = decoder.hidden_size, query_size = decoder.num_query_heads * decoder.head_size;
        float* hidden_states = buffers.hidden_states.get();
        float* attention_output = buffers.attention_output.get();
        float* intermediate = buffers.intermediate.get();
        pack_input(layer.qkv_proj, hidden_states, hidden, layer.input_layernorm);
        multiply(layer.qkv_proj, Epilogue::Store, buffers.qkv.get(), buffers.qkv_stride);
        rotate_and_write_kv<Cache>(layer);
        attend<Cache>(layer, index);
        pack_input(layer.o_proj, attention_output, query_size, nullptr);
        multiply(layer.o_proj, Epilogue::AddResidual, hidden_states, hidden);
        pack_input(layer.gate_up_proj, hidden_states, hidden, layer.post_attention_layernorm);
        multiply(layer.gate_up_proj, Epilogue::SiluMul, intermediate, decoder.intermediate_size);
        pack_input(layer.down_proj, intermediate, decoder.intermediate_size, nullptr);
        multiply(layer.down_proj, Epilogue::AddResidual, hidden_states, hidden);
    }

    // output (T, hidden): the hidden states after the final norm.
    template <typename Cache>
    void run(float* output) {
        embed();
        for (int64_t i = 0; i < decoder.num_layers; ++i) run_layer<Cache>(decoder.layers[i], i);
        for_each_token([&](int64_t token) {
            rms_norm(buffers.hidden_states.get() + token * decoder.hidden_size, decoder.final_norm,
                     decoder.hidden_size, decoder.epsilon, output + token * decoder.hidden_size);
        });
    }
};

}  // namespace minivllm
