// The driver's API: memory and copies.
#include "emulator.h"

using namespace emulator;

API CUresult CUDAAPI cuMemAlloc(CUdeviceptr* address, size_t len) {
  return driver("cuMemAlloc",
                [&](Lock& lock, int device) { return allocate(lock, address, len, device); });
}

API CUresult CUDAAPI cuMemFree(CUdeviceptr address) {
  return driver("cuMemFree", [&](Lock& lock, int) { return deallocate(lock, address); });
}

API CUresult CUDAAPI cuMemGetInfo(size_t* available, size_t* total) {
  return driver("cuMemGetInfo", [&](Lock&, int device) {
    *total = state().settings.memory;
    *available = *total - state().devices[static_cast<size_t>(device)].used;
    return 0;
  });
}

API CUresult CUDAAPI cuMemGetAddressRange(CUdeviceptr* base, size_t* size, CUdeviceptr address) {
  return driver("cuMemGetAddressRange", [&](Lock&, int) -> int {
    u64 found_base = 0, found_size = 0;
    if (!is_live(address, 1, &found_base, &found_size)) return CUDA_ERROR_NOT_FOUND;
    if (base) *base = found_base;
    if (size) *size = found_size;
    return 0;
  });
}

API CUresult CUDAAPI cuMemHostRegister(void* address, size_t len, unsigned) {
  return driver("cuMemHostRegister",
                [&](Lock& lock, int) { return pin(lock, as_address(address), len); });
}

API CUresult CUDAAPI cuMemHostUnregister(void* address) {
  return driver("cuMemHostUnregister",
                [&](Lock& lock, int) { return unpin(lock, as_address(address)); });
}

API CUresult CUDAAPI cuMemHostAlloc(void** address, size_t len, unsigned) {
  return driver("cuMemHostAlloc",
                [&](Lock& lock, int) { return allocate_pinned(lock, address, len); });
}

API CUresult CUDAAPI cuMemFreeHost(void* address) {
  return driver("cuMemFreeHost",
                [&](Lock& lock, int) { return unpin(lock, as_address(address), true); });
}

API CUresult CUDAAPI cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, size_t len,
                                       CUstream stream) {
  return driver("cuMemcpyHtoDAsync", [&](Lock& lock, int device) -> int {
    if (!device_of(to)) {
      problem("copy to device to %llx, which is not on one", to);
      return CUDA_ERROR_INVALID_VALUE;
    }
    return copy(lock, to, as_address(from), len, stream, device, false, "copy to device");
  });
}

API CUresult CUDAAPI cuMemcpyDtoHAsync(void* to, CUdeviceptr from, size_t len, CUstream stream) {
  return driver("cuMemcpyDtoHAsync", [&](Lock& lock, int device) -> int {
    if (!device_of(from)) {
      problem("copy from device from %llx, which is not on one", from);
      return CUDA_ERROR_INVALID_VALUE;
    }
    return copy(lock, as_address(to), from, len, stream, device, false, "copy from device");
  });
}

API CUresult CUDAAPI cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t len,
                                       CUstream stream) {
  return driver("cuMemcpyDtoDAsync", [&](Lock& lock, int device) {
    return copy(lock, to, from, len, stream, device, false, "copy on device");
  });
}

API CUresult CUDAAPI cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t len, CUstream stream) {
  return driver("cuMemcpyAsync", [&](Lock& lock, int device) {
    return copy(lock, to, from, len, stream, device, false, "copy");
  });
}

API CUresult CUDAAPI cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count,
                                     CUstream stream) {
  return driver("cuMemsetD8Async", [&](Lock& lock, int device) {
    return set_memory(lock, to, value, 1, count, stream, device, false);
  });
}

API CUresult CUDAAPI cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count,
                                      CUstream stream) {
  return driver("cuMemsetD32Async", [&](Lock& lock, int device) {
    return set_memory(lock, to, value, 4, count, stream, device, false);
  });
}

API CUresult CUDAAPI cuPointerGetAttribute(void* data, CUpointer_attribute which,
                                           CUdeviceptr address) {
  return driver_anywhere("cuPointerGetAttribute", [&](Lock&) -> int {
    Device* device = device_of(address);
    const bool pinned = host_memory(address, 1) == HostMemory::kPinned;
    switch (which) {
      case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        if (!device && !pinned) return CUDA_ERROR_INVALID_VALUE;
        *static_cast<unsigned*>(data) = device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
        return 0;
      case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        if (!device) return CUDA_ERROR_INVALID_VALUE;
        *static_cast<int*>(data) = device->id;
        return 0;
      case CU_POINTER_ATTRIBUTE_CONTEXT:
        if (!device) return CUDA_ERROR_INVALID_VALUE;
        *static_cast<void**>(data) = &device->context;
        return 0;
      default:
        return CUDA_ERROR_NOT_SUPPORTED;
    }
  });
}
