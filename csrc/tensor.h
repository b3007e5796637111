// Tensors on their way between torch and the core.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "errors.h"
#include "rust/cxx.h"

namespace tensorizer {

struct TensorInfo;
struct Loaded;

// Keeps tensors alive while the core reads their bytes or writes into them.
class TensorList {
 public:
  explicit TensorList(std::vector<at::Tensor> tensors);

  std::size_t size() const noexcept;
  const std::vector<at::Tensor>& tensors() const noexcept { return tensors_; }

  // Type, shape and whether the bytes can be used as they are. Throws for tensors that have no
  // bytes of a fixed layout: sparse, quantized, nested, or of a subclass without storage.
  TensorInfo info(std::size_t at) const;

  // The bytes of a tensor whose info says that it is ready, in row-major order.
  rust::Slice<const std::uint8_t> bytes(std::size_t at) const;

  // The same for writing.
  std::uint8_t* data(std::size_t at) const;

  // The tensor in row-major order in host memory, conjugation and negation carried out.
  std::unique_ptr<TensorList> host_copy(std::size_t at) const;

 private:
  std::vector<at::Tensor> tensors_;
};

// The loaded tensors, which own their memory.
std::vector<at::Tensor> take_tensors(Loaded& loaded);

#ifdef TENSORIZER_TCH
// The at::Tensors at these addresses.
std::unique_ptr<TensorList> list_tensors(rust::Slice<const std::size_t> addresses);

// The addresses of new at::Tensors on the heap, which the caller owns.
rust::Vec<std::size_t> new_tensors(Loaded& loaded);
#endif

}  // namespace tensorizer
