/* Many connections: a thousand at once that all live, fifty that rest, hundreds without room in memory; and two ends that
 * have one CPU. */
#include "lane.h"
#include <sys/select.h>
#include <sys/statvfs.h>

#define THOUSAND 1000
#define RESTING 50

struct talk {
    struct wire wire;
    unsigned number;
    size_t missing;
};

/* Answers everybody's questions, until all have gone or, while nobody speaks, standard input ends. */
static void serve_all(int listener, unsigned connections, unsigned quiet_after) {
    struct talk *talks = calloc(connections, sizeof *talks);
    int epoll = epoll_create1(0);
    unsigned accepted = 0, ended = 0, answered = 0;
    struct epoll_event event = {.events = EPOLLIN, .data.u32 = UINT32_MAX};
    set_nonblocking(listener, 1);
    CHECK(epoll_ctl(epoll, EPOLL_CTL_ADD, listener, &event) == 0);
    while (ended < connections) {
        struct epoll_event events[64];
        int count = epoll_wait(epoll, events, 64, -1);
        CHECK(count > 0);
        for (int at = 0; at < count; at++) {
            uint32_t which = events[at].data.u32;
            if (which == UINT32_MAX - 1) return;
            if (which == UINT32_MAX) {
                for (int fd; (fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0; accepted++) {
                    int one = 1;
                    CHECK(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one) == 0);
                    talks[accepted] = (struct talk){.wire = server_end(fd, 0), .missing = round_length(0)};
                    event = (struct epoll_event){.events = EPOLLIN, .data.u32 = accepted};
                    CHECK(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0);
                }
                continue;
            }
            struct talk *talk = &talks[which];
            unsigned char bytes[256];
            ssize_t got = recv(talk->wire.fd, bytes, talk->missing, 0);
            if (got < 0 && errno == EAGAIN) continue;
            CHECK(got >= 0);
            if (got == 0) {
                ended++;
                close(talk->wire.fd);
                continue;
            }
            verify(&talk->wire, bytes, got);
            if ((talk->missing -= got) == 0) {
                put(&talk->wire, round_length(talk->number + 5));
                talk->missing = round_length(++talk->number);
                answered++;
            }
        }
        if (quiet_after > 0 && answered == quiet_after) {
            /* From here on it only waits, for all of them, and for the test. */
            quiet_after = 0;
            event = (struct epoll_event){.events = EPOLLIN, .data.u32 = UINT32_MAX - 1};
            CHECK(epoll_ctl(epoll, EPOLL_CTL_ADD, 0, &event) == 0);
            printf("hold %d\n", (int)getpid());
            fflush(stdout);
        }
    }
    say("%u conversations, %u answers", ended, answered);
}

static void thousand_server(int listener) {
    serve_all(listener, THOUSAND, 0);
}

static void thousand_client(int port) {
    static struct wire wires[THOUSAND];
    uint64_t total = 0;
    for (unsigned number = 0; number < THOUSAND; number++) wires[number] = client_end(connect_to(port), 0);
    for (unsigned round = 0; round < 12; round++) {
        for (unsigned number = 0; number < THOUSAND; number++) {
            put(&wires[number], round_length(round));
            take(&wires[number], round_length(round + 5));
        }
    }
    /* All at once. */
    for (unsigned round = 12; round < 24; round++) {
        for (unsigned number = 0; number < THOUSAND; number++) put(&wires[number], round_length(round));
        for (unsigned number = 0; number < THOUSAND; number++) take(&wires[number], round_length(round + 5));
    }
    hold();
    for (unsigned round = 24; round < 26; round++) {
        for (unsigned number = 0; number < THOUSAND; number++) put(&wires[number], round_length(round));
        for (unsigned number = 0; number < THOUSAND; number++) take(&wires[number], round_length(round + 5));
    }
    for (unsigned number = 0; number < THOUSAND; number++) {
        total += wires[number].got;
        close(wires[number].fd);
    }
    say("got %llu", (unsigned long long)total);
}

static void resting_server(int listener) {
    serve_all(listener, RESTING, RESTING * 40);
}

static void *rest(void *argument) {
    struct wire *wire = argument;
    ask(wire, 40);
    expect_end(wire);
    return NULL;
}

/* A thread for each connection, which waits in recv when it has asked its questions. */
static void resting_client(int port) {
    static struct wire wires[RESTING];
    pthread_t threads[RESTING];
    uint64_t each = 0;
    for (unsigned number = 0; number < 40; number++) each += round_length(number + 5);
    for (unsigned number = 0; number < RESTING; number++) {
        wires[number] = client_end(connect_to(port), 0);
        CHECK(pthread_create(&threads[number], NULL, rest, &wires[number]) == 0);
    }
    for (unsigned number = 0; number < RESTING; number++)
        while (__atomic_load_n(&wires[number].got, __ATOMIC_ACQUIRE) < each) sleep_us(1000);
    hold();
    for (unsigned number = 0; number < RESTING; number++) CHECK(shutdown(wires[number].fd, SHUT_RDWR) == 0);
    for (unsigned number = 0; number < RESTING; number++) CHECK(pthread_join(threads[number], NULL) == 0);
    say("rested");
}

/* More than a list of moderate length takes, by calls that take a list each time: everybody is heard. */
#define LISTED 150

static void listed_server(int listener) {
    static struct wire wires[LISTED];
    for (unsigned number = 0; number < LISTED; number++) wires[number] = server_end(accept_one(listener), number);
    for (unsigned number = 0; number < LISTED; number++) answer_polling(&wires[number], 20);
    for (unsigned turn = 0; turn < 3 * LISTED; turn++) {
        fd_set set;
        int highest = 0, fd = -1;
        struct pollfd list[LISTED];
        struct timeval patience = {10, 0};
        FD_ZERO(&set);
        for (unsigned number = 0; number < LISTED; number++) {
            list[number] = (struct pollfd){wires[number].fd, POLLIN, 0};
            FD_SET(wires[number].fd, &set);
            if (wires[number].fd > highest) highest = wires[number].fd;
        }
        /* The one that speaks is another one each time, and the rest was looked at before. */
        int count = turn % 2 ? poll(list, LISTED, 10000) : select(highest + 1, &set, NULL, NULL, &patience);
        if (count != 1) die("%s returned %d in turn %u", turn % 2 ? "poll" : "select", count, turn);
        for (unsigned number = 0; number < LISTED; number++) {
            if (!(turn % 2 ? list[number].revents != 0 : FD_ISSET(wires[number].fd, &set))) continue;
            fd = wires[number].fd;
            answer(&wires[number], 1);
            char byte;
            CHECK(recv(fd, &byte, 1, MSG_DONTWAIT) < 0 && errno == EAGAIN);
        }
        CHECK(fd >= 0);
    }
    say("everybody was heard");
}

static void listed_client(int port) {
    static struct wire wires[LISTED];
    for (unsigned number = 0; number < LISTED; number++) wires[number] = client_end(connect_to(port), number);
    for (unsigned number = 0; number < LISTED; number++) ask_polling(&wires[number], 20);
    for (unsigned turn = 0; turn < 3 * LISTED; turn++) {
        if (turn % 10 == 0) sleep_us(200);
        ask(&wires[LISTED - 1 - turn * 7 % LISTED], 1);
    }
    expect_end(&wires[0]);
    say("client done");
}

/* Far more connections than lanes of a region, in a process that has no room left for files in memory. The test gives it a
 * /dev/shm of its own. */
static void crowded_server(int listener) {
    struct statvfs room;
    CHECK(statvfs("/dev/shm", &room) == 0 && room.f_blocks * room.f_frsize <= 1 << 20);
    char byte[4096] = {0};
    int filler = open("/dev/shm/filler", O_CREAT | O_RDWR, 0600);
    CHECK(filler >= 0);
    while (write(filler, byte, sizeof byte) > 0) {}
    CHECK(errno == ENOSPC);
    for (unsigned number = 0; number < 300; number++) {
        int near = connect_to(port_of(listener)), far = accept_one(listener);
        CHECK(send(near, "x", 1, 0) == 1 && recv(far, byte, 1, 0) == 1);
        CHECK(send(far, "y", 1, 0) == 1 && recv(near, byte, 1, 0) == 1 && byte[0] == 'y');
    }
    say("300 connections");
}

static void crowded_client(int port) {
    (void)port;
}

/* Both ends on one CPU, where one of them runs only while the other one does not; then nobody speaks. */
static void use_one_cpu(void) {
    cpu_set_t allowed, one;
    unsigned cpu = 0;
    CHECK(sched_getaffinity(0, sizeof allowed, &allowed) == 0);
    while (!CPU_ISSET(cpu, &allowed)) cpu++;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
}

static void one_cpu_server(int listener) {
    use_one_cpu();
    struct wire wire = server_end(accept_one(listener), 0);
    answer(&wire, 2000);
    say("rests %llu", (unsigned long long)(wire.sent + wire.got));
    expect_end(&wire);
    say("server done");
}

static void one_cpu_client(int port) {
    use_one_cpu();
    struct wire wire = client_end(connect_to(port), 0);
    ask(&wire, 2000);
    hold();
    say("client done");
}

static const struct scenario scenarios[] = {
    {"listed", listed_server, listed_client},
    {"thousand", thousand_server, thousand_client},
    {"resting", resting_server, resting_client},
    {"crowded", crowded_server, crowded_client},
    {"one_cpu", one_cpu_server, one_cpu_client},
};

int main(int argc, char **argv) {
    return play(scenarios, sizeof scenarios / sizeof *scenarios, argc, argv);
}
