// A device of a kind that the package does not know, for torch's `privateuseone`.
//
// Its addresses are of pages without access: code that takes them for host memory crashes the
// process. The bytes are elsewhere, at a fixed distance.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/library.h>

#include <atomic>

namespace {

constexpr std::size_t kSize = std::size_t{1} << 30;

char* reserve(int protection) {
  void* at = mmap(nullptr, kSize, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(at != MAP_FAILED, "no memory for a device");
  return static_cast<char*>(at);
}

char* device() {
  static char* const at = reserve(PROT_NONE);
  return at;
}

char* bytes() {
  static char* const at = reserve(PROT_READ | PROT_WRITE);
  return at;
}

// Memory is never freed.
struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(std::size_t size) override {
    static std::atomic<std::size_t> used{0};
    const auto begin = used.fetch_add((size + 63) / 64 * 64);
    TORCH_CHECK(begin + size <= kSize, "the device is full");
    const c10::Device where(c10::DeviceType::PrivateUse1, 0);
    return {device() + begin, nullptr, nullptr, where};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, std::size_t) const override {
    TORCH_CHECK(false, "storages of this device are not copied");
  }
};

Allocator allocator;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &allocator);
C10_REGISTER_GUARD_IMPL(PrivateUse1, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::PrivateUse1>);

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &allocator, kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &allocator, kKeys,
                                           c10::dtype_or_default(dtype));
}

// The same tensor, as the host may use it.
at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.is_privateuseone()) return tensor;
  char* const at = static_cast<char*>(tensor.data_ptr()) - device() + bytes();
  auto seen = at::from_blob(at, tensor.sizes(), tensor.strides(),
                            tensor.options().device(at::kCPU).requires_grad(false));
  return tensor.is_conj() ? seen.conj() : seen;
}

at::Tensor& copy(at::Tensor& self, const at::Tensor& from, bool) {
  auto to = on_host(self);
  to.copy_(on_host(from));
  return self;
}

at::Tensor as_strided(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride,
                      std::optional<std::int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

at::Tensor& set_at(at::Tensor& self, at::Storage storage, std::int64_t offset,
                   c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(storage), offset, size, stride);
}

at::Tensor& set(at::Tensor& self, at::Storage storage) {
  const auto size = static_cast<std::int64_t>(storage.nbytes() / self.itemsize());
  return set_at(self, std::move(storage), 0, {size}, {});
}

at::Tensor view(const at::Tensor& self, c10::IntArrayRef size) {
  return at::native::view(self, size);
}

// Copies the results of an operator that ran on the CPU to the device.
at::Tensor copy_back(const at::Tensor& from, const at::Tensor& to) {
  TORCH_CHECK(from.sizes() == to.sizes(), "tensors of this device are not resized");
  on_host(to).copy_(on_host(from));
  return to;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_copy_from_and_resize", copy_back);
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("copy_", copy);
  library.impl("as_strided", as_strided);
  library.impl("set_.source_Storage", set);
  library.impl("set_.source_Storage_storage_offset", set_at);
  library.impl("view", view);
}

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

}  // namespace
