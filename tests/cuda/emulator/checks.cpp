// Checks that run before an operation.
#include <string.h>

#include <algorithm>

#include "emulator.h"

namespace emulator {

bool is_pending(u64 begin, u64 end, bool host) {
  return std::ranges::any_of(
      state().pending, [&](const auto& entry) { return uses(entry.second, begin, end, host); });
}

// Finds memory that was freed or unpinned between the call and the operation; a call with memory
// that is freed already fails by itself.
void check_lifetimes(const Operation& operation) {
  for (const auto& [begin, end, write, host] : operation.accesses) {
    if (!host && !is_live(begin, end - begin)) {
      problem("%s uses device memory %llx..%llx that was freed meanwhile", operation.what, begin,
              end);
    }
    if (host && host_memory(begin, end - begin) != HostMemory::kPinned) {
      problem("%s uses host memory %llx..%llx that was unpinned meanwhile", operation.what, begin,
              end);
    }
  }
}

u64 checksum(const void* from, u64 len) {
  const auto* bytes = static_cast<const unsigned char*>(from);
  u64 hash = 0x9E3779B97F4A7C15ull ^ len;
  u64 at = 0;
  for (; at + 8 <= len; at += 8) {
    u64 word;
    memcpy(&word, bytes + at, 8);
    hash = (hash ^ word) * 0xff51afd7ed558ccdull;
    hash ^= hash >> 32;
  }
  for (; at < len; ++at) hash = (hash ^ bytes[at]) * 0x100000001b3ull;
  return hash;
}

}  // namespace emulator
