/* Programs that lock themselves in: chroot, another user, another network, and filters that kill whoever makes a system call
 * that this program, by itself, does not make. */
#include "lane.h"
#include <grp.h>
#include <linux/filter.h>
#include <linux/seccomp.h>

#define ROUNDS 200

static void allow_only(const int *calls, size_t count) {
    struct sock_filter program[64] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr))};
    size_t length = 1;
    CHECK(count < 30);
    for (size_t number = 0; number < count; number++) {
        program[length++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, calls[number], 0, 1);
        program[length++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    }
    program[length++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
    struct sock_fprog filter = {length, program};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    if (arguments[2][0] == 's') CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0);
    else CHECK(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &filter) == 0);
}

/* What talking takes, and what saying so takes. */
static const int talking[] = {SYS_sendto, SYS_recvfrom, SYS_write, SYS_exit_group, SYS_sched_yield};
/* What meeting takes besides. */
static const int meeting[] = {SYS_sendto, SYS_recvfrom, SYS_write,   SYS_exit_group,  SYS_socket,
                              SYS_bind,   SYS_listen,   SYS_accept,  SYS_getsockname, SYS_connect,
                              SYS_close,  SYS_poll,     SYS_setsockopt, SYS_sched_yield};

static void lock_in(const char *how) {
    const char *empty = arguments[5];
    if (strcmp(how, "chroot") == 0) {
        CHECK(chroot(empty) == 0 && chdir("/") == 0);
    } else if (strcmp(how, "setuid") == 0) {
        CHECK(setgroups(0, NULL) == 0 && setresgid(65534, 65534, 65534) == 0 && setresuid(65534, 65534, 65534) == 0);
    } else if (strcmp(how, "everything") == 0) {
        CHECK(chroot(empty) == 0 && chdir("/") == 0);
        CHECK(setgroups(0, NULL) == 0 && setgid(65534) == 0 && setuid(65534) == 0);
        /* Not one descriptor more than there are. */
        struct rlimit none = {0, 0};
        CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0);
        allow_only(talking, sizeof talking / sizeof *talking);
    } else if (strcmp(how, "unshare") == 0) {
        CHECK(unshare(CLONE_NEWNET) == 0);
    } else if (strcmp(how, "filter") == 0) {
        allow_only(talking, sizeof talking / sizeof *talking);
    } else {
        die("no way to lock in: %s", how);
    }
}

/* After the connection has long been in use. */
static void later_server(int listener) {
    struct wire wire = server_end(accept_one(listener), 0);
    answer_polling(&wire, ROUNDS);
    let_it_come(&wire);
    lock_in(arguments[4]);
    answer_polling(&wire, ROUNDS);
    answer(&wire, ROUNDS);
    put(&wire, 200000);
    expect_end(&wire);
    say("server done");
}

static void later_client(int port) {
    /* What stdio takes for its first line is taken before the doors close. */
    say("client begins");
    struct wire wire = client_end(connect_to(port), 0);
    ask_polling(&wire, ROUNDS);
    /* Only one end is locked in at first. */
    ask_polling(&wire, ROUNDS);
    lock_in(arguments[4]);
    ask(&wire, ROUNDS);
    take(&wire, 200000);
    say("client done");
}

/* Before there is any connection. */
static void earlier_server(int listener) {
    if (strcmp(arguments[4], "filter") == 0) allow_only(meeting, sizeof meeting / sizeof *meeting);
    else lock_in(arguments[4]);
    for (unsigned turn = 0; turn < 2; turn++) {
        struct wire wire = server_end(accept_one(listener), 0);
        answer(&wire, ROUNDS);
        answer_polling(&wire, ROUNDS);
        put(&wire, 200000);
        expect_end(&wire);
        close(wire.fd);
    }
    say("server done");
}

static void earlier_client(int port) {
    say("client begins");
    if (strcmp(arguments[4], "filter") == 0) allow_only(meeting, sizeof meeting / sizeof *meeting);
    else lock_in(arguments[4]);
    for (unsigned turn = 0; turn < 2; turn++) {
        struct wire wire = client_end(connect_to(port), 0);
        ask(&wire, ROUNDS);
        ask_polling(&wire, ROUNDS);
        take(&wire, 200000);
        close(wire.fd);
    }
    say("client done");
}

/* The oldest and hardest of all: read, write, exit. */
static void strictly_talk(struct wire *wire, unsigned rounds, int first) {
    for (unsigned number = 0; number < rounds; number++) {
        for (int half = 0; half < 2; half++) {
            if (half == first) {
                size_t length = round_length(number);
                CHECK(write(wire->fd, pattern(wire->out, wire->sent), length) == (ssize_t)length);
                wire->sent += length;
                continue;
            }
            unsigned char bytes[256];
            for (size_t missing = round_length(number); missing > 0;) {
                ssize_t got = read(wire->fd, bytes, missing);
                CHECK(got > 0);
                verify(wire, bytes, got);
                missing -= got;
            }
        }
    }
}

static void strict_end(struct wire *wire, int first) {
    CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT) == 0);
    strictly_talk(wire, ROUNDS, first);
    CHECK(write(1, "strictly done\n", 14) == 14);
    syscall(SYS_exit, 0);
}

static void strict_server(int listener) {
    struct wire wire = server_end(accept_one(listener), 0);
    answer_polling(&wire, ROUNDS);
    let_it_come(&wire);
    strict_end(&wire, 1);
}

static void strict_client(int port) {
    struct wire wire = client_end(connect_to(port), 0);
    ask_polling(&wire, ROUNDS);
    strict_end(&wire, 0);
}

/* A filter that was there before the program: whoever makes one of these calls, which the program does not make, dies. */
static int confine(char **command) {
    const int forbidden[] = {SYS_recvmsg, SYS_sendmsg,    SYS_memfd_create, SYS_membarrier, SYS_pidfd_open,
                             SYS_ptrace,  SYS_socketpair, SYS_clone3,       SYS_fork,       SYS_eventfd2};
    struct sock_filter program[64] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr))};
    size_t length = 1;
    for (size_t number = 0; number < sizeof forbidden / sizeof *forbidden; number++) {
        program[length++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, forbidden[number], 0, 1);
        program[length++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
    }
    program[length++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    struct sock_fprog filter = {length, program};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    CHECK(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &filter) == 0);
    execv(command[0], command);
    die("exec of %s", command[0]);
}

static void confined_server(int listener) {
    struct wire wire = server_end(accept_one(listener), 0);
    answer_polling(&wire, ROUNDS);
    answer(&wire, ROUNDS);
    put(&wire, 200000);
    expect_end(&wire);
    say("server done");
}

static void confined_client(int port) {
    struct wire wire = client_end(connect_to(port), 0);
    ask_polling(&wire, ROUNDS);
    ask(&wire, ROUNDS);
    take(&wire, 200000);
    say("client done");
}

static const struct scenario scenarios[] = {
    {"confined", confined_server, confined_client},
    {"later", later_server, later_client},
    {"earlier", earlier_server, earlier_client},
    {"strict", strict_server, strict_client},
};

int main(int argc, char **argv) {
    argument_count = argc;
    arguments = argv;
    /* Not to be had by a role itself: it replaces itself by the confined one. */
    if (argc > 2 && strcmp(argv[1], "confined") == 0 && getenv("CONFINED") == NULL) {
        CHECK(setenv("CONFINED", "yes", 1) == 0);
        return confine(argv);
    }
    return play(scenarios, sizeof scenarios / sizeof *scenarios, argc, argv);
}
