// The devices' generators draw the numbers of a CPU generator of their own.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/StorageImpl.h>

namespace testdev {

struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(int device);
  void set_current_seed(uint64_t seed) override { on_host.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "generators of the test accelerator have no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "generators of the test accelerator have no offset"); }
  uint64_t current_seed() const override { return on_host.current_seed(); }
  uint64_t seed() override { return on_host.seed(); }
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;

  at::Generator on_host;

 private:
  DeviceGenerator* clone_impl() const override;
};

// The CPU generator behind a device's default generator.
at::Generator& host_generator(int device);

// Gives a storage another size; what fits of its content stays.
void resize_storage(c10::StorageImpl* storage, size_t size);

}  // namespace testdev
