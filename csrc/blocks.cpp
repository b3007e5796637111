#include "blocks.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "tensor.h"

namespace tensorizer {

namespace {

// True if the allocator was told not to split large blocks.
bool keeps_blocks_whole() {
  for (const auto* name : {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}) {
    const auto* value = std::getenv(name);
    if (value != nullptr && std::strstr(value, "max_split_size") != nullptr) return true;
  }
  return false;
}

}  // namespace

std::uint64_t TorchBlocks::reserve(std::uint64_t least, std::uint64_t most) noexcept {
  try {
    const c10::DeviceGuard guard(device_);
    auto* allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device_.type()));
    if (allocator == nullptr || keeps_blocks_whole()) return 0;
    const auto stats = allocator->getDeviceStats(device_.index());
    const auto kept = stats.reserved_bytes[0].current - stats.allocated_bytes[0].current;
    // A larger share could take memory that other processes, or libraries, are about to ask for.
    const std::uint64_t share = allocator->getMemoryInfo(device_.index()).first / 4;
    const auto len = std::min(most, share);
    if (len < least) return 0;
    // Freed memory that the allocator keeps serves first.
    if (kept > 0 && static_cast<std::uint64_t>(kept) >= len) return 0;
    // Given back at once: the allocator keeps it, and splits the next blocks off it.
    const auto given_back = allocator->allocate(len);
    return len;
  } catch (...) {
    // Blocks are allocated one by one then.
    return 0;
  }
}

void TorchBlocks::add(rust::Slice<const std::uint64_t> lens) {
  // Sets the device once for all blocks; at::empty would look it up several times for each.
  const c10::DeviceGuard guard(device_);
  // The allocator that torch uses now; a program may have replaced it.
  auto* allocator =
      at::empty({0}, at::TensorOptions().dtype(at::kByte).device(device_)).storage().allocator();
  TORCH_CHECK(allocator != nullptr, "torch has no allocator for ", device_);
  const auto stream = stream_of(device_);
  std::vector<Block> added;
  added.reserve(lens.size());
  for (const auto len : lens) {
    c10::Storage storage(c10::Storage::use_byte_size_t(), len, allocator->allocate(len), allocator,
                         /*resizable=*/true);
    added.push_back({std::move(storage), stream});
  }
  // Reserved first, so that all blocks are added, or none.
  blocks_.reserve(blocks_.size() + added.size());
  for (auto& block : added) blocks_.push_back(std::move(block));
}

std::size_t TorchBlocks::address(std::size_t at) const {
  return reinterpret_cast<std::size_t>(blocks_.at(at).storage.data());
}

std::unique_ptr<TorchBlocks> TorchBlocks::take(rust::Slice<const std::size_t> numbers) {
  auto taken = std::make_unique<TorchBlocks>(device_);
  taken->blocks_.reserve(numbers.size());
  const auto stream = stream_of(device_);
  for (const auto number : numbers) {
    auto block = std::exchange(blocks_.at(number), {c10::Storage(), 0});
    TORCH_CHECK(block.storage, "block ", number, " was taken before");
    if (block.stream != stream) {
      // Otherwise the allocator could reuse the memory while this stream still uses it.
      const c10::impl::VirtualGuardImpl guard(device_.type());
      guard.recordDataPtrOnStream(block.storage.data_ptr(), guard.getStream(device_));
    }
    taken->blocks_.push_back(std::move(block));
  }
  return taken;
}

std::unique_ptr<TorchBlocks> new_blocks(std::int16_t device) {
  return std::make_unique<TorchBlocks>(
      at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device)));
}

}  // namespace tensorizer
