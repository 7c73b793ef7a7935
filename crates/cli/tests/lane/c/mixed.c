/* What lanes know and what only the kernel knows, watched together: lanes that always have an answer must hide neither
 * descriptors of another kind, nor each other, nor signals that only a wait lets in. */
#include "lane.h"
#include <sys/eventfd.h>
#include <sys/select.h>
#include <sys/timerfd.h>

#define ROUNDS 200
/* An answer may leave out what only the kernel knows 32 times in a row. */
#define ANSWERS_MAX 33
#define RAISES 12
#define PINGS_BETWEEN 40

/* ---- what is no connection ---- */

enum kind { EVENT, TIMER, PIPE, LISTENER, KINDS };
static const char *const kind_names[] = {"an eventfd", "a timerfd", "a pipe", "a listening socket"};

struct other {
    enum kind kind;
    int fd;   /* what is watched */
    int far;  /* the pipe's other end, or the caller */
};

static struct other make_other(enum kind kind) {
    struct other other = {kind, -1, -1};
    int ends[2];
    if (kind == EVENT) {
        other.fd = eventfd(0, EFD_CLOEXEC);
    } else if (kind == TIMER) {
        other.fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC);
    } else if (kind == PIPE) {
        CHECK(pipe(ends) == 0);
        other.fd = ends[0];
        other.far = ends[1];
    } else {
        other.fd = listen_on(0, 0);
    }
    CHECK(other.fd >= 0);
    return other;
}

/* Makes it readable, and returns when it is. */
static void raise_other(struct other *other) {
    uint64_t one = 1;
    struct itimerspec soon = {.it_value.tv_nsec = 1};
    if (other->kind == EVENT) CHECK(write(other->fd, &one, sizeof one) == sizeof one);
    if (other->kind == TIMER) CHECK(timerfd_settime(other->fd, 0, &soon, NULL) == 0);
    if (other->kind == PIPE) CHECK(write(other->far, "x", 1) == 1);
    if (other->kind == LISTENER) other->far = connect_to(port_of(other->fd));
    struct pollfd readable = {other->fd, POLLIN, 0};
    CHECK(poll(&readable, 1, 10000) == 1);
}

static void clear_other(struct other *other) {
    char bytes[8];
    if (other->kind == LISTENER) {
        close(accept_one(other->fd));
        close(other->far);
        return;
    }
    CHECK(read(other->fd, bytes, sizeof bytes) > 0);
}

static void end_other(struct other *other) {
    close(other->fd);
    if (other->kind == PIPE) close(other->far);
}

/* ---- how it is waited for ---- */

enum way { EPOLL_1, EPOLL_2, EPOLL_16, OUTSIDE, INSIDE, BESIDE, POLL, SELECT, WAYS };
static const char *const way_names[] = {"epoll for one event", "epoll for two events", "epoll for sixteen events",
                                        "epoll with the lane in an inner set", "epoll in an inner set",
                                        "two sets in turn", "poll", "select"};

struct watch {
    enum way way;
    int lane, other;
    int outer, inner;
};

static void add(int set, int fd) {
    struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
    CHECK(epoll_ctl(set, EPOLL_CTL_ADD, fd, &event) == 0);
}

static struct watch begin_watch(enum way way, int lane, int other) {
    struct watch watch = {way, lane, other, -1, -1};
    if (way == POLL || way == SELECT) return watch;
    watch.outer = epoll_create1(EPOLL_CLOEXEC);
    watch.inner = epoll_create1(EPOLL_CLOEXEC);
    CHECK(watch.outer >= 0 && watch.inner >= 0);
    if (way == OUTSIDE || way == INSIDE) add(watch.outer, watch.inner);
    add(way == OUTSIDE || way == INSIDE ? watch.inner : watch.outer, lane);
    add(way == INSIDE || way == BESIDE ? watch.inner : watch.outer, other);
    return watch;
}

static void end_watch(struct watch *watch) {
    if (watch->outer >= 0) close(watch->outer);
    if (watch->inner >= 0) close(watch->inner);
}

/* One wait: which of the two were told. */
static void wait_once(const struct watch *watch, int *lane, int *other) {
    *lane = *other = 0;
    if (watch->way == POLL) {
        struct pollfd list[2] = {{watch->lane, POLLIN, 0}, {watch->other, POLLIN, 0}};
        if (poll(list, 2, 10000) <= 0) die("nothing was told within 10 s");
        *lane = list[0].revents != 0;
        *other = list[1].revents != 0;
        return;
    }
    if (watch->way == SELECT) {
        fd_set readable;
        struct timeval limit = {10, 0};
        FD_ZERO(&readable);
        FD_SET(watch->lane, &readable);
        FD_SET(watch->other, &readable);
        int highest = watch->lane > watch->other ? watch->lane : watch->other;
        if (select(highest + 1, &readable, NULL, NULL, &limit) <= 0) die("nothing was told within 10 s");
        *lane = FD_ISSET(watch->lane, &readable);
        *other = FD_ISSET(watch->other, &readable);
        return;
    }
    struct epoll_event events[16];
    int room = watch->way == EPOLL_2 ? 2 : watch->way == EPOLL_16 ? 16 : 1;
    int count = epoll_wait(watch->outer, events, room, 10000);
    if (count <= 0) die("nothing was told within 10 s");
    for (int at = 0; at < count; at++) {
        int fd = events[at].data.fd;
        if (fd == watch->inner) {
            struct epoll_event inner;
            if (epoll_wait(watch->inner, &inner, 1, 0) != 1) continue;
            fd = inner.data.fd;
        }
        *lane |= fd == watch->lane;
        *other |= fd == watch->other;
    }
    if (watch->way == BESIDE && epoll_wait(watch->inner, events, 1, 0) == 1) *other = 1;
}

/* ---- beside a lane ---- */

/* Ping and pong; while pongs are waited for, the other becomes readable, and has to be told in time. */
static void ping_beside(struct wire *wire, enum way way, enum kind kind) {
    struct other other = make_other(kind);
    struct watch watch = begin_watch(way, wire->fd, other.fd);
    unsigned answers = 0, raised = 0, told = 0;
    for (unsigned ping = 0; told < RAISES; ping++) {
        if (ping % PINGS_BETWEEN == 0 && raised == told) {
            raise_other(&other);
            raised++;
            answers = 0;
        }
        put(wire, 8);
        for (size_t missing = 8; missing > 0;) {
            int lane, beside;
            wait_once(&watch, &lane, &beside);
            answers++;
            if (beside) {
                CHECK(raised == told + 1);
                clear_other(&other);
                told++;
            } else if (raised > told && answers >= ANSWERS_MAX) {
                die("%s was not told by %s after %u answers", kind_names[kind], way_names[way], answers);
            }
            if (!lane) continue;
            unsigned char bytes[8];
            ssize_t got = recv(wire->fd, bytes, missing, MSG_DONTWAIT);
            if (got < 0 && errno == EAGAIN) continue;
            CHECK(got > 0);
            verify(wire, bytes, got);
            missing -= got;
        }
    }
    end_watch(&watch);
    end_other(&other);
}

static void beside_server(int listener) {
    struct wire wire = server_end(accept_one(listener), 0);
    wire.in = wire.out;
    ask_echo(&wire, ROUNDS);
    for (enum way way = 0; way < WAYS; way++)
        for (enum kind kind = 0; kind < KINDS; kind++) {
            ping_beside(&wire, way, kind);
            say("%s: %s was told in time", way_names[way], kind_names[kind]);
        }
    hold();
}

static void echoing_client(int port) {
    echo_until_end(connect_to(port));
    say("client done");
}

/* ---- one after the other ---- */

#define LANES 8

/* Every one of many that are ready is told, though each answer has room for few of them, and none is read meanwhile. */
static void expect_turns(struct wire *wires, int room, int event) {
    int set = epoll_create1(EPOLL_CLOEXEC), told[LANES + 1] = {0}, missing = LANES + 1;
    struct epoll_event events[LANES];
    for (unsigned number = 0; number < LANES; number++) {
        struct epoll_event want = {.events = EPOLLIN, .data.u32 = number};
        CHECK(epoll_ctl(set, EPOLL_CTL_ADD, wires[number].fd, &want) == 0);
    }
    struct epoll_event want = {.events = EPOLLIN, .data.u32 = LANES};
    CHECK(epoll_ctl(set, EPOLL_CTL_ADD, event, &want) == 0);
    for (int answers = 0; missing > 0; answers++) {
        if (answers == LANES + 1 + ANSWERS_MAX)
            for (int number = 0; number <= LANES; number++)
                if (!told[number]) die("number %d of %d was not told, %d at a time", number, LANES + 1, room);
        int count = epoll_wait(set, events, room, 10000);
        CHECK(count > 0 && count <= room);
        for (int at = 0; at < count; at++) missing -= !told[events[at].data.u32]++;
    }
    close(set);
}

static void turns_server(int listener) {
    static struct wire wires[LANES];
    int event = eventfd(1, EFD_CLOEXEC);
    for (unsigned number = 0; number < LANES; number++) wires[number] = server_end(accept_one(listener), number);
    for (unsigned number = 0; number < LANES; number++) answer_polling(&wires[number], ROUNDS);
    for (unsigned turn = 0; turn < 12; turn++) {
        char byte;
        for (unsigned number = 0; number < LANES; number++)
            CHECK(recv(wires[number].fd, &byte, 1, MSG_DONTWAIT | MSG_PEEK) < 0 && errno == EAGAIN);
        put(&wires[0], 1);
        for (unsigned number = 0; number < LANES; number++) {
            int there = 0;
            for (double began = now_s(); there < 50;) {
                CHECK(ioctl(wires[number].fd, FIONREAD, &there) == 0);
                if (now_s() - began > 20) die("nothing came to number %u", number);
                if (there < 50) sched_yield();
            }
        }
        for (int room = 1; room <= 4; room++) expect_turns(wires, room, event);
        for (unsigned number = 0; number < LANES; number++) take_polling(&wires[number], 50);
    }
    say("everyone was told");
    hold();
}

static void turns_client(int port) {
    static struct wire wires[LANES];
    for (unsigned number = 0; number < LANES; number++) wires[number] = client_end(connect_to(port), number);
    for (unsigned number = 0; number < LANES; number++) ask_polling(&wires[number], ROUNDS);
    for (unsigned turn = 0; turn < 12; turn++) {
        take_polling(&wires[0], 1);
        for (unsigned number = 0; number < LANES; number++) put(&wires[number], 50);
    }
    expect_end(&wires[0]);
    say("client done");
}

/* ---- signals ---- */

static volatile sig_atomic_t signals;

static void count_signal(int number) {
    (void)number;
    signals++;
}

/* 1 if the connection is readable, 0 if the wait was ended by a signal. */
static int wait_masked(int way, int fd, int set) {
    sigset_t none;
    struct timespec limit = {10, 0};
    struct epoll_event event;
    struct pollfd entry = {fd, POLLIN, 0};
    fd_set readable;
    int ready;
    sigemptyset(&none);
    FD_ZERO(&readable);
    FD_SET(fd, &readable);
    if (way == 0)
        ready = epoll_pwait(set, &event, 1, 10000, &none);
    else if (way == 1)
        ready = ppoll(&entry, 1, &limit, &none);
    else
        ready = pselect(fd + 1, &readable, NULL, NULL, &limit, &none);
    if (ready == 0) die("nothing was told within 10 s");
    CHECK(ready > 0 || errno == EINTR);
    return ready > 0;
}

/* Whether the kernel has bytes of a connection. A wait that finds them there lets no signal in, however often: under TCP too. */
static int kernel_has_bytes(int fd) {
    uint32_t memory[9] = {0};
    socklen_t length = sizeof memory;
    CHECK(getsockopt(fd, SOL_SOCKET, SO_MEMINFO, memory, &length) == 0);
    return memory[0] > 0;
}

/* A signal is blocked but while it waits: it has to come, though a wait that the lane answers never takes long. */
static void masked_server(int listener) {
    struct wire wire = server_end(accept_one(listener), 0);
    static const char *const names[] = {"epoll_pwait", "ppoll", "pselect"};
    struct sigaction action = {.sa_handler = count_signal};
    sigset_t blocked;
    int set = epoll_create1(EPOLL_CLOEXEC);
    wire.in = wire.out;
    ask_echo(&wire, ROUNDS);
    add(set, wire.fd);
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGUSR1);
    CHECK(sigprocmask(SIG_BLOCK, &blocked, NULL) == 0 && sigaction(SIGUSR1, &action, NULL) == 0);
    for (int way = 0; way < 3; way++) {
        int raised = signals;
        unsigned answers = 0;
        for (unsigned ping = 0; ping < 20 * PINGS_BETWEEN; ping++) {
            if (ping % PINGS_BETWEEN == 0 && signals == raised) {
                CHECK(raise(SIGUSR1) == 0);
                raised++;
                answers = 0;
            }
            put(&wire, 8);
            for (size_t missing = 8; missing > 0;) {
                if (!wait_masked(way, wire.fd, set)) continue;
                if (signals != raised && !kernel_has_bytes(wire.fd) && ++answers > ANSWERS_MAX)
                    die("the signal did not come in %u waits by %s", answers, names[way]);
                unsigned char bytes[8];
                ssize_t got = recv(wire.fd, bytes, missing, MSG_DONTWAIT);
                if (got < 0 && errno == EAGAIN) continue;
                CHECK(got > 0);
                verify(&wire, bytes, got);
                missing -= got;
            }
        }
        say("%s: signals came", names[way]);
    }
    hold();
}

/* ---- both directions full ---- */

#define FILL (5u << 18) /* more than a lane holds, less than TCP does */
#define WRITES 64
/* Of a few waits; not of one for each write. */
#define SWITCHES_MAX 1000

static long voluntary_switches(void) {
    struct rusage usage;
    CHECK(getrusage(RUSAGE_THREAD, &usage) == 0);
    return usage.ru_nvcsw;
}

/* What one end says to the other beside the connection that is full. */
static uint64_t exchange(int beside, uint64_t number) {
    uint64_t theirs;
    CHECK(send(beside, &number, sizeof number, MSG_NOSIGNAL) == sizeof number);
    CHECK(recv(beside, &theirs, sizeof theirs, MSG_WAITALL) == sizeof theirs);
    return theirs;
}

/* Both ends write and read nothing: each finds no room in its lane and has a reader that does not move, as long as it does
 * not move itself. TCP has room, so no write may wait for long. */
static void write_both_ways(struct wire *wire, int beside) {
    for (unsigned turn = 0; turn < 3; turn++) {
        char byte;
        uint64_t begin = wire->sent;
        CHECK(recv(wire->fd, &byte, 1, MSG_DONTWAIT | MSG_PEEK) < 0 && errno == EAGAIN);
        exchange(beside, 0);
        ssize_t sent = 1;
        while (sent > 0 && wire->sent - begin < FILL) {
            sent = send(wire->fd, pattern(wire->out, wire->sent), 8192, MSG_DONTWAIT | MSG_NOSIGNAL);
            CHECK(sent > 0 || errno == EAGAIN);
            if (sent > 0) wire->sent += sent;
        }
        long before = voluntary_switches();
        for (unsigned number = 0; sent > 0 && number < WRITES; number++) put(wire, 4096);
        long waits = voluntary_switches() - before;
        if (waits > SWITCHES_MAX) die("%d writes waited %ld times", WRITES, waits);
        take_polling(wire, exchange(beside, wire->sent - begin));
        exchange(beside, 0);
    }
}

static void full_server(int listener) {
    struct wire wire = server_end(accept_one(listener), 0);
    int beside = accept_one(listener);
    answer_polling(&wire, ROUNDS);
    write_both_ways(&wire, beside);
    say("everything was written and read");
    hold();
}

static void full_client(int port) {
    struct wire wire = client_end(connect_to(port), 0);
    int beside = connect_to(port);
    ask_polling(&wire, ROUNDS);
    write_both_ways(&wire, beside);
    expect_end(&wire);
    say("everything was written and read");
}

static const struct scenario scenarios[] = {
    {"beside", beside_server, echoing_client},
    {"turns", turns_server, turns_client},
    {"masked", masked_server, echoing_client},
    {"full", full_server, full_client},
};

int main(int argc, char **argv) {
    return play(scenarios, sizeof scenarios / sizeof *scenarios, argc, argv);
}
