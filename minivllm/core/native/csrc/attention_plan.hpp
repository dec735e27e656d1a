// Plans the attention of a step: work items of similar cost, and split-KV for long contexts (flash-decoding).
#pragma once

#include <algorithm>
#include <vector>

#include "kv_layout.hpp"

namespace minivllm {

constexpr int MAX_ITEM_ROWS = 96;
constexpr int ATTENTION_MICRO_ROWS = 6;  // rows per micro-kernel call: 6 * 4 vector accumulators fit in registers
constexpr int MIN_SPLIT_KEYS = 256;      // shorter splits cost more in the reduction than they gain

// S sequences, T tokens. The queries of a sequence are the last of its context.
struct AttentionMetadata {
    int64_t num_sequences, num_tokens;
    const int64_t* query_start_loc;  // (S + 1): tokens query_start_loc[s] .. query_start_loc[s + 1] are of sequence s
    const int64_t* seq_lens;         // (S): context lengths, the tokens of this step included
    const int32_t* block_tables;     // (S, block_table_stride)
    int64_t block_table_stride;
    const int64_t* slot_mapping;     // (T): block * block_size + offset
    int query_len(int sequence) const { return (int)(query_start_loc[sequence + 1] - query_start_loc[sequence]); }
};

// Parameters of one layer. window 0: no sliding window; softcap 0: no cap.
struct AttentionParams {
    int num_query_heads;
    int num_kv_heads;
    float scale;
    float softcap;
    int window;
    int group_size() const { return num_query_heads / num_kv_heads; }  // GQA: query heads per KV head
};

// query (T, query heads, head_size) with strides in elements and a dense last dimension; output of that shape, dense.
struct QueryView {
    const void* query;
    ptrdiff_t token_stride;
    ptrdiff_t head_stride;
    void* output;
    bool is_float32;
};

// A range of rows times a range of keys, of one sequence and KV head. Row r is query r / group_size of the sequence and
// query head r % group_size of the group.
struct WorkItem {
    int sequence;
    int kv_head;
    int first_row, last_row;
    int first_key, last_key;
    int reduction;   // index into AttentionPlan::reductions, or -1: the item covers all keys of its rows
    int partial;     // index of its partial result
};

// The splits of one range of rows: partial results first_partial .. first_partial + num_splits.
struct SplitReduction {
    int first_partial;
    int num_splits;
    int rows;
};

// The work of a step in every layer with the same window and number of query heads.
struct AttentionPlan {
    std::vector<WorkItem> items;  // longest first
    std::vector<SplitReduction> reductions;
    int num_partials = 0;
    int max_rows = 0;
    int grain_size = 1;  // items per claim
};

inline AttentionPlan plan_attention(const AttentionMetadata& metadata, const AttentionParams& params,
                                    int num_threads) {
    struct Candidate {
        WorkItem item;
        int64_t cost;
    };
    const int group_size = params.group_size();
    std::vector<Candidate> unsplit;
    int64_t total_cost = 0;
    for (int sequence = 0; sequence < metadata.num_sequences; ++sequence) {
        const int seq_len = (int)metadata.seq_lens[sequence];
        const int query_len = metadata.query_len(sequence);
        const int rows = query_len * group_size;
        for (int row = 0; row < rows; row += MAX_ITEM_ROWS) {
            const int last_row = std::min(rows, row + MAX_ITEM_ROWS);
            const int first_position = seq_len - query_len + row / group_size;
            const int last_key = seq_len - query_len + (last_row - 1) / group_size + 1;
            int first_key = params.window > 0 ? std::max(0, first_position - params.window + 1) : 0;
            first_key = first_key / KV_PANEL * KV_PANEL;
            // With few rows the cost is that of reading the keys.
            const int64_t cost =
                (int64_t)(last_key - first_key + 16) * std::max(last_row - row, ATTENTION_MICRO_ROWS);
            for (int head = 0; head < params.num_kv_heads; ++head) {
                unsplit.push_back({{sequence, head, row, last_row, first_key, last_key, -1, -1}, cost});
                total_cost += cost;
            }
        }
    }
    const int64_t max_cost = std::max<int64_t>(1, total_cost / (3 * num_threads));
    AttentionPlan plan;
    std::vector<Candidate> candidates;
    for (const Candidate& candidate : unsplit) {
        const WorkItem& item = candidate.item;
        const int keys = item.last_key - item.first_key;
        int num_splits = 1;
        if (num_threads > 1)
            num_splits = (int)std::min<int64_t>((candidate.cost + max_cost - 1) / max_cost, keys / MIN_SPLIT_KEYS);
        plan.max_rows = std::max(plan.max_rows, item.last_row - item.first_row);
        if (num_splits <= 1) {
            candidates.push_back(candidate);
            continue;
        }
        const int split_keys = ((keys + num_splits - 1) / num_splits + KV_PANEL - 1) / KV_PANEL * KV_PANEL;
        num_splits = (keys + split_keys - 1) / split_keys;
        const int reduction = (int)plan.reductions.size();
        plan.reductions.push_back({plan.num_partials, num_splits, item.last_row - item.first_row});
        for (int index = 0; index < num_splits; ++index) {
            Candidate split = candidate;
            split.item.first_key = item.first_key + index * split_keys;
            split.item.last_key = std::min(item.last_key, split.item.first_key + split_keys);
            split.item.reduction = reduction;
            split.item.partial = plan.num_partials++;
            split.cost = candidate.cost / num_splits;
            candidates.push_back(split);
        }
    }
    std::stable_sort(candidates.begin(), candidates.end(),
                     [](const Candidate& a, const Candidate& b) { return a.cost > b.cost; });
    for (const Candidate& candidate : candidates) plan.items.push_back(candidate.item);
    // With many items a thread claims all KV heads of a sequence at once: their keys are adjacent in memory.
    const bool has_many_items = (int)plan.items.size() >= 8 * num_threads * params.num_kv_heads;
    if (has_many_items && plan.reductions.empty()) plan.grain_size = params.num_kv_heads;
    return plan;
}

}  // namespace minivllm
