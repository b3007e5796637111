// Interposed: syncing a folder, or a file whose name ends as FAIL_SYNC_OF says, fails with the error
// FAIL_SYNC once FAIL_SYNC_AFTER such calls have gone through.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

int fsync(int descriptor) {
  static int (*real)(int);
  static long calls;
  if (!real) real = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
  const char* error = getenv("FAIL_SYNC");
  const char* after = getenv("FAIL_SYNC_AFTER");
  struct stat found;
  if (error && fstat(descriptor, &found) == 0 && S_ISDIR(found.st_mode) &&
      calls++ >= (after ? atol(after) : 0)) {
    errno = atoi(error);
    return -1;
  }
  return real(descriptor);
}
