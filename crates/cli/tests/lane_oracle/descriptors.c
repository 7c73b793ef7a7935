/* Calls that make, copy, close, configure and ask descriptors. */
#define _GNU_SOURCE
#include "oracle.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/timerfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "raw.h"

enum { FRESH_DESCRIPTOR = 200 };

static long set_flags_by(const struct call *call, int descriptor)
{
    int on = (int)call->value;
    if (call->way == SET_NONBLOCK_IOCTL)
        return ioctl(descriptor, FIONBIO, &on);
    int flags = fcntl(descriptor, F_GETFL);
    return fcntl(descriptor, F_SETFL, on ? flags | O_NONBLOCK : flags & ~O_NONBLOCK);
}

void perform_set(const struct call *call, struct outcome *outcome)
{
    int descriptor = descriptor_of(call->slot);
    int number = (int)call->value;
    struct timeval time = {number / 1000000, number % 1000000};
    struct linger linger = {number, 0};
    switch (call->way) {
    case SET_NONBLOCK_FCNTL:
    case SET_NONBLOCK_IOCTL:
        outcome->result = set_flags_by(call, descriptor);
        break;
    case SET_RECEIVE_TIMEOUT_US:
        outcome->result = setsockopt(descriptor, SOL_SOCKET, SO_RCVTIMEO, &time, sizeof time);
        break;
    case SET_SEND_TIMEOUT_US:
        outcome->result = setsockopt(descriptor, SOL_SOCKET, SO_SNDTIMEO, &time, sizeof time);
        break;
    case SET_LOW_WATER:
        outcome->result = setsockopt(descriptor, SOL_SOCKET, SO_RCVLOWAT, &number, sizeof number);
        break;
    case SET_NODELAY:
        outcome->result = setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &number, sizeof number);
        break;
    case SET_CORK:
        outcome->result = setsockopt(descriptor, IPPROTO_TCP, TCP_CORK, &number, sizeof number);
        break;
    case SET_LINGER_RESET:
        outcome->result = setsockopt(descriptor, SOL_SOCKET, SO_LINGER, &linger, sizeof linger);
        break;
    case SET_OUT_OF_BAND_INLINE:
        outcome->result = setsockopt(descriptor, SOL_SOCKET, SO_OOBINLINE, &number, sizeof number);
        break;
    case SET_SEND_BUFFER:
        outcome->result = setsockopt(descriptor, SOL_SOCKET, SO_SNDBUF, &number, sizeof number);
        break;
    case SET_KEEPALIVE:
        outcome->result = setsockopt(descriptor, SOL_SOCKET, SO_KEEPALIVE, &number, sizeof number);
        break;
    default:
        abort();
    }
    outcome->error = errno;
}

static long ask_option(int descriptor, int level, int option, struct outcome *outcome)
{
    int value = 0;
    socklen_t length = sizeof value;
    long result = getsockopt(descriptor, level, option, &value, &length);
    note(outcome, " value=%d length=%u", value, length);
    return result;
}

static long ask_number(int descriptor, unsigned long request, struct outcome *outcome)
{
    int value = -1;
    long result = ioctl(descriptor, request, &value);
    if (request == FIONREAD && fault(5))
        value++;
    note(outcome, " value=%d", value);
    return result;
}

void perform_ask(const struct call *call, struct outcome *outcome)
{
    int descriptor = descriptor_of(call->slot);
    struct sockaddr_storage name = {0};
    socklen_t length = sizeof name;
    struct tcp_info info = {0};
    struct timeval time = {0};
    errno = 0;
    switch (call->way) {
    case ASK_UNREAD:
        outcome->result = ask_number(descriptor, FIONREAD, outcome);
        break;
    case ASK_OUTSTANDING:
        outcome->result = ask_number(descriptor, SIOCOUTQ, outcome);
        break;
    case ASK_AT_MARK:
        outcome->result = ask_number(descriptor, SIOCATMARK, outcome);
        break;
    case ASK_ERROR:
        outcome->result = ask_option(descriptor, SOL_SOCKET, SO_ERROR, outcome);
        break;
    case ASK_LOW_WATER:
        outcome->result = ask_option(descriptor, SOL_SOCKET, SO_RCVLOWAT, outcome);
        break;
    case ASK_TYPE:
        outcome->result = ask_option(descriptor, SOL_SOCKET, SO_TYPE, outcome);
        break;
    case ASK_RECEIVE_TIMEOUT:
        length = sizeof time;
        outcome->result = getsockopt(descriptor, SOL_SOCKET, SO_RCVTIMEO, &time, &length);
        note(outcome, " value=%ld.%06ld", (long)time.tv_sec, (long)time.tv_usec);
        break;
    case ASK_STATE:
        length = sizeof info;
        outcome->result = getsockopt(descriptor, IPPROTO_TCP, TCP_INFO, &info, &length);
        note(outcome, " state=%d", info.tcpi_state);
        break;
    case ASK_PEER_NAME:
    case ASK_OWN_NAME:
        outcome->result = call->way == ASK_PEER_NAME ? getpeername(descriptor, (struct sockaddr *)&name, &length)
                                                     : getsockname(descriptor, (struct sockaddr *)&name, &length);
        /* Ports differ from run to run. */
        note(outcome, " family=%d length=%u port=%s", name.ss_family, length,
             ((struct sockaddr_in *)&name)->sin_port ? "some" : "none");
        break;
    case ASK_FLAGS:
        outcome->result = fcntl(descriptor, F_GETFL);
        break;
    case ASK_DESCRIPTOR_FLAGS:
        outcome->result = fcntl(descriptor, F_GETFD);
        break;
    default:
        abort();
    }
    outcome->error = errno;
}

void perform_duplicate(const struct call *call, struct outcome *outcome)
{
    int descriptor = descriptor_of(call->slot);
    int fresh = FRESH_DESCRIPTOR + call->other;
    int result = -1;
    switch (call->way) {
    case BY_DUP:
        result = dup(descriptor);
        break;
    case BY_DUP2:
        result = dup2(descriptor, fresh);
        break;
    case BY_DUP3:
        result = dup3(descriptor, fresh, O_CLOEXEC);
        break;
    case BY_DUPFD:
        result = fcntl(descriptor, F_DUPFD, FRESH_DESCRIPTOR / 2);
        break;
    case BY_DUPFD_CLOEXEC:
        result = fcntl(descriptor, F_DUPFD_CLOEXEC, FRESH_DESCRIPTOR / 2);
        break;
    }
    outcome->result = result;
    outcome->error = errno;
    remember_descriptor(call->other, result);
}

void perform_close(const struct call *call, struct outcome *outcome)
{
    int descriptor = descriptor_of(call->slot);
    switch (call->way) {
    case BY_CLOSE:
        outcome->result = close(descriptor);
        break;
    case BY_CLOSE_RANGE:
        outcome->result = close_range((unsigned)descriptor, (unsigned)descriptor, 0);
        break;
    case BY_CLOSEFROM:
        closefrom(descriptor);
        break;
    case BY_DUP2_OVER:
        outcome->result = dup2(call->other >= 0 ? descriptor_of(call->other) : any_other_descriptor(), descriptor);
        note(outcome, " then=%d", close(descriptor));
        break;
    }
    outcome->error = errno;
    remember_descriptor(call->slot, -1);
}

static socklen_t loopback(struct sockaddr_storage *name, bool six, int port)
{
    memset(name, 0, sizeof *name);
    if (six) {
        *(struct sockaddr_in6 *)name = (struct sockaddr_in6){
            .sin6_family = AF_INET6, .sin6_port = htons((uint16_t)port), .sin6_addr = IN6ADDR_LOOPBACK_INIT};
        return sizeof(struct sockaddr_in6);
    }
    *(struct sockaddr_in *)name = (struct sockaddr_in){
        .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    return sizeof(struct sockaddr_in);
}

void perform_listen(const struct call *call, struct outcome *outcome)
{
    struct sockaddr_storage name;
    bool six = call->flags & 2;
    socklen_t length = loopback(&name, six, 0);
    int descriptor = socket(six ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    remember_descriptor(call->slot, descriptor);
    outcome->result = -1;
    if (bind(descriptor, (struct sockaddr *)&name, length) == 0 && listen(descriptor, 8) == 0 &&
        getsockname(descriptor, (struct sockaddr *)&name, &length) == 0)
        outcome->result = ntohs(((struct sockaddr_in *)&name)->sin_port);
    outcome->error = errno;
}

void perform_connect(const struct call *call, struct outcome *outcome)
{
    struct sockaddr_storage name;
    bool six = call->flags & 2, nonblocking = call->flags & 1;
    socklen_t length = loopback(&name, six, (int)call->value);
    int descriptor = socket(six ? AF_INET6 : AF_INET, SOCK_STREAM | (nonblocking ? SOCK_NONBLOCK : 0), 0);
    remember_descriptor(call->slot, descriptor);
    int result = connect(descriptor, (struct sockaddr *)&name, length);
    if (nonblocking) {
        note(outcome, " connect=%d errno=%d", result, errno);
        struct pollfd watch = {descriptor, POLLOUT, 0};
        result = poll(&watch, 1, 2000);
        note(outcome, " poll=%d revents=%x", result, watch.revents);
        ask_option(descriptor, SOL_SOCKET, SO_ERROR, outcome);
        fcntl(descriptor, F_SETFL, fcntl(descriptor, F_GETFL) & ~O_NONBLOCK);
    }
    outcome->result = descriptor;
    outcome->error = errno;
}

void perform_pipe(const struct call *call, struct outcome *outcome)
{
    int both[2];
    outcome->result = pipe2(both, O_NONBLOCK);
    remember_descriptor(call->slot, both[0]);
    remember_descriptor(call->other, both[1]);
}

static int listen_anywhere(void)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int descriptor = socket(AF_INET, SOCK_STREAM, 0);
    if (descriptor < 0 || bind(descriptor, (struct sockaddr *)&address, sizeof address) != 0 || listen(descriptor, 4) != 0)
        abort();
    return descriptor;
}

static int call_at(int listener)
{
    struct sockaddr_in address;
    socklen_t length = sizeof address;
    int descriptor = socket(AF_INET, SOCK_STREAM, 0);
    if (getsockname(listener, (struct sockaddr *)&address, &length) != 0 ||
        connect(descriptor, (struct sockaddr *)&address, length) != 0)
        abort();
    return descriptor;
}

static void raise_other(int kind, int descriptor)
{
    uint64_t one = 1;
    struct itimerspec soon = {.it_value.tv_nsec = 1};
    struct pollfd readable = {descriptor, POLLIN, 0};
    if (kind == OTHER_EVENT && write(descriptor, &one, sizeof one) != sizeof one)
        abort();
    if (kind == OTHER_TIMER && timerfd_settime(descriptor, 0, &soon, NULL) != 0)
        abort();
    if (kind == OTHER_LISTENER)
        close(call_at(descriptor));
    /* Not by libc: it is the others' waits that are compared. */
    struct timespec limit = {2, 0};
    if (raw6(SYS_ppoll, (long)&readable, 1, (long)&limit, 0, 0, 0) != 1)
        abort();
}

void perform_other(const struct call *call, struct outcome *outcome)
{
    int descriptor = descriptor_of(call->slot);
    char bytes[8];
    if (call->kind == KIND_OTHER_MAKE) {
        descriptor = call->way == OTHER_EVENT ? eventfd(0, EFD_NONBLOCK)
                   : call->way == OTHER_TIMER ? timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK) : listen_anywhere();
        if (descriptor < 0)
            abort();
        remember_descriptor(call->slot, descriptor);
    } else if (call->kind == KIND_OTHER_RAISE) {
        raise_other(call->way, descriptor);
    } else if (call->way == OTHER_LISTENER) {
        close(accept(descriptor, NULL, NULL));
    } else {
        outcome->result = read(descriptor, bytes, sizeof bytes);
        outcome->error = errno;
    }
}
