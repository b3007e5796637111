// Tensors on their way between torch and the core.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "errors.h"
#include "rust/cxx.h"

namespace tensorizer {

struct TensorInfo;
struct LoadedTensors;

inline constexpr const char* kSubclassesRefused =
    "tensor subclasses that implement __torch_dispatch__ are not supported; save the plain tensors "
    "that they consist of";

// Keeps tensors alive while the core reads their bytes or writes into them.
class TensorList {
 public:
  explicit TensorList(std::vector<at::Tensor> tensors) : tensors_(std::move(tensors)) {}

  std::size_t size() const noexcept { return tensors_.size(); }
  const std::vector<at::Tensor>& tensors() const noexcept { return tensors_; }

  // Returns dtype, shape and device, and whether the bytes can be used as they are. Throws for
  // tensors that have no bytes of a fixed layout: sparse, quantized, nested, or of a subclass
  // without storage.
  TensorInfo info(std::size_t at) const;

  // Returns the bytes of a tensor whose info says that it is ready, in row-major order.
  rust::Slice<const std::uint8_t> bytes(std::size_t at) const;

  // Returns the address of such a tensor's bytes, on its device.
  std::size_t address(std::size_t at) const;

  // Returns the same address, for writing.
  std::size_t writable(std::size_t at) const;

  // Fills a tensor with zeros, on its device's current stream.
  void fill_zero(std::size_t at) const;

  // Returns this thread's stream of a tensor's device, for host_copy on another thread.
  std::int64_t stream(std::size_t at) const;

  // Tells autograd that the tensors were changed.
  void changed() const;

  // Copies the tensor to host memory in row-major order, with conjugation and negation carried out.
  // The copy runs on `stream`, after the work that is queued there.
  std::unique_ptr<TensorList> host_copy(std::size_t at, std::int64_t stream) const;

 private:
  std::vector<at::Tensor> tensors_;
};

// Returns an error message if a tensor's storage is too small for it, as after FSDP's resize_(0);
// else an empty string.
std::string missing_memory(const at::Tensor& tensor);

// Device numbers of the core: the index for CUDA, these for others.
constexpr std::int16_t kCpu = -1;
constexpr std::int16_t kOther = -2;
std::int16_t device_number(const at::Device& device);

// Returns the id of this thread's current stream of a device; 0 for devices without streams.
std::int64_t stream_of(const at::Device& device);

// Returns the driver's handle of this thread's current stream of a CUDA device; 0 for other
// devices.
std::size_t current_stream(std::int16_t device);

// Takes the loaded tensors. Each owns its memory, or shares that of its block.
std::vector<at::Tensor> take_tensors(LoadedTensors& loaded);

#ifdef TENSORIZER_TCH
// Makes a list of the at::Tensors at these addresses.
std::unique_ptr<TensorList> list_tensors(rust::Slice<const std::size_t> addresses);

// Returns the addresses of new at::Tensors on the heap, which the caller owns.
rust::Vec<std::size_t> new_tensors(LoadedTensors& loaded);
#endif

}  // namespace tensorizer
