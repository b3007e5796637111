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

// Converts a string for Rust, whose strings are UTF-8. For other text it throws an error that shows
// the text.
rust::Str str(const std::string& text);
rust::Vec<rust::String> strings(const Names& names);

// Returns the bytes of a key. A key is a tensor, so that no graph has it as a constant and no trace
// prints it.
rust::Vec<std::uint8_t> key_bytes(const Key& key);

// Makes the load options of an operator.
OpOptions options(bool verify, Readers num_readers, const Key& key, std::int16_t device = kCpu);

// Returns the device with its index: CUDA without an index is the current device.
OptionalDevice resolved(OptionalDevice device);

// Returns the number of the device to which the core loads; the CPU for devices that it does not
// know.
std::int16_t number(const OptionalDevice& device);

// Takes the loaded tensors, and copies those to the given device that are not there.
std::vector<at::Tensor> place(LoadedTensors& loaded, const OptionalDevice& device);

// True if torch traces the calls of this thread. A tracer unwraps tensor subclasses itself.
bool traced();

// Makes a dict of tensors by name.
Dict by_name(Names keys, std::vector<at::Tensor> tensors);

}  // namespace tensorizer
