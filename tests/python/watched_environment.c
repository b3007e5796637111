// Takes the place of getenv(3): notes each look into the environment that is made without the GIL,
// and so may meet somebody who changes os.environ.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void note(const char *name) {
  static int (*check)(void), (*initialized)(void);
  if (!check) check = (int (*)(void))dlsym(RTLD_DEFAULT, "PyGILState_Check");
  if (!initialized) initialized = (int (*)(void))dlsym(RTLD_DEFAULT, "Py_IsInitialized");
  if (!check || !initialized || !initialized() || check()) return;
  char **environment = __environ;
  for (; environment && *environment; ++environment) {
    if (strncmp(*environment, "NOTED=", 6) != 0) continue;
    const int file = open(*environment + 6, O_WRONLY | O_APPEND | O_CREAT, 0600);
    if (file >= 0) {
      (void)!write(file, name, strlen(name));
      (void)!write(file, "\n", 1);
      close(file);
    }
  }
}

char *getenv(const char *name) {
  static char *(*next)(const char *);
  if (!next) next = (char *(*)(const char *))dlsym(RTLD_NEXT, "getenv");
  note(name);
  return next(name);
}

char *secure_getenv(const char *name) { return getenv(name); }
