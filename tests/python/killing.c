// Interposed: the process is killed in place of the KILL_AT-th call, from 0 on, that syncs, links,
// renames or removes a file. With NO_LINKS there are no links.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

static void step(void) {
  static long calls;
  const char* at = getenv("KILL_AT");
  if (at && calls++ == atol(at)) kill(getpid(), SIGKILL);
}

static int refused(void) {
  if (!getenv("NO_LINKS")) return 0;
  errno = EPERM;
  return 1;
}

#define REAL(name, ...)                                          \
  static int (*real)(__VA_ARGS__);                               \
  if (!real) real = (int (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

int fsync(int descriptor) {
  REAL("fsync", int);
  step();
  return real(descriptor);
}

int link(const char* from, const char* to) {
  REAL("link", const char*, const char*);
  step();
  return refused() ? -1 : real(from, to);
}

int linkat(int a, const char* from, int b, const char* to, int flags) {
  REAL("linkat", int, const char*, int, const char*, int);
  step();
  return refused() ? -1 : real(a, from, b, to, flags);
}

int rename(const char* from, const char* to) {
  REAL("rename", const char*, const char*);
  step();
  return real(from, to);
}

int renameat(int a, const char* from, int b, const char* to) {
  REAL("renameat", int, const char*, int, const char*);
  step();
  return real(a, from, b, to);
}

int unlink(const char* path) {
  REAL("unlink", const char*);
  step();
  return real(path);
}

int unlinkat(int folder, const char* path, int flags) {
  REAL("unlinkat", int, const char*, int);
  step();
  return real(folder, path, flags);
}
