// What torch asks of a device: the guard (devices, streams, events), the hooks (pinned memory, generators).

#include "device.h"
#include "generator.h"

#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>

namespace testdev {
namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;

// An event is a place in a stream's queue. Recording it again moves it; who waits has taken the place it had.
struct Event {
  Stream* stream = nullptr;
  uint64_t position = 0;
  double time = 0;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before = getDevice();
    set_current_device(device.index());
    return before;
  }
  c10::Device getDevice() const override { return {kType, c10::DeviceIndex(current_device())}; }
  void setDevice(c10::Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { set_current_device(device.index()); }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }

  c10::Stream getStream(c10::Device device) const override { return as_stream(current_stream(index(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override { return as_stream(stream(index(device), 0)); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override { return as_stream(new_stream(index(device))); }
  c10::Stream exchangeStream(c10::Stream on) const override {
    return c10::Stream(c10::Stream::UNSAFE, on.device(), exchange_stream(on.device_index(), on.id()));
  }
  bool queryStream(const c10::Stream& on) const override {
    Stream& of = own(on);
    return of.reached(of.position());
  }
  void synchronizeStream(const c10::Stream& on) const override { own(on).drain(); }
  void synchronizeDevice(c10::DeviceIndex device) const override { synchronize(device); }

  void record(void** event, const c10::Stream& on, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new Event();
    auto* e = static_cast<Event*>(*event);
    e->stream = &own(on);
    e->position = e->stream->position();
    e->time = e->stream->tail();
  }
  void block(void* event, const c10::Stream& on) const override {
    auto* e = static_cast<Event*>(event);
    if (e && e->stream) own(on).wait_for(*e->stream, e->position, e->time);
  }
  bool queryEvent(void* event) const override {
    auto* e = static_cast<Event*>(event);
    return !e || !e->stream || e->stream->reached(e->position);
  }
  void synchronizeEvent(void* event) const override {
    auto* e = static_cast<Event*>(event);
    if (!e || !e->stream) return;
    e->stream->finish(e->position);
    host_reached(e->time);
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    return 1000 * (static_cast<Event*>(second)->time - static_cast<Event*>(first)->time);
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& on) const override {
    if (pointer.get()) record_stream(pointer.get(), own(on));
  }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

 private:
  static int index(c10::Device device) { return device.has_index() ? device.index() : current_device(); }
  static Stream& own(const c10::Stream& on) { return stream(on.device_index(), on.id()); }
  static c10::Stream as_stream(Stream& of) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, c10::DeviceIndex(of.device)), of.id);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

const at::Generator& default_generator(int device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>();
    for (int i = 0; i < kMaxDevices; ++i) made->push_back(at::make_generator<DeviceGenerator>(i));
    return made;
  }();
  return (*all)[device];
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto before = c10::DeviceIndex(current_device());
    set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return at::getHostAllocator(kType); }
  c10::Device getDeviceFromPtr(void* pointer) const override {
    return {kType, c10::DeviceIndex(device_of(pointer))};
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device < 0 ? current_device() : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<DeviceGenerator>(device < 0 ? current_device() : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    resize_storage(storage.unsafeGetStorageImpl(), size);
  }
};

struct Registration {
  Registration() { at::RegisterPrivateUse1HooksInterface(new Hooks()); }
} registration;

}  // namespace

DeviceGenerator::DeviceGenerator(int device)
    : c10::GeneratorImpl(
          c10::Device(kType, c10::DeviceIndex(device)), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
      on_host(at::detail::createCPUGenerator()) {}

void DeviceGenerator::set_state(const c10::TensorImpl& state) { on_host.unsafeGetGeneratorImpl()->set_state(state); }

c10::intrusive_ptr<c10::TensorImpl> DeviceGenerator::get_state() const {
  return on_host.unsafeGetGeneratorImpl()->get_state();
}

DeviceGenerator* DeviceGenerator::clone_impl() const {
  auto* made = new DeviceGenerator(device().index());
  made->on_host = on_host.clone();
  return made;
}

at::Generator& host_generator(int device) {
  return static_cast<DeviceGenerator*>(default_generator(device).unsafeGetGeneratorImpl())->on_host;
}

void resize_storage(c10::StorageImpl* storage, size_t size) {
  auto fresh = storage->allocator()->allocate(size);
  size_t kept = std::min(size, storage->nbytes());
  if (kept) storage->allocator()->copy_data(fresh.get(), storage->data_ptr().get(), kept);
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(size);
}

}  // namespace testdev

// ---- for Python ----------------------------------------------------------------------------------------------------

extern "C" {

void testdev_seed(int device, uint64_t seed) { testdev::host_generator(device).set_current_seed(seed); }

// Copies the state of a device's default generator to `bytes`; returns its size.
int64_t testdev_random_state(int device, char* bytes, int64_t room) {
  at::Tensor state = testdev::host_generator(device).get_state();
  std::memcpy(bytes, state.const_data_ptr(), std::min<int64_t>(room, state.numel()));
  return state.numel();
}

void testdev_set_random_state(int device, const char* bytes, int64_t size) {
  at::Tensor state = testdev::host_generator(device).get_state();
  if (state.numel() == size) {
    std::memcpy(state.mutable_data_ptr(), bytes, size);
    testdev::host_generator(device).set_state(state);
  }
}
}
