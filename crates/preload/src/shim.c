// The hooks as libc's callers see them. Everything that may wait is called from here, through the real libc: its waits
// are cancellation points, and a thread that is cancelled or jumps out of a signal handler unwinds these frames only.
// No lock is held and nothing is left to do in a frame that waits. What a hook decides is decided in Rust (`hw_*`), which
// never waits.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <linux/sockios.h>
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

// ---- system calls as they are, for before the constructor has run and for looks that must not wait

static inline long raw6(long number, long a, long b, long c, long d, long e, long f) {
#if defined(__x86_64__)
    long result;
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    register long r9 __asm__("r9") = f;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
#elif defined(__aarch64__)
    register long x8 __asm__("x8") = number;
    register long x0 __asm__("x0") = a;
    register long x1 __asm__("x1") = b;
    register long x2 __asm__("x2") = c;
    register long x3 __asm__("x3") = d;
    register long x4 __asm__("x4") = e;
    register long x5 __asm__("x5") = f;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
    return x0;
#else
#error "the preload library knows x86-64 and aarch64"
#endif
}

// For Rust: never a hook, never errno.
long hw_raw(long number, long a, long b, long c, long d, long e, long f) { return raw6(number, a, b, c, d, e, f); }

static long result_of(long raw) {
    if (unlikely((unsigned long)raw > -4096UL)) {
        errno = (int)-raw;
        return -1;
    }
    return raw;
}

// ---- the real functions

#define REAL(ret, name, params, args)                                                                                  \
    static ret early_##name params { return (ret)result_of(raw6 args); }                                              \
    static ret(*real_##name) params = early_##name;
#define A1(n, a) (n, (long)a, 0, 0, 0, 0, 0)
#define A2(n, a, b) (n, (long)a, (long)b, 0, 0, 0, 0)
#define A3(n, a, b, c) (n, (long)a, (long)b, (long)c, 0, 0, 0)
#define A4(n, a, b, c, d) (n, (long)a, (long)b, (long)c, (long)d, 0, 0)
#define A5(n, a, b, c, d, e) (n, (long)a, (long)b, (long)c, (long)d, (long)e, 0)
#define A6(n, a, b, c, d, e, f) (n, (long)a, (long)b, (long)c, (long)d, (long)e, (long)f)

REAL(int, socket, (int a, int b, int c), A3(SYS_socket, a, b, c))
REAL(int, accept, (int a, struct sockaddr *b, socklen_t *c), A3(SYS_accept, a, b, c))
REAL(int, accept4, (int a, struct sockaddr *b, socklen_t *c, int d), A4(SYS_accept4, a, b, c, d))
REAL(int, connect, (int a, const struct sockaddr *b, socklen_t c), A3(SYS_connect, a, b, c))
REAL(int, shutdown, (int a, int b), A2(SYS_shutdown, a, b))
REAL(int, close, (int a), A1(SYS_close, a))
REAL(int, close_range, (unsigned a, unsigned b, int c), A3(SYS_close_range, a, b, c))
REAL(int, dup, (int a), A1(SYS_dup, a))
REAL(int, dup2, (int a, int b), A3(SYS_dup3, a, b, 0))
REAL(int, dup3, (int a, int b, int c), A3(SYS_dup3, a, b, c))
REAL(int, fcntl, (int a, int b, void *c), A3(SYS_fcntl, a, b, c))
REAL(int, ioctl, (int a, unsigned long b, void *c), A3(SYS_ioctl, a, b, c))
REAL(ssize_t, read, (int a, void *b, size_t c), A3(SYS_read, a, b, c))
REAL(ssize_t, write, (int a, const void *b, size_t c), A3(SYS_write, a, b, c))
REAL(ssize_t, readv, (int a, const struct iovec *b, int c), A3(SYS_readv, a, b, c))
REAL(ssize_t, writev, (int a, const struct iovec *b, int c), A3(SYS_writev, a, b, c))
REAL(ssize_t, preadv2, (int a, const struct iovec *b, int c, off_t d, int e), A6(SYS_preadv2, a, b, c, d, 0, e))
REAL(ssize_t, pwritev2, (int a, const struct iovec *b, int c, off_t d, int e), A6(SYS_pwritev2, a, b, c, d, 0, e))
REAL(ssize_t, send, (int a, const void *b, size_t c, int d), A6(SYS_sendto, a, b, c, d, 0, 0))
REAL(ssize_t, sendto, (int a, const void *b, size_t c, int d, const struct sockaddr *e, socklen_t f),
     A6(SYS_sendto, a, b, c, d, e, f))
REAL(ssize_t, sendmsg, (int a, const struct msghdr *b, int c), A3(SYS_sendmsg, a, b, c))
REAL(int, sendmmsg, (int a, struct mmsghdr *b, unsigned c, int d), A4(SYS_sendmmsg, a, b, c, d))
REAL(ssize_t, recv, (int a, void *b, size_t c, int d), A6(SYS_recvfrom, a, b, c, d, 0, 0))
REAL(ssize_t, recvfrom, (int a, void *b, size_t c, int d, struct sockaddr *e, socklen_t *f),
     A6(SYS_recvfrom, a, b, c, d, e, f))
REAL(ssize_t, recvmsg, (int a, struct msghdr *b, int c), A3(SYS_recvmsg, a, b, c))
REAL(int, recvmmsg, (int a, struct mmsghdr *b, unsigned c, int d, struct timespec *e),
     A5(SYS_recvmmsg, a, b, c, d, e))
REAL(ssize_t, sendfile, (int a, int b, off_t *c, size_t d), A4(SYS_sendfile, a, b, c, d))
REAL(ssize_t, splice, (int a, off_t *b, int c, off_t *d, size_t e, unsigned f), A6(SYS_splice, a, b, c, d, e, f))
REAL(int, ppoll, (struct pollfd *a, nfds_t b, const struct timespec *c, const sigset_t *d),
     A5(SYS_ppoll, a, b, c, d, 8))
REAL(int, epoll_ctl, (int a, int b, int c, struct epoll_event *d), A4(SYS_epoll_ctl, a, b, c, d))
REAL(int, epoll_pwait, (int a, struct epoll_event *b, int c, int d, const sigset_t *e),
     A6(SYS_epoll_pwait, a, b, c, d, e, 8))
REAL(int, epoll_create1, (int a), A1(SYS_epoll_create1, a))
REAL(int, setsockopt, (int a, int b, int c, const void *d, socklen_t e), A5(SYS_setsockopt, a, b, c, d, e))
REAL(int, getsockopt, (int a, int b, int c, void *d, socklen_t *e), A5(SYS_getsockopt, a, b, c, d, e))
REAL(int, prctl, (int a, unsigned long b, unsigned long c, unsigned long d, unsigned long e),
     A5(SYS_prctl, a, b, c, d, e))
REAL(int, setuid, (uid_t a), A1(SYS_setuid, a))
REAL(int, setgid, (gid_t a), A1(SYS_setgid, a))
REAL(int, seteuid, (uid_t a), A3(SYS_setresuid, -1, a, -1))
REAL(int, setreuid, (uid_t a, uid_t b), A2(SYS_setreuid, a, b))
REAL(int, setresuid, (uid_t a, uid_t b, uid_t c), A3(SYS_setresuid, a, b, c))
REAL(int, chroot, (const char *a), A1(SYS_chroot, a))
REAL(int, unshare, (int a), A1(SYS_unshare, a))
REAL(int, setns, (int a, int b), A2(SYS_setns, a, b))
REAL(int, execve, (const char *a, char *const b[], char *const c[]), A3(SYS_execve, a, b, c))

static int early_poll(struct pollfd *fds, nfds_t count, int ms) {
    struct timespec limit = {ms / 1000, ms % 1000 * 1000000L};
    return early_ppoll(fds, count, ms < 0 ? NULL : &limit, NULL);
}
static int (*real_poll)(struct pollfd *, nfds_t, int) = early_poll;
static int early_epoll_wait(int a, struct epoll_event *b, int c, int d) { return early_epoll_pwait(a, b, c, d, NULL); }
static int (*real_epoll_wait)(int, struct epoll_event *, int, int) = early_epoll_wait;

// These are rarely called before the constructor has run; then it runs at once.
static int (*real_epoll_pwait2)(int, struct epoll_event *, int, const struct timespec *, const sigset_t *);
static int (*real_select)(int, fd_set *, fd_set *, fd_set *, struct timeval *);
static int (*real_pselect)(int, fd_set *, fd_set *, fd_set *, const struct timespec *, const sigset_t *);
static void (*real_closefrom)(int);
static pid_t (*real_fork)(void);
static pid_t (*real__Fork)(void);
pid_t (*hw_real_vfork)(void);
static long (*real_syscall)(long, ...);
static int (*real_execv)(const char *, char *const[]);
static int (*real_execvp)(const char *, char *const[]);
static int (*real_execvpe)(const char *, char *const[], char *const[]);
static int (*real_fexecve)(int, char *const[], char *const[]);
static int (*real_posix_spawn)(pid_t *, const char *, const posix_spawn_file_actions_t *, const posix_spawnattr_t *,
                               char *const[], char *const[]);
static int (*real_posix_spawnp)(pid_t *, const char *, const posix_spawn_file_actions_t *, const posix_spawnattr_t *,
                                char *const[], char *const[]);
static int (*real_clone)(int (*)(void *), void *, int, void *, ...);
static FILE *(*real_fdopen)(int, const char *);
static int (*real_vdprintf)(int, const char *, va_list);

static void begin(void);
#define ENSURE(name)                                                                                                   \
    if (unlikely(real_##name == NULL))                                                                                 \
        begin();

// ---- what Rust decides

struct plan {
    size_t done;  // bytes that went by the lane or came from it in this call
    size_t limit; // how many bytes the kernel may be asked for
    uint32_t slot;
    uint32_t generation;
    int error;
};
enum verdict { DONE = 0, FAILED = 1, KERNEL = 2, WAIT = 3 };
// What this thread is inside of, so that whoever is torn out of it (cancelled, or by a jump from a handler) is tidied up
// after.
enum inside_kind { OUTSIDE = 0, RECEIVING = 1, SENDING = 2, WAITING = 3, WAITING_EPOLL = 4 };
struct inside {
    const void *frame;
    uint32_t kind;
    uint32_t slot;
    uint32_t generation;
};

extern uint32_t hw_descriptors[];
#define DESCRIPTORS 65536
#define KIND(fd) ((unsigned)(fd) < DESCRIPTORS ? __atomic_load_n(&hw_descriptors[fd], __ATOMIC_RELAXED) : 0)
#define IS_SOCKET(entry) ((entry) & 0x80000000u)
#define IS_EPOLL(entry) ((entry) & 0x40000000u)

void hw_begin(void);
void hw_new_socket(int fd, int nonblocking);
void hw_maybe_socket(int fd);
void hw_closing(int fd);
void hw_closed_range(unsigned first, unsigned last);
void hw_duplicated(int from, int to);
void hw_forget(int fd);
int hw_receive(int fd, struct plan *, const struct iovec *, int count, int flags, size_t total);
void hw_received(struct plan *, ssize_t result, int flags);
int hw_send(int fd, struct plan *, const struct iovec *, int count, int flags, size_t total);
void hw_sent(struct plan *, ssize_t result, int flags, int error);
int hw_send_file(int fd, struct plan *, int file, int64_t *offset, size_t count);
void hw_abandoned(const struct inside *);
void hw_plain(int fd, int why);
void hw_shut_down(int fd, int how);
void hw_set_nonblocking(int fd, int on);
void hw_corked(int fd, int on);
void hw_low_water(int fd, int bytes);
int hw_set_combining(int fd, int on);
int hw_is_combining(int fd);
size_t hw_unread(int fd);
int hw_splice_out(int fd, struct plan *, int to, size_t count);
int hw_poll(struct pollfd *, nfds_t count, int64_t timeout_ns, int *sleeping);
void hw_polled(void);
int hw_epoll_put_off(int set, int operation, int fd, const struct epoll_event *);
void hw_epoll_ctl(int set, int operation, int fd, const struct epoll_event *);
int hw_epoll_wait(int set, struct epoll_event *, int most, int64_t timeout_ns, struct plan *);
int hw_epoll_waited(struct plan *, struct epoll_event *, int count);
int hw_is_before_mark(int fd);
void hw_before_fork(void);
void hw_after_fork(int child);
void hw_before_vfork(void);
void hw_before_exec(void);
void hw_before_spawn(void);
void hw_after_spawn(int child);
void hw_sandboxed(void);
void hw_ring_made(void);
void hw_receives_descriptors(const struct msghdr *);
void hw_passes_descriptors(const struct msghdr *);

enum why { BY_STDIO = 1, BY_SIGNAL = 2, BY_OPTION = 3, BY_OUT_OF_BAND = 4 };

static __thread struct inside inside __attribute__((tls_model("initial-exec")));

// A record of an earlier call is stale if that call's frame is gone: this one is not deeper in the stack.
static inline void tidy(void) {
    if (unlikely(inside.kind != OUTSIDE) && (const void *)__builtin_frame_address(0) >= inside.frame) {
        struct inside stale = inside;
        inside.kind = OUTSIDE;
        hw_abandoned(&stale);
    }
}

static void cancelled(void *record) {
    (void)record;
    struct inside stale = inside;
    inside.kind = OUTSIDE;
    hw_abandoned(&stale);
}

// AROUND(kind, plan, statement): the statement may wait.
#define AROUND(what, plan, statement)                                                                                  \
    do {                                                                                                               \
        struct inside outer = inside;                                                                                  \
        inside = (struct inside){__builtin_frame_address(0), what, (plan)->slot, (plan)->generation};                  \
        pthread_cleanup_push(cancelled, NULL);                                                                         \
        statement;                                                                                                     \
        pthread_cleanup_pop(0);                                                                                        \
        inside = outer;                                                                                                \
    } while (0)

static size_t sum(const struct iovec *parts, int count) {
    size_t total = 0;
    for (int i = 0; i < count; i++)
        total += parts[i].iov_len;
    return total;
}

#define PARTS_MAX 1024
// The bytes from `skip` on, at most `limit`, as a list of its own.
static int cut(const struct iovec *parts, int count, size_t skip, size_t limit, struct iovec *into) {
    int used = 0;
    for (int i = 0; i < count && limit > 0; i++) {
        size_t length = parts[i].iov_len;
        if (skip >= length) {
            skip -= length;
            continue;
        }
        size_t bytes = length - skip < limit ? length - skip : limit;
        into[used++] = (struct iovec){(char *)parts[i].iov_base + skip, bytes};
        skip = 0;
        limit -= bytes;
    }
    return used;
}

// ---- receiving

// The call that the program made: what the kernel is asked is the same one, since it may be the only one that is allowed.
enum call { READ, READV, RECV, RECVMSG, WRITE, WRITEV, SEND, SENDMSG };

static ssize_t ask_to_receive(enum call call, int fd, const struct iovec *parts, int count, int flags, struct plan *plan) {
    struct iovec *rest = (struct iovec *)parts;
    int used = count;
    if (plan->done > 0 || plan->limit < sum(parts, count)) {
        rest = __builtin_alloca(sizeof *rest * count);
        used = cut(parts, count, plan->done, plan->limit, rest);
    }
    ssize_t result;
    struct msghdr message = {.msg_iov = rest, .msg_iovlen = used};
    switch (call) {
    case READ:
        AROUND(RECEIVING, plan, result = real_read(fd, rest[0].iov_base, rest[0].iov_len));
        break;
    case READV:
        AROUND(RECEIVING, plan, result = real_readv(fd, rest, used));
        break;
    case RECV:
        AROUND(RECEIVING, plan, result = real_recv(fd, rest[0].iov_base, rest[0].iov_len, flags));
        break;
    default:
        AROUND(RECEIVING, plan, result = real_recvmsg(fd, &message, flags));
        break;
    }
    return result;
}

// Milliseconds that a receive waits, as the program has set it.
static int patience(int fd) {
    struct timeval limit = {0, 0};
    socklen_t length = sizeof limit;
    if (real_getsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, &length) != 0 || (limit.tv_sec == 0 && limit.tv_usec == 0))
        return -1;
    return (int)(limit.tv_sec * 1000 + (limit.tv_usec + 999) / 1000);
}

static ssize_t receive(enum call call, int fd, const struct iovec *parts, int count, int flags) {
    size_t total = sum(parts, count);
    struct plan plan = {0};
    for (;;) {
        int verdict = hw_receive(fd, &plan, parts, count, flags, total);
        if (verdict == DONE)
            return (ssize_t)plan.done;
        if (verdict == FAILED) {
            errno = plan.error;
            return -1;
        }
        if (verdict == WAIT) {
            struct pollfd wanted = {fd, POLLIN, 0};
            int ready, limit = patience(fd);
            AROUND(RECEIVING, &plan, ready = real_poll(&wanted, 1, limit));
            int error = errno;
            hw_received(&plan, 0, 0);
            errno = error;
            if (ready > 0 || (ready < 0 && errno == EINTR && plan.done == 0))
                continue;
            // Interrupted or out of time: what is there is the answer.
            if (plan.done > 0)
                return (ssize_t)plan.done;
            if (ready == 0)
                errno = EAGAIN;
            return -1;
        }
        ssize_t result = ask_to_receive(call, fd, parts, count, flags, &plan);
        int error = errno;
        hw_received(&plan, result, flags);
        if (result < 0) {
            errno = error;
            return plan.done > 0 ? (ssize_t)plan.done : -1;
        }
        plan.done += (size_t)result;
        // Short of a bound, there was no more; at a bound, what follows comes from the lane.
        int at_bound = (size_t)result == plan.limit && plan.done < total;
        if (result == 0 || plan.done == total || (!at_bound && !(flags & MSG_WAITALL)) || (flags & (MSG_PEEK | MSG_OOB)))
            return (ssize_t)plan.done;
        if (at_bound && !(flags & MSG_WAITALL))
            flags |= MSG_DONTWAIT;
    }
}

// Whether a call is about a connection that may have a lane. One that was inherited or received is found here.
static inline int concerns(int fd) {
    uint32_t entry = KIND(fd);
    if (unlikely(entry == 0) && (unsigned)fd < DESCRIPTORS) {
        int error = errno;
        hw_maybe_socket(fd);
        errno = error;
        entry = KIND(fd);
    }
    if (likely(IS_SOCKET(entry))) {
        tidy();
        return 1;
    }
    return 0;
}

// A receive of nothing tells whether there is something.
static inline int nothing_of_something(int fd) { return IS_SOCKET(KIND(fd)) && hw_unread(fd) > 0; }

ssize_t EXPORTED(read)(int fd, void *into, size_t bytes) {
    if (!concerns(fd) || bytes == 0)
        return real_read(fd, into, bytes);
    struct iovec part = {into, bytes};
    return receive(READ, fd, &part, 1, 0);
}

ssize_t EXPORTED(readv)(int fd, const struct iovec *parts, int count) {
    if (!concerns(fd) || count <= 0 || count > PARTS_MAX || sum(parts, count) == 0)
        return real_readv(fd, parts, count);
    return receive(READV, fd, parts, count, 0);
}

ssize_t EXPORTED(preadv2)(int fd, const struct iovec *parts, int count, off_t offset, int flags) {
    if (!concerns(fd) || offset != -1 || (flags & ~RWF_NOWAIT) || count <= 0 || count > PARTS_MAX ||
        sum(parts, count) == 0)
        return real_preadv2(fd, parts, count, offset, flags);
    return receive(flags & RWF_NOWAIT ? RECVMSG : READV, fd, parts, count, flags & RWF_NOWAIT ? MSG_DONTWAIT : 0);
}

#define UNUSUAL_RECEIVE (MSG_OOB | MSG_ERRQUEUE | MSG_TRUNC)

ssize_t EXPORTED(recv)(int fd, void *into, size_t bytes, int flags) {
    if (!concerns(fd))
        return real_recv(fd, into, bytes, flags);
    if (bytes == 0)
        return nothing_of_something(fd) ? 0 : real_recv(fd, into, bytes, flags);
    if (unlikely(flags & UNUSUAL_RECEIVE))
        hw_plain(fd, BY_OUT_OF_BAND);
    struct iovec part = {into, bytes};
    return receive(RECV, fd, &part, 1, flags);
}

ssize_t EXPORTED(recvfrom)(int fd, void *into, size_t bytes, int flags, struct sockaddr *from, socklen_t *length) {
    if (!concerns(fd) || (bytes == 0 && !nothing_of_something(fd)))
        return real_recvfrom(fd, into, bytes, flags, from, length);
    if (unlikely(flags & UNUSUAL_RECEIVE))
        hw_plain(fd, BY_OUT_OF_BAND);
    struct iovec part = {into, bytes};
    ssize_t result = bytes == 0 ? 0 : receive(RECV, fd, &part, 1, flags);
    // The kernel names no sender of a stream.
    if (result >= 0 && from != NULL && length != NULL)
        *length = 0;
    return result;
}

ssize_t EXPORTED(recvmsg)(int fd, struct msghdr *message, int flags) {
    if (!concerns(fd) || message == NULL || message->msg_iovlen > PARTS_MAX ||
        (sum(message->msg_iov, message->msg_iovlen) == 0 && !nothing_of_something(fd))) {
        ssize_t result = real_recvmsg(fd, message, flags);
        if (result >= 0 && message != NULL && message->msg_controllen > 0)
            hw_receives_descriptors(message);
        return result;
    }
    if (unlikely(flags & UNUSUAL_RECEIVE))
        hw_plain(fd, BY_OUT_OF_BAND);
    size_t total = sum(message->msg_iov, message->msg_iovlen);
    ssize_t result = total == 0 ? 0 : receive(RECVMSG, fd, message->msg_iov, message->msg_iovlen, flags);
    if (result >= 0) {
        message->msg_namelen = 0;
        message->msg_controllen = 0;
        message->msg_flags = flags & MSG_CMSG_CLOEXEC;
    }
    return result;
}

int EXPORTED(recvmmsg)(int fd, struct mmsghdr *messages, unsigned count, int flags, struct timespec *timeout) {
    if (!concerns(fd))
        return real_recvmmsg(fd, messages, count, flags, timeout);
    // The kernel tells a pending error before anything else.
    int pending = 0;
    socklen_t length = sizeof pending;
    if (real_getsockopt(fd, SOL_SOCKET, SO_ERROR, &pending, &length) == 0 && pending != 0) {
        errno = pending;
        return -1;
    }
    struct timespec begun, now;
    if (timeout != NULL)
        clock_gettime(CLOCK_MONOTONIC, &begun);
    for (unsigned i = 0; i < count; i++) {
        int with = flags & ~MSG_WAITFORONE;
        if (i > 0 && (flags & MSG_WAITFORONE))
            with |= MSG_DONTWAIT;
        ssize_t result = EXPORTED(recvmsg)(fd, &messages[i].msg_hdr, with);
        if (result < 0)
            return i > 0 ? (int)i : -1;
        messages[i].msg_len = (unsigned)result;
        if (timeout != NULL) {
            clock_gettime(CLOCK_MONOTONIC, &now);
            long long left = (timeout->tv_sec - (now.tv_sec - begun.tv_sec)) * 1000000000LL + timeout->tv_nsec -
                             (now.tv_nsec - begun.tv_nsec);
            if (left <= 0)
                return (int)i + 1;
        }
    }
    return (int)count;
}

// ---- sending

static ssize_t send_parts(enum call call, int fd, const struct iovec *parts, int count, int flags) {
    size_t total = sum(parts, count);
    struct plan plan = {0};
    for (;;) {
        if (hw_send(fd, &plan, parts, count, flags, total) == DONE)
            return (ssize_t)plan.done;
        struct iovec *rest = (struct iovec *)parts;
        int used = count;
        if (plan.limit < total) {
            rest = __builtin_alloca(sizeof *rest * count);
            used = cut(parts, count, plan.done, plan.limit, rest);
        }
        ssize_t result;
        struct msghdr message = {.msg_iov = rest, .msg_iovlen = used};
        switch (call) {
        case WRITE:
            AROUND(SENDING, &plan, result = real_write(fd, rest[0].iov_base, rest[0].iov_len));
            break;
        case WRITEV:
            AROUND(SENDING, &plan, result = real_writev(fd, rest, used));
            break;
        case SEND:
            AROUND(SENDING, &plan, result = real_send(fd, rest[0].iov_base, rest[0].iov_len, flags));
            break;
        default:
            AROUND(SENDING, &plan, result = real_sendmsg(fd, &message, flags));
            break;
        }
        int error = errno;
        hw_sent(&plan, result, flags, error);
        errno = error;
        if (result < 0)
            return plan.done > 0 ? (ssize_t)plan.done : -1;
        plan.done += (size_t)result;
        if ((size_t)result < plan.limit || plan.done == total)
            return (ssize_t)plan.done;
    }
}

ssize_t EXPORTED(write)(int fd, const void *from, size_t bytes) {
    if (!concerns(fd) || bytes == 0)
        return real_write(fd, from, bytes);
    struct iovec part = {(void *)from, bytes};
    return send_parts(WRITE, fd, &part, 1, 0);
}

ssize_t EXPORTED(writev)(int fd, const struct iovec *parts, int count) {
    if (!concerns(fd) || count <= 0 || count > PARTS_MAX || sum(parts, count) == 0)
        return real_writev(fd, parts, count);
    return send_parts(WRITEV, fd, parts, count, 0);
}

ssize_t EXPORTED(pwritev2)(int fd, const struct iovec *parts, int count, off_t offset, int flags) {
    if (!concerns(fd) || offset != -1 || (flags & ~RWF_NOWAIT) || count <= 0 || count > PARTS_MAX ||
        sum(parts, count) == 0)
        return real_pwritev2(fd, parts, count, offset, flags);
    return send_parts(flags & RWF_NOWAIT ? SENDMSG : WRITEV, fd, parts, count, flags & RWF_NOWAIT ? MSG_DONTWAIT : 0);
}

ssize_t EXPORTED(send)(int fd, const void *from, size_t bytes, int flags) {
    if (!concerns(fd) || bytes == 0)
        return real_send(fd, from, bytes, flags);
    struct iovec part = {(void *)from, bytes};
    return send_parts(SEND, fd, &part, 1, flags);
}

ssize_t EXPORTED(sendto)(int fd, const void *from, size_t bytes, int flags, const struct sockaddr *to,
                         socklen_t length) {
    if (!concerns(fd) || bytes == 0 || to != NULL)
        return real_sendto(fd, from, bytes, flags, to, length);
    return EXPORTED(send)(fd, from, bytes, flags);
}

ssize_t EXPORTED(sendmsg)(int fd, const struct msghdr *message, int flags) {
    if (message != NULL && message->msg_controllen > 0)
        hw_passes_descriptors(message);
    if (!concerns(fd) || message == NULL || message->msg_iovlen == 0 || message->msg_iovlen > PARTS_MAX ||
        message->msg_controllen > 0 || message->msg_name != NULL || sum(message->msg_iov, message->msg_iovlen) == 0)
        return real_sendmsg(fd, message, flags);
    return send_parts(SENDMSG, fd, message->msg_iov, message->msg_iovlen, flags);
}

int EXPORTED(sendmmsg)(int fd, struct mmsghdr *messages, unsigned count, int flags) {
    if (!concerns(fd))
        return real_sendmmsg(fd, messages, count, flags);
    for (unsigned i = 0; i < count; i++) {
        ssize_t result = EXPORTED(sendmsg)(fd, &messages[i].msg_hdr, flags);
        if (result < 0)
            return i > 0 ? (int)i : -1;
        messages[i].msg_len = (unsigned)result;
    }
    return (int)count;
}

ssize_t EXPORTED(sendfile)(int out, int in, off_t *offset, size_t count) {
    if (concerns(in))
        hw_plain(in, BY_OPTION);
    if (!concerns(out) || count == 0)
        return real_sendfile(out, in, offset, count);
    size_t sent = 0;
    while (sent < count) {
        struct plan plan = {0};
        int64_t at = offset != NULL ? *offset : -1;
        int verdict = hw_send_file(out, &plan, in, &at, count - sent);
        if (offset != NULL)
            *offset = at;
        sent += plan.done;
        if (verdict == DONE)
            return (ssize_t)sent;
        if (sent == count)
            break;
        size_t slice = count - sent < plan.limit ? count - sent : plan.limit;
        ssize_t result;
        AROUND(SENDING, &plan, result = real_sendfile(out, in, offset, slice));
        int error = errno;
        hw_sent(&plan, result, 0, error);
        errno = error;
        if (result < 0)
            return sent > 0 ? (ssize_t)sent : -1;
        sent += (size_t)result;
        if ((size_t)result < slice)
            break;
    }
    return (ssize_t)sent;
}

ssize_t EXPORTED(splice)(int in, off_t *in_at, int out, off_t *out_at, size_t bytes, unsigned flags) {
    int from_us = concerns(in), to_us = concerns(out);
    if ((!from_us && !to_us) || bytes == 0)
        return real_splice(in, in_at, out, out_at, bytes, flags);
    struct plan plan = {0};
    ssize_t result;
    if (from_us) {
        // What the lane has goes first; nobody looks for more.
        int verdict = hw_splice_out(in, &plan, out, bytes);
        if (verdict == DONE)
            return (ssize_t)plan.done;
        if (plan.limit < bytes)
            bytes = plan.limit;
        AROUND(RECEIVING, &plan, result = real_splice(in, in_at, out, out_at, bytes, flags));
        int error = errno;
        hw_received(&plan, result, 0);
        errno = error;
        return result;
    }
    hw_send(out, &plan, NULL, 0, 0, 0);
    AROUND(SENDING, &plan, result = real_splice(in, in_at, out, out_at, bytes, flags));
    int error = errno;
    hw_sent(&plan, result, flags & SPLICE_F_MORE ? MSG_MORE : 0, error);
    errno = error;
    return result;
}

// ---- waiting

static int64_t nanoseconds(const struct timespec *limit) {
    if (limit == NULL)
        return -1;
    if (limit->tv_sec > 1000000000)
        return -1;
    return limit->tv_sec * 1000000000LL + limit->tv_nsec;
}

static int any_concern(struct pollfd *fds, nfds_t count) {
    for (nfds_t i = 0; i < count; i++)
        if (fds[i].fd >= 0 && (IS_SOCKET(KIND(fds[i].fd)) || IS_EPOLL(KIND(fds[i].fd))))
            return 1;
    return 0;
}

static int wait_poll(struct pollfd *fds, nfds_t count, int64_t timeout, int ms, const struct timespec *limit,
                     const sigset_t *mask, int with_mask) {
    tidy();
    struct plan none = {0};
    int sleeping = 0;
    int ready = hw_poll(fds, count, timeout, &sleeping);
    if (ready != 0)
        return ready;
    int result;
    if (with_mask) {
        AROUND(WAITING, &none, result = real_ppoll(fds, count, limit, mask));
    } else {
        AROUND(WAITING, &none, result = real_poll(fds, count, ms));
    }
    if (sleeping) {
        int error = errno;
        hw_polled();
        errno = error;
    }
    return result;
}

int EXPORTED(poll)(struct pollfd *fds, nfds_t count, int ms) {
    if (!any_concern(fds, count))
        return real_poll(fds, count, ms);
    return wait_poll(fds, count, ms < 0 ? -1 : ms * 1000000LL, ms, NULL, NULL, 0);
}

int EXPORTED(__poll_chk)(struct pollfd *fds, nfds_t count, int ms, size_t room) {
    (void)room;
    return EXPORTED(poll)(fds, count, ms);
}

int EXPORTED(ppoll)(struct pollfd *fds, nfds_t count, const struct timespec *limit, const sigset_t *mask) {
    if (!any_concern(fds, count))
        return real_ppoll(fds, count, limit, mask);
    return wait_poll(fds, count, nanoseconds(limit), 0, limit, mask, 1);
}

int EXPORTED(__ppoll_chk)(struct pollfd *fds, nfds_t count, const struct timespec *limit, const sigset_t *mask,
                          size_t room) {
    (void)room;
    return EXPORTED(ppoll)(fds, count, limit, mask);
}

// A selection as a list for poll: only the descriptors that concern us and want to be read are asked about.
#define SELECT_MAX 1024
static int wait_select(int count, fd_set *in, fd_set *out, fd_set *except, struct timeval *limit,
                       const struct timespec *exact, const sigset_t *mask, int with_mask) {
    ENSURE(select)
    int used = 0;
    struct pollfd fds[SELECT_MAX];
    int64_t timeout = -1;
    if (with_mask)
        timeout = nanoseconds(exact);
    else if (limit != NULL)
        timeout = limit->tv_sec * 1000000000LL + limit->tv_usec * 1000LL;
    if (in != NULL && count <= SELECT_MAX)
        for (int fd = 0; fd < count && used < SELECT_MAX; fd++)
            if (FD_ISSET(fd, in) && (IS_SOCKET(KIND(fd)) || IS_EPOLL(KIND(fd))))
                fds[used++] = (struct pollfd){fd, POLLIN, 0};
    if (used > 0) {
        tidy();
        int sleeping = 0;
        int ready = hw_poll(fds, used, timeout, &sleeping);
        if (ready > 0) {
            // What else is ready is asked of the kernel, without waiting.
            struct timeval now = {0, 0};
            int result = real_select(count, in, out, except, &now);
            if (result < 0) {
                if (in != NULL)
                    FD_ZERO(in);
                if (out != NULL)
                    FD_ZERO(out);
                if (except != NULL)
                    FD_ZERO(except);
                result = 0;
            }
            for (int i = 0; i < used; i++)
                if ((fds[i].revents & POLLIN) && !FD_ISSET(fds[i].fd, in)) {
                    FD_SET(fds[i].fd, in);
                    result++;
                }
            return result;
        }
        struct plan none = {0};
        int result;
        if (with_mask) {
            AROUND(WAITING, &none, result = real_pselect(count, in, out, except, exact, mask));
        } else {
            AROUND(WAITING, &none, result = real_select(count, in, out, except, limit));
        }
        if (sleeping) {
            int error = errno;
            hw_polled();
            errno = error;
        }
        return result;
    }
    return with_mask ? real_pselect(count, in, out, except, exact, mask) : real_select(count, in, out, except, limit);
}

int EXPORTED(select)(int count, fd_set *in, fd_set *out, fd_set *except, struct timeval *limit) {
    return wait_select(count, in, out, except, limit, NULL, NULL, 0);
}

int EXPORTED(pselect)(int count, fd_set *in, fd_set *out, fd_set *except, const struct timespec *limit,
                      const sigset_t *mask) {
    return wait_select(count, in, out, except, NULL, limit, mask, 1);
}

int EXPORTED(epoll_ctl)(int set, int operation, int fd, struct epoll_event *event) {
    if (likely(IS_EPOLL(KIND(set)) && IS_SOCKET(KIND(fd)) && (event != NULL || operation == EPOLL_CTL_DEL))) {
        int later = hw_epoll_put_off(set, operation, fd, event);
        if (later == 0)
            return 0;
        if (later > 0) {
            errno = later;
            return -1;
        }
    }
    int result = real_epoll_ctl(set, operation, fd, event);
    int error = errno;
    if (result == 0)
        hw_epoll_ctl(set, operation, fd, event);
    errno = error;
    return result;
}

#define WAIT_EPOLL(timeout_ns, call)                                                                                   \
    for (;;) {                                                                                                                                                                                                                     \
        if (likely(!IS_EPOLL(KIND(set))) || most <= 0)                                                                 \
            return call;                                                                                               \
        tidy();                                                                                                        \
        /* Again, where only what is ours was told. */                                                                 \
        struct plan plan = {0};                                                                                        \
        int ready = hw_epoll_wait(set, events, most, timeout_ns, &plan);                                               \
        if (ready != 0)                                                                                                \
            return ready;                                                                                              \
        int result;                                                                                                    \
        AROUND(WAITING_EPOLL, &plan, result = call);                                                                   \
        int error = errno;                                                                                             \
        int told = hw_epoll_waited(&plan, events, result);                                                             \
        errno = error;                                                                                                 \
        if (told != 0 || result <= 0)                                                                                  \
            return told;                                                                                                 \
    }

int EXPORTED(epoll_wait)(int set, struct epoll_event *events, int most, int ms) {
    WAIT_EPOLL(ms < 0 ? -1 : ms * 1000000LL, real_epoll_wait(set, events, most, ms));
}

int EXPORTED(epoll_pwait)(int set, struct epoll_event *events, int most, int ms, const sigset_t *mask) {
    WAIT_EPOLL(ms < 0 ? -1 : ms * 1000000LL, real_epoll_pwait(set, events, most, ms, mask));
}

int EXPORTED(epoll_pwait2)(int set, struct epoll_event *events, int most, const struct timespec *limit,
                           const sigset_t *mask) {
    ENSURE(epoll_pwait2)
    WAIT_EPOLL(nanoseconds(limit), real_epoll_pwait2(set, events, most, limit, mask));
}

int EXPORTED(epoll_create)(int size) {
    if (size <= 0) {
        errno = EINVAL;
        return -1;
    }
    int set = real_epoll_create1(0);
    if (set >= 0)
        hw_forget(set);
    return set;
}

int EXPORTED(epoll_create1)(int flags) {
    int set = real_epoll_create1(flags);
    if (set >= 0)
        hw_forget(set);
    return set;
}

// ---- descriptors

static int is_tcp(int family, int type, int protocol) {
    return (family == AF_INET || family == AF_INET6) && (type & 0xf) == SOCK_STREAM && (protocol == 0 || protocol == 6);
}

int EXPORTED(socket)(int family, int type, int protocol) {
    int fd = real_socket(family, type, protocol);
    if (fd >= 0) {
        int error = errno;
        if (is_tcp(family, type, protocol))
            hw_new_socket(fd, (type & SOCK_NONBLOCK) != 0);
        else
            hw_forget(fd);
        errno = error;
    }
    return fd;
}

int EXPORTED(accept)(int listener, struct sockaddr *name, socklen_t *length) {
    int fd = real_accept(listener, name, length);
    if (fd >= 0) {
        int error = errno;
        if (IS_SOCKET(KIND(listener)))
            hw_new_socket(fd, 0);
        else
            hw_forget(fd);
        errno = error;
    }
    return fd;
}

int EXPORTED(accept4)(int listener, struct sockaddr *name, socklen_t *length, int flags) {
    int fd = real_accept4(listener, name, length, flags);
    if (fd >= 0) {
        int error = errno;
        if (IS_SOCKET(KIND(listener)))
            hw_new_socket(fd, (flags & SOCK_NONBLOCK) != 0);
        else
            hw_forget(fd);
        errno = error;
    }
    return fd;
}

int EXPORTED(connect)(int fd, const struct sockaddr *name, socklen_t length) { return real_connect(fd, name, length); }

int EXPORTED(shutdown)(int fd, int how) {
    int result = real_shutdown(fd, how);
    if (result == 0 && concerns(fd))
        hw_shut_down(fd, how);
    return result;
}

int EXPORTED(close)(int fd) {
    if (unlikely(KIND(fd) > 1))
        hw_closing(fd);
    return real_close(fd);
}

int EXPORTED(close_range)(unsigned first, unsigned last, int flags) {
    if (!(flags & CLOSE_RANGE_CLOEXEC))
        hw_closed_range(first, last);
    return real_close_range(first, last, flags);
}

void EXPORTED(closefrom)(int first) {
    hw_closed_range(first < 0 ? 0 : (unsigned)first, ~0u);
    if (real_closefrom != NULL)
        real_closefrom(first);
}

int EXPORTED(dup)(int fd) {
    int to = real_dup(fd);
    if (to >= 0)
        hw_duplicated(fd, to);
    return to;
}

int EXPORTED(dup2)(int fd, int to) {
    if (KIND(to) > 1 && fd != to && real_fcntl(fd, F_GETFD, NULL) >= 0)
        hw_closing(to);
    int result = real_dup2(fd, to);
    if (result >= 0 && fd != to)
        hw_duplicated(fd, to);
    return result;
}

int EXPORTED(dup3)(int fd, int to, int flags) {
    if (KIND(to) > 1 && fd != to && real_fcntl(fd, F_GETFD, NULL) >= 0)
        hw_closing(to);
    int result = real_dup3(fd, to, flags);
    if (result >= 0)
        hw_duplicated(fd, to);
    return result;
}

int EXPORTED(fcntl)(int fd, int command, void *argument) {
    int result = real_fcntl(fd, command, argument);
    if (result < 0 || KIND(fd) <= 1)
        return result;
    int error = errno;
    switch (command) {
    case F_DUPFD:
    case F_DUPFD_CLOEXEC:
        hw_duplicated(fd, result);
        break;
    case F_SETFL:
        hw_set_nonblocking(fd, ((long)argument & O_NONBLOCK) != 0);
        if ((long)argument & O_ASYNC)
            hw_plain(fd, BY_SIGNAL);
        break;
    case F_SETOWN:
    case F_SETSIG:
        hw_plain(fd, BY_SIGNAL);
        break;
    }
    errno = error;
    return result;
}

int EXPORTED(ioctl)(int fd, unsigned long request, void *argument) {
    int result = real_ioctl(fd, request, argument);
    if (result < 0 || !concerns(fd))
        return result;
    int error = errno;
    if (request == FIONREAD)
        *(int *)argument += (int)hw_unread(fd);
    else if (request == SIOCATMARK && hw_is_before_mark(fd))
        *(int *)argument = 0;
    else if (request == FIONBIO)
        hw_set_nonblocking(fd, *(int *)argument != 0);
    else if (request == FIOASYNC && *(int *)argument != 0)
        hw_plain(fd, BY_SIGNAL);
    errno = error;
    return result;
}

#define TCP_NODELAY_OPTION 1

int EXPORTED(getsockopt)(int fd, int level, int name, void *value, socklen_t *length) {
    int result = real_getsockopt(fd, level, name, value, length);
    if (result == 0 && level == 6 && name == TCP_NODELAY_OPTION && *length >= sizeof(int) && hw_is_combining(fd))
        *(int *)value = 0;
    return result;
}

int EXPORTED(setsockopt)(int fd, int level, int name, const void *value, socklen_t length) {
    if (level == 6 && name == TCP_NODELAY_OPTION && length >= sizeof(int) && value != NULL && concerns(fd) &&
        hw_set_combining(fd, *(const int *)value == 0))
        return 0;
    int result = real_setsockopt(fd, level, name, value, length);
    if (result != 0 || !concerns(fd))
        return result;
    int error = errno;
    int number = length >= sizeof(int) && value != NULL ? *(const int *)value : 0;
    if (level == 6 && name == 3) // TCP_CORK
        hw_corked(fd, number != 0);
    else if (level == SOL_SOCKET && name == SO_RCVLOWAT)
        hw_low_water(fd, number);
    else if (level == SOL_SOCKET && number != 0 &&
             (name == SO_OOBINLINE || name == SO_TIMESTAMP || name == SO_TIMESTAMPNS || name == SO_TIMESTAMPING ||
              name == SO_ZEROCOPY || name == SO_ATTACH_FILTER || name == SO_ATTACH_BPF))
        hw_plain(fd, BY_OPTION);
    else if (level == 6 && (name == 19 || name == 31 || name == 36)) // TCP_REPAIR, TCP_ULP, TCP_INQ
        hw_plain(fd, BY_OPTION);
    errno = error;
    return result;
}

// ---- stdio, which reads and writes inside libc

FILE *EXPORTED(fdopen)(int fd, const char *mode) {
    ENSURE(fdopen)
    if (concerns(fd))
        hw_plain(fd, BY_STDIO);
    return real_fdopen(fd, mode);
}

int EXPORTED(vdprintf)(int fd, const char *format, va_list arguments) {
    ENSURE(vdprintf)
    if (concerns(fd))
        hw_plain(fd, BY_STDIO);
    return real_vdprintf(fd, format, arguments);
}

int EXPORTED(dprintf)(int fd, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int result = EXPORTED(vdprintf)(fd, format, arguments);
    va_end(arguments);
    return result;
}

int EXPORTED(__vdprintf_chk)(int fd, int flag, const char *format, va_list arguments) {
    (void)flag;
    return EXPORTED(vdprintf)(fd, format, arguments);
}

int EXPORTED(__dprintf_chk)(int fd, int flag, const char *format, ...) {
    (void)flag;
    va_list arguments;
    va_start(arguments, format);
    int result = EXPORTED(vdprintf)(fd, format, arguments);
    va_end(arguments);
    return result;
}

// The checked forms of reads: the sizes are libc's business only when they are wrong.
ssize_t EXPORTED(__read_chk)(int fd, void *into, size_t bytes, size_t room) {
    if (bytes > room)
        abort();
    return EXPORTED(read)(fd, into, bytes);
}

ssize_t EXPORTED(__recv_chk)(int fd, void *into, size_t bytes, size_t room, int flags) {
    if (bytes > room)
        abort();
    return EXPORTED(recv)(fd, into, bytes, flags);
}

ssize_t EXPORTED(__recvfrom_chk)(int fd, void *into, size_t bytes, size_t room, int flags, struct sockaddr *from,
                                 socklen_t *length) {
    if (bytes > room)
        abort();
    return EXPORTED(recvfrom)(fd, into, bytes, flags, from, length);
}

// ---- processes

pid_t EXPORTED(fork)(void) {
    ENSURE(fork)
    hw_before_fork();
    pid_t child = real_fork();
    int error = errno;
    hw_after_fork(child);
    errno = error;
    return child;
}

pid_t EXPORTED(_Fork)(void) {
    ENSURE(_Fork)
    if (real__Fork == NULL)
        return EXPORTED(fork)();
    hw_before_fork();
    pid_t child = real__Fork();
    int error = errno;
    hw_after_fork(child);
    errno = error;
    return child;
}

int EXPORTED(clone)(int (*function)(void *), void *stack, int flags, void *argument, ...) {
    ENSURE(clone)
    va_list rest;
    va_start(rest, argument);
    void *a = va_arg(rest, void *), *b = va_arg(rest, void *), *c = va_arg(rest, void *);
    va_end(rest);
    // Threads share everything; others are children, which learn it when they first call a hook.
    if (!(flags & (CLONE_VM | CLONE_FILES)))
        hw_before_fork();
    int child = real_clone(function, stack, flags, argument, a, b, c);
    if (!(flags & (CLONE_VM | CLONE_FILES))) {
        int error = errno;
        hw_after_fork(child);
        errno = error;
    }
    return child;
}

#define BEFORE_EXEC(call)                                                                                              \
    do {                                                                                                               \
        hw_before_exec();                                                                                              \
        return call;                                                                                                   \
    } while (0)

int EXPORTED(execve)(const char *path, char *const arguments[], char *const environment[]) {
    BEFORE_EXEC(real_execve(path, arguments, environment));
}
int EXPORTED(execv)(const char *path, char *const arguments[]) { ENSURE(execv) BEFORE_EXEC(real_execv(path, arguments)); }
int EXPORTED(execvp)(const char *file, char *const arguments[]) { ENSURE(execvp) BEFORE_EXEC(real_execvp(file, arguments)); }
int EXPORTED(execvpe)(const char *file, char *const arguments[], char *const environment[]) {
    ENSURE(execvpe) BEFORE_EXEC(real_execvpe(file, arguments, environment));
}
int EXPORTED(fexecve)(int fd, char *const arguments[], char *const environment[]) {
    ENSURE(fexecve) BEFORE_EXEC(real_fexecve(fd, arguments, environment));
}

// The arguments of execl and its kin as an array on the stack.
#define COLLECT(first)                                                                                                 \
    va_list counting;                                                                                                  \
    va_start(counting, first);                                                                                         \
    size_t count = 1;                                                                                                  \
    while (va_arg(counting, char *) != NULL)                                                                           \
        count++;                                                                                                       \
    va_end(counting);                                                                                                  \
    char **arguments = __builtin_alloca((count + 1) * sizeof *arguments);                                              \
    va_list taking;                                                                                                    \
    va_start(taking, first);                                                                                           \
    arguments[0] = (char *)first;                                                                                      \
    for (size_t i = 1; i <= count; i++)                                                                                \
        arguments[i] = va_arg(taking, char *);

int EXPORTED(execl)(const char *path, const char *first, ...) {
    COLLECT(first)
    va_end(taking);
    return EXPORTED(execv)(path, arguments);
}

int EXPORTED(execlp)(const char *file, const char *first, ...) {
    COLLECT(first)
    va_end(taking);
    return EXPORTED(execvp)(file, arguments);
}

int EXPORTED(execle)(const char *path, const char *first, ...) {
    COLLECT(first)
    char *const *environment = va_arg(taking, char *const *);
    va_end(taking);
    return EXPORTED(execve)(path, arguments, environment);
}

int EXPORTED(posix_spawn)(pid_t *child, const char *path, const posix_spawn_file_actions_t *actions,
                          const posix_spawnattr_t *attributes, char *const arguments[], char *const environment[]) {
    ENSURE(posix_spawn)
    pid_t started = 0;
    hw_before_spawn();
    int result = real_posix_spawn(&started, path, actions, attributes, arguments, environment);
    hw_after_spawn(result == 0 ? started : 0);
    if (child != NULL && result == 0)
        *child = started;
    return result;
}

int EXPORTED(posix_spawnp)(pid_t *child, const char *file, const posix_spawn_file_actions_t *actions,
                           const posix_spawnattr_t *attributes, char *const arguments[], char *const environment[]) {
    ENSURE(posix_spawnp)
    pid_t started = 0;
    hw_before_spawn();
    int result = real_posix_spawnp(&started, file, actions, attributes, arguments, environment);
    hw_after_spawn(result == 0 ? started : 0);
    if (child != NULL && result == 0)
        *child = started;
    return result;
}

// ---- sandboxes: nothing is acquired afterwards

#define CONFINED(changes, call)                                                                                        \
    do {                                                                                                               \
        int confines = changes, result = call;                                                                         \
        if (result == 0 && confines)                                                                                   \
            hw_sandboxed();                                                                                            \
        return result;                                                                                                 \
    } while (0)

int EXPORTED(chroot)(const char *path) { CONFINED(1, real_chroot(path)); }
int EXPORTED(unshare)(int flags) { CONFINED(1, real_unshare(flags)); }
int EXPORTED(setns)(int fd, int type) { CONFINED(1, real_setns(fd, type)); }
int EXPORTED(setuid)(uid_t user) { CONFINED(user != geteuid(), real_setuid(user)); }
int EXPORTED(setgid)(gid_t group) { CONFINED(group != getegid(), real_setgid(group)); }
int EXPORTED(seteuid)(uid_t user) { CONFINED(user != geteuid(), real_seteuid(user)); }
int EXPORTED(setreuid)(uid_t real, uid_t effective) {
    CONFINED(effective != (uid_t)-1 && effective != geteuid(), real_setreuid(real, effective));
}
int EXPORTED(setresuid)(uid_t real, uid_t effective, uid_t saved) {
    CONFINED(effective != (uid_t)-1 && effective != geteuid(), real_setresuid(real, effective, saved));
}
int EXPORTED(prctl)(int option, unsigned long a, unsigned long b, unsigned long c, unsigned long d) {
    if (option == 22) // PR_SET_SECCOMP
        hw_sandboxed();
    return real_prctl(option, a, b, c, d);
}

// ---- system calls by number

long EXPORTED(syscall)(long number, long a, long b, long c, long d, long e, long f) {
    switch (number) {
    case SYS_read:
        return EXPORTED(read)((int)a, (void *)b, (size_t)c);
    case SYS_write:
        return EXPORTED(write)((int)a, (const void *)b, (size_t)c);
    case SYS_readv:
        return EXPORTED(readv)((int)a, (const struct iovec *)b, (int)c);
    case SYS_writev:
        return EXPORTED(writev)((int)a, (const struct iovec *)b, (int)c);
    case SYS_recvfrom:
        return EXPORTED(recvfrom)((int)a, (void *)b, (size_t)c, (int)d, (struct sockaddr *)e, (socklen_t *)f);
    case SYS_sendto:
        return EXPORTED(sendto)((int)a, (const void *)b, (size_t)c, (int)d, (const struct sockaddr *)e, (socklen_t)f);
    case SYS_recvmsg:
        return EXPORTED(recvmsg)((int)a, (struct msghdr *)b, (int)c);
    case SYS_sendmsg:
        return EXPORTED(sendmsg)((int)a, (const struct msghdr *)b, (int)c);
    case SYS_recvmmsg:
        return EXPORTED(recvmmsg)((int)a, (struct mmsghdr *)b, (unsigned)c, (int)d, (struct timespec *)e);
    case SYS_sendmmsg:
        return EXPORTED(sendmmsg)((int)a, (struct mmsghdr *)b, (unsigned)c, (int)d);
    case SYS_sendfile:
        return EXPORTED(sendfile)((int)a, (int)b, (off_t *)c, (size_t)d);
    case SYS_splice:
        return EXPORTED(splice)((int)a, (off_t *)b, (int)c, (off_t *)d, (size_t)e, (unsigned)f);
    case SYS_socket:
        return EXPORTED(socket)((int)a, (int)b, (int)c);
    case SYS_accept4:
        return EXPORTED(accept4)((int)a, (struct sockaddr *)b, (socklen_t *)c, (int)d);
    case SYS_shutdown:
        return EXPORTED(shutdown)((int)a, (int)b);
    case SYS_close:
        return EXPORTED(close)((int)a);
    case SYS_close_range:
        return EXPORTED(close_range)((unsigned)a, (unsigned)b, (int)c);
    case SYS_dup:
        return EXPORTED(dup)((int)a);
    case SYS_dup3:
        return EXPORTED(dup3)((int)a, (int)b, (int)c);
    case SYS_fcntl:
        return EXPORTED(fcntl)((int)a, (int)b, (void *)c);
    case SYS_epoll_ctl:
        return EXPORTED(epoll_ctl)((int)a, (int)b, (int)c, (struct epoll_event *)d);
    case SYS_epoll_pwait:
        return EXPORTED(epoll_pwait)((int)a, (struct epoll_event *)b, (int)c, (int)d, (const sigset_t *)e);
    case SYS_ppoll:
        return EXPORTED(ppoll)((struct pollfd *)a, (nfds_t)b, (const struct timespec *)c, (const sigset_t *)d);
#ifdef SYS_poll
    case SYS_poll:
        return EXPORTED(poll)((struct pollfd *)a, (nfds_t)b, (int)c);
    case SYS_dup2:
        return EXPORTED(dup2)((int)a, (int)b);
    case SYS_accept:
        return EXPORTED(accept)((int)a, (struct sockaddr *)b, (socklen_t *)c);
    case SYS_epoll_wait:
        return EXPORTED(epoll_wait)((int)a, (struct epoll_event *)b, (int)c, (int)d);
    case SYS_fork:
        return EXPORTED(fork)();
#endif
    case SYS_execve:
        return EXPORTED(execve)((const char *)a, (char *const *)b, (char *const *)c);
    case SYS_io_uring_setup:
        hw_ring_made();
        break;
    case SYS_seccomp:
    case SYS_unshare:
    case SYS_setns:
    case SYS_chroot:
    case SYS_setuid:
        hw_sandboxed();
        break;
    }
    if (unlikely(real_syscall == NULL))
        return result_of(raw6(number, a, b, c, d, e, f));
    return real_syscall(number, a, b, c, d, e, f);
}

// liburing makes its system calls itself; that a program uses it shows here.
#define RING(name, ret, params, args)                                                                                  \
    ret EXPORTED(name) params {                                                                                        \
        static ret(*real) params;                                                                                      \
        hw_ring_made();                                                                                                \
        if (real == NULL)                                                                                              \
            real = (ret(*) params)dlsym(RTLD_NEXT, #name);                                                             \
        if (real == NULL)                                                                                              \
            return -ENOSYS;                                                                                            \
        return real args;                                                                                              \
    }
RING(io_uring_queue_init, int, (unsigned a, void *b, unsigned c), (a, b, c))
RING(io_uring_queue_init_params, int, (unsigned a, void *b, void *c), (a, b, c))
RING(io_uring_queue_init_mem, int, (unsigned a, void *b, void *c, void *d, size_t e), (a, b, c, d, e))
RING(io_uring_setup, int, (unsigned a, void *b), (a, b))

// ---- the beginning

#define LOOK_UP(name)                                                                                                  \
    do {                                                                                                               \
        void *found = dlsym(RTLD_NEXT, #name);                                                                         \
        if (found != NULL)                                                                                             \
            *(void **)&real_##name = found;                                                                            \
    } while (0)

__attribute__((constructor)) static void begin(void) {
    static int begun;
    if (begun)
        return;
    begun = 1;
    LOOK_UP(socket); LOOK_UP(accept); LOOK_UP(accept4); LOOK_UP(connect); LOOK_UP(shutdown); LOOK_UP(close);
    LOOK_UP(close_range); LOOK_UP(closefrom); LOOK_UP(dup); LOOK_UP(dup2); LOOK_UP(dup3); LOOK_UP(fcntl);
    LOOK_UP(ioctl); LOOK_UP(read); LOOK_UP(write); LOOK_UP(readv); LOOK_UP(writev); LOOK_UP(preadv2);
    LOOK_UP(pwritev2); LOOK_UP(send); LOOK_UP(sendto); LOOK_UP(sendmsg); LOOK_UP(sendmmsg); LOOK_UP(recv);
    LOOK_UP(recvfrom); LOOK_UP(recvmsg); LOOK_UP(recvmmsg); LOOK_UP(sendfile); LOOK_UP(splice); LOOK_UP(poll);
    LOOK_UP(ppoll); LOOK_UP(select); LOOK_UP(pselect); LOOK_UP(epoll_ctl); LOOK_UP(epoll_wait); LOOK_UP(epoll_pwait);
    LOOK_UP(epoll_pwait2); LOOK_UP(epoll_create1); LOOK_UP(setsockopt); LOOK_UP(getsockopt); LOOK_UP(chroot);
    LOOK_UP(unshare); LOOK_UP(setns); LOOK_UP(execve); LOOK_UP(execv); LOOK_UP(execvp); LOOK_UP(execvpe);
    LOOK_UP(fexecve); LOOK_UP(posix_spawn); LOOK_UP(posix_spawnp); LOOK_UP(clone); LOOK_UP(fdopen);
    LOOK_UP(vdprintf); LOOK_UP(prctl); LOOK_UP(setuid); LOOK_UP(setgid); LOOK_UP(setreuid); LOOK_UP(setresuid);
    LOOK_UP(seteuid); LOOK_UP(fork); LOOK_UP(_Fork); LOOK_UP(syscall);
    hw_real_vfork = (pid_t(*)(void))dlsym(RTLD_NEXT, "vfork");
    hw_begin();
}
