/* The model of what lies unread where, the trace of a call, and the draw of the next one. */
#define _GNU_SOURCE
#include "oracle.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>

enum { STATE_ESTABLISHED = 1, STATE_FIN_WAIT2 = 5, STATE_CLOSE = 7, STATE_CLOSE_WAIT = 8, SENDS_UNREAD_MAX = 30 };

bool usable(const struct end *end)
{
    return end->aliases > 0;
}

uint32_t unread(int number, int reader)
{
    const struct flow *flow = &world.connection[number].flow[1 - reader];
    return (uint32_t)(flow->sent - flow->read);
}

struct call call_on(enum kind kind, const struct end *end)
{
    return (struct call){.kind = kind, .slot = end->alias[0], .other = -1, .pieces = 1, .rescue_slot = -1,
                         .place = end->place};
}

static int any_alias(const struct end *end)
{
    return end->alias[draw((unsigned)end->aliases)];
}

struct call receive_call(int number, int reader, uint32_t length, int way, int flags)
{
    struct end *end = &world.connection[number].end[reader];
    struct call call = call_on(KIND_RECEIVE, end);
    call.slot = any_alias(end);
    call.way = way;
    call.length = length;
    call.flags = flags;
    call.pieces = 1 + (int)draw(4);
    call.expected = unread(number, reader) < length ? unread(number, reader) : length;
    return call;
}

struct call send_call(int number, int writer, uint32_t length, int way, int flags)
{
    struct connection *connection = &world.connection[number];
    struct call call = call_on(KIND_SEND, &connection->end[writer]);
    call.slot = any_alias(&connection->end[writer]);
    call.way = way;
    call.length = length;
    call.flags = flags;
    call.pieces = 1 + (int)draw(4);
    call.key = connection->flow[writer].key;
    call.offset = connection->flow[writer].sent;
    return call;
}

/* ---- the trace ---- */

static const char *way_name(const struct call *call)
{
    static const char *const ways[] = {
        "recv", "read", "readv", "recvfrom", "recvmsg", "recvmmsg", "preadv2", "__recv_chk", "__read_chk",
        "syscall(recvfrom)", "splice in", "raw read", "raw recvfrom",
        "send", "write", "writev", "sendto", "sendmsg", "sendmmsg", "pwritev2", "syscall(sendto)", "sendfile",
        "splice out", "raw write", "raw sendto",
        "poll", "ppoll", "select", "pselect", "epoll_wait", "epoll_pwait", "epoll_pwait2"};
    static const char *const settings[] = {"fcntl O_NONBLOCK", "ioctl FIONBIO", "SO_RCVTIMEO", "SO_SNDTIMEO",
                                           "SO_RCVLOWAT", "TCP_NODELAY", "TCP_CORK", "SO_LINGER 0", "SO_OOBINLINE",
                                           "SO_SNDBUF", "SO_KEEPALIVE"};
    static const char *const questions[] = {"FIONREAD", "SIOCOUTQ", "SO_ERROR", "TCP_INFO", "getpeername",
                                            "getsockname", "F_GETFL", "SO_RCVLOWAT?", "SIOCATMARK", "SO_TYPE",
                                            "SO_RCVTIMEO?", "F_GETFD"};
    static const char *const duplications[] = {"dup", "dup2", "dup3", "F_DUPFD", "F_DUPFD_CLOEXEC"};
    static const char *const closings[] = {"close", "close_range", "closefrom", "dup2 over"};
    static const char *const inheritances[] = {"in another program by exec", "in another program by vfork",
                                               "in another program by spawn", "in a child by fork",
                                               "in another program by message"};
    static const char *const raised[] = {"raise the eventfd", "raise the timerfd", "raise the listener"};
    static const char *const cleared[] = {"clear the eventfd", "clear the timerfd", "clear the listener"};
    static const char *const controls[] = {"", "EPOLL_CTL_ADD", "EPOLL_CTL_DEL", "EPOLL_CTL_MOD"};
    switch (call->kind) {
    case KIND_SET: return settings[call->way];
    case KIND_ASK: return questions[call->way];
    case KIND_DUPLICATE: return duplications[call->way];
    case KIND_CLOSE: return closings[call->way];
    case KIND_EPOLL_CONTROL: return controls[call->way];
    case KIND_EPOLL_CREATE: return "epoll_create";
    case KIND_SHUTDOWN: return call->way == SHUT_RD ? "shutdown RD" : call->way == SHUT_WR ? "shutdown WR" : "shutdown RDWR";
    case KIND_FILL: return "send until full";
    case KIND_INHERIT: return inheritances[call->way];
    case KIND_OTHER_RAISE: return raised[call->way];
    case KIND_OTHER_CLEAR: return cleared[call->way];
    default: return ways[call->way];
    }
}

static void describe_flags(char *text, size_t room, int flags)
{
    static const struct {
        int bit;
        const char *name;
    } names[] = {{MSG_PEEK, "PEEK"}, {MSG_DONTWAIT, "DONTWAIT"}, {MSG_WAITALL, "WAITALL"}, {MSG_TRUNC, "TRUNC"},
                 {MSG_MORE, "MORE"}, {MSG_NOSIGNAL, "NOSIGNAL"}, {MSG_OOB, "OOB"}, {MSG_WAITFORONE, "WAITFORONE"}};
    size_t used = 0;
    text[0] = 0;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (flags & names[i].bit)
            used += (size_t)snprintf(text + used, room - used, "%s%s", used ? "|" : " ", names[i].name);
}

/* Whose a descriptor is. */
static bool owner_of(int process, int slot, int *number, int *which)
{
    for (int c = 0; c < world.connections; c++)
        for (int e = 0; e < 2; e++)
            for (int a = 0; a < world.connection[c].end[e].aliases; a++)
                if (world.connection[c].end[e].process == process && world.connection[c].end[e].alias[a] == slot) {
                    *number = c;
                    *which = e;
                    return true;
                }
    return false;
}

static void describe_arguments(char *text, size_t room, const struct call *call)
{
    char flags[100], events[120];
    size_t used = 0;
    switch (call->kind) {
    case KIND_RECEIVE:
    case KIND_SEND:
        describe_flags(flags, sizeof flags, call->flags);
        used = (size_t)snprintf(text, room, " %u%s", call->length, flags);
        if (call->pieces > 1)
            used += (size_t)snprintf(text + used, room - used, " in %d", call->pieces);
        break;
    case KIND_EPOLL_CONTROL:
        describe_events(events, sizeof events, (uint32_t)call->value);
        used = (size_t)snprintf(text, room, " s%d %s", call->other, call->way == EPOLL_CTL_DEL ? "" : events);
        break;
    case KIND_WAIT:
        for (int i = 0; i < call->watched; i++) {
            describe_events(events, sizeof events, call->watch[i].events);
            used += (size_t)snprintf(text + used, room - used, " s%d:%s", call->watch[i].slot, events);
        }
        /* fall through */
    case KIND_EPOLL_WAIT:
        used += (size_t)snprintf(text + used, room - used, " %d ms", call->timeout_ms);
        break;
    case KIND_SET:
        used = (size_t)snprintf(text, room, " %ld", (long)call->value);
        break;
    case KIND_CLOSE:
        used = call->way == BY_DUP2_OVER && call->other >= 0 ? (size_t)snprintf(text, room, " by s%d", call->other) : 0;
        text[used] = 0;
        break;
    case KIND_DUPLICATE:
        used = (size_t)snprintf(text, room, " to s%d", call->other);
        break;
    case KIND_INHERIT:
        used = (size_t)snprintf(text, room, " question %d, receive %u, send %u%s%s", call->other, call->length, call->expected,
                                call->value ? ", closed by exec" : "", call->handed ? ", handed over" : "");
        break;
    default:
        text[0] = 0;
    }
    static const char *const guises[] = {"", ", in a thread", ", in a fork"};
    static const char *const disturbances[] = {"", ", a timer disturbs", ", a thread disturbs"};
    snprintf(text + used, room - used, "%s%s%s", guises[call->guise], disturbances[call->disturbance],
             call->disturbance != UNDISTURBED && call->restart ? ", SA_RESTART" : "");
}

/* Written before the call is made, so that the trace of one that hangs ends with it. */
void announce(const struct call *call, int process)
{
    char arguments[1200];
    int number, which;
    describe_arguments(arguments, sizeof arguments, call);
    if (call->kind == KIND_WAIT || !owner_of(process, call->slot, &number, &which))
        trace("%d process %d s%d: %s%s", world.step, process, call->slot, way_name(call), arguments);
    else
        trace("%d c%d.%c s%d: %s%s", world.step, number, 'a' + which, call->slot, way_name(call), arguments);
}

static uint32_t hash(const unsigned char *bytes, uint32_t length)
{
    uint32_t value = 2166136261u;
    for (uint32_t i = 0; i < length; i++)
        value = (value ^ bytes[i]) * 16777619u;
    return value;
}

void conclude(const struct call *call, int process, const struct outcome *outcome)
{
    int number, which;
    if (outcome->result < 0)
        trace(" = %ld %s%s", outcome->result, strerrorname_np(outcome->error), outcome->note);
    else
        trace(" = %ld%s", outcome->result, outcome->note);
    if (outcome->broken_pipes)
        trace(" SIGPIPE*%d", outcome->broken_pipes);
    if (outcome->disturbed)
        trace(" disturbed");
    bool receives = call->kind == KIND_RECEIVE || call->kind == KIND_INHERIT;
    if (receives && outcome->bytes > 0 && !(call->flags & MSG_TRUNC))
        trace(" hash %08x", hash(data_of(process), outcome->bytes));
    if (receives && owner_of(process, call->slot, &number, &which))
        account_received(number, which, call, outcome, false);
    trace("\n");
    /* What follows would be waits for what does not come. */
    if (outcome->wrong)
        finish();
}

struct outcome record(int process, struct call *call)
{
    call->recorded = true;
    announce(call, process);
    struct outcome outcome = make(process, call);
    conclude(call, process, &outcome);
    return outcome;
}

/* ---- the model ---- */

void account_received(int number, int reader, const struct call *call, const struct outcome *outcome, bool quiet)
{
    struct connection *connection = &world.connection[number];
    struct flow *flow = &connection->flow[1 - reader];
    const unsigned char *data = data_of(connection->end[reader].process);
    uint64_t from = flow->read;
    if (call->flags & MSG_OOB || outcome->bytes == 0)
        return;
    /* Who reads past the mark has left the urgent byte out. */
    bool passed = flow->urgent && from == flow->urgent_at;
    if (passed)
        from++;
    for (uint32_t i = 0; i < outcome->bytes && !(call->flags & MSG_TRUNC); i++)
        if (data[i] != payload_byte(flow->key, from + i)) {
            trace("%s !! WRONG at byte %u of this call, %llu of the stream: %02x, sent was %02x%s", quiet ? "warming up:" : "",
                  i, (unsigned long long)(from + i), data[i], payload_byte(flow->key, from + i), quiet ? "\n" : "");
            break;
        }
    if (call->flags & MSG_PEEK)
        return;
    if (passed)
        flow->urgent = false;
    flow->read = from + outcome->bytes;
    if (flow->read >= flow->sent)
        flow->sends_unread = 0;
}

void account_sent(int number, int writer, const struct outcome *outcome)
{
    struct flow *flow = &world.connection[number].flow[writer];
    flow->sent += outcome->bytes;
    flow->sends_unread += 4;
}

static void settle_state(int number, int which, int states)
{
    struct end *end = &world.connection[number].end[which];
    if (!usable(end))
        return;
    struct call call = call_on(KIND_SETTLE_STATE, end);
    call.value = states;
    struct outcome outcome = make(end->process, &call);
    if (outcome.error)
        trace("c%d.%c: !! NOT in the states %x but in %ld\n", number, 'a' + which, states, outcome.result);
}

void settle_after_send(int number, int writer, uint32_t bytes)
{
    struct connection *connection = &world.connection[number];
    struct end *reader = &connection->end[1 - writer];
    if (connection->reset)
        return;
    if (!usable(reader) || (reader->finished && reader->shut_for_reading)) {
        /* Nobody is there: TCP drops the bytes and answers with a reset. */
        connection->reset = true;
        connection->flow[writer].sent -= bytes;
        settle_end(number);
        return;
    }
    struct call call = call_on(KIND_SETTLE_BYTES, reader);
    call.expected = unread(number, 1 - writer);
    call.flags = connection->flow[writer].raw_reader;
    struct outcome outcome = make(reader->process, &call);
    if (outcome.error)
        trace("c%d.%c: !! NOT there: %u bytes, but %ld\n", number, 'b' - writer, call.expected, outcome.result);
}

/* After an end was shut down, closed or reset: waits until both know. */
void settle_end(int number)
{
    struct connection *connection = &world.connection[number];
    bool finished[2] = {connection->end[0].finished, connection->end[1].finished};
    for (int which = 0; which < 2; which++)
        if (connection->reset || (finished[0] && finished[1]))
            settle_state(number, which, 1 << STATE_CLOSE);
        else if (finished[which])
            settle_state(number, which, 1 << STATE_FIN_WAIT2);
        else if (finished[1 - which])
            settle_state(number, which, 1 << STATE_CLOSE_WAIT);
}

struct outcome send_bytes(int number, int writer, uint32_t length, int way, int flags)
{
    struct end *end = &world.connection[number].end[writer];
    struct call call = send_call(number, writer, length, way, flags);
    struct outcome outcome = record(end->process, &call);
    account_sent(number, writer, &outcome);
    if (outcome.bytes > 0 && !(flags & (MSG_MORE | MSG_OOB)))
        settle_after_send(number, writer, outcome.bytes);
    return outcome;
}

struct outcome receive_bytes(int number, int reader, uint32_t length, int way, int flags)
{
    struct end *end = &world.connection[number].end[reader];
    struct call call = receive_call(number, reader, length, way, flags);
    return record(end->process, &call);
}

/* Whether this receive would sleep until somebody sends. */
bool would_wait(int number, int reader, uint32_t length, int flags)
{
    const struct connection *connection = &world.connection[number];
    const struct end *end = &connection->end[reader];
    uint32_t target = flags & MSG_WAITALL ? length : (uint32_t)end->low_water < length ? (uint32_t)end->low_water : length;
    return !connection->reset && !connection->end[1 - reader].finished && !end->shut_for_reading && !end->nonblocking &&
           !(flags & MSG_DONTWAIT) && unread(number, reader) < (target ? target : 1);
}

void ask(int number, int which, enum question question)
{
    struct end *end = &world.connection[number].end[which];
    struct call call = call_on(KIND_ASK, end);
    call.slot = any_alias(end);
    call.way = question;
    record(end->process, &call);
}

void set(int number, int which, enum setting setting, int value)
{
    struct end *end = &world.connection[number].end[which];
    struct call call = call_on(KIND_SET, end);
    call.slot = any_alias(end);
    call.way = setting;
    call.value = value;
    record(end->process, &call);
}

void readiness(int number, int which)
{
    struct end *end = &world.connection[number].end[which];
    struct call call = call_on(KIND_WAIT, end);
    call.way = BY_POLL;
    call.watched = 1;
    call.watch[0] = (struct watch){any_alias(end), EPOLLIN | EPOLLOUT | EPOLLPRI | EPOLLRDHUP};
    record(end->process, &call);
}

/* ---- what comes next ---- */

int receive_way(const struct flow *flow)
{
    return flow->raw_reader ? BY_RAW_READ + (int)draw(2) : BY_RECV + (int)draw(BY_SPLICE_IN - BY_RECV + 1);
}

int send_way(const struct flow *flow)
{
    return flow->raw_writer ? BY_RAW_WRITE + (int)draw(2) : BY_SEND + (int)draw(BY_SPLICE_OUT - BY_SEND + 1);
}

static bool takes_flags(int way)
{
    return way != BY_READ && way != BY_READV && way != BY_PREADV2 && way != BY_READ_CHK && way != BY_RAW_READ;
}

static bool any_end(int *number, int *which)
{
    for (int attempt = 0; attempt < 8; attempt++) {
        *number = (int)draw((unsigned)world.connections);
        *which = (int)draw(2);
        if (usable(&world.connection[*number].end[*which]))
            return true;
    }
    return false;
}

static enum guise any_guise(void)
{
    return chance(2) ? IN_A_FORK : chance(3) ? IN_A_THREAD : IN_PLACE;
}

static uint32_t any_length(uint32_t unread)
{
    switch (draw(9)) {
    case 0: return chance(30) ? 0 : 1;
    case 1: return unread;
    case 2: return unread + 1;
    case 3: return unread > 1 ? unread - 1 : 1;
    case 4: return 1 + draw(8);
    case 5: return 4096;
    case 6: return 1 + draw(UNREAD_MAX);
    default: return 1 + draw(unread + 20);
    }
}

static void step_receive(void)
{
    int number, reader, flags = 0;
    if (!any_end(&number, &reader))
        return;
    const struct flow *flow = &world.connection[number].flow[1 - reader];
    uint32_t length = any_length(unread(number, reader));
    int way = receive_way(flow);
    if (takes_flags(way) && way != BY_SPLICE_IN)
        flags = (chance(30) ? MSG_PEEK : 0) | (chance(25) ? MSG_DONTWAIT : 0) | (chance(20) ? MSG_WAITALL : 0) |
                (chance(4) ? MSG_TRUNC : 0) | (chance(5) ? MSG_NOSIGNAL : 0);
    if (way == BY_RECVMMSG)
        /* One of several messages waits unless told otherwise; and a peek would show each the same bytes. */
        flags = (flags & ~(MSG_PEEK | MSG_WAITALL)) | (chance(50) ? MSG_WAITFORONE : MSG_DONTWAIT);
    if (would_wait(number, reader, length, flags) &&
        !(world.connection[number].end[reader].receive_timeout && chance(40))) {
        /* A splice waits on a blocking socket, whatever its own flag says. */
        if (!takes_flags(way) || way == BY_SPLICE_IN)
            way = flow->raw_reader ? BY_RAW_RECVFROM : BY_RECV;
        flags |= MSG_DONTWAIT;
    }
    struct call call = receive_call(number, reader, length, way, flags);
    call.guise = any_guise();
    call.value = draw(2);
    record(world.connection[number].end[reader].process, &call);
}

static void step_send(void)
{
    int number, writer, flags = 0;
    if (!any_end(&number, &writer))
        return;
    struct connection *connection = &world.connection[number];
    struct flow *flow = &connection->flow[writer];
    static const uint32_t most[] = {2, 16, 16, 64, 300, 300, 4000, 12000};
    uint32_t length = chance(2) ? 0 : 1 + draw(most[draw(8)]);
    int way = send_way(flow);
    if (unread(number, 1 - writer) + length > UNREAD_MAX || flow->sends_unread > 4 * SENDS_UNREAD_MAX) {
        if (usable(&connection->end[1 - writer]))
            receive_bytes(number, 1 - writer, UNREAD_MAX, flow->raw_reader ? BY_RAW_RECVFROM : BY_RECV, MSG_DONTWAIT);
        return;
    }
    if (way != BY_WRITE && way != BY_WRITEV && way != BY_RAW_WRITE)
        flags = (chance(20) ? MSG_NOSIGNAL : 0) | (chance(20) ? MSG_DONTWAIT : 0);
    struct call call = send_call(number, writer, length, way, flags);
    call.guise = any_guise();
    call.value = draw(2);
    struct outcome outcome = record(connection->end[writer].process, &call);
    account_sent(number, writer, &outcome);
    if (outcome.bytes > 0)
        settle_after_send(number, writer, outcome.bytes);
}

static void step_wait(void)
{
    static const uint32_t interests[] = {EPOLLIN, EPOLLIN | EPOLLRDHUP, EPOLLIN | EPOLLPRI, EPOLLIN | EPOLLOUT, EPOLLOUT, 0};
    int process = world.pair ? (int)draw(2) : 0;
    struct call call = {.kind = KIND_WAIT, .way = BY_POLL + (int)draw(4), .rescue_slot = -1};
    call.timeout_ms = chance(70) ? 0 : chance(75) ? 1 : 5;
    bool for_input_only = chance(60);
    for (int number = 0; number < world.connections; number++)
        for (int which = 0; which < 2; which++) {
            const struct end *end = &world.connection[number].end[which];
            if (end->process == process && usable(end) && chance(70))
                call.watch[call.watched++] =
                    (struct watch){any_alias(end), for_input_only ? EPOLLIN : interests[draw(6)]};
        }
    if (chance(30))
        call.watch[call.watched++] = (struct watch){world.pipe_slot[process][0], EPOLLIN};
    if (chance(10))
        call.watch[call.watched++] = (struct watch){world.pipe_slot[process][1], EPOLLOUT};
    for (int kind = 0; kind < OTHERS && call.watched < WATCHED_MAX - 1; kind++)
        if (chance(15))
            call.watch[call.watched++] = (struct watch){world.other_slot[process][kind], EPOLLIN};
    struct epoll_set *inner = &world.set[world.pair ? process * 2 : 0];
    if (inner->slot >= 0 && chance(20))
        call.watch[call.watched++] = (struct watch){inner->slot, EPOLLIN};
    record(process, &call);
}

/* A set that is polled itself, or in another one, is ready whenever an edge-triggered member is told once more that it can be
 * written to, which nobody is promised: in those, nobody asks. */
static uint32_t any_interest(const struct epoll_set *set)
{
    uint32_t interest = EPOLLIN | (chance(15) ? EPOLLOUT : 0) | (chance(40) ? (uint32_t)EPOLLET : 0) |
                        (chance(15) ? EPOLLONESHOT : 0) | (chance(30) ? EPOLLRDHUP : 0) | (chance(10) ? EPOLLPRI : 0);
    bool watched = (set - world.set) % 2 == 0;
    return watched && interest & EPOLLET ? interest & ~(uint32_t)EPOLLOUT : interest;
}

/* Beside connections, those that only the kernel knows. */
static void add_other(struct epoll_set *set, int kind)
{
    struct call call = {.kind = KIND_EPOLL_CONTROL, .slot = set->slot, .rescue_slot = -1};
    call.way = chance(70) ? EPOLL_CTL_ADD : chance(50) ? EPOLL_CTL_MOD : EPOLL_CTL_DEL;
    call.other = world.other_slot[set->process][kind];
    call.value = EPOLLIN | (chance(40) ? (uint32_t)EPOLLET : 0) | (chance(15) ? EPOLLONESHOT : 0);
    record(set->process, &call);
}

static void begin_epoll(struct epoll_set *set)
{
    struct call call = {.kind = KIND_EPOLL_CREATE, .slot = slot_take(set->process), .flags = (int)draw(2), .rescue_slot = -1};
    set->slot = call.slot;
    record(set->process, &call);
    call.kind = KIND_EPOLL_CONTROL;
    call.way = EPOLL_CTL_ADD;
    for (int number = 0; number < world.connections; number++)
        for (int which = 0; which < 2; which++) {
            const struct end *end = &world.connection[number].end[which];
            if (end->process != set->process || !usable(end) || chance(35))
                continue;
            call.other = any_alias(end);
            call.value = any_interest(set);
            record(set->process, &call);
        }
    for (int kind = 0; kind < OTHERS; kind++)
        if (chance(40))
            add_other(set, kind);
}

/* The descriptors of a process that are no connections: one becomes readable, or is not any more. */
static void step_other(void)
{
    int process = world.pair ? (int)draw(2) : 0, kind = (int)draw(OTHERS);
    bool *raised = &world.other_raised[process][kind];
    struct call call = {.kind = *raised ? KIND_OTHER_CLEAR : KIND_OTHER_RAISE, .way = kind, .rescue_slot = -1};
    call.slot = world.other_slot[process][kind];
    record(process, &call);
    *raised = !*raised;
}

static void change_epoll(int index)
{
    struct epoll_set *set = &world.set[index];
    struct call call = {.kind = KIND_EPOLL_CONTROL, .slot = set->slot, .value = any_interest(set), .rescue_slot = -1};
    int number, which;
    if (chance(30)) {
        add_other(set, (int)draw(OTHERS));
        return;
    }
    call.way = chance(40) ? EPOLL_CTL_ADD : chance(80) ? EPOLL_CTL_MOD : EPOLL_CTL_DEL;
    if (call.way == EPOLL_CTL_ADD && chance(15))
        call.value = EPOLLIN | (int64_t)EPOLLEXCLUSIVE | (chance(30) ? (uint32_t)EPOLLET : 0);
    if (chance(20)) {
        /* Only one of two may be in the other, or the kernel refuses a loop. */
        int inner = index - index % 2, outer = inner + 1;
        if (world.set[inner].slot < 0 || world.set[outer].slot < 0)
            return;
        call.slot = world.set[outer].slot;
        call.other = world.set[inner].slot;
        /* By level: with whatever comes to any of its members, the kernel tells an edge of the whole set once more. */
        call.value = EPOLLIN;
    } else {
        if (!any_end(&number, &which) || world.connection[number].end[which].process != set->process)
            return;
        call.other = any_alias(&world.connection[number].end[which]);
    }
    record(set->process, &call);
}

static void step_epoll(void)
{
    int index = (int)draw(world.pair ? 4 : 2);
    struct epoll_set *set = &world.set[index];
    if (set->slot < 0) {
        begin_epoll(set);
    } else if (chance(30)) {
        change_epoll(index);
    } else {
        struct call call = {.kind = KIND_EPOLL_WAIT, .way = BY_EPOLL_WAIT + (int)draw(3), .slot = set->slot, .rescue_slot = -1};
        call.timeout_ms = chance(75) ? 0 : chance(80) ? 1 : 5;
        record(set->process, &call);
    }
}

static void step_option(void)
{
    int number, which;
    if (!any_end(&number, &which))
        return;
    struct end *end = &world.connection[number].end[which];
    static const int low_waters[] = {1, 1, 2, 10, 100, 3000};
    switch (draw(4)) {
    case 0:
        end->nonblocking = !end->nonblocking;
        set(number, which, chance(50) ? SET_NONBLOCK_FCNTL : SET_NONBLOCK_IOCTL, end->nonblocking);
        break;
    case 1:
        end->receive_timeout = !end->receive_timeout;
        set(number, which, SET_RECEIVE_TIMEOUT_US, end->receive_timeout ? 2000 : 0);
        break;
    case 2:
        /* With bytes there the kernel would tell edge-triggered watchers again, which nobody is promised. */
        if (unread(number, which) > 0)
            return;
        end->low_water = low_waters[draw(6)];
        set(number, which, SET_LOW_WATER, end->low_water);
        break;
    default:
        set(number, which, SET_KEEPALIVE, (int)draw(2));
    }
}

static void step_ask(void)
{
    static const enum question questions[] = {ASK_UNREAD, ASK_UNREAD, ASK_UNREAD, ASK_UNREAD, ASK_ERROR, ASK_STATE,
                                              ASK_PEER_NAME, ASK_OWN_NAME, ASK_FLAGS, ASK_LOW_WATER, ASK_AT_MARK,
                                              ASK_TYPE, ASK_RECEIVE_TIMEOUT, ASK_DESCRIPTOR_FLAGS};
    int number, which;
    if (any_end(&number, &which))
        ask(number, which, questions[draw(sizeof questions / sizeof questions[0])]);
}

/* A descriptor of another end in the same process, if there is one: what a descriptor is replaced by. */
int other_socket(int number, int which)
{
    const struct end *end = &world.connection[number].end[which];
    int other_number, other_which;
    if (chance(40) || !any_end(&other_number, &other_which))
        return -1;
    const struct end *other = &world.connection[other_number].end[other_which];
    return other == end || other->process != end->process ? -1 : any_alias(other);
}

static void step_descriptor(void)
{
    int number, which;
    if (!any_end(&number, &which))
        return;
    struct end *end = &world.connection[number].end[which];
    if (end->aliases < ALIASES_MAX && chance(60)) {
        struct call call = call_on(KIND_DUPLICATE, end);
        call.slot = any_alias(end);
        call.way = (int)draw(5);
        call.other = slot_take(end->process);
        record(end->process, &call);
        end->alias[end->aliases++] = call.other;
    } else if (end->aliases > 1) {
        struct call call = call_on(KIND_CLOSE, end);
        static const int ways[] = {BY_CLOSE, BY_CLOSE, BY_CLOSE_RANGE, BY_DUP2_OVER};
        int gone = (int)draw((unsigned)end->aliases);
        call.way = ways[draw(4)];
        call.slot = end->alias[gone];
        call.other = other_socket(number, which);
        record(end->process, &call);
        end->alias[gone] = end->alias[--end->aliases];
        slot_free(end->process, call.slot);
    }
}

static bool has_sets(int process)
{
    bool any = false;
    for (size_t i = 0; i < sizeof world.set / sizeof world.set[0]; i++)
        any |= world.set[i].slot >= 0 && world.set[i].process == process;
    return any;
}

/* Another process has the connection for a while, beside this one or in its place. */
static void step_inherit(void)
{
    int number, which;
    if (!any_end(&number, &which))
        return;
    struct connection *connection = &world.connection[number];
    struct flow *in = &connection->flow[1 - which], *out = &connection->flow[which];
    if (in->raw_reader || out->raw_writer || in->urgent)
        return;
    struct call call = call_on(KIND_INHERIT, &connection->end[which]);
    call.slot = any_alias(&connection->end[which]);
    call.way = chance(10) ? INHERIT_MESSAGE : (int)draw(INHERIT_MESSAGE);
    call.other = (int)draw(FIRST_QUESTIONS);
    call.flags = MSG_DONTWAIT;
    call.value = draw(2);
    /* A set goes on watching what is closed here and open elsewhere. */
    call.handed = connection->end[which].aliases == 1 && !has_sets(connection->end[which].process) && chance(50);
    /* One that is passed on is plain from then on: what its lane has is read there, as the close of it takes for granted. */
    call.length = call.way == INHERIT_MESSAGE && !call.handed ? UNREAD_MAX : chance(80) ? any_length(unread(number, which)) : 0;
    bool has_room = unread(number, 1 - which) < UNREAD_MAX / 2 && out->sends_unread < 3 * SENDS_UNREAD_MAX;
    call.expected = has_room && chance(60) ? 1 + draw(chance(70) ? 60 : 3000) : 0;
    call.key = out->key;
    call.offset = out->sent;
    struct outcome outcome = record(connection->end[which].process, &call);
    outcome.bytes = outcome.sent > 0 ? (uint32_t)outcome.sent : 0;
    account_sent(number, which, &outcome);
    if (outcome.bytes > 0)
        settle_after_send(number, which, outcome.bytes);
}

static void step_pipe(void)
{
    int process = world.pair ? (int)draw(2) : 0;
    struct call call = {.length = 1, .pieces = 1, .rescue_slot = -1};
    if (world.pipe_bytes[process]) {
        call.kind = KIND_RECEIVE;
        call.way = BY_READ;
        call.slot = world.pipe_slot[process][0];
    } else {
        call.kind = KIND_SEND;
        call.way = BY_WRITE;
        call.slot = world.pipe_slot[process][1];
    }
    world.pipe_bytes[process] = !world.pipe_bytes[process];
    make(process, &call);
}

static void step_ready(void)
{
    int number, which;
    if (any_end(&number, &which))
        readiness(number, which);
}

static void step_renew(void)
{
    int number = (int)draw((unsigned)world.connections);
    const struct connection *connection = &world.connection[number];
    if (!usable(&connection->end[0]) || !usable(&connection->end[1]) || connection->reset)
        renew(number);
}

void sequence(int steps)
{
    static const struct {
        void (*step)(void);
        unsigned weight;
    } kinds[] = {{step_receive, 30}, {step_send, 30}, {step_wait, 12}, {step_epoll, 14}, {step_option, 3}, {step_ask, 5},
                 {step_descriptor, 3}, {step_pipe, 2}, {step_other, 5}, {step_ready, 6}, {scene, 8}, {step_renew, 2},
                 {step_inherit, 2}};
    enum { KINDS = sizeof kinds / sizeof kinds[0] };
    unsigned weight[KINDS], all = 0;
    /* Each seed leaves some kinds out and prefers others: what is rare together on average is then common somewhere. */
    for (int i = 0; i < KINDS; i++) {
        weight[i] = kinds[i].weight * (i < 2 ? 2 : draw(4));
        all += weight[i];
    }
    for (world.step = 1; world.step <= steps; world.step++) {
        unsigned at = draw(all);
        int chosen = 0;
        while (at >= weight[chosen])
            at -= weight[chosen++];
        kinds[chosen].step();
    }
}
