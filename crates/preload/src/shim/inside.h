// What a thread is inside of while it may wait, so that whoever is torn out of it (cancelled, or by a jump from a
// handler) is tidied up after.
#pragma once
#include "decide.h"
#include "real.h"
#include <pthread.h>

enum inside_kind { OUTSIDE = 0, RECEIVING = 1, SENDING = 2, WAITING = 3, WAITING_EPOLL = 4, ASKING_EPOLL = 5 };
struct inside {
    const void *frame;
    uint32_t kind;
    uint32_t slot;
    uint32_t generation;
    uint32_t counted;
};

#pragma GCC visibility push(hidden)
extern __thread struct inside inside __attribute__((tls_model("initial-exec")));
// For a thread that is cancelled: tidies up.
void cancelled(void *);
// Whether a handler runs on a stack of its own, which says nothing about frames.
int is_elsewhere(void);
#pragma GCC visibility pop

// A record of an earlier call is stale if that call's frame is gone: this one is not deeper in the stack.
static inline void tidy(void) {
    if (unlikely(inside.kind != OUTSIDE) && (const void *)__builtin_frame_address(0) >= inside.frame && !is_elsewhere()) {
        struct inside stale = inside;
        inside.kind = OUTSIDE;
        hw_abandoned(&stale);
    }
}

// AROUND(kind, plan, statement): the statement may wait.
#define AROUND(what, plan, statement)                                                                                  \
    do {                                                                                                               \
        struct inside outer = inside;                                                                                  \
        inside = (struct inside){__builtin_frame_address(0), what, (plan)->slot, (plan)->generation,                                         \
                                  (plan)->counted};                  \
        pthread_cleanup_push(cancelled, NULL);                                                                         \
        statement;                                                                                                     \
        pthread_cleanup_pop(0);                                                                                        \
        inside = outer;                                                                                                \
    } while (0)

// Whether a call is about a connection that may have a lane. One that was inherited or received is found here.
static inline int concerns(int fd) {
    uint32_t entry = KIND(fd);
    if (unlikely(entry == 0) && (unsigned)fd < DESCRIPTORS) {
        KEEPING_ERRNO(hw_maybe_socket(fd));
        entry = KIND(fd);
    }
    if (likely(IS_SOCKET(entry))) {
        tidy();
        return 1;
    }
    return 0;
}
