// Uninitialized arrays aligned to cache lines (64 bytes).
#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>

namespace minivllm {

struct FreeDeleter {
    void operator()(void* memory) const { std::free(memory); }
};
template <typename Element>
using Buffer = std::unique_ptr<Element[], FreeDeleter>;

template <typename Element>
Buffer<Element> make_buffer(size_t count) {
    const size_t bytes = (count * sizeof(Element) + 63) / 64 * 64;
    return Buffer<Element>((Element*)std::aligned_alloc(64, std::max<size_t>(bytes, 64)));
}

}  // namespace minivllm
