// What Rust decides, which never waits.
#pragma once
#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>

// What the program finds in errno is what its own call has left there.
#define KEEPING_ERRNO(statement)                                                                                       \
    do {                                                                                                               \
        int kept = errno;                                                                                              \
        statement;                                                                                                     \
        errno = kept;                                                                                                  \
    } while (0)

#pragma GCC visibility push(hidden)

struct plan {
    size_t done;  // bytes that went by the lane or came from it in this call
    size_t limit; // how many bytes the kernel may be asked for
    uint32_t slot;
    uint32_t generation;
    int error;
    uint32_t counted;  // a send that the lane counts as under way
    uint64_t deadline; // until when a send may wait, by the monotonic clock: zero before it has, NEVER without a limit
};
#define NEVER UINT64_MAX
enum verdict { DONE = 0, FAILED = 1, KERNEL = 2, WAIT = 3 };
// Why a connection is to stay plain.
enum why { BY_STDIO = 1, BY_SIGNAL = 2, BY_OPTION = 3, BY_OUT_OF_BAND = 4 };
struct inside;

// One word for each descriptor: zero for one that is not known.
extern uint32_t hw_descriptors[];
extern uint32_t hw_spawning;
_Bool hw_is_foreign(void);
#define DESCRIPTORS 65536
// A child in its parent's memory, with descriptors of its own, knows none of them: its calls are the kernel's.
#define KIND(fd)                                                                                                       \
    ((unsigned)(fd) >= DESCRIPTORS                         ? 0                                                         \
     : __builtin_expect(hw_spawning != 0, 0) && hw_is_foreign() ? NONE_OF_OURS                                         \
                                                           : __atomic_load_n(&hw_descriptors[fd], __ATOMIC_RELAXED))
#define NONE_OF_OURS 1
#define IS_SOCKET(entry) ((entry) & 0x80000000u)
#define IS_EPOLL(entry) ((entry) & 0x40000000u)
#define IS_NEW_SET(entry) ((entry) == 2)

// Descriptors.
void hw_begin(void);
void hw_new_socket(int fd, int nonblocking);
void hw_maybe_socket(int fd);
void hw_unknown(int fd);
void hw_closing(int fd);
void hw_closed_range(unsigned first, unsigned last);
void hw_duplicated(int from, int to);
void hw_forget(int fd);
void hw_handed(int fd);
void hw_receives_descriptors(const struct msghdr *);
void hw_passes_descriptors(const struct msghdr *);

// What is set or asked of a connection.
void hw_plain(int fd, int why);
void hw_shut_down(int fd, int how);
void hw_set_nonblocking(int fd, int on);
void hw_corked(int fd, int on);
void hw_low_water(int fd, int bytes);
int hw_set_combining(int fd, int on);
int hw_is_combining(int fd);
size_t hw_unread(int fd);
int hw_is_before_mark(int fd);

// Bytes: before the kernel is asked, and after.
int hw_receive(int fd, struct plan *, const struct iovec *, int count, int flags, size_t total);
void hw_received(struct plan *, ssize_t result, int flags);
int hw_splice_out(int fd, struct plan *, int to, size_t count, int nonblocking);
int hw_send(int fd, struct plan *, const struct iovec *, int count, int flags, size_t total);
int hw_send_file(int fd, struct plan *, int file, int64_t *offset, size_t count);
void hw_sent(struct plan *, ssize_t result, int flags, int error);

// Waiting.
int hw_poll(struct pollfd *, nfds_t count, int64_t timeout_ns, int *sleeping);
int hw_select(const uint64_t *set, size_t words, int64_t timeout_ns, int *sleeping);
int hw_is_ready(int fd);
void hw_polled(void);
void hw_epoll_made(int set);
void hw_epoll_seen(int set);
int hw_epoll_put_off(int set, int operation, int fd, const struct epoll_event *);
void hw_epoll_ctl(int set, int operation, int fd, const struct epoll_event *);
int hw_epoll_wait(int set, struct epoll_event *, int most, int64_t timeout_ns, struct plan *);
int hw_epoll_waited(struct plan *, struct epoll_event *, int count);
int hw_may_ask_for_signals(void);

// A call was torn away.
void hw_abandoned(const struct inside *);

// A program is about to be executed (log.rs).
void hw_tell_program(const char *path, int searched, char *const environment[]);
void hw_tell_program_at(int folder, const char *path, char *const environment[], int flags);

// Forks, new programs, sandboxes (process.rs).
void hw_before_fork(void);
void hw_after_fork(int child);
void hw_before_vfork(void);
void hw_before_shared_memory(void);
void hw_before_spawn(void);
void hw_after_spawn(int child);
void hw_after_unknown_spawn(void);
void hw_before_exec(void);
void hw_sandboxed(void);
void hw_ring_made(void);

#pragma GCC visibility pop
