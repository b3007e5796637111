// Pinned host memory.
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "emulator.h"

namespace emulator {

HostMemory host_memory(u64 address, u64 len) {
  const auto& pinned = state().pinned;
  const auto after = pinned.upper_bound(address);
  if (after != pinned.begin()) {
    const auto& [start, range] = *std::prev(after);
    const u64 end = start + range.len;
    if (address < end) {
      const bool inside = address + std::max<u64>(len, 1) <= end;
      return inside ? HostMemory::kPinned : HostMemory::kPartlyPinned;
    }
  }
  if (after != pinned.end() && after->first < address + len) return HostMemory::kPartlyPinned;
  return HostMemory::kPageable;
}

int pin(Lock& lock, u64 address, u64 len, bool allocated) {
  State& s = state();
  if (int code = forbidden_by_capture()) return code;
  if (len == 0) return CUDA_ERROR_INVALID_VALUE;
  if (host_memory(address, len) != HostMemory::kPageable) {
    return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  }
  s.pinned[address] = {len, allocated};
  s.pinned_bytes += len;
  s.pinned_peak = std::max(s.pinned_peak, s.pinned_bytes);
  s.statistics["bytes pinned"] += len;
  spend_pin(lock, address, len);
  return 0;
}

// Waits for copies if CUDA has allocated the memory, as CUDA does; to unpin other memory during a
// copy is an error of the program.
int unpin(Lock& lock, u64 address, bool allocated) {
  State& s = state();
  const auto found = s.pinned.find(address);
  if (found == s.pinned.end() || found->second.allocated != allocated) {
    return allocated ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  }
  const u64 len = found->second.len;
  const Pending* operation = allocated ? nullptr : unknown_on(address, address + len, true);
  if (operation) {
    problem("host memory %llx+%llu is unpinned before the end of a %s is known", address, len,
            operation->what);
  }
  s.progress.wait(lock, [&] { return !is_pending(address, address + len, true); });
  s.pinned.erase(address);
  s.pinned_bytes -= len;
  if (allocated) syscall(SYS_munmap, address, len);
  return 0;
}

int allocate_pinned(Lock& lock, void** address, u64 len) {
  *address = mmap(nullptr, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (*address == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  const int code = pin(lock, as_address(*address), len, true);
  if (code) syscall(SYS_munmap, *address, len);
  return code;
}

}  // namespace emulator

using namespace emulator;

// Replaces the C library's function.
API int munmap(void* address, size_t len) {
  State& s = state();
  if (s.owner.load(std::memory_order_relaxed) == getpid()) {
    // The emulator itself unmaps memory, of threads for instance, while it has the lock.
    Lock lock(s.lock, std::try_to_lock);
    if (lock.owns_lock() && host_memory(as_address(address), len) != HostMemory::kPageable) {
      problem("munmap of pinned memory %p+%zu", address, len);
    }
  }
  return static_cast<int>(syscall(SYS_munmap, address, len));
}
