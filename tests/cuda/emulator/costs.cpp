// Simulated costs of calls: the calling thread is busy for a time, as in a driver.
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "emulator.h"

namespace emulator {

namespace {

void keep_busy(double seconds) {
  const double end = now() + seconds;
  while (now() < end) {
  }
}

// True for calls that put nothing on a stream: queries, and those for the current context.
bool is_cheap(const char* call) {
  const auto parts = {"Query", "Ctx", "Capture", "GetDevice", "PointerGet"};
  return std::ranges::any_of(parts, [&](const char* part) { return strstr(call, part); });
}

}  // namespace

void spend(Lock& lock, double seconds) {
  if (seconds <= 0) return;
  lock.unlock();
  keep_busy(seconds);
  lock.lock();
}

void spend_call(const char* call) {
  const double cost = state().settings.call_cost;
  if (cost > 0) keep_busy(is_cheap(call) ? cost / 10 : cost);
}

// Pinning makes all pages present, and then costs the driver a time for each of them.
void spend_pin(Lock& lock, u64 address, u64 len) {
  const Settings& settings = state().settings;
  if (settings.populate_pinned) {
    const u64 begin = address & ~(static_cast<u64>(sysconf(_SC_PAGESIZE)) - 1);
    lock.unlock();
    // Without effect on kernels before 5.14.
    madvise(reinterpret_cast<void*>(begin), address + len - begin, MADV_POPULATE_WRITE);
    lock.lock();
  }
  spend(lock, settings.pin_cost_per_mib * static_cast<double>(len) / (1 << 20));
}

}  // namespace emulator
