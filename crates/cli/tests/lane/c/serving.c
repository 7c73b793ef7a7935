/* Servers as they are written: one that forks for each connection, one that executes a program on it, a pool that shares its
 * listening socket, several that share a port, and threads that close what another one reads. */
#include "lane.h"

#define ROUNDS 200

/* A child for each connection; the parent only closes. */
static void forking_server(int listener) {
    for (unsigned number = 0; number < 6; number++) {
        int fd = accept_one(listener);
        pid_t child = fork_child();
        if (child == 0) {
            close(listener);
            say("echoed %llu", (unsigned long long)echo_until_end(fd));
            exit(0);
        }
        close(fd);
    }
    while (wait(NULL) > 0) {}
}


static void forking_client(int port) {
    struct wire wires[6];
    for (unsigned number = 0; number < 6; number++) wires[number] = echo_client(connect_to(port), 0);
    /* In turn, so that all children are alive and each has its own pauses. */
    for (unsigned turn = 0; turn < 4; turn++)
        for (unsigned number = 0; number < 6; number++) ask_echo(&wires[number], ROUNDS / 4);
    for (unsigned number = 0; number < 6; number++) {
        put(&wires[number], 100000);
        take(&wires[number], 100000);
        close(wires[number].fd);
        say("connection %u: %llu", number, (unsigned long long)wires[number].got);
    }
}

/* A child, in each way that there is to make one: libc's, those that tell nobody, and the instruction itself. */
static pid_t fork_some_way(unsigned way) {
    pid_t child = -1;
    fflush(stdout);
    switch (way % 4) {
    case 0: child = fork(); break;
    case 1: child = _Fork(); break;
#if defined(__x86_64__)
    case 2: child = syscall(SYS_fork); break;
    case 3: __asm__ volatile("syscall" : "=a"(child) : "a"(SYS_fork) : "rcx", "r11", "memory"); break;
#else
    default: child = syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
#endif
    }
    CHECK(child >= 0);
    if (child == 0) prctl(PR_SET_PDEATHSIG, SIGKILL);
    return child;
}

/* The connection has long been in use when its process forks: first the child serves, then the parent again, then a child
 * while the parent has closed its descriptor. */
static void late_fork_server(int listener) {
    struct wire *wire = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(wire != MAP_FAILED);
    *wire = server_end(accept_one(listener), 0);
    answer(wire, ROUNDS);
    for (unsigned turn = 0; turn < 8; turn++) {
        let_it_come(wire);
        pid_t child = fork_some_way(turn);
        if (child == 0) {
            if (turn < 4) answer(wire, ROUNDS / 2);
            else answer_polling(wire, ROUNDS / 2);
            _exit(0);
        }
        expect_child(child);
        answer_polling(wire, ROUNDS / 2);
    }
    pid_t child = fork_child();
    if (child == 0) {
        /* By now the parent has closed its own, or will: both must be right. */
        answer(wire, ROUNDS);
        put(wire, 300000);
        take(wire, 300000);
        hold();
        say("child: sent %llu got %llu", (unsigned long long)wire->sent, (unsigned long long)wire->got);
        exit(0);
    }
    close(wire->fd);
    expect_child(child);
    say("server done");
}

static void late_fork_client(int port) {
    struct wire wire = client_end(connect_to(port), 0);
    ask(&wire, ROUNDS);
    for (unsigned turn = 0; turn < 16; turn++) {
        if (turn % 3) ask_polling(&wire, ROUNDS / 2);
        else ask(&wire, ROUNDS / 2);
    }
    ask(&wire, ROUNDS);
    take(&wire, 300000);
    put(&wire, 300000);
    expect_end(&wire);
    say("client: sent %llu got %llu", (unsigned long long)wire.sent, (unsigned long long)wire.got);
}

/* A server that puts itself into the background in the middle of a conversation. */
static void daemon_server(int listener) {
    struct wire wire = server_end(accept_one(listener), 0);
    answer_polling(&wire, ROUNDS);
    say("in the foreground");
    let_it_come(&wire);
    CHECK(daemon(1, 1) == 0);
    /* Nobody waits for it any more, so it has to see to its end itself. */
    alarm(20);
    answer_polling(&wire, ROUNDS);
    answer(&wire, ROUNDS);
    put(&wire, 100000);
    say("in the background: got %llu", (unsigned long long)wire.got);
}

static void daemon_client(int port) {
    struct wire wire = client_end(connect_to(port), 0);
    ask_polling(&wire, ROUNDS);
    ask_polling(&wire, ROUNDS);
    ask(&wire, ROUNDS);
    take(&wire, 100000);
    expect_end(&wire);
    say("client done");
}

/* As inetd does it: the connection becomes standard input, output and error of another program. One of them is `cat`, one a
 * program that is linked to libc as this one is, one is static. */
static void inetd_server(int listener) {
    CHECK(argument_count > 4);
    const char *programs[][4] = {{"/bin/cat", NULL}, {arguments[0], "echo", "standard", "input"}, {arguments[4], NULL}};
    for (unsigned warm = 0; warm < 2; warm++) {
        /* Bytes that lie in a lane are lost to a static program, as the README says. */
        for (unsigned number = 0; number < (warm ? 2 : 3); number++) {
            int fd = accept_one(listener);
            if (warm) {
                /* It has been read before, by a process that knows nothing of what comes later. */
                struct wire wire = server_end(fd, 1);
                answer_polling(&wire, ROUNDS);
                let_it_come(&wire);
            }
            pid_t child = fork_child();
            if (child == 0) {
                dup2(fd, 0);
                dup2(fd, 1);
                dup2(fd, 2);
                close(fd);
                close(listener);
                const char *const *program = programs[number];
                execl(program[0], program[0], program[1], program[2], program[3], (char *)NULL);
                _exit(127);
            }
            close(fd);
            expect_child(child);
        }
    }
    say("server done");
}

static void inetd_client(int port) {
    for (unsigned warm = 0; warm < 2; warm++) {
        for (unsigned number = 0; number < (warm ? 2 : 3); number++) {
            int fd = connect_to(port);
            if (warm) {
                struct wire wire = client_end(fd, 1);
                ask_polling(&wire, ROUNDS);
                /* Sent before the other program is there: nobody may take it on the way. */
            }
            struct wire wire = echo_client(fd, 2);
            put(&wire, 5000);
            take(&wire, 5000);
            ask_echo(&wire, ROUNDS);
            put(&wire, 50000);
            CHECK(shutdown(fd, SHUT_WR) == 0);
            take(&wire, 50000);
            expect_end(&wire);
            close(fd);
            say("warm %u program %u: %llu", warm, number, (unsigned long long)wire.got);
        }
    }
}

/* Children that accept from one listening socket. */
static void prefork_server(int listener) {
    pid_t children[4];
    int done[2];
    CHECK(pipe(done) == 0);
    for (unsigned number = 0; number < 4; number++) {
        children[number] = fork_child();
        if (children[number] == 0) {
            close(done[1]);
            for (;;) {
                struct pollfd either[2] = {{listener, POLLIN, 0}, {done[0], POLLIN, 0}};
                CHECK(poll(either, 2, -1) > 0);
                if (either[1].revents) _exit(0);
                set_nonblocking(listener, 1);
                int fd = accept(listener, NULL, NULL);
                if (fd < 0) continue;
                echo_until_end(fd);
                close(fd);
            }
        }
    }
    until_told();
    close(done[1]);
    for (unsigned number = 0; number < 4; number++) expect_child(children[number]);
    say("server done");
}

static void *prefork_client_of_one(void *argument) {
    int port = *(int *)argument;
    for (unsigned turn = 0; turn < 3; turn++) {
        struct wire wire = echo_client(connect_to(port), turn);
        ask_echo(&wire, ROUNDS);
        put(&wire, 100000);
        take(&wire, 100000);
        close(wire.fd);
    }
    return NULL;
}

static void prefork_client(int port) {
    pthread_t threads[4];
    for (unsigned number = 0; number < 4; number++)
        CHECK(pthread_create(&threads[number], NULL, prefork_client_of_one, &port) == 0);
    for (unsigned number = 0; number < 4; number++) CHECK(pthread_join(threads[number], NULL) == 0);
    say("12 conversations");
}

/* Three processes listen at one port, each with a socket of its own. */
static void reuseport_server(int first) {
    int probe = listen_on(0, SO_REUSEPORT), port = port_of(probe);
    close(first);
    int done[2];
    pid_t children[3];
    CHECK(pipe(done) == 0);
    for (unsigned number = 0; number < 3; number++) {
        int listener = number == 0 ? probe : listen_on(port, SO_REUSEPORT);
        children[number] = fork_child();
        if (children[number] == 0) {
            close(done[1]);
            for (;;) {
                struct pollfd either[2] = {{listener, POLLIN, 0}, {done[0], POLLIN, 0}};
                CHECK(poll(either, 2, -1) > 0);
                if (either[1].revents) _exit(0);
                int fd = accept_one(listener);
                echo_until_end(fd);
                close(fd);
            }
        }
        close(listener);
    }
    say("port %d", port);
    until_told();
    close(done[1]);
    for (unsigned number = 0; number < 3; number++) expect_child(children[number]);
    say("server done");
}

static void reuseport_client(int port) {
    for (unsigned number = 0; number < 30; number++) {
        struct wire wire = echo_client(connect_to(port), number);
        ask_echo(&wire, ROUNDS / 4);
        close(wire.fd);
    }
    say("30 conversations");
}

/* One thread reads, another one shuts the connection down: the reader sees its end. */
struct closing {
    struct wire wire;
    pthread_barrier_t reading;
    ssize_t result;
    int error;
};

static void *read_one(void *argument) {
    struct closing *closing = argument;
    unsigned char bytes[64];
    answer(&closing->wire, ROUNDS);
    pthread_barrier_wait(&closing->reading);
    closing->result = recv(closing->wire.fd, bytes, sizeof bytes, 0);
    closing->error = closing->result < 0 ? errno : 0;
    if (closing->result > 0) verify(&closing->wire, bytes, closing->result);
    return NULL;
}

static void closing_server(int listener) {
    for (unsigned turn = 0; turn < 8; turn++) {
        struct closing closing = {.wire = server_end(accept_one(listener), 0)};
        pthread_t reader;
        pthread_barrier_init(&closing.reading, NULL, 2);
        CHECK(pthread_create(&reader, NULL, read_one, &closing) == 0);
        pthread_barrier_wait(&closing.reading);
        sleep_us(turn % 4 * 5000);
        if (turn < 4) {
            CHECK(shutdown(closing.wire.fd, SHUT_RDWR) == 0);
        } else {
            /* Its reader is not woken by this, and still gets what comes next; then the connection is gone. */
            sleep_us(20000);
            CHECK(close(closing.wire.fd) == 0);
        }
        CHECK(pthread_join(reader, NULL) == 0);
        say("turn %u: recv returned %zd, error %d", turn, closing.result, closing.error);
        if (turn >= 4) {
            char byte;
            CHECK(recv(closing.wire.fd, &byte, 1, 0) == -1 && errno == EBADF);
        }
        if (turn < 4) close(closing.wire.fd);
        pthread_barrier_destroy(&closing.reading);
    }
}

static void closing_client(int port) {
    for (unsigned turn = 0; turn < 8; turn++) {
        struct wire wire = client_end(connect_to(port), 0);
        ask(&wire, ROUNDS);
        if (turn >= 4) {
            sleep_us(100000);
            put(&wire, 10);
        }
        expect_end(&wire);
        close(wire.fd);
    }
    say("client done");
}

/* Four threads write to a connection, and four read from it: each record arrives once, and whole. */
#define SHARERS 4
#define EACH 4000

struct share {
    uint32_t writer, number;
    unsigned char payload[56];
};

static struct wire shared_wire;
static pthread_mutex_t counting = PTHREAD_MUTEX_INITIALIZER;
static unsigned char seen_shares[SHARERS][EACH];
static unsigned shares_seen;

static void *write_shares(void *argument) {
    uint32_t writer = (uint32_t)(uintptr_t)argument;
    for (uint32_t number = 0; number < EACH; number++) {
        struct share share = {writer, number, {0}};
        memcpy(share.payload, pattern(writer, number * 5u), sizeof share.payload);
        CHECK(send(shared_wire.fd, &share, sizeof share, MSG_NOSIGNAL) == sizeof share);
        if (number % 16 == 15) {
            /* A byte comes back for it: so little is under way that no record is cut. */
            char byte;
            ssize_t got;
            while ((got = recv(shared_wire.fd, &byte, 1, number % 32 == 15 ? MSG_DONTWAIT : 0)) < 0) CHECK(errno == EAGAIN);
            CHECK(got == 1 && byte == 'a');
        }
    }
    return NULL;
}

static void *read_shares(void *argument) {
    int polls = argument != NULL;
    for (;;) {
        struct share share;
        ssize_t got = recv(shared_wire.fd, &share, sizeof share, polls ? MSG_DONTWAIT : 0);
        if (got < 0 && errno == EAGAIN) {
            sched_yield();
            continue;
        }
        if (got == 0) return NULL;
        if (got != sizeof share) die("recv of a record returned %zd", got);
        CHECK(share.writer < SHARERS && share.number < EACH);
        CHECK(memcmp(share.payload, pattern(share.writer, share.number * 5u), sizeof share.payload) == 0);
        pthread_mutex_lock(&counting);
        if (seen_shares[share.writer][share.number]++) die("record %u of %u came twice", share.number, share.writer);
        int acknowledge = ++shares_seen % 16 == 0;
        pthread_mutex_unlock(&counting);
        if (acknowledge) CHECK(send(shared_wire.fd, "a", 1, MSG_NOSIGNAL) == 1);
    }
}

static void share_out(void *(*function)(void *), int every_other) {
    pthread_t threads[SHARERS];
    for (uintptr_t number = 0; number < SHARERS; number++) {
        void *argument = (void *)(every_other ? number % 2 : number);
        CHECK(pthread_create(&threads[number], NULL, function, argument) == 0);
    }
    for (unsigned number = 0; number < SHARERS; number++) CHECK(pthread_join(threads[number], NULL) == 0);
}

static void sharing_server(int listener) {
    shared_wire = server_end(accept_one(listener), 0);
    answer_polling(&shared_wire, ROUNDS);
    share_out(read_shares, 1);
    say("%u records", shares_seen);
}

static void sharing_client(int port) {
    shared_wire = client_end(connect_to(port), 0);
    ask_polling(&shared_wire, ROUNDS);
    share_out(write_shares, 0);
    CHECK(shutdown(shared_wire.fd, SHUT_WR) == 0);
    expect_end(&shared_wire);
    say("client done");
}

/* One thread sleeps in a call that waits for the connection; another one looks at it, and goes on with something else. The
 * sleeper has to be woken. */
static void *sleep_for_one(void *argument) {
    struct wire *wire = &shared_wire;
    struct pollfd wait = {wire->fd, POLLIN, 0};
    struct epoll_event event;
    unsigned way = (unsigned)(uintptr_t)argument;
    if (way == 1) CHECK(poll(&wait, 1, 8000) == 1);
    if (way == 2) {
        int epoll = epoll_create1(0);
        event = (struct epoll_event){.events = EPOLLIN};
        CHECK(epoll_ctl(epoll, EPOLL_CTL_ADD, wire->fd, &event) == 0);
        CHECK(epoll_wait(epoll, &event, 1, 8000) == 1);
        close(epoll);
    }
    take(wire, 10);
    return NULL;
}

static void beside_server(int listener) {
    shared_wire = server_end(accept_one(listener), 0);
    answer_polling(&shared_wire, ROUNDS);
    struct timeval patience = {8, 0};
    CHECK(setsockopt(shared_wire.fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience) == 0);
    for (unsigned turn = 0; turn < 9; turn++) {
        pthread_t sleeper;
        char byte;
        CHECK(pthread_create(&sleeper, NULL, sleep_for_one, (void *)(uintptr_t)(turn % 3)) == 0);
        sleep_us(20000);
        struct pollfd look = {shared_wire.fd, POLLIN, 0};
        for (unsigned times = 0; times < 10; times++) {
            if (turn / 3 != 1) CHECK(recv(shared_wire.fd, &byte, 1, MSG_DONTWAIT) < 0 && errno == EAGAIN);
            if (turn / 3 != 0) CHECK(poll(&look, 1, 0) == 0);
        }
        put(&shared_wire, 1);
        CHECK(pthread_join(sleeper, NULL) == 0);
        answer_polling(&shared_wire, 10);
    }
    say("every sleeper was woken");
}

static void beside_client(int port) {
    struct wire wire = client_end(connect_to(port), 0);
    ask_polling(&wire, ROUNDS);
    for (unsigned turn = 0; turn < 9; turn++) {
        take(&wire, 1);
        put(&wire, 10);
        ask_polling(&wire, 10);
    }
    say("client done");
}

static const struct scenario scenarios[] = {
    {"beside", beside_server, beside_client},
    {"daemon", daemon_server, daemon_client},          {"sharing", sharing_server, sharing_client},
    {"forking", forking_server, forking_client},       {"late_fork", late_fork_server, late_fork_client},
    {"inetd", inetd_server, inetd_client},             {"prefork", prefork_server, prefork_client},
    {"reuseport", reuseport_server, reuseport_client}, {"closing", closing_server, closing_client},
};

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "echo") == 0) {
        /* What inetd executes: its connection is its standard input and output. */
        argument_count = argc;
        arguments = argv;
        unsigned char bytes[4096];
        for (ssize_t got; (got = read(0, bytes, sizeof bytes)) > 0;)
            for (ssize_t done = 0, sent; done < got; done += sent)
                if ((sent = write(1, bytes + done, got - done)) <= 0) return 1;
        return 0;
    }
    return play(scenarios, sizeof scenarios / sizeof *scenarios, argc, argv);
}
