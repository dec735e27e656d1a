// Layout of K and V in the pool. The region of one (block, KV head) has block_size * head_size elements.
//
// Packed layout (block_size and head_size are multiples of 16): the region consists of panels of 16 tokens.
//   K panel  [head_size / PAIR][16 tokens][PAIR]   a vector holds one dimension of 16 keys: q . K needs no reduction
//   V panel  [16 tokens / PAIR][head_size][PAIR]   a vector holds 16 dimensions of one token
// PAIR is the number of elements per 32 bits: 2 for bfloat16, 1 for float32. A vector of 64 bytes widens to PAIR
// vectors of 16 floats.
//
// Plain layout (all other sizes): [block_size][head_size]. Attention gathers each KV chunk into packed panels first.
#pragma once

#include "vectors.hpp"

namespace minivllm {

constexpr int KV_PANEL = 16;                       // tokens per panel
constexpr int CHUNK_PANELS = 4;
constexpr int KV_CHUNK = KV_PANEL * CHUNK_PANELS;  // keys per iteration of the online softmax

struct BFloat16Cache {
    using Element = uint16_t;
    static constexpr int PAIR = 2;
    // Widens the even (part 0) or odd (part 1) elements of 16 pairs.
    static MINIVLLM_INLINE f32x16 widen(const void* source, int part) {
        const u32x16 pairs = load<u32x16>(source);
        return part == 0 ? widen_even(pairs) : widen_odd(pairs);
    }
    static MINIVLLM_INLINE Element convert(const void* source, bool is_float32, ptrdiff_t index) {
        return is_float32 ? to_bfloat16(((const float*)source)[index]) : ((const uint16_t*)source)[index];
    }
};

struct Float32Cache {
    using Element = float;
    static constexpr int PAIR = 1;
    static MINIVLLM_INLINE f32x16 widen(const void* source, int) { return load<f32x16>(source); }
    static MINIVLLM_INLINE Element convert(const void* source, bool is_float32, ptrdiff_t index) {
        return is_float32 ? ((const float*)source)[index] : from_bfloat16(((const uint16_t*)source)[index]);
    }
};

// K and V of one layer: (blocks, KV heads, region). Strides are in elements.
struct CacheView {
    void* keys;
    void* values;
    ptrdiff_t block_stride;
    ptrdiff_t head_stride;
    int block_size;
    int head_size;
    bool is_packed() const { return block_size % KV_PANEL == 0 && head_size % LANES == 0; }
};

template <typename Cache>
MINIVLLM_INLINE void store_key(typename Cache::Element* panel, int lane, int dimension, typename Cache::Element value) {
    constexpr int PAIR = Cache::PAIR;
    panel[(dimension / PAIR * KV_PANEL + lane) * PAIR + dimension % PAIR] = value;
}

template <typename Cache>
MINIVLLM_INLINE void store_value(typename Cache::Element* panel, int head_size, int lane, int dimension,
                                 typename Cache::Element value) {
    constexpr int PAIR = Cache::PAIR;
    panel[(lane / PAIR * head_size + dimension) * PAIR + lane % PAIR] = value;
}

#if defined(__AVX512BW__)
// Fast path of `write_kv`: float32 input, packed bfloat16 layout. Masked stores, since another thread may write the
// other token of a V pair at the same time.
inline void write_kv_bfloat16(const float* key, const float* value, int head_size, int lane, uint16_t* key_panel,
                              uint16_t* value_panel) {
    for (int i = 0; i < head_size; i += LANES) {
        uint32_t pairs[LANES / 2];
        store(pairs, to_bfloat16(load<f32x16>(key + i)));
        uint32_t* target = (uint32_t*)key_panel + (ptrdiff_t)(i / 2) * KV_PANEL + lane;
        for (int pair = 0; pair < LANES / 2; ++pair) target[pair * KV_PANEL] = pairs[pair];
        const u32x16 widened = __builtin_convertvector(to_bfloat16(load<f32x16>(value + i)), u32x16);
        uint16_t* row = value_panel + ((ptrdiff_t)(lane / 2) * head_size + i) * 2;
        if (lane % 2 == 0)
            _mm512_mask_storeu_epi16(row, 0x55555555u, (__m512i)widened);
        else
            _mm512_mask_storeu_epi16(row, 0xaaaaaaaau, (__m512i)(widened << 16));
    }
}
#endif

// Writes K and V (head_size) of one token and KV head to `slot` = block * block_size + offset.
template <typename Cache>
inline void write_kv(const CacheView& cache, int64_t slot, int head, const void* key, const void* value,
                     bool is_float32) {
    using Element = typename Cache::Element;
    const int offset = (int)(slot % cache.block_size);
    const ptrdiff_t region = slot / cache.block_size * cache.block_stride + head * cache.head_stride;
    Element* keys = (Element*)cache.keys + region;
    Element* values = (Element*)cache.values + region;
    const int head_size = cache.head_size;
    if (!cache.is_packed()) {
        for (int i = 0; i < head_size; ++i) {
            keys[(ptrdiff_t)offset * head_size + i] = Cache::convert(key, is_float32, i);
            values[(ptrdiff_t)offset * head_size + i] = Cache::convert(value, is_float32, i);
        }
        return;
    }
    const int lane = offset % KV_PANEL;
    const ptrdiff_t panel = (ptrdiff_t)(offset - lane) * head_size;
#if defined(__AVX512BW__)
    if constexpr (Cache::PAIR == 2) {
        if (is_float32)
            return write_kv_bfloat16((const float*)key, (const float*)value, head_size, lane, keys + panel,
                                     values + panel);
    }
#endif
    for (int i = 0; i < head_size; ++i) {
        store_key<Cache>(keys + panel, lane, i, Cache::convert(key, is_float32, i));
        store_value<Cache>(values + panel, head_size, lane, i, Cache::convert(value, is_float32, i));
    }
}

// Gathers tokens first .. first + count of a plain cache into CHUNK_PANELS packed panels each of keys and values,
// padded with zeros.
template <typename Cache>
inline void gather_panels(const CacheView& cache, const int32_t* block_table, int head, int first, int count,
                          int padded_size, typename Cache::Element* keys, typename Cache::Element* values) {
    using Element = typename Cache::Element;
    const size_t panel_elements = (size_t)KV_PANEL * padded_size;
    std::memset((void*)keys, 0, panel_elements * CHUNK_PANELS * sizeof(Element));
    std::memset((void*)values, 0, panel_elements * CHUNK_PANELS * sizeof(Element));
    for (int token = 0; token < count; ++token) {
        const int position = first + token;
        const ptrdiff_t region = block_table[position / cache.block_size] * cache.block_stride +
                                 head * cache.head_stride +
                                 (ptrdiff_t)(position % cache.block_size) * cache.head_size;
        const Element* key = (const Element*)cache.keys + region;
        const Element* value = (const Element*)cache.values + region;
        Element* key_panel = keys + token / KV_PANEL * panel_elements;
        Element* value_panel = values + token / KV_PANEL * panel_elements;
        for (int i = 0; i < cache.head_size; ++i) {
            store_key<Cache>(key_panel, token % KV_PANEL, i, key[i]);
            store_value<Cache>(value_panel, padded_size, token % KV_PANEL, i, value[i]);
        }
    }
}

}  // namespace minivllm
