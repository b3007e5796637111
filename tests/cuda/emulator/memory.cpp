// The memory of devices: a sparse file that is mapped twice, without access where programs see it,
// so that a host that touches it dies, and with access for the emulator.
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "emulator.h"

namespace emulator {

namespace {

constexpr u64 kGranularity = 512;
constexpr u64 kPage = 2 << 20;

u64 rounded(u64 len, u64 to) { return (len + to - 1) / to * to; }

// The device with a live allocation that begins at an address; null, after a problem, if there is
// none.
Device* device_to_free(u64 address) {
  Device* device = device_of(address);
  if (device) {
    const auto found = device->allocations.find(address);
    if (found != device->allocations.end() && found->second.live) return device;
  }
  problem("free of %llx, which is no allocation", address);
  return nullptr;
}

void release(Device& device, u64 address) {
  Allocation& allocation = device.allocations[address];
  if (!allocation.live) return;
  allocation.live = false;
  device.used -= rounded(allocation.len, kGranularity);
  fallocate(device.memfd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
            static_cast<off_t>(address - device.base),
            static_cast<off_t>(rounded(allocation.len, 4096)));
}

}  // namespace

void map_device(Device& device, int id) {
  device.id = id;
  device.context.device = id;
  device.memfd = memfd_create("emulated device", MFD_CLOEXEC);
  if (device.memfd < 0 || ftruncate(device.memfd, static_cast<off_t>(kAddressSpace)) != 0) {
    perror("FAKE_CUDA memfd");
    abort();
  }
  auto* hint =
      reinterpret_cast<void*>(0x300000000000ull + static_cast<u64>(id) * 2 * kAddressSpace);
  void* seen =
      mmap(hint, kAddressSpace, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  void* backing = mmap(nullptr, kAddressSpace, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE,
                       device.memfd, 0);
  if (seen == MAP_FAILED || backing == MAP_FAILED) {
    perror("FAKE_CUDA mmap");
    abort();
  }
  madvise(backing, kAddressSpace, MADV_DONTFORK);
  madvise(backing, kAddressSpace, MADV_DONTDUMP);
  device.base = as_address(seen);
  device.backing = static_cast<char*>(backing);
  device.next = kPage;
}

Device* device_of(u64 address) {
  State& s = state();
  for (int id = 0; id < s.settings.devices; ++id) {
    Device& device = s.devices[static_cast<size_t>(id)];
    if (address >= device.base && address < device.base + kAddressSpace) return &device;
  }
  return nullptr;
}

char* backing_of(u64 address) {
  const Device* device = device_of(address);
  return device ? device->backing + (address - device->base) : nullptr;
}

// True if the range lies in one live allocation.
bool is_live(u64 address, u64 len, u64* base, u64* size) {
  const Device* device = device_of(address);
  if (!device) return false;
  auto after = device->allocations.upper_bound(address);
  if (after == device->allocations.begin()) return false;
  const auto& [start, allocation] = *std::prev(after);
  if (!allocation.live || address + len > start + allocation.len) return false;
  if (base) *base = start;
  if (size) *size = allocation.len;
  return true;
}

int allocate(Lock& lock, u64* address, u64 len, int id) {
  State& s = state();
  Device& device = s.devices[static_cast<size_t>(id)];
  *address = 0;
  if (device.sticky_error) return device.sticky_error;
  if (int code = forbidden_by_capture()) return code;
  if (len == 0) return 0;
  const u64 taken = rounded(len, kGranularity);
  const u64 span = rounded(len, kPage) + kPage;  // with a gap behind
  if (device.used + taken > s.settings.memory || device.next + span > kAddressSpace) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  *address = device.base + device.next;
  device.next += span;
  device.used += taken;
  device.peak = std::max(device.peak, device.used);
  device.allocations[*address] = {len, true};
  if (s.settings.poison) memset(backing_of(*address), 0xA5, len);
  spend(lock, s.settings.malloc_cost);
  return 0;
}

// Waits for the device, as cudaFree does.
int deallocate(Lock& lock, u64 address) {
  State& s = state();
  if (address == 0) return 0;
  Device* device = device_to_free(address);
  if (!device) return CUDA_ERROR_INVALID_VALUE;
  if (int code = forbidden_by_capture()) return code;
  const u64 len = device->allocations[address].len;
  drain_device(lock, device->id);
  // Copies between devices may be on a stream of the other one.
  s.progress.wait(lock, [&] { return !is_pending(address, address + len, false); });
  release(*device, address);
  return 0;
}

// For the order of streams a free writes to all of the memory.
int deallocate_in_order(u64 address, void* handle, int current) {
  if (address == 0) return 0;
  Stream* stream = stream_of(handle, current);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  Device* device = device_to_free(address);
  if (!device) return CUDA_ERROR_INVALID_VALUE;
  if (stream->graph) return cudaErrorStreamCaptureUnsupported;
  Operation operation;
  operation.what = "free";
  operation.accesses.push_back({address, address + device->allocations[address].len, true, false});
  operation.run = [=] {
    Lock lock(state().lock);
    release(*device, address);
  };
  submit(stream, std::move(operation));
  return 0;
}

}  // namespace emulator
