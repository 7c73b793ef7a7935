/* Around libc: io_uring, and system calls that the program makes itself. Nobody sees these coming. */
#include "lane.h"
#include <linux/io_uring.h>

#define ROUNDS 200

struct ring {
    int fd;
    unsigned *submit_tail, *submit_mask, *submit_array, *done_head, *done_tail, *done_mask;
    struct io_uring_sqe *entries;
    struct io_uring_cqe *completions;
};

static struct ring make_ring(void) {
    struct io_uring_params parameters = {0};
    struct ring ring = {.fd = (int)syscall(SYS_io_uring_setup, 8, &parameters)};
    if (ring.fd < 0) {
        CHECK(errno == EPERM || errno == ENOSYS);
        say("io_uring is forbidden here");
        exit(0);
    }
    CHECK(parameters.features & IORING_FEAT_SINGLE_MMAP);
    size_t submit = parameters.sq_off.array + parameters.sq_entries * sizeof(unsigned);
    size_t done = parameters.cq_off.cqes + parameters.cq_entries * sizeof(struct io_uring_cqe);
    char *shared = mmap(NULL, submit > done ? submit : done, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring.fd,
                        IORING_OFF_SQ_RING);
    ring.entries = mmap(NULL, parameters.sq_entries * sizeof(struct io_uring_sqe), PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_POPULATE, ring.fd, IORING_OFF_SQES);
    CHECK(shared != MAP_FAILED && ring.entries != MAP_FAILED);
    ring.submit_tail = (unsigned *)(shared + parameters.sq_off.tail);
    ring.submit_mask = (unsigned *)(shared + parameters.sq_off.ring_mask);
    ring.submit_array = (unsigned *)(shared + parameters.sq_off.array);
    ring.done_head = (unsigned *)(shared + parameters.cq_off.head);
    ring.done_tail = (unsigned *)(shared + parameters.cq_off.tail);
    ring.done_mask = (unsigned *)(shared + parameters.cq_off.ring_mask);
    ring.completions = (struct io_uring_cqe *)(shared + parameters.cq_off.cqes);
    return ring;
}

/* One operation, waited for. */
static int operate(struct ring *ring, int opcode, int fd, const void *bytes, size_t length) {
    unsigned tail = *ring->submit_tail, slot = tail & *ring->submit_mask;
    struct io_uring_sqe *entry = &ring->entries[slot];
    memset(entry, 0, sizeof *entry);
    entry->opcode = opcode;
    entry->fd = fd;
    entry->addr = (uint64_t)(uintptr_t)bytes;
    entry->len = length;
    ring->submit_array[slot] = slot;
    __atomic_store_n(ring->submit_tail, tail + 1, __ATOMIC_RELEASE);
    long submitted = 0;
    while (*ring->done_head == __atomic_load_n(ring->done_tail, __ATOMIC_ACQUIRE)) {
        long result = syscall(SYS_io_uring_enter, ring->fd, submitted ? 0 : 1, 1, IORING_ENTER_GETEVENTS, NULL, 0);
        if (result < 0) CHECK(errno == EINTR);
        else submitted = 1;
    }
    struct io_uring_cqe *completion = &ring->completions[*ring->done_head & *ring->done_mask];
    int result = completion->res;
    __atomic_store_n(ring->done_head, *ring->done_head + 1, __ATOMIC_RELEASE);
    return result;
}

static void answer_by_ring(struct ring *ring, struct wire *wire, unsigned rounds) {
    for (unsigned number = 0; number < rounds; number++) {
        unsigned char bytes[256];
        for (size_t missing = round_length(number); missing > 0;) {
            int got = operate(ring, number % 2 ? IORING_OP_RECV : IORING_OP_READ, wire->fd, bytes, missing);
            if (got <= 0) die("io_uring received %d in round %u", got, number);
            verify(wire, bytes, got);
            missing -= got;
        }
        size_t length = round_length(number + 5);
        int sent = operate(ring, number % 2 ? IORING_OP_WRITE : IORING_OP_SEND, wire->fd, pattern(wire->out, wire->sent), length);
        if (sent != (int)length) die("io_uring sent %d of %zu", sent, length);
        wire->sent += sent;
    }
}

/* Turn 0: nothing but io_uring. Turn 1: recv and send first, then a ring. Turn 2: both, in turn, for long. */
static void uring_server(int listener) {
    for (unsigned turn = 0; turn < 3; turn++) {
        struct ring ring = {.fd = -1};
        if (turn != 1) ring = make_ring();
        struct wire wire = server_end(accept_one(listener), 0);
        if (turn > 0) {
            answer_polling(&wire, ROUNDS);
            let_it_come(&wire);
        }
        if (turn == 1) ring = make_ring();
        answer_by_ring(&ring, &wire, ROUNDS);
        for (unsigned part = 0; turn == 2 && part < 20; part++) {
            answer_polling(&wire, 10);
            answer_by_ring(&ring, &wire, 10);
            answer(&wire, 10);
        }
        answer_polling(&wire, ROUNDS);
        close(ring.fd);
        close(wire.fd);
        say("turn %u: got %llu", turn, (unsigned long long)wire.got);
    }
}

static void uring_client(int port) {
    for (unsigned turn = 0; turn < 3; turn++) {
        struct wire wire = client_end(connect_to(port), 0);
        if (turn > 0) ask_polling(&wire, ROUNDS);
        ask_polling(&wire, ROUNDS);
        for (unsigned part = 0; turn == 2 && part < 20; part++) {
            ask_polling(&wire, 10);
            ask_polling(&wire, 10);
            ask(&wire, 10);
        }
        ask_polling(&wire, ROUNDS);
        expect_end(&wire);
        close(wire.fd);
    }
    say("client done");
}

/* System calls by libc's syscall(), and by an instruction of the program's own. */
static ssize_t bare(long number, int fd, const void *bytes, size_t length) {
#if defined(__x86_64__)
    long result;
    register long flags __asm__("r10") = 0;
    register long address __asm__("r8") = 0;
    register long address_length __asm__("r9") = 0;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(fd), "S"(bytes), "d"(length), "r"(flags), "r"(address), "r"(address_length)
                     : "rcx", "r11", "memory");
    if (result < 0) {
        errno = -result;
        return -1;
    }
    return result;
#else
    return syscall(number, fd, bytes, length, 0, NULL, NULL);
#endif
}

static void answer_around(struct wire *wire, unsigned rounds, int by_instruction) {
    for (unsigned number = 0; number < rounds; number++) {
        unsigned char bytes[256];
        for (size_t missing = round_length(number); missing > 0;) {
            long how = number % 2 ? SYS_recvfrom : SYS_read;
            ssize_t got = by_instruction ? bare(how, wire->fd, bytes, missing)
                                         : syscall(how, wire->fd, bytes, missing, 0, NULL, NULL);
            if (got <= 0) die("received %zd in round %u", got, number);
            verify(wire, bytes, got);
            missing -= got;
        }
        size_t length = round_length(number + 5);
        long how = number % 2 ? SYS_write : SYS_sendto;
        ssize_t sent = by_instruction ? bare(how, wire->fd, pattern(wire->out, wire->sent), length)
                                      : syscall(how, wire->fd, pattern(wire->out, wire->sent), length, 0, NULL, 0);
        if (sent != (ssize_t)length) die("sent %zd of %zu", sent, length);
        wire->sent += sent;
    }
}

/* Never otherwise. */
static void always_around(int listener, int by_instruction) {
    struct wire wire = server_end(accept_one(listener), 0);
    answer_around(&wire, ROUNDS, by_instruction);
    expect_end(&wire);
    say("server done");
}

static void always_around_client(int port) {
    struct wire wire = client_end(connect_to(port), 0);
    ask_polling(&wire, ROUNDS);
    say("client done");
}

/* After it has been read as usual: by one that sleeps, then by one that polls. */
static void later_around(int listener, int by_instruction) {
    struct wire wire = server_end(accept_one(listener), 0);
    answer(&wire, ROUNDS);
    answer_around(&wire, ROUNDS, by_instruction);
    answer_polling(&wire, ROUNDS);
    let_it_come(&wire);
    answer_around(&wire, ROUNDS, by_instruction);
    expect_end(&wire);
    say("server done");
}

static void later_around_client(int port) {
    struct wire wire = client_end(connect_to(port), 0);
    for (unsigned part = 0; part < 4; part++) ask_polling(&wire, ROUNDS);
    say("client done");
}

static void syscall_server(int listener) {
    always_around(listener, 0);
}

static void later_syscall_server(int listener) {
    later_around(listener, 0);
}

static void instruction_server(int listener) {
    always_around(listener, 1);
}

static void later_instruction_server(int listener) {
    later_around(listener, 1);
}

/* Waits by a system call that is made by its number; how many are ready. */
static long wait_by_number(unsigned way, int fd, int epoll) {
    struct pollfd wait = {fd, POLLIN, 0};
    struct timespec patience = {10, 0};
    struct timeval limit = {10, 0};
    struct epoll_event event;
    fd_set set;
    FD_ZERO(&set);
    FD_SET(fd, &set);
    switch (way % 5) {
    case 0: return syscall(SYS_epoll_pwait, epoll, &event, 1, 10000, NULL, 8);
    case 1: return syscall(SYS_ppoll, &wait, 1, &patience, NULL, 8);
    case 2: return syscall(SYS_epoll_pwait2, epoll, &event, 1, &patience, NULL, 8);
    case 3: return syscall(SYS_pselect6, fd + 1, &set, NULL, NULL, &patience, NULL);
#ifdef SYS_select
    default: return syscall(SYS_select, fd + 1, &set, NULL, NULL, &limit);
#else
    default: return select(fd + 1, &set, NULL, NULL, &limit);
#endif
    }
}

/* Reads and writes a part of each round by vectors, by number too. */
static void round_by_number(struct wire *wire, unsigned number) {
    unsigned char byte;
    struct iovec part = {&byte, 1};
    CHECK(syscall(SYS_preadv2, wire->fd, &part, 1, -1L, -1L, 0) == 1);
    verify(wire, &byte, 1);
    take_polling(wire, round_length(number) - 1);
    part.iov_base = (void *)pattern(wire->out, wire->sent);
    CHECK(syscall(SYS_pwritev2, wire->fd, &part, 1, -1L, -1L, 0) == 1);
    wire->sent++;
    put(wire, round_length(number + 5) - 1);
}

/* Waits by system calls that libc does not see. */
static void waiting_server(int listener) {
    struct wire wire = server_end(accept_one(listener), 0);
    int epoll = epoll_create1(0);
    struct epoll_event event = {.events = EPOLLIN};
    CHECK(epoll_ctl(epoll, EPOLL_CTL_ADD, wire.fd, &event) == 0);
    answer_polling(&wire, ROUNDS);
    for (unsigned number = 0; number < ROUNDS; number++) {
        if (number % 40 == 0) let_it_come(&wire);
        if (wait_by_number(number, wire.fd, epoll) != 1) die("round %u: nobody told of the question", number);
        round_by_number(&wire, number);
    }
    say("server done");
}

static void waiting_client(int port) {
    struct wire wire = client_end(connect_to(port), 0);
    ask_polling(&wire, ROUNDS);
    ask_polling(&wire, ROUNDS);
    expect_end(&wire);
    say("client done");
}

/* A client that writes where it should not: into all lock words of the memory that it has with the server, without end. */
#define REGION_BYTES (131072 + 64 * (1ul << 20))

static char *shared_region(void) {
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[512], rights[8], *region = NULL;
    unsigned long from, to;
    while (maps != NULL && region == NULL && fgets(line, sizeof line, maps) != NULL)
        if (sscanf(line, "%lx-%lx %7s", &from, &to, rights) == 3 && to - from >= REGION_BYTES &&
            strcmp(rights, "rw-s") == 0 && memcmp((char *)from, "HWLANES2", 8) == 0)
            region = (char *)from;
    fclose(maps);
    return region;
}

static void scribbled_client(int port) {
    struct wire wire = client_end(connect_to(port), 0);
    ask_polling(&wire, ROUNDS);
    char *region = shared_region(), byte;
    /* With an argument both ends have lanes. */
    if (region == NULL && argument_count > 4) {
        say("client has no region of lanes");
        _exit(1);
    }
    put(&wire, 1);
    set_nonblocking(wire.fd, 1);
    /* It hears of the end from the kernel: by the lane it would stop itself. */
    for (double until = now_s() + 5; now_s() < until;) {
        for (unsigned direction = 0; region != NULL && direction < 64; direction++) {
            char *control = region + 4096 + direction / 2 * 2048 + direction % 2 * 512;
            *(volatile uint32_t *)(control + 148) = 1;
            *(volatile uint32_t *)(control + 288) = 1;
        }
        ssize_t got = bare(SYS_read, wire.fd, &byte, 1);
        if (got == 0 || (got < 0 && errno != EAGAIN)) break;
    }
    say("client done");
    _exit(0);
}

static void scribbled_server(int listener) {
    struct wire wire = server_end(accept_one(listener), 0);
    answer_polling(&wire, ROUNDS);
    take_polling(&wire, 1);
    hold();
    double began = now_s(), inside = 0;
    char byte;
    for (unsigned turn = 0; turn < 100; turn++) {
        double then = now_s();
        ssize_t got = recv(wire.fd, &byte, 1, MSG_DONTWAIT);
        if (got < 0 && errno != EAGAIN && errno != ECONNRESET) die("recv");
        if (send(wire.fd, "x", 1, MSG_NOSIGNAL | MSG_DONTWAIT) < 0 && errno != EPIPE && errno != ECONNRESET) die("send");
        inside += now_s() - then;
        if (inside > 3) die("%.1f s in %u calls that never wait", inside, 2 * turn + 2);
        sleep_us(1000);
    }
    shutdown(wire.fd, SHUT_WR);
    alarm(5);
    while (recv(wire.fd, &byte, 1, 0) > 0) {}
    if (now_s() - began > 4) die("%.1f s until the end", now_s() - began);
    say("server done");
}

static const struct scenario scenarios[] = {
    {"waiting", waiting_server, waiting_client},
    {"uring", uring_server, uring_client},
    {"syscall", syscall_server, always_around_client},
    {"later_syscall", later_syscall_server, later_around_client},
    {"instruction", instruction_server, always_around_client},
    {"later_instruction", later_instruction_server, later_around_client},
    {"scribbled", scribbled_server, scribbled_client},
};

int main(int argc, char **argv) {
    return play(scenarios, sizeof scenarios / sizeof *scenarios, argc, argv);
}
