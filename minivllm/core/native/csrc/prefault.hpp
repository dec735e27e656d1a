// Prefaults the memory of the KV pool in the background.
//
// Memory that was never written has no physical pages. Each first write is a page fault, in which the kernel finds and
// zeroes a page. On a virtual machine whose host allocates memory on demand this takes milliseconds per 2 MiB page and
// would stall the step that writes the page.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>

namespace minivllm {

class Prefaulter {
public:
    // Starts a thread that prefaults `num_regions` adjacent regions of `region_bytes` each. A region is K or V of one
    // layer. The first 2 MiB of every region come first, so that the blocks with the lowest ids are ready first.
    Prefaulter(char* base, int64_t num_regions, int64_t region_bytes)
        : thread([=] { run(base, num_regions, region_bytes); }) {}

    ~Prefaulter() {
        is_stopping = true;
        thread.join();
    }

    bool is_done() const { return done; }

private:
    static constexpr int64_t PART_BYTES = 2 << 20, PAGE_BYTES = 4096;
    std::atomic<bool> is_stopping{false}, done{false};
    std::thread thread;  // declared last: it uses the other members

    void run(char* base, int64_t num_regions, int64_t region_bytes) {
#if defined(SCHED_IDLE)
        // Runs only on cores that are otherwise idle.
        const sched_param param{};
        sched_setscheduler(0, SCHED_IDLE, &param);
#endif
        for (int64_t part = 0; part < region_bytes; part += PART_BYTES)
            for (int64_t region = 0; region < num_regions; ++region) {
                char* first = base + region * region_bytes + part;
                char* last = base + region * region_bytes + std::min(region_bytes, part + PART_BYTES);
                for (char* address = first; address < last; address += PAGE_BYTES) {
                    if (is_stopping) return;
                    fault_in(address);
                }
                fault_in(last - 1);  // `first` need not be aligned to a page, so the end may be in one more page
            }
        done = true;
    }

    // Writes the byte's own value. The compare-exchange cannot overwrite a concurrent write.
    static void fault_in(char* address) {
        char value = __atomic_load_n(address, __ATOMIC_RELAXED);
        __atomic_compare_exchange_n(address, &value, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    }
};

}  // namespace minivllm
