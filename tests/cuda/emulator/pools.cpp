// The run time's API: memory that is allocated and freed in the order of a stream. It comes from
// the device at once, and goes back to it as soon as the stream has reached the free.
#include "emulator.h"

using namespace emulator;

namespace {

// Each device has one pool, of which the handle is the device's address.
Device* device_of_pool(cudaMemPool_t pool) {
  for (auto& device : state().devices) {
    if (reinterpret_cast<Device*>(pool) == &device) return &device;
  }
  problem("%p is no memory pool", static_cast<void*>(pool));
  return nullptr;
}

}  // namespace

API cudaError_t CUDARTAPI cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  return runtime("cudaDeviceGetDefaultMemPool", [&](Lock&, int) -> int {
    if (device < 0 || device >= state().settings.devices) return cudaErrorInvalidDevice;
    *pool = reinterpret_cast<cudaMemPool_t>(&state().devices[static_cast<size_t>(device)]);
    return 0;
  });
}

// Attributes say when a pool gives memory back, which this one always does.
API cudaError_t CUDARTAPI cudaMemPoolSetAttribute(cudaMemPool_t pool, cudaMemPoolAttr, void*) {
  return runtime("cudaMemPoolSetAttribute", [&](Lock&, int) -> int {
    return device_of_pool(pool) ? cudaSuccess : cudaErrorInvalidValue;
  });
}

API cudaError_t CUDARTAPI cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr which,
                                                  void* value) {
  return runtime("cudaMemPoolGetAttribute", [&](Lock&, int) -> int {
    const Device* device = device_of_pool(pool);
    if (!device) return cudaErrorInvalidValue;
    switch (which) {
      case cudaMemPoolAttrUsedMemCurrent:
      case cudaMemPoolAttrReservedMemCurrent:
        *static_cast<u64*>(value) = device->used;
        return 0;
      case cudaMemPoolAttrUsedMemHigh:
      case cudaMemPoolAttrReservedMemHigh:
        *static_cast<u64*>(value) = device->peak;
        return 0;
      default:
        return cudaErrorNotSupported;
    }
  });
}

API cudaError_t CUDARTAPI cudaMemPoolTrimTo(cudaMemPool_t pool, size_t) {
  return runtime("cudaMemPoolTrimTo", [&](Lock&, int) -> int {
    return device_of_pool(pool) ? cudaSuccess : cudaErrorInvalidValue;
  });
}

API cudaError_t CUDARTAPI cudaMallocAsync(void** address, size_t len, cudaStream_t handle) {
  return runtime("cudaMallocAsync", [&](Lock& lock, int current) -> int {
    const Stream* stream = stream_of(handle, current);
    if (!stream) return cudaErrorInvalidResourceHandle;
    if (stream->graph) return cudaErrorStreamCaptureUnsupported;
    u64 found = 0;
    const int code = allocate(lock, &found, len, stream->device);
    *address = reinterpret_cast<void*>(found);
    return code;
  });
}

API cudaError_t CUDARTAPI cudaFreeAsync(void* address, cudaStream_t stream) {
  return runtime("cudaFreeAsync", [&](Lock&, int current) {
    return deallocate_in_order(as_address(address), stream, current);
  });
}
