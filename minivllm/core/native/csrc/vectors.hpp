// SIMD vectors of 16 floats in the compiler's vector extensions. On CPUs with narrower registers the compiler splits
// them. Operations without a portable form, or with a slow one, have an AVX-512 version.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace minivllm {

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

constexpr int LANES = 16;

// Vectors of one CPU register, for inner loops: the compiler keeps wider accumulators in memory.
#if defined(__AVX512F__)
constexpr int REGISTER_LANES = 16;
#elif defined(__AVX__)
constexpr int REGISTER_LANES = 8;
#else
constexpr int REGISTER_LANES = 4;
#endif
typedef float RegisterFloats __attribute__((vector_size(4 * REGISTER_LANES)));
typedef int32_t RegisterInts __attribute__((vector_size(4 * REGISTER_LANES)));
typedef uint32_t RegisterWords __attribute__((vector_size(4 * REGISTER_LANES)));

#define MINIVLLM_INLINE inline __attribute__((always_inline))

template <typename Vector>
MINIVLLM_INLINE Vector load(const void* source) {
    Vector result;
    std::memcpy(&result, source, sizeof(Vector));
    return result;
}

template <typename Vector>
MINIVLLM_INLINE void store(void* target, Vector vector) {
    std::memcpy(target, &vector, sizeof(Vector));
}

MINIVLLM_INLINE f32x16 splat(float value) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_set1_ps(value);
#else
    return value - f32x16{};
#endif
}

MINIVLLM_INLINE u32x16 splat_word(uint32_t word) {
#if defined(__AVX512F__)
    return (u32x16)_mm512_set1_epi32((int32_t)word);
#else
    return word + u32x16{};
#endif
}

MINIVLLM_INLINE RegisterWords splat_register(uint32_t word) {
#if defined(__AVX512F__)
    return splat_word(word);
#else
    return word + RegisterWords{};
#endif
}

MINIVLLM_INLINE i32x16 lane_indices() { return i32x16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

MINIVLLM_INLINE f32x16 maximum(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}

// Returns whether a > b in any lane.
MINIVLLM_INLINE bool any_greater(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ) != 0;
#else
    i32x16 greater = a > b;
    int32_t any = 0;
    for (int lane = 0; lane < LANES; ++lane) any |= greater[lane];
    return any != 0;
#endif
}

MINIVLLM_INLINE float reduce_sum(f32x16 a) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)a);
#else
    float total = 0;
    for (int lane = 0; lane < LANES; ++lane) total += a[lane];
    return total;
#endif
}

MINIVLLM_INLINE float reduce_max(f32x16 a) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)a);
#else
    float result = a[0];
    for (int lane = 1; lane < LANES; ++lane) result = a[lane] > result ? a[lane] : result;
    return result;
#endif
}

MINIVLLM_INLINE f32x16 absolute(f32x16 a) { return (f32x16)((u32x16)a & (0x7fffffffu - u32x16{})); }

// 2^x for x up to 127; exactly 0 below -126. Relative error about 2e-7.
MINIVLLM_INLINE f32x16 exp2(f32x16 x) {
    const f32x16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    f32x16 clamped = maximum(splat(-127.0f), x);  // in this order NaN stays NaN
    f32x16 integer = (clamped + magic) - magic;
    f32x16 fraction = clamped - integer;
    f32x16 polynomial = splat(1.32764654e-3f);
    polynomial = polynomial * fraction + splat(9.67554096e-3f);
    polynomial = polynomial * fraction + splat(5.55071346e-2f);
    polynomial = polynomial * fraction + splat(2.40221202e-1f);
    polynomial = polynomial * fraction + splat(6.93146944e-1f);
    polynomial = polynomial * fraction + splat(1.0f);
#if defined(__AVX512F__)
    f32x16 result = (f32x16)_mm512_scalef_ps((__m512)polynomial, (__m512)integer);
    return (f32x16)_mm512_maskz_mov_ps(_mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ),
                                       (__m512)result);
#else
    i32x16 exponent = __builtin_convertvector(integer, i32x16) << 23;
    f32x16 result = (f32x16)((i32x16)polynomial + exponent);
    return x < -126.0f ? f32x16{} : result;
#endif
}

constexpr float LOG2_E = 1.44269504088896f;

MINIVLLM_INLINE f32x16 tanh(f32x16 x) {
    f32x16 exponent = x * splat(2.0f * LOG2_E);
    exponent = maximum(splat(-60.0f), -maximum(splat(-60.0f), -exponent));
    return splat(1.0f) - splat(2.0f) / (exp2(exponent) + splat(1.0f));
}

// x / (1 + e^-x)
MINIVLLM_INLINE f32x16 silu(f32x16 x) {
    f32x16 exponent = maximum(splat(-126.0f), -maximum(splat(-126.0f), x * splat(LOG2_E)));
    return x / (splat(1.0f) + exp2(exponent));
}

// ---- bfloat16: the upper 16 bits of a float32 ------------------------------------------------------------------

// Widen the even or the odd elements of 16 pairs of bfloat16.
MINIVLLM_INLINE f32x16 widen_even(u32x16 pairs) { return (f32x16)(pairs << 16); }
MINIVLLM_INLINE f32x16 widen_odd(u32x16 pairs) { return (f32x16)(pairs & (0xffff0000u - u32x16{})); }

MINIVLLM_INLINE float from_bfloat16(uint16_t value) {
    uint32_t bits = (uint32_t)value << 16;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}

MINIVLLM_INLINE f32x16 from_bfloat16(u16x16 values) { return (f32x16)(__builtin_convertvector(values, u32x16) << 16); }

// Rounds to nearest, ties to even; NaN stays NaN.
MINIVLLM_INLINE u16x16 to_bfloat16(f32x16 values) {
#if defined(__AVX512BF16__)
    return (u16x16)_mm512_cvtneps_pbh((__m512)values);
#else
    u32x16 bits = (u32x16)values;
    u32x16 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    u32x16 nan = (bits >> 16) | 0x40u;
    u32x16 chosen = (u32x16)(values != values ? (i32x16)nan : (i32x16)rounded);
    return __builtin_convertvector(chosen, u16x16);
#endif
}

MINIVLLM_INLINE uint16_t to_bfloat16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (value != value) return (uint16_t)((bits >> 16) | 0x40u);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

MINIVLLM_INLINE void prefetch_l1(const void* address) { __builtin_prefetch(address, 0, 3); }
MINIVLLM_INLINE void prefetch_l2(const void* address) { __builtin_prefetch(address, 0, 2); }

}  // namespace minivllm
