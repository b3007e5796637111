// Device memory that holds loaded tensors.
#pragma once

#include <c10/core/Storage.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "rust/cxx.h"

namespace tensorizer {

// Uninitialised blocks of one device's memory, from torch's allocator. Each is a storage, which
// tensors can share.
class TorchBlocks {
 public:
  explicit TorchBlocks(c10::Device device) : device_(device) {}

  // Adds blocks of these lengths, for this thread's current stream.
  void add(rust::Slice<const std::uint64_t> lens);

  // Lets torch's allocator ask the driver for memory for several of the next blocks at once: at
  // least `least` bytes, and at most `most`. Returns its bytes; 0 if that is of no use, or refused.
  std::uint64_t reserve(std::uint64_t least, std::uint64_t most) noexcept;

  // Returns the address of a block.
  std::size_t address(std::size_t at) const;

  // Takes blocks out, for use on this thread's current stream.
  std::unique_ptr<TorchBlocks> take(rust::Slice<const std::size_t> numbers);

  const c10::Device& device() const noexcept { return device_; }
  const c10::Storage& storage(std::size_t at) const { return blocks_.at(at).storage; }

 private:
  struct Block {
    c10::Storage storage;
    // The id of the stream on which it was allocated.
    std::int64_t stream;
  };

  c10::Device device_;
  std::vector<Block> blocks_;
};

// Makes an empty list of blocks of a device, given by its number.
std::unique_ptr<TorchBlocks> new_blocks(std::int16_t device);

}  // namespace tensorizer
