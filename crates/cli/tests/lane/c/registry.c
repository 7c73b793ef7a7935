/* What happens to the registry while programs go on: it is another one, or it does not answer. */
#include "lane.h"

#define ROUNDS 400

/* It lives on, whoever comes and goes; its end of each connection asks for the lane first. */
static void lasting_server(int listener) {
    for (int left = atoi(arguments[4]); left > 0; left--) {
        struct wire wire = server_end(accept_one(listener), 0);
        for (unsigned number = 0; number < 16; number++) take(&wire, 1);
        answer_polling(&wire, ROUNDS);
        expect_end(&wire);
        close(wire.fd);
    }
    say("server done");
}

static void lasting_client(int port) {
    struct wire wire = client_end(connect_to(port), 0);
    put(&wire, 16);
    sleep_us(100000);
    ask_polling(&wire, ROUNDS);
    hold();
    say("client done");
}

static const struct scenario scenarios[] = {
    {"lasting", lasting_server, lasting_client},
};

int main(int argc, char **argv) {
    return play(scenarios, sizeof scenarios / sizeof *scenarios, argc, argv);
}
