// Packing of weights and activations for the GEMM out (M, N) = a (M, K) . w (N, K)^T.
//
// Weights are packed once into panels of 32 output columns (NR in BLIS). A panel stores K in words of 32 bits per
// column: per word two vectors of 16 columns, so that the micro-kernel combines one broadcast word of activations with
// each vector. Number formats:
//
//   Float    weights bfloat16; activations and sums float32. Any CPU.
//   Int16    weights and activations 16-bit integers, sums 32-bit integers. For CPUs whose integer dot products are
//            faster than their bfloat16 ones. Weights: one scale per column, quantized to +-8191. Activations: one scale
//            per row, the smallest that fits 16 bits and rules out overflow, since |a . w| <= |a| |w| (Cauchy-Schwarz)
//            and max |w| is known. K is divided into segments; each is summed exactly, and the segments are added in
//            float32. The products are closer to float32 than bfloat16 products, and independent of the other rows.
//   Int8     weights and activations 8-bit integers (quantization: int8). Weights: one scale per column. Activations:
//            one scale per row and segment of K, so that an outlier reduces the precision of its own segment only. On
//            CPUs without integer dot products (AVX-512 VNNI) activations and sums are float32.
//   BFloat16 weights and activations bfloat16, sums float32, with AMX: 8 times the throughput of Int16.
#pragma once

#include <algorithm>
#include <cmath>

#include "amx.hpp"
#include "vectors.hpp"

namespace minivllm {

constexpr int PANEL_WIDTH = 32;  // columns per panel: two vectors
// Rows per micro-kernel call (MR in BLIS): two accumulators per row, in 32 or 16 vector registers.
constexpr int MICRO_ROWS = REGISTER_LANES == LANES ? 12 : 6;
constexpr int ROW_BLOCK = 96;    // rows multiplied with a panel while it is in the cache (MC in BLIS)

enum class NumberFormat : int32_t { Float = 0, Int16 = 1, Int8 = 2, BFloat16 = 3 };

#if defined(__AVX512VNNI__)
constexpr bool HAS_INTEGER_DOT = true;
#else
constexpr bool HAS_INTEGER_DOT = false;
#endif

// Packed weight and bias of a linear layer. N outputs are `columns`, rounded up to PANEL_WIDTH with zero weights.
struct PackedLinear {
    const void* data;                // (panels, panel_bytes)
    const float* column_scale;       // (columns); Int16 and Int8
    const int32_t* compensation;     // (panels, segments, PANEL_WIDTH); Int8: -128 * sum of the column's weights
    const float* bias;               // (columns) or null
    int64_t columns;
    int64_t depth;                   // K, a multiple of 4
    float max_norm;                  // Int16: largest |w| of a column's segment, in quantized units
    NumberFormat format;
};

inline bool has_float_activations(NumberFormat format) {
    return format == NumberFormat::Float || (format == NumberFormat::Int8 && !HAS_INTEGER_DOT);
}

// K as stored: for AMX padded with zeros to full tiles.
inline int64_t padded_depth(NumberFormat format, int64_t depth) {
    if (format != NumberFormat::BFloat16) return depth;
    return (depth + 2 * TILE_WORDS - 1) / (2 * TILE_WORDS) * (2 * TILE_WORDS);
}

// Words of 32 bits per packed row of activations.
inline int num_words(NumberFormat format, int64_t depth) {
    depth = padded_depth(format, depth);
    if (has_float_activations(format)) return (int)depth;
    return (int)(format == NumberFormat::Int8 ? depth / 4 : depth / 2);
}

constexpr int64_t MAX_INT16_SEGMENT = 384;
constexpr int64_t MAX_INT8_SEGMENT = 128;

// Length of the segments of K; the last may be shorter (Int16).
inline int64_t segment_length(NumberFormat format, int64_t depth) {
    if (has_float_activations(format) || format == NumberFormat::BFloat16) return depth;
    if (format == NumberFormat::Int16) {
        const int64_t segments = (depth + MAX_INT16_SEGMENT - 1) / MAX_INT16_SEGMENT;
        return ((depth + segments - 1) / segments + 1) / 2 * 2;
    }
    for (int64_t length = MAX_INT8_SEGMENT; amx_is_available() && length > 0; length -= 4 * TILE_WORDS)
        if (depth % length == 0) return length;  // full tiles
    for (int64_t length = MAX_INT8_SEGMENT; length >= 2 * LANES; length -= LANES)
        if (depth % length == 0) return length;
    return depth;
}

inline int64_t num_segments(NumberFormat format, int64_t depth) {
    const int64_t length = segment_length(format, depth);
    return (depth + length - 1) / length;
}

// A depth block (KC in BLIS) is the part of a panel that stays in the L1 cache while a row block passes over it.
constexpr int64_t DEPTH_BLOCK_BYTES = 20 * 1024;

inline int64_t segments_per_depth_block(NumberFormat format, int64_t depth) {
    const int64_t bytes = segment_length(format, depth) * PANEL_WIDTH * (format == NumberFormat::Int8 ? 1 : 2);
    return std::max<int64_t>(1, DEPTH_BLOCK_BYTES / bytes);
}

inline int64_t panel_bytes(NumberFormat format, int64_t depth) {
    return format == NumberFormat::Int8 ? depth * PANEL_WIDTH : padded_depth(format, depth) * PANEL_WIDTH * 2;
}

// Int8 needs segments of full tiles: 64 bytes of K.
inline bool uses_amx(NumberFormat format, int64_t depth) {
    if (!amx_is_available() || has_float_activations(format)) return false;
    return format == NumberFormat::BFloat16 ||
           (format == NumberFormat::Int8 && segment_length(format, depth) % (4 * TILE_WORDS) == 0);
}

// ---- activations -----------------------------------------------------------------------------------------------

MINIVLLM_INLINE f32x16 round_to_nearest(f32x16 x) {
    const f32x16 magic = splat(12582912.0f);  // 1.5 * 2^23
    return (x + magic) - magic;
}

struct RowStats {
    float max_abs;
    float sum_squares;
};

inline RowStats row_stats(const float* values, int64_t count) {
    f32x16 max_abs = {}, sum_squares = {};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const f32x16 x = load<f32x16>(values + i);
        max_abs = maximum(max_abs, absolute(x));
        sum_squares += x * x;
    }
    RowStats stats{reduce_max(max_abs), reduce_sum(sum_squares)};
    for (; i < count; ++i) {
        stats.max_abs = std::max(stats.max_abs, std::fabs(values[i]));
        stats.sum_squares += values[i] * values[i];
    }
    return stats;
}

// target = round(values * factor) + shift.
template <typename Integer>
inline void quantize(const float* values, int64_t count, float factor, int shift, Integer* target) {
    typedef Integer Integers __attribute__((vector_size(LANES * sizeof(Integer))));
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const f32x16 scaled = round_to_nearest(load<f32x16>(values + i) * splat(factor));
        store(target + i, __builtin_convertvector(__builtin_convertvector(scaled, i32x16) + shift, Integers));
    }
    for (; i < count; ++i) target[i] = (Integer)(std::lrint(values[i] * factor) + shift);
}

constexpr float MIN_MAX_ABS = 1e-30f;  // replaces 0 for a row of zeros

// Packs one row of activations (depth) into `words`, and writes the scale of each segment.
inline void pack_row(NumberFormat format, float max_norm, const float* row, int64_t depth, uint32_t* words,
                     float* scales) {
    if (has_float_activations(format)) {
        std::memcpy(words, row, depth * sizeof(float));
        return;
    }
    if (format == NumberFormat::BFloat16) {
        uint16_t* target = (uint16_t*)words;
        int64_t i = 0;
        for (; i + LANES <= depth; i += LANES) store(target + i, to_bfloat16(load<f32x16>(row + i)));
        for (; i < depth; ++i) target[i] = to_bfloat16(row[i]);
        for (; i < padded_depth(format, depth); ++i) target[i] = 0;
        return;
    }
    const int64_t length = segment_length(format, depth);
    if (format == NumberFormat::Int8) {
        for (int64_t first = 0; first < depth; first += length) {
            const float scale = std::max(row_stats(row + first, length).max_abs, MIN_MAX_ABS) / 127.0f;
            scales[first / length] = scale;
            // vpdpbusd multiplies unsigned by signed bytes: adds 128 here, which `compensation` subtracts again.
            quantize(row + first, length, 1.0f / scale, 128, (uint8_t*)words + first);
        }
        return;
    }
    float max_abs = MIN_MAX_ABS, sum_squares = 0;
    for (int64_t first = 0; first < depth; first += length) {
        const RowStats stats = row_stats(row + first, std::min(length, depth - first));
        max_abs = std::max(max_abs, stats.max_abs);
        sum_squares = std::max(sum_squares, stats.sum_squares);
    }
    // Slightly below 2^31, because rounding increases the norms.
    const float scale = std::max(max_abs / 32767.0f, std::sqrt(sum_squares) * max_norm / 2.1e9f);
    for (int64_t i = 0; i < num_segments(format, depth); ++i) scales[i] = scale;
    quantize(row, depth, 1.0f / scale, 0, (int16_t*)words);
}

// ---- weights ---------------------------------------------------------------------------------------------------

// Packs one panel from `rows` <= PANEL_WIDTH rows of w (N, K) float32. `compensation` (segments, PANEL_WIDTH) is zero
// at the start. Raises *max_norm to the largest norm of a segment.
inline void pack_panel(NumberFormat format, const float* weights, int64_t rows, int64_t depth, char* data, float* scale,
                       int32_t* compensation, float* max_norm) {
    const int64_t per_word = format == NumberFormat::Int8 ? 4 : 2;
    const int64_t length = segment_length(format, depth);
    const float max_quantized = format == NumberFormat::Int8 ? 127.0f : 8191.0f;
    for (int64_t column = 0; column < PANEL_WIDTH; ++column) {
        const float* row = weights + column * depth;
        const bool is_padding = column >= rows;
        float max_abs = 0;
        for (int64_t k = 0; !is_padding && k < depth; ++k) max_abs = std::max(max_abs, std::fabs(row[k]));
        const float factor = max_abs > 0 ? max_quantized / max_abs : 0.0f;
        double sum_squares = 0;
        for (int64_t k = 0; k < padded_depth(format, depth); ++k) {
            const float value = !is_padding && k < depth ? row[k] : 0.0f;
            const int64_t index = (k / per_word * PANEL_WIDTH + column) * per_word + k % per_word;
            if (format == NumberFormat::Float || format == NumberFormat::BFloat16) {
                ((uint16_t*)data)[index] = to_bfloat16(value);
                continue;
            }
            const long quantized = std::lrint(value * factor);
            if (k % length == 0) sum_squares = 0;
            sum_squares += (double)quantized * (double)quantized;
            *max_norm = std::max(*max_norm, (float)std::sqrt(sum_squares));
            if (format == NumberFormat::Int8) {
                ((int8_t*)data)[index] = (int8_t)quantized;
                compensation[k / length * PANEL_WIDTH + column] -= 128 * (int32_t)quantized;
            } else {
                ((int16_t*)data)[index] = (int16_t)quantized;
            }
        }
        if (format == NumberFormat::Float || format == NumberFormat::BFloat16) continue;
        scale[column] = max_abs > 0 ? max_abs / max_quantized : 0.0f;
    }
}

}  // namespace minivllm
