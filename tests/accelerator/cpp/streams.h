// Streams of the simulated devices, on which copies between device and pinned memory are made late, and their events.

#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <vector>

#include "memory.h"

namespace {

// What a stream has yet to do.
struct Work {
  std::function<void()> act;
  bool upload = false; // from the host, which has to be before the next kernel
  uint64_t number = 0;
};

struct Event {
  Stream stream;
  uint64_t number;
  bool asked = false;
};

std::recursive_mutex queues_mutex;
std::map<Stream, std::deque<Work>, bool (*)(const Stream&, const Stream&)> queues(
    [](const Stream& a, const Stream& b) { return a.hash() < b.hash(); });
uint64_t last_number = 0;
StreamId last_stream = 0;

Stream default_stream(DeviceIndex index) {
  return Stream(Stream::DEFAULT, Device(kDevice, index));
}

Stream& current_stream(DeviceIndex index) {
  thread_local std::vector<Stream> streams{default_stream(0), default_stream(1)};
  check_index(index);
  return streams[index];
}

void enqueue(Work work, const Stream& stream) {
  std::lock_guard<std::recursive_mutex> guard(queues_mutex);
  work.number = ++last_number;
  queues[stream].push_back(std::move(work));
}

void run(const Stream& stream, uint64_t up_to = UINT64_MAX) {
  std::lock_guard<std::recursive_mutex> guard(queues_mutex);
  auto& queue = queues[stream];
  while (!queue.empty() && queue.front().number <= up_to) {
    const Work work = std::move(queue.front());
    queue.pop_front();
    work.act();
  }
}

bool idle(const Stream& stream, uint64_t up_to = UINT64_MAX) {
  std::lock_guard<std::recursive_mutex> guard(queues_mutex);
  const auto& queue = queues[stream];
  return queue.empty() || queue.front().number > up_to;
}

void check_copy(const at::Tensor& target, const at::Tensor& source) {
  TORCH_CHECK(target.is_contiguous() && source.is_contiguous() && target.nbytes() == source.nbytes());
}

// Copy to the host as late as is allowed: until somebody waits for the stream, the target holds NaNs. What is copied is
// what the source is now, since kernels that change it later are behind the copy.
void download(const at::Tensor& target, const at::Tensor& source, int64_t device) {
  check_copy(target, source);
  const auto* from = static_cast<const char*>(source.data_ptr());
  std::vector<char> bytes(from, from + source.nbytes());
  const auto act = [target, bytes] { std::memcpy(target.data_ptr(), bytes.data(), bytes.size()); };
  enqueue({act}, current_stream(DeviceIndex(device)));
  std::memset(target.data_ptr(), kUnwritten, target.nbytes());
}

// Copy from the host as late as is allowed: whoever changes the source before has the change copied.
void upload(const at::Tensor& target, const at::Tensor& source, int64_t device) {
  check_copy(target, source);
  const auto act = [target, source] { std::memcpy(target.data_ptr(), source.data_ptr(), source.nbytes()); };
  enqueue({act, true}, current_stream(DeviceIndex(device)));
}

// Do all uploads: a kernel that may read them is next.
void run_uploads() {
  std::lock_guard<std::recursive_mutex> guard(queues_mutex);
  for (auto& each : queues) {
    for (auto& work : each.second) {
      if (work.upload) {
        work.act();
        work = {[] {}, false, work.number};
      }
    }
  }
}

} // namespace
