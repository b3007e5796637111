// Interposed: the byte of a file at position FLIP_AT is written with its lowest bit the other way.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/uio.h>
#include <unistd.h>

ssize_t pwritev(int descriptor, const struct iovec* parts, int count, off_t offset) {
  ssize_t (*real)(int, const struct iovec*, int, off_t) = dlsym(RTLD_NEXT, "pwritev");
  ssize_t written = real(descriptor, parts, count, offset);
  const char* chosen = getenv("FLIP_AT");
  if (!chosen || written <= 0) return written;
  off_t at = atoll(chosen) - offset;
  if (at < 0 || at >= written) return written;
  while (at >= (off_t)parts->iov_len) at -= (parts++)->iov_len;
  char flipped = ((const char*)parts->iov_base)[at] ^ 1;
  return pwrite(descriptor, &flipped, 1, atoll(chosen)) == 1 ? written : -1;
}
