// Micro-kernels of attention for a few rows and one KV chunk: S = q . K^T, online softmax, O += P . V.
#pragma once

#include <algorithm>
#include <cmath>

#include "kv_layout.hpp"

namespace minivllm {

constexpr float NEGATIVE_INFINITY = -INFINITY;

// scores (ROWS, KV_CHUNK) = query (ROWS, padded_size) . K^T for the first PANELS panels of a chunk. The query is
// already scaled. With PREFETCH it also prefetches the keys of the chunk `next`, and `accumulate_pv` its values: memory
// reads overlap with both products.
template <typename Cache, int ROWS, int PANELS, bool PREFETCH>
inline __attribute__((noinline)) void multiply_qk(const float* query, int padded_size,
                                                  const typename Cache::Element* const (&panels)[CHUNK_PANELS],
                                                  const typename Cache::Element* const (&next)[CHUNK_PANELS],
                                                  float* scores) {
    constexpr int PAIR = Cache::PAIR;
    f32x16 sums[ROWS][PANELS] = {};
    const int steps = padded_size / PAIR;
    for (int step = 0; step < steps; ++step) {
        const ptrdiff_t offset = (ptrdiff_t)step * KV_PANEL * PAIR;
        if (PREFETCH) {
#pragma GCC unroll 4
            for (int panel = 0; panel < CHUNK_PANELS; ++panel) prefetch_l1(next[panel] + offset);
        }
#pragma GCC unroll 2
        for (int part = 0; part < PAIR; ++part) {
            f32x16 keys[PANELS];
#pragma GCC unroll 4
            for (int panel = 0; panel < PANELS; ++panel) keys[panel] = Cache::widen(panels[panel] + offset, part);
#pragma GCC unroll 6
            for (int row = 0; row < ROWS; ++row) {
                const f32x16 factor = splat(query[row * padded_size + step * PAIR + part]);
#pragma GCC unroll 4
                for (int panel = 0; panel < PANELS; ++panel) sums[row][panel] += factor * keys[panel];
            }
        }
    }
#pragma GCC unroll 6
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 4
        for (int panel = 0; panel < PANELS; ++panel)
            store(scores + row * KV_CHUNK + panel * KV_PANEL, sums[row][panel]);
}

// output[row] = output[row] * rescale[row] + sum of weights[row][key] * V[key] over the first `num_keys` keys of a
// chunk, for the VECTORS * LANES dimensions from `column` on.
template <typename Cache, int ROWS, int VECTORS, bool PREFETCH>
inline void accumulate_pv_columns(const float* weights, const float* rescale, int num_keys,
                                  const typename Cache::Element* const (&panels)[CHUNK_PANELS],
                                  const typename Cache::Element* const (&next)[CHUNK_PANELS], int padded_size,
                                  int column, float* output) {
    constexpr int PAIR = Cache::PAIR;
    f32x16 sums[ROWS][VECTORS];
#pragma GCC unroll 6
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 4
        for (int vector = 0; vector < VECTORS; ++vector)
            sums[row][vector] =
                load<f32x16>(output + row * padded_size + column + vector * LANES) * splat(rescale[row]);
    const int full_pairs = num_keys / PAIR;
    for (int pair = 0; pair < full_pairs; ++pair) {
        const ptrdiff_t offset = ((ptrdiff_t)(pair % (KV_PANEL / PAIR)) * padded_size + column) * PAIR;
        const typename Cache::Element* source = panels[pair * PAIR / KV_PANEL] + offset;
        if (PREFETCH) {
#pragma GCC unroll 4
            for (int vector = 0; vector < VECTORS; ++vector)
                prefetch_l1(next[pair * PAIR / KV_PANEL] + offset + vector * LANES * PAIR);
        }
#pragma GCC unroll 2
        for (int part = 0; part < PAIR; ++part) {
            f32x16 values[VECTORS];
#pragma GCC unroll 4
            for (int vector = 0; vector < VECTORS; ++vector)
                values[vector] = Cache::widen(source + vector * LANES * PAIR, part);
#pragma GCC unroll 6
            for (int row = 0; row < ROWS; ++row) {
                const f32x16 factor = splat(weights[row * KV_CHUNK + pair * PAIR + part]);
#pragma GCC unroll 4
                for (int vector = 0; vector < VECTORS; ++vector) sums[row][vector] += factor * values[vector];
            }
        }
    }
    if (full_pairs * PAIR < num_keys) {
        // The odd slot of the last pair is unwritten and may hold NaN, which a weight of 0 would not cancel.
        const int key = num_keys - 1;
        const typename Cache::Element* source =
            panels[key / KV_PANEL] + ((ptrdiff_t)(key % KV_PANEL / PAIR) * padded_size + column) * PAIR;
        for (int vector = 0; vector < VECTORS; ++vector) {
            const f32x16 values = Cache::widen(source + vector * LANES * PAIR, 0);
            for (int row = 0; row < ROWS; ++row) sums[row][vector] += splat(weights[row * KV_CHUNK + key]) * values;
        }
    }
#pragma GCC unroll 6
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 4
        for (int vector = 0; vector < VECTORS; ++vector)
            store(output + row * padded_size + column + vector * LANES, sums[row][vector]);
}

// `accumulate_pv_columns` over all padded_size dimensions.
template <typename Cache, int ROWS, bool PREFETCH>
inline __attribute__((noinline)) void accumulate_pv(const float* weights, const float* rescale, int num_keys,
                                                    const typename Cache::Element* const (&panels)[CHUNK_PANELS],
                                                    const typename Cache::Element* const (&next)[CHUNK_PANELS],
                                                    int padded_size, float* output) {
    int column = 0;
    for (; column + 4 * LANES <= padded_size; column += 4 * LANES)
        accumulate_pv_columns<Cache, ROWS, 4, PREFETCH>(weights, rescale, num_keys, panels, next, padded_size, column,
                                                        output);
    if (column + 2 * LANES <= padded_size) {
        accumulate_pv_columns<Cache, ROWS, 2, PREFETCH>(weights, rescale, num_keys, panels, next, padded_size, column,
                                                        output);
        column += 2 * LANES;
    }
    if (column < padded_size)
        accumulate_pv_columns<Cache, ROWS, 1, PREFETCH>(weights, rescale, num_keys, panels, next, padded_size, column,
                                                        output);
}

// One step of the online softmax for one row: replaces the scores of PANELS panels by weights 2^(score - row_max).
// Scores include the factor log2(e); with a softcap they become softcap * log2(e) * tanh(score) first. If `masked`,
// keys outside first .. last of the chunk get weight 0. Updates the running maximum `row_max` and the sum of weights
// per lane, `row_sums` (LANES); the sum over lanes is needed only at the end of the row. Returns 2^(previous_max -
// row_max), by which the caller rescales the output accumulated so far.
template <int PANELS>
inline float online_softmax(float* scores, int first, int last, bool masked, float softcap, float& row_max,
                            float* row_sums) {
    f32x16 row[PANELS];
#pragma GCC unroll 4
    for (int panel = 0; panel < PANELS; ++panel) {
        row[panel] = load<f32x16>(scores + panel * KV_PANEL);
        if (softcap > 0) row[panel] = splat(softcap * LOG2_E) * tanh(row[panel]);
        if (masked) {
            i32x16 key = lane_indices() + panel * KV_PANEL;
            row[panel] = ((key >= first) & (key < last)) ? row[panel] : splat(NEGATIVE_INFINITY);
        }
    }
    f32x16 lane_max = row[0];
#pragma GCC unroll 4
    for (int panel = 1; panel < PANELS; ++panel) lane_max = maximum(lane_max, row[panel]);
    float factor = 1.0f;
    f32x16 total = load<f32x16>(row_sums);
    if (any_greater(lane_max, splat(row_max))) {
        const float previous_max = row_max;
        row_max = reduce_max(lane_max);
        factor = exp2(splat(previous_max - row_max))[0];  // 0 for the first scores
        total *= splat(factor);
    }
    const f32x16 shift = splat(row_max == NEGATIVE_INFINITY ? 0.0f : row_max);
#pragma GCC unroll 4
    for (int panel = 0; panel < PANELS; ++panel) {
        f32x16 weights = exp2(row[panel] - shift);
        total += weights;
        store(scores + panel * KV_PANEL, weights);
    }
    store(row_sums, total);
    return factor;
}

}  // namespace minivllm
