/* What happens to the descriptor of a connection: it is passed to another process, copied over another one, closed with many
 * others, and inherited by programs that are started in the middle of the traffic. */
#include "lane.h"
#include <spawn.h>
#include <stdatomic.h>
#include <sys/sendfile.h>

#define ROUNDS 200
extern char **environ;

/* A descriptor, with how far its connection is. */
static void pass(int channel, const struct wire *wire) {
    CHECK(send_descriptor(channel, wire->fd, wire, sizeof *wire) == sizeof *wire);
}

static int adopt(int channel, struct wire *wire) {
    int fd = receive_descriptor(channel, wire, sizeof *wire);
    wire->fd = fd;
    return fd >= 0;
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
        }
        int fd = wire.fd;
        struct wire before = wire;
        wire.sent += unread ? 0 : 7;
        pass(channel, &wire);
        /* The client sends nothing before it has these, so what it sends comes when the descriptor has gone. */
        if (!unread) put(&before, 7);
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

/* A child in its parent's memory puts other things in place of its parent's descriptors, and uses them in every way: nothing
 * of it reaches the parent's connection, and nothing of the connection reaches the child. */
static int file_of_child(int fd, const char *text) {
    int file = memfd_create("child", 0);
    if (file < 0 || write(file, text, strlen(text)) < 0 || lseek(file, 0, SEEK_SET) != 0) return -1;
    return dup2(file, fd);
}

static int use_in_child(int fd, unsigned way) {
    char bytes[64];
    struct iovec part = {"childchild", 10}, into = {bytes, sizeof bytes};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    struct pollfd wait = {fd, POLLIN | POLLOUT, 0};
    struct epoll_event event = {.events = EPOLLIN};
    int pair[2], there = 0, on = 1;
    fd_set set;
    switch (way) {
    case 0: return write(fd, "childchild", 10) == 10;
    case 1: return writev(fd, &part, 1) == 10;
    case 2: return read(fd, bytes, sizeof bytes) == 6 && memcmp(bytes, "myself", 6) == 0;
    case 3: return readv(fd, &into, 1) == 6 && memcmp(bytes, "myself", 6) == 0;
    case 4: return send(fd, "child", 5, 0) < 0 && errno == ENOTSOCK;
    case 5: return sendmsg(fd, &message, 0) < 0 && errno == ENOTSOCK;
    case 6: return recv(fd, bytes, sizeof bytes, MSG_DONTWAIT) < 0 && errno == ENOTSOCK;
    case 7: return poll(&wait, 1, 1000) == 1 && wait.revents == (POLLIN | POLLOUT);
    case 8:
        FD_ZERO(&set);
        FD_SET(fd, &set);
        return select(fd + 1, &set, NULL, NULL, &(struct timeval){1, 0}) == 1;
    case 9: return ioctl(fd, FIONREAD, &there) == 0 && there == 6;
    case 10: return setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) < 0 && errno == ENOTSOCK;
    case 11: return shutdown(fd, SHUT_RDWR) < 0 && errno == ENOTSOCK;
    case 12: return sendfile(fd, fd, &(off_t){0}, 6) == 6;
    case 13: return pwritev2(fd, &part, 1, -1, 0) == 10;
    case 14: return fcntl(fd, F_SETFL, O_NONBLOCK) == 0;
    case 15: return close(fd) == 0;
    case 16:
        /* A set of the child's own, at the number of the connection. */
        return dup2(epoll_create1(0), fd) == fd && epoll_ctl(fd, EPOLL_CTL_ADD, 0, &event) <= 0 &&
               epoll_wait(fd, &event, 1, 0) <= 1;
    case 17:
        /* Another socket, with bytes of its own. */
        return socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0 && dup2(pair[0], fd) == fd && write(pair[1], "other", 5) == 5 &&
               recv(fd, bytes, sizeof bytes, 0) == 5 && send(fd, "child", 5, 0) == 5;
    case 18:
        /* A descriptor that comes with a message gets the lowest number, which is the connection's. */
        return socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair) == 0 && close(fd) == 0 &&
               send_descriptor(pair[0], pair[1], "x", 1) == 1 && receive_descriptor(pair[1], bytes, 1) == fd &&
               write(fd, "x", 1) == 1;
    case 19: return dprintf(fd, "child%d", 1) == 6;
    /* What confines the child does not confine its parent. */
    default: return unshare(CLONE_FS) == 0 && setuid(getuid()) == 0;
    }
}
#define WAYS_IN_CHILD 21

/* The status of the child. */
__attribute__((noinline)) static int use_in_vfork(int fd, unsigned way) {
    int status;
    pid_t child = vfork();
    if (child == 0) {
        int keeps = way == 15 || way == 17 || way == 18 || way == 20;
        _exit((keeps || file_of_child(fd, "myself") == fd) && use_in_child(fd, way) ? 0 : 1);
    }
    CHECK(waitpid(child, &status, 0) == child);
    return status;
}

/* Before it ends it uses the connection itself. */
__attribute__((noinline)) static void put_in_vfork(struct wire *wire) {
    pid_t child = vfork();
    if (child == 0) _exit(write(wire->fd, pattern(wire->out, wire->sent), 100) == 100 ? 0 : 1);
    expect_child(child);
    wire->sent += 100;
}

static void foreign_server(int listener) {
    /* The lowest number, which a child that closes it gets next. */
    int fd = accept_one(listener), low = 0;
    CHECK(dup2(fd, low) == low && close(fd) == 0 && fcntl(low, F_SETFD, FD_CLOEXEC) == 0);
    struct wire wire = server_end(low, 0);
    answer_polling(&wire, ROUNDS);
    for (unsigned way = 0; way < WAYS_IN_CHILD; way++) {
        let_it_come(&wire);
        int status = use_in_vfork(low, way);
        say("way %u: %#x", way, status);
        answer_polling(&wire, 20);
        answer(&wire, 20);
    }
    /* What a child says comes in its place. */
    for (unsigned turn = 0; turn < 3; turn++) {
        put_in_vfork(&wire);
        answer_polling(&wire, 20);
    }
    answer_polling(&wire, ROUNDS);
    say("server done");
}

static void foreign_client(int port) {
    struct wire wire = client_end(connect_to(port), 0);
    ask_polling(&wire, ROUNDS);
    for (unsigned way = 0; way < WAYS_IN_CHILD; way++) {
        ask_polling(&wire, 20);
        ask(&wire, 20);
    }
    for (unsigned turn = 0; turn < 3; turn++) {
        take_polling(&wire, 100);
        ask_polling(&wire, 20);
    }
    ask_polling(&wire, ROUNDS);
    expect_end(&wire);
    say("client done");
}

/* Two threads close the two descriptors of each of many sockets, both at the same moment: all of them are gone then. */
#define CLOSED_AT_ONCE 4000
static int at_once[2][CLOSED_AT_ONCE];
static atomic_uint steps[2];

static void *close_in_step(void *argument) {
    unsigned number = (unsigned)(uintptr_t)argument;
    for (unsigned turn = 0; turn < CLOSED_AT_ONCE; turn++) {
        atomic_store(&steps[number], turn + 1);
        /* Spinning: a thread that is woken comes too late. */
        for (unsigned looks = 1; atomic_load(&steps[1 - number]) <= turn; looks++)
            if (looks % 4096 == 0) sched_yield();
        CHECK(close(at_once[number][turn]) == 0);
    }
    return NULL;
}

static void closed_at_once_server(int listener) {
    struct rlimit limit;
    CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
    limit.rlim_cur = 2 * CLOSED_AT_ONCE + 100;
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    for (unsigned turn = 0; turn < CLOSED_AT_ONCE; turn++) {
        at_once[0][turn] = socket(AF_INET, SOCK_STREAM, 0);
        at_once[1][turn] = dup(at_once[0][turn]);
        CHECK(at_once[0][turn] >= 0 && at_once[1][turn] >= 0);
    }
    pthread_t other;
    CHECK(pthread_create(&other, NULL, close_in_step, (void *)1) == 0);
    close_in_step((void *)0);
    CHECK(pthread_join(other, NULL) == 0);
    close(listener);
    hold();
    say("server done");
}

static void closed_at_once_client(int port) { (void)port; }

/* Two threads close duplicates of an epoll set at once, again and again, and the next set watches the connection. */
#define SETS_CLOSED 2000
static int sets[2];
static unsigned sets_made, sets_closed;

static void *close_sets(void *unused) {
    (void)unused;
    for (unsigned turn = 1; turn <= SETS_CLOSED; turn++) {
        while (__atomic_load_n(&sets_made, __ATOMIC_ACQUIRE) < turn) {}
        /* Now at once, now a little later. */
        for (volatile unsigned wait = 0; wait < turn % 64 * 200; wait++) {}
        CHECK(close(sets[1]) == 0);
        __atomic_store_n(&sets_closed, turn, __ATOMIC_RELEASE);
    }
    return NULL;
}

static void watch(int set, int fd) {
    struct epoll_event event = {.events = EPOLLIN};
    CHECK(epoll_ctl(set, EPOLL_CTL_ADD, fd, &event) == 0);
}

static void sets_closed_server(int listener) {
    struct wire wire = server_end(accept_one(listener), 0);
    answer_polling(&wire, ROUNDS);
    /* The number of the second is high: a search for other descriptors of the set comes to it late. */
    struct rlimit limit;
    CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
    limit.rlim_cur = limit.rlim_max;
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    int far = limit.rlim_max > 30000 ? 20000 : 100;
    pthread_t other;
    CHECK(pthread_create(&other, NULL, close_sets, NULL) == 0);
    for (unsigned turn = 1; turn <= SETS_CLOSED; turn++) {
        sets[0] = epoll_create1(0);
        watch(sets[0], wire.fd);
        CHECK((sets[1] = fcntl(sets[0], F_DUPFD, far)) >= far);
        __atomic_store_n(&sets_made, turn, __ATOMIC_RELEASE);
        CHECK(close(sets[0]) == 0);
        int next = epoll_create1(0);
        watch(next, wire.fd);
        while (__atomic_load_n(&sets_closed, __ATOMIC_ACQUIRE) < turn) {}
        put(&wire, 1);
        struct epoll_event event;
        CHECK(epoll_wait(next, &event, 1, 5000) == 1);
        take(&wire, 1);
        CHECK(close(next) == 0);
    }
    CHECK(pthread_join(other, NULL) == 0);
    say("server done");
}

static void sets_closed_client(int port) {
    struct wire wire = client_end(connect_to(port), 0);
    ask_polling(&wire, ROUNDS);
    for (unsigned turn = 1; turn <= SETS_CLOSED; turn++) {
        take(&wire, 1);
        put(&wire, 1);
    }
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
    {"foreign", foreign_server, foreign_client},
    {"closed_at_once", closed_at_once_server, closed_at_once_client},
    {"sets_closed", sets_closed_server, sets_closed_client},
};

int main(int argc, char **argv) {
    argument_count = argc;
    arguments = argv;
    if (argc > 2 && strcmp(argv[1], "helper") == 0) return help(atoi(argv[2]));
    if (argc > 4 && strcmp(argv[1], "replacement") == 0) return replacement();
    if (argc > 2 && strcmp(argv[1], "activated-program") == 0) return activated_program();
    return play(scenarios, sizeof scenarios / sizeof *scenarios, argc, argv);
}
