// recv and its kin: the lane and TCP in the order of the stream.
#include "inside.h"
#include "parts.h"

// The call that the program made: what the kernel is asked is the same one, since it may be the only one that is
// allowed.
enum call { READ, READV, RECV, RECVMSG };

static ssize_t ask_to_receive(enum call call, int fd, const struct iovec *parts, int count, int flags,
                              struct plan *plan) {
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
            KEEPING_ERRNO(hw_received(&plan, 0, 0));
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
        KEEPING_ERRNO(hw_received(&plan, result, flags));
        if (result < 0)
            return plan.done > 0 ? (ssize_t)plan.done : -1;
        plan.done += (size_t)result;
        // Short of a bound, there was no more, or the kernel was interrupted, which ends a receive that waits for all of its
        // bytes too; at a bound, what follows comes from the lane.
        int at_bound = (size_t)result == plan.limit && plan.done < total;
        if (result == 0 || plan.done == total || !at_bound || (flags & (MSG_PEEK | MSG_OOB)))
            return (ssize_t)plan.done;
        if (at_bound && !(flags & MSG_WAITALL))
            flags |= MSG_DONTWAIT;
    }
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
    if (!concerns(fd) || !has_bytes(parts, (size_t)count))
        return real_readv(fd, parts, count);
    return receive(READV, fd, parts, count, 0);
}

ssize_t EXPORTED(preadv2)(int fd, const struct iovec *parts, int count, off_t offset, int flags) {
    // The others are for files.
    if (!concerns(fd) || offset != -1 || (flags & ~(RWF_NOWAIT | RWF_HIPRI | RWF_DSYNC | RWF_SYNC)) ||
        !has_bytes(parts, (size_t)count))
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
    if (!concerns(fd)) {
        int received = real_recvmmsg(fd, messages, count, flags, timeout);
        for (int i = 0; i < received; i++)
            if (messages[i].msg_hdr.msg_controllen > 0)
                KEEPING_ERRNO(hw_receives_descriptors(&messages[i].msg_hdr));
        return received;
    }
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
