// Output: notes, problems of the program under test, and a report at the end.
#include <execinfo.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "emulator.h"

namespace emulator {

namespace {

// Standard error as the process began with it: a test runner may capture or discard a later one.
int standard_error = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 100);

void say(const char* kind, const char* format, va_list args) {
  char text[900];
  vsnprintf(text, sizeof text, format, args);
  dprintf(standard_error, "FAKE_CUDA %s: %s\n", kind, text);
}

}  // namespace

void note(const char* format, ...) {
  if (!state().settings.log) return;
  va_list args;
  va_start(args, format);
  say("note", format, args);
  va_end(args);
}

void problem(const char* format, ...) {
  va_list args;
  va_start(args, format);
  say("PROBLEM", format, args);
  va_end(args);
  ++state().problems;
  if (state().settings.backtrace) {
    void* frames[40];
    backtrace_symbols_fd(frames, backtrace(frames, 40), standard_error);
  }
  if (state().settings.strict) abort();
}

void report_at_exit() {
  State& s = state();
  if (s.owner.load() != getpid() || !s.settings.report) return;
  std::lock_guard lock(s.lock);
  u64 streams = 0, events = 0;
  for (auto* stream : s.streams) streams += !static_cast<Stream*>(stream)->destroyed;
  for (auto* event : s.events) events += !static_cast<Event*>(event)->destroyed;
  dprintf(standard_error, "FAKE_CUDA report: problems %llu\n", s.problems);
  dprintf(standard_error, "  left: %zu pinned ranges (%llu bytes), %llu streams, %llu events\n",
          s.pinned.size(), s.pinned_bytes, streams, events);
  dprintf(standard_error, "  pinned: peak %llu bytes\n", s.pinned_peak);
  if (bus_is_simulated()) {
    dprintf(standard_error, "  bus: %llu bytes, busy for %.6f s\n", s.bus.bytes, s.bus.busy);
  }
  for (int id = 0; id < s.settings.devices; ++id) {
    const Device& device = s.devices[static_cast<size_t>(id)];
    dprintf(standard_error, "  device %d: %llu bytes allocated, peak %llu\n", id, device.used,
            device.peak);
  }
  const auto list = [](const char* what, const std::map<std::string, u64>& counts) {
    for (const auto& [name, count] : counts)
      dprintf(standard_error, "  %s%s: %llu\n", what, name.c_str(), count);
  };
  list("", s.statistics);
  list("call ", s.calls);
  list("kernel needed: ", s.unknown_kernels);
}

}  // namespace emulator

// A process that was forked has another standard error than its parent.
API void fake_cuda_report_here() {
  emulator::standard_error = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 100);
}
