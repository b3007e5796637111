// Launches of kernels: the functions that code compiled by nvcc calls.
#include <unordered_map>

#include "emulator.h"

namespace emulator {

namespace {

// Mangled names by the address of the host's function. Filled while libraries are loaded.
std::unordered_map<const void*, const char*>& kernels() {
  static auto* the_kernels = new std::unordered_map<const void*, const char*>;
  return *the_kernels;
}

thread_local struct {
  dim3 grid, block;
  size_t shared;
  void* stream;
} call_configuration;

cudaError_t launch(const void* function, void** args, void* handle) {
  return runtime("cudaLaunchKernel", [&](Lock&, int current) -> int {
    State& s = state();
    Stream* stream = stream_of(handle, current);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (int code = s.devices[static_cast<size_t>(stream->device)].sticky_error) return code;
    const auto found = kernels().find(function);
    if (found == kernels().end()) return cudaErrorInvalidDeviceFunction;
    static std::map<const void*, std::string> names;
    std::string& name = names[function];
    if (name.empty()) name = demangle(found->second);
    Operation operation;
    if (!emulate_kernel(name, args, &operation)) {
      if (s.unknown_kernels[name]++ == 0) note("no kernel %s", name.c_str());
      return cudaErrorNotSupported;
    }
    if (stream->device != current) {
      problem("a kernel is launched on a stream of device %d while %d is current", stream->device,
              current);
    }
    submit(stream, std::move(operation));
    return 0;
  });
}

}  // namespace

}  // namespace emulator

using namespace emulator;

API cudaError_t CUDARTAPI cudaLaunchKernel(const void* function, dim3, dim3, void** args, size_t,
                                           cudaStream_t stream) {
  return launch(function, args, stream);
}

API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void** args, size_t,
                                   cudaStream_t stream) {
  return launch(kernel, args, stream);
}

API cudaError_t CUDARTAPI cudaLaunchKernelExC(const cudaLaunchConfig_t* config,
                                              const void* function, void** args) {
  return launch(function, args, config->stream);
}

API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

API void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}

API void __cudaRegisterFatBinaryEnd(void**) {}

API void __cudaUnregisterFatBinary(void**) {}

API char __cudaInitModule(void**) { return 1; }

API void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*,
                                uint3*, dim3*, dim3*, int*) {
  std::lock_guard lock(state().lock);
  kernels()[host] = name;
}

API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared,
                                         struct CUstream_st* stream) {
  call_configuration = {grid, block, shared, stream};
  return 0;
}

API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = call_configuration.grid;
  *block = call_configuration.block;
  *shared = call_configuration.shared;
  *static_cast<void**>(stream) = call_configuration.stream;
  return cudaSuccess;
}

API cudaError_t CUDARTAPI cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->binaryVersion = attributes->ptxVersion = 90;
  return cudaSuccess;
}

API cudaError_t CUDARTAPI cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
  return cudaSuccess;
}

API cudaError_t CUDARTAPI cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*,
                                                                        int, size_t) {
  *blocks = 2;
  return cudaSuccess;
}

API cudaError_t CUDARTAPI cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks,
                                                                                 const void*, int,
                                                                                 size_t, unsigned) {
  *blocks = 2;
  return cudaSuccess;
}
