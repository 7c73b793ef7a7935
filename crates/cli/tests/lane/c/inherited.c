/* A connection changes hands with bytes unread, in each state that it can be in, and in each way that there is to hand it
 * over: the process that has it then reads every byte, and what it answers arrives whole. */
#include "lane.h"
#include <linux/io_uring.h>
#include <spawn.h>

#define ROUNDS 100
#define UNREAD 5000
#define ANSWER 300000
extern char **environ;

enum state { OPEN, PEER_SHUT, PEER_CLOSED, PEER_RESET, SELF_SHUT, BOTH_SHUT, STATES };
enum way { BY_EXEC, BY_VFORK, BY_SPAWN, BY_MESSAGE, BY_FORK, BY_SYSTEM, BY_POPEN, BY_CLONE, WAYS };
static const char *const state_names[] = {"open", "peer shut", "peer closed", "peer reset", "self shut", "both shut"};
static const char *const way_names[] = {"exec", "vfork", "spawn", "message", "fork", "system", "popen", "clone"};

/* Whatever a program asks first tells that there is something. */
static void ask_first(int fd, unsigned number) {
    int there = 0;
    fd_set set;
    switch (number % 5) {
    case 1: {
        /* Behind a socket that this program has made itself. */
        struct pollfd list[2] = {{socket(AF_INET, SOCK_STREAM, 0), POLLIN, 0}, {fd, POLLIN, 0}};
        CHECK(poll(list, 2, 5000) == 2 && list[1].revents & POLLIN);
        close(list[0].fd);
        break;
    }
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

static void tick(int signal) { (void)signal; }

/* Signals come all the while, also while the library finds out what the descriptor is. */
static void let_signals_come(int every_us) {
    struct sigaction action = {.sa_handler = tick, .sa_flags = SA_RESTART};
    struct itimerval often = {{0, every_us}, {0, every_us}};
    CHECK(sigaction(SIGALRM, &action, NULL) == 0 && setitimer(ITIMER_REAL, &often, NULL) == 0);
}

/* A duplicate is used, of which nothing was known before, at a number that was another file's. */
static int duplicated(int fd, int tag) {
    int before = open("/dev/null", O_RDONLY), to = -1;
    CHECK(before >= 0 && read(before, &(char){0}, 1) == 0 && close(before) == 0);
    switch (tag % 7) {
    case 1: to = dup(fd); break;
    case 2: to = dup2(fd, before); break;
    case 3: to = dup3(fd, before, O_CLOEXEC); break;
    case 4: to = fcntl(fd, F_DUPFD, before); break;
    case 5: to = fcntl(fd, F_DUPFD_CLOEXEC, before); break;
    default: return fd;
    }
    CHECK(to == before && close(fd) == 0);
    return to;
}

/* Reads what was left unread, to the end where there is one, and answers where that is possible. The descriptor that it did
 * so by. */
static int finish(int fd, int tag) {
    enum state state = tag % STATES;
    if (tag % 5 == 0 || tag % 5 == 2) let_signals_come(100);
    struct wire wire = server_end(duplicated(fd, tag), 0);
    fd = wire.fd;
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
    let_signals_come(0);
    return fd;
}

static int reader(int fd, int tag) {
    finish(fd, tag);
    return 0;
}

static pid_t clone_child(void) {
#ifdef __x86_64__
    return (pid_t)syscall(SYS_clone, SIGCHLD, NULL, NULL, NULL, NULL);
#else
    return fork_child();
#endif
}

/* What `popen` has started, until it is waited for. */
static FILE *opened;

static pid_t start_reader(int fd, int tag, int channel) {
    char text[2][16], command[4200];
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
    case BY_CLONE:
        child = tag / STATES == BY_FORK ? fork_child() : clone_child();
        if (child == 0) exit(reader(fd, tag));
        break;
    case BY_SYSTEM:
    case BY_POPEN:
        CHECK(dup2(fd, 40) == 40);
        snprintf(command, sizeof command, "exec '%s' reader 40 %d", arguments[0], tag);
        if (tag / STATES == BY_SYSTEM) CHECK(system(command) == 0);
        else CHECK((opened = popen(command, "w")) != NULL);
        CHECK(close(40) == 0);
        return 0;
    default: CHECK(send_descriptor(channel, fd, &tag, sizeof tag) == sizeof tag); return 0;
    }
    CHECK(child > 0);
    return child;
}

static int help(int channel) {
    int tag;
    for (int fd; (fd = receive_descriptor(channel, &tag, sizeof tag)) >= 0;) {
        close(finish(fd, tag));
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

/* A connection that has talked and has bytes unread. */
static int accept_unread(int listener, enum state state) {
    int fd = accept_one(listener);
    struct wire wire = server_end(fd, 0);
    answer_polling(&wire, ROUNDS);
    let_it_come(&wire);
    until_unread(fd, state);
    return fd;
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
        /* The test looks whether the bytes lie in a lane. */
        if (tag == OPEN) hold();
        pid_t child = start_reader(fd, tag, pair[0]);
        close(fd);
        if (child > 0) expect_child(child);
        else if (tag / STATES == BY_POPEN) CHECK(pclose(opened) == 0);
        else if (tag / STATES != BY_SYSTEM) CHECK(recv(pair[0], &(int){0}, sizeof(int), 0) == sizeof(int));
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
        int fd = accept_unread(listener, PEER_SHUT);
        tag = PEER_SHUT;
        CHECK(send_descriptor(pair[0], fd, &tag, sizeof tag) == sizeof tag);
        exit(0);
    }
    expect_child(front);
    /* Longer than the registry leaves to the dead. */
    sleep_us(2500000);
    int fd = receive_descriptor(pair[1], &tag, sizeof tag);
    close(finish(fd, tag));
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

/* Becomes a program that has the connection as its standard input and output, bytes unread. */
static void become(int listener, const char *program) {
    int fd = accept_unread(listener, OPEN);
    int kept = dup(1);
    CHECK(dup2(fd, 0) == 0 && dup2(fd, 1) == 1);
    close(fd);
    char text[16];
    snprintf(text, sizeof text, "%d", kept);
    execl(arguments[0], arguments[0], program, text, (char *)NULL);
    die("exec");
}

/* The program closes one of the two descriptors and goes on with the other one. */
static void one_of_two_server(int listener) { become(listener, "half"); }

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

/* The program reads and writes by stdio, and by system calls in between. */
static void by_stdio_server(int listener) { become(listener, "stdio"); }

static int by_stdio(int kept) {
    struct wire input = server_end(0, 0), output = server_end(1, 0);
    static unsigned char bytes[UNREAD];
    input.got = conversation();
    output.sent = answers();
    CHECK(fileno(stdin) == 0 && setvbuf(stdin, NULL, _IOFBF, 1000) == 0);
    for (unsigned turn = 0; turn < 5; turn++) {
        CHECK(fread(bytes, 1, UNREAD / 5, stdin) == UNREAD / 5);
        verify(&input, bytes, UNREAD / 5);
    }
    for (unsigned turn = 0; turn < 200; turn++) {
        int by_file = turn % 3 != 0;
        CHECK(getchar() == *pattern(input.in, input.got++));
        for (unsigned at = 1; at < 100; at++) CHECK(getc(stdin) == *pattern(input.in, input.got++));
        if (by_file) {
            CHECK(fwrite(pattern(output.out, output.sent), 1, 100, stdout) == 100 && fflush(stdout) == 0);
            output.sent += 100;
        } else {
            put(&output, 100);
        }
    }
    CHECK(getchar() == EOF && feof(stdin) && fclose(stdin) == 0);
    CHECK(close(1) == 0 && dup2(kept, 1) == 1);
    say("stdio done");
    return 0;
}

static void by_stdio_client(int port) {
    struct wire wire = client_end(connect_to(port), 0);
    ask_polling(&wire, ROUNDS);
    put(&wire, UNREAD);
    for (unsigned turn = 0; turn < 200; turn++) {
        put(&wire, 100);
        if (turn % 2) take(&wire, 100);
        else take_polling(&wire, 100);
    }
    CHECK(shutdown(wire.fd, SHUT_WR) == 0);
    expect_end(&wire);
    say("client done");
}

/* Threads of a program that was started with several connections use them all at once. Each has streams of its own: bytes of
 * another connection are told apart. */
#define TOGETHER 8

static void together_server(int listener) {
    int fds[TOGETHER];
    for (unsigned number = 0; number < TOGETHER; number++) {
        fds[number] = accept_one(listener);
        struct wire wire = server_end(fds[number], number);
        answer_polling(&wire, ROUNDS);
        let_it_come(&wire);
    }
    for (unsigned number = 0; number < TOGETHER; number++) {
        CHECK(fds[number] < 40);
        until_unread(fds[number], OPEN);
        CHECK(dup2(fds[number], 40 + number) == (int)(40 + number));
    }
    execl(arguments[0], arguments[0], "together-readers", (char *)NULL);
    die("exec");
}

static pthread_barrier_t all_there;

static void *read_together(void *argument) {
    int fd = (int)(intptr_t)argument;
    struct wire wire = server_end(fd, fd - 40);
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
        wires[number] = client_end(connect_to(port), number);
        ask_polling(&wires[number], ROUNDS);
        put(&wires[number], UNREAD);
    }
    for (unsigned number = 0; number < TOGETHER; number++) ask(&wires[number], 20);
    for (unsigned number = 0; number < TOGETHER; number++) expect_end(&wires[number]);
    say("client done");
}

/* Threads of a program that was started with a connection use it at once, one of them to read and the others to write, each by
 * a descriptor of its own or by the same. */
#define SHARED_ROUNDS 40

static void shared_at_once_server(int listener) {
    for (unsigned turn = 0; turn < SHARED_ROUNDS; turn++) {
        int fd = accept_unread(listener, OPEN);
        pid_t child = fork_child();
        if (child == 0) {
            CHECK(dup2(fd, 40) == 40 && dup2(fd, 41) == 41);
            execl(arguments[0], arguments[0], "shared-readers", turn % 2 ? "41" : "40", (char *)NULL);
            _exit(127);
        }
        close(fd);
        expect_child(child);
    }
    say("server done");
}

static void *write_shared(void *argument) {
    struct wire wire = server_end((int)(intptr_t)argument, 0);
    wire.sent = answers();
    pthread_barrier_wait(&all_there);
    put(&wire, ANSWER);
    return NULL;
}

static int shared_readers(void) {
    pthread_t writer;
    pthread_barrier_init(&all_there, NULL, 2);
    CHECK(pthread_create(&writer, NULL, write_shared, (void *)(intptr_t)atoi(arguments[2])) == 0);
    struct wire wire = server_end(40, 0);
    wire.got = conversation();
    pthread_barrier_wait(&all_there);
    take(&wire, UNREAD + ANSWER);
    CHECK(pthread_join(writer, NULL) == 0);
    return 0;
}

static void shared_at_once_client(int port) {
    for (unsigned turn = 0; turn < SHARED_ROUNDS; turn++) {
        struct wire wire = client_end(connect_to(port), 0);
        ask_polling(&wire, ROUNDS);
        put(&wire, UNREAD);
        for (unsigned part = 0; part < ANSWER; part += ANSWER / 20) {
            put(&wire, ANSWER / 20);
            take(&wire, ANSWER / 20);
        }
        expect_end(&wire);
        close(wire.fd);
    }
    say("client done");
}

/* Programs that have no lanes of their own are started with a connection: one uses io_uring, one may not have any at its port. */
static const char *const unwilling_names[] = {"with a ring", "of another port"};
#define UNWILLING 2

static void unwilling_server(int listener) {
    for (unsigned number = 0; number < UNWILLING; number++) {
        int fd = accept_unread(listener, OPEN);
        pid_t child = fork_child();
        if (child == 0) {
            if (number == 1) setenv("HIGHWIRE_LANES_NEVER", "1-65535", 1);
            if (dup2(fd, 40) == 40) execl(arguments[0], arguments[0], "unwilling-reader", unwilling_names[number], (char *)NULL);
            _exit(127);
        }
        close(fd);
        expect_child(child);
    }
    say("server done");
}

static int unwilling(const char *name) {
    struct io_uring_params parameters = {0};
    if (strcmp(name, unwilling_names[0]) == 0 && syscall(SYS_io_uring_setup, 8, &parameters) < 0)
        say("io_uring is forbidden here");
    finish(40, OPEN);
    return 0;
}

static void unwilling_client(int port) {
    for (unsigned number = 0; number < UNWILLING; number++) {
        struct wire wire = client_end(connect_to(port), 0);
        ask_polling(&wire, ROUNDS);
        put(&wire, UNREAD);
        take(&wire, ANSWER);
        expect_end(&wire);
        close(wire.fd);
    }
    say("client done");
}

static const struct scenario scenarios[] = {
    {"inherited", inherited_server, inherited_client},
    {"in_transit", in_transit_server, in_transit_client},
    {"one_of_two", one_of_two_server, one_of_two_client},
    {"by_stdio", by_stdio_server, by_stdio_client},
    {"shared_at_once", shared_at_once_server, shared_at_once_client},
    {"together", together_server, together_client},
    {"unwilling", unwilling_server, unwilling_client},
};

int main(int argc, char **argv) {
    argument_count = argc;
    arguments = argv;
    if (argc > 3 && strcmp(argv[1], "reader") == 0) return reader(atoi(argv[2]), atoi(argv[3]));
    if (argc > 2 && strcmp(argv[1], "half") == 0) return half(atoi(argv[2]));
    if (argc > 2 && strcmp(argv[1], "stdio") == 0) return by_stdio(atoi(argv[2]));
    if (argc > 1 && strcmp(argv[1], "shared-readers") == 0) return shared_readers();
    if (argc > 1 && strcmp(argv[1], "together-readers") == 0) return together_readers();
    if (argc > 2 && strcmp(argv[1], "unwilling-reader") == 0) return unwilling(argv[2]);
    return play(scenarios, sizeof scenarios / sizeof *scenarios, argc, argv);
}
