// The run time's API: memory and copies.
#include "emulator.h"

using namespace emulator;

API cudaError_t CUDARTAPI cudaMalloc(void** address, size_t len) {
  return runtime("cudaMalloc", [&](Lock& lock, int device) {
    u64 found = 0;
    const int code = allocate(lock, &found, len, device);
    *address = reinterpret_cast<void*>(found);
    return code;
  });
}

API cudaError_t CUDARTAPI cudaFree(void* address) {
  return runtime("cudaFree",
                 [&](Lock& lock, int) { return deallocate(lock, as_address(address)); });
}

API cudaError_t CUDARTAPI cudaMemGetInfo(size_t* available, size_t* total) {
  return runtime("cudaMemGetInfo", [&](Lock&, int device) {
    *total = state().settings.memory;
    *available = *total - state().devices[static_cast<size_t>(device)].used;
    return 0;
  });
}

API cudaError_t CUDARTAPI cudaHostAlloc(void** address, size_t len, unsigned) {
  return runtime("cudaHostAlloc",
                 [&](Lock& lock, int) { return allocate_pinned(lock, address, len); });
}

API cudaError_t CUDARTAPI cudaFreeHost(void* address) {
  return runtime("cudaFreeHost",
                 [&](Lock& lock, int) { return unpin(lock, as_address(address), true); });
}

API cudaError_t CUDARTAPI cudaHostRegister(void* address, size_t len, unsigned) {
  return runtime("cudaHostRegister",
                 [&](Lock& lock, int) { return pin(lock, as_address(address), len); });
}

API cudaError_t CUDARTAPI cudaHostUnregister(void* address) {
  return runtime("cudaHostUnregister",
                 [&](Lock& lock, int) { return unpin(lock, as_address(address)); });
}

API cudaError_t CUDARTAPI cudaPointerGetAttributes(cudaPointerAttributes* attributes,
                                                   const void* address) {
  return runtime("cudaPointerGetAttributes", [&](Lock&, int current) {
    auto& found = *attributes = {};
    auto* pointer = const_cast<void*>(address);
    if (const Device* device = device_of(as_address(address))) {
      found.type = cudaMemoryTypeDevice;
      found.device = device->id;
      found.devicePointer = pointer;
    } else if (host_memory(as_address(address), 1) == HostMemory::kPinned) {
      found.type = cudaMemoryTypeHost;
      found.device = current;
      found.hostPointer = found.devicePointer = pointer;
    } else {
      found.type = cudaMemoryTypeUnregistered;
      found.device = cudaInvalidDeviceId;
      found.hostPointer = pointer;
    }
    return 0;
  });
}

API cudaError_t CUDARTAPI cudaMemcpy(void* to, const void* from, size_t len, cudaMemcpyKind) {
  return runtime("cudaMemcpy", [&](Lock& lock, int device) -> int {
    if (int code = forbidden_by_capture()) return code;
    return copy(lock, as_address(to), as_address(from), len, nullptr, device, true, "cudaMemcpy");
  });
}

API cudaError_t CUDARTAPI cudaMemcpyAsync(void* to, const void* from, size_t len, cudaMemcpyKind,
                                          cudaStream_t stream) {
  return runtime("cudaMemcpyAsync", [&](Lock& lock, int device) {
    return copy(lock, as_address(to), as_address(from), len, stream, device, false,
                "cudaMemcpyAsync");
  });
}

API cudaError_t CUDARTAPI cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t len,
                                              cudaStream_t stream) {
  return runtime("cudaMemcpyPeerAsync", [&](Lock& lock, int device) {
    return copy(lock, as_address(to), as_address(from), len, stream, device, false,
                "cudaMemcpyPeerAsync");
  });
}

API cudaError_t CUDARTAPI cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from,
                                            size_t from_pitch, size_t width, size_t height,
                                            cudaMemcpyKind, cudaStream_t stream) {
  return runtime("cudaMemcpy2DAsync", [&](Lock& lock, int device) -> int {
    for (size_t row = 0; row < height; ++row) {
      const u64 row_to = as_address(to) + row * to_pitch;
      const u64 row_from = as_address(from) + row * from_pitch;
      const int code =
          copy(lock, row_to, row_from, width, stream, device, false, "cudaMemcpy2DAsync");
      if (code) return code;
    }
    return 0;
  });
}

API cudaError_t CUDARTAPI cudaMemset(void* to, int value, size_t len) {
  return runtime("cudaMemset", [&](Lock& lock, int device) {
    return set_memory(lock, as_address(to), static_cast<unsigned>(value), 1, len, nullptr, device,
                      true);
  });
}

API cudaError_t CUDARTAPI cudaMemsetAsync(void* to, int value, size_t len, cudaStream_t stream) {
  return runtime("cudaMemsetAsync", [&](Lock& lock, int device) {
    return set_memory(lock, as_address(to), static_cast<unsigned>(value), 1, len, stream, device,
                      false);
  });
}
