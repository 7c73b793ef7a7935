// send and its kin: by the lane if somebody looks, by TCP otherwise.
#include "inside.h"
#include "parts.h"
#include <limits.h>

// The call that the program made: what the kernel is asked is the same one, since it may be the only one that is
// allowed.
enum call { WRITE, WRITEV, SEND, SENDMSG, LIMITED };

// Milliseconds that a send may still wait; less than zero without a limit.
static int left(const struct plan *plan) {
    if (plan->deadline == 0 || plan->deadline == NEVER)
        return -1;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    uint64_t time = (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
    uint64_t milliseconds = plan->deadline > time ? (plan->deadline - time + 999999) / 1000000 : 0;
    return milliseconds < INT_MAX ? (int)milliseconds : INT_MAX;
}

// A send that has waited before, for the time that is left: the kernel would count all of it anew.
static ssize_t send_in_time(int fd, const struct msghdr *message, int flags, struct plan *plan) {
    for (;;) {
        ssize_t result;
        AROUND(SENDING, plan, result = real_sendmsg(fd, message, flags | MSG_DONTWAIT));
        int rest = left(plan);
        if (result >= 0 || errno != EAGAIN || rest <= 0)
            return result;
        struct pollfd room = {fd, POLLOUT, 0};
        int ready;
        AROUND(SENDING, plan, ready = real_poll(&room, 1, rest));
        if (ready < 0)
            return -1;
    }
}

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
        int limited = left(&plan) >= 0;
        switch (limited ? LIMITED : call) {
        case LIMITED:
            result = send_in_time(fd, &message, flags, &plan);
            break;
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
        KEEPING_ERRNO(hw_sent(&plan, result, flags, errno));
        if (result < 0)
            return plan.done > 0 ? (ssize_t)plan.done : -1;
        plan.done += (size_t)result;
        // What the kernel has not taken in time it does not take.
        int waits_on = limited && left(&plan) > 0;
        if (((size_t)result < plan.limit && !waits_on) || plan.done == total)
            return (ssize_t)plan.done;
    }
}

// BY_KERNEL(fd, flags, result, call): a send that only the kernel understands, counted all the same.
#define BY_KERNEL(fd, flags, result, call)                                                                             \
    do {                                                                                                               \
        struct plan plan = {0};                                                                                        \
        hw_send(fd, &plan, NULL, 0, flags, 0);                                                                         \
        AROUND(SENDING, &plan, result = call);                                                                         \
        KEEPING_ERRNO(hw_sent(&plan, result, flags, errno));                                                           \
    } while (0)

ssize_t EXPORTED(write)(int fd, const void *from, size_t bytes) {
    if (!concerns(fd) || bytes == 0)
        return real_write(fd, from, bytes);
    struct iovec part = {(void *)from, bytes};
    return send_parts(WRITE, fd, &part, 1, 0);
}

ssize_t EXPORTED(writev)(int fd, const struct iovec *parts, int count) {
    if (!concerns(fd) || !has_bytes(parts, (size_t)count))
        return real_writev(fd, parts, count);
    return send_parts(WRITEV, fd, parts, count, 0);
}

ssize_t EXPORTED(pwritev2)(int fd, const struct iovec *parts, int count, off_t offset, int flags) {
    if (!concerns(fd) || offset != -1 || !has_bytes(parts, (size_t)count))
        return real_pwritev2(fd, parts, count, offset, flags);
    if (flags & ~RWF_NOWAIT) {
        ssize_t result;
        BY_KERNEL(fd, 0, result, real_pwritev2(fd, parts, count, offset, flags));
        return result;
    }
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
    // A stream has its address; another one means something only to who has none yet.
    if (!concerns(fd) || bytes == 0 || (flags & MSG_FASTOPEN))
        return real_sendto(fd, from, bytes, flags, to, length);
    return EXPORTED(send)(fd, from, bytes, flags);
}

ssize_t EXPORTED(sendmsg)(int fd, const struct msghdr *message, int flags) {
    if (message != NULL && message->msg_controllen > 0)
        hw_passes_descriptors(message);
    if (!concerns(fd) || message == NULL || (flags & MSG_FASTOPEN) ||
        !has_bytes(message->msg_iov, message->msg_iovlen))
        return real_sendmsg(fd, message, flags);
    if (message->msg_controllen > 0) {
        ssize_t result;
        BY_KERNEL(fd, flags, result, real_sendmsg(fd, message, flags));
        return result;
    }
    return send_parts(SENDMSG, fd, message->msg_iov, message->msg_iovlen, flags);
}

int EXPORTED(sendmmsg)(int fd, struct mmsghdr *messages, unsigned count, int flags) {
    if (!concerns(fd)) {
        // The kernel takes no more at once.
        for (unsigned i = 0; messages != NULL && i < count && i < PARTS_MAX; i++)
            if (messages[i].msg_hdr.msg_controllen > 0)
                hw_passes_descriptors(&messages[i].msg_hdr);
        return real_sendmmsg(fd, messages, count, flags);
    }
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
    uint64_t deadline = 0;
    while (sent < count) {
        struct plan plan = {.deadline = deadline};
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
        ssize_t result = -1;
        deadline = plan.deadline;
        if (left(&plan) == 0)
            errno = EAGAIN;
        else
            AROUND(SENDING, &plan, result = real_sendfile(out, in, offset, slice));
        KEEPING_ERRNO(hw_sent(&plan, result, 0, errno));
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
    ssize_t result;
    while (from_us) {
        // What the lane has goes first; nobody looks for more.
        struct plan plan = {0};
        int verdict = hw_splice_out(in, &plan, out, bytes, (flags & SPLICE_F_NONBLOCK) != 0);
        if (verdict == DONE)
            return (ssize_t)plan.done;
        if (verdict == FAILED) {
            errno = plan.error;
            return -1;
        }
        if (verdict == WAIT) {
            struct pollfd room = {out, POLLOUT, 0};
            if (real_poll(&room, 1, -1) < 0)
                return -1;
            continue;
        }
        if (plan.limit < bytes)
            bytes = plan.limit;
        AROUND(RECEIVING, &plan, result = real_splice(in, in_at, out, out_at, bytes, flags));
        KEEPING_ERRNO(hw_received(&plan, result, 0));
        return result;
    }
    BY_KERNEL(out, flags & SPLICE_F_MORE ? MSG_MORE : 0, result, real_splice(in, in_at, out, out_at, bytes, flags));
    return result;
}
