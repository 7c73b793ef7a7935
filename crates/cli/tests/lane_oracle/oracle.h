/*
 * The oracle: random sequences of socket calls, drawn from a seed, and a trace of what each answered. The same seed is
 * run on the kernel's TCP and under `highwire run`; the traces must be the same.
 *
 *   oracle.c    options, the seeds in turn, connections and their warming up
 *   sequence.c  the model of what lies unread where, and the draw of the next call
 *   scenes.c    several calls that belong together: ends of connections, urgent bytes, signals, full buffers
 *   perform.c   one call of libc, in the process that has the descriptor
 *   descriptors.c  what makes, copies, closes, configures and asks them
 *   waits.c     the calls that wait for readiness
 *   inherit.c   another process, which has the descriptor by fork, exec, vfork, spawn or a message
 *
 * What TCP never does, and what the model did not expect, is marked with !! in the trace.
 *
 * One process draws, models and writes the trace (the director). In the shape `single` it makes every call itself; in
 * the shape `pair` the end b of each connection lives in a second process, which is told the calls one at a time.
 */
#ifndef ORACLE_H
#define ORACLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    SLOTS = 48,            /* descriptors of the sequence, in each process */
    WATCHED_MAX = 12,      /* descriptors in one poll */
    CONNECTIONS_MAX = 3,
    ALIASES_MAX = 3,       /* descriptors of one end */
    DATA_MAX = 96 * 1024,  /* bytes of one call */
    NOTE_MAX = 400,
    ANYWHERE = -1,
    UNREAD_MAX = 24 * 1024 /* far below what sockets buffer: no send waits but where it is meant to */
};

enum kind {
    KIND_RECEIVE,
    KIND_SEND,
    KIND_WAIT,          /* poll, select and their relatives */
    KIND_EPOLL_CREATE,
    KIND_EPOLL_CONTROL,
    KIND_EPOLL_WAIT,
    KIND_SET,           /* setsockopt, fcntl, ioctl that change */
    KIND_ASK,           /* getsockopt, ioctl, names that only ask */
    KIND_DUPLICATE,
    KIND_CLOSE,
    KIND_SHUTDOWN,
    KIND_LISTEN,
    KIND_CONNECT,
    KIND_ACCEPT,
    KIND_PIPE,
    KIND_INHERIT,       /* another process has the descriptor, and uses it */
    KIND_OTHER_MAKE,    /* a descriptor that is no connection, of the kind that its way says */
    KIND_OTHER_RAISE,   /* becomes readable */
    KIND_OTHER_CLEAR,   /* is not any more */
    KIND_FILL,          /* send until the kernel takes no more */
    KIND_SETTLE_BYTES,  /* wait until so many bytes lie unread */
    KIND_SETTLE_STATE,  /* wait until TCP is in one of these states */
    KIND_SETTLE_URGENT, /* wait until urgent data was announced */
    KIND_TCP_COUNT,     /* what the kernel received on this connection */
    KIND_QUIT
};

/* The libc call that a receive or a send is made with. */
enum way {
    BY_RECV, BY_READ, BY_READV, BY_RECVFROM, BY_RECVMSG, BY_RECVMMSG, BY_PREADV2, BY_RECV_CHK, BY_READ_CHK,
    BY_SYSCALL_RECV, BY_SPLICE_IN, BY_RAW_READ, BY_RAW_RECVFROM,
    BY_SEND, BY_WRITE, BY_WRITEV, BY_SENDTO, BY_SENDMSG, BY_SENDMMSG, BY_PWRITEV2, BY_SYSCALL_SEND, BY_SENDFILE,
    BY_SPLICE_OUT, BY_RAW_WRITE, BY_RAW_SENDTO,
    BY_POLL, BY_PPOLL, BY_SELECT, BY_PSELECT,
    BY_EPOLL_WAIT, BY_EPOLL_PWAIT, BY_EPOLL_PWAIT2
};

enum setting {
    SET_NONBLOCK_FCNTL, SET_NONBLOCK_IOCTL, SET_RECEIVE_TIMEOUT_US, SET_SEND_TIMEOUT_US, SET_LOW_WATER, SET_NODELAY,
    SET_CORK, SET_LINGER_RESET, SET_OUT_OF_BAND_INLINE, SET_SEND_BUFFER, SET_KEEPALIVE
};

enum question {
    ASK_UNREAD, ASK_OUTSTANDING, ASK_ERROR, ASK_STATE, ASK_PEER_NAME, ASK_OWN_NAME, ASK_FLAGS, ASK_LOW_WATER,
    ASK_AT_MARK, ASK_TYPE, ASK_RECEIVE_TIMEOUT, ASK_DESCRIPTOR_FLAGS
};

/* Descriptors that only the kernel knows, which sets and lists have beside connections. */
enum other { OTHER_EVENT, OTHER_TIMER, OTHER_LISTENER, OTHERS };

enum duplication { BY_DUP, BY_DUP2, BY_DUP3, BY_DUPFD, BY_DUPFD_CLOEXEC };
enum closing { BY_CLOSE, BY_CLOSE_RANGE, BY_CLOSEFROM, BY_DUP2_OVER };

/* How a program comes to a descriptor, and what it asks of it first. */
enum inheritance { INHERIT_EXEC, INHERIT_VFORK, INHERIT_SPAWN, INHERIT_FORK, INHERIT_MESSAGE };
enum first_question { FIRST_NOTHING, FIRST_POLL, FIRST_UNREAD, FIRST_EPOLL, FIRST_QUESTIONS };

/* Who makes the call: the process's first thread, another one, or a forked child that then exits. */
enum guise { IN_PLACE, IN_A_THREAD, IN_A_FORK };

/* What disturbs a call while it blocks. */
enum disturbance { UNDISTURBED, BY_TIMER, BY_THREAD };

struct watch {
    int slot;
    uint32_t events;
};

struct call {
    enum kind kind;
    int way;
    int slot;
    int other;          /* a second slot: epoll's target, the new descriptor */
    uint32_t length;
    int flags;
    int pieces;         /* of a vector, or messages */
    uint32_t expected;  /* what a splice goes on for; unread bytes to settle for */
    int timeout_ms;
    int64_t value;
    uint64_t key;       /* of the payload */
    uint64_t offset;    /* of its first byte, in its direction */
    enum guise guise;
    enum disturbance disturbance;
    bool restart;       /* SA_RESTART */
    int rescue_slot;    /* the handler sends rescue_length bytes here at its third call, or -1 */
    uint32_t rescue_length;
    uint32_t delay_us;  /* before the call */
    int place;          /* ANYWHERE, a CPU from 1, or 0: where it is */
    bool handed;        /* the caller closes the descriptor, and gets it back from the process that inherits it */
    bool recorded;      /* its outcome is written to the trace; only such calls are made wrong on purpose */
    int watched;
    struct watch watch[WATCHED_MAX];
};

struct outcome {
    long result;
    int error;
    int broken_pipes;   /* SIGPIPEs */
    int disturbed;      /* whether the disturbing signal came */
    bool wrong;         /* this was made wrong on purpose */
    uint32_t bytes;     /* of data */
    long sent;          /* by a process that inherited the descriptor */
    char note[NOTE_MAX];
};

/* Shared between the processes, one for each: the call that it is to make, then what came of it. */
struct mailbox {
    struct call call;
    struct outcome outcome;
    unsigned char data[DATA_MAX];
};

/* One direction: bytes from one end to the other. */
struct flow {
    uint64_t key;
    uint64_t sent, read;
    uint64_t filled;     /* sent and read besides: as much as fitted, which is not the same in every run */
    unsigned sends_unread; /* small packets cost the receiver's buffer far more than their bytes */
    bool raw_reader, raw_writer;
    bool urgent;         /* there is an urgent byte that was not read past, and it is not inline */
    uint64_t urgent_at;
};

struct end {
    int process;
    int place;
    int alias[ALIASES_MAX];
    int aliases;        /* 0: closed */
    bool nonblocking;
    bool receive_timeout, send_timeout;
    bool linger_reset;
    int low_water;
    bool finished;      /* it has sent its FIN: shutdown or close */
    bool shut_for_reading;
};

struct connection {
    struct end end[2];
    struct flow flow[2]; /* flow[0] is from end 0 to end 1 */
    bool reset;
};

struct epoll_set {
    int slot;           /* -1: none */
    int process;
};

struct world {
    bool pair;
    bool apart;          /* the two ends of a connection are on CPUs of their own */
    uint64_t random;
    uint64_t seed;
    int step;
    int connections;
    struct connection connection[CONNECTIONS_MAX];
    struct epoll_set set[4]; /* two for each process */
    int pipe_slot[2][2];     /* for each process, reading and writing */
    int pipe_bytes[2];
    int other_slot[2][OTHERS]; /* for each process */
    bool other_raised[2][OTHERS];
    bool slot_used[2][SLOTS];
};

extern struct mailbox *mailbox;
extern struct world world;

/* perform.c */
void perform(const struct call *call, struct outcome *outcome);
void performer_begin(void);
void find_places(void);
bool two_places(void);
int descriptor_of(int slot);
void remember_descriptor(int slot, int descriptor);
unsigned char payload_byte(uint64_t key, uint64_t offset);
void note(struct outcome *outcome, const char *format, ...) __attribute__((format(printf, 2, 3)));
uint64_t now_us(void);
bool fault(int which);
void set_fault(int which);
bool fault_applied(void);

int any_other_descriptor(void);

/* descriptors.c */
void perform_set(const struct call *call, struct outcome *outcome);
void perform_ask(const struct call *call, struct outcome *outcome);
void perform_duplicate(const struct call *call, struct outcome *outcome);
void perform_close(const struct call *call, struct outcome *outcome);
void perform_listen(const struct call *call, struct outcome *outcome);
void perform_connect(const struct call *call, struct outcome *outcome);
void perform_pipe(const struct call *call, struct outcome *outcome);
void perform_other(const struct call *call, struct outcome *outcome);

/* inherit.c */
void perform_inherit(const struct call *call, struct outcome *outcome);
int inherited_program(void);

/* waits.c */
void perform_wait(const struct call *call, struct outcome *outcome);
void perform_epoll_wait(const struct call *call, struct outcome *outcome);
void forget_writable(int slot);
void perform_epoll_control(const struct call *call, struct outcome *outcome);
void describe_events(char *text, size_t room, uint32_t events);

/* oracle.c */
struct outcome make(int process, const struct call *call);
struct outcome make_while(int process, const struct call *call, int meanwhile_process, const struct call *meanwhile,
                          struct outcome *meanwhile_outcome);
const unsigned char *data_of(int process);
void finish(void) __attribute__((noreturn));
void trace(const char *format, ...) __attribute__((format(printf, 1, 2)));
unsigned draw(unsigned below);
bool chance(unsigned percent);
int slot_take(int process);
void slot_free(int process, int slot);
void renew(int number);
void make_others(int process);

/* sequence.c */
void sequence(int steps);
bool usable(const struct end *end);
uint32_t unread(int number, int reader);
struct call call_on(enum kind kind, const struct end *end);
struct call receive_call(int number, int reader, uint32_t length, int way, int flags);
struct call send_call(int number, int writer, uint32_t length, int way, int flags);
void announce(const struct call *call, int process);
void conclude(const struct call *call, int process, const struct outcome *outcome);
struct outcome record(int process, struct call *call);
void account_received(int number, int reader, const struct call *call, const struct outcome *outcome, bool quiet);
void account_sent(int number, int writer, const struct outcome *outcome);
void settle_after_send(int number, int writer, uint32_t bytes);
void settle_end(int number);
struct outcome send_bytes(int number, int writer, uint32_t length, int way, int flags);
struct outcome receive_bytes(int number, int reader, uint32_t length, int way, int flags);
void ask(int number, int which, enum question question);
void set(int number, int which, enum setting setting, int value);
void readiness(int number, int which);
int receive_way(const struct flow *flow);
int send_way(const struct flow *flow);
int other_socket(int number, int which);
bool would_wait(int number, int reader, uint32_t length, int flags);

/* scenes.c */
void scene(void);
void close_end(int number, int which, int way);

#endif
