// A folder in place of /sys, where programs look for the NUMA nodes of devices.
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>

#include "emulator.h"

// Replaces the C library's function.
API int open64(const char* path, int flags, ...) {
  using Open = int (*)(const char*, int, ...);
  static const auto next = reinterpret_cast<Open>(dlsym(RTLD_NEXT, "open64"));
  va_list rest;
  va_start(rest, flags);
  const mode_t mode = va_arg(rest, mode_t);  // any number if no file can be created
  va_end(rest);
  const char* folder = getenv("FAKE_CUDA_SYS");
  const std::string wanted = path;
  if (!folder || !wanted.starts_with("/sys/")) return next(path, flags, mode);
  return next((folder + wanted.substr(4)).c_str(), flags, mode);
}
