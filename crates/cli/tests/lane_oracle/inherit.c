/* A connection in another process: it is started with the descriptor, or is sent it, asks, receives and sends. The one that
 * had it before keeps it, or closes it and gets it back at the end. */
#define _GNU_SOURCE
#include "oracle.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "raw.h"

extern char **environ;

/* Where the program finds what it gets: above whatever a sequence opens. */
enum { CONNECTION_AT = 900, RESULTS_AT, CHANNEL_AT };

/* What it is to do, and what came of it; in a file that both have. */
struct errand {
    enum inheritance way;
    enum first_question first;
    uint32_t length, send_length;
    uint64_t key, offset;
    bool handed, done;
    long asked, received, sent;
    int receive_error, send_error;
    unsigned char data[DATA_MAX];
};

static int receive_descriptor(int channel)
{
    char byte, control[CMSG_SPACE(sizeof(int))];
    struct iovec part = {&byte, 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    int descriptor = -1;
    if (recvmsg(channel, &message, 0) == 1 && CMSG_FIRSTHDR(&message) != NULL)
        memcpy(&descriptor, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof descriptor);
    return descriptor;
}

static void send_descriptor(int channel, int descriptor)
{
    char byte = 1, control[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec part = {&byte, 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof descriptor);
    memcpy(CMSG_DATA(header), &descriptor, sizeof descriptor);
    if (sendmsg(channel, &message, 0) != 1)
        exit(2);
}

static long ask_first(int descriptor, enum first_question first)
{
    struct pollfd watch = {descriptor, POLLIN, 0};
    struct epoll_event event = {.events = EPOLLIN};
    int count = 0, set;
    switch (first) {
    case FIRST_POLL: return poll(&watch, 1, 0) << 16 | watch.revents;
    case FIRST_UNREAD: return ioctl(descriptor, FIONREAD, &count) << 30 | count;
    case FIRST_EPOLL:
        set = epoll_create1(0);
        if (epoll_ctl(set, EPOLL_CTL_ADD, descriptor, &event) != 0)
            return -1;
        return epoll_wait(set, &event, 1, 0) == 1 ? (long)event.events : 0;
    default: return 0;
    }
}

/* In the other process. */
static void do_errand(struct errand *errand, int connection, int channel)
{
    int descriptor = errand->way == INHERIT_MESSAGE ? receive_descriptor(channel) : connection;
    char gone;
    if (errand->handed && recv(channel, &gone, 1, 0) != 1)
        return;
    errand->asked = ask_first(descriptor, errand->first);
    if (errand->length > 0) {
        errand->received = recv(descriptor, errand->data, errand->length, MSG_DONTWAIT);
        errand->receive_error = errno;
    }
    if (errand->send_length > 0) {
        unsigned char bytes[4096];
        for (uint32_t at = 0; at < errand->send_length; at++)
            bytes[at] = payload_byte(errand->key, errand->offset + at);
        errand->sent = send(descriptor, bytes, errand->send_length, MSG_NOSIGNAL | MSG_DONTWAIT);
        errand->send_error = errno;
    }
    if (errand->handed)
        send_descriptor(channel, descriptor);
    errand->done = true;
}

int inherited_program(void)
{
    struct errand *errand = mmap(NULL, sizeof *errand, PROT_READ | PROT_WRITE, MAP_SHARED, RESULTS_AT, 0);
    if (errand == MAP_FAILED)
        return 2;
    do_errand(errand, CONNECTION_AT, CHANNEL_AT);
    return 0;
}

static char own_path[4096];
static char *const program[] = {own_path, "--inherited", NULL};

/* In the child; descriptors stay where they are, for its parent too, in whose memory this may run. */
static void become_program(int connection, int results, int channel)
{
    if (dup2(results, RESULTS_AT) == RESULTS_AT && dup2(channel, CHANNEL_AT) == CHANNEL_AT &&
        (connection < 0 || dup2(connection, CONNECTION_AT) == CONNECTION_AT))
        execve(own_path, program, environ);
    _exit(127);
}

__attribute__((noinline)) static pid_t by_vfork(int connection, int results, int channel)
{
    pid_t child = vfork();
    if (child == 0)
        become_program(connection, results, channel);
    return child;
}

static pid_t by_spawn(int connection, int results, int channel)
{
    posix_spawn_file_actions_t actions;
    pid_t child = -1;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, connection, CONNECTION_AT);
    posix_spawn_file_actions_adddup2(&actions, results, RESULTS_AT);
    posix_spawn_file_actions_adddup2(&actions, channel, CHANNEL_AT);
    if (posix_spawn(&child, own_path, &actions, NULL, program, environ) != 0)
        child = -1;
    posix_spawn_file_actions_destroy(&actions);
    return child;
}

static pid_t by_fork(struct errand *errand, int connection, int channel)
{
    pid_t child = fork();
    if (child == 0) {
        do_errand(errand, connection, channel);
        _exit(0);
    }
    return child;
}

static int state_of(int descriptor)
{
    struct tcp_info info = {0};
    unsigned length = sizeof info;
    raw6(SYS_getsockopt, descriptor, IPPROTO_TCP, TCP_INFO, (long)&info, (long)&length, 0);
    return info.tcpi_state;
}

void perform_inherit(const struct call *call, struct outcome *outcome)
{
    int descriptor = descriptor_of(call->slot), status = -1, pair[2];
    int results = (int)raw3(SYS_memfd_create, (long)"errand", MFD_CLOEXEC, 0);
    if (results < 0 || raw3(SYS_ftruncate, results, sizeof(struct errand), 0) != 0 ||
        raw3(SYS_readlink, (long)"/proc/self/exe", (long)own_path, sizeof own_path - 1) <= 0 ||
        socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0)
        exit(2);
    struct errand *errand = mmap(NULL, sizeof *errand, PROT_READ | PROT_WRITE, MAP_SHARED, results, 0);
    if (errand == MAP_FAILED)
        exit(2);
    errand->way = (enum inheritance)call->way;
    errand->first = (enum first_question)call->other;
    errand->length = call->length;
    errand->send_length = call->expected;
    errand->key = call->key;
    errand->offset = call->offset;
    errand->handed = call->handed;
    note(outcome, " state=%d", state_of(descriptor));
    /* Most programs keep their connections from others, and give them away on purpose. */
    int kept = (int)raw3(SYS_fcntl, descriptor, F_GETFD, 0);
    if (call->value)
        raw3(SYS_fcntl, descriptor, F_SETFD, FD_CLOEXEC);
    pid_t child;
    switch (call->way) {
    case INHERIT_EXEC:
        child = fork();
        if (child == 0)
            become_program(descriptor, results, pair[1]);
        break;
    case INHERIT_VFORK: child = by_vfork(descriptor, results, pair[1]); break;
    case INHERIT_SPAWN: child = by_spawn(descriptor, results, pair[1]); break;
    case INHERIT_FORK: child = by_fork(errand, descriptor, pair[1]); break;
    default:
        child = fork();
        if (child == 0)
            become_program(-1, results, pair[1]);
        send_descriptor(pair[0], descriptor);
    }
    close(pair[1]);
    if (call->handed) {
        char gone = 1;
        close(descriptor);
        if (send(pair[0], &gone, 1, MSG_NOSIGNAL) != 1)
            exit(2);
        int back = receive_descriptor(pair[0]);
        if (back >= 0 && back != descriptor) {
            dup2(back, descriptor);
            close(back);
        }
    }
    close(pair[0]);
    if (child < 0 || raw6(SYS_wait4, child, (long)&status, 0, 0, 0, 0) != child)
        exit(2);
    raw3(SYS_fcntl, descriptor, F_SETFD, kept);
    outcome->result = errand->received;
    outcome->error = errand->receive_error;
    outcome->bytes = errand->received > 0 ? (uint32_t)errand->received : 0;
    outcome->sent = errand->sent;
    memcpy(mailbox->data, errand->data, outcome->bytes);
    note(outcome, " asked=%lx", errand->asked);
    if (errand->send_length > 0)
        note(outcome, " sent=%ld%s%s", errand->sent, errand->sent < 0 ? " " : "",
             errand->sent < 0 ? strerrorname_np(errand->send_error) : "");
    if (status != 0 || !errand->done)
        note(outcome, " !! the program ended with %#x", status);
    munmap(errand, sizeof *errand);
    raw3(SYS_close, results, 0, 0);
}
