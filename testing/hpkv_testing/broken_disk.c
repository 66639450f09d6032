// A library to preload into a process: calls on files below one folder fail, or hang, when a test
// says so. It stands between the process and libc, so what is tested is the real program on real
// files.
//
// The test's side is broken_disk.py. Both map one file, named by HPKV_TEST_BROKEN_DISK:
//
//   int32 action[KINDS]    0: as ever   > 0: fail with this errno   -1: hang while this stays
//   int32 met[KINDS]       calls that an action was for
//   char folder[4096]
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind { OPEN_TO_READ, OPEN_TO_WRITE, READ, WRITE, SYNC, RESERVE, REMOVE, SPACE, KINDS };

struct control {
  _Atomic int action[KINDS];
  _Atomic int met[KINDS];
  char folder[4096];
};

static struct control* control;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

__attribute__((constructor)) static void attach(void) {
  const char* path = getenv("HPKV_TEST_BROKEN_DISK");
  if (path == NULL) return;
  const int file = REAL(open)(path, O_RDWR | O_CLOEXEC);
  void* mapped = mmap(NULL, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (file < 0 || mapped == MAP_FAILED) {
    perror(path);
    abort();
  }
  close(file);
  control = mapped;
}

// 0, or -1 with errno: what the call is to do instead.
static int meet(enum kind kind, const char* path) {
  if (control == NULL || atomic_load(&control->action[kind]) == 0) return 0;
  const size_t length = strlen(control->folder);
  if (strncmp(path, control->folder, length) != 0) return 0;
  if (path[length] != '/' && path[length] != '\0') return 0;
  atomic_fetch_add(&control->met[kind], 1);
  int action = 0;
  while ((action = atomic_load(&control->action[kind])) < 0) usleep(1000);
  if (action == 0) return 0;
  errno = action;
  return -1;
}

static int meet_handle(enum kind kind, int handle) {
  if (control == NULL || atomic_load(&control->action[kind]) == 0) return 0;
  char link[32];
  char path[PATH_MAX];
  snprintf(link, sizeof link, "/proc/self/fd/%d", handle);
  const ssize_t length = readlink(link, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = '\0';
  return meet(kind, path);
}

int open(const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(rest, mode_t) : 0;
  va_end(rest);
  const int writes = (flags & (O_WRONLY | O_RDWR | O_CREAT)) != 0;
  if (meet(writes ? OPEN_TO_WRITE : OPEN_TO_READ, path) != 0) return -1;
  return REAL(open)(path, flags, mode);
}

ssize_t preadv(int handle, const struct iovec* parts, int count, off_t offset) {
  return meet_handle(READ, handle) != 0 ? -1 : REAL(preadv)(handle, parts, count, offset);
}

ssize_t pwritev(int handle, const struct iovec* parts, int count, off_t offset) {
  return meet_handle(WRITE, handle) != 0 ? -1 : REAL(pwritev)(handle, parts, count, offset);
}

int fdatasync(int handle) { return meet_handle(SYNC, handle) != 0 ? -1 : REAL(fdatasync)(handle); }

int fsync(int handle) { return meet_handle(SYNC, handle) != 0 ? -1 : REAL(fsync)(handle); }

int fallocate(int handle, int mode, off_t offset, off_t bytes) {
  return meet_handle(RESERVE, handle) != 0 ? -1 : REAL(fallocate)(handle, mode, offset, bytes);
}

int unlink(const char* path) { return meet(REMOVE, path) != 0 ? -1 : REAL(unlink)(path); }

int statvfs(const char* path, struct statvfs* out) {
  return meet(SPACE, path) != 0 ? -1 : REAL(statvfs)(path, out);
}
