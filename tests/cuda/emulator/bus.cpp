// The simulated bus between the host and the devices: copies take time by their bytes.
//
// That time is computed on a timeline of its own, in seconds of CLOCK_MONOTONIC. An operation
// starts there when the one before it on its stream has ended, and not before it was begun by a
// call. The stream's thread then sleeps until the end of the operation. Nothing ends earlier than
// on the timeline, and a thread that wakes up late does not lower the rate of the copies behind it.
#include <algorithm>

#include "emulator.h"

namespace emulator {

namespace {

// Reserves one direction of the bus from a start on. Returns the time at which the bytes are over.
double transfer(double& free_at, double start, u64 bytes) {
  if (bytes == 0) return start;
  BusCounters& bus = state().bus;
  const double bandwidth = state().settings.bandwidth;
  const double seconds = bandwidth > 0 ? static_cast<double>(bytes) / bandwidth : 0;
  const double from = std::max(start, free_at);
  free_at = from + seconds;
  if (bus.bytes == 0) bus.first = from;
  bus.first = std::min(bus.first, from);
  bus.last = std::max(bus.last, free_at);
  bus.busy += seconds;
  bus.bytes += bytes;
  return free_at;
}

void sleep_until(double time) {
  const auto seconds = static_cast<time_t>(time);
  const double fraction = time - static_cast<double>(seconds);
  const timespec until{seconds, static_cast<long>(fraction * 1e9)};
  clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, nullptr);
}

}  // namespace

double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

bool bus_is_simulated() {
  const Settings& settings = state().settings;
  return settings.bandwidth > 0 || settings.copy_latency > 0;
}

// Advances the timeline of a stream to the end of the operation's copies, and sleeps until then.
// `paused`: the thread has just slept, which the timeline does not know yet.
void take_bus_time(Lock& lock, Stream& stream, const Operation& operation, bool paused) {
  stream.ready_at = std::max({stream.ready_at, operation.begun, paused ? now() : 0.0});
  if (operation.upload_bytes + operation.download_bytes == 0) return;
  const Settings& settings = state().settings;
  Device& device = state().devices[settings.shared_bus ? 0 : static_cast<size_t>(stream.device)];
  // The latency of a copy passes while other streams use the bus.
  const double start = stream.ready_at + settings.copy_latency;
  const double end = std::max(transfer(device.upload_free_at, start, operation.upload_bytes),
                              transfer(device.download_free_at, start, operation.download_bytes));
  stream.ready_at = end;
  lock.unlock();
  sleep_until(end);
  lock.lock();
}

}  // namespace emulator
