// Functions that tests call, by ctypes, while a program runs.
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

// Sets the counters of calls, copies and the bus to zero, and peaks to what is used now.
API void fake_cuda_reset() {
  start();
  std::lock_guard lock(state().lock);
  State& s = state();
  s.calls.clear();
  s.statistics.clear();
  s.bus = {};
  s.pinned_peak = s.pinned_bytes;
  for (auto& device : s.devices) device.peak = device.used;
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

// The counts of calls. "copy" is none: it counts copies that have run, for FAKE_CUDA_FAIL.
static std::map<std::string, u64> counted_calls() {
  auto calls = state().calls;
  calls.erase("copy");
  return calls;
}

// Writes a line "name count" for each function that was called. Returns the bytes of all lines and
// the final zero; with less space the text is cut.
API u64 fake_cuda_calls_text(char* text, u64 space) {
  std::lock_guard lock(state().lock);
  std::string all;
  for (const auto& [call, count] : counted_calls()) {
    all += call + " " + std::to_string(count) + "\n";
  }
  if (space > 0) text[all.copy(text, space - 1)] = '\0';
  return all.size() + 1;
}

static u64 microseconds(double seconds) { return static_cast<u64>(seconds * 1e6 + 0.5); }

static u64 sum(const std::array<Device, kMaxDevices>& devices, u64 Device::* member) {
  u64 total = 0;
  for (const auto& device : devices) total += device.*member;
  return total;
}

API u64 fake_cuda_stat(const char* name) {
  std::lock_guard lock(state().lock);
  State& s = state();
  if (!strcmp(name, "pinned ranges")) return s.pinned.size();
  if (!strcmp(name, "pinned now")) return s.pinned_bytes;
  if (!strcmp(name, "pinned peak")) return s.pinned_peak;
  if (!strcmp(name, "device used")) return sum(s.devices, &Device::used);
  if (!strcmp(name, "device peak")) return sum(s.devices, &Device::peak);
  if (!strcmp(name, "bus bytes")) return s.bus.bytes;
  if (!strcmp(name, "bus busy us")) return microseconds(s.bus.busy);
  if (!strcmp(name, "bus span us")) return microseconds(s.bus.last - s.bus.first);
  if (!strcmp(name, "bus first us")) return microseconds(s.bus.first);
  if (!strcmp(name, "bus last us")) return microseconds(s.bus.last);
  if (!strcmp(name, "total calls")) {
    u64 total = 0;
    for (const auto& [call, count] : counted_calls()) total += count;
    return total;
  }
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

// Copies bytes of device memory to the host at once, without a stream. False if they are not in one
// allocation.
API bool fake_cuda_bytes(u64 address, u64 len, void* to) {
  std::lock_guard lock(state().lock);
  if (!is_live(address, len)) return false;
  memcpy(to, backing_of(address), len);
  return true;
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
