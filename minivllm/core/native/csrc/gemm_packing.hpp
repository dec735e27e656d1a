// How weights and activations are packed for the products out (M, N) = a (M, K) . w (N, K)^T.
//
// Weights are packed once into panels of 32 output columns. A panel holds, for one step of K after the other, two
// vectors of 16 columns; a step covers as many K as fit in 32 bits of the activations ("word"), so that one broadcast
// word meets one vector. Three number formats:
//
//   Float    weights bfloat16, activations and sums float32. Any CPU.
//   Int16    both in 16 bits, sums exact in 32 bits. For CPUs whose integer units are faster than their bfloat16 ones.
//            Weights are scaled by column to +-8191. Activations are scaled by row as far as 16 bits reach and as no sum
//            can overflow: |a . w| <= |a| |w| (Cauchy-Schwarz), and the largest |w| of the matrix is known. A deep
//            product is cut into stretches of K, each summed so, and the sums added in float32. Products come out
//            closer to those of float32 than those of bfloat16 do, and the same whatever other rows there are.
//   Int8     both in 8 bits (quantization: int8), weights scaled by column, activations by row and stretch of K: a few
//            large activations would otherwise leave the others no bits. On CPUs without integer dot products only the
//            weights are in 8 bits; activations and sums are float32.
//   BFloat16 both in bfloat16, sums float32, by the CPU's matrix unit: eight times as fast as Int16 where there is one.
#pragma once

#include <algorithm>
#include <cmath>

#include "tiles.hpp"
#include "vectors.hpp"

namespace minivllm {

constexpr int PANEL = 32;      // columns a panel: two vectors
// Rows whose accumulators fit in the CPU's registers, two for each row: of 32, or of 16.
constexpr int BLOCK_ROWS = REGISTER_LANES == LANES ? 12 : 6;
constexpr int GROUP_ROWS = 96; // rows that pass over a panel while it is in the cache

enum class Format : int32_t { Float = 0, Int16 = 1, Int8 = 2, BFloat16 = 3 };

#if defined(__AVX512VNNI__)
constexpr bool HAS_INTEGER_DOT = true;
#else
constexpr bool HAS_INTEGER_DOT = false;
#endif

// A packed matrix. Columns are outputs; `columns` is a multiple of PANEL, what was added has weight zero.
struct Linear {
    const void* data;
    const float* column_scale;       // (columns); Int16 and Int8
    const int32_t* column_offset;    // (panels, stretches, PANEL); Int8: -128 * sum of the column's weights there
    const float* bias;               // (columns) or null
    int64_t columns;
    int64_t depth;                   // K, a multiple of 4
    float largest_norm;              // Int16: the largest |w| of a column's stretch, in quantized units
    Format format;
};

// Whether activations and sums are float32.
inline bool takes_floats(Format format) {
    return format == Format::Float || (format == Format::Int8 && !HAS_INTEGER_DOT);
}

// K as it is stored: the matrix unit takes whole tiles; what is added is zero.
inline int64_t stored_depth(Format format, int64_t depth) {
    return format == Format::BFloat16 ? (depth + 2 * TILE_WORDS - 1) / (2 * TILE_WORDS) * (2 * TILE_WORDS) : depth;
}

inline int words_of(Format format, int64_t depth) {
    depth = stored_depth(format, depth);
    return (int)(takes_floats(format) ? depth : format == Format::Int8 ? depth / 4 : depth / 2);
}

constexpr int64_t LONGEST_STRETCH = 384;       // Int16
constexpr int64_t LONGEST_BYTE_STRETCH = 128;  // Int8

// How long the stretches are that K is cut into; the last may be shorter.
inline int64_t stretch_length(Format format, int64_t depth) {
    if (takes_floats(format) || format == Format::BFloat16) return depth;
    if (format == Format::Int16) {
        const int64_t stretches = (depth + LONGEST_STRETCH - 1) / LONGEST_STRETCH;
        return ((depth + stretches - 1) / stretches + 1) / 2 * 2;
    }
    for (int64_t length = LONGEST_BYTE_STRETCH; may_use_tiles() && length > 0; length -= 4 * TILE_WORDS)
        if (depth % length == 0) return length;  // whole tiles
    for (int64_t length = LONGEST_BYTE_STRETCH; length >= 2 * LANES; length -= LANES)
        if (depth % length == 0) return length;
    return depth;
}

inline int64_t stretches_of(Format format, int64_t depth) {
    const int64_t length = stretch_length(format, depth);
    return (depth + length - 1) / length;
}

// A slab is as much of a panel as stays in the innermost cache while a group of rows passes over it: so many stretches.
constexpr int64_t SLAB_BYTES = 20 * 1024;

inline int64_t stretches_of_slab(Format format, int64_t depth) {
    const int64_t bytes = stretch_length(format, depth) * PANEL * (format == Format::Int8 ? 1 : 2);
    return std::max<int64_t>(1, SLAB_BYTES / bytes);
}

inline int64_t panel_bytes(Format format, int64_t depth) {
    return format == Format::Int8 ? depth * PANEL : stored_depth(format, depth) * PANEL * 2;
}

// Whether the matrix unit does these products: it takes 64 bytes of K at once.
inline bool uses_tiles(Format format, int64_t depth) {
    if (!may_use_tiles() || takes_floats(format)) return false;
    return format == Format::BFloat16 ||
           (format == Format::Int8 && stretch_length(format, depth) % (4 * TILE_WORDS) == 0);
}

// ---- activations -----------------------------------------------------------------------------------------------

MINIVLLM_INLINE f32x16 rounded(f32x16 x) {
    const f32x16 magic = splat(12582912.0f);
    return (x + magic) - magic;
}

struct Extent {
    float peak;    // largest absolute value
    float square;  // sum of squares
};

inline Extent extent(const float* values, int64_t count) {
    f32x16 peaks = {}, squares = {};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const f32x16 x = load<f32x16>(values + i);
        peaks = maximum(peaks, absolute(x));
        squares += x * x;
    }
    Extent found{largest(peaks), sum(squares)};
    for (; i < count; ++i) {
        found.peak = std::max(found.peak, std::fabs(values[i]));
        found.square += values[i] * values[i];
    }
    return found;
}

// target = values * factor + shift, rounded.
template <typename Whole>
inline void quantize(const float* values, int64_t count, float factor, int shift, Whole* target) {
    typedef Whole Wholes __attribute__((vector_size(LANES * sizeof(Whole))));
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const i32x16 whole = __builtin_convertvector(rounded(load<f32x16>(values + i) * splat(factor)), i32x16) + shift;
        store(target + i, __builtin_convertvector(whole, Wholes));
    }
    for (; i < count; ++i) target[i] = (Whole)(std::lrint(values[i] * factor) + shift);
}

constexpr float SMALLEST = 1e-30f;  // of a row of zeros

// Brings one row into words, and writes the scales that its products are to be multiplied with, one a stretch.
inline void pack_row(Format format, float largest_norm, const float* row, int64_t depth, uint32_t* words,
                     float* scales) {
    if (takes_floats(format)) {
        std::memcpy(words, row, depth * sizeof(float));
        return;
    }
    if (format == Format::BFloat16) {
        uint16_t* target = (uint16_t*)words;
        int64_t i = 0;
        for (; i + LANES <= depth; i += LANES) store(target + i, to_bfloat16(load<f32x16>(row + i)));
        for (; i < depth; ++i) target[i] = to_bfloat16(row[i]);
        for (; i < stored_depth(format, depth); ++i) target[i] = 0;
        return;
    }
    const int64_t stretch = stretch_length(format, depth);
    if (format == Format::Int8) {
        for (int64_t first = 0; first < depth; first += stretch) {
            const float scale = std::max(extent(row + first, stretch).peak, SMALLEST) / 127.0f;
            scales[first / stretch] = scale;
            // The CPU multiplies unsigned with signed bytes: 128 is added here; the column's offset takes it off.
            quantize(row + first, stretch, 1.0f / scale, 128, (uint8_t*)words + first);
        }
        return;
    }
    float peak = SMALLEST, square = 0;
    for (int64_t first = 0; first < depth; first += stretch) {
        const Extent own = extent(row + first, std::min(stretch, depth - first));
        peak = std::max(peak, own.peak);
        square = std::max(square, own.square);
    }
    // A little below 2^31: rounding adds to the norms.
    const float scale = std::max(peak / 32767.0f, std::sqrt(square) * largest_norm / 2.1e9f);
    for (int64_t i = 0; i < stretches_of(format, depth); ++i) scales[i] = scale;
    quantize(row, depth, 1.0f / scale, 0, (int16_t*)words);
}

// ---- weights ---------------------------------------------------------------------------------------------------

// Packs one panel from `rows` rows (at most PANEL) of w (N, K) float32. `offset` (stretches, PANEL) starts at zero.
inline void pack_panel(Format format, const float* weights, int64_t rows, int64_t depth, char* data, float* scale,
                       int32_t* offset, float* norm) {
    const int64_t group = format == Format::Int8 ? 4 : 2;
    for (int64_t column = 0; column < PANEL; ++column) {
        const float* row = weights + column * depth;
        const bool live = column < rows;
        float peak = 0;
        for (int64_t k = 0; live && k < depth; ++k) peak = std::max(peak, std::fabs(row[k]));
        const float top = format == Format::Int8 ? 127.0f : 8191.0f;
        const float factor = peak > 0 ? top / peak : 0.0f;
        double square = 0;
        const int64_t stretch = stretch_length(format, depth);
        for (int64_t k = 0; k < stored_depth(format, depth); ++k) {
            const float value = live && k < depth ? row[k] : 0.0f;
            const int64_t at = (k / group * PANEL + column) * group + k % group;
            if (format == Format::Float || format == Format::BFloat16) {
                ((uint16_t*)data)[at] = to_bfloat16(value);
                continue;
            }
            const long whole = std::lrint(value * factor);
            if (k % stretch == 0) square = 0;
            square += (double)whole * (double)whole;
            *norm = std::max(*norm, (float)std::sqrt(square));
            if (format == Format::Int8) {
                ((int8_t*)data)[at] = (int8_t)whole;
                offset[k / stretch * PANEL + column] -= 128 * (int32_t)whole;
            } else {
                ((int16_t*)data)[at] = (int16_t)whole;
            }
        }
        if (format == Format::Float || format == Format::BFloat16) continue;
        scale[column] = peak > 0 ? peak / top : 0.0f;
    }
}

}  // namespace minivllm
