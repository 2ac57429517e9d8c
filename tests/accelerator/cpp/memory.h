// Memory of the simulated devices, which is counted, and pinned memory of the host.

#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
using c10::StreamId;

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex kDevices = 2;
constexpr size_t kBytes = size_t{1} << 30; // of memory that a device has
constexpr int kUnwritten = 0xFF; // bytes of floats that are NaN

thread_local DeviceIndex current_device = 0;

void check_index(DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < kDevices, "invalid device ordinal ", int(index), ": there are ", int(kDevices));
}

struct Block {
  size_t bytes;
  DeviceIndex device;
};

void release(void* address);

// Memory of both devices; new and freed memory holds NaNs.
struct Heap final : c10::DeviceAllocator {
  std::mutex mutex;
  std::map<void*, Block> blocks;
  c10::CachingDeviceAllocator::DeviceStats stats[kDevices];

  c10::DataPtr allocate(size_t bytes) override {
    const auto index = current_device;
    if (bytes == 0) {
      return {nullptr, nullptr, &release, Device(kDevice, index)};
    }
    std::lock_guard<std::mutex> guard(mutex);
    auto& used = stats[index].allocated_bytes[0];
    TORCH_CHECK_WITH(
        OutOfMemoryError, used.current + bytes <= kBytes, "sim:", int(index), " has ", kBytes, " bytes, of which ",
        used.current, " are in use; ", bytes, " can't be allocated");
    void* address = std::malloc(bytes);
    std::memset(address, kUnwritten, bytes);
    blocks[address] = {bytes, index};
    count(index, bytes, true);
    return {address, address, &release, Device(kDevice, index)};
  }

  void free(void* address) {
    std::lock_guard<std::mutex> guard(mutex);
    const auto found = blocks.find(address);
    if (found == blocks.end()) {
      return;
    }
    std::memset(address, kUnwritten, found->second.bytes);
    count(found->second.device, found->second.bytes, false);
    blocks.erase(found);
    std::free(address);
  }

  void count(DeviceIndex index, size_t bytes, bool more) {
    auto& own = stats[index];
    for (auto* each : {&own.allocated_bytes, &own.reserved_bytes, &own.active_bytes, &own.requested_bytes}) {
      more ? (*each)[0].increase(bytes) : (*each)[0].decrease(bytes);
    }
    for (auto* each : {&own.allocation, &own.segment, &own.active}) {
      more ? (*each)[0].increase(1) : (*each)[0].decrease(1);
    }
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex index) override {
    check_index(index);
    return stats[index];
  }
  void resetAccumulatedStats(DeviceIndex index) override {
    check_index(index);
    stats[index].allocated_bytes[0].reset_accumulated();
  }
  void resetPeakStats(DeviceIndex index) override {
    check_index(index);
    auto& own = stats[index];
    for (auto* each : {&own.allocated_bytes, &own.reserved_bytes, &own.active_bytes, &own.requested_bytes}) {
      (*each)[0].reset_peak();
    }
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex index) override {
    check_index(index);
    return {kBytes - stats[index].allocated_bytes[0].current, kBytes};
  }
};

Heap heap;

void release(void* address) {
  heap.free(address);
}

// Host memory from and to which copies may be made late.
struct PinnedHeap final : c10::Allocator {
  std::mutex mutex;
  std::map<const void*, size_t> blocks;

  c10::DataPtr allocate(size_t bytes) override;
  bool holds(const void* address) {
    std::lock_guard<std::mutex> guard(mutex);
    auto after = blocks.upper_bound(address);
    if (after == blocks.begin()) {
      return false;
    }
    --after;
    return static_cast<const char*>(address) < static_cast<const char*>(after->first) + after->second;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

PinnedHeap pinned;

void release_pinned(void* address) {
  std::lock_guard<std::mutex> guard(pinned.mutex);
  pinned.blocks.erase(address);
  std::free(address);
}

c10::DataPtr PinnedHeap::allocate(size_t bytes) {
  void* address = std::malloc(bytes + 1); // one of 0 bytes is pinned, too
  std::lock_guard<std::mutex> guard(mutex);
  blocks[address] = bytes + 1;
  return {address, address, &release_pinned, Device(c10::DeviceType::CPU)};
}

} // namespace
