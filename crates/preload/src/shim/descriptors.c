// Where descriptors come from and go to, and what is set of them.
#include "inside.h"
#include <linux/sockios.h>

static int is_tcp(int family, int type, int protocol) {
    return (family == AF_INET || family == AF_INET6) && (type & 0xf) == SOCK_STREAM && (protocol == 0 || protocol == 6);
}

// The kernel has given a descriptor: whatever had its number before is gone.
static int opened(int fd, int is_ours, int nonblocking) {
    if (fd >= 0)
        KEEPING_ERRNO(is_ours ? hw_new_socket(fd, nonblocking) : hw_forget(fd));
    return fd;
}

int EXPORTED(socket)(int family, int type, int protocol) {
    int fd = real_socket(family, type, protocol);
    return opened(fd, is_tcp(family, type, protocol), (type & SOCK_NONBLOCK) != 0);
}

int EXPORTED(accept)(int listener, struct sockaddr *name, socklen_t *length) {
    int is_ours = concerns(listener);
    return opened(real_accept(listener, name, length), is_ours, 0);
}

int EXPORTED(accept4)(int listener, struct sockaddr *name, socklen_t *length, int flags) {
    int is_ours = concerns(listener);
    return opened(real_accept4(listener, name, length, flags), is_ours, (flags & SOCK_NONBLOCK) != 0);
}

// A descriptor of another process: whatever it is.
int found(int fd) {
    if (fd >= 0)
        KEEPING_ERRNO(hw_unknown(fd));
    return fd;
}

int EXPORTED(pidfd_getfd)(int process, int fd, unsigned flags) { return found(real_pidfd_getfd(process, fd, flags)); }

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
    ENSURE(closefrom)
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

// A descriptor that is about to become a duplicate is closed by that, if there is anything to duplicate.
static void replaced(int to, int fd) {
    if (KIND(to) > 1 && fd != to && real_fcntl(fd, F_GETFD, NULL) >= 0)
        hw_closing(to);
}

int EXPORTED(dup2)(int fd, int to) {
    replaced(to, fd);
    int result = real_dup2(fd, to);
    if (result >= 0 && fd != to)
        hw_duplicated(fd, to);
    return result;
}

int EXPORTED(dup3)(int fd, int to, int flags) {
    replaced(to, fd);
    int result = real_dup3(fd, to, flags);
    if (result >= 0)
        hw_duplicated(fd, to);
    return result;
}

static void note_command(int fd, int command, void *argument, int result) {
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
}

// A child in its parent's memory has a descriptor that exec does not close.
static void keeps(int fd) {
    if (hw_is_foreign())
        hw_handed(fd);
}

int EXPORTED(fcntl)(int fd, int command, void *argument) {
    int result = real_fcntl(fd, command, argument);
    if (result < 0)
        return result;
    // A duplicate of a descriptor that is not known yet is not known either.
    if (KIND(fd) > 1 || (KIND(fd) == 0 && (command == F_DUPFD || command == F_DUPFD_CLOEXEC)))
        KEEPING_ERRNO(note_command(fd, command, argument, result));
    else if (unlikely(hw_spawning != 0) &&
             (command == F_DUPFD || command == F_DUPFD_CLOEXEC || (command == F_SETFD && !((long)argument & FD_CLOEXEC))))
        keeps(fd);
    return result;
}

static void note_request(int fd, unsigned long request, void *argument) {
    if (request == FIONREAD)
        *(int *)argument += (int)hw_unread(fd);
    else if (request == SIOCATMARK && hw_is_before_mark(fd))
        *(int *)argument = 0;
    else if (request == FIONBIO)
        hw_set_nonblocking(fd, *(int *)argument != 0);
    else if (request == FIOASYNC && *(int *)argument != 0)
        hw_plain(fd, BY_SIGNAL);
}

int EXPORTED(ioctl)(int fd, unsigned long request, void *argument) {
    int result = real_ioctl(fd, request, argument);
    if (result >= 0 && concerns(fd))
        KEEPING_ERRNO(note_request(fd, request, argument));
    else if (unlikely(hw_spawning != 0) && result >= 0 && request == FIONCLEX)
        keeps(fd);
    return result;
}

#define TCP_NODELAY_OPTION 1

int EXPORTED(getsockopt)(int fd, int level, int name, void *value, socklen_t *length) {
    int result = real_getsockopt(fd, level, name, value, length);
    if (result == 0 && level == 6 && name == TCP_NODELAY_OPTION && *length >= sizeof(int) && concerns(fd) &&
        hw_is_combining(fd))
        *(int *)value = 0;
    return result;
}

static void note_option(int fd, int level, int name, int number) {
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
}

int EXPORTED(setsockopt)(int fd, int level, int name, const void *value, socklen_t length) {
    int has_number = length >= sizeof(int) && value != NULL;
    if (level == 6 && name == TCP_NODELAY_OPTION && has_number && concerns(fd) &&
        hw_set_combining(fd, *(const int *)value == 0))
        return 0;
    int result = real_setsockopt(fd, level, name, value, length);
    if (result == 0 && concerns(fd))
        KEEPING_ERRNO(note_option(fd, level, name, has_number ? *(const int *)value : 0));
    return result;
}
