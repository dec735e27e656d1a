// Products of activations with packed weights: out (M, N) = a (M, K) . w (N, K)^T. See `gemm_packing.hpp`.
#pragma once

#include "gemm_packing.hpp"
#include "stage.hpp"

namespace minivllm {

// Packed activations of M rows. Behind them TILE_BLOCK_ROWS more can be read, whatever stands there.
struct Activations {
    const uint32_t* words;
    ptrdiff_t stride;      // words from row to row
    const float* scales;   // (M, scale_stride), by row and stretch
    ptrdiff_t scale_stride;
};

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

// The k-th number in the word of each column: of 4 bytes, or of 2 bfloat16.
template <bool BYTES>
MINIVLLM_INLINE RegisterFloats weight_of(RegisterWords words, int k) {
    if (BYTES) return __builtin_convertvector((RegisterInts)(words << (24 - 8 * k)) >> 24, RegisterFloats);
    return (RegisterFloats)(k == 0 ? words << 16 : words & 0xffff0000u);
}

// tile = the products of ROWS rows with a panel, two registers of columns at a time.
template <bool BYTES, int ROWS>
inline __attribute__((noinline)) void multiply_float(const uint32_t* words, ptrdiff_t stride, const char* panel,
                                                     int64_t depth, Fetch fetch, float* tile) {
    constexpr int STEP = BYTES ? 4 : 2;
    for (int column = 0; column < PANEL; column += 2 * REGISTER_LANES) {
        RegisterFloats sums[ROWS][2] = {};
        RowPointers<ROWS> rows(words, stride);
        const char* source = panel + column * 4;
        for (int64_t step = 0; step < depth / STEP; ++step) {
            const RegisterWords left = load<RegisterWords>(source);
            const RegisterWords right = load<RegisterWords>(source + REGISTER_LANES * 4);
            source += 128;
            if (fetch.lines > 0) prefetch_far(fetch.address);
            if (fetch.lines > 1) prefetch_far(fetch.address + 64);
            fetch.address += 64 * fetch.lines;
#pragma GCC unroll 4
            for (int k = 0; k < STEP; ++k) {
                const RegisterFloats left_weight = weight_of<BYTES>(left, k), right_weight = weight_of<BYTES>(right, k);
#pragma GCC unroll 12
                for (int row = 0; row < ROWS; ++row) {
                    const RegisterFloats activation = (RegisterFloats)splat_register(rows.word(row, k));
                    sums[row][0] += activation * left_weight;
                    sums[row][1] += activation * right_weight;
                }
            }
            rows.advance(STEP);
        }
#pragma GCC unroll 12
        for (int row = 0; row < ROWS; ++row) {
            store(tile + row * PANEL + column, sums[row][0]);
            store(tile + row * PANEL + column + REGISTER_LANES, sums[row][1]);
        }
        fetch.lines = 0;
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

#if defined(MINIVLLM_TILES)
// sums (16 or 32 rows, PANEL), of 4 bytes each = `steps` words of K, by the matrix unit. Tiles 0 to 3 hold the sums, 4 and
// 5 activations, 6 and 7 weights. Rows are read up to the 16th or 32nd, whatever stands there.
template <bool BYTES, bool TWO>
inline void multiply_tiles(const uint32_t* words, ptrdiff_t stride, const char* panel, int64_t steps, Fetch& fetch,
                           void* sums) {
    const auto multiply = [](auto target, auto a, auto b) {
        if (BYTES)
            tile_multiply_bytes<target.value, a.value, b.value>();
        else
            tile_multiply_bfloat16<target.value, a.value, b.value>();
    };
    tile_zero<0>(), tile_zero<1>();
    if (TWO) tile_zero<2>(), tile_zero<3>();
    for (int64_t step = 0; step < steps; step += TILE_WORDS) {
        for (int line = 0; line < TILE_WORDS * fetch.lines; ++line) prefetch_far(fetch.address + 64 * line);
        fetch.address += 64 * TILE_WORDS * fetch.lines;
        tile_load<4>(words + step, stride * 4);
        tile_load<6>(panel + step * 128, 128);
        tile_load<7>(panel + step * 128 + 64, 128);
        multiply(Number<0>{}, Number<4>{}, Number<6>{});
        multiply(Number<1>{}, Number<4>{}, Number<7>{});
        if (TWO) {
            tile_load<5>(words + TILE_ROWS * stride + step, stride * 4);
            multiply(Number<2>{}, Number<5>{}, Number<6>{});
            multiply(Number<3>{}, Number<5>{}, Number<7>{});
        }
    }
    tile_store<0>(sums, PANEL * 4);
    tile_store<1>((char*)sums + LANES * 4, PANEL * 4);
    if (TWO) {
        char* below = (char*)sums + TILE_ROWS * PANEL * 4;
        tile_store<2>(below, PANEL * 4);
        tile_store<3>(below + LANES * 4, PANEL * 4);
    }
}

template <bool TWO>
inline void multiply_block_by_tiles(int rows, const Linear& linear, const Activations& input, int64_t first,
                                    int64_t panel, Fetch fetch, float* tile) {
    const char* data = (const char*)linear.data + panel * panel_bytes(linear.format, linear.depth);
    const uint32_t* words = input.words + first * input.stride;
    const int64_t steps = words_of(linear.format, linear.depth);
    if (linear.format == Format::BFloat16) {
        multiply_tiles<false, TWO>(words, input.stride, data, steps, fetch, tile);
        return;
    }
    alignas(64) int32_t sums[TILE_BLOCK_ROWS * PANEL];
    const int64_t length = words_of(linear.format, stretch_length(linear.format, linear.depth));
    const int64_t stretches = stretches_of(linear.format, linear.depth);
    for (int64_t stretch = 0; stretch < stretches; ++stretch) {
        const int64_t step = stretch * length;
        multiply_tiles<true, TWO>(words + step, input.stride, data + step * 128, length, fetch, sums);
        const int32_t* offset = linear.column_offset + (panel * stretches + stretch) * PANEL;
        const i32x16 left = load<i32x16>(offset), right = load<i32x16>(offset + LANES);
        for (int row = 0; row < rows; ++row) {
            const f32x16 scale = splat(input.scales[(first + row) * input.scale_stride + stretch]);
            float* target = tile + row * PANEL;
            const int32_t* own = sums + row * PANEL;
            for (int half = 0; half < 2; ++half) {
                const i32x16 whole = load<i32x16>(own + half * LANES) + (half == 0 ? left : right);
                const f32x16 before = stretch > 0 ? load<f32x16>(target + half * LANES) : f32x16{};
                store(target + half * LANES, before + __builtin_convertvector(whole, f32x16) * scale);
            }
        }
    }
}
#endif

// tile (rows, PANEL) float32 (+)= rows first.. of the activations times one slab of a panel.
template <int ROWS>
inline void multiply_block(const Linear& linear, const Activations& input, int64_t first, int64_t panel, int64_t slab,
                           Fetch fetch, float* tile) {
    const char* data = (const char*)linear.data + panel * panel_bytes(linear.format, linear.depth);
    const uint32_t* words = input.words + first * input.stride;
    if (takes_floats(linear.format)) {
        const bool bytes = linear.format == Format::Int8;
        const auto multiply_panel_words = bytes ? multiply_float<true, ROWS> : multiply_float<false, ROWS>;
        multiply_panel_words(words, input.stride, data, linear.depth, fetch, tile);
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
    const bool scaled = linear.format == Format::Int16 || linear.format == Format::Int8;
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

// As `multiply_panel`, in blocks of whole tiles.
inline void multiply_panel_by_tiles(const Linear& linear, const Activations& input, int64_t first_row, int64_t last_row,
                                    int64_t panel, const Target& target, float* tile) {
#if defined(MINIVLLM_TILES)
    const int64_t rows = last_row - first_row, bytes = panel_bytes(linear.format, linear.depth);
    const char* next = (const char*)linear.data + std::min(panel + 1, linear.columns / PANEL - 1) * bytes;
    for (int64_t first = 0; first < rows; first += TILE_BLOCK_ROWS) {
        const int count = (int)std::min<int64_t>(TILE_BLOCK_ROWS, rows - first);
        const Fetch fetch{next, first == 0 ? 2 : 0};
        if (count > TILE_ROWS)
            multiply_block_by_tiles<true>(count, linear, input, first_row + first, panel, fetch, tile + first * PANEL);
        else
            multiply_block_by_tiles<false>(count, linear, input, first_row + first, panel, fetch, tile + first * PANEL);
    }
    deliver(linear, target, tile, rows, first_row, panel);
#endif
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

// out = activations times the matrix. Pieces are a group of rows and a run of panels.
inline void multiply(const Linear& linear, const Activations& input, int64_t rows, const Target& target, Stage& stage,
                     int num_threads) {
    if (rows == 0) return;
    alignas(64) float tile[GROUP_ROWS * PANEL];
    const bool by_tiles = uses_tiles(linear.format, linear.depth);
    const int64_t panels = linear.columns / PANEL;
    const int64_t groups = (rows + GROUP_ROWS - 1) / GROUP_ROWS;
    // Groups begin where blocks of tiles do.
    const int64_t unit = by_tiles ? TILE_BLOCK_ROWS : 1, units = (rows + unit - 1) / unit;
    const auto first_of = [&](int64_t group) { return std::min(rows, units * group / groups * unit); };
    // Enough pieces that no thread waits long for the last one.
    const int64_t runs = std::max<int64_t>(1, std::min(panels, (6 * num_threads + groups - 1) / groups));
    share(stage, runs * groups, 1, [&](int64_t piece) {
        const int64_t run = piece / groups, group = piece % groups;
        const int64_t last_panel = panels * (run + 1) / runs;
        const auto multiply_one = by_tiles ? multiply_panel_by_tiles : multiply_panel;
        for (int64_t panel = panels * run / runs; panel < last_panel; ++panel)
            multiply_one(linear, input, first_of(group), first_of(group + 1), panel, target, tile);
    });
}

}  // namespace minivllm
