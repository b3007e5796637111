// cuFile (GPUDirect Storage): reads that go straight into the memory of the emulated devices.
#include <cufile.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <set>

#define API extern "C" __attribute__((visibility("default")))

// Of the emulated driver.
extern "C" char* fake_cuda_direct(unsigned long long address, unsigned long long len);
extern "C" int fake_cuda_current_device();

namespace {

struct Handle {
  int descriptor;
};

std::mutex lock;
std::set<CUfileHandle_t> handles;
std::atomic<unsigned long long> reads{0};

unsigned long long number_of(const char* variable, unsigned long long otherwise) {
  const char* text = getenv(variable);
  return text && *text ? strtoull(text, nullptr, 0) : otherwise;
}

[[noreturn]] void problem(const char* what) {
  fprintf(stderr, "FAKE_CUDA PROBLEM: cuFile: %s\n", what);
  abort();
}

CUfileError_t outcome(CUfileOpError code) { return {code, CUDA_SUCCESS}; }

}  // namespace

API unsigned long long fake_cufile_reads() { return reads; }

API unsigned long long fake_cufile_handles() {
  std::lock_guard guard(lock);
  return handles.size();
}

API CUfileError_t cuFileDriverOpen() {
  const bool fails = number_of("FAKE_CUFILE_OPEN_FAILS", 0) != 0;
  return outcome(fails ? CU_FILE_DRIVER_NOT_INITIALIZED : CU_FILE_SUCCESS);
}

API CUfileError_t cuFileHandleRegister(CUfileHandle_t* handle, CUfileDescr_t* description) {
  if (description->type != CU_FILE_HANDLE_TYPE_OPAQUE_FD) return outcome(CU_FILE_INVALID_FILE_TYPE);
  std::lock_guard guard(lock);
  *handle = new Handle{description->handle.fd};
  handles.insert(*handle);
  return outcome(CU_FILE_SUCCESS);
}

API void cuFileHandleDeregister(CUfileHandle_t handle) {
  std::lock_guard guard(lock);
  if (!handles.erase(handle)) problem("a handle is deregistered twice");
  if (fcntl(static_cast<Handle*>(handle)->descriptor, F_GETFD) < 0) {
    problem("a descriptor was closed before its handle was deregistered");
  }
}

API ssize_t cuFileRead(CUfileHandle_t handle, void* base, size_t len, off_t position,
                       off_t offset) {
  {
    std::lock_guard guard(lock);
    if (!handles.count(handle)) problem("a read through a handle that is not registered");
  }
  const auto number = ++reads;
  if (number >= number_of("FAKE_CUFILE_FAIL_FROM", ~0ull)) return -CU_FILE_INTERNAL_ERROR;
  if (number >= number_of("FAKE_CUFILE_EIO_FROM", ~0ull)) {
    errno = EIO;
    return -1;
  }
  if (fake_cuda_current_device() < 0) return -CU_FILE_CUDA_DRIVER_ERROR;
  const auto address = reinterpret_cast<unsigned long long>(base);
  char* to = fake_cuda_direct(address + static_cast<unsigned long long>(offset), len);
  if (!to) return -CU_FILE_CUDA_POINTER_INVALID;
  // Opened once more, without O_DIRECT: cuFile itself reads what is not aligned through buffers.
  char path[64];
  snprintf(path, sizeof path, "/proc/self/fd/%d", static_cast<Handle*>(handle)->descriptor);
  const int plain = open(path, O_RDONLY | O_CLOEXEC);
  const size_t most = std::min<size_t>(len, number_of("FAKE_CUFILE_SHORT", 16 << 20));
  const ssize_t got = pread(plain, to, most, position);
  const int error = errno;
  close(plain);
  errno = error;
  if (number_of("FAKE_CUFILE_WRONG", 0) && got > 0) to[got / 2] ^= 1;
  return got;
}

// torch is linked to these too.

API CUfileError_t cuFileBufRegister(const void*, size_t, int) { return outcome(CU_FILE_SUCCESS); }

API CUfileError_t cuFileBufDeregister(const void*) { return outcome(CU_FILE_SUCCESS); }

API ssize_t cuFileWrite(CUfileHandle_t, const void*, size_t, off_t, off_t) {
  return -CU_FILE_PLATFORM_NOT_SUPPORTED;
}
