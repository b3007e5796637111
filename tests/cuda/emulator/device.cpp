// Devices as programs see them: the current one, their attributes, the texts of errors.
#include "emulator.h"

namespace emulator {

// With `make_one`, as for the run time, the first device if there is no context.
Context* current_context(bool make_one) {
  auto& stack = contexts.stack;
  if (!stack.empty() && stack.back()) return stack.back();
  if (!make_one) return nullptr;
  Device& first = state().devices[0];
  first.active = true;
  if (stack.empty()) stack.push_back(nullptr);
  return stack.back() = &first.context;
}

// The run time's numbers of attributes are the driver's.
int attribute(int which) {
  switch (which) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      return 9;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      return 132;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
      return 32;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
      return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR:
      return 2048;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK:
      return 49152;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
      return 232448;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT:
      return 3;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
      return 1;
    default:
      return 0;
  }
}

namespace {

struct ErrorText {
  const char *name, *text;
};

ErrorText describe(int code) {
  switch (code) {
    case cudaSuccess:
      return {"cudaSuccess", "no error"};
    case cudaErrorInvalidValue:
      return {"cudaErrorInvalidValue", "invalid argument"};
    case cudaErrorMemoryAllocation:
      return {"cudaErrorMemoryAllocation", "out of memory"};
    case cudaErrorInitializationError:
      return {"cudaErrorInitializationError", "initialization error"};
    case cudaErrorNoDevice:
      return {"cudaErrorNoDevice", "no CUDA-capable device is detected"};
    case cudaErrorInvalidDevice:
      return {"cudaErrorInvalidDevice", "invalid device ordinal"};
    case cudaErrorDeviceUninitialized:
      return {"cudaErrorDeviceUninitialized", "invalid device context"};
    case cudaErrorECCUncorrectable:
      return {"cudaErrorECCUncorrectable", "uncorrectable ECC error encountered"};
    case cudaErrorInvalidResourceHandle:
      return {"cudaErrorInvalidResourceHandle", "invalid resource handle"};
    case cudaErrorNotReady:
      return {"cudaErrorNotReady", "device not ready"};
    case cudaErrorIllegalAddress:
      return {"cudaErrorIllegalAddress", "an illegal memory access was encountered"};
    case cudaErrorHostMemoryAlreadyRegistered:
      return {"cudaErrorHostMemoryAlreadyRegistered",
              "part or all of the requested memory range is already mapped"};
    case cudaErrorHostMemoryNotRegistered:
      return {"cudaErrorHostMemoryNotRegistered",
              "pointer does not correspond to a registered memory region"};
    case cudaErrorLaunchFailure:
      return {"cudaErrorLaunchFailure", "unspecified launch failure"};
    case cudaErrorNotSupported:
      return {"cudaErrorNotSupported", "operation not supported (not emulated)"};
    case cudaErrorStreamCaptureUnsupported:
      return {"cudaErrorStreamCaptureUnsupported",
              "operation not permitted when stream is capturing"};
    case cudaErrorStreamCaptureInvalidated:
      return {"cudaErrorStreamCaptureInvalidated",
              "operation failed due to a previous error during capture"};
    case cudaErrorStreamCaptureIsolation:
      return {"cudaErrorStreamCaptureIsolation",
              "dependency created on uncaptured work in another stream"};
    case cudaErrorCapturedEvent:
      return {"cudaErrorCapturedEvent",
              "operation not permitted on an event last recorded in a capturing stream"};
    default:
      return {"cudaErrorUnknown", "unknown error"};
  }
}

}  // namespace

const char* error_name(int code) { return describe(code).name; }

const char* error_text(int code) { return describe(code).text; }

}  // namespace emulator
