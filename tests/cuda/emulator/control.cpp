// What tests call, by ctypes, while a program runs.
#include <string.h>

#include <algorithm>

#include "emulator.h"

using namespace emulator;

// Replaces FAKE_CUDA_FAIL, and counts calls from here.
API void fake_cuda_fail(const char* rules) {
  start();
  std::lock_guard lock(state().lock);
  clear_faults();
  state().calls.clear();
  add_faults(rules);
}

// Has nothing fail, and devices work again.
API void fake_cuda_heal() {
  std::lock_guard lock(state().lock);
  clear_faults();
  for (auto& device : state().devices) device.sticky_error = 0;
}

// Replaces FAKE_CUDA_DELAY_US.
API void fake_cuda_delay(u64 microseconds) {
  start();
  std::lock_guard lock(state().lock);
  state().settings.delay = microseconds;
}

// Puts a pause on a stream.
API void fake_cuda_pause(void* handle, int device, u64 microseconds) {
  std::lock_guard lock(state().lock);
  Stream* stream = stream_of(handle, device);
  if (!stream) return;
  Operation operation;
  operation.what = "pause";
  operation.pause = static_cast<double>(microseconds) / 1e6;
  submit(stream, std::move(operation));
}

API u64 fake_cuda_calls(const char* name) {
  std::lock_guard lock(state().lock);
  return state().calls[name];
}

API u64 fake_cuda_stat(const char* name) {
  std::lock_guard lock(state().lock);
  State& s = state();
  if (!strcmp(name, "pinned ranges")) return s.pinned.size();
  if (!strcmp(name, "problems")) return s.problems;
  if (!strcmp(name, "pending")) return s.pending.size();
  if (!strcmp(name, "events")) {
    return static_cast<u64>(std::ranges::count_if(
        s.events, [](void* event) { return !static_cast<Event*>(event)->destroyed; }));
  }
  if (!strcmp(name, "streams")) {
    return static_cast<u64>(std::ranges::count_if(
        s.streams, [](void* stream) { return !static_cast<Stream*>(stream)->destroyed; }));
  }
  return s.statistics[name];
}

// The bytes of device memory that cuFile writes to, without a stream.
API char* fake_cuda_direct(u64 address, u64 len) {
  std::lock_guard lock(state().lock);
  if (!is_live(address, len)) {
    problem("direct access to device memory %llx+%llu, which is not in one allocation", address,
            len);
    return nullptr;
  }
  if (const Pending* operation = unknown_on(address, address + len, false)) {
    problem("direct access to device memory %llx+%llu before the end of a %s on stream %d is known",
            address, len, operation->what, operation->stream->number);
  }
  return backing_of(address);
}

API int fake_cuda_current_device() {
  const Context* context = current_context(false);
  return context ? context->device : -1;
}
