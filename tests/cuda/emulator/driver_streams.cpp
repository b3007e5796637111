// The driver's API: streams and events. The calls on which the order of streams depends can be
// dropped by where they are made, see FAKE_CUDA_MUTATE in README.md.
#include "emulator.h"

using namespace emulator;

namespace {

const char* owner_of(const Stream* stream) {
  return stream ? stream->own ? "own" : "torch" : "nothing";
}

}  // namespace

API CUresult CUDAAPI cuStreamCreateWithPriority(CUstream* stream, unsigned, int) {
  return driver("cuStreamCreate", [&](Lock&, int device) {
    *stream = reinterpret_cast<CUstream>(new_stream(device, true));
    return 0;
  });
}

API CUresult CUDAAPI cuStreamCreate(CUstream* stream, unsigned flags) {
  return cuStreamCreateWithPriority(stream, flags, 0);
}

API CUresult CUDAAPI cuStreamDestroy(CUstream stream) {
  return driver("cuStreamDestroy",
                [&](Lock&, int device) { return destroy_stream(stream, device); });
}

API CUresult CUDAAPI cuStreamSynchronize(CUstream handle) {
  return driver("cuStreamSynchronize", [&](Lock& lock, int device) {
    const Stream* stream = stream_of(handle, device);
    if (stream && dropped("cuStreamSynchronize", stream->last)) return 0;
    return synchronize_stream(lock, handle, device);
  });
}

API CUresult CUDAAPI cuStreamQuery(CUstream stream) {
  return driver("cuStreamQuery", [&](Lock&, int device) { return query_stream(stream, device); });
}

API CUresult CUDAAPI cuStreamWaitEvent(CUstream stream, CUevent event, unsigned) {
  return driver("cuStreamWaitEvent", [&](Lock&, int device) {
    if (dropped("cuStreamWaitEvent", owner_of(stream_of(stream, device)))) return 0;
    return wait_for_event(stream, event, device);
  });
}

API CUresult CUDAAPI cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus* status) {
  return driver("cuStreamIsCapturing", [&](Lock&, int device) -> int {
    const Stream* stream = stream_of(handle, device);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    const int sticky = state().devices[static_cast<size_t>(stream->device)].sticky_error;
    *status = static_cast<CUstreamCaptureStatus>(capture_status(*stream));
    return sticky;
  });
}

API CUresult CUDAAPI cuStreamGetCtx(CUstream handle, CUcontext* context) {
  return driver("cuStreamGetCtx", [&](Lock&, int device) -> int {
    const Stream* stream = stream_of(handle, device);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    Device& owner = state().devices[static_cast<size_t>(stream->device)];
    *context = reinterpret_cast<CUcontext>(&owner.context);
    return 0;
  });
}

API CUresult CUDAAPI cuLaunchHostFunc(CUstream stream, CUhostFn call, void* data) {
  return driver("cuLaunchHostFunc", [&](Lock&, int device) {
    return launch_host_function(stream, device, [=] { call(data); });
  });
}

API CUresult CUDAAPI cuEventCreate(CUevent* event, unsigned) {
  return driver("cuEventCreate", [&](Lock&, int device) {
    return new_event(reinterpret_cast<void**>(event), device);
  });
}

API CUresult CUDAAPI cuEventDestroy(CUevent event) {
  return driver("cuEventDestroy", [&](Lock&, int) { return destroy_event(event); });
}

API CUresult CUDAAPI cuEventRecord(CUevent event, CUstream stream) {
  return driver("cuEventRecord", [&](Lock&, int device) {
    if (dropped("cuEventRecord", owner_of(stream_of(stream, device)))) return 0;
    return record_event(event, stream, device);
  });
}

API CUresult CUDAAPI cuEventQuery(CUevent handle) {
  return driver("cuEventQuery", [&](Lock&, int) {
    const Event* event = event_of(handle);
    if (event && dropped("cuEventQuery", event->after)) return 0;
    return query_event(handle);
  });
}

API CUresult CUDAAPI cuEventSynchronize(CUevent handle) {
  return driver("cuEventSynchronize", [&](Lock& lock, int) {
    const Event* event = event_of(handle);
    if (event && dropped("cuEventSynchronize", event->after)) return 0;
    return synchronize_event(lock, handle);
  });
}
