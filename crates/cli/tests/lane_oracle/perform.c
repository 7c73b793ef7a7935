/* One call of libc, made in the process that has the descriptor; by that process, a thread or a forked child of it. */
#define _GNU_SOURCE
#include "oracle.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "raw.h"

/* What fortified programs import in place of read and recv. */
extern ssize_t __read_chk(int, void *, size_t, size_t);
extern ssize_t __recv_chk(int, void *, size_t, size_t, int);

enum { CANARY = 0xA5, CANARY_LENGTH = 64, SETTLE_US_MAX = 2 * 1000 * 1000, PIECES_MAX = 8, FILE_PAGES = 1024 };

static int descriptors[SLOTS];
static unsigned char payload[DATA_MAX];
static int file = -1;         /* what sendfile sends */
static unsigned *file_pages;  /* how many were used, shared with forked children */
static int through[2];        /* the pipe that splice goes through */
static volatile sig_atomic_t broken_pipes;
static volatile sig_atomic_t ticks;
static const struct call *volatile disturbed_call;
static volatile bool stop_disturbing;

static void count_broken_pipe(int signal)
{
    (void)signal;
    broken_pipes++;
}

static void tick(int signal)
{
    (void)signal;
    int saved = errno;
    const struct call *call = disturbed_call;
    ticks++;
    /* By the third signal the call has been restarted twice, if it is one that restarts; now it gets its bytes. */
    if (call && ticks == 3 && call->rescue_slot >= 0)
        (void)!send(descriptors[call->rescue_slot], payload, call->rescue_length, MSG_NOSIGNAL);
    errno = saved;
}

void performer_begin(void)
{
    struct sigaction action = {.sa_handler = count_broken_pipe};
    sigaction(SIGPIPE, &action, NULL);
    for (int slot = 0; slot < SLOTS; slot++)
        descriptors[slot] = -1;
    char name[] = "/tmp/lane-oracle-XXXXXX";
    file = mkstemp(name);
    unlink(name);
    file_pages = mmap(NULL, sizeof *file_pages, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (file < 0 || file_pages == MAP_FAILED || pipe(through) != 0) {
        perror("the oracle's file and pipe");
        exit(2);
    }
}

int descriptor_of(int slot)
{
    return slot < 0 ? -1 : descriptors[slot];
}

void remember_descriptor(int slot, int descriptor)
{
    descriptors[slot] = descriptor;
}

/* Of a pipe: what a descriptor becomes when it is replaced. */
int any_other_descriptor(void)
{
    return through[0];
}

unsigned char payload_byte(uint64_t key, uint64_t offset)
{
    uint64_t x = key + offset * 0x9E3779B97F4A7C15u;
    x ^= x >> 29;
    x *= 0xBF58476D1CE4E5B9u;
    return (unsigned char)(x >> 56);
}

void note(struct outcome *outcome, const char *format, ...)
{
    size_t used = strlen(outcome->note);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(outcome->note + used, sizeof outcome->note - used, format, arguments);
    va_end(arguments);
}

uint64_t now_us(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000 + (uint64_t)time.tv_nsec / 1000;
}

static int fault_wanted, fault_opportunities;
static bool fault_armed;

void set_fault(int which)
{
    fault_wanted = which;
}

/* Whether to do this wrong, on purpose: once in a run, at the third opportunity. */
bool fault(int which)
{
    return which == fault_wanted && fault_armed && ++fault_opportunities == 3;
}

bool fault_applied(void)
{
    return fault_opportunities >= 3;
}

static cpu_set_t allowed;
static int places[2] = {-1, -1}; /* two CPUs */

/* Which CPUs there are; before any of them is chosen. */
void find_places(void)
{
    int found = 0;
    raw3(SYS_sched_getaffinity, 0, sizeof allowed, (long)&allowed);
    for (int cpu = 0; cpu < CPU_SETSIZE && found < 2; cpu++)
        if (CPU_ISSET(cpu, &allowed))
            places[found++] = cpu;
}

bool two_places(void)
{
    return places[1] >= 0;
}

/* Goes to the CPU of an end: ends on one CPU have nothing to gain from a lane, so one thread plays both by moving. */
static void go_to(int place)
{
    static int now = ANYWHERE;
    cpu_set_t one;
    if (place == 0 || place == now)
        return;
    CPU_ZERO(&one);
    if (place != ANYWHERE)
        CPU_SET(places[place - 1], &one);
    raw3(SYS_sched_setaffinity, 0, sizeof one, (long)(place == ANYWHERE ? &allowed : &one));
    now = place;
}

static void pause_us(uint32_t us)
{
    struct timespec time = {us / 1000000, (long)(us % 1000000) * 1000};
    raw3(SYS_nanosleep, (long)&time, 0, 0);
}

static void fill_payload(const struct call *call)
{
    for (uint32_t i = 0; i < call->length; i++)
        payload[i] = payload_byte(call->key, call->offset + i);
}

/* Cuts bytes into pieces of unlike lengths, none of them empty unless there are too few bytes. */
static int cut(struct iovec *pieces, unsigned char *bytes, uint32_t length, int wanted)
{
    uint32_t at = 0;
    for (int i = 0; i < wanted; i++) {
        uint32_t rest = length - at;
        uint32_t this = i == wanted - 1 ? rest : rest / (uint32_t)(wanted - i) / (i % 2 ? 2 : 1);
        pieces[i] = (struct iovec){bytes + at, this};
        at += this;
    }
    return wanted;
}

static long from_kernel(long result)
{
    if (result >= 0)
        return result;
    errno = (int)-result;
    return -1;
}

static long receive_message(int descriptor, const struct call *call, struct outcome *outcome)
{
    struct iovec pieces[PIECES_MAX];
    struct sockaddr_storage name;
    struct msghdr message = {.msg_name = &name, .msg_namelen = sizeof name, .msg_iov = pieces};
    message.msg_iovlen = (size_t)cut(pieces, mailbox->data, call->length, call->pieces);
    long result = recvmsg(descriptor, &message, call->flags);
    int error = errno;
    if (result >= 0)
        note(outcome, " msg_flags=%x name=%u", message.msg_flags, message.msg_namelen);
    errno = error;
    return result;
}

static long receive_messages(int descriptor, const struct call *call, struct outcome *outcome)
{
    struct iovec pieces[PIECES_MAX];
    struct mmsghdr messages[PIECES_MAX] = {0};
    int count = cut(pieces, mailbox->data, call->length, call->pieces);
    for (int i = 0; i < count; i++) {
        messages[i].msg_hdr.msg_iov = &pieces[i];
        messages[i].msg_hdr.msg_iovlen = 1;
    }
    int got = recvmmsg(descriptor, messages, (unsigned)count, call->flags, NULL);
    int error = errno;
    uint32_t total = 0;
    for (int i = 0; i < got; i++) {
        note(outcome, " [%d]=%u", i, messages[i].msg_len);
        if (!(call->flags & MSG_TRUNC))
            memmove(mailbox->data + total, pieces[i].iov_base, messages[i].msg_len);
        total += messages[i].msg_len;
    }
    outcome->bytes = total;
    errno = error;
    return got;
}

/* How much one splice moves depends on how TCP cut the bytes; what all of them move does not. */
static long receive_by_splice(int descriptor, const struct call *call, struct outcome *outcome)
{
    long total = 0;
    do {
        long moved = splice(descriptor, NULL, through[1], NULL, call->length - (size_t)total, 0);
        if (moved <= 0) {
            if (total == 0)
                return moved;
            note(outcome, " then=%ld", moved);
            break;
        }
        for (long at = 0; at < moved;) {
            long taken = read(through[0], mailbox->data + total + at, (size_t)(moved - at));
            if (taken <= 0)
                abort();
            at += taken;
        }
        total += moved;
    } while (total < (long)call->expected);
    return total;
}

static long receive(int descriptor, const struct call *call, struct outcome *outcome)
{
    struct iovec pieces[PIECES_MAX];
    struct sockaddr_storage name;
    socklen_t name_length = sizeof name;
    unsigned char *data = mailbox->data;
    size_t length = call->length;
    long result;
    switch (call->way) {
    case BY_RECV:
        return recv(descriptor, data, length, call->flags);
    case BY_READ:
        return read(descriptor, data, length);
    case BY_READV:
        return readv(descriptor, pieces, cut(pieces, data, call->length, call->pieces));
    case BY_RECVFROM:
        result = recvfrom(descriptor, data, length, call->flags, (struct sockaddr *)&name, &name_length);
        if (result >= 0)
            note(outcome, " name=%u", name_length);
        return result;
    case BY_RECVMSG:
        return receive_message(descriptor, call, outcome);
    case BY_RECVMMSG:
        return receive_messages(descriptor, call, outcome);
    case BY_PREADV2:
        return preadv2(descriptor, pieces, cut(pieces, data, call->length, call->pieces), -1, 0);
    case BY_RECV_CHK:
        return __recv_chk(descriptor, data, length, DATA_MAX, call->flags);
    case BY_READ_CHK:
        return __read_chk(descriptor, data, length, DATA_MAX);
    case BY_SYSCALL_RECV:
        return syscall(SYS_recvfrom, descriptor, data, length, call->flags, NULL, NULL);
    case BY_SPLICE_IN:
        return receive_by_splice(descriptor, call, outcome);
    case BY_RAW_READ:
        return from_kernel(raw3(SYS_read, descriptor, (long)data, (long)length));
    case BY_RAW_RECVFROM:
        return from_kernel(raw6(SYS_recvfrom, descriptor, (long)data, (long)length, call->flags, 0, 0));
    default:
        abort();
    }
}

static void perform_receive(const struct call *call, struct outcome *outcome)
{
    unsigned char *data = mailbox->data;
    memset(data, CANARY, call->length + CANARY_LENGTH);
    errno = 0;
    long result = receive(descriptors[call->slot], call, outcome);
    outcome->error = errno;
    if (call->way != BY_RECVMMSG)
        outcome->bytes = result > 0 ? (uint32_t)result : 0;
    uint32_t written = call->flags & MSG_TRUNC ? 0 : outcome->bytes;
    /* Messages of unlike lengths were moved together, so only what lies behind the buffer is known to be untouched. */
    uint32_t at = call->way == BY_RECVMMSG ? call->length : written;
    for (; at < call->length + CANARY_LENGTH; at++)
        if (data[at] != CANARY) {
            note(outcome, " !! OVERRUN at %u", at);
            break;
        }

    if (written > 1 && data[0] != data[1] && fault(1)) {
        unsigned char first = data[0];
        data[0] = data[1];
        data[1] = first;
    } else if (written > 1 && fault(2)) {
        memmove(data, data + 1, --outcome->bytes);
        result--;
    } else if (result < 0 && outcome->error == EAGAIN && fault(4)) {
        outcome->error = EINTR;
    } else if (result < 0 && outcome->error == ECONNRESET && fault(6)) {
        result = 0;
    } else if (written > 1 && call->flags & MSG_PEEK && fault(8)) {
        result--;
        outcome->bytes--;
    }
    outcome->result = result;
}

/* The kernel sends the file's pages themselves: what lies unread would change if they were written again, here, in the
 * other process or in a forked child. */
static long send_by_file(int descriptor, const struct call *call)
{
    off_t from = (off_t)(__atomic_fetch_add(file_pages, call->length / 4096 + 1, __ATOMIC_RELAXED) % FILE_PAGES * 4096);
    if (pwrite(file, payload, call->length, from) != (ssize_t)call->length)
        abort();
    return sendfile(descriptor, file, &from, call->length);
}

static long send_by_splice(int descriptor, const struct call *call)
{
    if (write(through[1], payload, call->length) != (ssize_t)call->length)
        abort();
    long total = 0;
    while (total < (long)call->length) {
        long moved = splice(through[0], NULL, descriptor, NULL, call->length - (size_t)total, 0);
        if (moved <= 0) {
            int error = errno;
            for (long left = (long)call->length - total; left > 0;) {
                long taken = read(through[0], payload, (size_t)left);
                if (taken <= 0)
                    abort();
                left -= taken;
            }
            errno = error;
            return total > 0 ? total : moved;
        }
        total += moved;
    }
    return total;
}

static long send_messages(int descriptor, const struct call *call, struct outcome *outcome)
{
    struct iovec pieces[PIECES_MAX];
    struct mmsghdr messages[PIECES_MAX] = {0};
    int count = cut(pieces, payload, call->length, call->pieces);
    for (int i = 0; i < count; i++) {
        messages[i].msg_hdr.msg_iov = &pieces[i];
        messages[i].msg_hdr.msg_iovlen = 1;
    }
    int gone = sendmmsg(descriptor, messages, (unsigned)count, call->flags);
    int error = errno;
    outcome->bytes = 0;
    for (int i = 0; i < gone; i++) {
        note(outcome, " [%d]=%u", i, messages[i].msg_len);
        outcome->bytes += messages[i].msg_len;
    }
    errno = error;
    return gone;
}

static long send_one(int descriptor, const struct call *call, struct outcome *outcome)
{
    struct iovec pieces[PIECES_MAX];
    size_t length = call->length;
    switch (call->way) {
    case BY_SEND:
        return send(descriptor, payload, length, call->flags);
    case BY_WRITE:
        return write(descriptor, payload, length);
    case BY_WRITEV:
        return writev(descriptor, pieces, cut(pieces, payload, call->length, call->pieces));
    case BY_SENDTO:
        return sendto(descriptor, payload, length, call->flags, NULL, 0);
    case BY_SENDMSG: {
        struct msghdr message = {.msg_iov = pieces};
        message.msg_iovlen = (size_t)cut(pieces, payload, call->length, call->pieces);
        return sendmsg(descriptor, &message, call->flags);
    }
    case BY_SENDMMSG:
        return send_messages(descriptor, call, outcome);
    case BY_PWRITEV2:
        return pwritev2(descriptor, pieces, cut(pieces, payload, call->length, call->pieces), -1, 0);
    case BY_SYSCALL_SEND:
        return syscall(SYS_sendto, descriptor, payload, length, call->flags, NULL, 0);
    case BY_SENDFILE:
        return send_by_file(descriptor, call);
    case BY_SPLICE_OUT:
        return send_by_splice(descriptor, call);
    case BY_RAW_WRITE:
        return from_kernel(raw3(SYS_write, descriptor, (long)payload, (long)length));
    case BY_RAW_SENDTO:
        return from_kernel(raw6(SYS_sendto, descriptor, (long)payload, (long)length, call->flags, 0, 0));
    default:
        abort();
    }
}

static void perform_send(const struct call *call, struct outcome *outcome)
{
    fill_payload(call);
    errno = 0;
    long result = send_one(descriptors[call->slot], call, outcome);
    outcome->error = errno;
    if (call->way != BY_SENDMMSG)
        outcome->bytes = result > 0 ? (uint32_t)result : 0;
    if (result < 0 && outcome->error == EPIPE && fault(9))
        outcome->error = ECONNRESET;
    outcome->result = result;
}

/* Sends until the kernel takes no more: that was so twice, with a pause between in which bytes may have moved on. */
static void perform_fill(const struct call *call, struct outcome *outcome)
{
    struct call part = *call;
    long total = 0;
    int full = 0;
    for (int i = 0; i < call->watched; i++)
        forget_writable(call->watch[i].slot);
    while (full < 2 && total < call->value) {
        part.offset = call->offset + (uint64_t)total;
        fill_payload(&part);
        long gone = send(descriptors[call->slot], payload, call->length, call->flags);
        if (gone > 0) {
            total += gone;
            full = 0;
            continue;
        }
        outcome->error = errno;
        if (errno != EAGAIN)
            break;
        full++;
        pause_us(1000);
    }
    outcome->result = total;
    if (full < 2)
        note(outcome, " !! never full");
}

static int tcp_state(int descriptor, uint64_t *received)
{
    struct tcp_info info;
    socklen_t length = sizeof info;
    memset(&info, 0, sizeof info);
    long result = raw6(SYS_getsockopt, descriptor, IPPROTO_TCP, TCP_INFO, (long)&info, (long)&length, 0);
    if (received)
        *received = info.tcpi_bytes_received;
    return result < 0 ? -1 : info.tcpi_state;
}

static bool settled(const struct call *call, struct outcome *outcome)
{
    int descriptor = descriptors[call->slot];
    if (call->kind == KIND_SETTLE_STATE) {
        int state = tcp_state(descriptor, NULL);
        outcome->result = state;
        return state >= 0 && (1 << state) & call->value;
    }
    if (call->kind == KIND_SETTLE_URGENT) {
        struct pollfd watch = {descriptor, POLLPRI, 0};
        struct timespec none = {0};
        raw6(SYS_ppoll, (long)&watch, 1, (long)&none, 0, 0, 0);
        return watch.revents & POLLPRI;
    }
    int count = -1;
    if (call->flags)
        raw3(SYS_ioctl, descriptor, FIONREAD, (long)&count);
    else
        ioctl(descriptor, FIONREAD, &count);
    outcome->result = count;
    return count >= (int)call->expected;
}

/* It must not sleep in a call that is watched: that would decide by which way the next bytes go. */
static void perform_settle(const struct call *call, struct outcome *outcome)
{
    uint64_t began = now_us();
    for (int round = 0; !settled(call, outcome); round++) {
        if (now_us() - began > SETTLE_US_MAX) {
            outcome->error = ETIMEDOUT;
            return;
        }
        if (round < 50)
            raw3(SYS_sched_yield, 0, 0, 0);
        else
            pause_us(50);
    }
}

static void perform_here(const struct call *call, struct outcome *outcome)
{
    fault_armed = call->recorded;
    errno = 0;
    switch (call->kind) {
    case KIND_RECEIVE: perform_receive(call, outcome); break;
    case KIND_SEND: perform_send(call, outcome); break;
    case KIND_WAIT: perform_wait(call, outcome); break;
    case KIND_EPOLL_CREATE: /* fall through */
    case KIND_EPOLL_CONTROL: perform_epoll_control(call, outcome); break;
    case KIND_EPOLL_WAIT: perform_epoll_wait(call, outcome); break;
    case KIND_SET: perform_set(call, outcome); break;
    case KIND_ASK: perform_ask(call, outcome); break;
    case KIND_DUPLICATE: perform_duplicate(call, outcome); break;
    case KIND_CLOSE: perform_close(call, outcome); break;
    case KIND_SHUTDOWN:
        outcome->result = shutdown(descriptors[call->slot], call->way);
        outcome->error = errno;
        break;
    case KIND_LISTEN: perform_listen(call, outcome); break;
    case KIND_CONNECT: perform_connect(call, outcome); break;
    case KIND_ACCEPT:
        outcome->result = call->flags & 1 ? accept4(descriptors[call->other], NULL, NULL, SOCK_CLOEXEC)
                                          : accept(descriptors[call->other], NULL, NULL);
        outcome->error = errno;
        descriptors[call->slot] = (int)outcome->result;
        break;
    case KIND_PIPE: perform_pipe(call, outcome); break;
    case KIND_INHERIT: perform_inherit(call, outcome); break;
    case KIND_OTHER_MAKE: /* fall through */
    case KIND_OTHER_RAISE: /* fall through */
    case KIND_OTHER_CLEAR: perform_other(call, outcome); break;
    case KIND_FILL: perform_fill(call, outcome); break;
    case KIND_SETTLE_BYTES: /* fall through */
    case KIND_SETTLE_STATE: /* fall through */
    case KIND_SETTLE_URGENT: perform_settle(call, outcome); break;
    case KIND_TCP_COUNT: {
        uint64_t received;
        tcp_state(descriptors[call->slot], &received);
        outcome->result = (long)received;
        break;
    }
    case KIND_QUIT: break;
    }
    if (broken_pipes > 0 && fault(7))
        broken_pipes = 0;
    outcome->broken_pipes = broken_pipes;
    outcome->wrong = fault_applied();
    broken_pipes = 0;
}

struct errand {
    const struct call *call;
    struct outcome *outcome;
};

static void *run_errand(void *errand)
{
    perform_here(((struct errand *)errand)->call, ((struct errand *)errand)->outcome);
    return NULL;
}

static void perform_in_guise(const struct call *call, struct outcome *outcome)
{
    if (call->guise == IN_PLACE) {
        perform_here(call, outcome);
    } else if (call->guise == IN_A_THREAD) {
        pthread_t thread;
        struct errand errand = {call, outcome};
        if (pthread_create(&thread, NULL, run_errand, &errand) != 0)
            abort();
        pthread_join(thread, NULL);
    } else {
        pid_t child = fork();
        if (child < 0)
            abort();
        if (child == 0) {
            /* If the call hangs, nobody else would end it. */
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            /* Both ways out: with and without what libraries do when a process ends. */
            perform_here(call, outcome);
            if (call->value)
                exit(0);
            _exit(0);
        }
        int status = 0;
        while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
        }
        if (status != 0)
            note(outcome, " !! child ended with %x", status);
    }
}

static void *disturb(void *target)
{
    while (!stop_disturbing) {
        pause_us(2000);
        if (!stop_disturbing)
            pthread_kill(*(pthread_t *)target, SIGUSR1);
    }
    return NULL;
}

/* Signals every 2 ms until the call returns: the first might come before the call sleeps. */
static void perform_disturbed(const struct call *call, struct outcome *outcome)
{
    struct sigaction action = {.sa_handler = tick, .sa_flags = call->restart ? SA_RESTART : 0};
    struct itimerval every = {{0, 2000}, {0, 2000}}, never = {{0, 0}, {0, 0}};
    pthread_t thread, self = pthread_self();
    for (uint32_t i = 0; call->rescue_slot >= 0 && i < call->rescue_length; i++)
        payload[i] = payload_byte(call->key, call->offset + i);
    sigaction(SIGALRM, &action, NULL);
    sigaction(SIGUSR1, &action, NULL);
    ticks = 0;
    stop_disturbing = false;
    disturbed_call = call;
    if (call->disturbance == BY_TIMER)
        setitimer(ITIMER_REAL, &every, NULL);
    else if (pthread_create(&thread, NULL, disturb, &self) != 0)
        abort();
    perform_here(call, outcome);
    if (call->disturbance == BY_TIMER) {
        setitimer(ITIMER_REAL, &never, NULL);
    } else {
        stop_disturbing = true;
        pthread_join(thread, NULL);
    }
    disturbed_call = NULL;
    outcome->disturbed = ticks > 0;
}

/* `outcome` is in shared memory, for a forked child writes to it. */
void perform(const struct call *call, struct outcome *outcome)
{
    memset(outcome, 0, sizeof *outcome);
    go_to(call->place);
    if (call->delay_us)
        pause_us(call->delay_us);
    if (call->disturbance != UNDISTURBED)
        perform_disturbed(call, outcome);
    else
        perform_in_guise(call, outcome);
}
