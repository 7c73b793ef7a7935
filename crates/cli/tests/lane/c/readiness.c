/* Waiting in every way that Linux has: edge-triggered, one-shot, exclusive, nested and shared epoll sets, with reads that
 * leave something; poll and select; connections that are still being made; and an end in one direction only. */
#include "lane.h"
#include <stdatomic.h>
#include <sys/select.h>

#define ROUNDS 200

static int epoll_of(int fd, uint32_t events) {
    int epoll = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event event = {.events = events, .data.fd = fd};
    CHECK(epoll >= 0 && epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0);
    return epoll;
}

static void rearm(int epoll, int fd, uint32_t events) {
    struct epoll_event event = {.events = events, .data.fd = fd};
    CHECK(epoll_ctl(epoll, EPOLL_CTL_MOD, fd, &event) == 0);
}

/* Which events there are within so many milliseconds; 0 for none. */
static uint32_t events_within(int epoll, int timeout_ms) {
    struct epoll_event event;
    int count;
    while ((count = epoll_wait(epoll, &event, 1, timeout_ms)) < 0) CHECK(errno == EINTR);
    return count == 0 ? 0 : event.events;
}

/* Answers rounds whose questions are waited for in an epoll set, with a buffer that is mostly too small. */
static void answer_by_events(struct wire *wire, int epoll, unsigned rounds, uint32_t rearm_with) {
    unsigned number = 0;
    size_t missing = round_length(0);
    while (number < rounds) {
        if (!(events_within(epoll, 10000) & EPOLLIN)) die("no event in round %u, %zu bytes missing", number, missing);
        for (;;) {
            unsigned char bytes[61];
            ssize_t got = recv(wire->fd, bytes, missing < sizeof bytes ? missing : sizeof bytes, 0);
            if (got < 0 && errno == EAGAIN) break;
            if (got <= 0) die("recv returned %zd in round %u", got, number);
            verify(wire, bytes, got);
            if ((missing -= got) == 0) {
                put(wire, round_length(number + 5));
                if (++number == rounds) break;
                missing = round_length(number);
            }
        }
        if (rearm_with) rearm(epoll, wire->fd, rearm_with);
    }
}

static void take_exactly(struct wire *wire, size_t length) {
    unsigned char bytes[4096];
    CHECK(length <= sizeof bytes);
    ssize_t got = recv(wire->fd, bytes, length, 0);
    if (got != (ssize_t)length) die("recv of %zu returned %zd", length, got);
    verify(wire, bytes, got);
}

/* A question of the server's own, as a sign to go on: one byte. */
static void nudge(struct wire *wire) {
    put(wire, 1);
}

static void edge_server(int listener) {
    struct wire wire = server_end(accept_one(listener), 0);
    set_nonblocking(wire.fd, 1);
    answer_polling(&wire, ROUNDS);
    /* What lies there already when it is added is an edge too. */
    let_it_come(&wire);
    int epoll = epoll_of(wire.fd, EPOLLIN | EPOLLET);
    answer_by_events(&wire, epoll, ROUNDS, 0);
    for (unsigned turn = 0; turn < 5; turn++) {
        uint32_t first = events_within(epoll, 5000);
        take_exactly(&wire, 40);
        /* 60 bytes are left, but nothing new has come. */
        uint32_t rest = events_within(epoll, 30);
        nudge(&wire);
        uint32_t news = events_within(epoll, 5000);
        take_exactly(&wire, 70);
        uint32_t nothing = events_within(epoll, 20);
        say("edge: %x %x %x %x", first, rest, news, nothing);
        /* Without reading anything: what comes is an edge each time. */
        nudge(&wire);
        uint32_t one = events_within(epoll, 5000);
        nudge(&wire);
        uint32_t two = events_within(epoll, 5000);
        take_exactly(&wire, 40);
        say("edges: %x %x", one, two);
        nudge(&wire);
        answer_by_events(&wire, epoll, 40, 0);
    }
    hold();
}

static void edge_client(int port) {
    struct wire wire = client_end(connect_to(port), 0);
    ask_polling(&wire, ROUNDS);
    ask_polling(&wire, ROUNDS);
    for (unsigned turn = 0; turn < 5; turn++) {
        put(&wire, 100);
        take_polling(&wire, 1);
        put(&wire, 10);
        take_polling(&wire, 1);
        for (unsigned edge = 0; edge < 2; edge++) {
            put(&wire, 20);
            take_polling(&wire, 1);
        }
        ask_polling(&wire, 40);
    }
    expect_end(&wire);
    say("client done");
}

/* A set with two descriptors, as runtimes have it: one registers, the other waits; then the first one is closed. */
static void duplicated_server(int listener) {
    struct wire wire = server_end(accept_one(listener), 0);
    set_nonblocking(wire.fd, 1);
    int epoll = epoll_create1(EPOLL_CLOEXEC), filler[2];
    CHECK(epoll >= 0 && pipe(filler) == 0);
    struct epoll_event event = {.events = EPOLLIN | EPOLLET, .data.fd = filler[0]};
    CHECK(epoll_ctl(epoll, EPOLL_CTL_ADD, filler[0], &event) == 0);
    int registry = fcntl(epoll, F_DUPFD_CLOEXEC, 3);
    event.data.fd = wire.fd;
    CHECK(registry >= 0 && epoll_ctl(registry, EPOLL_CTL_ADD, wire.fd, &event) == 0);
    answer_by_events(&wire, epoll, ROUNDS * 5, 0);
    close(epoll);
    answer_by_events(&wire, registry, ROUNDS, 0);
    int third = dup(registry);
    rearm(third, wire.fd, EPOLLIN);
    answer_by_events(&wire, registry, ROUNDS, 0);
    CHECK(epoll_ctl(third, EPOLL_CTL_DEL, wire.fd, NULL) == 0);
    put(&wire, 1);
    say("duplicated: %x", events_within(registry, 20));
    close(third);
    close(registry);
    epoll = epoll_of(wire.fd, EPOLLIN | EPOLLET);
    answer_by_events(&wire, epoll, ROUNDS, 0);
    hold();
}

static void duplicated_client(int port) {
    struct wire wire = client_end(connect_to(port), 0);
    ask_polling(&wire, ROUNDS * 5);
    ask_polling(&wire, ROUNDS);
    ask_polling(&wire, ROUNDS);
    take_polling(&wire, 1);
    ask_polling(&wire, ROUNDS);
    expect_end(&wire);
    say("client done");
}

static void oneshot_server(int listener) {
    struct wire wire = server_end(accept_one(listener), 0);
    set_nonblocking(wire.fd, 1);
    int epoll = epoll_of(wire.fd, EPOLLIN | EPOLLONESHOT);
    answer_by_events(&wire, epoll, ROUNDS, EPOLLIN | EPOLLONESHOT);
    for (unsigned turn = 0; turn < 5; turn++) {
        uint32_t first = events_within(epoll, 5000);
        take_exactly(&wire, 40);
        nudge(&wire);
        uint32_t disarmed = events_within(epoll, 30);
        rearm(epoll, wire.fd, EPOLLIN | EPOLLONESHOT);
        uint32_t again = events_within(epoll, 5000);
        size_t left = 60 + 10;
        while (left > 0) {
            unsigned char bytes[64];
            ssize_t got = recv(wire.fd, bytes, left < sizeof bytes ? left : sizeof bytes, 0);
            if (got < 0 && errno == EAGAIN) continue;
            CHECK(got > 0);
            verify(&wire, bytes, got);
            left -= got;
        }
        rearm(epoll, wire.fd, EPOLLIN | EPOLLONESHOT);
        uint32_t nothing = events_within(epoll, 20);
        say("one shot: %x %x %x %x", first, disarmed, again, nothing);
        nudge(&wire);
        answer_by_events(&wire, epoll, 40, EPOLLIN | EPOLLONESHOT);
    }
    hold();
}

static void oneshot_client(int port) {
    struct wire wire = client_end(connect_to(port), 0);
    ask_polling(&wire, ROUNDS);
    for (unsigned turn = 0; turn < 5; turn++) {
        put(&wire, 100);
        take_polling(&wire, 1);
        put(&wire, 10);
        take_polling(&wire, 1);
        ask_polling(&wire, 40);
    }
    expect_end(&wire);
    say("client done");
}

/* Children that wait for connections with EPOLLEXCLUSIVE, each in a set of its own, and for the connection's bytes there
 * too. */
static void exclusive_server(int listener) {
    int done[2];
    pid_t children[3];
    CHECK(pipe(done) == 0);
    set_nonblocking(listener, 1);
    for (unsigned number = 0; number < 3; number++) {
        if ((children[number] = fork_child()) != 0) continue;
        close(done[1]);
        int epoll = epoll_of(listener, EPOLLIN | EPOLLEXCLUSIVE);
        struct epoll_event event = {.events = EPOLLIN, .data.fd = done[0]};
        CHECK(epoll_ctl(epoll, EPOLL_CTL_ADD, done[0], &event) == 0);
        for (;;) {
            CHECK(epoll_wait(epoll, &event, 1, -1) == 1);
            if (event.data.fd == done[0]) _exit(0);
            if (event.data.fd == listener) {
                int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK);
                if (fd < 0) continue;
                int one = 1;
                CHECK(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one) == 0);
                struct epoll_event exclusive = {.events = EPOLLIN | EPOLLEXCLUSIVE, .data.fd = fd};
                CHECK(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &exclusive) == 0);
                continue;
            }
            unsigned char bytes[100];
            ssize_t got = recv(event.data.fd, bytes, sizeof bytes, 0);
            if (got == 0) close(event.data.fd);
            for (ssize_t sent = 0, part; sent < got; sent += part)
                if ((part = send(event.data.fd, bytes + sent, got - sent, MSG_NOSIGNAL)) < 0) part = 0;
        }
    }
    until_told();
    close(done[1]);
    for (unsigned number = 0; number < 3; number++) expect_child(children[number]);
    say("server done");
}

static void exclusive_client(int port) {
    struct wire wires[12];
    for (unsigned number = 0; number < 12; number++) wires[number] = echo_client(connect_to(port), number);
    for (unsigned turn = 0; turn < 4; turn++)
        for (unsigned number = 0; number < 12; number++) ask_echo(&wires[number], 50);
    for (unsigned number = 0; number < 12; number++) {
        put(&wires[number], 2000);
        take(&wires[number], 2000);
    }
    say("12 conversations");
}

/* An epoll set in an epoll set in a poll. */
static void nested_server(int listener) {
    struct wire wire = server_end(accept_one(listener), 0);
    set_nonblocking(wire.fd, 1);
    int inner = epoll_of(wire.fd, EPOLLIN);
    int outer = epoll_of(inner, EPOLLIN);
    answer_by_events(&wire, inner, ROUNDS, 0);
    unsigned number = 0;
    size_t missing = round_length(0);
    while (number < 2 * ROUNDS) {
        if (number % 2 == 0) {
            struct pollfd wait = {outer, POLLIN, 0};
            if (poll(&wait, 1, 10000) != 1) die("poll of the outer set is silent in round %u", number);
        } else if (!(events_within(outer, 10000) & EPOLLIN)) {
            die("the outer set is silent in round %u", number);
        }
        CHECK(events_within(inner, 0) == EPOLLIN);
        unsigned char bytes[61];
        ssize_t got = recv(wire.fd, bytes, missing < sizeof bytes ? missing : sizeof bytes, 0);
        CHECK(got > 0);
        verify(&wire, bytes, got);
        if ((missing -= got) == 0) {
            put(&wire, round_length(number % ROUNDS + 5));
            missing = round_length(++number % ROUNDS);
        }
    }
    CHECK(events_within(outer, 0) == 0);
    hold();
    say("server done");
}

static void nested_client(int port) {
    struct wire wire = client_end(connect_to(port), 0);
    ask_polling(&wire, ROUNDS);
    ask_polling(&wire, ROUNDS);
    ask(&wire, ROUNDS);
    expect_end(&wire);
    say("client done");
}

/* One epoll set, made before the fork, in which parent and child wait at once: whoever is woken answers. */
static void serve_shared_set(int epoll, int fd) {
    for (;;) {
        struct epoll_event event;
        int count = epoll_wait(epoll, &event, 1, 10000);
        CHECK(count == 1);
        unsigned char bytes[32];
        ssize_t got = recv(fd, bytes, sizeof bytes, MSG_WAITALL);
        if (got == 0) {
            /* The other one has to hear of the end as well. */
            rearm(epoll, fd, EPOLLIN | EPOLLONESHOT);
            return;
        }
        CHECK(got == sizeof bytes);
        /* Armed before the answer goes: the next question may come with it. */
        rearm(epoll, fd, EPOLLIN | EPOLLONESHOT);
        CHECK(send(fd, bytes, sizeof bytes, MSG_NOSIGNAL) == sizeof bytes);
    }
}

static void shared_server(int listener) {
    struct wire wire = server_end(accept_one(listener), 0);
    set_nonblocking(wire.fd, 1);
    int epoll = epoll_of(wire.fd, EPOLLIN);
    answer_by_events(&wire, epoll, ROUNDS, 0);
    set_nonblocking(wire.fd, 0);
    rearm(epoll, wire.fd, EPOLLIN | EPOLLONESHOT);
    pid_t child = fork_child();
    serve_shared_set(epoll, wire.fd);
    if (child == 0) _exit(0);
    expect_child(child);
    say("server done");
}

static void shared_client(int port) {
    struct wire wire = client_end(connect_to(port), 0);
    ask_polling(&wire, ROUNDS);
    struct wire echo = echo_client(wire.fd, 3);
    for (unsigned turn = 0; turn < 1000; turn++) {
        put(&echo, 32);
        if (turn % 2) take(&echo, 32);
        else take_polling(&echo, 32);
        if (turn % 100 == 0) sleep_us(1000);
    }
    say("client done");
}

/* Each way to wait in turn, on one connection. */
static void waits_server(int listener) {
    struct wire wire = server_end(accept_one(listener), 0);
    int epoll = epoll_of(wire.fd, EPOLLIN | EPOLLRDHUP);
    for (unsigned way = 0; way < 8; way++) {
        for (unsigned number = 0; number < ROUNDS; number++) {
            struct pollfd wait = {wire.fd, POLLIN, 0};
            struct timespec patience = {10, 0};
            struct timeval older_patience = {10, 0};
            struct epoll_event event;
            fd_set set;
            sigset_t none;
            sigemptyset(&none);
            FD_ZERO(&set);
            FD_SET(wire.fd, &set);
            int count = 0;
            if (number % 60 == 0) let_it_come(&wire);
            switch (way) {
            case 0: count = poll(&wait, 1, 10000); break;
            case 1: count = ppoll(&wait, 1, &patience, &none); break;
            case 2: count = select(wire.fd + 1, &set, NULL, NULL, &older_patience); break;
            case 3: count = pselect(wire.fd + 1, &set, NULL, NULL, &patience, &none); break;
            case 4: count = epoll_wait(epoll, &event, 1, 10000); break;
            case 5: count = epoll_pwait(epoll, &event, 1, 10000, &none); break;
            case 6: count = epoll_pwait2(epoll, &event, 1, &patience, &none); break;
            default: count = 1;
            }
            if (count != 1) die("way %u returned %d in round %u", way, count, number);
            take(&wire, round_length(number));
            put(&wire, round_length(number + 5));
        }
        /* Nothing is there: no way may say otherwise. */
        struct pollfd wait = {wire.fd, POLLIN, 0};
        CHECK(poll(&wait, 1, 0) == 0);
        CHECK(events_within(epoll, 0) == 0);
        int pending = -1;
        CHECK(ioctl(wire.fd, FIONREAD, &pending) == 0 && pending == 0);
        nudge(&wire);
    }
    hold();
    say("server done");
}

static void waits_client(int port) {
    struct wire wire = client_end(connect_to(port), 0);
    for (unsigned way = 0; way < 8; way++) {
        ask_polling(&wire, ROUNDS);
        take(&wire, 1);
    }
    expect_end(&wire);
    say("client done");
}

/* Connections that are made without waiting: to nobody, and to somebody. */
static void connecting_client(int port) {
    int nobody = listen_on(0, 0), closed_port = port_of(nobody);
    close(nobody);
    int ports[2] = {closed_port, port};
    for (unsigned turn = 0; turn < 6; turn++) {
        int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), error = -1, later = -1;
        socklen_t length = sizeof error;
        struct sockaddr_in address = {
            .sin_family = AF_INET, .sin_port = htons(ports[turn % 2]), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
        int epoll = epoll_of(fd, EPOLLOUT | EPOLLIN | EPOLLET);
        int result = connect(fd, (struct sockaddr *)&address, sizeof address), reason = errno;
        struct pollfd wait = {fd, POLLOUT, 0};
        CHECK(poll(&wait, 1, 5000) == 1);
        uint32_t events = 0;
        for (uint32_t more; (more = events_within(epoll, 20)) != 0;) events |= more;
        CHECK(getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) == 0);
        CHECK(getsockopt(fd, SOL_SOCKET, SO_ERROR, &later, &length) == 0);
        say("%s: connect %d %d, poll %x, epoll %x, SO_ERROR %d then %d", turn % 2 ? "open" : "closed", result,
            result < 0 ? reason : 0, wait.revents, events, error, later);
        if (turn % 2) {
            set_nonblocking(fd, 0);
            struct wire wire = client_end(fd, 0);
            ask(&wire, ROUNDS);
        }
        close(fd);
        close(epoll);
    }
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons(closed_port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    CHECK(connect(fd, (struct sockaddr *)&address, sizeof address) < 0);
    say("blocking: %d", errno);
    say("unconnected: recv %zd", recv(fd, &address, 1, 0));
}

static void connecting_server(int listener) {
    for (unsigned turn = 0; turn < 3; turn++) {
        struct wire wire = server_end(accept_one(listener), 0);
        answer(&wire, ROUNDS);
        expect_end(&wire);
        close(wire.fd);
    }
    say("server done");
}

/* An end in one direction, while the other one goes on for long. */
static void half_close_server(int listener) {
    struct wire wire = server_end(accept_one(listener), 0);
    int epoll = epoll_of(wire.fd, EPOLLIN | EPOLLRDHUP);
    answer_polling(&wire, ROUNDS);
    take(&wire, 300000);
    expect_end(&wire);
    uint32_t events = events_within(epoll, 5000);
    say("after the end: %x", events);
    char byte;
    CHECK(recv(wire.fd, &byte, 1, 0) == 0 && recv(wire.fd, &byte, 1, MSG_DONTWAIT) == 0);
    for (unsigned number = 0; number < 500; number++) put(&wire, round_length(number));
    put(&wire, 2000000);
    CHECK(shutdown(wire.fd, SHUT_WR) == 0);
    CHECK(send(wire.fd, "x", 1, MSG_NOSIGNAL) < 0 && errno == EPIPE);
    say("after both: %x", events_within(epoll, 100) & ~EPOLLHUP);
    hold();
}

static void half_close_client(int port) {
    struct wire wire = client_end(connect_to(port), 0);
    ask_polling(&wire, ROUNDS);
    put(&wire, 300000);
    CHECK(shutdown(wire.fd, SHUT_WR) == 0);
    CHECK(send(wire.fd, "x", 1, MSG_NOSIGNAL) < 0 && errno == EPIPE);
    for (unsigned number = 0; number < 500; number++) take_polling(&wire, round_length(number));
    take(&wire, 1000000);
    take_polling(&wire, 1000000);
    expect_end(&wire);
    expect_end(&wire);
    struct pollfd wait = {wire.fd, POLLIN | POLLRDHUP, 0};
    CHECK(poll(&wait, 1, 0) == 1);
    say("client done: %x", wait.revents);
}

/* A thread sleeps on a set, alone or with a pipe in it, when another one adds a connection that it has read from: the
 * sleeper is told of what comes next. */
static void *sleep_on_set(void *epoll) {
    return (void *)(uintptr_t)events_within(*(int *)epoll, 2000);
}

static void added_server(int listener) {
    for (unsigned turn = 0; turn < 8; turn++) {
        struct wire wire = server_end(accept_one(listener), 0);
        int ends[2], epoll = epoll_create1(EPOLL_CLOEXEC);
        struct epoll_event event = {.events = EPOLLIN};
        CHECK(pipe(ends) == 0);
        if (turn & 1) CHECK(epoll_ctl(epoll, EPOLL_CTL_ADD, ends[0], &event) == 0);
        pthread_t sleeper;
        CHECK(pthread_create(&sleeper, NULL, sleep_on_set, &epoll) == 0);
        if (turn & 4) answer(&wire, ROUNDS / 4);
        else answer_polling(&wire, ROUNDS / 4);
        sleep_us(20000);
        event.events = EPOLLIN | (turn & 2 ? EPOLLET : 0);
        CHECK(epoll_ctl(epoll, EPOLL_CTL_ADD, wire.fd, &event) == 0);
        sleep_us(20000);
        nudge(&wire);
        void *events;
        CHECK(pthread_join(sleeper, &events) == 0);
        if ((uintptr_t)events != EPOLLIN) die("turn %u: the sleeper was told %x", turn, (unsigned)(uintptr_t)events);
        take_exactly(&wire, 100);
        close(ends[0]);
        close(ends[1]);
        close(epoll);
        if (turn == 7) hold();
        close(wire.fd);
    }
    say("server done");
}

static void added_client(int port) {
    for (unsigned turn = 0; turn < 8; turn++) {
        struct wire wire = client_end(connect_to(port), 0);
        ask_polling(&wire, ROUNDS / 4);
        take_polling(&wire, 1);
        put(&wire, 100);
        expect_end(&wire);
        close(wire.fd);
    }
    say("client done");
}

/* Clients that exit after their last request, without a close; a server that learns of everything by edges. */
static void gone_server(int listener) {
    unsigned state = 12345;
    for (;;) {
        int fd = accept_one(listener), epoll = epoll_of(fd, EPOLLIN | EPOLLRDHUP | EPOLLET);
        set_nonblocking(fd, 1);
        ssize_t got = -1;
        uint64_t total = 0;
        while (got != 0) {
            uint32_t events = events_within(epoll, 1000);
            char bytes[64];
            if (events == 0 && (got = recv(fd, bytes, 1, 0)) >= 0) die("nothing is told for 1 s, but recv says %zd", got);
            while ((got = recv(fd, bytes, sizeof bytes, 0)) > 0) {
                total += got;
                if (bytes[0] != 'l') CHECK(send(fd, bytes, got, MSG_NOSIGNAL) == got);
                /* Meanwhile the client goes, a little earlier or later each time. */
                state = state * 1103515245 + 12345;
                for (double until = now_s() + (state >> 8) % 250 / 1e6; bytes[0] == 'l' && now_s() < until;) {}
            }
            if (got < 0) CHECK(errno == EAGAIN);
        }
        close(fd);
        close(epoll);
        if (total == 0) break;
        CHECK(total == 84);
    }
    say("every end was seen");
}

static void gone_client(int port) {
    for (double until = now_s() + atof(arguments[4]); now_s() < until;) {
        pid_t child = fork_child();
        if (child == 0) {
            int fd = connect_to(port);
            char bytes[4];
            for (unsigned number = 0; number < 20; number++) {
                CHECK(send(fd, "ping", 4, MSG_NOSIGNAL) == 4);
                CHECK(recv(fd, bytes, 4, MSG_WAITALL) == 4);
            }
            CHECK(send(fd, "last", 4, MSG_NOSIGNAL) == 4);
            _exit(0);
        }
        expect_child(child);
    }
    close(connect_to(port));
    say("client done");
}

/* One thread polls, with a long list, and answers; now and then another one is faster. */
static int helped_fd;
static atomic_ulong polled;
static atomic_int over;

static int answer_byte(void) {
    char byte;
    ssize_t got = recv(helped_fd, &byte, 1, MSG_DONTWAIT);
    if (got == 0) over = 1;
    if (got == 1) CHECK(send(helped_fd, &byte, 1, MSG_NOSIGNAL) == 1);
    return got == 1;
}

static void *help_now_and_then(void *unused) {
    while (!over) {
        for (unsigned long then = polled + 5; polled < then && !over;) sleep_us(200);
        for (double until = now_s() + 0.003; now_s() < until && !over && !answer_byte();) {}
    }
    return unused;
}

static void helped_server(int listener) {
    static struct pollfd list[801];
    int ends[2];
    CHECK(pipe(ends) == 0);
    struct wire wire = server_end(accept_one(listener), 0);
    answer_polling(&wire, ROUNDS);
    list[0] = (struct pollfd){helped_fd = wire.fd, POLLIN, 0};
    for (unsigned number = 1; number < 801; number++) list[number] = (struct pollfd){ends[0], POLLIN, 0};
    pthread_t helper;
    CHECK(pthread_create(&helper, NULL, help_now_and_then, NULL) == 0);
    while (!over) {
        CHECK(poll(list, 801, -1) == 1);
        if (answer_byte()) polled++;
    }
    CHECK(pthread_join(helper, NULL) == 0);
    say("server done");
}

static void helped_client(int port) {
    struct wire wire = client_end(connect_to(port), 0);
    ask_polling(&wire, ROUNDS);
    for (double until = now_s() + atof(arguments[4]), began; (began = now_s()) < until;) {
        char byte;
        CHECK(send(wire.fd, "x", 1, MSG_NOSIGNAL) == 1);
        while (recv(wire.fd, &byte, 1, MSG_DONTWAIT) != 1)
            if (now_s() - began > 1) die("no answer within 1 s");
    }
    say("client done");
}

static const struct scenario scenarios[] = {
    {"edge", edge_server, edge_client},
    {"duplicated", duplicated_server, duplicated_client},
    {"oneshot", oneshot_server, oneshot_client},
    {"exclusive", exclusive_server, exclusive_client},
    {"nested", nested_server, nested_client},
    {"shared", shared_server, shared_client},
    {"waits", waits_server, waits_client},
    {"connecting", connecting_server, connecting_client},
    {"half_close", half_close_server, half_close_client},
    {"added", added_server, added_client},
    {"gone", gone_server, gone_client},
    {"helped", helped_server, helped_client},
};

int main(int argc, char **argv) {
    return play(scenarios, sizeof scenarios / sizeof *scenarios, argc, argv);
}
