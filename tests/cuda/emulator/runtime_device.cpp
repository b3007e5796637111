// The run time's API: devices, errors, and how functions of the driver are looked up.
#include <stdio.h>
#include <string.h>

#include "emulator.h"

using namespace emulator;

API cudaError_t CUDARTAPI cudaGetDeviceCount(int* count) {
  return runtime("cudaGetDeviceCount", [&](Lock&, int) {
    *count = state().settings.devices;
    return 0;
  });
}

API cudaError_t CUDARTAPI cudaGetDevice(int* device) {
  return runtime("cudaGetDevice", [&](Lock&, int current) {
    *device = current;
    return 0;
  });
}

API cudaError_t CUDARTAPI cudaSetDevice(int device) {
  return runtime("cudaSetDevice", [&](Lock&, int) -> int {
    if (device < 0 || device >= state().settings.devices) return cudaErrorInvalidDevice;
    Device& chosen = state().devices[static_cast<size_t>(device)];
    chosen.active = true;
    contexts.stack.back() = &chosen.context;
    return 0;
  });
}

API cudaError_t CUDARTAPI cudaDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return cudaSuccess;
}

API cudaError_t CUDARTAPI cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

API cudaError_t CUDARTAPI cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  *value = attribute(which);
  return cudaSuccess;
}

API cudaError_t CUDARTAPI cudaDeviceGetPCIBusId(char* text, int len, int device) {
  snprintf(text, static_cast<size_t>(len), "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}

API cudaError_t CUDARTAPI cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  return runtime("cudaGetDeviceProperties", [&](Lock&, int) -> int {
    if (device < 0 || device >= state().settings.devices) return cudaErrorInvalidDevice;
    cudaDeviceProp& p = *properties;
    p = {};
    snprintf(p.name, sizeof p.name, "Emulated H100 %d", device);
    memset(&p.uuid, 0x11 + device, sizeof p.uuid);
    p.totalGlobalMem = state().settings.memory;
    p.sharedMemPerBlock = 49152;
    p.sharedMemPerBlockOptin = 232448;
    p.sharedMemPerMultiprocessor = 233472;
    p.regsPerBlock = p.regsPerMultiprocessor = 65536;
    p.warpSize = 32;
    p.maxThreadsPerBlock = 1024;
    p.maxThreadsDim[0] = p.maxThreadsDim[1] = 1024;
    p.maxThreadsDim[2] = 64;
    p.maxGridSize[0] = 2147483647;
    p.maxGridSize[1] = p.maxGridSize[2] = 65535;
    p.major = 9;
    p.multiProcessorCount = 132;
    p.maxThreadsPerMultiProcessor = 2048;
    p.l2CacheSize = 52428800;
    p.unifiedAddressing = p.concurrentKernels = p.canMapHostMemory = 1;
    p.asyncEngineCount = 3;
    p.pciBusID = device + 1;
    return 0;
  });
}

API cudaError_t CUDARTAPI cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

API cudaError_t CUDARTAPI cudaDeviceSynchronize() {
  return runtime("cudaDeviceSynchronize", [&](Lock& lock, int device) -> int {
    if (int code = forbidden_by_capture()) return code;
    drain_device(lock, device);
    return state().devices[static_cast<size_t>(device)].sticky_error;
  });
}

API cudaError_t CUDARTAPI cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return cudaSuccess;
}

API cudaError_t CUDARTAPI cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }

API cudaError_t CUDARTAPI cudaGetLastError() {
  const int code = last_error;
  last_error = 0;
  return static_cast<cudaError_t>(code);
}

API cudaError_t CUDARTAPI cudaPeekAtLastError() { return static_cast<cudaError_t>(last_error); }

API const char* CUDARTAPI cudaGetErrorName(cudaError_t code) { return error_name(code); }

API const char* CUDARTAPI cudaGetErrorString(cudaError_t code) { return error_text(code); }

API cudaError_t CUDARTAPI cudaProfilerStart() { return cudaSuccess; }

API cudaError_t CUDARTAPI cudaProfilerStop() { return cudaSuccess; }

API cudaError_t CUDARTAPI
cudaGetDriverEntryPointByVersion(const char* symbol, void** found, unsigned version,
                                 unsigned long long, cudaDriverEntryPointQueryResult* status) {
  *found = entry_point(symbol, static_cast<int>(version));
  if (status) *status = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

API cudaError_t CUDARTAPI cudaGetDriverEntryPoint(const char* symbol, void** found,
                                                  unsigned long long flags,
                                                  cudaDriverEntryPointQueryResult* status) {
  return cudaGetDriverEntryPointByVersion(symbol, found, CUDART_VERSION, flags, status);
}
