// Kernels: every operation runs on the CPU, on the hidden bytes of its tensors, when its stream gets to it.
//
// The host does not wait for an operation whose results have a shape that torch's meta kernels know: they are allocated
// at once and filled later. Operations whose results depend on the data, or that draw random numbers, are waited for.

#include "device.h"
#include "generator.h"

#include <ATen/EmptyTensor.h>
#include <ATen/TensorUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_cpu_dispatch.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/unfold_cpu_dispatch.h>
#include <ATen/ops/view_as_complex_cpu_dispatch.h>
#include <ATen/ops/view_as_real_cpu_dispatch.h>
#include <ATen/ops/view_cpu_dispatch.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <unordered_map>

namespace testdev {
namespace {

using c10::IValue;
using torch::jit::Stack;

constexpr auto kType = c10::DeviceType::PrivateUse1;

bool is_ours(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kType; }

// The bytes of a device's tensor as a tensor of the host, which shares them and keeps nothing alive.
at::Tensor bare(const at::Tensor& tensor) {
  auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU);
  if (!tensor.storage().data_ptr().get()) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  auto* storage = static_cast<char*>(tensor.storage().data_ptr().get());
  char* start = storage + tensor.storage_offset() * tensor.element_size();
  if (is_ours(tensor)) start += hidden_offset(tensor.device().index());
  return at::for_blob(start, tensor.sizes()).strides(tensor.strides()).options(options).target_device(at::kCPU).make_tensor();
}

at::Tensor on_meta(const at::Tensor& tensor) {
  auto made = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).pinned_memory(false));
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

// A tensor of the host is read when the operation is queued: whoever gave it may change it afterwards.
at::Tensor for_kernel(const at::Tensor& tensor) {
  if (is_ours(tensor)) return bare(tensor);
  return tensor.unsafeGetTensorImpl()->is_wrapped_number() ? tensor : tensor.clone();
}

template <typename F>
IValue with_tensors(const IValue& value, c10::DeviceType device, const F& change) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    return tensor.defined() ? IValue(change(tensor)) : value;
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const at::Tensor& each : value.toTensorList()) made.push_back(each.defined() ? change(each) : each);
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> made;
    for (const std::optional<at::Tensor>& each : value.toOptionalTensorList())
      made.push_back(each && each->defined() ? std::optional<at::Tensor>(change(*each)) : each);
    return made;
  }
  if (value.isDevice() && value.toDevice().type() == kType) return c10::Device(device);
  return value;
}

template <typename F>
void each_tensor(const IValue& value, const F& look) {
  if (value.isTensor()) look(value.toTensor());
  if (value.isTensorList())
    for (const at::Tensor& each : value.toTensorList()) look(each);
  if (value.isOptionalTensorList())
    for (const std::optional<at::Tensor>& each : value.toOptionalTensorList())
      if (each) look(*each);
}

// What an operation's schema says.
struct Facts {
  std::vector<int> returned;  // for each result, the argument that it is; -1 for a new tensor
  std::vector<int> outs;      // arguments `out=`, which the operation may give another size
  int generator = -1;
  bool random = false, waits = false;
};

const Facts& facts_of(const c10::OperatorHandle& op) {
  static std::mutex mutex;
  static auto* known = new std::unordered_map<c10::OperatorName, Facts>();
  std::lock_guard<std::mutex> lock(mutex);
  auto found = known->find(op.operator_name());
  if (found != known->end()) return found->second;
  Facts facts;
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].is_out()) facts.outs.push_back(i);
    if (arguments[i].name() == "generator") facts.generator = i;
  }
  facts.random = facts.generator >= 0 || op.hasTag(at::Tag::nondeterministic_seeded);
  facts.waits = facts.random || op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape);
  for (const auto& result : schema.returns()) {
    int same = -1;
    if (result.alias_info())
      for (size_t i = 0; i < arguments.size(); ++i)
        if (arguments[i].alias_info() && arguments[i].alias_info()->beforeSets() == result.alias_info()->beforeSets())
          same = i;
    TORCH_CHECK(
        !result.alias_info() || (same >= 0 && result.alias_info()->isWrite()), "the test accelerator has no kernel for ",
        op.operator_name(), ", which returns a view");
    facts.returned.push_back(same);
    auto kind = result.type()->kind();
    bool tensors = kind == c10::TypeKind::TensorType ||
        (kind == c10::TypeKind::ListType && result.type()->expectRef<c10::ListType>().getElementType()->kind() == c10::TypeKind::TensorType);
    facts.waits = facts.waits || !tensors;
  }
  return known->emplace(op.operator_name(), std::move(facts)).first->second;
}

// Operations that torch's meta kernels turned out not to know.
bool without_meta(const c10::OperatorName& name, bool add) {
  static std::mutex mutex;
  static auto* known = new std::unordered_map<c10::OperatorName, bool>();
  std::lock_guard<std::mutex> lock(mutex);
  if (add) (*known)[name] = true;
  return known->count(name) > 0;
}

// Multiplications and additions of an operation; elementwise ones are bound by the memory.
double operations_of(const std::string& name, const Stack& arguments) {
  auto size = [&](int argument, int dim) { return double(arguments[argument].toTensor().size(dim)); };
  if (name == "aten::mm") return 2 * size(0, 0) * size(0, 1) * size(1, 1);
  if (name == "aten::addmm") return 2 * size(1, 0) * size(1, 1) * size(2, 1);
  if (name == "aten::bmm") return 2 * size(0, 0) * size(0, 1) * size(0, 2) * size(1, 2);
  return 0;
}

struct Shapes {
  bool known = false;
  Stack results;
};

Shapes shapes_of(const c10::OperatorHandle& op, const Stack& arguments) {
  if (without_meta(op.operator_name(), false)) return {};
  Shapes shapes;
  for (const IValue& value : arguments) shapes.results.push_back(with_tensors(value, at::kMeta, on_meta));
  try {
    at::AutoDispatchBelowAutograd below;
    op.callBoxed(&shapes.results);
    shapes.known = true;
  } catch (const c10::NotImplementedError&) {
    without_meta(op.operator_name(), true);
  } catch (const std::exception&) {
    // Wrong arguments: the CPU's kernel says so. Shapes that depend on data: it tells them.
  }
  return shapes;
}

// Draws from the device's generator: from the one that was given, else by lending its state to the CPU's default one.
struct Drawing {
  Drawing(const Facts& facts, Stack& arguments, int device) {
    if (!facts.random) return;
    at::Generator from = host_generator(device);
    if (facts.generator >= 0) {
      IValue& given = arguments[facts.generator];
      if (given.isGenerator()) {
        auto own = given.toGenerator();
        if (own.device().type() == kType) from = static_cast<DeviceGenerator*>(own.unsafeGetGeneratorImpl())->on_host;
        else from = own;
      }
      given = from;
      return;
    }
    lent = from;
    at::Generator usual = at::detail::getDefaultCPUGenerator();
    before = usual.get_state();
    usual.set_state(from.get_state());
  }
  ~Drawing() {
    if (!lent.defined()) return;
    at::Generator usual = at::detail::getDefaultCPUGenerator();
    lent.set_state(usual.get_state());
    usual.set_state(before);
  }
  at::Generator lent;
  at::Tensor before;
};

at::Tensor on_device(const at::Tensor& like, int device) {
  return at::empty_strided(like.sizes(), like.strides(), like.options().device(c10::Device(kType, c10::DeviceIndex(device))));
}

// Replaces the arguments on the stack by the results.
void run(const c10::OperatorHandle& op, Stack* stack, int device) {
  const Facts& facts = facts_of(op);
  const auto count = op.schema().arguments().size();
  Stack arguments(stack->end() - count, stack->end());
  c10::OptionalDeviceGuard guard(c10::Device(kType, c10::DeviceIndex(device)));
  Stream& on = current_stream(device);

  Work work;
  work.engine = Engine::Compute;
  work.name = op.operator_name().name;
  for (const IValue& value : arguments)
    each_tensor(value, [&](const at::Tensor& t) { work.bytes += t.defined() ? t.numel() * t.element_size() : 0; });
  work.seconds = seconds_to_compute(operations_of(work.name, arguments), work.bytes);

  Stack inside;
  for (const IValue& value : arguments) inside.push_back(with_tensors(value, at::kCPU, for_kernel));
  // Most operations are asked for with an `out=` of the right size, by torch itself; an empty one takes its size.
  bool sized = std::all_of(facts.outs.begin(), facts.outs.end(), [&](int i) { return arguments[i].toTensor().numel() > 0; });
  if (!sized)
    for (int i : facts.outs) inside[i] = inside[i].toTensor().clone();
  bool waits = facts.waits || !sized;

  bool all_returned = std::all_of(facts.returned.begin(), facts.returned.end(), [](int i) { return i >= 0; });
  Shapes shapes;
  if (!waits && !all_returned) shapes = shapes_of(op, arguments);
  torch::jit::drop(*stack, count);

  if (!waits && (all_returned || shapes.known)) {
    Stack outside;
    for (size_t i = 0; i < facts.returned.size(); ++i) {
      IValue result = facts.returned[i] >= 0
          ? arguments[facts.returned[i]]
          : with_tensors(shapes.results[i], kType, [&](const at::Tensor& t) { return on_device(t, device); });
      outside.push_back(facts.returned[i] >= 0 ? IValue() : with_tensors(result, at::kCPU, bare));
      stack->push_back(std::move(result));
    }
    std::vector<std::pair<at::Tensor, std::vector<int64_t>>> outs;
    for (int i : facts.outs) outs.emplace_back(inside[i].toTensor(), inside[i].toTensor().sizes().vec());
    work.run = [op, outs, inside = std::move(inside), outside = std::move(outside)]() mutable {
      at::AutoDispatchBelowAutograd below;
      op.callBoxed(&inside);
      for (auto& [out, sizes] : outs) TORCH_CHECK(out.sizes() == sizes, op.operator_name(), " got an `out=` of another size");
      for (size_t i = 0; i < outside.size(); ++i) {
        std::vector<at::Tensor> made;
        each_tensor(inside[i], [&](const at::Tensor& t) { made.push_back(t); });
        size_t next = 0;
        each_tensor(outside[i], [&](const at::Tensor& t) {
          const at::Tensor& from = made.at(next++);
          // A result that the CPU's kernel leaves empty is of no use, such as the mean of a batch in evaluation.
          if (!t.defined() || !from.defined() || !from.numel()) return;
          TORCH_CHECK(t.sizes() == from.sizes() && t.scalar_type() == from.scalar_type(), "the meta kernel of ",
                      op.operator_name(), " says ", t.sizes(), ", the CPU's ", from.sizes());
          t.copy_(from);
        });
      }
    };
    on.submit(std::move(work));
    return;
  }

  auto results = std::make_shared<Stack>();
  work.run = [op, inside, results, &facts, device]() mutable {
    at::AutoDispatchBelowAutograd below;
    Drawing drawing(facts, inside, device);
    op.callBoxed(&inside);
    *results = std::move(inside);
  };
  on.submit(std::move(work));
  on.drain();
  for (size_t i = 0; i < facts.returned.size(); ++i) {
    int same = facts.returned[i];
    bool is_out = std::find(facts.outs.begin(), facts.outs.end(), same) != facts.outs.end();
    if (is_out && !sized) {
      at::Tensor out = arguments[same].toTensor();
      at::Tensor made = (*results)[i].toTensor();
      if (out.sizes() != made.sizes()) out.resize_(made.sizes());
      bare(out).copy_(made);
    }
    if (same >= 0) {
      stack->push_back(arguments[same]);
      continue;
    }
    stack->push_back(with_tensors((*results)[i], kType, [&](const at::Tensor& made) {
      at::Tensor out = on_device(made, device);
      // Memory of this stream that is free again may still be in use by its earlier work.
      on.drain();
      bare(out).copy_(made);
      return out;
    }));
  }
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  int device = current_device();
  const auto count = op.schema().arguments().size();
  bool found = false;
  for (const IValue& value : torch::jit::last(*stack, count))
    each_tensor(value, [&](const at::Tensor& tensor) {
      if (!found && is_ours(tensor)) {
        device = tensor.device().index();
        found = true;
      }
    });
  run(op, stack, device);
}

// Runs another operation of the same arguments.
void run_as(const char* name, Stack* stack) {
  static std::mutex mutex;
  static auto* known = new std::unordered_map<std::string, c10::OperatorHandle>();
  std::unique_lock<std::mutex> lock(mutex);
  auto found = known->find(name);
  if (found == known->end())
    found = known->emplace(name, c10::Dispatcher::singleton().findSchemaOrThrow(name, "")).first;
  c10::OperatorHandle op = found->second;
  lock.unlock();
  fallback(op, {}, stack);
}

// ---- operations that are more than a kernel ------------------------------------------------------------------------

at::Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), c10::GetAllocator(kType), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), c10::GetAllocator(kType),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

Engine engine_of(const at::Tensor& from, const at::Tensor& to) {
  if (!is_ours(from)) return Engine::CopyIn;
  if (!is_ours(to)) return Engine::CopyOut;
  return from.device() == to.device() ? Engine::Compute : Engine::Peer;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (!to.numel()) return to;
  Work work;
  work.engine = engine_of(from, to);
  work.name = "copy";
  work.bytes = to.numel() * to.element_size();
  work.seconds = work.engine == Engine::Compute ? seconds_to_compute(0, 2 * work.bytes) : seconds_to_copy(work.engine, work.bytes);
  at::Tensor source = bare(from), target = bare(to);
  if (from.is_conj()) source = source.conj();
  if (from.is_neg()) source = source._neg_view();
  work.run = [source, target] {
    at::AutoDispatchBelowAutograd below;
    target.copy_(source);
  };
  const at::Tensor& ours = is_ours(to) ? to : from;
  const at::Tensor& other = is_ours(to) ? from : to;
  c10::OptionalDeviceGuard guard(ours.device());
  Stream& on = current_stream(ours.device().index());
  if (is_ours(other)) {
    if (other.device() != ours.device()) {
      // Both devices' current streams stand in line for it, as with CUDA.
      Stream& away = current_stream(other.device().index());
      on.wait_for(away, away.position(), away.tail());
      on.submit(std::move(work));
      away.wait_for(on, on.position(), on.tail());
      return to;
    }
    on.submit(std::move(work));
    return to;
  }
  const void* start = other.storage().data_ptr().get();
  if (non_blocking && is_pinned(start)) {
    work.keep.push_back(std::make_shared<at::Tensor>(other));
    on.submit(std::move(work));
    return to;
  }
  on.submit(std::move(work));
  on.drain();
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) const_cast<at::Tensor&>(to).resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar number(const at::Tensor& tensor) {
  current_stream(tensor.device().index()).drain();
  return bare(tensor).item();
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  c10::OptionalDeviceGuard guard(self.device());
  auto* impl = self.unsafeGetTensorImpl();
  impl->generic_set_sizes_contiguous(size);
  size_t bytes = (self.storage_offset() + self.numel()) * self.element_size();
  if (self.numel() && bytes > self.storage().nbytes()) resize_storage(self.storage().unsafeGetStorageImpl(), bytes);
  return self;
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::cpu::set__symint(self, std::move(storage), offset, size, stride);
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage storage) {
  int64_t size = storage.nbytes() / self.element_size();
  return at::cpu::set_(self, std::move(storage), 0, {size}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& from) {
  return at::cpu::set__symint(self, from.storage(), from.sym_storage_offset(), from.sym_sizes(), from.sym_strides());
}

void note_stream(at::Tensor& self, c10::Stream on) {
  void* start = self.storage().data_ptr().get();
  if (start) record_stream(start, stream(on.device_index(), on.id()));
}

void convolution(const c10::OperatorHandle&, c10::DispatchKeySet, Stack* stack) { run_as("aten::convolution", stack); }

void convolution_backward(const c10::OperatorHandle&, c10::DispatchKeySet, Stack* stack) {
  // grad, input, weight, then the sizes of the bias, which the other operation does not have.
  const at::Tensor weight = torch::jit::peek(*stack, 2, 10).toTensor();
  bool transposed = torch::jit::peek(*stack, 6, 10).toBool();
  int64_t groups = torch::jit::peek(*stack, 8, 10).toInt();
  int64_t outputs = transposed ? weight.size(1) * groups : weight.size(0);
  stack->insert(stack->end() - 7, IValue(std::vector<int64_t>{outputs}));
  run_as("aten::convolution_backward", stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", number);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("record_stream", note_stream);
  m.impl("view", at::cpu::view_symint);
  m.impl("as_strided", at::cpu::as_strided_symint);
  m.impl("_reshape_alias", at::cpu::_reshape_alias_symint);
  m.impl("unfold", at::cpu::unfold);
  m.impl("view_as_real", at::cpu::view_as_real);
  m.impl("view_as_complex", at::cpu::view_as_complex);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

}  // namespace testdev
