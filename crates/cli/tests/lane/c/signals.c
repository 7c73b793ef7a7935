/* What interrupts a call: cancellation, handlers that write, handlers that do not come back, and the signal that tells of
 * input. */
#include "lane.h"
#include <setjmp.h>
#include <sys/select.h>

#define ROUNDS 200

/* A thread that waits for what does not come is cancelled; whoever reads next finds nothing missing. The connection is used
 * by polling in between, which keeps a lane open while the thread waits. */
static volatile sig_atomic_t cleaned;

static void count_cleanup(void *unused) {
    (void)unused;
    cleaned++;
}

static void *wait_for_nothing(void *argument) {
    struct wire *wire = argument;
    unsigned char bytes[64];
    pthread_cleanup_push(count_cleanup, NULL);
    ask_polling(wire, 20);
    ssize_t got = recv(wire->fd, bytes, sizeof bytes, 0);
    die("recv returned %zd, though nothing was sent", got);
    pthread_cleanup_pop(0);
    return NULL;
}

static void *wait_for_nothing_in_poll(void *argument) {
    struct wire *wire = argument;
    pthread_cleanup_push(count_cleanup, NULL);
    ask_polling(wire, 20);
    struct pollfd wait = {wire->fd, POLLIN, 0};
    int ready = poll(&wait, 1, -1);
    die("poll returned %d, though nothing was sent", ready);
    pthread_cleanup_pop(0);
    return NULL;
}

static void cancel_server(int listener) {
    struct wire wire = server_end(accept_one(listener), 0);
    answer_polling(&wire, ROUNDS);
    for (unsigned turn = 0; turn < 100; turn++) {
        answer_polling(&wire, 20);
        answer_polling(&wire, 10);
    }
    put(&wire, 100000);
    hold();
    say("server done");
}

static void cancel_client(int port) {
    struct wire wire = client_end(connect_to(port), 0);
    ask_polling(&wire, ROUNDS);
    /* Not in the middle of its questions: what a cancelled recv had taken would be lost, with TCP too. */
    uint64_t questions = 0;
    for (unsigned number = 0; number < 20; number++) questions += round_length(number + 5);
    for (unsigned turn = 0; turn < 100; turn++) {
        pthread_t thread;
        void *result;
        uint64_t then = wire.got + questions;
        CHECK(pthread_create(&thread, NULL, turn % 4 == 3 ? wait_for_nothing_in_poll : wait_for_nothing, &wire) == 0);
        while (__atomic_load_n(&wire.got, __ATOMIC_ACQUIRE) < then) sleep_us(100);
        sleep_us(turn % 10 * 120);
        CHECK(pthread_cancel(thread) == 0);
        CHECK(pthread_join(thread, &result) == 0);
        CHECK(result == PTHREAD_CANCELED);
        ask_polling(&wire, 10);
    }
    take(&wire, 100000);
    say("cancelled, %d handlers ran", (int)cleaned);
}

/* A handler writes records to the socket that the main loop writes records to. Nobody's record is cut by another's. */
struct record {
    uint32_t length, writer, number, checksum;
    unsigned char payload[240];
};

static uint32_t checksum(const struct record *record) {
    uint32_t sum = 2166136261u ^ record->length ^ record->writer << 8 ^ record->number << 12;
    for (uint32_t at = 0; at < record->length; at++) sum = (sum ^ record->payload[at]) * 16777619u;
    return sum;
}

static int record_fd;
static volatile uint32_t records_written[2];

static void write_record(uint32_t writer, uint32_t length) {
    struct record record = {.length = length, .writer = writer, .number = records_written[writer]++};
    memcpy(record.payload, pattern(writer, record.number * 7u), length);
    record.checksum = checksum(&record);
    ssize_t whole = offsetof(struct record, payload) + length;
    ssize_t sent;
    while ((sent = send(record_fd, &record, whole, MSG_NOSIGNAL)) < 0 && errno == EINTR) {}
    if (sent != whole) die("record of writer %u: %zd of %zd bytes sent", writer, sent, whole);
}

static void handler_that_writes(int signal) {
    (void)signal;
    int error = errno;
    write_record(1, 1 + records_written[1] * 11 % 200);
    errno = error;
}

static void start_timer(void (*handler)(int), long every_us, int flags) {
    struct sigaction action = {.sa_handler = handler, .sa_flags = flags};
    struct itimerval every = {{0, every_us}, {0, every_us}};
    CHECK(sigaction(SIGALRM, &action, NULL) == 0);
    CHECK(setitimer(ITIMER_REAL, &every, NULL) == 0);
}

static void stop_timer(void) {
    struct itimerval never = {{0, 0}, {0, 0}};
    CHECK(setitimer(ITIMER_REAL, &never, NULL) == 0);
}

static void handler_client(int port) {
    struct wire wire = client_end(connect_to(port), 5);
    ask_polling(&wire, ROUNDS);
    record_fd = wire.fd;
    start_timer(handler_that_writes, 211, SA_RESTART);
    for (unsigned number = 0; number < 40000; number++) {
        write_record(0, 1 + number * 13 % 240);
        if (number % 50 == 49) {
            /* The window stays small: a send that has to wait may be cut, and then a handler's record comes between. */
            char byte;
            ssize_t got;
            while ((got = recv(wire.fd, &byte, 1, number % 100 == 99 ? MSG_DONTWAIT : 0)) < 0 &&
                   (errno == EINTR || errno == EAGAIN)) {}
            CHECK(got == 1 && byte == 'a');
        }
    }
    stop_timer();
    CHECK(records_written[1] > 0);
    uint32_t total[2] = {records_written[0], records_written[1]};
    struct record last = {.length = sizeof total, .writer = 2};
    memcpy(last.payload, total, sizeof total);
    last.checksum = checksum(&last);
    ssize_t whole = offsetof(struct record, payload) + sizeof total;
    CHECK(send(wire.fd, &last, whole, MSG_NOSIGNAL) == whole);
    hold();
    expect_end(&wire);
    say("written");
}

static void receive_whole(int fd, void *into, size_t length) {
    /* By polling, as a busy server does; so the writer may use its lane. */
    for (size_t done = 0; done < length;) {
        ssize_t got = recv(fd, (char *)into + done, length - done, MSG_DONTWAIT);
        if (got < 0 && (errno == EAGAIN || errno == EINTR)) continue;
        if (got <= 0) die("recv of a record returned %zd", got);
        done += got;
    }
}

static void handler_server(int listener) {
    struct wire wire = server_end(accept_one(listener), 5);
    answer_polling(&wire, ROUNDS);
    uint32_t seen[2] = {0, 0};
    for (;;) {
        struct record record;
        receive_whole(wire.fd, &record, offsetof(struct record, payload));
        if (record.writer > 2 || record.length > sizeof record.payload)
            die("no record: length %u, writer %u after %u and %u", record.length, record.writer, seen[0], seen[1]);
        receive_whole(wire.fd, record.payload, record.length);
        if (record.checksum != checksum(&record)) die("record %u of writer %u is damaged", record.number, record.writer);
        if (record.writer == 2) {
            uint32_t total[2];
            memcpy(total, record.payload, sizeof total);
            if (total[0] != seen[0] || total[1] != seen[1])
                die("%u and %u records written, %u and %u seen", total[0], total[1], seen[0], seen[1]);
            break;
        }
        if (record.number != seen[record.writer])
            die("record %u of writer %u, expected %u", record.number, record.writer, seen[record.writer]);
        if (memcmp(record.payload, pattern(record.writer, record.number * 7u), record.length) != 0)
            die("record %u of writer %u has another's payload", record.number, record.writer);
        seen[record.writer]++;
        if (record.writer == 0 && seen[0] % 50 == 0) CHECK(send(wire.fd, "a", 1, MSG_NOSIGNAL) == 1);
    }
    say("%u records of the main loop, all of the handler", seen[0]);
}

/* A handler that never comes back, thousands of times, out of every call that waits. Only calls that take nothing are
 * jumped out of: the count of a recv that took something would be lost, with TCP too. */
static sigjmp_buf way_out;
static volatile sig_atomic_t armed, jumps;

static void handler_that_jumps(int signal) {
    (void)signal;
    if (!armed) return;
    armed = 0;
    jumps++;
    siglongjmp(way_out, 1);
}

enum { JUMP_RECV, JUMP_PEEK, JUMP_POLL, JUMP_SELECT, JUMP_EPOLL, JUMP_WAYS };

/* Waits in one of the ways; whether anything is there to be read. */
static int wait_one_way(int way, struct wire *wire, int epoll) {
    unsigned char bytes[256];
    struct epoll_event event;
    struct pollfd wait = {wire->fd, POLLIN, 0};
    fd_set set;
    ssize_t result;
    switch (way) {
    case JUMP_RECV:
        armed = 1;
        result = recv(wire->fd, bytes, sizeof bytes, 0);
        armed = 0;
        die("recv returned %zd, though nothing was sent", result);
    case JUMP_PEEK:
        armed = 1;
        result = recv(wire->fd, bytes, sizeof bytes, MSG_PEEK);
        armed = 0;
        break;
    case JUMP_POLL:
        armed = 1;
        result = poll(&wait, 1, -1);
        armed = 0;
        break;
    case JUMP_SELECT:
        FD_ZERO(&set);
        FD_SET(wire->fd, &set);
        armed = 1;
        result = select(wire->fd + 1, &set, NULL, NULL, NULL);
        armed = 0;
        break;
    default:
        armed = 1;
        result = epoll_wait(epoll, &event, 1, -1);
        armed = 0;
    }
    if (result < 0) {
        CHECK(errno == EINTR);
        return 0;
    }
    CHECK(result > 0);
    return 1;
}

static void jumping_client(int port) {
    struct wire wire = client_end(connect_to(port), 0);
    int epoll = epoll_create1(0);
    struct epoll_event event = {.events = EPOLLIN};
    CHECK(epoll_ctl(epoll, EPOLL_CTL_ADD, wire.fd, &event) == 0);
    ask_polling(&wire, ROUNDS);
    start_timer(handler_that_jumps, 151, SA_RESTART);

    /* Nothing comes: every wait ends by a jump. */
    for (volatile unsigned turn = 0; turn < 1500; turn++) {
        if (sigsetjmp(way_out, 1) == 0) {
            if (wait_one_way(turn % JUMP_WAYS, &wire, epoll)) die("way %u: ready, though nothing was sent", turn % JUMP_WAYS);
        }
        if (turn % 50 == 0) ask_polling(&wire, 5);
    }
    CHECK(jumps > 500);
    /* The answer comes some time: a jump just before, during and after it is all the same. */
    for (volatile unsigned turn = 0; turn < 3000; turn++) {
        put(&wire, round_length(turn));
        for (volatile int ready = 0; !ready;) {
            if (sigsetjmp(way_out, 1) == 0) ready = wait_one_way(JUMP_PEEK + turn % (JUMP_WAYS - 1), &wire, epoll);
        }
        take(&wire, round_length(turn + 5));
    }
    /* Out of a send for which there is no room: how much of it went is not known, but it is zeroes, and in one piece. */
    static const unsigned char zeroes[1 << 20];
    volatile uint64_t certain = 0, possible = 0;
    volatile unsigned interrupted = 0;
    while (interrupted < 200) {
        if (sigsetjmp(way_out, 1) == 0) {
            possible += sizeof zeroes;
            armed = 1;
            ssize_t sent = send(wire.fd, zeroes, sizeof zeroes, MSG_NOSIGNAL);
            armed = 0;
            CHECK(sent > 0 || errno == EINTR);
            if (sent > 0) {
                possible -= sizeof zeroes - sent;
                certain += sent;
            }
        } else {
            interrupted++;
        }
    }
    stop_timer();
    CHECK(send(wire.fd, "\1", 1, MSG_NOSIGNAL) == 1);
    uint64_t zeroes_seen, bounds[2] = {certain, possible};
    CHECK(recv(wire.fd, &zeroes_seen, sizeof zeroes_seen, MSG_WAITALL) == sizeof zeroes_seen);
    if (zeroes_seen < bounds[0] || zeroes_seen > bounds[1])
        die("%llu bytes arrived, between %llu and %llu were sent", (unsigned long long)zeroes_seen,
            (unsigned long long)bounds[0], (unsigned long long)bounds[1]);
    ask_polling(&wire, ROUNDS);
    ask(&wire, ROUNDS);
    hold();
    say("right after all jumps: %llu", (unsigned long long)wire.got);
}

static void jumping_server(int listener) {
    struct wire wire = server_end(accept_one(listener), 0);
    answer_polling(&wire, ROUNDS);
    for (unsigned turn = 0; turn < 30; turn++) answer(&wire, 5);
    for (unsigned turn = 0; turn < 3000; turn++) {
        take(&wire, round_length(turn));
        if (turn % 4 == 0) sleep_us(turn * 7 % 100);
        put(&wire, round_length(turn + 5));
    }
    uint64_t zeroes_seen = 0;
    for (;;) {
        static unsigned char bytes[65536];
        ssize_t got = recv(wire.fd, bytes, sizeof bytes, 0);
        CHECK(got > 0);
        for (ssize_t at = 0; at < got; at++)
            if (bytes[at] != 0 && (bytes[at] != 1 || at != got - 1)) die("byte %d among zeroes", bytes[at]);
        if (bytes[got - 1] == 1) {
            zeroes_seen += got - 1;
            break;
        }
        zeroes_seen += got;
    }
    CHECK(send(wire.fd, &zeroes_seen, sizeof zeroes_seen, MSG_NOSIGNAL) == sizeof zeroes_seen);
    answer_polling(&wire, ROUNDS);
    answer(&wire, ROUNDS);
    expect_end(&wire);
    say("server done");
}

/* A server that sleeps until SIGIO tells of input. */
static void sigio_server(int listener) {
    struct wire wire = server_end(accept_one(listener), 0);
    answer_polling(&wire, ROUNDS);
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGIO);
    CHECK(sigprocmask(SIG_BLOCK, &set, NULL) == 0);
    CHECK(fcntl(wire.fd, F_SETOWN, getpid()) == 0);
    CHECK(fcntl(wire.fd, F_SETFL, O_ASYNC | O_NONBLOCK) == 0);
    size_t missing = round_length(0);
    for (unsigned number = 0; number < 300;) {
        unsigned char bytes[512];
        ssize_t got;
        while ((got = recv(wire.fd, bytes, missing, 0)) > 0) {
            verify(&wire, bytes, got);
            if ((missing -= got) == 0) {
                put(&wire, round_length(number + 5));
                if (++number == 300) break;
                missing = round_length(number);
            }
        }
        if (number == 300) break;
        CHECK(got < 0 && errno == EAGAIN);
        struct timespec patience = {10, 0};
        if (sigtimedwait(&set, NULL, &patience) < 0) die("no SIGIO in 10 s, in round %u", number);
    }
    CHECK(fcntl(wire.fd, F_SETFL, 0) == 0);
    answer(&wire, ROUNDS);
    say("server done");
}

static void sigio_client(int port) {
    struct wire wire = client_end(connect_to(port), 0);
    ask_polling(&wire, ROUNDS);
    ask(&wire, 300);
    ask(&wire, ROUNDS);
    expect_end(&wire);
    say("client done");
}

/* A recv that a handler without SA_RESTART interrupts says so, and takes nothing. */
static void ignore_signal(int signal) {
    (void)signal;
}

static void interrupted_client(int port) {
    struct wire wire = client_end(connect_to(port), 0);
    ask_polling(&wire, ROUNDS);
    unsigned eintr = 0;
    for (unsigned turn = 0; turn < 50; turn++) {
        unsigned char bytes[64];
        start_timer(ignore_signal, 1700, 0);
        ssize_t got = recv(wire.fd, bytes, sizeof bytes, 0);
        stop_timer();
        CHECK(got < 0);
        eintr += errno == EINTR;
        ask_polling(&wire, 3);
    }
    say("EINTR %u times", eintr);
    struct timeval patience = {0, 30000};
    CHECK(setsockopt(wire.fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience) == 0);
    for (unsigned turn = 0; turn < 5; turn++) {
        unsigned char bytes[64];
        double began = now_s();
        ssize_t got = recv(wire.fd, bytes, sizeof bytes, 0);
        CHECK(got < 0 && errno == EAGAIN);
        CHECK(now_s() - began > 0.025);
        ask_polling(&wire, 3);
    }
    say("SO_RCVTIMEO kept");
}

static void interrupted_server(int listener) {
    struct wire wire = server_end(accept_one(listener), 0);
    answer_polling(&wire, ROUNDS);
    for (unsigned turn = 0; turn < 55; turn++) answer(&wire, 3);
    expect_end(&wire);
    say("server done");
}

/* A thread sleeps on a set. Another one leaves epoll_wait on that set in an unusual way, by its cancellation or through a
 * handler on a stack of its own; the sleeper is told of what comes then. */
static int shared_set, shared_fd, unconnected;
static volatile int cancelled, interrupted;

static void *sleep_until_told(void *told) {
    struct epoll_event event;
    CHECK(epoll_wait(shared_set, &event, 1, -1) == 1 && event.data.fd == shared_fd);
    CHECK(write(*(int *)told, "x", 1) == 1);
    return NULL;
}

static void *cancelled_in_a_look(void *unused) {
    struct epoll_event event;
    while (!cancelled) {}
    epoll_wait(shared_set, &event, 1, 0);
    return unused;
}

static void handler_that_receives(int signal) {
    (void)signal;
    int error = errno;
    char byte;
    recv(unconnected, &byte, 1, MSG_DONTWAIT);
    errno = error;
}

static void *interrupted_above_its_stack(void *above) {
    stack_t stack = {.ss_sp = above, .ss_size = 1 << 16};
    struct epoll_event event;
    CHECK(sigaltstack(&stack, NULL) == 0);
    CHECK(epoll_wait(shared_set, &event, 1, -1) < 0 && errno == EINTR);
    interrupted = 1;
    return NULL;
}

static void beside_sleeper_server(int listener) {
    struct sigaction action = {.sa_handler = handler_that_receives, .sa_flags = SA_ONSTACK};
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
    int interrupt = strcmp(arguments[4], "interrupted") == 0;
    unconnected = socket(AF_INET, SOCK_STREAM, 0);
    for (unsigned turn = 0; turn < 3; turn++) {
        struct wire wire = server_end(accept_one(listener), 0);
        answer_polling(&wire, ROUNDS / 4);
        struct epoll_event event = {.events = EPOLLONESHOT, .data.fd = shared_fd = wire.fd};
        shared_set = epoll_create1(EPOLL_CLOEXEC);
        CHECK(epoll_ctl(shared_set, EPOLL_CTL_ADD, wire.fd, &event) == 0);
        char *area = mmap(NULL, 2 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        pthread_attr_t lower_half;
        CHECK(area != MAP_FAILED && pthread_attr_init(&lower_half) == 0);
        CHECK(pthread_attr_setstack(&lower_half, area, 1 << 20) == 0);
        pthread_t sleeper, leaver;
        int told[2];
        CHECK(pipe(told) == 0);
        cancelled = interrupted = 0;
        CHECK(pthread_create(&leaver, &lower_half, interrupt ? interrupted_above_its_stack : cancelled_in_a_look,
                             area + (1 << 20)) == 0);
        CHECK(pthread_create(&sleeper, NULL, sleep_until_told, &told[1]) == 0);
        sleep_us(50000);
        if (!interrupt) CHECK(pthread_cancel(leaver) == 0);
        cancelled = 1;
        /* It may not have come as far as to wait. */
        for (; interrupt && !interrupted; sleep_us(10000)) CHECK(pthread_kill(leaver, SIGUSR1) == 0);
        CHECK(pthread_join(leaver, NULL) == 0);
        /* The connection is not armed while it is read from here. */
        answer_polling(&wire, 50);
        event.events = EPOLLIN | EPOLLONESHOT;
        CHECK(epoll_ctl(shared_set, EPOLL_CTL_MOD, wire.fd, &event) == 0);
        sleep_us(20000);
        put(&wire, 1);
        struct pollfd wait = {told[0], POLLIN, 0};
        if (poll(&wait, 1, 2000) != 1) die("turn %u: the sleeper is not told", turn);
        CHECK(pthread_join(sleeper, NULL) == 0);
        take(&wire, 100);
        if (turn == 2) hold();
        close(wire.fd);
        close(shared_set);
    }
    say("server done");
}

static void beside_sleeper_client(int port) {
    for (unsigned turn = 0; turn < 3; turn++) {
        struct wire wire = client_end(connect_to(port), 0);
        ask_polling(&wire, ROUNDS / 4);
        ask_polling(&wire, 50);
        take_polling(&wire, 1);
        put(&wire, 100);
        expect_end(&wire);
        close(wire.fd);
    }
    say("client done");
}

static const struct scenario scenarios[] = {
    {"cancel", cancel_server, cancel_client},    {"handler", handler_server, handler_client},
    {"jumping", jumping_server, jumping_client}, {"sigio", sigio_server, sigio_client},
    {"interrupted", interrupted_server, interrupted_client},
    {"beside_sleeper", beside_sleeper_server, beside_sleeper_client},
};

int main(int argc, char **argv) {
    return play(scenarios, sizeof scenarios / sizeof *scenarios, argc, argv);
}
