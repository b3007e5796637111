// Arguments and results of operators: between torch's types and those of the bridge.
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "rust/cxx.h"
#include "tensor.h"

namespace tensorizer {

struct OpOptions;

using Names = std::vector<std::string>;
using OptionalDevice = std::optional<at::Device>;
using Readers = std::optional<std::int64_t>;
using Key = std::optional<at::Tensor>;
using Dict = c10::Dict<std::string, at::Tensor>;

// A string for Rust, whose strings are UTF-8; others are refused with the text that is not.
rust::Str str(const std::string& text);
rust::Vec<rust::String> strings(const Names& names);

// The bytes of a key. It is a tensor, so that no graph has it as a constant and no trace prints it.
rust::Vec<std::uint8_t> key_bytes(const Key& key);

// Load options of an operator.
OpOptions options(bool verify, Readers num_readers, const Key& key, std::int16_t device = kCpu);

// The device that is meant, with its index.
OptionalDevice resolved(OptionalDevice device);

// The device to which the core loads, by its number; the CPU for devices that it does not know.
std::int16_t number(const OptionalDevice& device);

// The tensors where the caller wants them.
std::vector<at::Tensor> place(Loaded& loaded, const OptionalDevice& device);

// True if torch traces what this thread calls: it takes tensors apart by itself.
bool traced();

// Tensors by name.
Dict by_name(Names keys, std::vector<at::Tensor> tensors);

}  // namespace tensorizer
