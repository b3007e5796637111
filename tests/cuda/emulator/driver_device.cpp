// The driver's API: devices, contexts, errors, and how functions are looked up.
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "emulator.h"

namespace emulator {

namespace {

CUresult not_supported() { return CUDA_ERROR_NOT_SUPPORTED; }

bool exists(int device) { return device >= 0 && device < state().settings.devices; }

Device& device_at(int device) { return state().devices[static_cast<size_t>(device)]; }

Context* context_of(CUcontext handle) {
  for (auto& device : state().devices) {
    if (reinterpret_cast<Context*>(handle) == &device.context) return &device.context;
  }
  problem("%p is no context", static_cast<void*>(handle));
  return nullptr;
}

}  // namespace

void* entry_point(const char* symbol, int version) {
  static void* self = [] {
    Dl_info info{};
    dladdr(reinterpret_cast<void*>(&entry_point), &info);
    return dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  }();
  // The only function here with a form of CUDA 12 and one of CUDA 13.
  const bool batch = !strcmp(symbol, "cuMemcpyBatchAsync");
  if (batch && version < 13000) return dlsym(self, symbol);
  for (const char* suffix : {"_v3", "_v2", ""}) {
    const std::string name = std::string(symbol) + suffix;
    if (void* found = dlsym(self, name.c_str())) return found;
  }
  note("no %s", symbol);
  return reinterpret_cast<void*>(&not_supported);
}

}  // namespace emulator

using namespace emulator;

API CUresult CUDAAPI cuInit(unsigned) {
  return driver_anywhere("cuInit", [](Lock&) { return 0; });
}

API CUresult CUDAAPI cuDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

API CUresult CUDAAPI cuGetProcAddress(const char* symbol, void** found, int version, cuuint64_t,
                                      CUdriverProcAddressQueryResult* status) {
  *found = entry_point(symbol, version);
  if (status) *status = CU_GET_PROC_ADDRESS_SUCCESS;
  return CUDA_SUCCESS;
}

API CUresult CUDAAPI cuGetErrorString(CUresult code, const char** text) {
  *text = error_text(code);
  return CUDA_SUCCESS;
}

API CUresult CUDAAPI cuGetErrorName(CUresult code, const char** name) {
  *name = error_name(code);
  return CUDA_SUCCESS;
}

API CUresult CUDAAPI cuDeviceGetCount(int* count) {
  return driver_anywhere("cuDeviceGetCount", [&](Lock&) {
    *count = state().settings.devices;
    return 0;
  });
}

API CUresult CUDAAPI cuDeviceGet(CUdevice* device, int ordinal) {
  return driver_anywhere("cuDeviceGet", [&](Lock&) -> int {
    if (!exists(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return 0;
  });
}

API CUresult CUDAAPI cuDeviceGetName(char* name, int len, CUdevice) {
  snprintf(name, static_cast<size_t>(len), "Emulated H100");
  return CUDA_SUCCESS;
}

API CUresult CUDAAPI cuDeviceGetPCIBusId(char* text, int len, CUdevice device) {
  if (!exists(device)) return CUDA_ERROR_INVALID_DEVICE;
  snprintf(text, static_cast<size_t>(len), "0000:%02X:00.0", device + 1);
  return CUDA_SUCCESS;
}

API CUresult CUDAAPI cuDeviceTotalMem(size_t* bytes, CUdevice) {
  return driver_anywhere("cuDeviceTotalMem", [&](Lock&) {
    *bytes = state().settings.memory;
    return 0;
  });
}

API CUresult CUDAAPI cuDeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice) {
  *value = attribute(which);
  return CUDA_SUCCESS;
}

API CUresult CUDAAPI cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  memset(uuid, 0x11 + device, sizeof *uuid);
  return CUDA_SUCCESS;
}

API CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  return driver_anywhere("cuDevicePrimaryCtxRetain", [&](Lock&) -> int {
    if (!exists(device)) return CUDA_ERROR_INVALID_DEVICE;
    device_at(device).retained++;
    device_at(device).active = true;
    *context = reinterpret_cast<CUcontext>(&device_at(device).context);
    return 0;
  });
}

API CUresult CUDAAPI cuDevicePrimaryCtxRelease(CUdevice device) {
  return driver_anywhere("cuDevicePrimaryCtxRelease", [&](Lock&) -> int {
    if (!exists(device)) return CUDA_ERROR_INVALID_DEVICE;
    if (--device_at(device).retained < 0) problem("primary context released too often");
    return 0;
  });
}

API CUresult CUDAAPI cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  return driver_anywhere("cuDevicePrimaryCtxGetState", [&](Lock&) -> int {
    if (!exists(device)) return CUDA_ERROR_INVALID_DEVICE;
    if (flags) *flags = 0;
    *active = device_at(device).active;
    return 0;
  });
}

API CUresult CUDAAPI cuCtxGetCurrent(CUcontext* context) {
  if (!start()) return CUDA_ERROR_NOT_INITIALIZED;
  *context = reinterpret_cast<CUcontext>(current_context(false));
  return CUDA_SUCCESS;
}

API CUresult CUDAAPI cuCtxSetCurrent(CUcontext context) {
  return driver_anywhere("cuCtxSetCurrent", [&](Lock&) -> int {
    if (contexts.stack.empty()) contexts.stack.push_back(nullptr);
    contexts.stack.back() = context ? context_of(context) : nullptr;
    return 0;
  });
}

API CUresult CUDAAPI cuCtxPushCurrent(CUcontext context) {
  return driver_anywhere("cuCtxPushCurrent", [&](Lock&) -> int {
    Context* known = context_of(context);
    if (!known) return CUDA_ERROR_INVALID_CONTEXT;
    contexts.stack.push_back(known);
    contexts.pushed++;
    return 0;
  });
}

API CUresult CUDAAPI cuCtxPopCurrent(CUcontext* context) {
  return driver_anywhere("cuCtxPopCurrent", [&](Lock&) -> int {
    if (contexts.stack.empty()) {
      problem("pop of a context where none is");
      return CUDA_ERROR_INVALID_CONTEXT;
    }
    if (context) *context = reinterpret_cast<CUcontext>(contexts.stack.back());
    contexts.stack.pop_back();
    contexts.pushed--;
    return 0;
  });
}

API CUresult CUDAAPI cuCtxGetDevice(CUdevice* device) {
  return driver("cuCtxGetDevice", [&](Lock&, int current) {
    *device = current;
    return 0;
  });
}

API CUresult CUDAAPI cuCtxSynchronize() {
  return driver("cuCtxSynchronize", [&](Lock& lock, int current) -> int {
    if (int code = forbidden_by_capture()) return code;
    drain_device(lock, current);
    return device_at(current).sticky_error;
  });
}

API CUresult CUDAAPI cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  return driver_anywhere("cuThreadExchangeStreamCaptureMode", [&](Lock&) {
    const int before = capture_mode;
    capture_mode = *mode;
    *mode = static_cast<CUstreamCaptureMode>(before);
    return 0;
  });
}
