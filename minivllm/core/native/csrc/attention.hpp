// Paged attention on CPUs: reads K and V in the pool through the block tables. Same code for prefill and decode.
//
// A row is one query token and one query head; the rows of a sequence and KV head share its K and V (GQA). Threads
// claim work items of the plan, longest first. Within an item, keys pass in chunks of KV_CHUNK and rows in blocks of up
// to ATTENTION_MICRO_ROWS, as in FlashAttention: S = q . K^T, online softmax, O += P . V, all in float32. Long contexts
// are split (split-KV), and the thread that completes the last split of a range of rows reduces them.
#pragma once

#include <atomic>

#include "attention_kernels.hpp"
#include "attention_plan.hpp"
#include "barrier.hpp"
#include "buffers.hpp"

namespace minivllm {

// Scratch memory of one thread, for one work item at a time.
struct AttentionScratch {
    Buffer<float> query, output;   // (MAX_ITEM_ROWS, padded_size)
    Buffer<float> scores;          // (ATTENTION_MICRO_ROWS, KV_CHUNK)
    Buffer<float> row_max;         // (MAX_ITEM_ROWS)
    Buffer<float> row_sums;        // (MAX_ITEM_ROWS, LANES)
    Buffer<char> keys, values;     // a gathered chunk
    int padded_size = 0;           // head_size rounded up to LANES
    void reserve(int head_size) {
        const int padded = (head_size + LANES - 1) / LANES * LANES;
        if (padded <= padded_size) return;
        padded_size = padded;
        query = make_buffer<float>((size_t)MAX_ITEM_ROWS * padded);
        output = make_buffer<float>((size_t)MAX_ITEM_ROWS * padded);
        scores = make_buffer<float>((size_t)ATTENTION_MICRO_ROWS * KV_CHUNK);
        row_max = make_buffer<float>(MAX_ITEM_ROWS);
        row_sums = make_buffer<float>(MAX_ITEM_ROWS * LANES);
        keys = make_buffer<char>((size_t)KV_CHUNK * padded * sizeof(float));
        values = make_buffer<char>((size_t)KV_CHUNK * padded * sizeof(float));
    }
};

// Partial results of splits, shared by all threads. Layers reuse the same memory, but each has counters of its own,
// which are reset once per step.
struct SplitPartials {
    Buffer<float> output;            // (partials, plan.max_rows, padded_size), not divided by the sum of weights
    Buffer<float> row_max, row_sum;  // (partials, plan.max_rows)
    std::vector<std::atomic<int>> counters;  // (layers, reductions): completed splits
    size_t capacity = 0;
    size_t num_reductions = 0;
    void reserve(const AttentionPlan& plan, int padded_size) {
        const size_t needed = (size_t)plan.num_partials * plan.max_rows * padded_size;
        num_reductions = std::max(num_reductions, plan.reductions.size());
        if (needed <= capacity) return;
        capacity = needed;
        output = make_buffer<float>(needed);
        row_max = make_buffer<float>(needed / padded_size);
        row_sum = make_buffer<float>(needed / padded_size);
    }
    void reset_counters(size_t num_layers) {
        const size_t count = num_layers * num_reductions;
        if (counters.size() < count) counters = std::vector<std::atomic<int>>(count);
        for (auto& counter : counters) counter.store(0, std::memory_order_relaxed);
    }
    std::atomic<int>* counters_of(size_t layer) { return counters.data() + layer * num_reductions; }
};

// One thread's attention of one layer.
template <typename Cache>
struct Attention {
    using Element = typename Cache::Element;
    const AttentionMetadata& metadata;
    const AttentionParams& params;
    const CacheView& cache;
    const QueryView& queries;
    const AttentionPlan& plan;
    SplitPartials& partials;
    std::atomic<int>* completed_splits;  // by reduction
    AttentionScratch& scratch;
    const int padded_size = (cache.head_size + LANES - 1) / LANES * LANES;
    const int group_size = params.group_size();

    // Addresses of the panels of KV_CHUNK tokens, of which the first `num_keys` belong to the item.
    struct Chunk {
        const Element* keys[CHUNK_PANELS];
        const Element* values[CHUNK_PANELS];
        int num_keys;
    };

    // The chunk from token `first` on, in the pool (packed layout). Panels past the item's end repeat the first.
    Chunk locate_chunk(const WorkItem& item, int first) const {
        Chunk chunk;
        chunk.num_keys = std::min(KV_CHUNK, item.last_key - first);
        const int32_t* table = metadata.block_tables + item.sequence * metadata.block_table_stride;
        for (int panel = 0; panel < CHUNK_PANELS; ++panel) {
            const int position = panel * KV_PANEL < chunk.num_keys ? first + panel * KV_PANEL : first;
            const ptrdiff_t region = table[position / cache.block_size] * cache.block_stride +
                                     item.kv_head * cache.head_stride +
                                     (ptrdiff_t)(position % cache.block_size) * cache.head_size;
            chunk.keys[panel] = (const Element*)cache.keys + region;
            chunk.values[panel] = (const Element*)cache.values + region;
        }
        return chunk;
    }

    // The same chunk, gathered from the plain layout into scratch.
    Chunk gather_chunk(const WorkItem& item, int first) {
        Chunk chunk;
        chunk.num_keys = std::min(KV_CHUNK, item.last_key - first);
        Element* keys = (Element*)scratch.keys.get();
        Element* values = (Element*)scratch.values.get();
        const int32_t* table = metadata.block_tables + item.sequence * metadata.block_table_stride;
        gather_panels<Cache>(cache, table, item.kv_head, first, chunk.num_keys, padded_size, keys, values);
        for (int panel = 0; panel < CHUNK_PANELS; ++panel) {
            chunk.keys[panel] = keys + (size_t)panel * KV_PANEL * padded_size;
            chunk.values[panel] = values + (size_t)panel * KV_PANEL * padded_size;
        }
        return chunk;
    }

    int position_of(const WorkItem& item, int row) const {
        return (int)metadata.seq_lens[item.sequence] - metadata.query_len(item.sequence) + row / group_size;
    }

    // Loads the queries, multiplied by the scale of the scores, and initializes the softmax state.
    void load_queries(const WorkItem& item) {
        const float factor = params.softcap > 0 ? params.scale / params.softcap : params.scale * LOG2_E;
        for (int row = item.first_row; row < item.last_row; ++row) {
            float* target = scratch.query.get() + (size_t)(row - item.first_row) * padded_size;
            const int64_t token = metadata.query_start_loc[item.sequence] + row / group_size;
            const ptrdiff_t source = token * queries.token_stride +
                                     (item.kv_head * group_size + row % group_size) * queries.head_stride;
            for (int i = 0; i < cache.head_size; ++i)
                target[i] = factor * (queries.is_float32 ? ((const float*)queries.query)[source + i]
                                                         : from_bfloat16(((const uint16_t*)queries.query)[source + i]));
            for (int i = cache.head_size; i < padded_size; ++i) target[i] = 0;
        }
        const int rows = item.last_row - item.first_row;
        std::fill_n(scratch.output.get(), (size_t)rows * padded_size, 0.0f);
        std::fill_n(scratch.row_max.get(), rows, NEGATIVE_INFINITY);
        std::fill_n(scratch.row_sums.get(), rows * LANES, 0.0f);
    }

    // Attends from ROWS rows, the first of which is `row` of the item, to the first `num_keys` keys of a chunk.
    template <int ROWS, int PANELS, bool PREFETCH>
    void attend_rows(const WorkItem& item, int first_key, int row, int num_keys, const Chunk& chunk,
                     const Chunk& next) {
        float* scores = scratch.scores.get();
        multiply_qk<Cache, ROWS, PANELS, PREFETCH>(scratch.query.get() + (size_t)row * padded_size, padded_size,
                                                   chunk.keys, next.keys, scores);
        float rescale[ROWS];
        const int window_start = params.window > 0 ? params.window - 1 + first_key : INT32_MAX;
        for (int i = 0; i < ROWS; ++i) {
            const int position = position_of(item, item.first_row + row + i);
            const int first = std::max(0, position - window_start);
            const int last = std::min(num_keys, position + 1 - first_key);
            rescale[i] = online_softmax<PANELS>(scores + i * KV_CHUNK, first, last,
                                                first > 0 || last < PANELS * KV_PANEL, params.softcap,
                                                scratch.row_max[row + i], scratch.row_sums.get() + (row + i) * LANES);
        }
        accumulate_pv<Cache, ROWS, PREFETCH>(scores, rescale, num_keys, chunk.values, next.values, padded_size,
                                             scratch.output.get() + (size_t)row * padded_size);
    }

    // Chooses the instance: half a chunk or a full one, with prefetch of `next` for the first rows of the item.
    template <int ROWS>
    void attend_rows(const WorkItem& item, int first_key, int row, const Chunk& chunk, const Chunk& next) {
        const int position = position_of(item, item.first_row + row + ROWS - 1);
        const int num_keys = std::min(chunk.num_keys, position + 1 - first_key);
        if (num_keys <= 0) return;
        const bool prefetch_next = row == 0 && chunk.keys[0] != next.keys[0];
        if (num_keys <= KV_CHUNK / 2)
            attend_rows<ROWS, CHUNK_PANELS / 2, false>(item, first_key, row, num_keys, chunk, next);
        else if (prefetch_next)
            attend_rows<ROWS, CHUNK_PANELS, true>(item, first_key, row, num_keys, chunk, next);
        else
            attend_rows<ROWS, CHUNK_PANELS, false>(item, first_key, row, num_keys, chunk, next);
    }

    void attend_chunk(const WorkItem& item, int first_key, const Chunk& chunk, const Chunk& next) {
        const int rows = item.last_row - item.first_row;
        const int blocks = (rows + ATTENTION_MICRO_ROWS - 1) / ATTENTION_MICRO_ROWS;
        for (int block = 0; block < blocks; ++block) {
            const int row = (int)((int64_t)rows * block / blocks);
            const int count = (int)((int64_t)rows * (block + 1) / blocks) - row;
            switch (count) {
                case 1: attend_rows<1>(item, first_key, row, chunk, next); break;
                case 2: attend_rows<2>(item, first_key, row, chunk, next); break;
                case 3: attend_rows<3>(item, first_key, row, chunk, next); break;
                case 4: attend_rows<4>(item, first_key, row, chunk, next); break;
                case 5: attend_rows<5>(item, first_key, row, chunk, next); break;
                default: attend_rows<6>(item, first_key, row, chunk, next);
            }
        }
    }

    float row_sum(int row) const { return reduce_sum(load<f32x16>(scratch.row_sums.get() + row * LANES)); }

    // Writes one row of the output: source / row_sum.
    void write_row(const WorkItem& item, int row, const float* source, float row_sum) {
        const int64_t token = metadata.query_start_loc[item.sequence] + row / group_size;
        const ptrdiff_t target =
            (token * params.num_query_heads + item.kv_head * group_size + row % group_size) * cache.head_size;
        const float factor = 1.0f / row_sum;
        for (int i = 0; i < cache.head_size; ++i) {
            if (queries.is_float32)
                ((float*)queries.output)[target + i] = source[i] * factor;
            else
                ((uint16_t*)queries.output)[target + i] = to_bfloat16(source[i] * factor);
        }
    }

    // Stores the result of a split; reduces all splits if this was the last to complete.
    void write_partial(const WorkItem& item) {
        const int rows = item.last_row - item.first_row;
        const size_t first = (size_t)item.partial * plan.max_rows;
        std::memcpy(partials.output.get() + first * padded_size, scratch.output.get(),
                    (size_t)rows * padded_size * sizeof(float));
        std::memcpy(partials.row_max.get() + first, scratch.row_max.get(), rows * sizeof(float));
        for (int row = 0; row < rows; ++row) partials.row_sum[first + row] = row_sum(row);
        const SplitReduction& reduction = plan.reductions[item.reduction];
        if (completed_splits[item.reduction].fetch_add(1, std::memory_order_acq_rel) + 1 == reduction.num_splits)
            reduce_splits(item, reduction);
    }

    // Rescales the partial results of each row to their common maximum m and adds them: output = sum of 2^(m_i - m) O_i
    // / sum of 2^(m_i - m) l_i, with O_i, m_i, l_i the output, row_max, row_sum of split i.
    void reduce_splits(const WorkItem& item, const SplitReduction& reduction) {
        for (int row = 0; row < reduction.rows; ++row) {
            const size_t first = (size_t)reduction.first_partial * plan.max_rows + row;
            float row_max = NEGATIVE_INFINITY;
            for (int split = 0; split < reduction.num_splits; ++split)
                row_max = std::max(row_max, partials.row_max[first + (size_t)split * plan.max_rows]);
            float total = 0;
            float* output = scratch.output.get();
            std::fill_n(output, padded_size, 0.0f);
            for (int split = 0; split < reduction.num_splits; ++split) {
                const size_t index = first + (size_t)split * plan.max_rows;
                if (partials.row_max[index] == NEGATIVE_INFINITY) continue;  // all keys of the split are masked
                const float factor = exp2f(partials.row_max[index] - row_max);
                total += factor * partials.row_sum[index];
                const float* source = partials.output.get() + index * padded_size;
                for (int i = 0; i < padded_size; ++i) output[i] += factor * source[i];
            }
            write_row(item, item.first_row + row, output, total);
        }
    }

    // Runs one work item; its last chunk prefetches the first chunk of `next_item`, which this thread runs next.
    void run(const WorkItem& item, const WorkItem* next_item) {
        load_queries(item);
        const bool is_packed = cache.is_packed();
        Chunk chunk = is_packed ? locate_chunk(item, item.first_key) : Chunk{};
        for (int first_key = item.first_key; first_key < item.last_key; first_key += KV_CHUNK) {
            Chunk next = chunk;
            if (!is_packed) {
                chunk = next = gather_chunk(item, first_key);
            } else if (first_key + KV_CHUNK < item.last_key) {
                next = locate_chunk(item, first_key + KV_CHUNK);
            } else if (next_item != nullptr) {
                next = locate_chunk(*next_item, next_item->first_key);
            }
            attend_chunk(item, first_key, chunk, next);
            chunk = next;
        }
        if (item.reduction >= 0) {
            write_partial(item);
            return;
        }
        for (int row = item.first_row; row < item.last_row; ++row)
            write_row(item, row, scratch.output.get() + (size_t)(row - item.first_row) * padded_size,
                      row_sum(row - item.first_row));
    }

    // Runs all items, shared with the other threads. Like `parallel_for`, but claims one grain ahead for the prefetch.
    void run_all(LoopBarrier& barrier) {
        const int64_t count = (int64_t)plan.items.size(), grain_size = plan.grain_size;
        int64_t own = 0;
        int64_t first = barrier.claim(grain_size);
        while (first < count) {
            const int64_t next_first = barrier.claim(grain_size);
            const int64_t last = std::min(count, first + grain_size);
            for (int64_t i = first; i < last; ++i) {
                const int64_t next = i + 1 < last ? i + 1 : next_first;
                run(plan.items[i], next < count ? &plan.items[next] : nullptr);
            }
            own += last - first;
            first = next_first;
        }
        barrier.arrive_and_wait(own, count);
    }
};

}  // namespace minivllm
