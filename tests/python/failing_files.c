// Interposed: files without names, locks or links fail with the error that FAIL_TMPFILE, FAIL_FLOCK
// or FAIL_LINK says, and the process is killed before the call that KILL_BEFORE names, or after
// that of KILL_AFTER. FAIL_PROBE=0 spares a link that can only find out that a name is taken.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

static int fails(const char* variable) {
  const char* error = getenv(variable);
  if (error) errno = atoi(error);
  return error != NULL;
}

static void die(const char* variable, const char* call) {
  const char* chosen = getenv(variable);
  if (chosen && strcmp(chosen, call) == 0) kill(getpid(), SIGKILL);
}

#define REAL(name, ...) ((int (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name))

#define OPEN(name)                                                      \
  int name(const char* path, int flags, ...) {                          \
    va_list rest;                                                       \
    va_start(rest, flags);                                              \
    int mode = va_arg(rest, int);                                       \
    va_end(rest);                                                       \
    if ((flags & O_TMPFILE) == O_TMPFILE && fails("FAIL_TMPFILE")) return -1; \
    return REAL(#name, const char*, int, ...)(path, flags, mode);       \
  }
OPEN(open)
OPEN(open64)

int flock(int descriptor, int operation) {
  die("KILL_BEFORE", "flock");
  if (fails("FAIL_FLOCK")) return -1;
  return REAL("flock", int, int)(descriptor, operation);
}

int fsync(int descriptor) {
  die("KILL_BEFORE", "fsync");
  return REAL("fsync", int)(descriptor);
}

int rename(const char* from, const char* to) {
  die("KILL_BEFORE", "rename");
  return REAL("rename", const char*, const char*)(from, to);
}

int linkat(int folder, const char* from, int other, const char* to, int flags) {
  size_t length = strlen(to);
  int probe = length > 2 && strcmp(to + length - 2, "/.") == 0;
  if (!probe) die("KILL_BEFORE", "linkat");
  if (!(probe && getenv("FAIL_PROBE")) && fails("FAIL_LINK")) return -1;
  int result =
      REAL("linkat", int, const char*, int, const char*, int)(folder, from, other, to, flags);
  if (result == 0) die("KILL_AFTER", "linkat");
  return result;
}
