/* What happens to the descriptor of a connection: it is passed to another process, copied over another one, closed with many
 * others, and inherited by programs that are started in the middle of the traffic. */
#include "lane.h"
#include <spawn.h>

#define ROUNDS 200
extern char **environ;

/* A descriptor, with how far its connection is. */
static void pass(int channel, const struct wire *wire) {
    struct iovec data = {(void *)wire, sizeof *wire};
    char control[CMSG_SPACE(sizeof(int))] = {0};
    struct msghdr message = {
        .msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(header), &wire->fd, sizeof(int));
    CHECK(sendmsg(channel, &message, 0) == sizeof *wire);
}

static int adopt(int channel, struct wire *wire) {
    struct iovec data = {wire, sizeof *wire};
    char control[CMSG_SPACE(sizeof(int))] = {0};
    struct msghdr message = {
        .msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    ssize_t got = recvmsg(channel, &message, 0);
    if (got == 0) return 0;
    CHECK(got == sizeof *wire);
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    CHECK(header != NULL && header->cmsg_type == SCM_RIGHTS);
    memcpy(&wire->fd, CMSG_DATA(header), sizeof(int));
    return 1;
}

/* Another program, to which connections are passed: under Highwire as this one, or without it. */
static pid_t start_helper(int *channel, int plain) {
    int pair[2];
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair) == 0);
    pid_t child = fork_child();
    if (child == 0) {
        close(pair[0]);
        if (plain) unsetenv("LD_PRELOAD");
        char number[16];
        snprintf(number, sizeof number, "%d", pair[1]);
        execl(arguments[0], arguments[0], "helper", number, (char *)NULL);
        _exit(127);
    }
    close(pair[1]);
    *channel = pair[0];
    return child;
}

/* The helper answers rounds and gives the count back; at the end of what is passed it goes. */
static int help(int channel) {
    struct wire wire;
    while (adopt(channel, &wire)) {
        take(&wire, 5000);
        put(&wire, 1);
        answer(&wire, ROUNDS);
        answer_polling(&wire, ROUNDS);
        close(wire.fd);
        CHECK(send(channel, &wire, sizeof wire, 0) == sizeof wire);
    }
    return 0;
}

static void passing_server(int listener) {
    for (unsigned turn = 0; turn < 8; turn++) {
        /* Bytes that lie in a lane are lost to a process without Highwire, as the README says. */
        int plain = turn & 1, unread = !plain && turn & 2, keep = turn & 4, channel;
        pid_t helper = start_helper(&channel, plain);
        struct wire wire = server_end(accept_one(listener), 0);
        answer(&wire, ROUNDS);
        answer_polling(&wire, ROUNDS);
        if (unread) {
            /* The question lies there, and somebody looked whether it does. */
            let_it_come(&wire);
            struct pollfd wait = {wire.fd, POLLIN, 0};
            int pending = 0;
            while (pending < 5000) {
                CHECK(poll(&wait, 1, 5000) == 1);
                CHECK(ioctl(wire.fd, FIONREAD, &pending) == 0);
            }
            unsigned char bytes[16];
            CHECK(recv(wire.fd, bytes, 7, 0) == 7);
            verify(&wire, bytes, 7);
            put(&wire, 7);
        } else {
            put(&wire, 7);
            /* It waits until the descriptor has gone. */
        }
        int fd = wire.fd;
        pass(channel, &wire);
        if (!keep) close(fd);
        CHECK(recv(channel, &wire, sizeof wire, 0) == sizeof wire);
        if (keep) {
            wire.fd = fd;
            answer(&wire, ROUNDS);
            answer_polling(&wire, ROUNDS);
            close(fd);
        }
        close(channel);
        expect_child(helper);
        say("turn %u: sent %llu got %llu", turn, (unsigned long long)wire.sent, (unsigned long long)wire.got);
    }
}

static void passing_client(int port) {
    for (unsigned turn = 0; turn < 8; turn++) {
        int unread = !(turn & 1) && turn & 2, keep = turn & 4;
        struct wire wire = client_end(connect_to(port), 0);
        ask(&wire, ROUNDS);
        ask_polling(&wire, ROUNDS);
        if (unread) put(&wire, 5007);
        take_polling(&wire, 7);
        if (!unread) put(&wire, 5000);
        take_polling(&wire, 1);
        ask(&wire, ROUNDS);
        ask_polling(&wire, ROUNDS);
        if (keep) {
            ask(&wire, ROUNDS);
            ask_polling(&wire, ROUNDS);
        }
        expect_end(&wire);
        close(wire.fd);
        say("turn %u: sent %llu got %llu", turn, (unsigned long long)wire.sent, (unsigned long long)wire.got);
    }
}

/* One connection's descriptor is copied over another's: that one ends, and two numbers are one connection. */
static void copying_server(int listener) {
    struct wire first = server_end(accept_one(listener), 0), second = server_end(accept_one(listener), 1);
    answer_polling(&first, ROUNDS);
    answer_polling(&second, ROUNDS);
    let_it_come(&second);
    CHECK(dup2(second.fd, first.fd) == first.fd);
    int numbers[5] = {first.fd, second.fd, dup(second.fd), fcntl(second.fd, F_DUPFD, 100), fcntl(first.fd, F_DUPFD_CLOEXEC, 200)};
    CHECK(numbers[3] >= 100 && numbers[4] >= 200);
    for (unsigned turn = 0; turn < 40; turn++) {
        second.fd = numbers[turn % 5];
        answer(&second, 10);
        second.fd = numbers[(turn + 2) % 5];
        answer_polling(&second, 10);
    }
    /* The numbers go one after the other; the connection stays as long as one is left. */
    for (unsigned last = 4; last > 0; last--) {
        CHECK(close(numbers[last]) == 0);
        char byte;
        CHECK(recv(numbers[last], &byte, 1, MSG_DONTWAIT) < 0 && errno == EBADF);
        second.fd = numbers[0];
        answer_polling(&second, 20);
    }
    /* Over itself, and over a file and back. */
    CHECK(dup2(numbers[0], numbers[0]) == numbers[0]);
    int kept = dup(numbers[0]), file = open("/dev/null", O_RDWR);
    CHECK(dup3(file, numbers[0], O_CLOEXEC) == numbers[0]);
    char byte;
    CHECK(read(numbers[0], &byte, 1) == 0 && write(numbers[0], "x", 1) == 1);
    CHECK(dup2(kept, numbers[0]) == numbers[0] && close(kept) == 0);
    answer(&second, ROUNDS);
    hold();
    say("server done");
}

static void copying_client(int port) {
    struct wire first = client_end(connect_to(port), 0), second = client_end(connect_to(port), 1);
    ask_polling(&first, ROUNDS);
    ask_polling(&second, ROUNDS);
    expect_end(&first);
    for (unsigned turn = 0; turn < 40; turn++) {
        ask(&second, 10);
        ask_polling(&second, 10);
    }
    for (unsigned last = 4; last > 0; last--) ask_polling(&second, 20);
    ask(&second, ROUNDS);
    expect_end(&second);
    say("client done");
}

/* Many at once: close_range, and closefrom. A number that is used again is another connection. */
static void ranges_server(int listener) {
    for (unsigned turn = 0; turn < 3; turn++) {
        struct wire wires[6];
        for (unsigned number = 0; number < 6; number++) {
            int fd = accept_one(listener);
            CHECK(dup2(fd, 100 + number) == (int)(100 + number) && close(fd) == 0);
            wires[number] = server_end(100 + number, number);
            answer_polling(&wires[number], ROUNDS / 4);
        }
        if (turn == 0) CHECK(close_range(100, 102, 0) == 0);
        if (turn == 1) CHECK(close_range(100, 105, CLOSE_RANGE_CLOEXEC) == 0 && close_range(100, 102, 0) == 0);
        if (turn == 2) {
            /* The last three are kept from it. */
            for (unsigned number = 3; number < 6; number++) {
                CHECK(dup2(100 + number, 60 + number) == (int)(60 + number));
                wires[number].fd = 60 + number;
            }
            closefrom(100);
        }
        for (unsigned number = 0; number < 6; number++) {
            say("turn %u, %u: %s", turn, number, fcntl(100 + number, F_GETFD) < 0 ? "closed" : "open");
        }
        for (unsigned number = 3; number < 6; number++) answer_polling(&wires[number], ROUNDS / 4);
        if (turn == 1) {
            pid_t child = fork_child();
            if (child == 0) {
                execl("/bin/sh", "sh", "-c", "test ! -e /proc/self/fd/103", (char *)NULL);
                _exit(127);
            }
            expect_child(child);
        }
        for (unsigned number = 3; number < 6; number++) {
            answer(&wires[number], ROUNDS / 4);
            close(wires[number].fd);
        }
        close_range(100, 105, 0);
    }
}

static void ranges_client(int port) {
    for (unsigned turn = 0; turn < 3; turn++) {
        struct wire wires[6];
        for (unsigned number = 0; number < 6; number++) {
            wires[number] = client_end(connect_to(port), number);
            ask_polling(&wires[number], ROUNDS / 4);
        }
        for (unsigned number = 0; number < 3; number++) expect_end(&wires[number]);
        for (unsigned number = 3; number < 6; number++) ask_polling(&wires[number], ROUNDS / 4);
        for (unsigned number = 3; number < 6; number++) {
            ask(&wires[number], ROUNDS / 4);
            expect_end(&wires[number]);
        }
        for (unsigned number = 0; number < 6; number++) close(wires[number].fd);
    }
    say("client done");
}

/* Programs are started while the connection is in use, and inherit it. */
static void start_program(unsigned way) {
    char *const quick[] = {"true", NULL}, *const slow[] = {"sleep", "0.02", NULL};
    pid_t child;
    FILE *output;
    char line[16] = "";
    switch (way % 7) {
    case 0: CHECK(system("true") == 0); return;
    case 1:
        child = vfork();
        if (child == 0) {
            execv("/bin/true", quick);
            _exit(127);
        }
        break;
    case 2: CHECK(posix_spawn(&child, "/bin/true", NULL, NULL, quick, environ) == 0); break;
    case 3: CHECK(posix_spawnp(&child, "sleep", NULL, NULL, slow, environ) == 0); break;
    case 4:
        output = popen("echo hello", "r");
        CHECK(output != NULL && fgets(line, sizeof line, output) != NULL && pclose(output) == 0);
        CHECK(strcmp(line, "hello\n") == 0);
        return;
    case 5:
        child = fork();
        if (child == 0) {
            execvp("sleep", slow);
            _exit(127);
        }
        break;
    default:
        child = vfork();
        if (child == 0) _exit(0);
    }
    CHECK(child > 0);
    /* The slow ones still live while the conversation goes on. */
    if (way % 7 != 3 && way % 7 != 5) expect_child(child);
}

static void spawning_server(int listener) {
    struct wire wire = server_end(accept_one(listener), 0);
    answer_polling(&wire, ROUNDS);
    for (unsigned turn = 0; turn < 28; turn++) {
        if (turn < 14) let_it_come(&wire);
        start_program(turn);
        answer_polling(&wire, 20);
        answer(&wire, 20);
    }
    while (wait(NULL) > 0) {}
    answer_polling(&wire, ROUNDS);
    hold();
    say("server done");
}

static void spawning_client(int port) {
    struct wire wire = client_end(connect_to(port), 0);
    ask_polling(&wire, ROUNDS);
    for (unsigned turn = 0; turn < 28; turn++) {
        ask(&wire, 20);
        /* With an answer already under way when this end starts one, too. */
        put(&wire, round_length(0));
        if (turn % 3 == 0) start_program(turn / 3);
        take(&wire, round_length(5));
        for (unsigned number = 1; number < 20; number++) {
            put(&wire, round_length(number));
            take_polling(&wire, round_length(number + 5));
        }
    }
    ask_polling(&wire, ROUNDS);
    expect_end(&wire);
    say("client done");
}

/* A program that replaces itself by exec goes on with the connection that it had, bytes unread and all. */
static void replaced_server(int listener) {
    struct wire wire = server_end(accept_one(listener), 0);
    answer_polling(&wire, ROUNDS);
    let_it_come(&wire);
    struct pollfd wait = {wire.fd, POLLIN, 0};
    CHECK(poll(&wait, 1, 5000) == 1);
    char text[3][32];
    snprintf(text[0], 32, "%d", wire.fd);
    snprintf(text[1], 32, "%llu", (unsigned long long)wire.sent);
    snprintf(text[2], 32, "%llu", (unsigned long long)wire.got);
    fflush(stdout);
    execl(arguments[0], arguments[0], "replacement", text[0], text[1], text[2], (char *)NULL);
    die("exec");
}

static int replacement(void) {
    struct wire wire = server_end(atoi(arguments[2]), 0);
    wire.sent = strtoull(arguments[3], NULL, 10);
    wire.got = strtoull(arguments[4], NULL, 10);
    take(&wire, 3000);
    answer(&wire, ROUNDS);
    answer_polling(&wire, ROUNDS);
    put(&wire, 100000);
    hold();
    say("replacement done");
    return 0;
}

static void replaced_client(int port) {
    struct wire wire = client_end(connect_to(port), 0);
    ask_polling(&wire, ROUNDS);
    put(&wire, 1000);
    put(&wire, 2000);
    ask(&wire, ROUNDS);
    ask_polling(&wire, ROUNDS);
    take(&wire, 100000);
    expect_end(&wire);
    say("client done");
}

/* Children that have the parent's memory but descriptors of their own, and close these: the parent's connection stays. */
static int borrowed_fd;

static int close_some_way(void *way) {
    switch ((uintptr_t)way % 3) {
    case 0: close(borrowed_fd); break;
    case 1: close_range(borrowed_fd, borrowed_fd, 0); break;
    default: dup2(0, borrowed_fd); break;
    }
    _exit(0);
}

/* Closes late, when the other thread's child has long come and gone. */
static void *vfork_long(void *way) {
    pid_t child = vfork();
    if (child == 0) {
        struct timespec pause = {0, 60000000};
        nanosleep(&pause, NULL);
        close_some_way(way);
    }
    expect_child(child);
    return NULL;
}

static void *vfork_short(void *unused) {
    sleep_us(20000);
    pid_t child = vfork();
    if (child == 0) _exit(0);
    expect_child(child);
    close(socket(AF_INET, SOCK_STREAM, 0));
    return unused;
}

static void borrowing_server(int listener) {
    struct wire wire = server_end(accept_one(listener), 0);
    static char stack[65536] __attribute__((aligned(16)));
    borrowed_fd = wire.fd;
    answer_polling(&wire, ROUNDS);
    for (uintptr_t turn = 0; turn < 9; turn++) {
        void *way = (void *)(turn / 3);
        let_it_come(&wire);
        if (turn % 3 == 0) {
            pid_t child = vfork();
            if (child == 0) close_some_way(way);
            expect_child(child);
        } else if (turn % 3 == 1) {
            pthread_t threads[2];
            CHECK(pthread_create(&threads[0], NULL, vfork_long, way) == 0);
            CHECK(pthread_create(&threads[1], NULL, vfork_short, NULL) == 0);
            CHECK(pthread_join(threads[0], NULL) == 0 && pthread_join(threads[1], NULL) == 0);
        } else {
            pid_t child = clone(close_some_way, stack + sizeof stack, CLONE_VM | CLONE_VFORK | SIGCHLD, way);
            CHECK(child > 0);
            expect_child(child);
        }
        alarm(3);
        answer_polling(&wire, 20);
        alarm(0);
    }
    hold();
    say("server done");
}

static void borrowing_client(int port) {
    struct wire wire = client_end(connect_to(port), 0);
    ask_polling(&wire, ROUNDS);
    for (unsigned turn = 0; turn < 9; turn++) ask_polling(&wire, 20);
    expect_end(&wire);
    say("client done");
}

/* A listening socket that somebody else made, as a program gets it that is started for the first connection. */
static void activated_server(int listener) {
    pid_t child = fork_child();
    if (child == 0) {
        CHECK(dup2(listener, 3) == 3);
        execl(arguments[0], arguments[0], "activated-program", "3", (char *)NULL);
        die("exec");
    }
    expect_child(child);
}

static int activated_program(void) {
    struct wire wire = server_end(accept_one(atoi(arguments[2])), 0);
    answer_polling(&wire, ROUNDS);
    hold();
    say("server done");
    return 0;
}

static void activated_client(int port) {
    struct wire wire = client_end(connect_to(port), 0);
    ask_polling(&wire, ROUNDS);
    expect_end(&wire);
    say("client done");
}

static const struct scenario scenarios[] = {
    {"passing", passing_server, passing_client}, {"copying", copying_server, copying_client},
    {"ranges", ranges_server, ranges_client},    {"spawning", spawning_server, spawning_client},
    {"replaced", replaced_server, replaced_client},
    {"borrowing", borrowing_server, borrowing_client},
    {"activated", activated_server, activated_client},
};

int main(int argc, char **argv) {
    argument_count = argc;
    arguments = argv;
    if (argc > 2 && strcmp(argv[1], "helper") == 0) return help(atoi(argv[2]));
    if (argc > 4 && strcmp(argv[1], "replacement") == 0) return replacement();
    if (argc > 2 && strcmp(argv[1], "activated-program") == 0) return activated_program();
    return play(scenarios, sizeof scenarios / sizeof *scenarios, argc, argv);
}
