/* Two that talk, in every way, until the client is told to stop. */
#include "lane.h"

static volatile sig_atomic_t told;

static void tell(int signal) {
    (void)signal;
    told = 1;
}

static void switched_server(int listener) {
    struct wire wire = server_end(accept_one(listener), 0);
    for (unsigned turn = 0;; turn++) {
        /* One byte says whether there is another turn; then questions, and some of it in bulk. */
        char more;
        CHECK(recv(wire.fd, &more, 1, 0) == 1);
        if (more == '.') break;
        if (turn % 2) answer(&wire, 100);
        else answer_polling(&wire, 100);
        if (turn % 5 == 0) {
            take(&wire, 100000);
            put(&wire, 100000);
        }
    }
    expect_end(&wire);
    say("server done");
}

static void switched_client(int port) {
    struct wire wire = client_end(connect_to(port), 0);
    struct sigaction action = {.sa_handler = tell, .sa_flags = SA_RESTART};
    CHECK(sigaction(SIGTERM, &action, NULL) == 0);
    double began = now_s();
    for (unsigned turn = 0; !told; turn++) {
        CHECK(now_s() - began < 25);
        CHECK(send(wire.fd, "+", 1, MSG_NOSIGNAL) == 1);
        if (turn % 3) ask(&wire, 100);
        else ask_polling(&wire, 100);
        if (turn % 5 == 0) {
            put(&wire, 100000);
            take(&wire, 100000);
        }
    }
    CHECK(send(wire.fd, ".", 1, MSG_NOSIGNAL) == 1);
    CHECK(shutdown(wire.fd, SHUT_WR) == 0);
    expect_end(&wire);
    say("client done");
}

static const struct scenario scenarios[] = {{"switched", switched_server, switched_client}};

int main(int argc, char **argv) {
    return play(scenarios, sizeof scenarios / sizeof *scenarios, argc, argv);
}
