// Interposed: adds up how many bytes of files the calls were asked to write, to read back, to
// reserve and to bring to the disk; `total` says how many.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <sys/uio.h>

static atomic_long bytes;

long total(void) { return bytes; }

#define REAL(name, result, ...) ((result(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name))

#define VECTORED(name)                                                             \
  ssize_t name(int file, const struct iovec* vectors, int count, off_t offset) {   \
    for (int at = 0; at < count; ++at) bytes += (long)vectors[at].iov_len;         \
    return REAL(#name, ssize_t, int, const struct iovec*, int, off_t)(file, vectors, count, offset); \
  }
VECTORED(pwritev)
VECTORED(pwritev64)

#define READ(name)                                                           \
  ssize_t name(int file, void* buffer, size_t len, off_t offset) {           \
    bytes += (long)len;                                                      \
    return REAL(#name, ssize_t, int, void*, size_t, off_t)(file, buffer, len, offset); \
  }
READ(pread)
READ(pread64)

#define RESERVE(name)                                                  \
  int name(int file, int mode, off_t offset, off_t len) {              \
    bytes += len;                                                      \
    return REAL(#name, int, int, int, off_t, off_t)(file, mode, offset, len); \
  }
RESERVE(fallocate)
RESERVE(fallocate64)

int sync_file_range(int file, off64_t offset, off64_t len, unsigned flags) {
  bytes += len;
  return REAL("sync_file_range", int, int, off64_t, off64_t, unsigned)(file, offset, len, flags);
}
