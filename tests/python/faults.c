// Interposed in interpreters that tests fork: system calls fail, kill the process, write something
// else or are counted, as variables of the environment say. They are read by `read_faults` alone,
// which also begins counting anew; without them every call is that of the system.
//
//   FAULT_KILL_BEFORE    kills the process in place of this call: flock, fsync, rename or linkat
//   FAULT_KILL_AFTER     kills it after a linkat that has worked, if it says "linkat"
//   FAULT_KILL_AT        kills it in place of the call of this number, from 0 on, that syncs, links,
//                        renames or removes a file
//   FAULT_TMPFILE        the error number of opening a file without a name
//   FAULT_FLOCK          the error number of flock
//   FAULT_CHMOD          the error number of fchmod and fchown
//   FAULT_LINK           the error number of link and linkat
//   FAULT_SPARES_PROBES  excepts links that can only find out that a name is taken
//   FAULT_SYNC           the error number of syncing a folder
//   FAULT_SYNC_AFTER     so many folders are synced before that
//   FAULT_FLIP_AT        the byte of a file at this position is written with its lowest bit flipped
//   FAULT_CONNECT        the error number of connecting to a server
//   FAULT_FUSE           every file is said to be on a FUSE file system
//   FAULT_SLOW_NAMES     the resolution of names never ends
//   FAULT_NOTES          a file that gets the name of each variable that is looked up without the
//                        GIL, while another thread may be changing os.environ
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <unistd.h>

#define TEXT 4096

static char kill_before[TEXT], kill_after[TEXT], notes[TEXT];
static long kill_at = -1, flip_at = -1, sync_after;
static int tmpfile_error, flock_error, chmod_error, link_error, sync_error, spares_probes, slow_names;
static int connect_error, fuse;
static atomic_long steps, synced_folders, bytes, connects;

// The call of the system, looked up once.
#define REAL(name, result, ...)                      \
  static result (*real)(__VA_ARGS__);                \
  if (!real) real = (result (*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

static char *system_getenv(const char *name) {
  REAL(getenv, char *, const char *);
  return real(name);
}

static void read_text(const char *name, char *into) {
  const char *found = system_getenv(name);
  strncpy(into, found ? found : "", TEXT - 1);
}

static long read_number(const char *name, long otherwise) {
  const char *found = system_getenv(name);
  return found ? atol(found) : otherwise;
}

void read_faults(void) {
  read_text("FAULT_KILL_BEFORE", kill_before);
  read_text("FAULT_KILL_AFTER", kill_after);
  read_text("FAULT_NOTES", notes);
  kill_at = read_number("FAULT_KILL_AT", -1);
  flip_at = read_number("FAULT_FLIP_AT", -1);
  sync_after = read_number("FAULT_SYNC_AFTER", 0);
  tmpfile_error = (int)read_number("FAULT_TMPFILE", 0);
  flock_error = (int)read_number("FAULT_FLOCK", 0);
  chmod_error = (int)read_number("FAULT_CHMOD", 0);
  link_error = (int)read_number("FAULT_LINK", 0);
  sync_error = (int)read_number("FAULT_SYNC", 0);
  spares_probes = (int)read_number("FAULT_SPARES_PROBES", 0);
  slow_names = (int)read_number("FAULT_SLOW_NAMES", 0);
  fuse = (int)read_number("FAULT_FUSE", 0);
  connect_error = (int)read_number("FAULT_CONNECT", 0);
  steps = synced_folders = bytes = 0;
}

// Bytes of files that calls were asked to write, to read back, to reserve and to bring to the disk.
long bytes_asked_for(void) { return bytes; }

// Connections to servers that failed.
long refused_connects(void) { return connects; }

static void step(void) {
  if (kill_at >= 0 && steps++ == kill_at) kill(getpid(), SIGKILL);
}

static void die(const char *chosen, const char *call) {
  if (strcmp(chosen, call) == 0) kill(getpid(), SIGKILL);
}

static int fails(int error) {
  if (error) errno = error;
  return error != 0;
}

// Files without names, locks

#define OPEN(name)                                                                       \
  int name(const char *path, int flags, ...) {                                           \
    REAL(name, int, const char *, int, ...);                                             \
    va_list rest;                                                                        \
    va_start(rest, flags);                                                               \
    const int mode = va_arg(rest, int);                                                  \
    va_end(rest);                                                                        \
    if ((flags & O_TMPFILE) == O_TMPFILE && fails(tmpfile_error)) return -1;             \
    return real(path, flags, mode);                                                      \
  }
OPEN(open)
OPEN(open64)

int fstatfs(int descriptor, struct statfs* found) {
  REAL(fstatfs, int, int, struct statfs*);
  int result = real(descriptor, found);
  if (fuse) found->f_type = 0x65735546;
  return result;
}

int fchmod(int descriptor, mode_t mode) {
  REAL(fchmod, int, int, mode_t);
  return fails(chmod_error) ? -1 : real(descriptor, mode);
}

int fchown(int descriptor, uid_t owner, gid_t group) {
  REAL(fchown, int, int, uid_t, gid_t);
  return fails(chmod_error) ? -1 : real(descriptor, owner, group);
}

int flock(int descriptor, int operation) {
  REAL(flock, int, int, int);
  die(kill_before, "flock");
  return fails(flock_error) ? -1 : real(descriptor, operation);
}

// Names of files

int fsync(int descriptor) {
  REAL(fsync, int, int);
  die(kill_before, "fsync");
  step();
  struct stat found;
  if (sync_error && fstat(descriptor, &found) == 0 && S_ISDIR(found.st_mode) &&
      synced_folders++ >= sync_after) {
    errno = sync_error;
    return -1;
  }
  return real(descriptor);
}

int link(const char *from, const char *to) {
  REAL(link, int, const char *, const char *);
  step();
  return fails(link_error) ? -1 : real(from, to);
}

int linkat(int folder, const char *from, int other, const char *to, int flags) {
  REAL(linkat, int, int, const char *, int, const char *, int);
  const size_t length = strlen(to);
  const int probe = length > 2 && strcmp(to + length - 2, "/.") == 0;
  if (!probe) die(kill_before, "linkat");
  step();
  if (!(probe && spares_probes) && fails(link_error)) return -1;
  const int result = real(folder, from, other, to, flags);
  if (result == 0) die(kill_after, "linkat");
  return result;
}

int rename(const char *from, const char *to) {
  REAL(rename, int, const char *, const char *);
  die(kill_before, "rename");
  step();
  return real(from, to);
}

int renameat(int folder, const char *from, int other, const char *to) {
  REAL(renameat, int, int, const char *, int, const char *);
  step();
  return real(folder, from, other, to);
}

int unlink(const char *path) {
  REAL(unlink, int, const char *);
  step();
  return real(path);
}

int unlinkat(int folder, const char *path, int flags) {
  REAL(unlinkat, int, int, const char *, int);
  step();
  return real(folder, path, flags);
}

// Bytes of files

static ssize_t flipped(int descriptor, const struct iovec *parts, off_t offset, ssize_t written) {
  off_t at = flip_at - offset;
  if (flip_at < 0 || at < 0 || at >= written) return written;
  while (at >= (off_t)parts->iov_len) at -= (off_t)(parts++)->iov_len;
  const char other = ((const char *)parts->iov_base)[at] ^ 1;
  return pwrite(descriptor, &other, 1, flip_at) == 1 ? written : -1;
}

#define PWRITEV(name)                                                                    \
  ssize_t name(int descriptor, const struct iovec *parts, int count, off_t offset) {     \
    REAL(name, ssize_t, int, const struct iovec *, int, off_t);                          \
    for (int at = 0; at < count; ++at) bytes += (long)parts[at].iov_len;                 \
    return flipped(descriptor, parts, offset, real(descriptor, parts, count, offset));   \
  }
PWRITEV(pwritev)
PWRITEV(pwritev64)

#define PREAD(name)                                                                      \
  ssize_t name(int descriptor, void *buffer, size_t length, off_t offset) {              \
    REAL(name, ssize_t, int, void *, size_t, off_t);                                     \
    bytes += (long)length;                                                               \
    return real(descriptor, buffer, length, offset);                                     \
  }
PREAD(pread)
PREAD(pread64)

#define FALLOCATE(name)                                                                  \
  int name(int descriptor, int mode, off_t offset, off_t length) {                       \
    REAL(name, int, int, int, off_t, off_t);                                             \
    bytes += length;                                                                     \
    return real(descriptor, mode, offset, length);                                       \
  }
FALLOCATE(fallocate)
FALLOCATE(fallocate64)

int sync_file_range(int descriptor, off64_t offset, off64_t length, unsigned flags) {
  REAL(sync_file_range, int, int, off64_t, off64_t, unsigned);
  bytes += length;
  return real(descriptor, offset, length, flags);
}

// Connections, names of machines, and the environment

int connect(int socket, const struct sockaddr *to, socklen_t length) {
  REAL(connect, int, int, const struct sockaddr *, socklen_t);
  if (to->sa_family == AF_UNIX || !fails(connect_error)) return real(socket, to, length);
  connects++;
  return -1;
}

int getaddrinfo(const char *node, const char *service, const struct addrinfo *hints,
                struct addrinfo **found) {
  REAL(getaddrinfo, int, const char *, const char *, const struct addrinfo *, struct addrinfo **);
  while (slow_names) pause();
  return real(node, service, hints, found);
}

static void note(const char *name) {
  static int (*check)(void), (*initialized)(void);
  if (!check) check = (int (*)(void))dlsym(RTLD_DEFAULT, "PyGILState_Check");
  if (!initialized) initialized = (int (*)(void))dlsym(RTLD_DEFAULT, "Py_IsInitialized");
  if (!check || !initialized || !initialized() || check()) return;
  const int file = open(notes, O_WRONLY | O_APPEND | O_CREAT, 0600);
  if (file < 0) return;
  (void)!write(file, name, strlen(name));
  (void)!write(file, "\n", 1);
  close(file);
}

char *getenv(const char *name) {
  if (notes[0]) note(name);
  return system_getenv(name);
}

char *secure_getenv(const char *name) { return getenv(name); }
