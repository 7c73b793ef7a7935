/* Several calls that belong together: ends of connections, urgent bytes, signals, full buffers in one direction and in both, sleepers. */
#define _GNU_SOURCE
#include "oracle.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include "raw.h"

enum {
    BLOCKED_MS_MAX = 4000,
    FILL_CHUNK = 16 * 1024,
    FILL_MAX = 32 * 1024 * 1024,
    LARGE_MIN = 30 * 1000,
    LARGE_MAX = 90 * 1000,
    SMALL_SEND_BUFFER = 16 * 1024,
    LARGE_SEND_BUFFER = 1024 * 1024
};

/* An end whose calls may wait, with nothing in the way of a wait of its own. */
static bool plain_reader(int number, int reader)
{
    const struct end *end = &world.connection[number].end[reader];
    return usable(end) && !end->nonblocking && !end->receive_timeout && end->low_water == 1 && !end->shut_for_reading;
}

static bool alive(int number)
{
    const struct connection *connection = &world.connection[number];
    return usable(&connection->end[0]) && usable(&connection->end[1]) && !connection->end[0].finished &&
           !connection->end[1].finished && !connection->reset;
}

static int plain_receive_way(const struct flow *flow)
{
    return flow->raw_reader ? BY_RAW_RECVFROM : BY_RECV + (int)draw(BY_RECVMSG - BY_RECV + 1);
}

/* A receive that takes flags, and so can be told not to wait. */
static int willing_receive_way(const struct flow *flow)
{
    static const int ways[] = {BY_RECV, BY_RECVFROM, BY_RECVMSG, BY_RECV_CHK, BY_SYSCALL_RECV};
    return flow->raw_reader ? BY_RAW_RECVFROM : ways[draw(5)];
}

/* A send that is one packet and one record, however it is made. */
static int single_send_way(const struct flow *flow)
{
    static const int ways[] = {BY_SEND, BY_WRITE, BY_WRITEV, BY_SENDTO, BY_SENDMSG, BY_PWRITEV2, BY_SYSCALL_SEND};
    return flow->raw_writer ? BY_RAW_SENDTO : ways[draw(7)];
}

static void drain(int number, int reader)
{
    const struct flow *flow = &world.connection[number].flow[1 - reader];
    for (int turn = 0; turn < 8 && unread(number, reader) > 0; turn++)
        receive_bytes(number, reader, unread(number, reader), flow->raw_reader ? BY_RAW_RECVFROM : BY_RECV, MSG_DONTWAIT);
}

/* ---- ends ---- */

/* Closes one end, which by the rules of TCP resets the connection if something lies unread there. */
void close_end(int number, int which, int way)
{
    struct connection *connection = &world.connection[number];
    struct end *end = &connection->end[which];
    bool resets = unread(number, which) > 0 || end->linger_reset;
    bool over = connection->end[0].finished && connection->end[1].finished;
    while (end->aliases > 0) {
        struct call call = call_on(KIND_CLOSE, end);
        call.way = way;
        call.slot = end->alias[end->aliases - 1];
        call.other = other_socket(number, which);
        record(end->process, &call);
        end->aliases--;
        slot_free(end->process, call.slot);
    }
    if (resets && !over)
        connection->reset = true;
    end->finished = true;
    settle_end(number);
}

static void shut_down(int number, int which)
{
    struct end *end = &world.connection[number].end[which];
    struct call call = call_on(KIND_SHUTDOWN, end);
    call.way = chance(60) ? SHUT_WR : chance(50) ? SHUT_RD : SHUT_RDWR;
    /* The kernel would tell edge-triggered watchers of unread bytes once more, which nobody is promised. */
    if (call.way == SHUT_WR)
        drain(number, which);
    struct outcome outcome = record(end->process, &call);
    if (outcome.result != 0)
        return;
    if (call.way != SHUT_WR)
        end->shut_for_reading = true;
    if (call.way != SHUT_RD)
        end->finished = true;
    settle_end(number);
    readiness(number, which);
    if (usable(&world.connection[number].end[1 - which]))
        readiness(number, 1 - which);
}

/* Reads what there still is, and the end of it, three times: an error is told once. */
static void read_to_the_end(int number, int reader)
{
    const struct flow *flow = &world.connection[number].flow[1 - reader];
    ask(number, reader, ASK_UNREAD);
    if (chance(30))
        ask(number, reader, ASK_ERROR);
    for (int turn = 0; turn < 4; turn++) {
        receive_bytes(number, reader, 1 + draw(2 * unread(number, reader) + 8), plain_receive_way(flow), 0);
        if (chance(30))
            readiness(number, reader);
    }
}

static void close_scene(int number, int which)
{
    struct connection *connection = &world.connection[number];
    static const int ways[] = {BY_CLOSE, BY_CLOSE, BY_CLOSE, BY_CLOSE_RANGE, BY_DUP2_OVER};
    if (chance(40))
        drain(number, which);
    /* Bytes that the closing end leaves unread, and bytes that it leaves to be read. */
    for (int writer = 0; writer < 2; writer++)
        if (alive(number) && chance(40) && unread(number, 1 - writer) < UNREAD_MAX / 2)
            send_bytes(number, writer, 1 + draw(100), send_way(&connection->flow[writer]), 0);
    if (chance(20)) {
        set(number, which, SET_LINGER_RESET, 1);
        connection->end[which].linger_reset = true;
    }
    close_end(number, which, ways[draw(5)]);
    int other = 1 - which;
    if (!usable(&connection->end[other]))
        return;
    readiness(number, other);
    if (chance(70))
        read_to_the_end(number, other);
    /* To nobody: the first is taken and answered by a reset, the next is refused. */
    for (int turn = (int)draw(4); turn > 0; turn--)
        send_bytes(number, other, 1 + draw(100), send_way(&connection->flow[other]), chance(30) ? MSG_NOSIGNAL : 0);
    if (chance(50))
        readiness(number, other);
}

/* Everything of the second process at once. */
static void closefrom_scene(void)
{
    struct call call = {.kind = KIND_CLOSE, .way = BY_CLOSEFROM, .slot = world.pipe_slot[1][0], .rescue_slot = -1};
    if (!world.pair)
        return;
    /* Its pipe has the lowest descriptors of all that the sequence opened there. */
    record(1, &call);
    for (int slot = 0; slot < SLOTS; slot++)
        world.slot_used[1][slot] = false;
    for (int set = 2; set < 4; set++)
        world.set[set].slot = -1;
    for (int number = 0; number < world.connections; number++) {
        struct connection *connection = &world.connection[number];
        struct end *end = &connection->end[1];
        if (!usable(end))
            continue;
        bool over = connection->end[0].finished && end->finished;
        if ((unread(number, 1) > 0 || end->linger_reset) && !over)
            connection->reset = true;
        end->aliases = 0;
        end->finished = true;
        settle_end(number);
        if (usable(&connection->end[0])) {
            readiness(number, 0);
            read_to_the_end(number, 0);
        }
    }
    call = (struct call){.kind = KIND_PIPE, .rescue_slot = -1};
    call.slot = world.pipe_slot[1][0] = slot_take(1);
    call.other = world.pipe_slot[1][1] = slot_take(1);
    world.pipe_bytes[1] = 0;
    make(1, &call);
    make_others(1);
}

/* ---- urgent bytes ---- */

static void urgent_scene(int number, int writer)
{
    struct connection *connection = &world.connection[number];
    struct flow *flow = &connection->flow[writer];
    int reader = 1 - writer;
    bool in_line = chance(40);
    if (!alive(number) || !plain_reader(number, reader) || flow->raw_reader || flow->raw_writer)
        return;
    if (chance(50))
        drain(number, reader);
    set(number, reader, SET_OUT_OF_BAND_INLINE, in_line);
    if (chance(60))
        send_bytes(number, writer, 1 + draw(30), single_send_way(flow), 0);
    send_bytes(number, writer, 1 + draw(3), chance(50) ? BY_SEND : BY_SENDMSG, MSG_OOB);
    flow->urgent_at = flow->sent - 1;
    flow->urgent = !in_line;
    struct call settle = call_on(KIND_SETTLE_URGENT, &connection->end[reader]);
    if (make(connection->end[reader].process, &settle).error)
        trace("c%d.%c: !! NO urgent data\n", number, 'a' + reader);
    ask(number, reader, ASK_AT_MARK);
    ask(number, reader, ASK_UNREAD);
    readiness(number, reader);
    if (chance(60)) {
        receive_bytes(number, reader, 4, BY_RECV, MSG_OOB | MSG_PEEK | MSG_DONTWAIT);
        receive_bytes(number, reader, 4, BY_RECV, MSG_OOB | MSG_DONTWAIT);
        receive_bytes(number, reader, 4, BY_RECV, MSG_OOB | MSG_DONTWAIT);
        readiness(number, reader);
    }
    /* No read goes over the mark; at it, the urgent byte is left out, or is the next if it is inline. */
    for (int turn = 0; turn < 20 && flow->read < flow->urgent_at; turn++) {
        receive_bytes(number, reader, 1 + draw(2 * unread(number, reader)), willing_receive_way(flow), MSG_DONTWAIT);
        ask(number, reader, ASK_AT_MARK);
    }
    /* At the mark FIONREAD says nothing of what comes behind it, so the next read waits for that. */
    struct call tail = send_call(number, writer, 1 + draw(50), single_send_way(flow), 0);
    struct outcome sent = record(connection->end[writer].process, &tail);
    account_sent(number, writer, &sent);
    if (in_line)
        settle_after_send(number, writer, sent.bytes);
    receive_bytes(number, reader, 1 + draw(80), plain_receive_way(flow), 0);
    ask(number, reader, ASK_AT_MARK);
    set(number, reader, SET_OUT_OF_BAND_INLINE, 0);
    readiness(number, reader);
}

/* ---- bytes held back ---- */

static void held_back_scene(int number, int writer)
{
    struct connection *connection = &world.connection[number];
    struct flow *flow = &connection->flow[writer];
    bool cork = chance(40);
    if (!alive(number) || unread(number, 1 - writer) > UNREAD_MAX / 2)
        return;
    int way = flow->raw_writer ? BY_RAW_SENDTO : chance(50) ? BY_SEND : BY_SENDMSG;
    if (cork)
        set(number, writer, SET_CORK, 1);
    for (int turn = 1 + (int)draw(3); turn > 0; turn--)
        send_bytes(number, writer, 1 + draw(200), way, MSG_MORE);
    if (cork)
        set(number, writer, SET_CORK, 0);
    send_bytes(number, writer, 1 + draw(20), way, 0);
    ask(number, 1 - writer, ASK_UNREAD);
}

/* ---- looking ahead ---- */

/* Peeks of growing length, over bytes that came by one way and by the other. */
static void peek_scene(int number, int writer)
{
    struct connection *connection = &world.connection[number];
    struct flow *flow = &connection->flow[writer];
    int reader = 1 - writer;
    if (!alive(number) || flow->raw_reader || unread(number, reader) > UNREAD_MAX / 2)
        return;
    for (int turn = 2 + (int)draw(4); turn > 0; turn--) {
        send_bytes(number, writer, 1 + draw(chance(80) ? 60 : 3000), send_way(flow), 0);
        if (chance(50)) {
            /* A wait that sleeps: what comes next goes by the kernel. */
            struct call wait = call_on(KIND_WAIT, &connection->end[reader]);
            wait.way = BY_POLL + (int)draw(4);
            wait.watched = 1;
            wait.timeout_ms = 1;
            wait.watch[0] = (struct watch){wait.slot, chance(70) ? EPOLLPRI : EPOLLIN};
            record(connection->end[reader].process, &wait);
        }
        if (chance(30))
            receive_bytes(number, reader, 1 + draw(10), willing_receive_way(flow), MSG_DONTWAIT);
    }
    uint32_t all = unread(number, reader), length = 1;
    for (int turn = 0; turn < 6; turn++) {
        int flags = MSG_PEEK | MSG_DONTWAIT | (chance(20) ? MSG_WAITALL : 0) | (chance(10) ? MSG_TRUNC : 0);
        receive_bytes(number, reader, length, chance(70) ? BY_RECV : BY_RECVMSG, flags);
        length += 1 + draw(all / 4 + 4);
    }
    receive_bytes(number, reader, 1 + draw(all + 10), willing_receive_way(flow), MSG_DONTWAIT);
}

/* Question and answer, as most programs talk. */
static void exchange_scene(int number, int writer)
{
    struct connection *connection = &world.connection[number];
    if (!alive(number))
        return;
    for (int turn = 3 + (int)draw(10); turn > 0; turn--, writer = 1 - writer) {
        if (unread(number, 1 - writer) > UNREAD_MAX / 2)
            return;
        send_bytes(number, writer, 1 + draw(40), single_send_way(&connection->flow[writer]), 0);
        uint32_t there = unread(number, 1 - writer);
        receive_bytes(number, 1 - writer, chance(85) ? there + 5 : 1 + draw(there + 1),
                      willing_receive_way(&connection->flow[writer]), MSG_DONTWAIT);
    }
}

static void outstanding_scene(int number, int writer)
{
    struct connection *connection = &world.connection[number];
    struct flow *flow = &connection->flow[writer];
    if (!alive(number) || unread(number, 1 - writer) > UNREAD_MAX / 2)
        return;
    send_bytes(number, writer, 1 + draw(100), send_way(flow), 0);
    /* Acknowledgements are late by 40 ms at most. */
    struct call outstanding = call_on(KIND_ASK, &connection->end[writer]);
    outstanding.way = ASK_OUTSTANDING;
    outstanding.delay_us = 60 * 1000;
    record(connection->end[writer].process, &outstanding);
}

/* ---- full buffers ---- */

static struct call begin_fill(int number, int writer, bool by_timeout)
{
    struct flow *flow = &world.connection[number].flow[writer];
    struct end *from = &world.connection[number].end[writer];
    set(number, writer, SET_SEND_BUFFER, SMALL_SEND_BUFFER);
    if (by_timeout)
        set(number, writer, SET_SEND_TIMEOUT_US, 2000);
    struct call fill = call_on(KIND_FILL, from);
    fill.flags = by_timeout ? 0 : MSG_DONTWAIT;
    fill.length = FILL_CHUNK;
    fill.value = FILL_MAX;
    for (int alias = 0; alias < from->aliases; alias++)
        fill.watch[fill.watched++].slot = from->alias[alias];
    fill.key = flow->key;
    fill.offset = flow->sent;
    announce(&fill, from->process);
    return fill;
}

/* How much fits is not determined, only how it ends. */
static void account_filled(int number, int writer, const struct outcome *outcome)
{
    trace(" ended with %s%s\n", strerrorname_np(outcome->error), outcome->note);
    world.connection[number].flow[writer].sent += (uint64_t)outcome->result;
}

static struct call writable(int number, int writer)
{
    struct call out = call_on(KIND_WAIT, &world.connection[number].end[writer]);
    out.way = BY_POLL;
    out.watched = 1;
    out.watch[0] = (struct watch){out.slot, EPOLLOUT};
    return out;
}

static void empty_filled(int number, int writer, uint64_t filled)
{
    struct flow *flow = &world.connection[number].flow[writer];
    struct end *to = &world.connection[number].end[1 - writer];
    for (int turn = 0; turn < 1 << 16 && flow->read < flow->sent; turn++) {
        uint32_t length = (uint32_t)(flow->sent - flow->read) < 60000 ? (uint32_t)(flow->sent - flow->read) : 60000;
        /* Nothing is drawn here: how many turns it takes is not determined. */
        struct call call = call_on(KIND_RECEIVE, to);
        call.way = BY_RECV;
        call.length = length;
        struct outcome part = make(to->process, &call);
        account_received(number, 1 - writer, &call, &part, true);
        if (part.result <= 0)
            break;
    }
    if (flow->read != flow->sent)
        trace("c%d.%c: !! NOT all bytes were there: %llu of %llu\n", number, 'b' - writer, (unsigned long long)flow->read,
              (unsigned long long)flow->sent);
    flow->filled += filled;
    flow->sent -= filled;
    flow->read -= filled;
}

static void end_fill(int number, int writer, bool by_timeout)
{
    struct end *from = &world.connection[number].end[writer];
    struct call out = writable(number, writer);
    out.timeout_ms = 2000;
    record(from->process, &out);
    if (by_timeout)
        set(number, writer, SET_SEND_TIMEOUT_US, 0);
    set(number, writer, SET_SEND_BUFFER, LARGE_SEND_BUFFER);
    /* The kernel's own word that there is room comes a little after there is. */
    struct call pause = call_on(KIND_ASK, from);
    pause.way = ASK_UNREAD;
    pause.delay_us = 1000;
    make(from->process, &pause);
}

static void fill_scene(int number, int writer)
{
    struct connection *connection = &world.connection[number];
    struct flow *flow = &connection->flow[writer];
    struct end *from = &connection->end[writer];
    bool by_timeout = chance(40) && !from->nonblocking;
    if (!alive(number) || flow->raw_writer || flow->raw_reader || !plain_reader(number, 1 - writer))
        return;
    struct call fill = begin_fill(number, writer, by_timeout);
    struct outcome outcome = make(from->process, &fill);
    account_filled(number, writer, &outcome);
    /* A late acknowledgement may make room meanwhile. */
    struct call out = writable(number, writer);
    make(from->process, &out);
    empty_filled(number, writer, (uint64_t)outcome.result);
    end_fill(number, writer, by_timeout);
}

/* Both ends write until neither direction takes more, at once where there are two processes; then both read. */
static void fill_both_scene(int number, int first)
{
    struct connection *connection = &world.connection[number];
    int second = 1 - first;
    bool by_timeout[2] = {chance(50), chance(50)};
    for (int which = 0; which < 2; which++) {
        const struct flow *flow = &connection->flow[which];
        if (!alive(number) || flow->raw_writer || flow->raw_reader || !plain_reader(number, which))
            return;
    }
    struct call fills[2];
    struct outcome outcomes[2];
    fills[first] = begin_fill(number, first, by_timeout[first]);
    trace(" while\n");
    fills[second] = begin_fill(number, second, by_timeout[second]);
    trace(" is made\n");
    if (world.pair) {
        outcomes[first] = make_while(connection->end[first].process, &fills[first], connection->end[second].process,
                                     &fills[second], &outcomes[second]);
    } else {
        outcomes[first] = make(connection->end[first].process, &fills[first]);
        outcomes[second] = make(connection->end[second].process, &fills[second]);
    }
    for (int which = 0; which < 2; which++)
        account_filled(number, which, &outcomes[which]);
    for (int which = 0; which < 2; which++)
        empty_filled(number, which, (uint64_t)outcomes[which].result);
    for (int which = 0; which < 2; which++)
        end_fill(number, which, by_timeout[which]);
}

/* ---- signals ---- */

static struct call wait_on(int number, int reader, int timeout_ms)
{
    struct call call = call_on(KIND_WAIT, &world.connection[number].end[reader]);
    call.way = BY_POLL + (int)draw(4);
    call.timeout_ms = timeout_ms;
    call.watched = 1;
    call.watch[0] = (struct watch){call.slot, EPOLLIN};
    return call;
}

/* A signal while a call sleeps: the call is ended, or goes on. */
static void signal_scene(int number, int reader)
{
    struct connection *connection = &world.connection[number];
    struct end *end = &connection->end[reader];
    struct flow *flow = &connection->flow[1 - reader];
    if (!alive(number) || !plain_reader(number, reader))
        return;
    if (chance(70))
        drain(number, reader);
    struct call call = receive_call(number, reader, unread(number, reader) + 1 + draw(50), plain_receive_way(flow),
                                    unread(number, reader) ? MSG_WAITALL : 0);
    if (unread(number, reader) > 0 && !flow->raw_reader)
        call.way = BY_RECV;
    call.disturbance = chance(50) ? BY_TIMER : BY_THREAD;
    call.restart = chance(50);
    if (chance(30) && unread(number, reader) == 0) {
        struct call wait = wait_on(number, reader, BLOCKED_MS_MAX);
        wait.disturbance = call.disturbance;
        wait.restart = call.restart;
        record(end->process, &wait);
        return;
    }
    bool limited = call.restart && chance(40);
    if (limited)
        set(number, reader, SET_RECEIVE_TIMEOUT_US, 3000 * 1000);
    if (limited || !call.restart || unread(number, reader) > 0) {
        record(end->process, &call);
    } else {
        uint32_t length = 1 + draw(40);
        struct outcome outcome, sent = {.bytes = length};
        if (world.pair) {
            struct call rescue = send_call(number, 1 - reader, length, single_send_way(flow), 0);
            rescue.delay_us = 7000;
            announce(&call, end->process);
            outcome = make_while(end->process, &call, connection->end[1 - reader].process, &rescue, &sent);
        } else {
            if (flow->raw_writer)
                return;
            call.rescue_slot = connection->end[1 - reader].alias[0];
            call.rescue_length = length;
            call.key = flow->key;
            call.offset = flow->sent;
            announce(&call, end->process);
            outcome = make(end->process, &call);
        }
        account_sent(number, 1 - reader, &sent);
        conclude(&call, end->process, &outcome);
    }
    if (limited)
        set(number, reader, SET_RECEIVE_TIMEOUT_US, 0);
}

/* ---- sleepers, between two processes ---- */

static void blocked_receive(int number, int reader, struct call *meanwhile)
{
    struct connection *connection = &world.connection[number];
    struct flow *flow = &connection->flow[1 - reader];
    struct end *end = &connection->end[reader];
    uint32_t length = chance(50) ? 4096 : 1 + draw(2 * meanwhile->length + 1);
    int flags = 0;
    if (chance(25) && meanwhile->kind == KIND_SEND) {
        flags = MSG_WAITALL;
        length = 1 + draw(meanwhile->length);
    }
    if (chance(15) && meanwhile->kind == KIND_SEND && !flow->raw_reader && !flow->raw_writer) {
        /* More than the lane holds, while it is read: the end of it goes by either way. */
        flags = MSG_WAITALL;
        length = meanwhile->length = LARGE_MIN + draw(LARGE_MAX - LARGE_MIN);
    }
    struct call call = receive_call(number, reader, length, plain_receive_way(flow), flags);
    if (flags && !flow->raw_reader)
        call.way = willing_receive_way(flow);
    struct outcome done;
    announce(&call, end->process);
    struct outcome outcome = make_while(end->process, &call, connection->end[1 - reader].process, meanwhile, &done);
    if (meanwhile->kind == KIND_SEND)
        account_sent(number, 1 - reader, &done);
    conclude(&call, end->process, &outcome);
    if (meanwhile->kind == KIND_SEND)
        settle_after_send(number, 1 - reader, done.bytes);
}

static void blocked_wait(int number, int reader, struct call *meanwhile)
{
    struct connection *connection = &world.connection[number];
    struct end *end = &connection->end[reader];
    bool by_epoll = chance(50);
    struct call set = {.kind = KIND_EPOLL_CREATE, .rescue_slot = -1};
    struct call call = wait_on(number, reader, BLOCKED_MS_MAX);
    if (by_epoll) {
        set.slot = slot_take(end->process);
        make(end->process, &set);
        struct call add = {.kind = KIND_EPOLL_CONTROL, .way = EPOLL_CTL_ADD, .slot = set.slot, .other = end->alias[0],
                           .value = EPOLLIN | (chance(50) ? (uint32_t)EPOLLET : 0) | (chance(30) ? EPOLLONESHOT : 0),
                           .rescue_slot = -1};
        record(end->process, &add);
        call.kind = KIND_EPOLL_WAIT;
        call.way = BY_EPOLL_WAIT + (int)draw(3);
        call.slot = set.slot;
    }
    struct outcome done;
    announce(&call, end->process);
    struct outcome outcome = make_while(end->process, &call, connection->end[1 - reader].process, meanwhile, &done);
    conclude(&call, end->process, &outcome);
    if (meanwhile->kind == KIND_SEND) {
        account_sent(number, 1 - reader, &done);
        settle_after_send(number, 1 - reader, done.bytes);
    }
    if (by_epoll) {
        set.kind = KIND_CLOSE;
        set.way = BY_CLOSE;
        make(end->process, &set);
        slot_free(end->process, set.slot);
    }
}

/* One end sleeps in a call that the other end's next call satisfies. */
static void blocked_scene(int number, int reader)
{
    struct connection *connection = &world.connection[number];
    struct flow *flow = &connection->flow[1 - reader];
    static const uint32_t delays_us[] = {0, 0, 30, 300, 2000};
    if (!world.pair || !alive(number) || !plain_reader(number, reader))
        return;
    drain(number, reader);
    if (unread(number, reader) > 0)
        return;
    bool ends = chance(10);
    struct call meanwhile = send_call(number, 1 - reader, 1 + draw(chance(80) ? 50 : 4000), single_send_way(flow), 0);
    if (ends) {
        meanwhile.kind = KIND_SHUTDOWN;
        meanwhile.way = SHUT_WR;
        meanwhile.length = 0;
    }
    meanwhile.delay_us = delays_us[draw(5)];
    if (chance(60) || ends)
        blocked_receive(number, reader, &meanwhile);
    else
        blocked_wait(number, reader, &meanwhile);
    if (ends) {
        connection->end[1 - reader].finished = true;
        settle_end(number);
    }
}

void scene(void)
{
    int number = (int)draw((unsigned)world.connections), which = (int)draw(2);
    if (!usable(&world.connection[number].end[which]))
        return;
    unsigned at = draw(100);
    if (at < 20)
        exchange_scene(number, which);
    else if (at < 38)
        peek_scene(number, which);
    else if (at < 48)
        world.pair ? blocked_scene(number, which) : exchange_scene(number, which);
    else if (at < 58)
        signal_scene(number, which);
    else if (at < 66)
        urgent_scene(number, which);
    else if (at < 74)
        held_back_scene(number, which);
    else if (at < 75)
        fill_scene(number, which);
    else if (at < 78)
        fill_both_scene(number, which);
    else if (at < 80)
        outstanding_scene(number, which);
    else if (at < 88)
        shut_down(number, which);
    else if (at < 98 || !world.pair)
        close_scene(number, which);
    else
        closefrom_scene();
}
