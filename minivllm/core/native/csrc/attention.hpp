// Attention over the paged pool: reads K and V where they lie, through the block tables.
//
// The rows of a sequence and KV head are its queries times the query heads that share the KV head. An item is a run of
// rows and a run of keys; items are handed out to threads longest first. Within an item keys pass in chunks of 64 and
// rows in groups of up to 6: scores, softmax with a running maximum, weighted sum, all in float32. When there are too
// few items for the threads, long contexts are cut, and the last thread to finish a piece joins them.
#pragma once

#include <atomic>

#include "attention_kernels.hpp"
#include "attention_plan.hpp"
#include "buffers.hpp"
#include "stage.hpp"

namespace minivllm {

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

    // Works on runs of items until all are done. Of a sequence that is not cut the heads are a run: their keys lie side
    // by side.
    void run_all(Stage& stage) {
        const int64_t count = (int64_t)plan.items.size(), length = plan.run_length;
        int64_t own = 0;
        int64_t first = stage.take(length);
        while (first < count) {
            const int64_t following = stage.take(length);
            const int64_t last = std::min(count, first + length);
            for (int64_t i = first; i < last; ++i) {
                const int64_t next = i + 1 < last ? i + 1 : following;
                run(plan.items[i], next < count ? &plan.items[next] : nullptr);
            }
            own += last - first;
            first = following;
        }
        stage.finish(own, count);
    }
};

}  // namespace minivllm
