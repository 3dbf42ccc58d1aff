/* Loaded before a program by LD_PRELOAD: makes its k-th operation on files below a directory, or its k-th large allocation, go wrong.
 *
 *   SNUG_FAULT_UNDER    the directory, absolute and without links
 *   SNUG_FAULT_KIND     fail: the operation fails (EIO; ENOSPC where it would write; ENOMEM); short: every write from the k-th on takes half of
 *                       its bytes; named: the file system has no O_TMPFILE; full: from the k-th operation on each that needs room on the disk
 *                       fails: write, mkdir, posix_fallocate, and open and mkostemp where they make a file; kill: the process is killed before
 *                       it, a write after half of its bytes; count: nothing happens
 *   SNUG_FAULT_AT       k, from 1
 *   SNUG_FAULT_OF       files (default) or memory: allocations of 64 KiB and more, of which three in a row fail
 *   SNUG_FAULT_COUNT    a file that gets the number of operations, a line for each with its name, when the program ends
 *   SNUG_FAULT_CLOCK_BACK  so many seconds by which the machine's clock is set back when it has been asked once
 *   SNUG_FAULT_CLOCK_TOLD  a file that gets the number of times that it was asked after that
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { kDescriptors = 4096, kOperations = 1 << 16, kLarge = 64 << 10, kInARow = 3 /* as snug asks again */ };

static atomic_char watched[kDescriptors];
static atomic_long operations, times_asked;
static const char* names[kOperations];

static const char* setting(const char* name) {
  const char* text = getenv(name);
  return text ? text : "";
}

static int is_kind(const char* kind) { return strcmp(setting("SNUG_FAULT_KIND"), kind) == 0; }

static int is_below(const char* path) {
  const char* under = setting("SNUG_FAULT_UNDER");
  const size_t length = strlen(under);
  return length > 0 && path && strncmp(path, under, length) == 0 && (path[length] == '/' || path[length] == 0);
}

static int is_watched(int descriptor) {
  return descriptor >= 0 && descriptor < kDescriptors && atomic_load(&watched[descriptor]);
}

static void watch(int descriptor, int on) {
  if (descriptor >= 0 && descriptor < kDescriptors) {
    atomic_store(&watched[descriptor], (char)on);
  }
}

/* The operation's number, from 1. */
static long count(const char* name) {
  const long number = atomic_fetch_add(&operations, 1) + 1;
  if (number <= kOperations) {
    names[number - 1] = name;
  }
  return number;
}

/* Whether this operation is to fail. Does not return where it is to be the last. */
static int fails(const char* name, int of_memory) {
  if ((strcmp(setting("SNUG_FAULT_OF"), "memory") == 0) != of_memory) {
    return 0;
  }
  const long at = atol(setting("SNUG_FAULT_AT")), number = count(name);
  const int in_a_row = of_memory ? kInARow : 1;
  if (is_kind("full")) {
    return number >= at && (strcmp(name, "write") == 0 || strcmp(name, "mkdir") == 0 || strcmp(name, "create") == 0 ||
                            strcmp(name, "fallocate") == 0);
  }
  if (number < at || number >= at + in_a_row) {
    return 0;
  }
  if (is_kind("kill")) {
    kill(getpid(), SIGKILL);
  }
  return is_kind("fail");
}

/* Of so many bytes that are to be written, so many are to be: fewer for a short write and for the last one before a kill. */
static size_t taken(size_t bytes, int* is_last) {
  const long at = atol(setting("SNUG_FAULT_AT")), number = atomic_load(&operations) + 1;
  *is_last = is_kind("kill") && number == at;
  const int is_short = *is_last || (is_kind("short") && number >= at);
  return is_short && bytes > 1 ? bytes / 2 : bytes;
}

#define REAL(type, name, ...) \
  static type (*real)(__VA_ARGS__); \
  if (!real) { \
    *(void**)&real = dlsym(RTLD_NEXT, name); \
  }

__attribute__((destructor)) static void tell(void) {
  const char* file = setting("SNUG_FAULT_COUNT");
  REAL(int, "open", const char*, int, ...)
  const int descriptor = *file ? real(file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666) : -1;
  for (long i = 0; descriptor >= 0 && i < atomic_load(&operations) && i < kOperations; ++i) {
    dprintf(descriptor, "%s\n", names[i]);
  }
  const char* told = setting("SNUG_FAULT_CLOCK_TOLD");
  const int clock = *told ? real(told, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666) : -1;
  if (clock >= 0) {
    dprintf(clock, "%ld\n", atomic_load(&times_asked) - 1);
  }
}

static int opened(int descriptor, const char* path) {
  watch(descriptor, descriptor >= 0 && is_below(path));
  return descriptor;
}

#define OPEN(name) \
  int name(const char* path, int flags, ...) { \
    REAL(int, #name, const char*, int, ...) \
    va_list arguments; \
    va_start(arguments, flags); \
    const mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(arguments, mode_t) : 0; \
    va_end(arguments); \
    const int makes = (flags & O_TMPFILE) == O_TMPFILE || ((flags & O_CREAT) && access(path, F_OK) != 0); \
    if (is_below(path) && (flags & O_TMPFILE) == O_TMPFILE && is_kind("named")) { \
      errno = EOPNOTSUPP; \
      return -1; \
    } \
    if (is_below(path) && fails(makes ? "create" : "open", 0)) { \
      errno = makes ? ENOSPC : EIO; \
      return -1; \
    } \
    return opened(real(path, flags, mode), path); \
  }
OPEN(open)
OPEN(open64)

#define FOPEN(name) \
  FILE* name(const char* path, const char* mode) { \
    REAL(FILE*, #name, const char*, const char*) \
    if (is_below(path) && fails("open", 0)) { \
      errno = EIO; \
      return NULL; \
    } \
    FILE* file = real(path, mode); \
    if (file) { \
      opened(fileno(file), path); \
    } \
    return file; \
  }
FOPEN(fopen)
FOPEN(fopen64)

#define MAKE_UNIQUE(name) \
  int name(char* pattern, int flags) { \
    REAL(int, #name, char*, int) \
    if (is_below(pattern) && fails("create", 0)) { \
      errno = ENOSPC; \
      return -1; \
    } \
    return opened(real(pattern, flags), pattern); \
  }
MAKE_UNIQUE(mkostemp)
MAKE_UNIQUE(mkostemp64)

int close(int descriptor) {
  REAL(int, "close", int)
  watch(descriptor, 0);
  return real(descriptor);
}

#define BEFORE_WRITE \
  int is_last = 0; \
  if (is_watched(descriptor)) { \
    size = taken(size, &is_last); \
    if (!is_last && fails("write", 0)) { \
      errno = ENOSPC; \
      return -1; \
    } \
  }

ssize_t write(int descriptor, const void* bytes, size_t size) {
  REAL(ssize_t, "write", int, const void*, size_t)
  BEFORE_WRITE
  const ssize_t result = real(descriptor, bytes, size);
  if (is_last) {
    fails("write", 0);
  }
  return result;
}

#define PWRITE(name, type) \
  ssize_t name(int descriptor, const void* bytes, size_t size, type offset) { \
    REAL(ssize_t, #name, int, const void*, size_t, type) \
    BEFORE_WRITE \
    const ssize_t result = real(descriptor, bytes, size, offset); \
    if (is_last) { \
      fails("write", 0); \
    } \
    return result; \
  }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

ssize_t read(int descriptor, void* bytes, size_t size) {
  REAL(ssize_t, "read", int, void*, size_t)
  if (is_watched(descriptor) && fails("read", 0)) {
    errno = EIO;
    return -1;
  }
  return real(descriptor, bytes, size);
}

/* Streams of C++ write by it. */
ssize_t writev(int descriptor, const struct iovec* parts, int number) {
  REAL(ssize_t, "writev", int, const struct iovec*, int)
  if (is_watched(descriptor) && fails("write", 0)) {
    errno = ENOSPC;
    return -1;
  }
  return real(descriptor, parts, number);
}

#define PREAD(name, type) \
  ssize_t name(int descriptor, void* bytes, size_t size, type offset) { \
    REAL(ssize_t, #name, int, void*, size_t, type) \
    if (is_watched(descriptor) && fails("read", 0)) { \
      errno = EIO; \
      return -1; \
    } \
    return real(descriptor, bytes, size, offset); \
  }
PREAD(pread, off_t)
PREAD(pread64, off64_t)

#define OF_DESCRIPTOR(name) \
  int name(int descriptor) { \
    REAL(int, #name, int) \
    if (is_watched(descriptor) && fails(#name, 0)) { \
      errno = EIO; \
      return -1; \
    } \
    return real(descriptor); \
  }
OF_DESCRIPTOR(fsync)
OF_DESCRIPTOR(fdatasync)

#define FALLOCATE(name, type) \
  int name(int descriptor, type offset, type size) { \
    REAL(int, #name, int, type, type) \
    return is_watched(descriptor) && fails("fallocate", 0) ? ENOSPC : real(descriptor, offset, size); \
  }
FALLOCATE(posix_fallocate, off_t)
FALLOCATE(posix_fallocate64, off64_t)

int rename(const char* from, const char* to) {
  REAL(int, "rename", const char*, const char*)
  if (is_below(to) && fails("rename", 0)) {
    errno = EIO;
    return -1;
  }
  return real(from, to);
}

int mkdir(const char* path, mode_t mode) {
  REAL(int, "mkdir", const char*, mode_t)
  if (is_below(path) && fails("mkdir", 0)) {
    errno = ENOSPC;
    return -1;
  }
  return real(path, mode);
}

int clock_gettime(clockid_t clock, struct timespec* now) {
  REAL(int, "clock_gettime", clockid_t, struct timespec*)
  const int result = real(clock, now);
  if (clock == CLOCK_REALTIME && result == 0 && atomic_fetch_add(&times_asked, 1) >= 1) {
    now->tv_sec -= atol(setting("SNUG_FAULT_CLOCK_BACK"));
  }
  return result;
}

int posix_memalign(void** pointer, size_t alignment, size_t size) {
  REAL(int, "posix_memalign", void**, size_t, size_t)
  return size >= kLarge && fails("allocate", 1) ? ENOMEM : real(pointer, alignment, size);
}
