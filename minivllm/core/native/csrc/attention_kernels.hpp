// The innermost loops of attention: scores of a group of rows, softmax, weighted sum.
#pragma once

#include <algorithm>
#include <cmath>

#include "kv_layout.hpp"

namespace minivllm {

constexpr float NO_SCORE = -INFINITY;

// Scores of ROWS rows against the keys of TILES tiles, not scaled beyond what the query is. With FETCH, what lies at
// `next` is brought into the cache meanwhile: the keys of the next chunk here, its values in `weigh_rows`, so that the
// memory is never idle.
template <typename Cache, int ROWS, int TILES, bool FETCH>
inline __attribute__((noinline)) void score_rows(const float* query, int padded_size,
                                                 const typename Cache::Element* const (&tiles)[CHUNK_TILES],
                                                 const typename Cache::Element* const (&next)[CHUNK_TILES],
                                                 float* scores) {
    constexpr int PAIR = Cache::PAIR;
    f32x16 sums[ROWS][TILES] = {};
    const int steps = padded_size / PAIR;
    for (int step = 0; step < steps; ++step) {
        const ptrdiff_t at = (ptrdiff_t)step * TILE * PAIR;
        if (FETCH) {
#pragma GCC unroll 4
            for (int tile = 0; tile < CHUNK_TILES; ++tile) prefetch(next[tile] + at);
        }
#pragma GCC unroll 2
        for (int part = 0; part < PAIR; ++part) {
            f32x16 keys[TILES];
#pragma GCC unroll 4
            for (int tile = 0; tile < TILES; ++tile) keys[tile] = Cache::widen(tiles[tile] + at, part);
#pragma GCC unroll 6
            for (int row = 0; row < ROWS; ++row) {
                const f32x16 factor = splat(query[row * padded_size + step * PAIR + part]);
#pragma GCC unroll 4
                for (int tile = 0; tile < TILES; ++tile) sums[row][tile] += factor * keys[tile];
            }
        }
    }
#pragma GCC unroll 6
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 4
        for (int tile = 0; tile < TILES; ++tile) store(scores + row * CHUNK + tile * TILE, sums[row][tile]);
}

// output[row] = output[row] * factors[row] + sum over live keys of weights[row][key] * V[key], VECTORS * 16 dimensions.
template <typename Cache, int ROWS, int VECTORS, bool FETCH>
inline void weigh_columns(const float* weights, const float* factors, int live,
                          const typename Cache::Element* const (&tiles)[CHUNK_TILES],
                          const typename Cache::Element* const (&next)[CHUNK_TILES], int padded_size, int column,
                          float* output) {
    constexpr int PAIR = Cache::PAIR;
    f32x16 sums[ROWS][VECTORS];
#pragma GCC unroll 6
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 4
        for (int vector = 0; vector < VECTORS; ++vector)
            sums[row][vector] =
                load<f32x16>(output + row * padded_size + column + vector * LANES) * splat(factors[row]);
    const int whole_pairs = live / PAIR;
    for (int pair = 0; pair < whole_pairs; ++pair) {
        const ptrdiff_t at = ((ptrdiff_t)(pair % (TILE / PAIR)) * padded_size + column) * PAIR;
        const typename Cache::Element* source = tiles[pair * PAIR / TILE] + at;
        if (FETCH) {
#pragma GCC unroll 4
            for (int vector = 0; vector < VECTORS; ++vector)
                prefetch(next[pair * PAIR / TILE] + at + vector * LANES * PAIR);
        }
#pragma GCC unroll 2
        for (int part = 0; part < PAIR; ++part) {
            f32x16 values[VECTORS];
#pragma GCC unroll 4
            for (int vector = 0; vector < VECTORS; ++vector)
                values[vector] = Cache::widen(source + vector * LANES * PAIR, part);
#pragma GCC unroll 6
            for (int row = 0; row < ROWS; ++row) {
                const f32x16 factor = splat(weights[row * CHUNK + pair * PAIR + part]);
#pragma GCC unroll 4
                for (int vector = 0; vector < VECTORS; ++vector) sums[row][vector] += factor * values[vector];
            }
        }
    }
    if (whole_pairs * PAIR < live) {
        // The second of the last pair was never written: a weight of zero would not stop a NaN.
        const int key = live - 1;
        const typename Cache::Element* source =
            tiles[key / TILE] + ((ptrdiff_t)(key % TILE / PAIR) * padded_size + column) * PAIR;
        for (int vector = 0; vector < VECTORS; ++vector) {
            const f32x16 values = Cache::widen(source + vector * LANES * PAIR, 0);
            for (int row = 0; row < ROWS; ++row) sums[row][vector] += splat(weights[row * CHUNK + key]) * values;
        }
    }
#pragma GCC unroll 6
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 4
        for (int vector = 0; vector < VECTORS; ++vector)
            store(output + row * padded_size + column + vector * LANES, sums[row][vector]);
}

template <typename Cache, int ROWS, bool FETCH>
inline __attribute__((noinline)) void weigh_rows(const float* weights, const float* factors, int live,
                                                 const typename Cache::Element* const (&tiles)[CHUNK_TILES],
                                                 const typename Cache::Element* const (&next)[CHUNK_TILES],
                                                 int padded_size, float* output) {
    int column = 0;
    for (; column + 4 * LANES <= padded_size; column += 4 * LANES)
        weigh_columns<Cache, ROWS, 4, FETCH>(weights, factors, live, tiles, next, padded_size, column, output);
    if (column + 2 * LANES <= padded_size) {
        weigh_columns<Cache, ROWS, 2, FETCH>(weights, factors, live, tiles, next, padded_size, column, output);
        column += 2 * LANES;
    }
    if (column < padded_size)
        weigh_columns<Cache, ROWS, 1, FETCH>(weights, factors, live, tiles, next, padded_size, column, output);
}

// Turns the scores of one row into weights, in TILES tiles. Keys outside first .. last (counted from the start of the
// chunk) get weight 0. Keeps the running maximum, and the sum of weights as one vector: to reduce either to a number
// is slow and rarely needed. Returns the factor for what was summed so far.
template <int TILES>
inline float soften_row(float* scores, int first, int last, bool masked, float softcap, float& highest,
                        float* weight_sums) {
    f32x16 row[TILES];
#pragma GCC unroll 4
    for (int tile = 0; tile < TILES; ++tile) {
        row[tile] = load<f32x16>(scores + tile * TILE);
        if (softcap > 0) row[tile] = splat(softcap * LOG2_E) * hyperbolic_tangent(row[tile]);
        if (masked) {
            i32x16 key = lane_numbers() + tile * TILE;
            row[tile] = ((key >= first) & (key < last)) ? row[tile] : splat(NO_SCORE);
        }
    }
    f32x16 highest_of_lanes = row[0];
#pragma GCC unroll 4
    for (int tile = 1; tile < TILES; ++tile) highest_of_lanes = maximum(highest_of_lanes, row[tile]);
    float factor = 1.0f;
    f32x16 total = load<f32x16>(weight_sums);
    if (any_greater(highest_of_lanes, splat(highest))) {
        const float before = highest;
        highest = largest(highest_of_lanes);
        factor = power_of_two(splat(before - highest))[0];  // 0 when there was no score yet
        total *= splat(factor);
    }
    const f32x16 reference = splat(highest == NO_SCORE ? 0.0f : highest);
#pragma GCC unroll 4
    for (int tile = 0; tile < TILES; ++tile) {
        f32x16 weights = power_of_two(row[tile] - reference);
        total += weights;
        store(scores + tile * TILE, weights);
    }
    store(weight_sums, total);
    return factor;
}

}  // namespace minivllm
