/* What happens to the registry while programs go on: it is another one, or it does not answer. */
#include "lane.h"

#define ROUNDS 20
/* With pauses: on a busy machine a registry may be late, and is asked again a moment later. */
#define TURNS 20
#define PAUSE_US 25000

/* It lives on, whoever comes and goes; its end of each connection asks for the lane first. */
static void lasting_server(int listener) {
    for (int left = atoi(arguments[4]); left > 0; left--) {
        struct wire wire = server_end(accept_one(listener), 0);
        for (unsigned number = 0; number < 16; number++) take(&wire, 1);
        for (unsigned turn = 0; turn < TURNS; turn++) answer_polling(&wire, ROUNDS);
        expect_end(&wire);
        close(wire.fd);
    }
    say("server done");
}

static void lasting_client(int port) {
    struct wire wire = client_end(connect_to(port), 0);
    put(&wire, 16);
    sleep_us(100000);
    for (unsigned turn = 0; turn < TURNS; turn++) {
        ask_polling(&wire, ROUNDS);
        sleep_us(PAUSE_US);
    }
    hold();
    say("client done");
}

/* One connection of which nothing is read, and one that is answered. */
static void asking_server(int listener) {
    int unread = accept_one(listener), fd = accept_one(listener);
    CHECK(echo_until_end(fd) > 0);
    close(unread);
    say("server done");
}

static volatile pid_t asking_thread;

/* Sends and sends: it asks for a lane, and whoever could answer is stopped. */
static void *keep_asking(void *argument) {
    int fd = *(int *)argument;
    asking_thread = syscall(SYS_gettid);
    for (;;) {
        if (send(fd, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL) < 0 && errno != EAGAIN) return NULL;
        sleep_us(500);
    }
}

/* It never polls by itself. */
static int waits_for_an_answer(void) {
    char name[64], text[32] = "";
    snprintf(name, sizeof name, "/proc/self/task/%d/syscall", (int)asking_thread);
    int fd = open(name, O_RDONLY);
    CHECK(fd >= 0 && read(fd, text, sizeof text - 1) > 0);
    close(fd);
    int call = text[0] >= '0' && text[0] <= '9' ? atoi(text) : -1;
#ifdef SYS_poll
    if (call == SYS_poll) return 1;
#endif
    return call == SYS_ppoll;
}

/* A fork while another thread asks: the child has lanes all the same. */
static void asking_client(int port) {
    pid_t registry = atoi(arguments[4]);
    pthread_t thread;
    int fd = connect_to(port);
    CHECK(registry > 0 && kill(registry, SIGSTOP) == 0);
    CHECK(pthread_create(&thread, NULL, keep_asking, &fd) == 0);
    double began = now_s();
    for (;;) {
        int told[2];
        CHECK(pipe(told) == 0);
        while (asking_thread == 0 || !waits_for_an_answer()) {
            if (now_s() - began > 20) {
                kill(registry, SIGCONT);
                die("nobody was seen asking");
            }
        }
        pid_t child = fork_child();
        if (child == 0) {
            char yes;
            close(told[1]);
            if (read(told[0], &yes, 1) != 1) _exit(0);
            struct wire wire = echo_client(connect_to(port), 0);
            for (unsigned number = 0; number < ROUNDS * TURNS; number++) {
                put(&wire, round_length(number));
                take_polling(&wire, round_length(number));
                if (number % ROUNDS == 0) sleep_us(PAUSE_US);
            }
            hold();
            _exit(0);
        }
        int caught = waits_for_an_answer();
        if (caught) {
            CHECK(kill(registry, SIGCONT) == 0 && write(told[1], "y", 1) == 1);
        }
        close(told[0]);
        close(told[1]);
        expect_child(child);
        if (caught) break;
    }
    say("client done");
}

static const struct scenario scenarios[] = {
    {"lasting", lasting_server, lasting_client},
    {"asking", asking_server, asking_client},
};

int main(int argc, char **argv) {
    return play(scenarios, sizeof scenarios / sizeof *scenarios, argc, argv);
}
