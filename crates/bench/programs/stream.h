/* What the programs of measurements share: a clock, and whole messages over a stream socket. */
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <time.h>

/* With errno 0, it is the contents that are wrong. */
static void fail(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, errno ? strerror(errno) : "that is not what was sent");
    exit(1);
}

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void send_all(int connection, const char *bytes, size_t size, int flags)
{
    while (size > 0) {
        ssize_t sent = send(connection, bytes, size, flags | MSG_NOSIGNAL);
        if (sent >= 0) {
            bytes += sent;
            size -= sent;
        } else if (errno != EAGAIN && errno != EINTR) {
            fail("send");
        }
    }
}

/* Up to `size` bytes, at least one. */
static size_t receive_some(int connection, char *bytes, size_t size, int flags)
{
    for (;;) {
        ssize_t received = recv(connection, bytes, size, flags);
        if (received > 0)
            return received;
        if (received == 0) {
            errno = ECONNRESET;
            fail("the other end is gone");
        }
        if (errno != EAGAIN && errno != EINTR)
            fail("recv");
    }
}

static void receive_all(int connection, char *bytes, size_t size, int flags)
{
    while (size > 0) {
        size_t received = receive_some(connection, bytes, size, flags);
        bytes += received;
        size -= received;
    }
}
