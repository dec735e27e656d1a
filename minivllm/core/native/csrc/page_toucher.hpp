// Makes the system hand out the memory of the KV pool before a request needs it.
//
// Memory that was never written has no pages yet. Each first write then waits until the system has found and cleared one:
// on a virtual machine whose host gives memory only now, milliseconds for two megabytes, in the middle of a step.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>

namespace minivllm {

class PageToucher {
public:
    // Touches `regions` of `region_bytes`, one behind the other, the first part of each first: so the pages of the first
    // blocks come first, whose K and V lie one layer a region.
    PageToucher(char* base, int64_t regions, int64_t region_bytes)
        : thread([=] { run(base, regions, region_bytes); }) {}

    ~PageToucher() {
        is_stopping = true;
        thread.join();
    }

    bool is_done() const { return done; }

private:
    static constexpr int64_t PART = 2 << 20, PAGE = 4096;
    std::atomic<bool> is_stopping{false}, done{false};
    std::thread thread;  // last: it uses the others

    void run(char* base, int64_t regions, int64_t region_bytes) {
#if defined(SCHED_IDLE)
        // Only what nobody else wants of the cores.
        const sched_param param{};
        sched_setscheduler(0, SCHED_IDLE, &param);
#endif
        for (int64_t part = 0; part < region_bytes; part += PART)
            for (int64_t region = 0; region < regions; ++region) {
                char* first = base + region * region_bytes + part;
                char* last = base + region * region_bytes + std::min(region_bytes, part + PART);
                for (char* place = first; place < last; place += PAGE) {
                    if (is_stopping) return;
                    touch(place);
                }
                touch(last - 1);  // memory need not begin where a page does: its end may lie in one more
            }
        done = true;
    }

    // Writes what stands there, in one piece: whoever writes at the same moment keeps what he wrote.
    static void touch(char* place) {
        char value = __atomic_load_n(place, __ATOMIC_RELAXED);
        __atomic_compare_exchange_n(place, &value, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    }
};

}  // namespace minivllm
