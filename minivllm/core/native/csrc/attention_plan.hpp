// How the attention of a step is shared out: items, and how cut contexts are joined.
#pragma once

#include <algorithm>
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

// What is to be done in a step by all layers of one window.
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

}  // namespace minivllm
