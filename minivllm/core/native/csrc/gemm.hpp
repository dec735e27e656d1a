// GEMM with packed weights (`gemm_packing.hpp`) and a fused epilogue: out (M, N) = epilogue(a (M, K) . w (N, K)^T).
#pragma once

#include "barrier.hpp"
#include "gemm_packing.hpp"

namespace minivllm {

// Packed activations of M rows. The memory extends AMX_MICRO_ROWS rows further, since AMX tiles are loaded in full.
struct PackedActivations {
    const uint32_t* words;
    ptrdiff_t stride;      // words per row
    const float* scales;   // (M, scale_stride): one per row and segment
    ptrdiff_t scale_stride;
};

// ---- micro-kernels: a few rows times one panel -----------------------------------------------------------------

// Prefetch during a micro-kernel: `lines` cache lines per word of K, from `address` on.
struct Prefetch {
    const char* address;
    int lines;
};

// Addresses ROWS rows with one pointer per three rows. The compiler would use one pointer per row, run out of registers
// and spill in the innermost loop.
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
        asm("" : "+r"(rows_0));  // hides the relation between the pointers
        if (ROWS > 3) asm("" : "+r"(rows_3));
        if (ROWS > 6) asm("" : "+r"(rows_6));
        if (ROWS > 9) asm("" : "+r"(rows_9));
    }
};

// Returns the k-th weight in the word of each column, as float32: of 4 int8, or of 2 bfloat16.
template <bool IS_INT8>
MINIVLLM_INLINE RegisterFloats weight_of(RegisterWords words, int k) {
    if (IS_INT8) return __builtin_convertvector((RegisterInts)(words << (24 - 8 * k)) >> 24, RegisterFloats);
    return (RegisterFloats)(k == 0 ? words << 16 : words & 0xffff0000u);
}

// c_block (ROWS, PANEL_WIDTH) = products of ROWS rows with a panel, for two registers of columns at a time.
template <bool IS_INT8, int ROWS>
inline __attribute__((noinline)) void microkernel_float(const uint32_t* words, ptrdiff_t stride, const char* panel,
                                                        int64_t depth, Prefetch prefetch, float* c_block) {
    constexpr int STEP = IS_INT8 ? 4 : 2;
    for (int column = 0; column < PANEL_WIDTH; column += 2 * REGISTER_LANES) {
        RegisterFloats sums[ROWS][2] = {};
        RowPointers<ROWS> rows(words, stride);
        const char* source = panel + column * 4;
        for (int64_t step = 0; step < depth / STEP; ++step) {
            const RegisterWords left = load<RegisterWords>(source);
            const RegisterWords right = load<RegisterWords>(source + REGISTER_LANES * 4);
            source += 128;
            if (prefetch.lines > 0) prefetch_l2(prefetch.address);
            if (prefetch.lines > 1) prefetch_l2(prefetch.address + 64);
            prefetch.address += 64 * prefetch.lines;
#pragma GCC unroll 4
            for (int k = 0; k < STEP; ++k) {
                const RegisterFloats left_weight = weight_of<IS_INT8>(left, k);
                const RegisterFloats right_weight = weight_of<IS_INT8>(right, k);
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
            store(c_block + row * PANEL_WIDTH + column, sums[row][0]);
            store(c_block + row * PANEL_WIDTH + column + REGISTER_LANES, sums[row][1]);
        }
        prefetch.lines = 0;
    }
}

#if defined(__AVX512VNNI__)
template <bool IS_INT8>
MINIVLLM_INLINE __m512i dot(__m512i sums, __m512i activations, __m512i weights) {
    return IS_INT8 ? _mm512_dpbusd_epi32(sums, activations, weights) : _mm512_dpwssd_epi32(sums, activations, weights);
}

// c_block (ROWS, PANEL_WIDTH) = scales[row] * (compensation[column] + products of one segment of K), where `accumulate`
// adds to c_block instead. Int16 has no compensation.
template <bool IS_INT8, int ROWS>
inline __attribute__((noinline)) void microkernel_integer(const uint32_t* words, ptrdiff_t stride, const char* panel,
                                                          int64_t num_words, Prefetch prefetch,
                                                          const int32_t* compensation, const float* scales,
                                                          ptrdiff_t scale_stride, bool accumulate, float* c_block) {
    __m512i sums[ROWS][2];
    const __m512i left_initial = IS_INT8 ? _mm512_loadu_si512(compensation) : _mm512_setzero_si512();
    const __m512i right_initial = IS_INT8 ? _mm512_loadu_si512(compensation + LANES) : _mm512_setzero_si512();
#pragma GCC unroll 12
    for (int row = 0; row < ROWS; ++row) sums[row][0] = left_initial, sums[row][1] = right_initial;
    RowPointers<ROWS> rows(words, stride);
    for (int64_t word = 0; word < num_words; ++word) {
        const __m512i left = _mm512_loadu_si512(panel), right = _mm512_loadu_si512(panel + 64);
        panel += 128;
        if (prefetch.lines > 0) prefetch_l2(prefetch.address);
        if (prefetch.lines > 1) prefetch_l2(prefetch.address + 64);
        prefetch.address += 64 * prefetch.lines;
#pragma GCC unroll 12
        for (int row = 0; row < ROWS; ++row) {
            const __m512i activations = (__m512i)splat_word(rows.word(row, 0));
            sums[row][0] = dot<IS_INT8>(sums[row][0], activations, left);
            sums[row][1] = dot<IS_INT8>(sums[row][1], activations, right);
        }
        rows.advance(1);
    }
    // Keeps the compiler from moving the code below into the loop, where it would run out of registers.
#pragma GCC unroll 12
    for (int row = 0; row < ROWS; ++row) asm volatile("" : "+v"(sums[row][0]), "+v"(sums[row][1]));
#pragma GCC unroll 12
    for (int row = 0; row < ROWS; ++row) {
        const f32x16 scale = splat(scales[row * scale_stride]);
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            float* target = c_block + row * PANEL_WIDTH + half * LANES;
            const f32x16 previous = accumulate ? load<f32x16>(target) : f32x16{};
            store(target, previous + (f32x16)_mm512_cvtepi32_ps(sums[row][half]) * scale);
        }
    }
}
#endif

#if defined(MINIVLLM_AMX)
// sums (16, or 32 if TWO_TILES, PANEL_WIDTH), float32 or int32 = products over `num_words` words of K. Tiles 0 to 3 are
// sums, 4 and 5 activations, 6 and 7 weights. Always reads 16 or 32 rows of activations.
template <bool IS_INT8, bool TWO_TILES>
inline void microkernel_amx(const uint32_t* words, ptrdiff_t stride, const char* panel, int64_t num_words,
                            Prefetch& prefetch, void* sums) {
    const auto multiply = [](auto target, auto a, auto b) {
        if (IS_INT8)
            tile_dot_u8s8<target.value, a.value, b.value>();
        else
            tile_dot_bfloat16<target.value, a.value, b.value>();
    };
    tile_zero<0>(), tile_zero<1>();
    if (TWO_TILES) tile_zero<2>(), tile_zero<3>();
    for (int64_t word = 0; word < num_words; word += TILE_WORDS) {
        for (int line = 0; line < TILE_WORDS * prefetch.lines; ++line) prefetch_l2(prefetch.address + 64 * line);
        prefetch.address += 64 * TILE_WORDS * prefetch.lines;
        tile_load<4>(words + word, stride * 4);
        tile_load<6>(panel + word * 128, 128);
        tile_load<7>(panel + word * 128 + 64, 128);
        multiply(TileIndex<0>{}, TileIndex<4>{}, TileIndex<6>{});
        multiply(TileIndex<1>{}, TileIndex<4>{}, TileIndex<7>{});
        if (TWO_TILES) {
            tile_load<5>(words + TILE_ROWS * stride + word, stride * 4);
            multiply(TileIndex<2>{}, TileIndex<5>{}, TileIndex<6>{});
            multiply(TileIndex<3>{}, TileIndex<5>{}, TileIndex<7>{});
        }
    }
    tile_store<0>(sums, PANEL_WIDTH * 4);
    tile_store<1>((char*)sums + LANES * 4, PANEL_WIDTH * 4);
    if (TWO_TILES) {
        char* below = (char*)sums + TILE_ROWS * PANEL_WIDTH * 4;
        tile_store<2>(below, PANEL_WIDTH * 4);
        tile_store<3>(below + LANES * 4, PANEL_WIDTH * 4);
    }
}

// c_block (rows, PANEL_WIDTH) = rows `first` .. of the activations times one panel.
template <bool TWO_TILES>
inline void multiply_block_amx(int rows, const PackedLinear& linear, const PackedActivations& input, int64_t first,
                               int64_t panel, Prefetch prefetch, float* c_block) {
    const char* data = (const char*)linear.data + panel * panel_bytes(linear.format, linear.depth);
    const uint32_t* words = input.words + first * input.stride;
    if (linear.format == NumberFormat::BFloat16) {
        const int64_t words_per_row = num_words(linear.format, linear.depth);
        microkernel_amx<false, TWO_TILES>(words, input.stride, data, words_per_row, prefetch, c_block);
        return;
    }
    alignas(64) int32_t sums[AMX_MICRO_ROWS * PANEL_WIDTH];
    const int64_t length = num_words(linear.format, segment_length(linear.format, linear.depth));
    const int64_t segments = num_segments(linear.format, linear.depth);
    for (int64_t segment = 0; segment < segments; ++segment) {
        const int64_t word = segment * length;
        microkernel_amx<true, TWO_TILES>(words + word, input.stride, data + word * 128, length, prefetch, sums);
        const int32_t* compensation = linear.compensation + (panel * segments + segment) * PANEL_WIDTH;
        const i32x16 left = load<i32x16>(compensation), right = load<i32x16>(compensation + LANES);
        for (int row = 0; row < rows; ++row) {
            const f32x16 scale = splat(input.scales[(first + row) * input.scale_stride + segment]);
            float* target = c_block + row * PANEL_WIDTH;
            for (int half = 0; half < 2; ++half) {
                const i32x16 sum = load<i32x16>(sums + row * PANEL_WIDTH + half * LANES) + (half == 0 ? left : right);
                const f32x16 previous = segment > 0 ? load<f32x16>(target + half * LANES) : f32x16{};
                store(target + half * LANES, previous + __builtin_convertvector(sum, f32x16) * scale);
            }
        }
    }
}
#endif

// c_block (ROWS, PANEL_WIDTH) = rows `first` .. of the activations times one depth block of a panel; blocks after the
// first are added.
template <int ROWS>
inline void multiply_block(const PackedLinear& linear, const PackedActivations& input, int64_t first, int64_t panel,
                           int64_t depth_block, Prefetch prefetch, float* c_block) {
    const char* data = (const char*)linear.data + panel * panel_bytes(linear.format, linear.depth);
    const uint32_t* words = input.words + first * input.stride;
    if (has_float_activations(linear.format)) {
        const auto microkernel =
            linear.format == NumberFormat::Int8 ? microkernel_float<true, ROWS> : microkernel_float<false, ROWS>;
        microkernel(words, input.stride, data, linear.depth, prefetch, c_block);
        return;
    }
#if defined(__AVX512VNNI__)
    const int64_t words_per_row = num_words(linear.format, linear.depth);
    const int64_t length = num_words(linear.format, segment_length(linear.format, linear.depth));
    const int64_t segments = num_segments(linear.format, linear.depth);
    const int64_t block_segments = segments_per_depth_block(linear.format, linear.depth);
    const int64_t last = std::min(segments, (depth_block + 1) * block_segments);
    const auto microkernel =
        linear.format == NumberFormat::Int8 ? microkernel_integer<true, ROWS> : microkernel_integer<false, ROWS>;
    for (int64_t segment = depth_block * block_segments; segment < last; ++segment) {
        const int64_t word = segment * length, count = std::min(length, words_per_row - word);
        microkernel(words + word, input.stride, data + word * 128, count, prefetch,
                    linear.compensation + (panel * segments + segment) * PANEL_WIDTH,
                    input.scales + first * input.scale_stride + segment, input.scale_stride, segment > 0, c_block);
        prefetch.address += count * 64 * prefetch.lines;
    }
#endif
}

// `multiply_block` for `rows` <= MICRO_ROWS.
inline void multiply_rows(int rows, const PackedLinear& linear, const PackedActivations& input, int64_t first,
                          int64_t panel, int64_t depth_block, Prefetch prefetch, float* c_block) {
    switch (rows) {
#define MINIVLLM_CASE(ROWS) \
    case ROWS: return multiply_block<ROWS>(linear, input, first, panel, depth_block, prefetch, c_block);
        MINIVLLM_CASE(1) MINIVLLM_CASE(2) MINIVLLM_CASE(3) MINIVLLM_CASE(4) MINIVLLM_CASE(5) MINIVLLM_CASE(6)
        MINIVLLM_CASE(7) MINIVLLM_CASE(8) MINIVLLM_CASE(9) MINIVLLM_CASE(10) MINIVLLM_CASE(11)
#undef MINIVLLM_CASE
        default: return multiply_block<12>(linear, input, first, panel, depth_block, prefetch, c_block);
    }
}

// ---- GEMM ------------------------------------------------------------------------------------------------------

// What is fused after the product. c includes the column scales and the bias; out (M, stride), `width` columns.
//   Store       out = c
//   AddResidual out += c
//   SiluMul     out = silu(gate) * up: each panel of c is 16 gate columns and the 16 up columns that belong to them
struct Epilogue {
    enum Kind { Store, AddResidual, SiluMul } kind;
    float* out;
    ptrdiff_t stride;
    int64_t width;
};

// Scales the columns of c_block (rows, PANEL_WIDTH), adds the bias and applies the epilogue to rows `first` ..
inline void apply_epilogue(const PackedLinear& linear, const Epilogue& epilogue, const float* c_block, int64_t rows,
                           int64_t first, int64_t panel) {
    const int64_t column = panel * PANEL_WIDTH;
    const bool adds_residual = epilogue.kind == Epilogue::AddResidual;
    const bool scaled = linear.format == NumberFormat::Int16 || linear.format == NumberFormat::Int8;
    f32x16 scales[2], biases[2];
    for (int half = 0; half < 2; ++half) {
        scales[half] = scaled ? load<f32x16>(linear.column_scale + column + half * LANES) : splat(1.0f);
        biases[half] = linear.bias != nullptr ? load<f32x16>(linear.bias + column + half * LANES) : f32x16{};
    }
    const int64_t count = std::min<int64_t>(PANEL_WIDTH, epilogue.width - column);
    for (int64_t row = 0; row < rows; ++row) {
        float* out = epilogue.out + (first + row) * epilogue.stride;
        f32x16 values[2];
        for (int half = 0; half < 2; ++half)
            values[half] = load<f32x16>(c_block + row * PANEL_WIDTH + half * LANES) * scales[half] + biases[half];
        if (epilogue.kind == Epilogue::SiluMul) {
            store(out + panel * LANES, silu(values[0]) * values[1]);
        } else if (count == PANEL_WIDTH) {
            for (int half = 0; half < 2; ++half) {
                float* address = out + column + half * LANES;
                store(address, adds_residual ? values[half] + load<f32x16>(address) : values[half]);
            }
        } else {
            float row_values[PANEL_WIDTH];
            store(row_values, values[0]);
            store(row_values + LANES, values[1]);
            for (int64_t i = 0; i < count; ++i)
                out[column + i] = adds_residual ? out[column + i] + row_values[i] : row_values[i];
        }
    }
}

// `multiply_panel` with AMX.
inline void multiply_panel_amx(const PackedLinear& linear, const PackedActivations& input, int64_t first_row,
                               int64_t last_row, int64_t panel, const Epilogue& epilogue, float* c_block) {
#if defined(MINIVLLM_AMX)
    const int64_t rows = last_row - first_row, bytes = panel_bytes(linear.format, linear.depth);
    const char* next = (const char*)linear.data + std::min(panel + 1, linear.columns / PANEL_WIDTH - 1) * bytes;
    for (int64_t first = 0; first < rows; first += AMX_MICRO_ROWS) {
        const int count = (int)std::min<int64_t>(AMX_MICRO_ROWS, rows - first);
        const Prefetch prefetch{next, first == 0 ? 2 : 0};
        float* target = c_block + first * PANEL_WIDTH;
        if (count > TILE_ROWS)
            multiply_block_amx<true>(count, linear, input, first_row + first, panel, prefetch, target);
        else
            multiply_block_amx<false>(count, linear, input, first_row + first, panel, prefetch, target);
    }
    apply_epilogue(linear, epilogue, c_block, rows, first_row, panel);
#endif
}

// Multiplies rows first_row .. last_row (one row block) with one panel; prefetches the next panel. c_block is scratch
// of (ROW_BLOCK, PANEL_WIDTH).
inline void multiply_panel(const PackedLinear& linear, const PackedActivations& input, int64_t first_row,
                           int64_t last_row, int64_t panel, const Epilogue& epilogue, float* c_block) {
    const int64_t rows = last_row - first_row, blocks = (rows + MICRO_ROWS - 1) / MICRO_ROWS;
    const int64_t bytes = panel_bytes(linear.format, linear.depth);
    const int64_t block_segments = segments_per_depth_block(linear.format, linear.depth);
    const int64_t depth_blocks = (num_segments(linear.format, linear.depth) + block_segments - 1) / block_segments;
    const int64_t block_bytes = block_segments * segment_length(linear.format, linear.depth) * PANEL_WIDTH *
                               (linear.format == NumberFormat::Int8 ? 1 : 2);
    const char* next = (const char*)linear.data + std::min(panel + 1, linear.columns / PANEL_WIDTH - 1) * bytes;
    for (int64_t depth_block = 0; depth_block < depth_blocks; ++depth_block) {
        for (int64_t block = 0; block < blocks; ++block) {
            const int64_t first = rows * block / blocks, last = rows * (block + 1) / blocks;
            Prefetch prefetch{next + depth_block * block_bytes, blocks == 1 ? 2 : block < 2 ? 1 : 0};
            if (block == 1) prefetch.address += block_bytes / 2;
            multiply_rows((int)(last - first), linear, input, first_row + first, panel, depth_block, prefetch,
                          c_block + first * PANEL_WIDTH);
        }
    }
    apply_epilogue(linear, epilogue, c_block, rows, first_row, panel);
}

// The GEMM of all threads that call this: they claim pairs of a row block and a range of panels.
inline void gemm(const PackedLinear& linear, const PackedActivations& input, int64_t rows, const Epilogue& epilogue,
                 LoopBarrier& barrier, int num_threads) {
    if (rows == 0) return;
    alignas(64) float c_block[ROW_BLOCK * PANEL_WIDTH];
    const bool with_amx = uses_amx(linear.format, linear.depth);
    const int64_t panels = linear.columns / PANEL_WIDTH;
    const int64_t row_blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
    // Row blocks begin at multiples of the rows that AMX multiplies at once.
    const int64_t unit = with_amx ? AMX_MICRO_ROWS : 1, units = (rows + unit - 1) / unit;
    const auto first_of = [&](int64_t row_block) { return std::min(rows, units * row_block / row_blocks * unit); };
    // About 6 iterations per thread, so that no thread waits long for the last one.
    const int64_t wanted_ranges = (6 * num_threads + row_blocks - 1) / row_blocks;
    const int64_t panel_ranges = std::max<int64_t>(1, std::min(panels, wanted_ranges));
    parallel_for(barrier, panel_ranges * row_blocks, 1, [&](int64_t index) {
        const int64_t range = index / row_blocks, row_block = index % row_blocks;
        const int64_t last_panel = panels * (range + 1) / panel_ranges;
        const auto multiply = with_amx ? multiply_panel_amx : multiply_panel;
        for (int64_t panel = panels * range / panel_ranges; panel < last_panel; ++panel)
            multiply(linear, input, first_of(row_block), first_of(row_block + 1), panel, epilogue, c_block);
    });
}

}  // namespace minivllm
