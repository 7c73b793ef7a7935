/* Ends that are in different networks, and pairs of ends in different networks that have the same names. */
#include "lane.h"

#define ROUNDS 300

static int connect_from(const char *host, int port, int own_port) {
    int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    CHECK(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) == 0);
    struct sockaddr_in own = {.sin_family = AF_INET, .sin_port = htons(own_port)};
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    CHECK(inet_pton(AF_INET, host, &address.sin_addr) == 1);
    CHECK(bind(fd, (struct sockaddr *)&own, sizeof own) == 0);
    CHECK(connect(fd, (struct sockaddr *)&address, sizeof address) == 0);
    CHECK(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one) == 0);
    return fd;
}

/* The listener that comes with the scenario is at loopback only; another one takes its place. */
static void across_server(int loopback) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port_of(loopback))};
    close(loopback);
    int listener = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    CHECK(setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) == 0);
    CHECK(bind(listener, (struct sockaddr *)&address, sizeof address) == 0 && listen(listener, 8) == 0);
    struct wire wire = server_end(accept_one(listener), 0);
    answer_polling(&wire, ROUNDS);
    answer(&wire, ROUNDS);
    expect_end(&wire);
    say("server done");
}

static void across_client(int port) {
    /* Its listener may be a moment late. */
    int fd = -1;
    for (unsigned attempt = 0; fd < 0; attempt++) {
        struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
        CHECK(inet_pton(AF_INET, arguments[4], &address.sin_addr) == 1);
        fd = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(fd, (struct sockaddr *)&address, sizeof address) == 0) break;
        CHECK(attempt < 100);
        close(fd);
        fd = -1;
        sleep_us(10000);
    }
    int one = 1;
    CHECK(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one) == 0);
    struct wire wire = client_end(fd, 0);
    ask_polling(&wire, ROUNDS);
    ask(&wire, ROUNDS);
    hold();
    say("client done");
}

static void twins_server(int listener) {
    int fd = accept_one(listener);
    CHECK(echo_until_end(fd) > 0);
    say("server done");
}

static void twins_client(int port) {
    struct wire wire = echo_client(connect_from(arguments[4], port, 7701), atoi(arguments[5]));
    for (unsigned turn = 0; turn < 10; turn++) {
        ask_echo(&wire, ROUNDS / 10);
        sleep_us(5000);
    }
    put(&wire, 100000);
    take(&wire, 100000);
    say("client done");
}

static const struct scenario scenarios[] = {
    {"across", across_server, across_client},
    {"twins", twins_server, twins_client},
};

int main(int argc, char **argv) {
    return play(scenarios, sizeof scenarios / sizeof *scenarios, argc, argv);
}
