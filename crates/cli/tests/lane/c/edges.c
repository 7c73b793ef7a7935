/* Calls at the edges of what they may be given: little stack, little time, control messages that cannot be. */
#include "lane.h"
#include <sys/select.h>

#define ROUNDS 200

/* ---- control messages that the kernel refuses */

/* Control bytes that end where memory does. */
static void *at_the_end(size_t bytes) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char *pages = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(pages != MAP_FAILED && mprotect(pages + page, page, PROT_NONE) == 0);
    return pages + page - bytes;
}

static void send_refused(int channel, int fd, size_t length) {
    struct iovec data = {"x", 1};
    size_t bytes = 2 * CMSG_SPACE(sizeof(int));
    char *control = at_the_end(bytes);
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = bytes};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    *header = (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof(int))};
    memcpy(CMSG_DATA(header), &fd, sizeof fd);
    header = (struct cmsghdr *)(control + CMSG_SPACE(sizeof(int)));
    *header = (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = length};
    memcpy(CMSG_DATA(header), &fd, sizeof fd);
    ssize_t sent = sendmsg(channel, &message, 0);
    say("length %zu: %zd, %s", length, sent, sent < 0 ? strerror(errno) : "sent");
    struct mmsghdr many = {.msg_hdr = message};
    sent = sendmmsg(channel, &many, 1, 0);
    say("length %zu, of many: %zd, %s", length, sent, sent < 0 ? strerror(errno) : "sent");
}

static void refused_server(int listener) {
    struct wire wire = server_end(accept_one(listener), 0);
    answer_polling(&wire, ROUNDS);
    int pair[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    size_t lengths[] = {0, 1, sizeof(struct cmsghdr) - 1, CMSG_SPACE(sizeof(int)) + 1, 1ul << 30, -1ul};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) send_refused(pair[0], wire.fd, lengths[i]);
    /* Nothing was passed: the connection is as it was. */
    answer_polling(&wire, ROUNDS);
    hold();
    expect_end(&wire);
    say("server done");
}

static void refused_client(int port) {
    struct wire wire = client_end(connect_to(port), 0);
    ask_polling(&wire, ROUNDS);
    ask_polling(&wire, ROUNDS);
    say("client done");
}

/* ---- descriptors among many messages */

static void many_server(int listener) {
    struct wire wire = server_end(accept_one(listener), 0);
    answer_polling(&wire, ROUNDS);
    /* The number that it will have stood for something else before. */
    int pair[2], before[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0 && pipe(before) == 0);
    char byte;
    CHECK(write(before[1], "x", 1) == 1 && read(before[0], &byte, 1) == 1);
    close(before[0]);
    close(before[1]);
    struct iovec data = {"x", 1};
    char control[CMSG_SPACE(sizeof(int))] = {0};
    struct mmsghdr many = {.msg_hdr = {
        .msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control}};
    struct cmsghdr *header = CMSG_FIRSTHDR(&many.msg_hdr);
    *header = (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof(int))};
    memcpy(CMSG_DATA(header), &wire.fd, sizeof wire.fd);
    CHECK(sendmmsg(pair[0], &many, 1, 0) == 1);
    data.iov_base = &byte;
    CHECK(recvmmsg(pair[1], &many, 1, 0, NULL) == 1 && CMSG_FIRSTHDR(&many.msg_hdr) == header);
    close(wire.fd);
    memcpy(&wire.fd, CMSG_DATA(header), sizeof wire.fd);
    answer_polling(&wire, ROUNDS);
    answer(&wire, ROUNDS);
    expect_end(&wire);
    say("server done");
}

static void many_client(int port) {
    struct wire wire = client_end(connect_to(port), 0);
    ask_polling(&wire, ROUNDS);
    ask_polling(&wire, ROUNDS);
    ask(&wire, ROUNDS);
    say("client done");
}

/* ---- threads with little stack */

static struct wire small_wire;
static unsigned char small_bytes[512];
static int small_set, small_pipe[2];

static void small_begin(struct wire wire) {
    struct epoll_event event = {.events = EPOLLIN};
    small_wire = wire;
    CHECK((small_set = epoll_create1(0)) >= 0 && epoll_ctl(small_set, EPOLL_CTL_ADD, wire.fd, &event) == 0);
    CHECK(pipe(small_pipe) == 0);
}

static void small_end(void) {
    CHECK(close(small_set) == 0 && close(small_pipe[0]) == 0 && close(small_pipe[1]) == 0 && close(small_wire.fd) == 0);
}

static ssize_t small_splice(size_t length) {
    ssize_t got = splice(small_wire.fd, NULL, small_pipe[1], NULL, length, 0);
    return got > 0 ? read(small_pipe[0], small_bytes, got) : got;
}

static void small_take(size_t length) {
    for (unsigned part = 0; length > 0; part++) {
        fd_set set;
        struct timeval limit = {20, 0};
        FD_ZERO(&set);
        FD_SET(small_wire.fd, &set);
        CHECK(select(small_wire.fd + 1, &set, NULL, NULL, &limit) == 1 && FD_ISSET(small_wire.fd, &set));
        struct pollfd wait = {small_wire.fd, POLLIN, 0};
        CHECK(poll(&wait, 1, 20000) == 1);
        struct epoll_event event;
        CHECK(epoll_wait(small_set, &event, 1, 20000) == 1);
        CHECK(recv(small_wire.fd, small_bytes, sizeof small_bytes, MSG_PEEK | MSG_DONTWAIT) > 0);
        size_t most = length < sizeof small_bytes ? length : sizeof small_bytes;
        int splices = (small_wire.got + part) % 3 == 0;
        ssize_t got = splices ? small_splice(most) : recv(small_wire.fd, small_bytes, most, 0);
        CHECK(got > 0);
        verify(&small_wire, small_bytes, got);
        length -= got;
    }
}

static void *small_asks(void *unused) {
    for (unsigned number = 0; number < ROUNDS; number++) {
        put(&small_wire, round_length(number));
        small_take(round_length(number + 5));
    }
    return unused;
}

static void *small_answers(void *unused) {
    for (unsigned number = 0; number < ROUNDS; number++) {
        small_take(round_length(number));
        put(&small_wire, round_length(number + 5));
    }
    return unused;
}

/* A thread with so little stack, where the machine allows it at all. */
static void on_little(size_t stack, void *(*function)(void *)) {
    pthread_attr_t attributes;
    pthread_t thread;
    CHECK(pthread_attr_init(&attributes) == 0);
    if (pthread_attr_setstacksize(&attributes, stack) != 0) return;
    CHECK(pthread_create(&thread, &attributes, function, NULL) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
}

static const size_t stacks[] = {16384, 20480, 24576, 32768};

static void small_server(int listener) {
    for (size_t i = 0; i < sizeof stacks / sizeof *stacks; i++) {
        small_begin(server_end(accept_one(listener), 0));
        on_little(stacks[i], small_answers);
        if (i == 0) hold();
        expect_end(&small_wire);
        small_end();
    }
    say("server done");
}

static void small_client(int port) {
    for (size_t i = 0; i < sizeof stacks / sizeof *stacks; i++) {
        small_begin(client_end(connect_to(port), 0));
        on_little(stacks[i], small_asks);
        say("%zu bytes of stack: sent %llu got %llu", stacks[i], (unsigned long long)small_wire.sent,
            (unsigned long long)small_wire.got);
        small_end();
    }
}

/* ---- many in one selection, which a thread remembers beside its stack */

#define MANY 300

static void selecting_server(int listener) {
    static struct wire wires[MANY];
    for (unsigned i = 0; i < MANY; i++) {
        wires[i] = server_end(accept_one(listener), i);
        answer_polling(&wires[i], 20);
    }
    /* One byte on each, in the order of their numbers times seven. */
    for (unsigned i = 0; i < MANY; i++) {
        fd_set set;
        struct timeval limit = {20, 0};
        FD_ZERO(&set);
        for (unsigned j = 0; j < MANY; j++) FD_SET(wires[j].fd, &set);
        int ready = select(wires[MANY - 1].fd + 1, &set, NULL, NULL, &limit);
        unsigned which = i * 7 % MANY;
        if (ready != 1 || !FD_ISSET(wires[which].fd, &set)) die("%d are ready, connection %u is not alone", ready, which);
        take(&wires[which], 1);
        put(&wires[which], 1);
    }
    say("server done");
}

static void selecting_client(int port) {
    static struct wire wires[MANY];
    for (unsigned i = 0; i < MANY; i++) {
        wires[i] = client_end(connect_to(port), i);
        ask_polling(&wires[i], 20);
    }
    for (unsigned i = 0; i < MANY; i++) {
        if (i % 50 == 0) sleep_us(20000);
        put(&wires[i * 7 % MANY], 1);
        take(&wires[i * 7 % MANY], 1);
    }
    say("client done");
}

/* ---- little time to send */

#define PATIENT 4

/* Looked, and reads nothing any more. */
static void patient_server(int listener) {
    struct wire control = server_end(accept_one(listener), PATIENT);
    for (unsigned i = 0; i < PATIENT; i++) {
        struct wire wire = server_end(accept_one(listener), i);
        answer_polling(&wire, ROUNDS);
        let_it_come(&wire);
        take(&control, 1);
        close(wire.fd);
    }
    say("server done");
}

/* Seconds that a call with a limit of 0.1 took until it returned, beside those in which it worked. */
static double waits(int fd, int which, const char *bytes, size_t size) {
    struct iovec parts[3] = {{(void *)bytes, 1000}, {(void *)bytes, size - 2000}, {(void *)bytes, 1000}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 3};
    struct rusage before, after;
    getrusage(RUSAGE_THREAD, &before);
    double began = now_s();
    ssize_t sent = which == 0 ? send(fd, bytes, size, MSG_NOSIGNAL)
                   : which == 1 ? write(fd, bytes, size)
                   : which == 2 ? writev(fd, parts, 3)
                                : sendmsg(fd, &message, MSG_NOSIGNAL);
    double ended = now_s();
    CHECK(sent > 0 || errno == EAGAIN);
    getrusage(RUSAGE_THREAD, &after);
    struct timeval user, system;
    timersub(&after.ru_utime, &before.ru_utime, &user);
    timersub(&after.ru_stime, &before.ru_stime, &system);
    return ended - began - user.tv_sec - system.tv_sec - (user.tv_usec + system.tv_usec) / 1e6;
}

static void patient_client(int port) {
    /* More than all buffers have room for. */
    size_t size = 64 << 20;
    char *bytes = calloc(1, size);
    CHECK(bytes != NULL);
    double least = 10;
    struct wire control = client_end(connect_to(port), PATIENT);
    for (unsigned i = 0; i < PATIENT; i++) {
        struct wire wire = client_end(connect_to(port), i);
        ask_polling(&wire, ROUNDS);
        sleep_us(20000);
        struct timeval limit = {0, 100000};
        CHECK(setsockopt(wire.fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit) == 0);
        double waited = waits(wire.fd, i % 4, bytes, size);
        if (waited < least) least = waited;
        /* What is full stays full, for as long. */
        CHECK(waits(wire.fd, i % 4, bytes, size) > 0.05);
        if (i == 0) hold();
        put(&control, 1);
        /* What was not read is thrown away. */
        struct linger at_once = {1, 0};
        CHECK(setsockopt(wire.fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once) == 0);
        close(wire.fd);
    }
    /* On a machine that is busy some take longer, whoever limits them. */
    if (least < 0.05 || least > 0.25) say("the limit is 0.1 s, and all took %.3f s or more", least);
    say("client done");
}

/* ---- signals while a receive waits for all of its bytes */

static void restarting(int number) { (void)number; }

/* Some are there; a signal ends the wait for the others. */
static void receive_some(struct wire *wire) {
    struct sigaction action = {.sa_handler = restarting, .sa_flags = SA_RESTART};
    struct itimerval every = {{0, 20000}, {0, 20000}}, never = {{0, 0}, {0, 0}};
    char bytes[54];
    CHECK(sigaction(SIGALRM, &action, NULL) == 0 && setitimer(ITIMER_REAL, &every, NULL) == 0);
    ssize_t got = recv(wire->fd, bytes, sizeof bytes, MSG_WAITALL);
    CHECK(setitimer(ITIMER_REAL, &never, NULL) == 0);
    say("%zd of %zu", got, sizeof bytes);
    CHECK(got > 0);
    verify(wire, bytes, got);
}

static void partly_server(int listener) {
    struct wire wire = server_end(accept_one(listener), 0);
    for (int turn = 0; turn < 2; turn++) {
        receive_some(&wire);
        put(&wire, 1);
        answer_polling(&wire, turn == 0 ? ROUNDS : 1);
    }
    expect_end(&wire);
    say("server done");
}

/* Once before there is a lane, and once with it. */
static void partly_client(int port) {
    struct wire wire = client_end(connect_to(port), 0);
    for (int turn = 0; turn < 2; turn++) {
        put(&wire, 10);
        take(&wire, 1);
        ask_polling(&wire, turn == 0 ? ROUNDS : 1);
    }
    say("client done");
}

/* ---- how much is under way */

/* Beside what the buffers of the kernel have room for, which both ends keep small. */
#define LANE_BYTES (1 << 20)
#define KERNEL_BYTES (640 << 10)

static void queued_server(int listener) {
    struct wire wire = server_end(accept_one(listener), 0), control = server_end(accept_one(listener), 1);
    int small = 65536;
    CHECK(setsockopt(wire.fd, SOL_SOCKET, SO_RCVBUF, &small, sizeof small) == 0);
    answer_polling(&wire, ROUNDS);
    let_it_come(&wire);
    put(&control, 1);
    uint64_t total;
    CHECK(recv(control.fd, &total, sizeof total, MSG_WAITALL) == sizeof total);
    /* All of it is there, and nothing else. */
    take(&wire, total);
    expect_end(&wire);
    say("server done");
}

static void queued_client(int port) {
    struct wire wire = client_end(connect_to(port), 0), control = client_end(connect_to(port), 1);
    int small = 65536;
    CHECK(setsockopt(wire.fd, SOL_SOCKET, SO_SNDBUF, &small, sizeof small) == 0);
    ask_polling(&wire, ROUNDS);
    take(&control, 1);
    set_nonblocking(wire.fd, 1);
    uint64_t total = 0;
    double began = now_s();
    /* Full for a while, and not for a moment only. */
    for (double full = began; now_s() - full < 0.2;) {
        ssize_t sent = send(wire.fd, pattern(wire.out, wire.sent), 8192, MSG_NOSIGNAL);
        CHECK(sent > 0 || errno == EAGAIN);
        if (sent < 0) {
            sleep_us(1000);
            continue;
        }
        full = now_s();
        wire.sent += sent;
        total += sent;
    }
    if (total > LANE_BYTES + KERNEL_BYTES) say("%llu bytes are under way", (unsigned long long)total);
    CHECK(send(control.fd, &total, sizeof total, 0) == sizeof total);
    hold();
    say("client done");
}

static const struct scenario scenarios[] = {
    {"refused", refused_server, refused_client},
    {"many", many_server, many_client},
    {"small", small_server, small_client},
    {"selecting", selecting_server, selecting_client},
    {"partly", partly_server, partly_client},
    {"queued", queued_server, queued_client},
    {"patient", patient_server, patient_client},
};

int main(int argc, char **argv) {
    return play(scenarios, sizeof scenarios / sizeof *scenarios, argc, argv);
}
