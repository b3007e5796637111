// Copies and memsets.
#include <string.h>

#include <memory>
#include <tuple>

#include "emulator.h"

namespace emulator {

namespace {

using Run = std::function<void()>;

// Pinned memory is read when the copy runs. Other memory is read at once, so that it can be used
// again as soon as the call returns.
Run to_device(u64 to, u64 from, u64 len, bool pinned, bool blocking, const char* what) {
  if (pinned && state().settings.free_copies) return [] {};
  char* destination = backing_of(to);
  const auto* host = reinterpret_cast<const char*>(from);
  if (!pinned) {
    const auto staged = std::make_shared<std::vector<char>>(host, host + len);
    return [=] { memcpy(destination, staged->data(), len); };
  }
  if (blocking || !state().settings.check_source) {
    return [=] { memcpy(destination, host, len); };
  }
  return [=, before = checksum(host, len)] {
    if (checksum(host, len) != before) {
      problem("%s: %llu bytes of pinned memory at %p were changed between the call and the copy",
              what, len, static_cast<const void*>(host));
    }
    memcpy(destination, host, len);
  };
}

Run from_device(u64 to, u64 from, u64 len, bool pinned) {
  if (pinned && state().settings.free_copies) return [] {};
  const char* source = backing_of(from);
  auto* host = reinterpret_cast<char*>(to);
  // Nobody may look at it before the copy has ended.
  if (pinned) memset(host, 0x5A, len);
  return [=] { memcpy(host, source, len); };
}

}  // namespace

int copy(Lock& lock, u64 to, u64 from, u64 len, void* handle, int current, bool blocking,
         const char* what) {
  State& s = state();
  Stream* stream = stream_of(handle, current);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  const int& sticky_error = s.devices[static_cast<size_t>(stream->device)].sticky_error;
  if (sticky_error) return sticky_error;
  if (len == 0) return 0;
  const bool upload = device_of(to), download = device_of(from);
  Operation operation;
  operation.what = what;
  operation.copy = true;
  s.statistics["copies"]++;
  s.statistics["bytes copied"] += len;
  for (auto [there, address, write] : {std::tuple{upload, to, true}, {download, from, false}}) {
    if (!there) continue;
    if (!is_live(address, len)) {
      problem("%s of %llu bytes at device address %llx, which is not (all) in one allocation", what,
              len, address);
      return CUDA_ERROR_INVALID_VALUE;
    }
    operation.accesses.push_back({address, address + len, write, false});
  }
  if (upload && download) {
    char *destination = backing_of(to), *source = backing_of(from);
    operation.run = [=] { memmove(destination, source, len); };
  } else if (!upload && !download) {
    blocking = true;
    operation.run = [=] {
      memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), len);
    };
  } else {
    const u64 address = upload ? from : to;
    const HostMemory kind = host_memory(address, len);
    if (kind == HostMemory::kPartlyPinned) {
      problem("%s: host range %llx+%llu is only partly pinned", what, address, len);
      return CUDA_ERROR_INVALID_VALUE;
    }
    const bool pinned = kind == HostMemory::kPinned;
    s.statistics[pinned ? "pinned copies" : "pageable copies"]++;
    if (pinned) operation.accesses.push_back({address, address + len, download, true});
    blocking |= download && !pinned;
    if (blocking && stream->graph) return cudaErrorStreamCaptureUnsupported;
    operation.run = upload ? to_device(to, from, len, pinned, blocking, what)
                           : from_device(to, from, len, pinned);
    stream->last = upload ? "upload" : "download";
  }
  if (blocking && stream->graph) return cudaErrorStreamCaptureUnsupported;
  const u64 number = submit(stream, std::move(operation));
  if (!blocking) return 0;
  wait_until_done(lock, stream, number);
  return sticky_error;
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
