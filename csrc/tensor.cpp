#include "tensor.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <torch/version.h>

#include <utility>

#include "blocks.h"
#include "tensorizer-torch/bridge.rs.h"

namespace tensorizer {

namespace {

// The core identifies element types by these codes. torch keeps them stable, because it serializes
// them.
static_assert(static_cast<int>(at::kByte) == 0 && static_cast<int>(at::kBool) == 11);
static_assert(static_cast<int>(at::kBFloat16) == 15 && static_cast<int>(at::kBits16) == 22);
static_assert(static_cast<int>(at::kFloat8_e5m2) == 23 && static_cast<int>(at::kUInt64) == 29);
static_assert(static_cast<int>(c10::ScalarType::UInt1) == 30);
static_assert(static_cast<int>(c10::ScalarType::Int7) == 43);
static_assert(static_cast<int>(c10::ScalarType::Float4_e2m1fn_x2) == 45);

bool is_ready(const at::Tensor& tensor) {
  return device_number(tensor.device()) != kOther && tensor.is_contiguous() && !tensor.is_conj() &&
         !tensor.is_neg() && !tensor._is_zerotensor();
}

// Makes a tensor in a storage without the dispatcher, which would take as long as loading a small
// tensor.
at::Tensor in_storage(c10::Storage storage, std::int64_t offset, at::ScalarType dtype,
                      at::IntArrayRef shape) {
  const auto type = c10::scalarTypeToTypeMeta(dtype);
  const auto key = storage.device().is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA;
  auto tensor =
      at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), type);
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(shape);
  impl->set_storage_offset(offset / static_cast<std::int64_t>(type.itemsize()));
  return tensor;
}

bool has_streams(const at::Device& device) {
  return !device.is_cpu() && c10::impl::hasDeviceGuardImpl(device.type());
}

at::Tensor wrap(LoadedTensors& loaded, const std::vector<std::unique_ptr<TorchBlocks>>& all,
                std::size_t at) {
  const auto shape = loaded.shape(at);
  const auto dtype = static_cast<at::ScalarType>(loaded.dtype(at));
  const auto place = loaded.place(at);
  if (place.block != -1) {
    const auto& blocks = all.at(place.device);
    TORCH_CHECK(blocks != nullptr, "tensors in blocks, and no blocks");
    const at::IntArrayRef sizes(shape.data(), shape.size());
    if (place.block >= 0) {
      return in_storage(blocks->storage(static_cast<std::size_t>(place.block)),
                        static_cast<std::int64_t>(place.offset), dtype, sizes);
    }
    // Made as bytes: torch has no kernels for some dtypes.
    auto len = static_cast<std::int64_t>(c10::scalarTypeToTypeMeta(dtype).itemsize());
    for (const auto size : sizes) len *= size;
    const auto zeros =
        at::zeros({len}, at::TensorOptions().dtype(at::kByte).device(blocks->device()));
    return in_storage(zeros.storage(), 0, dtype, sizes);
  }
  // The tensor's storage owns the buffer and frees it, on any thread, without the GIL.
  TorchHostMemory* owner = loaded.take(at).into_raw();
  c10::DataPtr data(
      owner->data(), owner,
      [](void* buffer) {
        rust::Box<TorchHostMemory>::from_raw(static_cast<TorchHostMemory*>(buffer));
      },
      at::kCPU);
  c10::Storage storage(c10::Storage::use_byte_size_t(), owner->size(), std::move(data));
  return in_storage(std::move(storage), 0, dtype, at::IntArrayRef(shape.data(), shape.size()));
}

}  // namespace

std::int64_t stream_of(const at::Device& device) {
  if (!has_streams(device)) return 0;
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device).id();
}

std::string missing_memory(const at::Tensor& tensor) {
  if (tensor.is_meta() || !tensor.has_storage() || tensor.numel() == 0) return {};
  const auto needed =
      at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize(),
                                       static_cast<std::size_t>(tensor.storage_offset()));
  const auto found = tensor.storage().nbytes();
  if (found >= needed) return {};
  return c10::str("its storage has ", found, " bytes, expected at least ", needed,
                  ": gather the parameters of FSDP, allocate again what resize_ has freed");
}

TensorInfo TensorList::info(std::size_t at) const {
  const at::Tensor& tensor = tensors_.at(at);
  TORCH_CHECK(tensor.defined(), "an undefined tensor cannot be saved");
  TORCH_CHECK(!tensor.is_nested(), "nested tensors are not supported");
  TORCH_CHECK(tensor.layout() == at::kStrided, "tensors of layout ", tensor.layout(),
              " are not supported; save the dense tensors that they consist of, or to_dense()");
  TORCH_CHECK(!tensor.is_quantized(),
              "quantized tensors are not supported; save int_repr(), scale and zero point");
  TORCH_CHECK(!tensor.unsafeGetTensorImpl()->is_python_dispatch(), kSubclassesRefused);
  const auto missing = missing_memory(tensor);
  TORCH_CHECK(missing.empty(), missing);
  TensorInfo info;
  info.dtype = static_cast<std::int8_t>(tensor.scalar_type());
  for (const auto size : tensor.sizes()) info.shape.push_back(static_cast<std::uint64_t>(size));
  info.len = static_cast<std::uint64_t>(tensor.nbytes());
  info.meta = tensor.is_meta();
  info.ready = !info.meta && is_ready(tensor);
  info.device = device_number(tensor.device());
  return info;
}

rust::Slice<const std::uint8_t> TensorList::bytes(std::size_t at) const {
  const at::Tensor& tensor = tensors_.at(at);
  TORCH_CHECK(is_ready(tensor) && tensor.is_cpu(), "the tensor is not contiguous in host memory");
  const auto size = static_cast<std::size_t>(tensor.nbytes());
  if (size == 0) return {};
  return {static_cast<const std::uint8_t*>(tensor.const_data_ptr()), size};
}

std::size_t TensorList::address(std::size_t at) const {
  const at::Tensor& tensor = tensors_.at(at);
  TORCH_CHECK(is_ready(tensor), "the tensor is not contiguous in memory");
  return reinterpret_cast<std::size_t>(tensor.const_data_ptr());
}

std::size_t TensorList::writable(std::size_t at) const {
  // Gives a copy-on-write tensor memory of its own.
  static_cast<void>(tensors_.at(at).mutable_data_ptr());
  return address(at);
}

void TensorList::fill_zero(std::size_t at) const {
  const c10::NoGradGuard no_grad;
  const at::Tensor& tensor = tensors_.at(at);
  const auto start = tensor.storage_offset() * static_cast<std::int64_t>(tensor.itemsize());
  in_storage(tensor.storage(), start, at::kByte, {static_cast<std::int64_t>(tensor.nbytes())})
      .zero_();
}

std::int64_t TensorList::stream(std::size_t at) const {
  return stream_of(tensors_.at(at).device());
}

void TensorList::changed() const {
  for (const auto& tensor : tensors_) {
    if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  }
}

std::int16_t device_number(const at::Device& device) {
  if (device.is_cpu()) return kCpu;
  return device.is_cuda() ? device.index() : kOther;
}

std::size_t current_stream(std::int16_t device) {
  if (device < 0) return 0;
  const at::Device where(at::kCUDA, static_cast<c10::DeviceIndex>(device));
#if TORCH_VERSION_MINOR >= 11
  const c10::impl::VirtualGuardImpl guard(at::kCUDA);
  return reinterpret_cast<std::size_t>(guard.getStream(where).native_handle());
#else
  // Before torch 2.11, only its CUDA library returns the driver's handle. This library is not
  // linked to it, so the function is looked up.
  using Get = std::int32_t(std::int32_t, void**);
  void* library = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
  TORCH_CHECK(library != nullptr, "this torch has no CUDA");
  auto* get = reinterpret_cast<Get*>(dlsym(library, "aoti_torch_get_current_cuda_stream"));
  dlclose(library);
  void* stream = nullptr;
  TORCH_CHECK(get != nullptr && get(where.index(), &stream) == 0, "no current stream of ", where);
  return reinterpret_cast<std::size_t>(stream);
#endif
}

std::unique_ptr<TensorList> TensorList::host_copy(std::size_t at, std::int64_t stream) const {
  const c10::NoGradGuard no_grad;
  const auto device = tensors_.at(at).device();
  // The last changes of the tensor may be queued on that stream.
  c10::OptionalStreamGuard on_stream;
  if (has_streams(device)) {
    on_stream.reset_stream(c10::Stream(c10::Stream::UNSAFE, device, stream));
  }
  at::Tensor copy = tensors_.at(at).detach().resolve_conj().resolve_neg();
  if (copy._is_zerotensor()) copy = copy.clone();
  copy = copy.to(at::kCPU).contiguous();
  return std::make_unique<TensorList>(std::vector<at::Tensor>{std::move(copy)});
}

std::vector<at::Tensor> take_tensors(LoadedTensors& loaded) {
  std::vector<at::Tensor> tensors;
  tensors.reserve(loaded.size());
  std::vector<std::unique_ptr<TorchBlocks>> blocks;
  for (std::size_t device = 0; device < loaded.devices(); ++device) {
    blocks.push_back(loaded.take_blocks(device));
  }
  for (std::size_t at = 0; at < loaded.size(); ++at) {
    tensors.push_back(wrap(loaded, blocks, at));
  }
  return tensors;
}

#ifdef TENSORIZER_TCH
std::unique_ptr<TensorList> list_tensors(rust::Slice<const std::size_t> addresses) {
  std::vector<at::Tensor> tensors;
  for (const auto address : addresses) {
    tensors.push_back(*reinterpret_cast<const at::Tensor*>(address));
  }
  return std::make_unique<TensorList>(std::move(tensors));
}

rust::Vec<std::size_t> new_tensors(LoadedTensors& loaded) {
  rust::Vec<std::size_t> addresses;
  for (auto& tensor : take_tensors(loaded)) {
    addresses.push_back(reinterpret_cast<std::size_t>(new at::Tensor(std::move(tensor))));
  }
  return addresses;
}
#endif

}  // namespace tensorizer
