// libc's own functions, which the hooks call, and the hooks.
#pragma once
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define EXPORTED(name) hooked_##name
#define likely(x) __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)

// What is declared here is in this library: it is called and looked at directly, not through a table of the linker's.
#pragma GCC visibility push(hidden)

#define REAL(ret, name, params, call) LATE(ret, name, params)
#define LATE(ret, name, params)                                                                                        \
    extern ret(*real_##name) params;                                                                                   \
    ret EXPORTED(name) params;
#include "functions.inc"
#undef REAL
#undef LATE

// A descriptor that was another process's.
int found(int fd);
// Finds them all; before, those with a system call make it.
void look_up(void);

// The constructor.
void begin(void);
#define ENSURE(name)                                                                                                   \
    if (unlikely(real_##name == NULL))                                                                                 \
        begin();

#pragma GCC visibility pop
