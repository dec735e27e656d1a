// Intel AMX: eight tile registers of 16 rows of 64 bytes, and instructions that multiply them.
//
// MINIVLLM_EMULATE_AMX replaces the instructions by plain C++, so that CPUs without AMX can test the code built on
// them.
#pragma once

#include <type_traits>

#include "vectors.hpp"

#if defined(MINIVLLM_EMULATE_AMX) || (defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__))
#define MINIVLLM_AMX 1
#endif

#if defined(MINIVLLM_AMX) && !defined(MINIVLLM_EMULATE_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace minivllm {

constexpr int TILE_ROWS = 16;
constexpr int TILE_WORDS = 16;  // words of 32 bits per row
constexpr int AMX_MICRO_ROWS = 2 * TILE_ROWS;  // rows per micro-kernel call; 2 x 2 tiles hold the sums of a panel

template <int VALUE>
using TileIndex = std::integral_constant<int, VALUE>;

// Set when the self-test of the products failed (`minivllm_disable_amx`).
inline bool amx_is_disabled = false;

#if defined(MINIVLLM_EMULATE_AMX)

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

// sums[row][column] += sum over word and part of a[row][word][part] * b[word][column][part].
template <typename Sum, typename Left, typename Right, typename Convert>
inline void emulated_dot(int sums, int a, int b, Convert convert) {
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
inline void tile_dot_bfloat16() {
    emulated_dot<float, uint16_t, uint16_t>(SUMS, A, B, [](uint16_t value) { return from_bfloat16(value); });
}
template <int SUMS, int A, int B>
inline void tile_dot_u8s8() {
    emulated_dot<int32_t, uint8_t, int8_t>(SUMS, A, B, [](auto value) { return (int32_t)value; });
}

inline bool amx_is_available() { return !amx_is_disabled; }

struct AmxScope {};

#elif defined(MINIVLLM_AMX)

// Inline assembly: the compiler's intrinsics are macros that accept tile indices only as literals.
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
MINIVLLM_INLINE void tile_dot_bfloat16() {
    asm volatile("tdpbf16ps %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(B), "i"(A), "i"(SUMS));
}
template <int SUMS, int A, int B>
MINIVLLM_INLINE void tile_dot_u8s8() {  // unsigned times signed
    asm volatile("tdpbusd %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(B), "i"(A), "i"(SUMS));
}

// Linux enables the tile registers per process on request.
inline bool amx_is_available() {
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    static const bool permitted = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    return permitted && !amx_is_disabled;
}

// Configures the tile registers of the current thread, all eight at full size, and releases them at the end.
class AmxScope {
  public:
    AmxScope() {
        if (!amx_is_available()) return;
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } config;
        static_assert(sizeof(config) == 64, "size of the operand of ldtilecfg");
        asm volatile("ldtilecfg %0" ::"m"(config));
    }
    ~AmxScope() {
        if (amx_is_available()) asm volatile("tilerelease");
    }
    AmxScope(const AmxScope&) = delete;
    AmxScope& operator=(const AmxScope&) = delete;
};

#else

inline bool amx_is_available() { return false; }
struct AmxScope {};

#endif

}  // namespace minivllm
