// A CPU allocator for torch that writes down every allocation and every free, of all threads.
//
// torch's own profiler misses what other threads free: gloo's workers often drop the last reference
// to a communication buffer, and its free would never be seen. Here the log is complete and ordered.

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <cstdint>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace {

std::mutex mutex;
std::unordered_map<void*, int64_t> sizes; // blocks that are alive
std::vector<int64_t> events;              // +bytes, -bytes, 0 = mark
bool is_logging = true;

void release(void* block) {
  if (block == nullptr) {
    return;
  }
  {
    std::lock_guard<std::mutex> guard(mutex);
    auto found = sizes.find(block);
    if (is_logging) {
      events.push_back(-found->second);
    }
    sizes.erase(found);
  }
  c10::free_cpu(block);
}

struct LoggingAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    void* block = c10::alloc_cpu(num_bytes);
    if (block != nullptr) {
      std::lock_guard<std::mutex> guard(mutex);
      sizes[block] = static_cast<int64_t>(num_bytes);
      if (is_logging) {
        events.push_back(static_cast<int64_t>(num_bytes));
      }
    }
    return {block, block, &release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }

  void copy_data(void* target, const void* source, size_t num_bytes) const override {
    std::memcpy(target, source, num_bytes);
  }
};

LoggingAllocator allocator;

} // namespace

extern "C" {

void bench_install() {
  c10::SetCPUAllocator(&allocator, /*priority=*/1);
}

// A step begins or ends here.
void bench_mark() {
  std::lock_guard<std::mutex> guard(mutex);
  if (is_logging) {
    events.push_back(0);
  }
}

int64_t bench_num_events() {
  std::lock_guard<std::mutex> guard(mutex);
  return static_cast<int64_t>(events.size());
}

// Copies the log, ends it, and lets torch's own allocator take over again for new blocks.
void bench_take_events(int64_t* out) {
  c10::SetCPUAllocator(c10::GetDefaultCPUAllocator(), /*priority=*/1);
  std::lock_guard<std::mutex> guard(mutex);
  std::memcpy(out, events.data(), events.size() * sizeof(int64_t));
  is_logging = false;
  events = {};
}

}
