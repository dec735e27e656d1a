// How threads share the pieces of a stage, and when the next stage may begin.
//
// Not a barrier: a stage is over when its pieces are done, whoever did them. A thread that the system has put aside holds
// up the others only while it is in the middle of a piece; what it finds done when it comes back it passes by.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace minivllm {

inline void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

struct alignas(64) Stage {
    std::atomic<int64_t> next{0};  // first piece that nobody has taken
    std::atomic<int64_t> done{0};  // pieces that are done

    int64_t take(int64_t count = 1) { return next.fetch_add(count, std::memory_order_relaxed); }

    // This thread has done `own` pieces; returns when all `total` are done, and their results can be read.
    void finish(int64_t own, int64_t total) {
        if (own > 0) done.fetch_add(own, std::memory_order_acq_rel);
        for (int turn = 0; done.load(std::memory_order_acquire) < total; ++turn) {
            if (turn < 4000)
                pause_briefly();
            else
                sched_yield();  // whoever we wait for may need our core
        }
    }

    void reset() {
        next.store(0, std::memory_order_relaxed);
        done.store(0, std::memory_order_relaxed);
    }
};

// Calls work(i) for all i < count, `run` at a time.
template <typename Work>
inline void share(Stage& stage, int64_t count, int64_t run, Work work) {
    int64_t own = 0;
    for (int64_t first = stage.take(run); first < count; first = stage.take(run)) {
        const int64_t last = std::min(count, first + run);
        for (int64_t i = first; i < last; ++i) work(i);
        own += last - first;
    }
    stage.finish(own, count);
}

}  // namespace minivllm
