// The CPU's matrix unit (AMX): eight tiles of 16 rows of 64 bytes, and instructions that multiply them.
//
// With MINIVLLM_EMULATE_TILES the same is done in plain C++, slowly: so that what is built on it can be tested on CPUs
// that have no such unit.
#pragma once

#include <type_traits>

#include "vectors.hpp"

#if defined(MINIVLLM_EMULATE_TILES) || (defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__))
#define MINIVLLM_TILES 1
#endif

#if defined(MINIVLLM_TILES) && !defined(MINIVLLM_EMULATE_TILES)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace minivllm {

constexpr int TILE_ROWS = 16;
constexpr int TILE_WORDS = 16;  // of 32 bits a row
constexpr int TILE_BLOCK_ROWS = 2 * TILE_ROWS;  // that one panel of 32 columns is multiplied with at once: four tiles of sums

template <int VALUE>
using Number = std::integral_constant<int, VALUE>;

// Set when a check of the unit failed.
inline bool tiles_are_forbidden = false;

#if defined(MINIVLLM_EMULATE_TILES)

struct EmulatedTile {
    alignas(64) uint8_t bytes[TILE_ROWS][64];
};
inline EmulatedTile& emulated_tile(int number) {
    static thread_local EmulatedTile tiles[8];
    return tiles[number];
}

template <int TILE>
inline void tile_zero() {
    std::memset(&emulated_tile(TILE), 0, sizeof(EmulatedTile));
}
template <int TILE>
inline void tile_load(const void* source, ptrdiff_t stride) {
    for (int row = 0; row < TILE_ROWS; ++row)
        std::memcpy(emulated_tile(TILE).bytes[row], (const char*)source + row * stride, 64);
}
template <int TILE>
inline void tile_store(void* target, ptrdiff_t stride) {
    for (int row = 0; row < TILE_ROWS; ++row)
        std::memcpy((char*)target + row * stride, emulated_tile(TILE).bytes[row], 64);
}

// sums[row][column] += the sum over words and their parts of a[row][word] * b[word][column].
template <typename Sum, typename Left, typename Right, typename Convert>
inline void emulated_multiply(int sums, int a, int b, Convert convert) {
    constexpr int PARTS = 4 / sizeof(Left);
    const auto& left = emulated_tile(a).bytes;
    const auto& right = emulated_tile(b).bytes;
    for (int row = 0; row < TILE_ROWS; ++row) {
        for (int column = 0; column < TILE_WORDS; ++column) {
            Sum sum = ((Sum*)emulated_tile(sums).bytes[row])[column];
            for (int part = 0; part < TILE_WORDS * PARTS; ++part)
                sum += convert(((const Left*)left[row])[part]) *
                       convert(((const Right*)right[part / PARTS])[column * PARTS + part % PARTS]);
            ((Sum*)emulated_tile(sums).bytes[row])[column] = sum;
        }
    }
}

template <int SUMS, int A, int B>
inline void tile_multiply_bfloat16() {
    emulated_multiply<float, uint16_t, uint16_t>(SUMS, A, B, [](uint16_t value) { return from_bfloat16(value); });
}
template <int SUMS, int A, int B>
inline void tile_multiply_bytes() {
    emulated_multiply<int32_t, uint8_t, int8_t>(SUMS, A, B, [](auto value) { return (int32_t)value; });
}

inline bool may_use_tiles() { return !tiles_are_forbidden; }

struct TileScope {};

#elif defined(MINIVLLM_TILES)

// In assembly: the compiler's own spelling is macros, which take numbers of tiles only as literals.
template <int TILE>
MINIVLLM_INLINE void tile_zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(TILE));
}
template <int TILE>
MINIVLLM_INLINE void tile_load(const void* source, ptrdiff_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(source), "r"(stride), "i"(TILE) : "memory");
}
template <int TILE>
MINIVLLM_INLINE void tile_store(void* target, ptrdiff_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(target), "r"(stride), "i"(TILE) : "memory");
}
template <int SUMS, int A, int B>
MINIVLLM_INLINE void tile_multiply_bfloat16() {
    asm volatile("tdpbf16ps %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(B), "i"(A), "i"(SUMS));
}
template <int SUMS, int A, int B>
MINIVLLM_INLINE void tile_multiply_bytes() {  // unsigned times signed
    asm volatile("tdpbusd %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(B), "i"(A), "i"(SUMS));
}

// Linux lends a process the unit's registers on request.
inline bool may_use_tiles() {
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    static const bool permitted = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    return permitted && !tiles_are_forbidden;
}

// While one lives, its thread's tiles are set up: all eight of full size.
class TileScope {
  public:
    TileScope() {
        if (!may_use_tiles()) return;
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } setup;
        static_assert(sizeof(setup) == 64, "as the instruction expects it");
        asm volatile("ldtilecfg %0" ::"m"(setup));
    }
    ~TileScope() {
        if (may_use_tiles()) asm volatile("tilerelease");
    }
    TileScope(const TileScope&) = delete;
    TileScope& operator=(const TileScope&) = delete;
};

#else

inline bool may_use_tiles() { return false; }
struct TileScope {};

#endif

}  // namespace minivllm
