// Functions that torch is linked to and that are not emulated.

// CUDA_ERROR_NOT_SUPPORTED and cudaErrorNotSupported. Defined without their headers: only the names
// matter, not the arguments.
constexpr int kNotSupported = 801;

#define UNSUPPORTED(name)                                                             \
  extern "C" __attribute__((visibility("default"))) int name##_stub() __asm__(#name); \
  int name##_stub() { return kNotSupported; }

UNSUPPORTED(cuFuncGetAttribute)
UNSUPPORTED(cuFuncSetAttribute)
UNSUPPORTED(cuFuncSetCacheConfig)
UNSUPPORTED(cuLaunchCooperativeKernel)
UNSUPPORTED(cuLaunchKernel)
UNSUPPORTED(cuLinkAddData_v2)
UNSUPPORTED(cuLinkComplete)
UNSUPPORTED(cuLinkCreate_v2)
UNSUPPORTED(cuModuleGetFunction)
UNSUPPORTED(cuModuleLoad)
UNSUPPORTED(cuModuleLoadData)
UNSUPPORTED(cuModuleLoadDataEx)
UNSUPPORTED(cuModuleUnload)
UNSUPPORTED(cuOccupancyMaxActiveBlocksPerMultiprocessor)
UNSUPPORTED(cuTensorMapEncodeTiled)

UNSUPPORTED(cudaMemPoolSetAccess)
UNSUPPORTED(cudaImportExternalMemory)
UNSUPPORTED(cudaDestroyExternalMemory)
UNSUPPORTED(cudaExternalMemoryGetMappedBuffer)
UNSUPPORTED(cudaIpcCloseMemHandle)
UNSUPPORTED(cudaIpcGetEventHandle)
UNSUPPORTED(cudaIpcGetMemHandle)
UNSUPPORTED(cudaIpcOpenEventHandle)
UNSUPPORTED(cudaIpcOpenMemHandle)
UNSUPPORTED(cudaGetSymbolAddress)
UNSUPPORTED(cudaMemcpyToSymbol)
UNSUPPORTED(cudaLaunchCooperativeKernel)
UNSUPPORTED(cudaGraphDebugDotPrint)
