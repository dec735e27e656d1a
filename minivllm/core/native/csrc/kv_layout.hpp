// How K and V lie in the pool. One (block, head) region holds block_size * head_size elements; their order is ours.
//
// Tiled (block_size and head_size multiples of 16): the region is cut into tiles of 16 tokens, and in a tile
//   K  [head_size / PAIR][16 tokens][PAIR]     a vector holds one dimension (pair) of 16 keys: q . K needs no reduction
//   V  [16 / PAIR tokens][head_size][PAIR]     a vector holds 16 dimensions of one token (pair)
// with PAIR = 2 for bfloat16 and 1 for float32, so that a vector of 64 bytes widens to PAIR vectors of 16 floats.
// Otherwise plain (token after token), and a chunk is brought into tiles before it is used.
#pragma once

#include "vectors.hpp"

namespace minivllm {

constexpr int TILE = 16;              // tokens a tile
constexpr int CHUNK_TILES = 4;        // tiles that are attended to at once
constexpr int CHUNK = TILE * CHUNK_TILES;

struct BFloat16Cache {
    using Element = uint16_t;
    static constexpr int PAIR = 2;
    static MINIVLLM_INLINE Element narrow(float value) { return to_bfloat16(value); }
    // The first (part 0) or second elements of 16 pairs.
    static MINIVLLM_INLINE f32x16 widen(const void* source, int part) {
        const u32x16 pairs = load<u32x16>(source);
        return part == 0 ? first_of_pairs(pairs) : second_of_pairs(pairs);
    }
    static MINIVLLM_INLINE Element from_input(const void* source, bool is_float32, ptrdiff_t index) {
        return is_float32 ? to_bfloat16(((const float*)source)[index]) : ((const uint16_t*)source)[index];
    }
};

struct Float32Cache {
    using Element = float;
    static constexpr int PAIR = 1;
    static MINIVLLM_INLINE Element narrow(float value) { return value; }
    static MINIVLLM_INLINE f32x16 widen(const void* source, int) { return load<f32x16>(source); }
    static MINIVLLM_INLINE Element from_input(const void* source, bool is_float32, ptrdiff_t index) {
        return is_float32 ? ((const float*)source)[index] : from_bfloat16(((const uint16_t*)source)[index]);
    }
};

// One layer's cache. Strides are in elements.
struct CacheView {
    void* keys;
    void* values;
    ptrdiff_t block_stride;
    ptrdiff_t head_stride;
    int block_size;
    int head_size;
    bool tiled() const { return block_size % TILE == 0 && head_size % LANES == 0; }
};

template <typename Cache>
MINIVLLM_INLINE void put_key(typename Cache::Element* tile, int lane, int dimension, typename Cache::Element value) {
    constexpr int PAIR = Cache::PAIR;
    tile[(dimension / PAIR * TILE + lane) * PAIR + dimension % PAIR] = value;
}

template <typename Cache>
MINIVLLM_INLINE void put_value(typename Cache::Element* tile, int head_size, int lane, int dimension,
                               typename Cache::Element value) {
    constexpr int PAIR = Cache::PAIR;
    tile[(lane / PAIR * head_size + dimension) * PAIR + lane % PAIR] = value;
}

#if defined(__AVX512BW__)
// `write_token` for what it is mostly called with: float32 in, bfloat16 tiles. The other half of a pair of V may be
// written by another thread at the same time, so it must not be read and put back.
inline void write_tile_row(const float* key, const float* value, int head_size, int lane, uint16_t* key_tile,
                           uint16_t* value_tile) {
    for (int i = 0; i < head_size; i += LANES) {
        uint32_t pairs[LANES / 2];
        store(pairs, to_bfloat16(load<f32x16>(key + i)));
        uint32_t* target = (uint32_t*)key_tile + (ptrdiff_t)(i / 2) * TILE + lane;
        for (int pair = 0; pair < LANES / 2; ++pair) target[pair * TILE] = pairs[pair];
        const u32x16 wide = __builtin_convertvector(to_bfloat16(load<f32x16>(value + i)), u32x16);
        uint16_t* row = value_tile + ((ptrdiff_t)(lane / 2) * head_size + i) * 2;
        if (lane % 2 == 0)
            _mm512_mask_storeu_epi16(row, 0x55555555u, (__m512i)wide);
        else
            _mm512_mask_storeu_epi16(row, 0xaaaaaaaau, (__m512i)(wide << 16));
    }
}
#endif

// Writes K and V of one token and head into slot `slot` (block * block_size + offset).
template <typename Cache>
inline void write_token(const CacheView& cache, int64_t slot, int head, const void* key, const void* value,
                        bool is_float32) {
    using Element = typename Cache::Element;
    const int offset = (int)(slot % cache.block_size);
    const ptrdiff_t region = slot / cache.block_size * cache.block_stride + head * cache.head_stride;
    Element* keys = (Element*)cache.keys + region;
    Element* values = (Element*)cache.values + region;
    const int head_size = cache.head_size;
    if (!cache.tiled()) {
        for (int i = 0; i < head_size; ++i) {
            keys[(ptrdiff_t)offset * head_size + i] = Cache::from_input(key, is_float32, i);
            values[(ptrdiff_t)offset * head_size + i] = Cache::from_input(value, is_float32, i);
        }
        return;
    }
    const int lane = offset % TILE;
    const ptrdiff_t tile = (ptrdiff_t)(offset - lane) * head_size;
#if defined(__AVX512BW__)
    if constexpr (Cache::PAIR == 2) {
        if (is_float32)
            return write_tile_row((const float*)key, (const float*)value, head_size, lane, keys + tile, values + tile);
    }
#endif
    for (int i = 0; i < head_size; ++i) {
        put_key<Cache>(keys + tile, lane, i, Cache::from_input(key, is_float32, i));
        put_value<Cache>(values + tile, head_size, lane, i, Cache::from_input(value, is_float32, i));
    }
}

// Brings tokens first .. first + count of a plain cache into CHUNK_TILES tiles at keys and values, zeros after them.
template <typename Cache>
inline void gather_chunk(const CacheView& cache, const int32_t* block_table, int head, int first, int count,
                         int padded_size, typename Cache::Element* keys, typename Cache::Element* values) {
    using Element = typename Cache::Element;
    const size_t tile_elements = (size_t)TILE * padded_size;
    std::memset((void*)keys, 0, tile_elements * CHUNK_TILES * sizeof(Element));
    std::memset((void*)values, 0, tile_elements * CHUNK_TILES * sizeof(Element));
    for (int token = 0; token < count; ++token) {
        const int position = first + token;
        const ptrdiff_t region = block_table[position / cache.block_size] * cache.block_stride +
                                 head * cache.head_stride +
                                 (ptrdiff_t)(position % cache.block_size) * cache.head_size;
        const Element* key = (const Element*)cache.keys + region;
        const Element* value = (const Element*)cache.values + region;
        Element* key_tile = keys + token / TILE * tile_elements;
        Element* value_tile = values + token / TILE * tile_elements;
        for (int i = 0; i < cache.head_size; ++i) {
            put_key<Cache>(key_tile, token % TILE, i, key[i]);
            put_value<Cache>(value_tile, padded_size, token % TILE, i, value[i]);
        }
    }
}

}  // namespace minivllm
