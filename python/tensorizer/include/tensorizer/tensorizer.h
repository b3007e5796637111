// Loads and saves .tensors files in LibTorch programs, without Python. Loads also take safetensors
// files, indexes of shards, and folders that hold one of these. Checkpoints of torch.save are
// refused, because their pickles can be read only in Python.
//
// All functions call the operators of libtensorizer_torch.so through torch's dispatcher, throw
// c10::Error with a text that names the operation and the file, and can be called from any number
// of threads at once.
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

// Define this in a C++ extension of a Python program, where `import tensorizer` provides the
// operators, and do not link the library.
#ifndef TENSORIZER_OPERATORS_FROM_PYTHON
extern "C" std::uint32_t tensorizer_abi_version();
#endif

namespace tensorizer {

// Tensors by name, in the order of the file.
using Tensors = c10::Dict<std::string, at::Tensor>;

struct LoadOptions {
  // The device of new tensors; the CPU if it is not set. load_into() ignores it.
  std::optional<c10::Device> device;
  // Compare every tensor with the SHA-256 and CRC-32 hashes in the file. A difference, or a file
  // without hashes, such as a safetensors file, throws.
  bool verify = false;
  // The number of threads that read at once, at least 1; chosen by the source if it is not set.
  std::optional<std::int64_t> num_readers;
  // The key of an encrypted file: a uint8 tensor of 32 elements.
  std::optional<at::Tensor> key;
};

namespace detail {

// The version of the library's binary interface that this header needs.
constexpr std::uint32_t kAbiVersion = 2;

template <typename Signature>
c10::TypedOperatorHandle<Signature> find(const char* name, const char* overload) {
#ifndef TENSORIZER_OPERATORS_FROM_PYTHON
  // This call keeps the linker from dropping the library as unused (--as-needed).
  TORCH_CHECK(tensorizer_abi_version() == kAbiVersion, "tensorizer.h of version ", kAbiVersion,
              " is used with a libtensorizer_torch.so of version ", tensorizer_abi_version(),
              ": compile the program with the header of that library");
#endif
  const auto schema = c10::Dispatcher::singleton().findSchema({name, overload});
  TORCH_CHECK(schema, "the operator ", name,
              " is not there: neither libtensorizer_torch.so nor "
              "the Python package has been loaded");
  return schema->typed<Signature>();
}

}  // namespace detail

// Returns all tensors of a file. They are leaves that do not require gradients.
inline Tensors load(const std::string& uri, const LoadOptions& options = {}) {
  static const auto op =
      detail::find<Tensors(std::string, std::optional<c10::Device>, bool,
                           std::optional<std::int64_t>, std::optional<at::Tensor>)>(
          "tensorizer::load", "");
  return op.call(uri, options.device, options.verify, options.num_readers, options.key);
}

// Returns the named tensors, in this order. A name that the file lacks, or that is given twice,
// throws, and nothing is read.
inline std::vector<at::Tensor> load(const std::string& uri, const std::vector<std::string>& names,
                                    const LoadOptions& options = {}) {
  static const auto op = detail::find<std::vector<at::Tensor>(
      std::string, std::vector<std::string>, std::optional<c10::Device>, bool,
      std::optional<std::int64_t>, std::optional<at::Tensor>)>("tensorizer::load", "list");
  return op.call(uri, names, options.device, options.verify, options.num_readers, options.key);
}

// Fills existing tensors of the same dtypes and shapes in place. Contiguous tensors are read into
// directly, others are filled through a copy. If names, dtypes or shapes do not fit, no tensor is
// changed. If reading fails, they hold some of the new bytes.
inline void load_into(const std::string& uri, const std::vector<std::string>& names,
                      at::TensorList out, const LoadOptions& options = {}) {
  static const auto op =
      detail::find<void(std::string, std::vector<std::string>, at::TensorList, bool,
                        std::optional<std::int64_t>, std::optional<at::Tensor>)>("tensorizer::load",
                                                                                 "into");
  op.call(uri, names, out, options.verify, options.num_readers, options.key);
}

// Returns the names of the tensors of a file, in its order. Only the index is read.
inline std::vector<std::string> names(const std::string& uri) {
  static const auto op =
      detail::find<std::vector<std::string>(std::string)>("tensorizer::names", "");
  return op.call(uri);
}

// Writes a file with these tensors. It appears completely; if saving fails, the old file stays.
// With a key, a uint8 tensor of 32 elements, the data of the tensors are encrypted.
inline void save(const std::string& uri, const std::vector<std::string>& names,
                 const std::vector<at::Tensor>& tensors,
                 const std::optional<at::Tensor>& key = {}) {
  static const auto op =
      detail::find<void(std::string, std::vector<std::string>, std::vector<at::Tensor>,
                        std::optional<at::Tensor>)>("tensorizer::save", "list");
  op.call(uri, names, tensors, key);
}

// Writes a file from a dictionary, such as load() returns.
inline void save(const std::string& uri, const Tensors& tensors,
                 const std::optional<at::Tensor>& key = {}) {
  static const auto op =
      detail::find<void(std::string, Tensors, std::optional<at::Tensor>)>("tensorizer::save", "");
  op.call(uri, tensors, key);
}

}  // namespace tensorizer
