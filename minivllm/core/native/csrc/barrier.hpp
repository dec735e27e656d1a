// Parallel loops inside one OpenMP region: dynamic scheduling by claiming iterations from a shared counter, and a
// barrier after each loop.
//
// The barrier counts completed iterations instead of arrived threads. A preempted thread delays the others only while
// it is inside an iteration; loops that it missed entirely cost them nothing.
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

inline void cpu_relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// Sleeps while `word` equals `value`; may return early. A sleeping thread frees its core for the thread it waits for,
// which a yielding one does not guarantee.
inline void futex_wait(std::atomic<int32_t>& word, int32_t value) {
#if defined(__linux__)
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
#else
    if (word.load() == value) sched_yield();
#endif
}

inline void futex_wake_all(std::atomic<int32_t>& word) {
#if defined(__linux__)
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#endif
}

// State of one loop: the next unclaimed iteration and the number of completed ones.
struct alignas(64) LoopBarrier {
    std::atomic<int64_t> next{0};
    std::atomic<int32_t> completed{0};
    std::atomic<bool> has_sleepers{false};  // a thread may sleep on `completed`

    static constexpr int SPIN_LIMIT = 4000;  // takes about as long as a futex sleep and wake-up

    // Returns the first of `count` claimed iterations; past the end of the loop there is nothing left to claim.
    int64_t claim(int64_t count = 1) { return next.fetch_add(count, std::memory_order_relaxed); }

    // Reports `own` iterations of this thread; returns when all `total` are completed and their results are visible.
    void arrive_and_wait(int64_t own, int64_t total) {
        // The thread that completes the last iteration checks for sleepers after counting it; a thread announces its
        // sleep before it rereads the count. All four accesses are sequentially consistent, so no wake-up is lost.
        if (own > 0 && completed.fetch_add((int32_t)own) + own == total && has_sleepers.load())
            futex_wake_all(completed);
        for (int turn = 0; completed.load(std::memory_order_acquire) < total; ++turn) {
            if (turn < SPIN_LIMIT) {
                cpu_relax();
                continue;
            }
            has_sleepers.store(true);
            const int32_t seen = completed.load();
            if (seen < total) futex_wait(completed, seen);
        }
    }

    void reset() {
        next.store(0, std::memory_order_relaxed);
        completed.store(0, std::memory_order_relaxed);
        has_sleepers.store(false, std::memory_order_relaxed);
    }
};

// Calls body(i) for 0 <= i < count on all threads of the region that call this; `grain_size` iterations per claim.
template <typename Body>
inline void parallel_for(LoopBarrier& barrier, int64_t count, int64_t grain_size, Body body) {
    int64_t own = 0;
    for (int64_t first = barrier.claim(grain_size); first < count; first = barrier.claim(grain_size)) {
        const int64_t last = std::min(count, first + grain_size);
        for (int64_t i = first; i < last; ++i) body(i);
        own += last - first;
    }
    barrier.arrive_and_wait(own, count);
}

}  // namespace minivllm
