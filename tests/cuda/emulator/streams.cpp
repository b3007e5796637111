// Streams: each is a thread that runs its operations in order, late, with random pauses.
#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <thread>

#include "emulator.h"

namespace emulator {

namespace {

// Microseconds: none in half of the cases, else up to the delay, and now and then five times that.
u64 random_pause(Stream& stream) {
  const u64 delay = state().settings.delay;
  if (delay == 0) return 0;
  const u64 random = stream.random(), dice = random % 20;
  return (dice >= 10 ? (random >> 8) % delay : 0) + (dice == 19 ? 4 * delay : 0);
}

void complete(Record* record, double time) {
  record->completed = true;
  record->completed_at = time;
  clock_gettime(CLOCK_MONOTONIC, &record->time);
}

void carry_out(Lock& lock, Stream& stream, const Operation& operation) {
  Device& device = state().devices[static_cast<size_t>(stream.device)];
  const u64 pause = operation.record ? 0 : random_pause(stream);
  lock.unlock();
  if (operation.pause > 0) usleep(static_cast<useconds_t>(operation.pause * 1e6));
  if (pause > 0) usleep(static_cast<useconds_t>(pause));
  lock.lock();
  if (bus_is_simulated()) take_bus_time(lock, stream, operation, operation.pause > 0 || pause > 0);
  check_lifetimes(operation);
  if (operation.copy && !device.sticky_error) {
    device.sticky_error = fault("copy");
    if (device.sticky_error) note("a copy fails with %d", device.sticky_error);
  }
  if (operation.run && !device.sticky_error) {
    lock.unlock();
    operation.run();
    lock.lock();
    const bool timed = operation.upload_bytes + operation.download_bytes > 0;
    if (bus_is_simulated() && !timed) stream.ready_at = now();
  }
  if (operation.record) complete(operation.record.get(), stream.ready_at);
}

void work(Stream* stream) {
  State& s = state();
  pthread_setname_np(pthread_self(), "emulated stream");
  // The kernel may else wake the thread 50 microseconds after the end of a copy.
  if (bus_is_simulated()) prctl(PR_SET_TIMERSLACK, 1000);
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  Lock lock(s.lock);
  const int& sticky_error = s.devices[static_cast<size_t>(stream->device)].sticky_error;
  while (true) {
    stream->todo.wait(lock, [&] { return !stream->queue.empty() || stream->destroyed; });
    if (stream->queue.empty()) return;
    const Operation& operation = stream->queue.front();
    const u64 number = operation.number;
    if (const Record* record = operation.wait_for.get()) {
      s.progress.wait(lock, [&] { return record->completed || sticky_error; });
      stream->ready_at = std::max({stream->ready_at, operation.begun, record->completed_at});
    } else {
      carry_out(lock, *stream, operation);
    }
    s.pending.erase(number);
    stream->queue.pop_front();
    s.progress.notify_all();
  }
}

}  // namespace

Stream* new_stream(int device, bool own) {
  State& s = state();
  auto* stream = new Stream;
  stream->device = device;
  stream->own = own;
  stream->number = static_cast<int>(s.streams.size());
  stream->random.seed(s.settings.seed * 1000003 + s.streams.size());
  s.streams.insert(stream);
  s.devices[static_cast<size_t>(device)].streams.push_back(stream);
  std::thread(work, stream).detach();
  return stream;
}

Stream* null_stream(int id) {
  Device& device = state().devices[static_cast<size_t>(id)];
  if (!device.null_stream) device.null_stream = new_stream(id, false);
  return device.null_stream;
}

Stream* stream_of(void* handle, int device) {
  // The names of the null stream: 0, cudaStreamLegacy, cudaStreamPerThread.
  if (as_address(handle) <= 2) return null_stream(device);
  if (!state().streams.count(handle)) {
    problem("%p is no stream", handle);
    return nullptr;
  }
  auto* stream = static_cast<Stream*>(handle);
  if (stream->destroyed) {
    problem("use of stream %d after it was destroyed", stream->number);
    return nullptr;
  }
  return stream;
}

int destroy_stream(void* handle, int device) {
  Stream* stream = stream_of(handle, device);
  if (!stream || stream != handle) return CUDA_ERROR_INVALID_HANDLE;
  stream->destroyed = true;
  stream->todo.notify_one();
  return 0;
}

// True if an operation at the head of a stream is done at once, on the caller's thread: to wake the
// stream's thread would cost host time. Only where copies cost nothing.
static bool ends_at_once(const Operation& operation) {
  if (!state().settings.free_copies) return false;
  if (bus_is_simulated() && operation.upload_bytes + operation.download_bytes > 0) return false;
  if (operation.wait_for) return operation.wait_for->completed;
  if (operation.record) {
    complete(operation.record.get(), operation.begun);
    state().progress.notify_all();
    return true;
  }
  return operation.copy;
}

// Begins an operation, or adds it to the graph that is being captured. Gives its number.
u64 submit(Stream* stream, Operation operation) {
  State& s = state();
  if (stream->graph) {
    stream->graph->operations.push_back(std::move(operation));
    return 0;
  }
  const u64 number = operation.number = ++s.operations;
  operation.begun = bus_is_simulated() ? now() : 0;
  order(stream, operation);
  if (stream->queue.empty() && ends_at_once(operation)) return number;
  if (!operation.accesses.empty()) {
    s.pending.emplace(number, Pending{number, stream, operation.what, operation.accesses, {}});
  }
  stream->queue.push_back(std::move(operation));
  stream->todo.notify_one();
  return number;
}

void wait_until_done(Lock& lock, Stream* stream, u64 number) {
  const Clock before = stream->before;
  state().progress.wait(
      lock, [&] { return stream->queue.empty() || stream->queue.front().number > number; });
  host_knows(before);
}

void drain_device(Lock& lock, int device) {
  const u64 last = state().operations;
  const auto streams = state().devices[static_cast<size_t>(device)].streams;
  for (Stream* stream : streams) wait_until_done(lock, stream, last);
}

int synchronize_stream(Lock& lock, void* handle, int device) {
  Stream* stream = stream_of(handle, device);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  if (int code = forbidden_by_capture()) return code;
  if (stream->graph) return cudaErrorStreamCaptureUnsupported;
  wait_until_done(lock, stream, state().operations);
  return state().devices[static_cast<size_t>(stream->device)].sticky_error;
}

int query_stream(void* handle, int device) {
  Stream* stream = stream_of(handle, device);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  if (int code = forbidden_by_capture()) return code;
  const int sticky = state().devices[static_cast<size_t>(stream->device)].sticky_error;
  if (sticky) return sticky;
  if (!stream->queue.empty()) return CUDA_ERROR_NOT_READY;
  host_knows(stream->before);
  return 0;
}

int launch_host_function(void* handle, int device, std::function<void()> call) {
  Stream* stream = stream_of(handle, device);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  Operation operation;
  operation.what = "host function";
  operation.run = [call = std::move(call), before = stream->before] {
    {
      Lock lock(state().lock);
      host_knows(before);
    }
    call();
  };
  submit(stream, std::move(operation));
  return 0;
}

}  // namespace emulator
