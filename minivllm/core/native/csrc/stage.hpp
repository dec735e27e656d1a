// How threads share the pieces of a stage, and when the next stage may begin.
//
// Not a barrier: a stage is over when its pieces are done, whoever did them. A thread that the system has put aside holds
// up the others only while it is in the middle of a piece; what it finds done when it comes back it passes by.
#pragma once

#include <sched.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>

namespace minivllm {

inline void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// Sleeps while `word` is `value`, until woken; may return early. Unlike a thread that yields, one that sleeps leaves its
// core to the thread it waits for.
inline void sleep_on(std::atomic<int32_t>& word, int32_t value) {
#if defined(__linux__)
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
#else
    if (word.load() == value) sched_yield();
#endif
}

inline void wake_all(std::atomic<int32_t>& word) {
#if defined(__linux__)
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#endif
}

struct alignas(64) Stage {
    std::atomic<int64_t> next{0};          // first piece that nobody has taken
    std::atomic<int32_t> done{0};          // pieces that are done
    std::atomic<bool> has_sleepers{false};  // somebody may sleep on `done`

    static constexpr int SPINS = 4000;  // about what sleeping and waking up would take

    int64_t take(int64_t count = 1) { return next.fetch_add(count, std::memory_order_relaxed); }

    // This thread has done `own` pieces; returns when all `total` are done, and their results can be read.
    void finish(int64_t own, int64_t total) {
        // Who does the last piece looks for sleepers after counting it; who goes to sleep says so before looking at the
        // count. In the one order of both, one of them sees the other.
        if (own > 0 && done.fetch_add((int32_t)own) + own == total && has_sleepers.load()) wake_all(done);
        for (int turn = 0; done.load(std::memory_order_acquire) < total; ++turn) {
            if (turn < SPINS) {
                pause_briefly();
                continue;
            }
            has_sleepers.store(true);
            const int32_t seen = done.load();
            if (seen < total) sleep_on(done, seen);
        }
    }

    void reset() {
        next.store(0, std::memory_order_relaxed);
        done.store(0, std::memory_order_relaxed);
        has_sleepers.store(false, std::memory_order_relaxed);
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
