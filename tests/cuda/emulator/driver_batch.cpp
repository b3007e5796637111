// The driver's API: batches of copies, in the form of CUDA 12.8 and in that of CUDA 13.
#include <stdint.h>

#include "emulator.h"

// The header gives the name to the form of CUDA 13.
#undef cuMemcpyBatchAsync

using namespace emulator;

namespace {

// The lists of a call, as the caller gives them.
struct Batch {
  const CUdeviceptr *to, *from;
  const size_t* lens;
  size_t count;
  const CUmemcpyAttributes* attributes;
  const size_t* firsts;  // the first copy of each set of attributes
  size_t sets;
};

bool are_valid(const CUmemcpyAttributes& attributes) {
  constexpr unsigned kFlags = CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE;
  if (attributes.flags & ~kFlags) return false;
  switch (attributes.srcAccessOrder) {
    case CU_MEMCPY_SRC_ACCESS_ORDER_STREAM:
    case CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL:
    case CU_MEMCPY_SRC_ACCESS_ORDER_ANY:
      return true;
    default:
      return false;
  }
}

// True if the lists are there and each copy has valid attributes.
bool is_valid(const Batch& batch) {
  if (batch.count == 0 || !batch.to || !batch.from || !batch.lens) return false;
  if (batch.sets == 0 || batch.sets > batch.count || !batch.attributes || !batch.firsts) {
    return false;
  }
  for (size_t set = 0; set < batch.sets; ++set) {
    const size_t first = batch.firsts[set];
    if (set == 0 ? first != 0 : first <= batch.firsts[set - 1]) return false;
    if (first >= batch.count || !are_valid(batch.attributes[set])) return false;
  }
  return true;
}

SourceOrder order_of(const CUmemcpyAttributes& attributes) {
  switch (attributes.srcAccessOrder) {
    case CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL:
      return SourceOrder::kDuringCall;
    case CU_MEMCPY_SRC_ACCESS_ORDER_ANY:
      return SourceOrder::kAny;
    default:
      return SourceOrder::kStream;
  }
}

CUresult copy_all(const Batch& batch, size_t* failed, CUstream stream) {
  return driver("cuMemcpyBatchAsync", [&](Lock& lock, int device) -> int {
    if (state().settings.no_batch) return CUDA_ERROR_NOT_SUPPORTED;
    u64 wrong = SIZE_MAX;  // unless the error is that of one copy
    if (failed) *failed = wrong;
    // A driver answers so on the legacy default stream; that of each thread is permitted.
    if (!stream || stream == CU_STREAM_LEGACY) return CUDA_ERROR_INVALID_VALUE;
    if (!is_valid(batch)) return CUDA_ERROR_INVALID_VALUE;
    std::vector<BatchCopy> copies;
    size_t set = 0;
    for (size_t at = 0; at < batch.count; ++at) {
      if (set + 1 < batch.sets && batch.firsts[set + 1] == at) ++set;
      const BatchCopy copy{batch.to[at], batch.from[at], batch.lens[at],
                           order_of(batch.attributes[set])};
      if (copy.to == 0 || copy.from == 0 || copy.len == 0) {
        if (failed) *failed = at;
        return CUDA_ERROR_INVALID_VALUE;
      }
      copies.push_back(copy);
    }
    const int code = copy_batch(lock, copies, stream, device, &wrong);
    if (failed) *failed = wrong;
    return code;
  });
}

}  // namespace

API CUresult CUDAAPI cuMemcpyBatchAsync(CUdeviceptr* to, CUdeviceptr* from, size_t* lens,
                                        size_t count, CUmemcpyAttributes* attributes,
                                        size_t* firsts, size_t sets, size_t* failed,
                                        CUstream stream) {
  return copy_all({to, from, lens, count, attributes, firsts, sets}, failed, stream);
}

API CUresult CUDAAPI cuMemcpyBatchAsync_v2(CUdeviceptr* to, CUdeviceptr* from, size_t* lens,
                                           size_t count, CUmemcpyAttributes* attributes,
                                           size_t* firsts, size_t sets, CUstream stream) {
  return copy_all({to, from, lens, count, attributes, firsts, sets}, nullptr, stream);
}
