/* Options, the seeds in turn, the second process, connections and their warming up. See oracle.h. */
#define _GNU_SOURCE
#include "oracle.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "raw.h"

enum { WARMING_EXCHANGES = 48, STEPS = 60, ANSWER_MS_MAX = 8000, TRACE_LINE_MAX = 2048 };

struct mailbox *mailbox;       /* this process's own */
struct world world;
static struct mailbox *mailboxes;
static int to_second[2], from_second[2];
static int trace_file = -1;
static uint64_t bytes_in_all, bytes_by_tcp;

/* Written at once, past libc: what stands there when a call hangs or the process dies is all that happened. */
void trace(const char *format, ...)
{
    char line[TRACE_LINE_MAX];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    if (length >= (int)sizeof line)
        length = (int)sizeof line - 1;
    for (int at = 0; at < length;) {
        long written = raw3(SYS_write, trace_file, (long)(line + at), length - at);
        if (written <= 0)
            _exit(3);
        at += (int)written;
    }
}

static uint64_t next_random(void)
{
    uint64_t x = world.random += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

unsigned draw(unsigned below)
{
    return (unsigned)(next_random() % below);
}

bool chance(unsigned percent)
{
    return draw(100) < percent;
}

int slot_take(int process)
{
    for (int slot = 0; slot < SLOTS; slot++)
        if (!world.slot_used[process][slot]) {
            world.slot_used[process][slot] = true;
            return slot;
        }
    trace("no slot is left\n");
    exit(2);
}

void slot_free(int process, int slot)
{
    world.slot_used[process][slot] = false;
}

static void tell(int process, const struct call *call)
{
    char bell = 1;
    mailboxes[process].call = *call;
    if (raw3(SYS_write, to_second[1], (long)&bell, 1) != 1)
        exit(3);
}

static void await(int process)
{
    struct pollfd watch = {from_second[0], POLLIN, 0};
    struct timespec most = {ANSWER_MS_MAX / 1000, 0};
    char bell;
    (void)process;
    if (raw6(SYS_ppoll, (long)&watch, 1, (long)&most, 0, 0, 0) != 1) {
        trace(" !! NO ANSWER from the second process\n");
        exit(4);
    }
    if (raw3(SYS_read, from_second[0], (long)&bell, 1) != 1) {
        trace(" !! the second process is GONE\n");
        exit(4);
    }
}

struct outcome make(int process, const struct call *call)
{
    if (process == 0) {
        perform(call, &mailbox->outcome);
    } else {
        tell(process, call);
        await(process);
    }
    return mailboxes[process].outcome;
}

/* Two calls at once, the first of which may wait for what the second does. One of the two processes is this one. */
struct outcome make_while(int process, const struct call *call, int meanwhile_process, const struct call *meanwhile,
                          struct outcome *meanwhile_outcome)
{
    if (process == meanwhile_process)
        abort();
    if (process == 0) {
        tell(meanwhile_process, meanwhile);
        perform(call, &mailbox->outcome);
    } else {
        tell(process, call);
        perform(meanwhile, &mailbox->outcome);
    }
    await(1);
    *meanwhile_outcome = mailboxes[meanwhile_process].outcome;
    return mailboxes[process].outcome;
}

static void second_process(void)
{
    char bell;
    mailbox = &mailboxes[1];
    raw3(SYS_close, to_second[1], 0, 0);
    raw3(SYS_close, from_second[0], 0, 0);
    performer_begin();
    while (raw3(SYS_read, to_second[0], (long)&bell, 1) == 1) {
        struct call call = mailbox->call;
        perform(&call, &mailbox->outcome);
        if (raw3(SYS_write, from_second[1], (long)&bell, 1) != 1 || call.kind == KIND_QUIT)
            break;
    }
    exit(0);
}

/* So many exchanges, in both directions, that a lane is there afterwards. */
static void warm_up(int number)
{
    struct connection *connection = &world.connection[number];
    for (int exchange = 0; exchange < WARMING_EXCHANGES; exchange++)
        for (int writer = 0; writer < 2; writer++) {
            struct flow *flow = &connection->flow[writer];
            uint32_t length = 1 + (unsigned)exchange % 7;
            struct call call = send_call(number, writer, length, flow->raw_writer ? BY_RAW_SENDTO : BY_SEND, 0);
            struct outcome outcome = make(connection->end[writer].process, &call);
            account_sent(number, writer, &outcome);
            settle_after_send(number, writer, outcome.bytes);
            call = receive_call(number, 1 - writer, 64, flow->raw_reader ? BY_RAW_RECVFROM : BY_RECV, 0);
            outcome = make(connection->end[1 - writer].process, &call);
            if (outcome.result != length)
                trace("c%d: !! warming up received %ld, errno %d\n", number, outcome.result, outcome.error);
            account_received(number, 1 - writer, &call, &outcome, true);
        }
}

const unsigned char *data_of(int process)
{
    return mailboxes[process].data;
}

static void connect_ends(int number)
{
    struct connection *connection = &world.connection[number];
    int accepting = (int)draw(2), connecting = 1 - accepting;
    int processes[2] = {0, world.pair ? 1 : 0};
    int family = chance(20) ? 2 : 0;
    memset(connection, 0, sizeof *connection);
    for (int which = 0; which < 2; which++) {
        struct end *end = &connection->end[which];
        end->process = processes[which];
        end->place = world.apart ? 1 + which : ANYWHERE;
        end->alias[0] = slot_take(end->process);
        end->aliases = 1;
        end->low_water = 1;
        connection->flow[which].key = world.seed * 1000003 + (uint64_t)number * 17 + (uint64_t)which;
        connection->flow[which].raw_reader = chance(7);
        connection->flow[which].raw_writer = chance(7);
    }
    struct end *accepts = &connection->end[accepting], *connects = &connection->end[connecting];
    struct call listening = {.kind = KIND_LISTEN, .slot = slot_take(accepts->process), .flags = family, .rescue_slot = -1};
    struct outcome port = make(accepts->process, &listening);
    if (port.result < 0 && family) {
        /* A machine without IPv6: what is drawn stays the same. */
        listening.flags = family = 0;
        port = make(accepts->process, &listening);
    }
    struct call connect = {.kind = KIND_CONNECT, .slot = connects->alias[0], .value = port.result,
                           .flags = family | (chance(25) ? 1 : 0), .rescue_slot = -1};
    struct outcome connected = make(connects->process, &connect);
    struct call accept = {.kind = KIND_ACCEPT, .slot = accepts->alias[0], .other = listening.slot,
                          .flags = (int)draw(2), .rescue_slot = -1};
    struct outcome accepted = make(accepts->process, &accept);
    struct call close = {.kind = KIND_CLOSE, .way = BY_CLOSE, .slot = listening.slot, .rescue_slot = -1};
    make(accepts->process, &close);
    slot_free(accepts->process, listening.slot);
    trace("c%d: %c accepts as %ld, %c connects as %ld%s%s%s%s%s\n", number, 'a' + accepting, accepted.result,
          'a' + connecting, connected.result, connected.note, connection->flow[0].raw_reader ? " b reads raw" : "",
          connection->flow[0].raw_writer ? " a writes raw" : "", connection->flow[1].raw_reader ? " a reads raw" : "",
          connection->flow[1].raw_writer ? " b writes raw" : "");
    for (int which = 0; which < 2; which++) {
        struct call set = call_on(KIND_SET, &connection->end[which]);
        set.way = SET_NODELAY;
        /* Without, small packets wait for acknowledgements, which are late by 40 ms. */
        set.value = chance(98);
        make(connection->end[which].process, &set);
    }
    warm_up(number);
}

/* How much the kernel carried, by its own count: the rest went by the lane. */
static void count_ways(void)
{
    for (int number = 0; number < world.connections; number++)
        for (int reader = 0; reader < 2; reader++) {
            struct connection *connection = &world.connection[number];
            if (!usable(&connection->end[reader]))
                continue;
            struct call call = call_on(KIND_TCP_COUNT, &connection->end[reader]);
            bytes_in_all += connection->flow[1 - reader].sent + connection->flow[1 - reader].filled;
            bytes_by_tcp += (uint64_t)make(connection->end[reader].process, &call).result;
        }
}

static void close_everything(void)
{
    for (int number = 0; number < world.connections; number++)
        for (int which = 0; which < 2; which++) {
            struct end *end = &world.connection[number].end[which];
            if (!usable(end))
                continue;
            /* A reset leaves nothing waiting for its time to pass: thousands of seeds do not run out of ports. */
            struct call linger = call_on(KIND_SET, end);
            linger.way = SET_LINGER_RESET;
            linger.value = 1;
            make(end->process, &linger);
        }
    for (int process = 0; process < 2; process++)
        for (int slot = 0; slot < SLOTS; slot++)
            if (world.slot_used[process][slot]) {
                struct call close = {.kind = KIND_CLOSE, .way = BY_CLOSE, .slot = slot, .rescue_slot = -1};
                make(process, &close);
                slot_free(process, slot);
            }
}

/* The connection again, from the start, with descriptors that were used before. */
void renew(int number)
{
    for (int which = 0; which < 2; which++) {
        struct end *end = &world.connection[number].end[which];
        while (end->aliases > 0) {
            struct call close = call_on(KIND_CLOSE, end);
            close.way = BY_CLOSE;
            close.slot = end->alias[--end->aliases];
            make(end->process, &close);
            slot_free(end->process, close.slot);
        }
    }
    connect_ends(number);
}

static void run_seed(uint64_t seed)
{
    world.seed = seed;
    world.random = seed * 0x2545F4914F6CDD1Du + (world.pair ? 77 : 0);
    world.step = 0;
    trace("seed %llu\n", (unsigned long long)seed);
    world.connections = 1 + (int)draw(CONNECTIONS_MAX);
    /* Drawn in any case, so that a seed is the same on a machine with one CPU. */
    world.apart = chance(88) && two_places();
    for (int set = 0; set < 4; set++)
        world.set[set] = (struct epoll_set){-1, world.pair ? set / 2 : 0};
    for (int process = 0; process < (world.pair ? 2 : 1); process++) {
        struct call call = {.kind = KIND_PIPE, .rescue_slot = -1};
        call.slot = world.pipe_slot[process][0] = slot_take(process);
        call.other = world.pipe_slot[process][1] = slot_take(process);
        world.pipe_bytes[process] = 0;
        make(process, &call);
        make_others(process);
    }
    for (int number = 0; number < world.connections; number++)
        connect_ends(number);
    sequence(STEPS);
    count_ways();
    close_everything();
}

void make_others(int process)
{
    for (int kind = 0; kind < OTHERS; kind++) {
        struct call call = {.kind = KIND_OTHER_MAKE, .way = kind, .slot = slot_take(process), .rescue_slot = -1};
        world.other_slot[process][kind] = call.slot;
        world.other_raised[process][kind] = false;
        make(process, &call);
    }
}

static void begin_second_process(void)
{
    if (pipe(to_second) != 0 || pipe(from_second) != 0)
        exit(2);
    pid_t first = getpid(), child = fork();
    if (child < 0)
        exit(2);
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != first)
            exit(0);
        second_process();
    }
    raw3(SYS_close, to_second[0], 0, 0);
    raw3(SYS_close, from_second[1], 0, 0);
}

void finish(void)
{
    if (world.pair) {
        struct call quit = {.kind = KIND_QUIT, .rescue_slot = -1};
        make(1, &quit);
        wait(NULL);
    }
    trace("end\n");
    exit(0);
}

int main(int count, char **arguments)
{
    /* Descriptors that were inherited would move those of the sequence, and be closed by its closefrom. */
    if (count > 2 && !strcmp(arguments[1], "--clean")) {
        raw3(SYS_close_range, 3, ~0u, 0);
        execv(arguments[2], arguments + 2);
        perror(arguments[2]);
        return 2;
    }
    if (count == 2 && !strcmp(arguments[1], "--inherited"))
        return inherited_program();
    uint64_t seed = 1, seeds = 1;
    const char *path = "/dev/stdout", *counts = NULL;
    int wrong = 0;
    for (int i = 1; i + 1 < count; i += 2) {
        const char *name = arguments[i], *value = arguments[i + 1];
        if (!strcmp(name, "--seed"))
            seed = strtoull(value, NULL, 10);
        else if (!strcmp(name, "--seeds"))
            seeds = strtoull(value, NULL, 10);
        else if (!strcmp(name, "--shape"))
            world.pair = !strcmp(value, "pair");
        else if (!strcmp(name, "--wrong"))
            set_fault(wrong = atoi(value));
        else if (!strcmp(name, "--trace"))
            path = value;
        else if (!strcmp(name, "--counts"))
            counts = value;
        else
            count = 0;
    }
    if (count % 2 == 0) {
        fprintf(stderr, "usage: oracle [--clean PROGRAM ...] [--shape single|pair] [--seed A] [--seeds N] [--wrong FAULT] [--trace FILE] "
                        "[--counts FILE]\n");
        return 2;
    }
    trace_file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    mailboxes = mmap(NULL, 2 * sizeof *mailboxes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (trace_file < 0 || mailboxes == MAP_FAILED) {
        perror(path);
        return 2;
    }
    mailbox = &mailboxes[0];
    find_places();
    if (world.pair)
        begin_second_process();
    performer_begin();
    for (uint64_t at = 0; at < seeds; at++)
        run_seed(seed + at);
    if (counts) {
        FILE *file = fopen(counts, "w");
        fprintf(file, "%llu %llu\n", (unsigned long long)bytes_in_all, (unsigned long long)bytes_by_tcp);
        fclose(file);
    }
    if (wrong) {
        fprintf(stderr, "no call of these seeds could be made wrong in the way %d\n", wrong);
        return 5;
    }
    finish();
}
