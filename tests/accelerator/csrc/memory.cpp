// Memory of the devices: an allocator with a budget, in the manner of CUDA's caching allocator, and pinned host memory.

#include "device.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

#include <sys/mman.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>

namespace testdev {
namespace {

constexpr size_t kSpace = size_t(64) << 30;  // addresses of one device
constexpr size_t kAlign = 512;
constexpr size_t kPage = 4096;

size_t rounded(size_t size) { return (size + kAlign - 1) / kAlign * kAlign; }

// Free ranges of addresses, neighbours joined.
class Ranges {
 public:
  void add(char* start, size_t size) {
    auto next = ranges_.lower_bound(start);
    if (next != ranges_.end() && start + size == next->first) {
      size += next->second;
      next = ranges_.erase(next);
    }
    if (next != ranges_.begin()) {
      auto before = std::prev(next);
      if (before->first + before->second == start) {
        before->second += size;
        return;
      }
    }
    ranges_[start] = size;
  }

  // Takes `size` bytes from the smallest range that has them; null if none has.
  char* take(size_t size) {
    auto best = ranges_.end();
    for (auto it = ranges_.begin(); it != ranges_.end(); ++it)
      if (it->second >= size && (best == ranges_.end() || it->second < best->second)) best = it;
    if (best == ranges_.end()) return nullptr;
    char* start = best->first;
    size_t left = best->second - size;
    ranges_.erase(best);
    if (left) ranges_[start + size] = left;
    return start;
  }

  std::map<char*, size_t>& all() { return ranges_; }

 private:
  std::map<char*, size_t> ranges_;
};

struct Use {
  Stream* stream;
  uint64_t position;
};

struct Block {
  size_t size;
  int64_t stream;  // whose work may use the memory at once when it is free again
  std::vector<Stream*> others;
};

struct Waiting {
  char* start;
  Block block;
  std::vector<Use> uses;
};

// One device's memory. Freed memory can be taken again at once by the stream that it was allocated on, whose work runs
// in order; what other streams use must be announced with record_stream, and returns when they have passed.
class Memory {
 public:
  void open(int device) {
    device_ = device;
    int none = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    base_ = static_cast<char*>(mmap(nullptr, kSpace, PROT_NONE, none, -1, 0));
    auto* bytes = static_cast<char*>(mmap(nullptr, kSpace, PROT_READ | PROT_WRITE, none, -1, 0));
    TORCH_CHECK(base_ != MAP_FAILED && bytes != MAP_FAILED, "no addresses for the test accelerator");
    offset_ = bytes - base_;
    unused_.add(base_, kSpace);
  }

  void* allocate(size_t asked) {
    size_t size = rounded(asked);
    std::lock_guard<std::mutex> lock(mutex_);
    collect(false);
    int64_t on = current_stream(device_).id;
    char* start = cached_[on].take(size);
    if (!start) {
      if (reserved_ + size > limit) empty_cache();
      if (reserved_ + size > limit) refuse(asked);
      start = unused_.take(size);
      TORCH_CHECK(start, "no addresses left on the test accelerator");
      count(stats.reserved_bytes, size);
      reserved_ += size;
    }
    live_[start] = Block{size, on, {}};
    count(stats.allocation, 1);
    count(stats.allocated_bytes, size);
    count(stats.active, 1);
    count(stats.active_bytes, size);
    count(stats.requested_bytes, size);
    return start;
  }

  void free(void* pointer) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = live_.find(static_cast<char*>(pointer));
    TORCH_INTERNAL_ASSERT(found != live_.end());
    Block block = found->second;
    live_.erase(found);
    discount(stats.allocation, 1);
    discount(stats.allocated_bytes, block.size);
    discount(stats.requested_bytes, block.size);
    std::vector<Use> uses;
    for (Stream* other : block.others) uses.push_back({other, other->position()});
    waiting_.push_back({static_cast<char*>(pointer), block, uses});
    collect(false);
  }

  void use_on(void* pointer, Stream& other) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = live_.upper_bound(static_cast<char*>(pointer));
    if (found == live_.begin()) return;
    Block& block = std::prev(found)->second;
    if (other.id != block.stream) block.others.push_back(&other);
  }

  void release() {
    std::lock_guard<std::mutex> lock(mutex_);
    empty_cache();
  }

  bool owns(const void* pointer) const { return pointer >= base_ && pointer < base_ + kSpace; }
  ptrdiff_t offset() const { return offset_; }

  std::pair<size_t, size_t> info() {
    std::lock_guard<std::mutex> lock(mutex_);
    collect(false);
    return {limit - std::min<size_t>(limit, reserved_), limit};
  }

  std::atomic<size_t> limit{size_t(1) << 30};
  std::mutex mutex_;
  c10::CachingDeviceAllocator::DeviceStats stats;

 private:
  static void count(c10::CachingAllocator::StatArray& stat, size_t amount) { stat[0].increase(amount); }
  static void discount(c10::CachingAllocator::StatArray& stat, size_t amount) { stat[0].decrease(amount); }

  // Returns freed memory whose other streams have passed to the cache; with `all`, waits for them.
  void collect(bool all) {
    std::vector<Waiting> still;
    for (auto& each : waiting_) {
      bool passed = true;
      for (auto& use : each.uses) {
        if (all) use.stream->finish(use.position);
        passed = passed && use.stream->reached(use.position);
      }
      if (!passed) {
        still.push_back(each);
        continue;
      }
      discount(stats.active, 1);
      discount(stats.active_bytes, each.block.size);
      cached_[each.block.stream].add(each.start, each.block.size);
    }
    waiting_.swap(still);
  }

  // Gives cached memory back to all streams, after all work that may still use it.
  void empty_cache() {
    synchronize(device_);
    collect(true);
    for (auto& [stream, ranges] : cached_) {
      for (auto& [start, size] : ranges.all()) {
        unused_.add(start, size);
        discount(stats.reserved_bytes, size);
        reserved_ -= size;
        char* first = start + offset_ + (kPage - 1);
        first -= reinterpret_cast<uintptr_t>(first) % kPage;
        char* last = start + offset_ + size;
        last -= reinterpret_cast<uintptr_t>(last) % kPage;
        if (first < last) madvise(first, last - first, MADV_DONTNEED);
      }
    }
    cached_.clear();
    ++stats.num_alloc_retries;
  }

  void refuse(size_t asked) {
    ++stats.num_ooms;
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "testdev:", device_, " is out of memory: ", asked, " bytes were asked for, ",
        stats.allocated_bytes[0].current, " of ", limit.load(), " bytes are allocated");
  }

  int device_ = 0;
  char* base_ = nullptr;
  ptrdiff_t offset_ = 0;
  size_t reserved_ = 0;
  Ranges unused_;
  std::map<int64_t, Ranges> cached_;
  std::map<char*, Block> live_;
  std::vector<Waiting> waiting_;
};

Memory& memory(int device) {
  static auto* all = [] {
    auto* made = new Memory[kMaxDevices];
    for (int i = 0; i < kMaxDevices; ++i) made[i].open(i);
    return made;
  }();
  return all[device];
}

void free_on_device(void* pointer) {
  if (pointer) memory(device_of(pointer)).free(pointer);
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    int device = current_device();
    void* start = size ? memory(device).allocate(size) : nullptr;
    return {start, start, &free_on_device, c10::Device(c10::DeviceType::PrivateUse1, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_on_device; }
  void copy_data(void* to, const void* from, size_t count) const override {
    int device = device_of(to);
    ptrdiff_t offset = hidden_offset(device);
    Work work;
    work.engine = Engine::Compute;
    work.run = [=] { std::memcpy(static_cast<char*>(to) + offset, static_cast<const char*>(from) + offset, count); };
    current_stream(device).submit(std::move(work));
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { memory(current_device()).release(); }
  void recordStream(const c10::DataPtr& pointer, c10::Stream on) override {
    if (pointer.get()) record_stream(pointer.get(), stream(on.device_index(), on.id()));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(memory(device).mutex_);
    return memory(device).stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override { each(device, [](auto& s) { s.reset_accumulated(); }); }
  void resetPeakStats(c10::DeviceIndex device) override { each(device, [](auto& s) { s.reset_peak(); }); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override { return memory(device).info(); }

 private:
  template <typename F>
  void each(int device, F change) {
    std::lock_guard<std::mutex> lock(memory(device).mutex_);
    auto& s = memory(device).stats;
    for (auto* stat : {&s.allocation, &s.active, &s.allocated_bytes, &s.reserved_bytes, &s.active_bytes})
      change((*stat)[0]);
  }
};

// ---- pinned host memory --------------------------------------------------------------------------------------------

std::mutex pinned_mutex;
std::map<const char*, size_t>& pinned() {
  static auto* held = new std::map<const char*, size_t>();
  return *held;
}

void free_pinned(void* pointer) {
  if (!pointer) return;
  std::lock_guard<std::mutex> lock(pinned_mutex);
  pinned().erase(static_cast<char*>(pointer));
  std::free(pointer);
}

// Work that reads or writes pinned memory holds on to it, so that it can be freed at once here.
struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t size) override {
    void* start = size ? std::aligned_alloc(kPage, (size + kPage - 1) / kPage * kPage) : nullptr;
    if (start) {
      std::lock_guard<std::mutex> lock(pinned_mutex);
      pinned()[static_cast<char*>(start)] = size;
    }
    return {start, start, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

Allocator device_allocator;
PinnedAllocator pinned_allocator;

struct Registration {
  Registration() {
    c10::SetAllocator(c10::DeviceType::PrivateUse1, &device_allocator);
    at::setHostAllocator(c10::DeviceType::PrivateUse1, &pinned_allocator);
  }
} registration;

}  // namespace

ptrdiff_t hidden_offset(int device) { return memory(device).offset(); }

int device_of(const void* pointer) {
  for (int i = 0; i < kMaxDevices; ++i)
    if (memory(i).owns(pointer)) return i;
  TORCH_CHECK(false, "not a pointer of the test accelerator");
}

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto after = pinned().upper_bound(static_cast<const char*>(pointer));
  if (after == pinned().begin()) return false;
  auto found = std::prev(after);
  return static_cast<const char*>(pointer) < found->first + found->second;
}

void record_stream(void* pointer, Stream& on) { memory(on.device).use_on(pointer, on); }

}  // namespace testdev

extern "C" void testdev_set_memory(int device, uint64_t bytes) { testdev::memory(device).limit = bytes; }
