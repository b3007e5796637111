// Copies and memsets.
#include <string.h>

#include <algorithm>
#include <memory>
#include <tuple>

#include "emulator.h"

namespace emulator {

namespace {

using Run = std::function<void()>;

struct Copy {
  u64 to, from, len;
};

// Passes bytes of the host through a small buffer, as a driver does with pageable memory while the
// device reads the buffer.
void bounce(Lock& lock, const char* from, u64 len) {
  static thread_local std::vector<char> buffer(4 << 20);
  lock.unlock();
  for (u64 at = 0; at < len; at += buffer.size()) {
    memcpy(buffer.data(), from + at, std::min<u64>(buffer.size(), len - at));
    asm volatile("" ::: "memory");  // otherwise the compiler may drop copies that are overwritten
  }
  lock.lock();
}

// `read_now`: the source can be used again as soon as the call returns. Otherwise it is read when
// the copy runs, and with `check` it must be then as it is now.
Run to_device(Lock& lock, const Copy& copy, bool read_now, bool check, const char* what) {
  const auto* host = reinterpret_cast<const char*>(copy.from);
  const u64 len = copy.len;
  if (state().settings.free_copies) {
    if (read_now) bounce(lock, host, len);
    return [] {};
  }
  char* destination = backing_of(copy.to);
  if (read_now) {
    const auto staged = std::make_shared<std::vector<char>>(host, host + len);
    return [=] { memcpy(destination, staged->data(), len); };
  }
  if (!check || !state().settings.check_source) {
    return [=] { memcpy(destination, host, len); };
  }
  return [=, before = checksum(host, len)] {
    if (checksum(host, len) != before) {
      problem("%s: %llu bytes of host memory at %p were changed between the call and the copy",
              what, len, static_cast<const void*>(host));
    }
    memcpy(destination, host, len);
  };
}

Run from_device(const Copy& copy, bool pinned) {
  const u64 len = copy.len;
  if (pinned && state().settings.free_copies) return [] {};
  const char* source = backing_of(copy.from);
  auto* host = reinterpret_cast<char*>(copy.to);
  // The bytes are not there before the copy has ended.
  if (pinned) memset(host, 0x5A, len);
  return [=] { memcpy(host, source, len); };
}

// Checks a copy and adds it to an operation, of which `run` then does this copy alone. `blocking`:
// the call waits for the operation; set here if the memory demands it. Returns an error or 0.
int prepare(Lock& lock, Stream& stream, Operation& operation, const Copy& copy, SourceOrder order,
            bool& blocking) {
  State& s = state();
  const auto [to, from, len] = copy;
  const bool upload = device_of(to), download = device_of(from);
  operation.copy = true;
  s.statistics["copies"]++;
  s.statistics["bytes copied"] += len;
  for (auto [there, address, write] : {std::tuple{upload, to, true}, {download, from, false}}) {
    if (!there) continue;
    if (!is_live(address, len)) {
      problem("%s of %llu bytes at device address %llx, which is not (all) in one allocation",
              operation.what, len, address);
      return CUDA_ERROR_INVALID_VALUE;
    }
    operation.accesses.push_back({address, address + len, write, false});
  }
  if (download && order == SourceOrder::kDuringCall) blocking = true;
  if (upload && download) {
    char *destination = backing_of(to), *source = backing_of(from);
    operation.run = [=, len = copy.len] { memmove(destination, source, len); };
  } else if (!upload && !download) {
    blocking = true;
    operation.run = [copy] {
      memcpy(reinterpret_cast<void*>(copy.to), reinterpret_cast<void*>(copy.from), copy.len);
    };
  } else {
    const u64 address = upload ? from : to;
    const HostMemory kind = host_memory(address, len);
    if (kind == HostMemory::kPartlyPinned) {
      problem("%s: host range %llx+%llu is only partly pinned", operation.what, address, len);
      return CUDA_ERROR_INVALID_VALUE;
    }
    const bool pinned = kind == HostMemory::kPinned;
    s.statistics[pinned ? "pinned copies" : "pageable copies"]++;
    const bool read_now = upload && (order == SourceOrder::kDuringCall ||
                                     (order == SourceOrder::kByMemory && !pinned));
    if (pinned && !read_now) operation.accesses.push_back({address, address + len, download, true});
    if (!pinned) blocking |= download || order == SourceOrder::kStream;
    if (blocking && stream.graph) return cudaErrorStreamCaptureUnsupported;
    operation.run = upload ? to_device(lock, copy, read_now, !blocking, operation.what)
                           : from_device(copy, pinned);
    (upload ? operation.upload_bytes : operation.download_bytes) += len;
    stream.last = upload ? "upload" : "download";
  }
  if (blocking && stream.graph) return cudaErrorStreamCaptureUnsupported;
  return 0;
}

// Copies of a batch may run in any order, so none of them may write to what another one uses.
void check_independence(const Operation& batch) {
  auto accesses = batch.accesses;
  std::ranges::sort(accesses, {}, &Access::begin);
  u64 used = 0, written = 0;  // ends of the ranges until here
  for (const auto& [begin, end, write, host] : accesses) {
    if (begin < written || (write && begin < used)) {
      problem("%s: %s memory at %llx is written by one copy and used by another one", batch.what,
              host ? "host" : "device", begin);
    }
    used = std::max(used, end);
    if (write) written = std::max(written, end);
  }
}

// Puts a copy on a stream, and waits for it if it is blocking.
int begin_copy(Lock& lock, Stream* stream, Operation operation, bool blocking) {
  const u64 number = submit(stream, std::move(operation));
  if (!blocking) return 0;
  wait_until_done(lock, stream, number);
  return state().devices[static_cast<size_t>(stream->device)].sticky_error;
}

}  // namespace

int copy(Lock& lock, u64 to, u64 from, u64 len, void* handle, int current, bool blocking,
         const char* what) {
  Stream* stream = stream_of(handle, current);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  if (int code = state().devices[static_cast<size_t>(stream->device)].sticky_error) return code;
  if (len == 0) return 0;
  Operation operation;
  operation.what = what;
  const Copy one{to, from, len};
  if (int code = prepare(lock, *stream, operation, one, SourceOrder::kByMemory, blocking)) {
    return code;
  }
  return begin_copy(lock, stream, std::move(operation), blocking);
}

// One operation, which runs the copies in a random order. `failed` gets the index of a copy with
// which something is wrong.
int copy_batch(Lock& lock, const std::vector<BatchCopy>& copies, void* handle, int current,
               u64* failed) {
  State& s = state();
  Stream* stream = stream_of(handle, current);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  if (int code = s.devices[static_cast<size_t>(stream->device)].sticky_error) return code;
  if (stream->graph) {
    stream->invalidated = true;
    return cudaErrorStreamCaptureUnsupported;
  }
  Operation batch;
  batch.what = "batch of copies";
  std::vector<Run> runs;
  bool blocking = false;
  for (size_t at = 0; at < copies.size(); ++at) {
    const auto [to, from, len, order] = copies[at];
    if (int code = prepare(lock, *stream, batch, {to, from, len}, order, blocking)) {
      *failed = at;
      return code;
    }
    runs.push_back(std::move(batch.run));
  }
  check_independence(batch);
  s.statistics["batches"]++;
  s.statistics["batched copies"] += copies.size();
  std::ranges::shuffle(runs, stream->random);
  batch.run = [runs = std::move(runs)] {
    for (const auto& run : runs) run();
  };
  return begin_copy(lock, stream, std::move(batch), blocking);
}

int set_memory(Lock& lock, u64 to, unsigned pattern, int width, u64 count, void* handle,
               int current, bool blocking) {
  Stream* stream = stream_of(handle, current);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  const int& sticky_error = state().devices[static_cast<size_t>(stream->device)].sticky_error;
  if (sticky_error) return sticky_error;
  const u64 len = count * static_cast<u64>(width);
  if (len == 0) return 0;
  if (!is_live(to, len)) {
    problem("memset of %llu bytes at %llx, which is not in one allocation", len, to);
    return CUDA_ERROR_INVALID_VALUE;
  }
  Operation operation;
  operation.what = "memset";
  operation.accesses.push_back({to, to + len, true, false});
  char* destination = backing_of(to);
  operation.run = [=] {
    if (width == 1) {
      memset(destination, static_cast<int>(pattern), len);
    } else {
      for (u64 at = 0; at < len; at += 4) memcpy(destination + at, &pattern, 4);
    }
  };
  const u64 number = submit(stream, std::move(operation));
  if (blocking) wait_until_done(lock, stream, number);
  return 0;
}

}  // namespace emulator
