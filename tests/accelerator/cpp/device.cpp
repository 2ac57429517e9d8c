// The parts of a simulated accelerator that torch takes from C++ only: two devices with memory of their own that is
// counted, streams and events on which copies are made late, pinned memory, and generators. Its kernels are in Python.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>
#include <torch/library.h>

#include "memory.h"
#include "streams.h"

namespace {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kDevice;
  }
  Device exchangeDevice(Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override {
    return {kDevice, current_device};
  }
  void setDevice(Device device) const override {
    check_index(device.index());
    current_device = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    current_device = device.index();
  }
  DeviceIndex deviceCount() const noexcept override {
    return kDevices;
  }

  Stream getStream(Device device) const override {
    return current_stream(device.has_index() ? device.index() : current_device);
  }
  Stream getDefaultStream(Device device) const override {
    return default_stream(device.index());
  }
  Stream getNewStream(Device device, int) const override {
    std::lock_guard<std::recursive_mutex> guard(queues_mutex);
    const auto index = device.has_index() ? device.index() : current_device;
    return Stream(Stream::UNSAFE, Device(kDevice, index), ++last_stream);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getNewStream(device, 0);
  }
  Stream exchangeStream(Stream stream) const override {
    return std::exchange(current_stream(stream.device_index()), stream);
  }
  bool queryStream(const Stream& stream) const override {
    return idle(stream);
  }
  void synchronizeStream(const Stream& stream) const override {
    run(stream);
  }
  void synchronizeDevice(const DeviceIndex index) const override {
    std::vector<Stream> streams;
    {
      std::lock_guard<std::recursive_mutex> guard(queues_mutex);
      for (const auto& each : queues) {
        if (each.first.device_index() == index) {
          streams.push_back(each.first);
        }
      }
    }
    for (const auto& stream : streams) {
      run(stream);
    }
  }

  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    std::lock_guard<std::recursive_mutex> guard(queues_mutex);
    delete static_cast<Event*>(*event);
    *event = new Event{stream, last_number};
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void block(void* event, const Stream& stream) const override {
    if (event != nullptr) {
      const auto recorded = *static_cast<Event*>(event);
      enqueue({[recorded] { run(recorded.stream, recorded.number); }}, stream);
    }
  }
  // No thread copies, so one that asks again and again makes it happen: the first answer is that it has not.
  bool queryEvent(void* event) const override {
    if (event == nullptr) {
      return true;
    }
    auto& recorded = *static_cast<Event*>(event);
    if (idle(recorded.stream, recorded.number)) {
      return true;
    }
    if (recorded.asked) {
      run(recorded.stream, recorded.number);
    }
    return std::exchange(recorded.asked, true);
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      run(static_cast<Event*>(event)->stream, static_cast<Event*>(event)->number);
    }
  }
  double elapsedTime(void*, void*, const DeviceIndex) const override {
    return 0.0;
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---------------------------------------------------------------------------------------------------------------- hooks

// A CPU generator's state under the device's name: kernels draw from a CPU generator that is given it.
struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(DeviceIndex index) {
    device_ = Device(kDevice, index);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(DeviceIndex) const override {
    return true;
  }
  DeviceIndex deviceCount() const override {
    return kDevices;
  }
  void setCurrentDevice(DeviceIndex index) const override {
    check_index(index);
    current_device = index;
  }
  DeviceIndex getCurrentDevice() const override {
    return current_device;
  }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    check_index(index);
    return std::exchange(current_device, index);
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return index < 0 ? current_device : exchangeDevice(index);
  }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current_device : index);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned;
  }
  bool isPinnedPtr(const void* address) const override {
    return pinned.holds(address);
  }
  Device getDeviceFromPtr(void* address) const override {
    std::lock_guard<std::mutex> guard(heap.mutex);
    auto after = heap.blocks.upper_bound(address);
    TORCH_CHECK(after != heap.blocks.begin(), "not memory of a device");
    return {kDevice, std::prev(after)->second.device};
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const c10::DeviceGuard guard(storage.device());
    auto data = heap.allocate(bytes);
    std::memcpy(data.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.set_data_ptr(std::move(data));
    storage.set_nbytes(bytes);
  }
};

Hooks hooks;

// -------------------------------------------------------------------------------------------------------------- tensors

Device placed(std::optional<Device> device) {
  return device && device->has_index() ? *device : Device(kDevice, current_device);
}

at::Tensor empty(
    c10::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<Device> device,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(placed(device));
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &heap, keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<Device> device,
    std::optional<bool>) {
  const c10::DeviceGuard guard(placed(device));
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &heap, keys, c10::dtype_or_default(dtype));
}

} // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", at::native::resize_);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  c10::SetAllocator(kDevice, &heap);
  at::RegisterPrivateUse1HooksInterface(&hooks);
  m.def("download", &download);
  m.def("upload", &upload);
  m.def("run_uploads", &run_uploads);
}
