// Attention over the paged pool: reads K and V where they lie, through the block tables.
//
// The rows of a sequence and KV head are its queries times the query heads that share the KV head. An item is a run of
// rows and a run of keys; items are handed out to threads longest first. Within an item keys pass in chunks of 64 and
// rows in groups of up to 6: scores, softmax with a running maximum, weighted sum, all in float32. When there are too
// few items for the threads, long contexts are cut, and the last thread to finish a piece joins them.
#pragma once

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <vector>

#include "kv_layout.hpp"

namespace minivllm {

constexpr int MAX_ROWS = 96;     // rows of an item
constexpr int ROW_GROUP = 6;     // rows whose accumulators fit in registers: 6 * 4 vectors
constexpr int MIN_PIECE = 256;   // keys; shorter pieces cost more to join than they gain

struct Layout {
    int num_sequences;
    const int64_t* query_starts;   // (S + 1)
    const int64_t* context_lens;   // (S)
    const int32_t* block_tables;   // (S, block_table_stride)
    ptrdiff_t block_table_stride;
};

// Head counts and the meaning of scores, one layer. window 0: none; softcap 0: none.
struct Heads {
    int num_query_heads;
    int num_kv_heads;
    float scale;
    float softcap;
    int window;
    int rows_per_query() const { return num_query_heads / num_kv_heads; }
};

// Queries in, result out; strides in elements, the head dimension is dense. The result is (T, query heads, head_size).
struct Queries {
    const void* query;
    ptrdiff_t token_stride;
    ptrdiff_t head_stride;
    void* output;
    bool is_float32;
};

struct Item {
    int sequence;
    int kv_head;
    int first_row, last_row;
    int first_key, last_key;
    int join;      // index into Plan::joins, or -1: the item is whole
    int partial;   // index of its partial result
};

struct Join {
    int first_partial;
    int num_partials;
    int rows;
};

// What is to be done in a step by all layers of one window; the counters are reset for each layer.
struct Plan {
    std::vector<Item> items;
    std::vector<Join> joins;
    int num_partials = 0;
    int max_rows = 0;
    int run_length = 1;  // items that a thread takes at once
};

inline Plan make_plan(const Layout& layout, const Heads& heads, int num_threads) {
    struct Sized {
        Item item;
        int64_t cost;
    };
    const int sharing = heads.rows_per_query();
    std::vector<Sized> whole;
    int64_t total = 0;
    for (int sequence = 0; sequence < layout.num_sequences; ++sequence) {
        const int context = (int)layout.context_lens[sequence];
        const int queries = (int)(layout.query_starts[sequence + 1] - layout.query_starts[sequence]);
        const int rows = queries * sharing;
        for (int row = 0; row < rows; row += MAX_ROWS) {
            const int last_row = std::min(rows, row + MAX_ROWS);
            const int first_position = context - queries + row / sharing;
            const int last_key = context - queries + (last_row - 1) / sharing + 1;
            int first_key = heads.window > 0 ? std::max(0, first_position - heads.window + 1) : 0;
            first_key = first_key / TILE * TILE;
            // A few rows cost what reading the keys costs.
            const int64_t cost = (int64_t)(last_key - first_key + 16) * std::max(last_row - row, ROW_GROUP);
            for (int head = 0; head < heads.num_kv_heads; ++head) {
                whole.push_back({{sequence, head, row, last_row, first_key, last_key, -1, -1}, cost});
                total += cost;
            }
        }
    }
    const int64_t most = std::max<int64_t>(1, total / (3 * num_threads));
    Plan plan;
    std::vector<Sized> sized;
    for (const Sized& candidate : whole) {
        const Item& item = candidate.item;
        const int keys = item.last_key - item.first_key;
        int pieces = num_threads == 1 ? 1 : (int)std::min<int64_t>((candidate.cost + most - 1) / most, keys / MIN_PIECE);
        plan.max_rows = std::max(plan.max_rows, item.last_row - item.first_row);
        if (pieces <= 1) {
            sized.push_back(candidate);
            continue;
        }
        const int step = ((keys + pieces - 1) / pieces + TILE - 1) / TILE * TILE;
        pieces = (keys + step - 1) / step;
        const int join = (int)plan.joins.size();
        plan.joins.push_back({plan.num_partials, pieces, item.last_row - item.first_row});
        for (int piece = 0; piece < pieces; ++piece) {
            Sized part = candidate;
            part.item.first_key = item.first_key + piece * step;
            part.item.last_key = std::min(item.last_key, part.item.first_key + step);
            part.item.join = join;
            part.item.partial = plan.num_partials++;
            part.cost = candidate.cost / pieces;
            sized.push_back(part);
        }
    }
    std::stable_sort(sized.begin(), sized.end(), [](const Sized& a, const Sized& b) { return a.cost > b.cost; });
    for (const Sized& candidate : sized) plan.items.push_back(candidate.item);
    const bool many = (int)plan.items.size() >= 8 * num_threads * heads.num_kv_heads;
    if (many && plan.joins.empty()) plan.run_length = heads.num_kv_heads;
    return plan;
}

struct AlignedDelete {
    void operator()(void* memory) const { std::free(memory); }
};
template <typename Element>
using Buffer = std::unique_ptr<Element[], AlignedDelete>;

template <typename Element>
Buffer<Element> make_buffer(size_t count) {
    const size_t bytes = (count * sizeof(Element) + 63) / 64 * 64;
    return Buffer<Element>((Element*)std::aligned_alloc(64, std::max<size_t>(bytes, 64)));
}

// What one thread needs to work on an item.
struct Scratch {
    Buffer<float> query, output, scores, highest, weight_sums;
    Buffer<char> keys, values;
    int padded_size = 0;
    void reserve(int head_size) {
        const int padded = (head_size + LANES - 1) / LANES * LANES;
        if (padded <= padded_size) return;
        padded_size = padded;
        query = make_buffer<float>((size_t)MAX_ROWS * padded);
        output = make_buffer<float>((size_t)MAX_ROWS * padded);
        scores = make_buffer<float>((size_t)ROW_GROUP * CHUNK);
        highest = make_buffer<float>(MAX_ROWS);
        weight_sums = make_buffer<float>(MAX_ROWS * LANES);
        keys = make_buffer<char>((size_t)CHUNK * padded * sizeof(float));
        values = make_buffer<char>((size_t)CHUNK * padded * sizeof(float));
    }
};

// Results of pieces, shared by the threads. Layers follow one another, so that all use the same memory; only the counts
// of finished pieces are each layer's own.
struct Partials {
    Buffer<float> output, highest, weight_sum;
    std::vector<std::atomic<int>> finished;  // for each layer, for each join of its plan
    size_t capacity = 0;
    size_t joins = 0;
    void reserve(const Plan& plan, int padded_size) {
        const size_t needed = (size_t)plan.num_partials * plan.max_rows * padded_size;
        joins = std::max(joins, plan.joins.size());
        if (needed <= capacity) return;
        capacity = needed;
        output = make_buffer<float>(needed);
        highest = make_buffer<float>(needed / padded_size);
        weight_sum = make_buffer<float>(needed / padded_size);
    }
    void start(size_t layers) {
        if (finished.size() < layers * joins) finished = std::vector<std::atomic<int>>(layers * joins);
        for (auto& count : finished) count.store(0, std::memory_order_relaxed);
    }
    std::atomic<int>* counts(size_t layer) { return finished.data() + layer * joins; }
};

constexpr float NO_SCORE = -INFINITY;

// Scores of ROWS rows against the keys of TILES tiles, not scaled beyond what the query is. With FETCH, what lies at
// `next` is brought into the cache meanwhile: the keys of the next chunk here, its values in `weigh_rows`, so that the
// memory is never idle.
template <typename Cache, int ROWS, int TILES, bool FETCH>
inline __attribute__((noinline)) void score_rows(const float* query, int padded_size,
                                                 const typename Cache::Element* const (&tiles)[CHUNK_TILES],
                                                 const typename Cache::Element* const (&next)[CHUNK_TILES],
                                                 float* scores) {
    constexpr int PAIR = Cache::PAIR;
    f32x16 sums[ROWS][TILES] = {};
    const int steps = padded_size / PAIR;
    for (int step = 0; step < steps; ++step) {
        const ptrdiff_t at = (ptrdiff_t)step * TILE * PAIR;
        if (FETCH) {
#pragma GCC unroll 4
            for (int tile = 0; tile < CHUNK_TILES; ++tile) prefetch(next[tile] + at);
        }
#pragma GCC unroll 2
        for (int part = 0; part < PAIR; ++part) {
            f32x16 keys[TILES];
#pragma GCC unroll 4
            for (int tile = 0; tile < TILES; ++tile) keys[tile] = Cache::widen(tiles[tile] + at, part);
#pragma GCC unroll 6
            for (int row = 0; row < ROWS; ++row) {
                const f32x16 factor = splat(query[row * padded_size + step * PAIR + part]);
#pragma GCC unroll 4
                for (int tile = 0; tile < TILES; ++tile) sums[row][tile] += factor * keys[tile];
            }
        }
    }
#pragma GCC unroll 6
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 4
        for (int tile = 0; tile < TILES; ++tile) store(scores + row * CHUNK + tile * TILE, sums[row][tile]);
}

// output[row] = output[row] * factors[row] + sum over live keys of weights[row][key] * V[key], VECTORS * 16 dimensions.
template <typename Cache, int ROWS, int VECTORS, bool FETCH>
inline void weigh_columns(const float* weights, const float* factors, int live,
                          const typename Cache::Element* const (&tiles)[CHUNK_TILES],
                          const typename Cache::Element* const (&next)[CHUNK_TILES], int padded_size, int column,
                          float* output) {
    constexpr int PAIR = Cache::PAIR;
    f32x16 sums[ROWS][VECTORS];
#pragma GCC unroll 6
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 4
        for (int vector = 0; vector < VECTORS; ++vector)
            sums[row][vector] =
                load<f32x16>(output + row * padded_size + column + vector * LANES) * splat(factors[row]);
    const int whole_pairs = live / PAIR;
    for (int pair = 0; pair < whole_pairs; ++pair) {
        const ptrdiff_t at = ((ptrdiff_t)(pair % (TILE / PAIR)) * padded_size + column) * PAIR;
        const typename Cache::Element* source = tiles[pair * PAIR / TILE] + at;
        if (FETCH) {
#pragma GCC unroll 4
            for (int vector = 0; vector < VECTORS; ++vector)
                prefetch(next[pair * PAIR / TILE] + at + vector * LANES * PAIR);
        }
#pragma GCC unroll 2
        for (int part = 0; part < PAIR; ++part) {
            f32x16 values[VECTORS];
#pragma GCC unroll 4
            for (int vector = 0; vector < VECTORS; ++vector)
                values[vector] = Cache::widen(source + vector * LANES * PAIR, part);
#pragma GCC unroll 6
            for (int row = 0; row < ROWS; ++row) {
                const f32x16 factor = splat(weights[row * CHUNK + pair * PAIR + part]);
#pragma GCC unroll 4
                for (int vector = 0; vector < VECTORS; ++vector) sums[row][vector] += factor * values[vector];
            }
        }
    }
    if (whole_pairs * PAIR < live) {
        // The second of the last pair was never written: a weight of zero would not stop a NaN.
        const int key = live - 1;
        const typename Cache::Element* source =
            tiles[key / TILE] + ((ptrdiff_t)(key % TILE / PAIR) * padded_size + column) * PAIR;
        for (int vector = 0; vector < VECTORS; ++vector) {
            const f32x16 values = Cache::widen(source + vector * LANES * PAIR, 0);
            for (int row = 0; row < ROWS; ++row) sums[row][vector] += splat(weights[row * CHUNK + key]) * values;
        }
    }
#pragma GCC unroll 6
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 4
        for (int vector = 0; vector < VECTORS; ++vector)
            store(output + row * padded_size + column + vector * LANES, sums[row][vector]);
}

template <typename Cache, int ROWS, bool FETCH>
inline __attribute__((noinline)) void weigh_rows(const float* weights, const float* factors, int live,
                                                 const typename Cache::Element* const (&tiles)[CHUNK_TILES],
                                                 const typename Cache::Element* const (&next)[CHUNK_TILES],
                                                 int padded_size, float* output) {
    int column = 0;
    for (; column + 4 * LANES <= padded_size; column += 4 * LANES)
        weigh_columns<Cache, ROWS, 4, FETCH>(weights, factors, live, tiles, next, padded_size, column, output);
    if (column + 2 * LANES <= padded_size) {
        weigh_columns<Cache, ROWS, 2, FETCH>(weights, factors, live, tiles, next, padded_size, column, output);
        column += 2 * LANES;
    }
    if (column < padded_size)
        weigh_columns<Cache, ROWS, 1, FETCH>(weights, factors, live, tiles, next, padded_size, column, output);
}

// Turns the scores of one row into weights, in TILES tiles. Keys outside first .. last (counted from the start of the
// chunk) get weight 0. Keeps the running maximum, and the sum of weights as one vector: to reduce either to a number
// is slow and rarely needed. Returns the factor for what was summed so far.
template <int TILES>
inline float soften_row(float* scores, int first, int last, bool masked, float softcap, float& highest,
                        float* weight_sums) {
    f32x16 row[TILES];
#pragma GCC unroll 4
    for (int tile = 0; tile < TILES; ++tile) {
        row[tile] = load<f32x16>(scores + tile * TILE);
        if (softcap > 0) row[tile] = splat(softcap * LOG2_E) * hyperbolic_tangent(row[tile]);
        if (masked) {
            i32x16 key = lane_numbers() + tile * TILE;
            row[tile] = ((key >= first) & (key < last)) ? row[tile] : splat(NO_SCORE);
        }
    }
    f32x16 highest_of_lanes = row[0];
#pragma GCC unroll 4
    for (int tile = 1; tile < TILES; ++tile) highest_of_lanes = maximum(highest_of_lanes, row[tile]);
    float factor = 1.0f;
    f32x16 total = load<f32x16>(weight_sums);
    if (any_greater(highest_of_lanes, splat(highest))) {
        const float before = highest;
        highest = largest(highest_of_lanes);
        factor = power_of_two(splat(before - highest))[0];  // 0 when there was no score yet
        total *= splat(factor);
    }
    const f32x16 reference = splat(highest == NO_SCORE ? 0.0f : highest);
#pragma GCC unroll 4
    for (int tile = 0; tile < TILES; ++tile) {
        f32x16 weights = power_of_two(row[tile] - reference);
        total += weights;
        store(scores + tile * TILE, weights);
    }
    store(weight_sums, total);
    return factor;
}

// All that a thread does within one layer.
template <typename Cache>
struct Attention {
    using Element = typename Cache::Element;
    const Layout& layout;
    const Heads& heads;
    const CacheView& cache;
    const Queries& queries;
    const Plan& plan;
    Partials& partials;
    std::atomic<int>* finished;  // pieces done, for each join
    Scratch& scratch;
    const int padded_size = (cache.head_size + LANES - 1) / LANES * LANES;
    const int sharing = heads.rows_per_query();

    struct Chunk {
        const Element* keys[CHUNK_TILES];
        const Element* values[CHUNK_TILES];
        int live;
    };

    // Where keys first .. last_key of an item lie, one chunk of them.
    Chunk find(const Item& item, int first) const {
        Chunk chunk;
        chunk.live = std::min(CHUNK, item.last_key - first);
        const int32_t* table = layout.block_tables + item.sequence * layout.block_table_stride;
        for (int tile = 0; tile < CHUNK_TILES; ++tile) {
            const int position = tile * TILE < chunk.live ? first + tile * TILE : first;
            const ptrdiff_t region = table[position / cache.block_size] * cache.block_stride +
                                     item.kv_head * cache.head_stride +
                                     (ptrdiff_t)(position % cache.block_size) * cache.head_size;
            chunk.keys[tile] = (const Element*)cache.keys + region;
            chunk.values[tile] = (const Element*)cache.values + region;
        }
        return chunk;
    }

    Chunk bring(const Item& item, int first) {
        Chunk chunk;
        chunk.live = std::min(CHUNK, item.last_key - first);
        Element* keys = (Element*)scratch.keys.get();
        Element* values = (Element*)scratch.values.get();
        const int32_t* table = layout.block_tables + item.sequence * layout.block_table_stride;
        gather_chunk<Cache>(cache, table, item.kv_head, first, chunk.live, padded_size, keys, values);
        for (int tile = 0; tile < CHUNK_TILES; ++tile) {
            chunk.keys[tile] = keys + (size_t)tile * TILE * padded_size;
            chunk.values[tile] = values + (size_t)tile * TILE * padded_size;
        }
        return chunk;
    }

    int position_of(const Item& item, int row) const {
        const int count = (int)(layout.query_starts[item.sequence + 1] - layout.query_starts[item.sequence]);
        return (int)layout.context_lens[item.sequence] - count + row / sharing;
    }

    void load_queries(const Item& item) {
        const float factor = heads.softcap > 0 ? heads.scale / heads.softcap : heads.scale * LOG2_E;
        for (int row = item.first_row; row < item.last_row; ++row) {
            float* target = scratch.query.get() + (size_t)(row - item.first_row) * padded_size;
            const int64_t token = layout.query_starts[item.sequence] + row / sharing;
            const ptrdiff_t source = token * queries.token_stride +
                                     (item.kv_head * sharing + row % sharing) * queries.head_stride;
            for (int i = 0; i < cache.head_size; ++i)
                target[i] = factor * (queries.is_float32 ? ((const float*)queries.query)[source + i]
                                                         : from_bfloat16(((const uint16_t*)queries.query)[source + i]));
            for (int i = cache.head_size; i < padded_size; ++i) target[i] = 0;
        }
        const int rows = item.last_row - item.first_row;
        std::fill_n(scratch.output.get(), (size_t)rows * padded_size, 0.0f);
        std::fill_n(scratch.highest.get(), rows, NO_SCORE);
        std::fill_n(scratch.weight_sums.get(), rows * LANES, 0.0f);
    }

    // ROWS rows from `row` on against the keys that the last of them sees of the chunk.
    template <int ROWS, int TILES, bool FETCH>
    void attend_group(const Item& item, int first_key, int row, int live, const Chunk& chunk, const Chunk& next) {
        float* scores = scratch.scores.get();
        score_rows<Cache, ROWS, TILES, FETCH>(scratch.query.get() + (size_t)row * padded_size, padded_size, chunk.keys,
                                              next.keys, scores);
        float factors[ROWS];
        const int window_start = heads.window > 0 ? heads.window - 1 + first_key : INT32_MAX;
        for (int i = 0; i < ROWS; ++i) {
            const int position = position_of(item, item.first_row + row + i);
            const int first = std::max(0, position - window_start);
            const int last = std::min(live, position + 1 - first_key);
            factors[i] = soften_row<TILES>(scores + i * CHUNK, first, last, first > 0 || last < TILES * TILE,
                                           heads.softcap, scratch.highest[row + i],
                                           scratch.weight_sums.get() + (row + i) * LANES);
        }
        weigh_rows<Cache, ROWS, FETCH>(scores, factors, live, chunk.values, next.values, padded_size,
                                       scratch.output.get() + (size_t)row * padded_size);
    }

    template <int ROWS>
    void attend_group(const Item& item, int first_key, int row, const Chunk& chunk, const Chunk& next) {
        const int position = position_of(item, item.first_row + row + ROWS - 1);
        const int live = std::min(chunk.live, position + 1 - first_key);
        if (live <= 0) return;
        const bool fetch = row == 0 && chunk.keys[0] != next.keys[0];
        if (live <= CHUNK / 2)
            attend_group<ROWS, CHUNK_TILES / 2, false>(item, first_key, row, live, chunk, next);
        else if (fetch)
            attend_group<ROWS, CHUNK_TILES, true>(item, first_key, row, live, chunk, next);
        else
            attend_group<ROWS, CHUNK_TILES, false>(item, first_key, row, live, chunk, next);
    }

    void attend_chunk(const Item& item, int first_key, const Chunk& chunk, const Chunk& next) {
        const int rows = item.last_row - item.first_row;
        const int groups = (rows + ROW_GROUP - 1) / ROW_GROUP;
        for (int group = 0; group < groups; ++group) {
            const int row = (int)((int64_t)rows * group / groups);
            const int count = (int)((int64_t)rows * (group + 1) / groups) - row;
            switch (count) {
                case 1: attend_group<1>(item, first_key, row, chunk, next); break;
                case 2: attend_group<2>(item, first_key, row, chunk, next); break;
                case 3: attend_group<3>(item, first_key, row, chunk, next); break;
                case 4: attend_group<4>(item, first_key, row, chunk, next); break;
                case 5: attend_group<5>(item, first_key, row, chunk, next); break;
                default: attend_group<6>(item, first_key, row, chunk, next);
            }
        }
    }

    float weight_sum(int row) const { return sum(load<f32x16>(scratch.weight_sums.get() + row * LANES)); }

    void write_row(const Item& item, int row, const float* source, float weight_sum) {
        const int64_t token = layout.query_starts[item.sequence] + row / sharing;
        const ptrdiff_t target =
            (token * heads.num_query_heads + item.kv_head * sharing + row % sharing) * cache.head_size;
        const float factor = 1.0f / weight_sum;
        for (int i = 0; i < cache.head_size; ++i) {
            if (queries.is_float32)
                ((float*)queries.output)[target + i] = source[i] * factor;
            else
                ((uint16_t*)queries.output)[target + i] = to_bfloat16(source[i] * factor);
        }
    }

    void keep_partial(const Item& item) {
        const int rows = item.last_row - item.first_row;
        const size_t first = (size_t)item.partial * plan.max_rows;
        std::memcpy(partials.output.get() + first * padded_size, scratch.output.get(),
                    (size_t)rows * padded_size * sizeof(float));
        std::memcpy(partials.highest.get() + first, scratch.highest.get(), rows * sizeof(float));
        for (int row = 0; row < rows; ++row) partials.weight_sum[first + row] = weight_sum(row);
        const Join& join = plan.joins[item.join];
        if (finished[item.join].fetch_add(1, std::memory_order_acq_rel) + 1 == join.num_partials)
            join_partials(item, join);
    }

    void join_partials(const Item& item, const Join& join) {
        for (int row = 0; row < join.rows; ++row) {
            float highest = NO_SCORE;
            for (int piece = 0; piece < join.num_partials; ++piece)
                highest = std::max(highest, partials.highest[(size_t)(join.first_partial + piece) * plan.max_rows + row]);
            float total = 0;
            float* output = scratch.output.get();
            std::fill_n(output, padded_size, 0.0f);
            for (int piece = 0; piece < join.num_partials; ++piece) {
                const size_t index = (size_t)(join.first_partial + piece) * plan.max_rows + row;
                if (partials.highest[index] == NO_SCORE) continue;
                const float factor = exp2f(partials.highest[index] - highest);
                total += factor * partials.weight_sum[index];
                const float* source = partials.output.get() + index * padded_size;
                for (int i = 0; i < padded_size; ++i) output[i] += factor * source[i];
            }
            write_row(item, item.first_row + row, output, total);
        }
    }

    // Works on one item; meanwhile fetches the start of the one that this thread takes next.
    void run(const Item& item, const Item* following) {
        load_queries(item);
        const bool tiled = cache.tiled();
        Chunk chunk = tiled ? find(item, item.first_key) : Chunk{};
        for (int first_key = item.first_key; first_key < item.last_key; first_key += CHUNK) {
            Chunk next = chunk;
            if (!tiled) {
                chunk = next = bring(item, first_key);
            } else if (first_key + CHUNK < item.last_key) {
                next = find(item, first_key + CHUNK);
            } else if (following != nullptr) {
                next = find(*following, following->first_key);
            }
            attend_chunk(item, first_key, chunk, next);
            chunk = next;
        }
        if (item.join >= 0) {
            keep_partial(item);
            return;
        }
        for (int row = item.first_row; row < item.last_row; ++row)
            write_row(item, row, scratch.output.get() + (size_t)(row - item.first_row) * padded_size,
                      weight_sum(row - item.first_row));
    }

    // Takes runs of items until none is left. `counter` starts at 0 and is shared by the threads of the layer. Of a
    // sequence that is not cut the heads are a run: their keys lie side by side.
    void run_all(std::atomic<int>& counter) {
        const int count = (int)plan.items.size(), length = plan.run_length;
        int first = counter.fetch_add(length, std::memory_order_relaxed);
        while (first < count) {
            const int following = counter.fetch_add(length, std::memory_order_relaxed);
            const int last = std::min(count, first + length);
            for (int i = first; i < last; ++i) {
                const int next = i + 1 < last ? i + 1 : following;
                run(plan.items[i], next < count ? &plan.items[next] : nullptr);
            }
            first = following;
        }
    }
};

}  // namespace minivllm
