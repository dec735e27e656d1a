// The whole decoder of a Llama-like model in one call: embedding, layers, final norm. One team of threads goes through
// all of it, and takes pieces of each stage as they come (`stage.hpp`), so that a core that something else disturbs does
// less instead of holding up the other. Activations are float32 between the products.
#pragma once

#include <omp.h>

#include <map>
#include <utility>
#include <vector>

#include "attention.hpp"
#include "gemm.hpp"

namespace minivllm {

struct Layer {
    Linear query_key_value, output, gate_up, down;
    const float* input_norm;       // (hidden)
    const float* attention_norm;   // (hidden), before the feed-forward part
    const float* query_norm;       // (head_size) or null
    const float* key_norm;
    void* key_cache;
    void* value_cache;
    int64_t window;                // 0: none
};

struct Decoder {
    const Layer* layers;
    const void* embedding;         // (vocabulary, hidden) bfloat16 or float32
    const float* final_norm;       // (hidden)
    const float* cosines;          // (positions, rotary_size / 2)
    const float* sines;
    int64_t num_layers, hidden_size, intermediate_size, num_query_heads, num_kv_heads, head_size, rotary_size;
    int64_t block_stride, head_stride, block_size;
    int32_t cache_is_float32, embedding_is_float32;
    float epsilon, scale;
};

// Memory of a step, kept from step to step.
struct Buffers {
    Buffer<float> states, projected, attended, activated, scales, rows;
    Buffer<uint32_t> words;
    int64_t capacity = 0;
    int64_t projected_stride = 0, word_stride = 0, scale_stride = 0;
    float* row_of(int thread) { return rows.get() + thread * word_stride; }
    void reserve(const Decoder& decoder, int64_t tokens, int threads) {
        if (tokens <= capacity) return;
        capacity = std::max<int64_t>(tokens, std::min<int64_t>(2 * capacity, 1024));
        const int64_t query_size = decoder.num_query_heads * decoder.head_size;
        projected_stride = query_size + 2 * decoder.num_kv_heads * decoder.head_size;
        // One line more than a power of two would be: rows of equal remainder fight for the same lines of the cache.
        word_stride = std::max({decoder.hidden_size, decoder.intermediate_size, query_size}) + LANES;
        scale_stride = word_stride / (2 * LANES) + 1;  // stretches are no shorter
        states = make_buffer<float>(capacity * decoder.hidden_size);
        projected = make_buffer<float>(capacity * projected_stride);
        attended = make_buffer<float>(capacity * query_size);
        activated = make_buffer<float>(capacity * decoder.intermediate_size);
        scales = make_buffer<float>(capacity * scale_stride);
        words = make_buffer<uint32_t>((capacity + TILE_BLOCK_ROWS) * word_stride);
        rows = make_buffer<float>(threads * word_stride);
    }
};

inline void normalize(const float* source, const float* weight, int64_t size, float epsilon, float* target) {
    f32x16 squares = {};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        const f32x16 x = load<f32x16>(source + i);
        squares += x * x;
    }
    float square = sum(squares);
    for (; i < size; ++i) square += source[i] * source[i];
    const float factor = 1.0f / std::sqrt(square / (float)size + epsilon);
    for (i = 0; i + LANES <= size; i += LANES)
        store(target + i, load<f32x16>(source + i) * splat(factor) * load<f32x16>(weight + i));
    for (; i < size; ++i) target[i] = source[i] * factor * weight[i];
}

// Turns the pairs (i, i + size / 2) of one head by the angles of its position.
inline void rotate(float* head, const float* cosines, const float* sines, int64_t size) {
    const int64_t half = size / 2;
    for (int64_t i = 0; i < half; ++i) {
        const float first = head[i], second = head[i + half];
        head[i] = first * cosines[i] - second * sines[i];
        head[i + half] = second * cosines[i] + first * sines[i];
    }
}

// One thread's way through the decoder.
struct Worker {
    const Decoder& decoder;
    const Layout& layout;
    const int64_t* input_ids;
    const int64_t* positions;
    const int64_t* slots;
    int64_t num_tokens;
    Buffers& buffers;
    const std::map<std::pair<int, int>, Plan>& plans;
    Partials& partials;
    Scratch& scratch;
    float* row_memory;              // of this thread
    std::vector<Stage>& stages;     // reset
    int num_threads;
    int stage = 0;

    static constexpr int STAGES_PER_LAYER = 10, STAGES_AROUND = 2;

    // Calls work(row) for all rows, shared between the threads.
    template <typename Work>
    void for_rows(Work work) {
        const int64_t run = std::max<int64_t>(1, std::min<int64_t>(16, num_tokens / (2 * num_threads)));
        share(stages[stage++], num_tokens, run, work);
    }

    void pack(const Linear& linear, const float* source, int64_t stride, const float* norm) {
        for_rows([&](int64_t row) {
            const float* values = source + row * stride;
            if (norm != nullptr) {
                normalize(values, norm, linear.depth, decoder.epsilon, row_memory);
                values = row_memory;
            }
            pack_row(linear.format, linear.largest_norm, values, linear.depth,
                     buffers.words.get() + row * buffers.word_stride,
                     buffers.scales.get() + row * buffers.scale_stride);
        });
    }

    void product(const Linear& linear, Target::Kind kind, float* out, int64_t stride, int64_t width) {
        const Activations input{buffers.words.get(), buffers.word_stride, buffers.scales.get(), buffers.scale_stride};
        multiply(linear, input, num_tokens, Target{kind, out, stride, width}, stages[stage++], num_threads);
    }

    void embed() {
        for_rows([&](int64_t row) {
            const int64_t first = input_ids[row] * decoder.hidden_size;
            float* target = buffers.states.get() + row * decoder.hidden_size;
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

    // Rotates queries and keys, writes keys and values.
    template <typename Cache>
    void place(const Layer& layer) {
        const CacheView cache = cache_of(layer);
        const int64_t size = decoder.head_size, heads = decoder.num_query_heads, kv_heads = decoder.num_kv_heads;
        for_rows([&](int64_t row) {
            float* head = buffers.projected.get() + row * buffers.projected_stride;
            const int64_t angle = positions[row] * (decoder.rotary_size / 2);
            for (int64_t i = 0; i < heads + kv_heads; ++i) {
                const float* norm = i < heads ? layer.query_norm : layer.key_norm;
                if (norm != nullptr) normalize(head + i * size, norm, size, decoder.epsilon, head + i * size);
                rotate(head + i * size, decoder.cosines + angle, decoder.sines + angle, decoder.rotary_size);
            }
            const float* key = head + heads * size;
            const float* value = key + kv_heads * size;
            for (int64_t i = 0; i < kv_heads; ++i)
                write_token<Cache>(cache, slots[row], (int)i, key + i * size, value + i * size, true);
        });
    }

    template <typename Cache>
    void attend(const Layer& layer, int64_t index) {
        const Heads heads{(int)decoder.num_query_heads, (int)decoder.num_kv_heads, decoder.scale, 0.0f,
                          (int)layer.window};
        const CacheView cache = cache_of(layer);
        const Queries queries{buffers.projected.get(), buffers.projected_stride, decoder.head_size,
                              buffers.attended.get(), true};
        const Plan& plan = plans.at({heads.window, heads.num_query_heads});
        Attention<Cache> attention{layout, heads, cache, queries, plan, partials, partials.counts(index), scratch};
        attention.run_all(stages[stage++]);
    }

    template <typename Cache>
    void run_layer(const Layer& layer, int64_t index) {
        const int64_t hidden = decoder.hidden_size, query_size = decoder.num_query_heads * decoder.head_size;
        float* states = buffers.states.get();
        pack(layer.query_key_value, states, hidden, layer.input_norm);
        product(layer.query_key_value, Target::Store, buffers.projected.get(), buffers.projected_stride,
                buffers.projected_stride);
        place<Cache>(layer);
        attend<Cache>(layer, index);
        pack(layer.output, buffers.attended.get(), query_size, nullptr);
        product(layer.output, Target::Add, states, hidden, hidden);
        pack(layer.gate_up, states, hidden, layer.attention_norm);
        product(layer.gate_up, Target::Gate, buffers.activated.get(), decoder.intermediate_size,
                decoder.intermediate_size);
        pack(layer.down, buffers.activated.get(), decoder.intermediate_size, nullptr);
        product(layer.down, Target::Add, states, hidden, hidden);
    }

    template <typename Cache>
    void run(float* out) {
        embed();
        for (int64_t i = 0; i < decoder.num_layers; ++i) run_layer<Cache>(decoder.layers[i], i);
        for_rows([&](int64_t row) {
            normalize(buffers.states.get() + row * decoder.hidden_size, decoder.final_norm, decoder.hidden_size,
                      decoder.epsilon, out + row * decoder.hidden_size);
        });
    }
};

}  // namespace minivllm
