/* A connection changes hands with bytes unread, in each state that it can be in, and in each way that there is to hand it
 * over: the process that has it then reads every byte, and what it answers arrives whole. */
#include "lane.h"
#include <spawn.h>

#define ROUNDS 100
#define UNREAD 5000
#define ANSWER 300000
extern char **environ;

enum state { OPEN, PEER_SHUT, PEER_CLOSED, PEER_RESET, SELF_SHUT, BOTH_SHUT, STATES };
enum way { BY_EXEC, BY_VFORK, BY_SPAWN, BY_MESSAGE, BY_FORK, WAYS };
static const char *const state_names[] = {"open", "peer shut", "peer closed", "peer reset", "self shut", "both shut"};
static const char *const way_names[] = {"exec", "vfork", "spawn", "message", "fork"};

/* Whatever a program asks first tells that there is something. */
static void ask_first(int fd, unsigned number) {
    struct pollfd wait = {fd, POLLIN, 0};
    int there = 0;
    fd_set set;
    switch (number % 5) {
    case 1: CHECK(poll(&wait, 1, 5000) == 1 && wait.revents & POLLIN); break;
    case 2: CHECK(ioctl(fd, FIONREAD, &there) == 0 && there >= UNREAD); break;
    case 3: {
        int epoll = epoll_create1(0);
        struct epoll_event event = {.events = EPOLLIN};
        CHECK(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0);
        CHECK(epoll_wait(epoll, &event, 1, 5000) == 1);
        close(epoll);
        break;
    }
    case 4: {
        struct timeval limit = {5, 0};
        FD_ZERO(&set);
        FD_SET(fd, &set);
        CHECK(select(fd + 1, &set, NULL, NULL, &limit) == 1);
    }
    }
}

static uint64_t conversation(void) {
    uint64_t bytes = 0;
    for (unsigned number = 0; number < ROUNDS; number++) bytes += round_length(number);
    return bytes;
}

static uint64_t answers(void) {
    uint64_t bytes = 0;
    for (unsigned number = 0; number < ROUNDS; number++) bytes += round_length(number + 5);
    return bytes;
}

/* Reads what was left unread, to the end where there is one, and answers where that is possible. */
static int reader(int fd, int tag) {
    enum state state = tag % STATES;
    struct wire wire = server_end(fd, 0);
    wire.got = conversation();
    wire.sent = answers();
    /* The process that had the connection has closed it by now, or will: both must be right. */
    if (tag % 2) sleep_us(10000);
    ask_first(fd, tag);
    take(&wire, UNREAD);
    const char *end = "no end";
    if (state != OPEN && state != SELF_SHUT) {
        char byte;
        ssize_t got = recv(fd, &byte, 1, 0);
        end = got == 0 ? "end" : got < 0 && errno == ECONNRESET ? "reset" : "something else";
    }
    if (state == OPEN || state == PEER_SHUT) put(&wire, ANSWER);
    say("%s by %s: got %llu, then %s", state_names[state], way_names[tag / STATES], (unsigned long long)wire.got, end);
    return 0;
}

static pid_t start_reader(int fd, int tag, int channel) {
    char text[2][16];
    snprintf(text[0], sizeof text[0], "%d", 40);
    snprintf(text[1], sizeof text[1], "%d", tag);
    char *const program[] = {arguments[0], "reader", text[0], text[1], NULL};
    pid_t child = -1;
    posix_spawn_file_actions_t actions;
    switch (tag / STATES) {
    case BY_EXEC:
        child = fork_child();
        if (child == 0) {
            if (dup2(fd, 40) == 40) execv(arguments[0], program);
            _exit(127);
        }
        break;
    case BY_VFORK:
        child = vfork();
        if (child == 0) {
            if (dup2(fd, 40) == 40) execve(arguments[0], program, environ);
            _exit(127);
        }
        break;
    case BY_SPAWN:
        CHECK(posix_spawn_file_actions_init(&actions) == 0);
        CHECK(posix_spawn_file_actions_adddup2(&actions, fd, 40) == 0);
        CHECK(posix_spawn(&child, arguments[0], &actions, NULL, program, environ) == 0);
        CHECK(posix_spawn_file_actions_destroy(&actions) == 0);
        break;
    case BY_FORK:
        child = fork_child();
        if (child == 0) exit(reader(fd, tag));
        break;
    default: CHECK(send_descriptor(channel, fd, &tag, sizeof tag) == sizeof tag); return 0;
    }
    CHECK(child > 0);
    return child;
}

static int help(int channel) {
    int tag;
    for (int fd; (fd = receive_descriptor(channel, &tag, sizeof tag)) >= 0;) {
        reader(fd, tag);
        close(fd);
        CHECK(send(channel, &tag, sizeof tag, 0) == sizeof tag);
    }
    return 0;
}

static void until_unread(int fd, enum state state) {
    int there = 0;
    if (state == OPEN || state == SELF_SHUT) {
        for (double began = now_s(); there < UNREAD; sleep_us(100)) {
            CHECK(now_s() - began < 10);
            CHECK(ioctl(fd, FIONREAD, &there) == 0);
        }
    } else {
        struct pollfd wait = {fd, POLLRDHUP, 0};
        CHECK(poll(&wait, 1, 10000) == 1);
    }
}

static void inherited_server(int listener) {
    int pair[2];
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0);
    pid_t helper = fork_child();
    if (helper == 0) {
        close(pair[0]);
        exit(help(pair[1]));
    }
    close(pair[1]);
    for (int tag = 0; tag < STATES * WAYS; tag++) {
        int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        CHECK(fd >= 0);
        struct wire wire = server_end(fd, 0);
        answer_polling(&wire, ROUNDS);
        let_it_come(&wire);
        if (tag % STATES == SELF_SHUT || tag % STATES == BOTH_SHUT) CHECK(shutdown(fd, SHUT_WR) == 0);
        until_unread(fd, tag % STATES);
        pid_t child = start_reader(fd, tag, pair[0]);
        close(fd);
        if (child > 0) expect_child(child);
        else CHECK(recv(pair[0], &(int){0}, sizeof(int), 0) == sizeof(int));
    }
    close(pair[0]);
    expect_child(helper);
    say("server done");
}

static void inherited_client(int port) {
    for (int tag = 0; tag < STATES * WAYS; tag++) {
        enum state state = tag % STATES;
        struct wire wire = client_end(connect_to(port), 0);
        ask_polling(&wire, ROUNDS);
        put(&wire, UNREAD);
        if (state == PEER_SHUT || state == BOTH_SHUT) CHECK(shutdown(wire.fd, SHUT_WR) == 0);
        if (state == PEER_RESET) {
            struct linger linger = {1, 0};
            CHECK(setsockopt(wire.fd, SOL_SOCKET, SO_LINGER, &linger, sizeof linger) == 0);
        }
        if (state == PEER_CLOSED || state == PEER_RESET) {
            close(wire.fd);
            continue;
        }
        /* Slowly: what was written lies there when its writer has long gone. */
        for (unsigned part = 0; (state == OPEN || state == PEER_SHUT) && part < ANSWER; part += ANSWER / 20) {
            take(&wire, ANSWER / 20);
            sleep_us(500);
        }
        expect_end(&wire);
        say("%s by %s: got %llu", state_names[state], way_names[tag / STATES], (unsigned long long)wire.got);
        close(wire.fd);
    }
}

/* The process that passed the connection on is long dead when another one takes it. */
static void in_transit_server(int listener) {
    int pair[2], tag;
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair) == 0);
    pid_t front = fork_child();
    if (front == 0) {
        int fd = accept_one(listener);
        struct wire wire = server_end(fd, 0);
        answer_polling(&wire, ROUNDS);
        let_it_come(&wire);
        until_unread(fd, PEER_SHUT);
        tag = PEER_SHUT;
        CHECK(send_descriptor(pair[0], fd, &tag, sizeof tag) == sizeof tag);
        exit(0);
    }
    expect_child(front);
    /* Longer than the registry leaves to the dead. */
    sleep_us(2500000);
    int fd = receive_descriptor(pair[1], &tag, sizeof tag);
    reader(fd, tag);
    close(fd);
    say("server done");
}

static void in_transit_client(int port) {
    struct wire wire = client_end(connect_to(port), 0);
    ask_polling(&wire, ROUNDS);
    put(&wire, UNREAD);
    CHECK(shutdown(wire.fd, SHUT_WR) == 0);
    take(&wire, ANSWER);
    expect_end(&wire);
    say("client done");
}

/* A program that is started with the connection as its standard input and output closes one of them and goes on. */
static void one_of_two_server(int listener) {
    int fd = accept_one(listener);
    struct wire wire = server_end(fd, 0);
    answer_polling(&wire, ROUNDS);
    let_it_come(&wire);
    until_unread(fd, OPEN);
    int kept = dup(1);
    CHECK(dup2(fd, 0) == 0 && dup2(fd, 1) == 1);
    close(fd);
    char text[16];
    snprintf(text, sizeof text, "%d", kept);
    execl(arguments[0], arguments[0], "half", text, (char *)NULL);
    die("exec");
}

static int half(int kept) {
    struct wire input = server_end(0, 0), output = server_end(1, 0);
    input.got = conversation();
    output.sent = answers();
    take(&input, UNREAD / 2);
    CHECK(close(0) == 0);
    put(&output, ANSWER);
    input.fd = 1;
    take(&input, UNREAD - UNREAD / 2);
    put(&output, ANSWER);
    CHECK(close(1) == 0);
    CHECK(dup2(kept, 1) == 1);
    say("half done");
    return 0;
}

static void one_of_two_client(int port) {
    struct wire wire = client_end(connect_to(port), 0);
    ask_polling(&wire, ROUNDS);
    put(&wire, UNREAD);
    take(&wire, 2 * ANSWER);
    expect_end(&wire);
    say("client done");
}

/* Threads of a program that was started with several connections use them all at once. */
#define TOGETHER 8

static void together_server(int listener) {
    int fds[TOGETHER];
    for (unsigned number = 0; number < TOGETHER; number++) {
        fds[number] = accept_one(listener);
        struct wire wire = server_end(fds[number], 0);
        answer_polling(&wire, ROUNDS);
        let_it_come(&wire);
    }
    for (unsigned number = 0; number < TOGETHER; number++) {
        until_unread(fds[number], OPEN);
        CHECK(dup2(fds[number], 40 + number) == (int)(40 + number));
    }
    execl(arguments[0], arguments[0], "together-readers", (char *)NULL);
    die("exec");
}

static pthread_barrier_t all_there;

static void *read_together(void *argument) {
    struct wire wire = server_end((int)(intptr_t)argument, 0);
    wire.got = conversation();
    wire.sent = answers();
    pthread_barrier_wait(&all_there);
    take(&wire, UNREAD);
    answer(&wire, 20);
    return NULL;
}

static int together_readers(void) {
    pthread_t threads[TOGETHER];
    pthread_barrier_init(&all_there, NULL, TOGETHER);
    for (intptr_t number = 0; number < TOGETHER; number++)
        CHECK(pthread_create(&threads[number], NULL, read_together, (void *)(40 + number)) == 0);
    for (unsigned number = 0; number < TOGETHER; number++) CHECK(pthread_join(threads[number], NULL) == 0);
    say("readers done");
    return 0;
}

static void together_client(int port) {
    struct wire wires[TOGETHER];
    for (unsigned number = 0; number < TOGETHER; number++) {
        wires[number] = client_end(connect_to(port), 0);
        ask_polling(&wires[number], ROUNDS);
        put(&wires[number], UNREAD);
    }
    for (unsigned number = 0; number < TOGETHER; number++) ask(&wires[number], 20);
    for (unsigned number = 0; number < TOGETHER; number++) expect_end(&wires[number]);
    say("client done");
}

static const struct scenario scenarios[] = {
    {"inherited", inherited_server, inherited_client},
    {"in_transit", in_transit_server, in_transit_client},
    {"one_of_two", one_of_two_server, one_of_two_client},
    {"together", together_server, together_client},
};

int main(int argc, char **argv) {
    argument_count = argc;
    arguments = argv;
    if (argc > 3 && strcmp(argv[1], "reader") == 0) return reader(atoi(argv[2]), atoi(argv[3]));
    if (argc > 2 && strcmp(argv[1], "half") == 0) return half(atoi(argv[2]));
    if (argc > 1 && strcmp(argv[1], "together-readers") == 0) return together_readers();
    return play(scenarios, sizeof scenarios / sizeof *scenarios, argc, argv);
}
