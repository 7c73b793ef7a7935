// Where descriptors come from and go to, and what is set of them.
#include "inside.h"
#include <linux/sockios.h>

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
