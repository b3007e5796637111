// The state, and how it begins with the settings in the environment.
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>

#include "emulator.h"

namespace emulator {

thread_local Contexts contexts;
thread_local int last_error = 0;
thread_local int capture_mode = cudaStreamCaptureModeGlobal;

State& state() {
  // Never destroyed: streams run until the process ends.
  static State* the_state = new State;
  return *the_state;
}

Contexts::~Contexts() {
  if (pushed != 0) problem("a thread ended with %ld contexts pushed and not popped", pushed);
}

u64 number_of(const char* variable, u64 otherwise) {
  const char* text = getenv(variable);
  return text && *text ? strtoull(text, nullptr, 0) : otherwise;
}

static double seconds_of(const char* variable, double unit) {
  return static_cast<double>(number_of(variable, 0)) * unit;
}

bool start() {
  State& s = state();
  const pid_t owner = s.owner.load();
  if (owner != 0) return owner == getpid();
  std::lock_guard lock(s.lock);
  if (s.owner.load() != 0) return true;
  s.settings = {
      .devices = static_cast<int>(std::min<u64>(number_of("FAKE_CUDA_DEVICES", 2), kMaxDevices)),
      .memory = number_of("FAKE_CUDA_MEM_MB", 4096) << 20,
      .seed = number_of("FAKE_CUDA_SEED", 1),
      .delay = number_of("FAKE_CUDA_DELAY_US", 200),
      .log = number_of("FAKE_CUDA_LOG", 0) != 0,
      .strict = number_of("FAKE_CUDA_STRICT", 1) != 0,
      .poison = number_of("FAKE_CUDA_POISON", 1) != 0,
      .check_source = number_of("FAKE_CUDA_CHECK_SOURCE", 1) != 0,
      .free_copies = number_of("FAKE_CUDA_FREE_COPIES", 0) != 0,
      .report = number_of("FAKE_CUDA_REPORT", 0) != 0,
      .backtrace = number_of("FAKE_CUDA_BACKTRACE", 0) != 0,
      .bandwidth = static_cast<double>(number_of("FAKE_CUDA_BUS_MBPS", 0)) * 1e6,
      .copy_latency = seconds_of("FAKE_CUDA_COPY_LATENCY_NS", 1e-9),
      .call_cost = seconds_of("FAKE_CUDA_CALL_NS", 1e-9),
      .pin_cost_per_mib = seconds_of("FAKE_CUDA_PIN_US_PER_MB", 1e-6),
      .malloc_cost = seconds_of("FAKE_CUDA_MALLOC_US", 1e-6),
      .shared_bus = number_of("FAKE_CUDA_BUS_SHARED", 0) != 0,
      .populate_pinned = number_of("FAKE_CUDA_PIN_POPULATE", 0) != 0,
      .no_batch = number_of("FAKE_CUDA_NO_BATCH", 0) != 0,
  };
  const char* faults = getenv("FAKE_CUDA_FAIL");
  add_faults(faults ? faults : "");
  for (int id = 0; id < s.settings.devices; ++id) {
    map_device(s.devices[static_cast<size_t>(id)], id);
  }
  s.owner = getpid();
  atexit(report_at_exit);
  return true;
}

}  // namespace emulator
