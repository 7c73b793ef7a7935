// poll, select and epoll: readiness is the kernel's, and the lanes' is added.
#include "inside.h"
#include <signal.h>
#include <string.h>

static int64_t nanoseconds(const struct timespec *limit) {
    if (limit == NULL)
        return -1;
    if (limit->tv_sec > 1000000000)
        return -1;
    return limit->tv_sec * 1000000000LL + limit->tv_nsec;
}

// Connections and sets. Who sleeps on one that was inherited is known to who then reads it.
static int is_watched_here(int fd) {
    if (fd >= 0 && unlikely(IS_NEW_SET(KIND(fd))))
        KEEPING_ERRNO(hw_epoll_seen(fd));
    return fd >= 0 && (concerns(fd) || IS_EPOLL(KIND(fd)));
}

// A signal that only this wait lets in. A wait that lanes answer never sleeps, so that the signal would never come: it is
// let in before, by a wait for nothing, and ends the call. What is ready is told by the next one, of which nothing was
// taken yet.
static int is_interrupted(const sigset_t *mask) {
    sigset_t pending;
    if (mask == NULL || !hw_may_ask_for_signals() || sigpending(&pending) != 0)
        return 0;
    int waits = 0;
    for (int number = 1; number < _NSIG && !waits; number++)
        waits = sigismember(&pending, number) == 1 && sigismember(mask, number) == 0;
    const struct timespec moment = {0, 1};
    return waits && real_ppoll(NULL, 0, &moment, mask) < 0 && errno == EINTR;
}

// Each is looked at: one that was inherited may be behind one that is known.
static int any_concern(struct pollfd *fds, nfds_t count) {
    int any = 0;
    for (nfds_t i = 0; i < count; i++)
        any |= is_watched_here(fds[i].fd);
    return any;
}

static int wait_poll(struct pollfd *fds, nfds_t count, int64_t timeout, int ms, const struct timespec *limit,
                     const sigset_t *mask, int with_mask) {
    tidy();
    if (with_mask && timeout != 0 && is_interrupted(mask))
        return -1;
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
    if (sleeping)
        KEEPING_ERRNO(hw_polled());
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

static int select_now(int count, fd_set *in, fd_set *out, fd_set *except) {
    struct timeval now = {0, 0};
    int result = real_select(count, in, out, except, &now);
    if (result >= 0)
        return result;
    if (in != NULL)
        FD_ZERO(in);
    if (out != NULL)
        FD_ZERO(out);
    if (except != NULL)
        FD_ZERO(except);
    return 0;
}

// Of those that want to be read, the descriptors that concern us are asked about. Larger sets than libc's are the kernel's.
#define SELECT_MAX 1024
static int wait_select(int count, fd_set *in, fd_set *out, fd_set *except, struct timeval *limit,
                       const struct timespec *exact, const sigset_t *mask, int with_mask) {
    ENSURE(select)
    uint64_t asked[SELECT_MAX / 64] = {0};
    int used = 0;
    if (in != NULL && count <= SELECT_MAX)
        for (int fd = 0; fd < count; fd++)
            if (FD_ISSET(fd, in) && is_watched_here(fd)) {
                asked[fd / 64] |= 1ull << (fd % 64);
                used++;
            }
    if (used == 0)
        return with_mask ? real_pselect(count, in, out, except, exact, mask)
                         : real_select(count, in, out, except, limit);
    int64_t timeout = -1;
    if (with_mask)
        timeout = nanoseconds(exact);
    else if (limit != NULL)
        timeout = limit->tv_sec * 1000000000LL + limit->tv_usec * 1000LL;
    tidy();
    if (with_mask && timeout != 0 && is_interrupted(mask))
        return -1;
    int sleeping = 0, result;
    while (hw_select(asked, (count + 63) / 64, timeout, &sleeping)) {
        // What else is ready is asked of the kernel, without waiting.
        fd_mask was[3][SELECT_MAX / (8 * sizeof(fd_mask))];
        fd_set *sets[] = {in, out, except};
        size_t bytes = (count + 8 * sizeof(fd_mask) - 1) / (8 * sizeof(fd_mask)) * sizeof(fd_mask);
        for (int i = 0; i < 3; i++)
            if (sets[i] != NULL)
                memcpy(was[i], sets[i], bytes);
        result = select_now(count, in, out, except);
        for (int fd = 0; fd < count; fd++)
            if ((asked[fd / 64] >> (fd % 64) & 1) && !FD_ISSET(fd, in) && hw_is_ready(fd)) {
                FD_SET(fd, in);
                result++;
            }
        if (result > 0)
            return result;
        // Another thread has taken it: the sets are as they were.
        for (int i = 0; i < 3; i++)
            if (sets[i] != NULL)
                memcpy(sets[i], was[i], bytes);
    }
    struct plan none = {0};
    if (with_mask) {
        AROUND(WAITING, &none, result = real_pselect(count, in, out, except, exact, mask));
    } else {
        AROUND(WAITING, &none, result = real_select(count, in, out, except, limit));
    }
    if (sleeping)
        KEEPING_ERRNO(hw_polled());
    return result;
}

int EXPORTED(select)(int count, fd_set *in, fd_set *out, fd_set *except, struct timeval *limit) {
    return wait_select(count, in, out, except, limit, NULL, NULL, 0);
}

int EXPORTED(pselect)(int count, fd_set *in, fd_set *out, fd_set *except, const struct timespec *limit,
                      const sigset_t *mask) {
    return wait_select(count, in, out, except, NULL, limit, mask, 1);
}

int EXPORTED(epoll_ctl)(int set, int operation, int fd, struct epoll_event *event) {
    // One that was inherited is watched with its lane.
    int is_ours = concerns(fd);
    if (likely(IS_EPOLL(KIND(set)) && is_ours && (event != NULL || operation == EPOLL_CTL_DEL))) {
        int later = hw_epoll_put_off(set, operation, fd, event);
        if (later == 0)
            return 0;
        if (later > 0) {
            errno = later;
            return -1;
        }
    }
    int result = real_epoll_ctl(set, operation, fd, event);
    if (result == 0)
        KEEPING_ERRNO(hw_epoll_ctl(set, operation, fd, event));
    return result;
}

#define WAIT_EPOLL(timeout_ns, mask, call)                                                                                  \
    for (;;) {                                                                                                         \
        if (unlikely(!IS_EPOLL(KIND(set))))                                                                            \
            KEEPING_ERRNO(hw_epoll_seen(set));                                                                         \
        if (unlikely(!IS_EPOLL(KIND(set))) || most <= 0)                                                               \
            return call;                                                                                               \
        tidy();                                                                                                        \
        if ((timeout_ns) != 0 && is_interrupted(mask))                                                                 \
            return -1;                                                                                                 \
        /* Again, where only what is ours was told. */                                                                 \
        struct plan plan = {0};                                                                                        \
        int ready = hw_epoll_wait(set, events, most, timeout_ns, &plan);                                               \
        if (ready != 0)                                                                                                \
            return ready;                                                                                              \
        int result, told;                                                                                              \
        AROUND(plan.limit ? WAITING_EPOLL : ASKING_EPOLL, &plan, result = call);                                                                   \
        KEEPING_ERRNO(told = hw_epoll_waited(&plan, events, result));                                                  \
        if (told != 0 || result <= 0)                                                                                  \
            return told;                                                                                               \
    }

int EXPORTED(epoll_wait)(int set, struct epoll_event *events, int most, int ms) {
    WAIT_EPOLL(ms < 0 ? -1 : ms * 1000000LL, NULL, real_epoll_wait(set, events, most, ms));
}

int EXPORTED(epoll_pwait)(int set, struct epoll_event *events, int most, int ms, const sigset_t *mask) {
    WAIT_EPOLL(ms < 0 ? -1 : ms * 1000000LL, mask, real_epoll_pwait(set, events, most, ms, mask));
}

int EXPORTED(epoll_pwait2)(int set, struct epoll_event *events, int most, const struct timespec *limit,
                           const sigset_t *mask) {
    ENSURE(epoll_pwait2)
    WAIT_EPOLL(nanoseconds(limit), mask, real_epoll_pwait2(set, events, most, limit, mask));
}

int EXPORTED(epoll_create1)(int flags) {
    int set = real_epoll_create1(flags);
    if (set >= 0)
        hw_epoll_made(set);
    return set;
}

int EXPORTED(epoll_create)(int size) {
    if (size > 0)
        return EXPORTED(epoll_create1)(0);
    errno = EINVAL;
    return -1;
}
