// Products of activations with packed weights: out (M, N) = a (M, K) . w (N, K)^T.
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
//            large activations would otherwise leave the others no bits.
#pragma once

#include <algorithm>
#include <atomic>

#include "vectors.hpp"

namespace minivllm {

constexpr int PANEL = 32;      // columns a panel: two vectors
constexpr int BLOCK_ROWS = 12; // rows whose accumulators fit in registers: 12 * 2 vectors
constexpr int GROUP_ROWS = 96; // rows that pass over a panel while it is in the cache

enum class Format : int32_t { Float = 0, Int16 = 1, Int8 = 2 };

#if defined(__AVX512VNNI__)
constexpr bool HAS_INTEGER_DOT = true;
#else
constexpr bool HAS_INTEGER_DOT = false;
#endif

// A packed matrix. Columns are outputs; `columns` is a multiple of PANEL, what was added has weight zero.
struct Linear {
    const void* data;
    const float* column_scale;       // (columns); null for Float
    const int32_t* column_offset;    // (panels, stretches, PANEL); Int8: -128 * sum of the column's weights there
    const float* bias;               // (columns) or null
    int64_t columns;
    int64_t depth;                   // K, a multiple of 4
    float largest_norm;              // Int16: the largest |w| of a column's stretch, in quantized units
    Format format;
};

inline int words_of(Format format, int64_t depth) {
    return (int)(format == Format::Float ? depth : format == Format::Int16 ? depth / 2 : depth / 4);
}

constexpr int64_t LONGEST_STRETCH = 384;       // Int16
constexpr int64_t LONGEST_BYTE_STRETCH = 128;  // Int8

// How long the stretches are that K is cut into; the last may be shorter.
inline int64_t stretch_length(Format format, int64_t depth) {
    if (format == Format::Float) return depth;
    if (format == Format::Int16) {
        const int64_t stretches = (depth + LONGEST_STRETCH - 1) / LONGEST_STRETCH;
        return ((depth + stretches - 1) / stretches + 1) / 2 * 2;
    }
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
    return format == Format::Int8 ? depth * PANEL : depth * PANEL * 2;
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
    if (format == Format::Float) {
        std::memcpy(words, row, depth * sizeof(float));
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

// ---- one block of rows times one panel -------------------------------------------------------------------------

// What is to be brought into the cache meanwhile: `lines` of 64 bytes at every step.
struct Fetch {
    const char* address;
    int lines;
};

// Addresses of ROWS rows by few registers: three rows hang on one pointer. Left to itself the compiler keeps a pointer
// for each row, runs out of registers and moves them to and fro in the innermost loop.
template <int ROWS>
struct RowPointers {
    const uint32_t *rows_0, *rows_3, *rows_6, *rows_9;
    ptrdiff_t stride, twice;
    MINIVLLM_INLINE RowPointers(const uint32_t* words, ptrdiff_t row_stride)
        : rows_0(words), rows_3(words + 3 * row_stride), rows_6(words + 6 * row_stride), rows_9(words + 9 * row_stride),
          stride(row_stride), twice(2 * row_stride) {}
    MINIVLLM_INLINE uint32_t word(int row, int ahead) const {
        const uint32_t* base = (row < 3 ? rows_0 : row < 6 ? rows_3 : row < 9 ? rows_6 : rows_9) + ahead;
        return row % 3 == 0 ? base[0] : row % 3 == 1 ? base[stride] : base[twice];
    }
    MINIVLLM_INLINE void advance(int words) {
        rows_0 += words, rows_3 += words, rows_6 += words, rows_9 += words;
        asm("" : "+r"(rows_0));  // hides that they belong together
        if (ROWS > 3) asm("" : "+r"(rows_3));
        if (ROWS > 6) asm("" : "+r"(rows_6));
        if (ROWS > 9) asm("" : "+r"(rows_9));
    }
};

template <int ROWS>
inline __attribute__((noinline)) void multiply_float(const uint32_t* words, ptrdiff_t stride, const char* panel,
                                                     int64_t depth, Fetch fetch, float* tile) {
    f32x16 sums[ROWS][2] = {};
    RowPointers<ROWS> rows(words, stride);
    for (int64_t pair = 0; pair < depth / 2; ++pair) {
        const u32x16 left = load<u32x16>(panel), right = load<u32x16>(panel + 64);
        const f32x16 left_even = first_of_pairs(left), left_odd = second_of_pairs(left);
        const f32x16 right_even = first_of_pairs(right), right_odd = second_of_pairs(right);
        panel += 128;
        if (fetch.lines > 0) prefetch_far(fetch.address);
        if (fetch.lines > 1) prefetch_far(fetch.address + 64);
        fetch.address += 64 * fetch.lines;
#pragma GCC unroll 12
        for (int row = 0; row < ROWS; ++row) {
            const f32x16 even = (f32x16)splat_word(rows.word(row, 0)), odd = (f32x16)splat_word(rows.word(row, 1));
            sums[row][0] += even * left_even;
            sums[row][1] += even * right_even;
            sums[row][0] += odd * left_odd;
            sums[row][1] += odd * right_odd;
        }
        rows.advance(2);
    }
#pragma GCC unroll 12
    for (int row = 0; row < ROWS; ++row) {
        store(tile + row * PANEL, sums[row][0]);
        store(tile + row * PANEL + LANES, sums[row][1]);
    }
}

#if defined(__AVX512VNNI__)
template <bool BYTES>
MINIVLLM_INLINE __m512i dot(__m512i sums, __m512i activations, __m512i weights) {
    return BYTES ? _mm512_dpbusd_epi32(sums, activations, weights) : _mm512_dpwssd_epi32(sums, activations, weights);
}

// tile (+)= sums of one stretch, from `initial` (PANEL) on, times the scales of the rows, `scale_stride` apart.
template <bool BYTES, int ROWS>
inline __attribute__((noinline)) void multiply_integer(const uint32_t* words, ptrdiff_t stride, const char* panel,
                                                       int64_t steps, Fetch fetch, const int32_t* initial,
                                                       const float* scales, ptrdiff_t scale_stride, bool add,
                                                       float* tile) {
    __m512i sums[ROWS][2];
    const __m512i left_initial = BYTES ? _mm512_loadu_si512(initial) : _mm512_setzero_si512();
    const __m512i right_initial = BYTES ? _mm512_loadu_si512(initial + LANES) : _mm512_setzero_si512();
#pragma GCC unroll 12
    for (int row = 0; row < ROWS; ++row) sums[row][0] = left_initial, sums[row][1] = right_initial;
    RowPointers<ROWS> rows(words, stride);
    for (int64_t step = 0; step < steps; ++step) {
        const __m512i left = _mm512_loadu_si512(panel), right = _mm512_loadu_si512(panel + 64);
        panel += 128;
        if (fetch.lines > 0) prefetch_far(fetch.address);
        if (fetch.lines > 1) prefetch_far(fetch.address + 64);
        fetch.address += 64 * fetch.lines;
#pragma GCC unroll 12
        for (int row = 0; row < ROWS; ++row) {
            const __m512i activations = (__m512i)splat_word(rows.word(row, 0));
            sums[row][0] = dot<BYTES>(sums[row][0], activations, left);
            sums[row][1] = dot<BYTES>(sums[row][1], activations, right);
        }
        rows.advance(1);
    }
    // Without this the compiler mixes what follows into the loop and runs out of registers there.
#pragma GCC unroll 12
    for (int row = 0; row < ROWS; ++row) asm volatile("" : "+v"(sums[row][0]), "+v"(sums[row][1]));
#pragma GCC unroll 12
    for (int row = 0; row < ROWS; ++row) {
        const f32x16 scale = splat(scales[row * scale_stride]);
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            float* target = tile + row * PANEL + half * LANES;
            const f32x16 before = add ? load<f32x16>(target) : f32x16{};
            store(target, before + (f32x16)_mm512_cvtepi32_ps(sums[row][half]) * scale);
        }
    }
}
#endif

// Packed activations of M rows.
struct Activations {
    const uint32_t* words;
    ptrdiff_t stride;      // words from row to row
    const float* scales;   // (M, scale_stride), by row and stretch
    ptrdiff_t scale_stride;
};

// tile (rows, PANEL) float32 (+)= rows first.. of the activations times one slab of a panel.
template <int ROWS>
inline void multiply_block(const Linear& linear, const Activations& input, int64_t first, int64_t panel, int64_t slab,
                           Fetch fetch, float* tile) {
    const char* data = (const char*)linear.data + panel * panel_bytes(linear.format, linear.depth);
    const uint32_t* words = input.words + first * input.stride;
    if (linear.format == Format::Float) {
        multiply_float<ROWS>(words, input.stride, data, linear.depth, fetch, tile);
        return;
    }
#if defined(__AVX512VNNI__)
    const int64_t steps = words_of(linear.format, linear.depth);
    const int64_t length = words_of(linear.format, stretch_length(linear.format, linear.depth));
    const int64_t stretches = stretches_of(linear.format, linear.depth);
    const int64_t slab_stretches = stretches_of_slab(linear.format, linear.depth);
    const int64_t last = std::min(stretches, (slab + 1) * slab_stretches);
    const auto multiply_stretch =
        linear.format == Format::Int8 ? multiply_integer<true, ROWS> : multiply_integer<false, ROWS>;
    for (int64_t stretch = slab * slab_stretches; stretch < last; ++stretch) {
        const int64_t step = stretch * length, count = std::min(length, steps - step);
        multiply_stretch(words + step, input.stride, data + step * 128, count, fetch,
                         linear.column_offset + (panel * stretches + stretch) * PANEL,
                         input.scales + first * input.scale_stride + stretch, input.scale_stride, stretch > 0, tile);
        fetch.address += count * 64 * fetch.lines;
    }
#endif
}

inline void multiply_rows(int rows, const Linear& linear, const Activations& input, int64_t first, int64_t panel,
                          int64_t slab, Fetch fetch, float* tile) {
    switch (rows) {
#define MINIVLLM_CASE(ROWS) \
    case ROWS: return multiply_block<ROWS>(linear, input, first, panel, slab, fetch, tile);
        MINIVLLM_CASE(1) MINIVLLM_CASE(2) MINIVLLM_CASE(3) MINIVLLM_CASE(4) MINIVLLM_CASE(5) MINIVLLM_CASE(6)
        MINIVLLM_CASE(7) MINIVLLM_CASE(8) MINIVLLM_CASE(9) MINIVLLM_CASE(10) MINIVLLM_CASE(11)
#undef MINIVLLM_CASE
        default: return multiply_block<12>(linear, input, first, panel, slab, fetch, tile);
    }
}

// ---- the whole product -----------------------------------------------------------------------------------------

// Where results go. Store and Add: out (M, stride), `width` columns. Gate: a panel holds 16 gates and their 16 ups;
// out = silu(gate) * up, half as wide.
struct Target {
    enum Kind { Store, Add, Gate } kind;
    float* out;
    ptrdiff_t stride;
    int64_t width;
};

// Columns of a tile are scaled and get their bias on the way.
inline void deliver(const Linear& linear, const Target& target, const float* tile, int64_t rows, int64_t first,
                    int64_t panel) {
    const int64_t column = panel * PANEL;
    const bool scaled = linear.format != Format::Float;
    f32x16 scales[2], biases[2];
    for (int half = 0; half < 2; ++half) {
        scales[half] = scaled ? load<f32x16>(linear.column_scale + column + half * LANES) : splat(1.0f);
        biases[half] = linear.bias != nullptr ? load<f32x16>(linear.bias + column + half * LANES) : f32x16{};
    }
    const int64_t count = std::min<int64_t>(PANEL, target.width - column);
    for (int64_t row = 0; row < rows; ++row) {
        float* out = target.out + (first + row) * target.stride;
        f32x16 values[2];
        for (int half = 0; half < 2; ++half)
            values[half] = load<f32x16>(tile + row * PANEL + half * LANES) * scales[half] + biases[half];
        if (target.kind == Target::Gate) {
            store(out + panel * LANES, silu(values[0]) * values[1]);
        } else if (count == PANEL) {
            for (int half = 0; half < 2; ++half) {
                float* place = out + column + half * LANES;
                store(place, target.kind == Target::Add ? values[half] + load<f32x16>(place) : values[half]);
            }
        } else {
            float row_values[PANEL];
            store(row_values, values[0]);
            store(row_values + LANES, values[1]);
            for (int64_t i = 0; i < count; ++i)
                out[column + i] = target.kind == Target::Add ? out[column + i] + row_values[i] : row_values[i];
        }
    }
}

// One panel for the rows first_row .. last_row. Meanwhile the panel that comes next is brought into the cache.
inline void multiply_panel(const Linear& linear, const Activations& input, int64_t first_row, int64_t last_row,
                           int64_t panel, const Target& target, float* tile) {
    const int64_t rows = last_row - first_row, blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    const int64_t bytes = panel_bytes(linear.format, linear.depth);
    const int64_t slab_stretches = stretches_of_slab(linear.format, linear.depth);
    const int64_t slabs = (stretches_of(linear.format, linear.depth) + slab_stretches - 1) / slab_stretches;
    const int64_t slab_bytes = slab_stretches * stretch_length(linear.format, linear.depth) * PANEL *
                               (linear.format == Format::Int8 ? 1 : 2);
    const char* next = (const char*)linear.data + std::min(panel + 1, linear.columns / PANEL - 1) * bytes;
    for (int64_t slab = 0; slab < slabs; ++slab) {
        for (int64_t block = 0; block < blocks; ++block) {
            const int64_t first = rows * block / blocks, last = rows * (block + 1) / blocks;
            Fetch fetch{next + slab * slab_bytes, blocks == 1 ? 2 : block < 2 ? 1 : 0};
            if (block == 1) fetch.address += slab_bytes / 2;
            multiply_rows((int)(last - first), linear, input, first_row + first, panel, slab, fetch,
                          tile + first * PANEL);
        }
    }
    deliver(linear, target, tile, rows, first_row, panel);
}

// Takes tasks (a group of rows, a run of panels) until none is left; `counter` starts at 0, shared by the threads.
inline void multiply(const Linear& linear, const Activations& input, int64_t rows, const Target& target,
                     std::atomic<int>& counter, int num_threads) {
    if (rows == 0) return;
    alignas(64) float tile[GROUP_ROWS * PANEL];
    const int64_t panels = linear.columns / PANEL;
    const int64_t groups = (rows + GROUP_ROWS - 1) / GROUP_ROWS;
    // Enough tasks that no thread waits long for the last one.
    const int64_t runs = std::max<int64_t>(1, std::min(panels, (6 * num_threads + groups - 1) / groups));
    for (;;) {
        const int64_t task = counter.fetch_add(1, std::memory_order_relaxed);
        if (task >= runs * groups) return;
        const int64_t run = task / groups, group = task % groups;
        const int64_t last_panel = panels * (run + 1) / runs;
        for (int64_t panel = panels * run / runs; panel < last_panel; ++panel)
            multiply_panel(linear, input, rows * group / groups, rows * (group + 1) / groups, panel, target, tile);
    }
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
        for (int64_t k = 0; k < depth; ++k) {
            const float value = live ? row[k] : 0.0f;
            const int64_t at = (k / group * PANEL + column) * group + k % group;
            if (format == Format::Float) {
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
        if (format == Format::Float) continue;
        scale[column] = peak > 0 ? peak / top : 0.0f;
    }
}

}  // namespace minivllm
