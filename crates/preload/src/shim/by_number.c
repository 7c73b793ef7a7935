// System calls by number: those that have a hook go there; and io_uring, whose calls nobody sees.
#include "decide.h"
#include "real.h"
#include <dlfcn.h>

// A child with memory of its own.
static long forked(long number, long a, long b, long c, long d, long e, long f) {
    hw_before_fork();
    long child = real_syscall(number, a, b, c, d, e, f);
    KEEPING_ERRNO(hw_after_fork((int)child));
    return child;
}

// Whether a child with these flags is neither a thread nor in this memory.
static int forks(uint64_t flags) { return !(flags & (CLONE_VM | CLONE_FILES)); }

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
    case SYS_pselect6: {
        // A system call has no seventh argument: the sixth points to the mask and its size.
        const sigset_t *const *mask = (const sigset_t *const *)f;
        return EXPORTED(pselect)((int)a, (fd_set *)b, (fd_set *)c, (fd_set *)d, (const struct timespec *)e,
                                 mask != NULL ? *mask : NULL);
    }
#ifdef SYS_epoll_pwait2
    case SYS_epoll_pwait2:
        return EXPORTED(epoll_pwait2)((int)a, (struct epoll_event *)b, (int)c, (const struct timespec *)d,
                                      (const sigset_t *)e);
#endif
    case SYS_preadv2:
        return EXPORTED(preadv2)((int)a, (const struct iovec *)b, (int)c, (off_t)d, (int)f);
    case SYS_pwritev2:
        return EXPORTED(pwritev2)((int)a, (const struct iovec *)b, (int)c, (off_t)d, (int)f);
#ifdef SYS_poll
    case SYS_poll:
        return EXPORTED(poll)((struct pollfd *)a, (nfds_t)b, (int)c);
    case SYS_dup2:
        return EXPORTED(dup2)((int)a, (int)b);
    case SYS_accept:
        return EXPORTED(accept)((int)a, (struct sockaddr *)b, (socklen_t *)c);
    case SYS_epoll_wait:
        return EXPORTED(epoll_wait)((int)a, (struct epoll_event *)b, (int)c, (int)d);
    case SYS_select:
        return EXPORTED(select)((int)a, (fd_set *)b, (fd_set *)c, (fd_set *)d, (struct timeval *)e);
    case SYS_fork:
        return EXPORTED(fork)();
#endif
    case SYS_clone:
        if (forks((uint64_t)a))
            return forked(number, a, b, c, d, e, f);
        break;
    case SYS_clone3:
        // Its arguments are in memory, and begin with the flags.
        if ((size_t)b >= sizeof(uint64_t) && forks(*(const uint64_t *)a))
            return forked(number, a, b, c, d, e, f);
        break;
    case SYS_execve:
        return EXPORTED(execve)((const char *)a, (char *const *)b, (char *const *)c);
    case SYS_execveat:
        return EXPORTED(execveat)((int)a, (const char *)b, (char *const *)c, (char *const *)d, (int)e);
    case SYS_pidfd_getfd:
        return found(real_syscall(number, a, b, c, d, e, f));
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
