// Events.
#include "emulator.h"

namespace emulator {

namespace {

int sticky_error(int device) { return state().devices[static_cast<size_t>(device)].sticky_error; }

}  // namespace

Event* event_of(void* handle) {
  if (!state().events.count(handle)) {
    problem("%p is no event", handle);
    return nullptr;
  }
  auto* event = static_cast<Event*>(handle);
  if (event->destroyed) {
    problem("use of an event after it was destroyed");
    return nullptr;
  }
  return event;
}

int new_event(void** handle, int device) {
  auto* event = new Event;
  event->device = device;
  state().events.insert(event);
  *handle = event;
  return 0;
}

int destroy_event(void* handle) {
  Event* event = event_of(handle);
  if (!event) return CUDA_ERROR_INVALID_HANDLE;
  event->destroyed = true;
  return 0;
}

int record_event(void* handle, void* stream_handle, int current) {
  Event* event = event_of(handle);
  Stream* stream = stream_of(stream_handle, current);
  if (!event || !stream) return CUDA_ERROR_INVALID_HANDLE;
  if (int code = sticky_error(stream->device)) return code;
  if (event->device != stream->device) {
    problem("an event of device %d is recorded on a stream of device %d", event->device,
            stream->device);
    return CUDA_ERROR_INVALID_HANDLE;
  }
  event->captured_by = stream->graph ? stream->graph->number : 0;
  if (stream->graph) return 0;
  event->after = stream->last;
  event->before = stream->before;
  Operation operation;
  operation.what = "record";
  operation.record = event->last = std::make_shared<Record>();
  submit(stream, std::move(operation));
  return 0;
}

int wait_for_event(void* stream_handle, void* handle, int current) {
  Event* event = event_of(handle);
  Stream* stream = stream_of(stream_handle, current);
  if (!event || !stream) return CUDA_ERROR_INVALID_HANDLE;
  if (int code = sticky_error(stream->device)) return code;
  if (event->captured_by || stream->graph) {
    if (stream->graph && event->captured_by == stream->graph->number) return 0;
    if (stream->graph && !event->captured_by) {
      stream->invalidated = true;
      return cudaErrorStreamCaptureIsolation;
    }
    problem("waiting across a capture is not emulated");
    return cudaErrorNotSupported;
  }
  stream->last = "wait";
  merge(stream->before, event->before);
  if (!is_pending(*event)) return 0;
  Operation operation;
  operation.what = "wait";
  operation.wait_for = event->last;
  submit(stream, std::move(operation));
  return 0;
}

bool is_pending(const Event& event) { return event.last && !event.last->completed; }

int query_event(void* handle) {
  const Event* event = event_of(handle);
  if (!event) return CUDA_ERROR_INVALID_HANDLE;
  if (int code = forbidden_by_capture()) return code;
  if (event->captured_by) return cudaErrorCapturedEvent;
  if (int code = sticky_error(event->device)) return code;
  if (is_pending(*event)) return CUDA_ERROR_NOT_READY;
  host_knows(event->before);
  return 0;
}

int synchronize_event(Lock& lock, void* handle) {
  const Event* event = event_of(handle);
  if (!event) return CUDA_ERROR_INVALID_HANDLE;
  if (int code = forbidden_by_capture()) return code;
  if (event->captured_by) return cudaErrorCapturedEvent;
  const Clock before = event->before;
  if (const std::shared_ptr<Record> last = event->last) {
    state().progress.wait(lock, [&] { return last->completed || sticky_error(event->device); });
  }
  host_knows(before);
  return sticky_error(event->device);
}

}  // namespace emulator
