#include "tensor.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <utility>

#include "tensorizer/src/ffi/torch.rs.h"

namespace tensorizer {

namespace {

// The core names element types by these codes; torch keeps them because it serializes them.
static_assert(static_cast<int>(at::kByte) == 0 && static_cast<int>(at::kBool) == 11);
static_assert(static_cast<int>(at::kBFloat16) == 15 && static_cast<int>(at::kBits16) == 22);
static_assert(static_cast<int>(at::kFloat8_e5m2) == 23 && static_cast<int>(at::kUInt64) == 29);
static_assert(static_cast<int>(c10::ScalarType::UInt1) == 30);
static_assert(static_cast<int>(c10::ScalarType::Int7) == 43);
static_assert(static_cast<int>(c10::ScalarType::Float4_e2m1fn_x2) == 45);

bool is_ready(const at::Tensor& tensor) {
  return tensor.device().is_cpu() && tensor.is_contiguous() && !tensor.is_conj() &&
         !tensor.is_neg() && !tensor._is_zerotensor();
}

at::Tensor wrap(Loaded& loaded, std::size_t at) {
  const auto shape = loaded.shape(at);
  const auto options =
      at::TensorOptions().dtype(static_cast<at::ScalarType>(loaded.dtype(at))).device(at::kCPU);
  // The tensor's storage owns the buffer and frees it, on whatever thread, without the GIL.
  HostBuffer* owner = loaded.take(at).into_raw();
  return at::for_blob(owner->data(), at::IntArrayRef(shape.data(), shape.size()))
      .context(
          owner,
          [](void* buffer) { rust::Box<HostBuffer>::from_raw(static_cast<HostBuffer*>(buffer)); })
      .options(options)
      .target_device(at::kCPU)
      .make_tensor();
}

}  // namespace

TensorList::TensorList(std::vector<at::Tensor> tensors) : tensors_(std::move(tensors)) {}

std::size_t TensorList::size() const noexcept { return tensors_.size(); }

TensorInfo TensorList::info(std::size_t at) const {
  const at::Tensor& tensor = tensors_.at(at);
  TORCH_CHECK(tensor.defined(), "an undefined tensor cannot be saved");
  TORCH_CHECK(!tensor.is_nested(), "nested tensors are not supported");
  TORCH_CHECK(tensor.layout() == at::kStrided, "tensors of layout ", tensor.layout(),
              " are not supported; save the dense tensors that they consist of, or to_dense()");
  TORCH_CHECK(!tensor.is_quantized(),
              "quantized tensors are not supported; save int_repr(), scale and zero point");
  TORCH_CHECK(!tensor.unsafeGetTensorImpl()->is_python_dispatch(),
              "tensor subclasses that implement __torch_dispatch__ are not supported; save the "
              "plain tensors that they consist of");
  TensorInfo info;
  info.dtype = static_cast<std::int8_t>(tensor.scalar_type());
  for (const auto size : tensor.sizes()) info.shape.push_back(static_cast<std::uint64_t>(size));
  info.meta = tensor.is_meta();
  info.ready = !info.meta && is_ready(tensor);
  return info;
}

rust::Slice<const std::uint8_t> TensorList::bytes(std::size_t at) const {
  const at::Tensor& tensor = tensors_.at(at);
  TORCH_CHECK(is_ready(tensor), "the tensor is not contiguous in host memory");
  const auto size = static_cast<std::size_t>(tensor.nbytes());
  if (size == 0) return {};
  return {static_cast<const std::uint8_t*>(tensor.const_data_ptr()), size};
}

std::uint8_t* TensorList::data(std::size_t at) const {
  const at::Tensor& tensor = tensors_.at(at);
  TORCH_CHECK(is_ready(tensor), "the tensor is not contiguous in host memory");
  return static_cast<std::uint8_t*>(tensor.mutable_data_ptr());
}

std::unique_ptr<TensorList> TensorList::host_copy(std::size_t at) const {
  const c10::NoGradGuard no_grad;
  at::Tensor copy = tensors_.at(at).detach().resolve_conj().resolve_neg();
  if (copy._is_zerotensor()) copy = copy.clone();
  copy = copy.to(at::kCPU).contiguous();
  return std::make_unique<TensorList>(std::vector<at::Tensor>{std::move(copy)});
}

std::vector<at::Tensor> take_tensors(Loaded& loaded) {
  std::vector<at::Tensor> tensors;
  tensors.reserve(loaded.size());
  for (std::size_t at = 0; at < loaded.size(); ++at) tensors.push_back(wrap(loaded, at));
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

rust::Vec<std::size_t> new_tensors(Loaded& loaded) {
  rust::Vec<std::size_t> addresses;
  for (auto& tensor : take_tensors(loaded)) {
    addresses.push_back(reinterpret_cast<std::size_t>(new at::Tensor(std::move(tensor))));
  }
  return addresses;
}
#endif

}  // namespace tensorizer
