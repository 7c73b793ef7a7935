/* What all programs of these tests have in common: two roles, a server and a client, that know nothing of Highwire, and a
 * stream of bytes in which every byte tells where it belongs.
 *
 *     PROGRAM SCENARIO server          listens, prints "port N", plays
 *     PROGRAM SCENARIO client PORT …   connects and plays
 *
 * What a role prints is the same in every run, under Highwire or not; the test compares. Lines that begin with "hold" are for
 * the test itself: the process waits there, its sockets open, until its standard input ends. */
#ifndef LANE_H
#define LANE_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

struct scenario {
    const char *name;
    void (*server)(int listener);
    void (*client)(int port);
};

/* One end of a connection, and how far both of its streams are. */
struct wire {
    int fd;
    unsigned out, in; /* which streams: the client writes 2n, the server 2n + 1 */
    uint64_t sent, got;
};

static int argument_count;
static char **arguments;

__attribute__((noreturn, format(printf, 1, 2), unused)) static void die(const char *format, ...) {
    int error = errno;
    va_list list;
    va_start(list, format);
    fprintf(stderr, "%s %s: ", argument_count > 1 ? arguments[1] : "?", argument_count > 2 ? arguments[2] : "?");
    vfprintf(stderr, format, list);
    fprintf(stderr, " (errno %d: %s)\n", error, strerror(error));
    va_end(list);
    fflush(stdout);
    _exit(1);
}

#define CHECK(condition) \
    do { \
        if (!(condition)) die("%s:%d: not so: %s", __FILE__, __LINE__, #condition); \
    } while (0)

/* A prime number of bytes, so that no power of two maps one offset to another; long enough that a chunk is one copy. */
#define PATTERN_PERIOD 1048573u
#define CHUNK_MAX (1u << 18)
static unsigned char pattern_table[PATTERN_PERIOD + CHUNK_MAX];

__attribute__((constructor)) static void fill_pattern(void) {
    uint64_t state = 0x9e3779b97f4a7c15u;
    for (size_t at = 0; at < PATTERN_PERIOD; at++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        pattern_table[at] = (unsigned char)(state >> 56);
    }
    memcpy(pattern_table + PATTERN_PERIOD, pattern_table, CHUNK_MAX);
}

static inline const unsigned char *pattern(unsigned stream, uint64_t offset) {
    return pattern_table + (offset + (uint64_t)stream * 104729u) % PATTERN_PERIOD;
}

__attribute__((unused)) static void sleep_us(long us) {
    struct timespec pause = {us / 1000000, us % 1000000 * 1000};
    while (nanosleep(&pause, &pause) < 0 && errno == EINTR) {}
}

__attribute__((unused)) static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec / 1e9;
}

__attribute__((unused)) static struct wire server_end(int fd, unsigned number) {
    return (struct wire){.fd = fd, .out = 2 * number + 1, .in = 2 * number};
}

__attribute__((unused)) static struct wire client_end(int fd, unsigned number) {
    return (struct wire){.fd = fd, .out = 2 * number, .in = 2 * number + 1};
}

__attribute__((unused)) static int listen_on(int port, int options) {
    int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    CHECK(fd >= 0);
    CHECK(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) == 0);
    if (options) CHECK(setsockopt(fd, SOL_SOCKET, options, &one, sizeof one) == 0);
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    CHECK(bind(fd, (struct sockaddr *)&address, sizeof address) == 0);
    CHECK(listen(fd, 1024) == 0);
    return fd;
}

__attribute__((unused)) static int port_of(int fd) {
    struct sockaddr_in address;
    socklen_t length = sizeof address;
    CHECK(getsockname(fd, (struct sockaddr *)&address, &length) == 0);
    return ntohs(address.sin_port);
}

__attribute__((unused)) static int connect_to(int port) {
    int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    CHECK(fd >= 0);
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    CHECK(connect(fd, (struct sockaddr *)&address, sizeof address) == 0);
    CHECK(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one) == 0);
    return fd;
}

__attribute__((unused)) static int accept_one(int listener) {
    int fd, one = 1;
    while ((fd = accept(listener, NULL, NULL)) < 0) CHECK(errno == EINTR);
    CHECK(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one) == 0);
    return fd;
}

__attribute__((unused)) static void set_nonblocking(int fd, int on) {
    int flags = fcntl(fd, F_GETFL);
    CHECK(flags >= 0 && fcntl(fd, F_SETFL, on ? flags | O_NONBLOCK : flags & ~O_NONBLOCK) == 0);
}

/* What was received is what belongs at this place of the stream. */
__attribute__((unused)) static void verify(struct wire *wire, const void *bytes, size_t length) {
    const unsigned char *is = bytes;
    for (size_t done = 0; done < length;) {
        size_t part = length - done < CHUNK_MAX ? length - done : CHUNK_MAX;
        const unsigned char *expected = pattern(wire->in, wire->got);
        if (memcmp(is + done, expected, part) != 0) {
            size_t at = 0;
            while (is[done + at] == expected[at]) at++;
            uint64_t wrong = wire->got + at;
            /* Where do those bytes belong? That tells lost from repeated from foreign. */
            for (int64_t shift = -200000; shift <= 200000 && part - at >= 8; shift++) {
                if ((int64_t)wrong + shift >= 0 &&
                    memcmp(is + done + at, pattern(wire->in, wrong + shift), part - at < 32 ? part - at : 32) == 0)
                    die("stream %u: at offset %llu are the bytes of offset %lld", wire->in, (unsigned long long)wrong,
                        (long long)(wrong + shift));
            }
            die("stream %u: wrong byte at offset %llu, %zu of %zu", wire->in, (unsigned long long)wrong, done + at, length);
        }
        wire->got += part;
        done += part;
    }
}

__attribute__((unused)) static void put(struct wire *wire, size_t length) {
    while (length > 0) {
        size_t part = length < CHUNK_MAX ? length : CHUNK_MAX;
        ssize_t sent = send(wire->fd, pattern(wire->out, wire->sent), part, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR) continue;
        if (sent <= 0) die("send of %zu returned %zd after %llu bytes", part, sent, (unsigned long long)wire->sent);
        wire->sent += sent;
        length -= sent;
    }
}

__attribute__((unused)) static void take(struct wire *wire, size_t length) {
    unsigned char bytes[65536];
    while (length > 0) {
        ssize_t got = recv(wire->fd, bytes, length < sizeof bytes ? length : sizeof bytes, 0);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) die("recv returned %zd after %llu bytes", got, (unsigned long long)wire->got);
        verify(wire, bytes, got);
        length -= got;
    }
}

/* Nothing but the end of the stream is left. */
__attribute__((unused)) static void expect_end(struct wire *wire) {
    char byte;
    ssize_t got;
    while ((got = recv(wire->fd, &byte, 1, 0)) < 0 && errno == EINTR) {}
    if (got != 0) die("end of stream expected after %llu bytes, recv returned %zd", (unsigned long long)wire->got, got);
}

static inline size_t round_length(unsigned number) {
    return 1 + number * 37 % 200;
}

/* A conversation of so many rounds: enough of them, and the connection has shown that it lives. Both ends count alike. */
__attribute__((unused)) static void ask(struct wire *wire, unsigned rounds) {
    for (unsigned number = 0; number < rounds; number++) {
        put(wire, round_length(number));
        take(wire, round_length(number + 5));
    }
}

__attribute__((unused)) static void answer(struct wire *wire, unsigned rounds) {
    for (unsigned number = 0; number < rounds; number++) {
        take(wire, round_length(number));
        put(wire, round_length(number + 5));
    }
}

/* The same, but whoever waits polls and never sleeps: such a reader always has its lane open. */
__attribute__((unused)) static void take_polling(struct wire *wire, size_t length) {
    unsigned char bytes[65536];
    double began = now_s();
    for (unsigned looks = 1; length > 0; looks++) {
        ssize_t got = recv(wire->fd, bytes, length < sizeof bytes ? length : sizeof bytes, MSG_DONTWAIT);
        if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
            /* On a machine that is busy the other end needs this CPU. */
            if (looks % 256 == 0) sched_yield();
            if (now_s() - began > 20) die("nothing came for 20 s after %llu bytes", (unsigned long long)wire->got);
            continue;
        }
        if (got <= 0) die("recv returned %zd after %llu bytes", got, (unsigned long long)wire->got);
        verify(wire, bytes, got);
        length -= got;
    }
}

__attribute__((unused)) static void ask_polling(struct wire *wire, unsigned rounds) {
    for (unsigned number = 0; number < rounds; number++) {
        put(wire, round_length(number));
        take_polling(wire, round_length(number + 5));
    }
}

__attribute__((unused)) static void answer_polling(struct wire *wire, unsigned rounds) {
    for (unsigned number = 0; number < rounds; number++) {
        take_polling(wire, round_length(number));
        put(wire, round_length(number + 5));
    }
}

/* Looks, and then does something else for a while: what comes now comes to one that has shown interest and does not wait. */
__attribute__((unused)) static void let_it_come(const struct wire *wire) {
    char byte;
    CHECK(recv(wire->fd, &byte, 1, MSG_DONTWAIT | MSG_PEEK) == 1 || errno == EAGAIN);
    sleep_us(10000);
}

/* An echo without memory, for servers that change hands: whatever comes goes back. */
__attribute__((unused)) static uint64_t echo_until_end(int fd) {
    unsigned char bytes[16384];
    uint64_t total = 0;
    for (;;) {
        ssize_t got = recv(fd, bytes, sizeof bytes, 0);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) die("echo: recv after %llu bytes", (unsigned long long)total);
        if (got == 0) return total;
        for (ssize_t done = 0; done < got;) {
            ssize_t sent = send(fd, bytes + done, got - done, MSG_NOSIGNAL);
            if (sent < 0 && errno == EINTR) continue;
            if (sent <= 0) die("echo: send after %llu bytes", (unsigned long long)total);
            done += sent;
        }
        total += got;
    }
}

/* The client of an echo: what it reads is what it wrote. */
__attribute__((unused)) static struct wire echo_client(int fd, unsigned number) {
    return (struct wire){.fd = fd, .out = 2 * number, .in = 2 * number};
}

__attribute__((unused)) static void ask_echo(struct wire *wire, unsigned rounds) {
    for (unsigned number = 0; number < rounds; number++) {
        put(wire, round_length(number));
        take(wire, round_length(number));
    }
}

/* Sends a descriptor with `length` bytes; what sendmsg returns. */
__attribute__((unused)) static ssize_t send_descriptor(int channel, int fd, const void *bytes, size_t length) {
    struct iovec data = {(void *)bytes, length};
    char control[CMSG_SPACE(sizeof(int))] = {0};
    struct msghdr message = {
        .msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    *header = (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof(int))};
    memcpy(CMSG_DATA(header), &fd, sizeof(int));
    return sendmsg(channel, &message, 0);
}

/* Receives one with `length` bytes; -1 for the end of the channel, or for anything else. */
__attribute__((unused)) static int receive_descriptor(int channel, void *bytes, size_t length) {
    struct iovec data = {bytes, length};
    char control[CMSG_SPACE(sizeof(int))] = {0};
    struct msghdr message = {
        .msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    int fd = -1;
    if (recvmsg(channel, &message, 0) != (ssize_t)length) return -1;
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (header != NULL && header->cmsg_type == SCM_RIGHTS) memcpy(&fd, CMSG_DATA(header), sizeof(int));
    return fd;
}

/* The test ends a server's standard input when the client is gone. */
__attribute__((unused)) static void until_told(void) {
    char byte;
    while (read(0, &byte, 1) > 0) {}
}

/* The test looks at this process meanwhile, and ends its standard input when it has seen enough. */
__attribute__((unused)) static void hold(void) {
    printf("hold %d\n", (int)getpid());
    fflush(stdout);
    until_told();
}

__attribute__((unused)) static void say(const char *format, ...) {
    va_list list;
    va_start(list, format);
    vprintf(format, list);
    va_end(list);
    putchar('\n');
    fflush(stdout);
}

__attribute__((unused)) static void expect_child(pid_t child) {
    int status;
    pid_t who;
    while ((who = waitpid(child, &status, 0)) < 0 && errno == EINTR) {}
    if (who < 0 || !WIFEXITED(status) || WEXITSTATUS(status) != 0) die("child %d ended with status %#x", (int)who, status);
}

__attribute__((unused)) static pid_t fork_child(void) {
    fflush(stdout);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) prctl(PR_SET_PDEATHSIG, SIGKILL);
    return child;
}

__attribute__((unused)) static int play(const struct scenario *scenarios, size_t count, int argc, char **argv) {
    argument_count = argc;
    arguments = argv;
    /* Whatever happens to the test, nothing of it stays behind. */
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (size_t number = 0; argc > 2 && number < count; number++) {
        if (strcmp(scenarios[number].name, argv[1]) != 0) continue;
        if (strcmp(argv[2], "server") == 0) {
            int listener = listen_on(argc > 3 ? atoi(argv[3]) : 0, 0);
            say("port %d", port_of(listener));
            scenarios[number].server(listener);
        } else {
            CHECK(argc > 3);
            scenarios[number].client(atoi(argv[3]));
        }
        fflush(stdout);
        return 0;
    }
    fprintf(stderr, "usage: %s SCENARIO server | client PORT\n", argv[0]);
    return 2;
}

#endif
