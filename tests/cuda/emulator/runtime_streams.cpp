// The run time's API: streams and events.
#include "emulator.h"

using namespace emulator;

API cudaError_t CUDARTAPI cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  return runtime("cudaStreamCreate", [&](Lock&, int device) {
    *stream = reinterpret_cast<cudaStream_t>(new_stream(device, false));
    return 0;
  });
}

API cudaError_t CUDARTAPI cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

API cudaError_t CUDARTAPI cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, 0, 0);
}

API cudaError_t CUDARTAPI cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}

API cudaError_t CUDARTAPI cudaStreamDestroy(cudaStream_t stream) {
  return runtime("cudaStreamDestroy",
                 [&](Lock&, int device) { return destroy_stream(stream, device); });
}

API cudaError_t CUDARTAPI cudaStreamSynchronize(cudaStream_t stream) {
  return runtime("cudaStreamSynchronize",
                 [&](Lock& lock, int device) { return synchronize_stream(lock, stream, device); });
}

API cudaError_t CUDARTAPI cudaStreamQuery(cudaStream_t stream) {
  return runtime("cudaStreamQuery",
                 [&](Lock&, int device) { return query_stream(stream, device); });
}

API cudaError_t CUDARTAPI cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  return runtime("cudaStreamWaitEvent",
                 [&](Lock&, int device) { return wait_for_event(stream, event, device); });
}

API cudaError_t CUDARTAPI cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call,
                                                void* data, unsigned) {
  return runtime("cudaStreamAddCallback", [&](Lock&, int device) {
    return launch_host_function(stream, device, [=] { call(stream, cudaSuccess, data); });
  });
}

API cudaError_t CUDARTAPI cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void* data) {
  return runtime("cudaLaunchHostFunc", [&](Lock&, int device) {
    return launch_host_function(stream, device, [=] { call(data); });
  });
}

API cudaError_t CUDARTAPI cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  return runtime("cudaEventCreate", [&](Lock&, int device) {
    return new_event(reinterpret_cast<void**>(event), device);
  });
}

API cudaError_t CUDARTAPI cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, 0);
}

API cudaError_t CUDARTAPI cudaEventDestroy(cudaEvent_t event) {
  return runtime("cudaEventDestroy", [&](Lock&, int) { return destroy_event(event); });
}

API cudaError_t CUDARTAPI cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return runtime("cudaEventRecord",
                 [&](Lock&, int device) { return record_event(event, stream, device); });
}

API cudaError_t CUDARTAPI cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream,
                                                   unsigned) {
  return cudaEventRecord(event, stream);
}

API cudaError_t CUDARTAPI cudaEventQuery(cudaEvent_t event) {
  return runtime("cudaEventQuery", [&](Lock&, int) { return query_event(event); });
}

API cudaError_t CUDARTAPI cudaEventSynchronize(cudaEvent_t event) {
  return runtime("cudaEventSynchronize",
                 [&](Lock& lock, int) { return synchronize_event(lock, event); });
}

API cudaError_t CUDARTAPI cudaEventElapsedTime(float* milliseconds, cudaEvent_t from_handle,
                                               cudaEvent_t to_handle) {
  return runtime("cudaEventElapsedTime", [&](Lock&, int) -> int {
    const Event *from = event_of(from_handle), *to = event_of(to_handle);
    if (!from || !to) return cudaErrorInvalidResourceHandle;
    if (!from->last || !to->last) return cudaErrorInvalidResourceHandle;
    if (is_pending(*from) || is_pending(*to)) return cudaErrorNotReady;
    const timespec begin = from->last->time, end = to->last->time;
    const auto seconds = static_cast<double>(end.tv_sec - begin.tv_sec);
    const auto nanoseconds = static_cast<double>(end.tv_nsec - begin.tv_nsec);
    *milliseconds = static_cast<float>(seconds * 1e3 + nanoseconds / 1e6);
    return 0;
  });
}
