// Loads and saves .tensors files in programs on LibTorch, without Python. What loads takes
// safetensors files, indexes of their shards and folders with either too; checkpoints of
// torch.save, whose pickles only Python reads, are refused.
//
// Everything here calls the operators of libtensorizer_torch.so through torch's dispatcher. All
// errors are c10::Error; their text says what failed and where. All functions may be called from
// any number of threads at once.
//
//     #include <tensorizer/tensorizer.h>
//
//     auto weights = tensorizer::load("model.tensors");
//     at::Tensor bias = weights.at("fc.bias");
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

// A C++ extension of a Python program, in which `import tensorizer` provides the operators,
// defines this and does not link the library.
#ifndef TENSORIZER_OPERATORS_FROM_PYTHON
extern "C" std::uint32_t tensorizer_abi_version();
#endif

namespace tensorizer {

// Tensors by name, in the order of the file.
using Tensors = c10::Dict<std::string, at::Tensor>;

struct LoadOptions {
  // Where new tensors go; the CPU if it is not set. load_into() has no use for it.
  std::optional<c10::Device> device;
  // Compare every tensor with the SHA-256 and CRC-32 sums in the file; a difference, or a file
  // without sums, as all safetensors files are, is an error.
  bool verify = false;
  // Threads that read at once, at least 1; if it is not set, as many as suit the source.
  std::optional<std::int64_t> num_readers;
  // The key of an encrypted file: a uint8 tensor of 32 elements.
  std::optional<at::Tensor> key;
};

namespace detail {

// The version of what this header assumes of the library.
constexpr std::uint32_t kAbiVersion = 2;

template <typename Signature>
c10::TypedOperatorHandle<Signature> find(const char* name, const char* overload) {
#ifndef TENSORIZER_OPERATORS_FROM_PYTHON
  // The call keeps the library among those that the program needs.
  TORCH_CHECK(tensorizer_abi_version() == kAbiVersion, "tensorizer.h of version ", kAbiVersion,
              " is used with a libtensorizer_torch.so of version ", tensorizer_abi_version());
#endif
  const auto schema = c10::Dispatcher::singleton().findSchema({name, overload});
  TORCH_CHECK(schema, "the operator ", name,
              " is not there: neither libtensorizer_torch.so nor "
              "the Python package has been loaded");
  return schema->typed<Signature>();
}

}  // namespace detail

// All tensors of a file. They are leaves that do not require gradients.
inline Tensors load(const std::string& uri, const LoadOptions& options = {}) {
  static const auto op =
      detail::find<Tensors(std::string, std::optional<c10::Device>, bool,
                           std::optional<std::int64_t>, std::optional<at::Tensor>)>(
          "tensorizer::load", "");
  return op.call(uri, options.device, options.verify, options.num_readers, options.key);
}

// Tensors of these names, in this order. A name that the file has not, or that is given twice, is
// an error, and nothing is read.
inline std::vector<at::Tensor> load(const std::string& uri, const std::vector<std::string>& names,
                                    const LoadOptions& options = {}) {
  static const auto op = detail::find<std::vector<at::Tensor>(
      std::string, std::vector<std::string>, std::optional<c10::Device>, bool,
      std::optional<std::int64_t>, std::optional<at::Tensor>)>("tensorizer::load", "list");
  return op.call(uri, names, options.device, options.verify, options.num_readers, options.key);
}

// Fills tensors that exist, of the same dtypes and shapes, in place. Contiguous tensors in host
// memory are read into directly, others by way of a copy. If names, dtypes or shapes do not fit,
// none of the tensors is touched.
inline void load_into(const std::string& uri, const std::vector<std::string>& names,
                      at::TensorList out, const LoadOptions& options = {}) {
  static const auto op =
      detail::find<void(std::string, std::vector<std::string>, at::TensorList, bool,
                        std::optional<std::int64_t>, std::optional<at::Tensor>)>("tensorizer::load",
                                                                                 "into");
  op.call(uri, names, out, options.verify, options.num_readers, options.key);
}

// The names of the tensors of a file, in its order; only the index is read.
inline std::vector<std::string> names(const std::string& uri) {
  static const auto op =
      detail::find<std::vector<std::string>(std::string)>("tensorizer::names", "");
  return op.call(uri);
}

// Writes a file with these tensors. It appears whole, or not at all with the old one left. With a
// key, a uint8 tensor of 32 elements, their data are encrypted.
inline void save(const std::string& uri, const std::vector<std::string>& names,
                 const std::vector<at::Tensor>& tensors,
                 const std::optional<at::Tensor>& key = {}) {
  static const auto op =
      detail::find<void(std::string, std::vector<std::string>, std::vector<at::Tensor>,
                        std::optional<at::Tensor>)>("tensorizer::save", "list");
  op.call(uri, names, tensors, key);
}

// The same from a dictionary, as load() returns it.
inline void save(const std::string& uri, const Tensors& tensors,
                 const std::optional<at::Tensor>& key = {}) {
  static const auto op =
      detail::find<void(std::string, Tensors, std::optional<at::Tensor>)>("tensorizer::save", "");
  op.call(uri, tensors, key);
}

}  // namespace tensorizer
