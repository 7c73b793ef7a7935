// A call's list of buffers.
#pragma once
#include <stddef.h>
#include <sys/uio.h>

// Longer lists are the kernel's to refuse.
#define PARTS_MAX 1024

static inline size_t sum(const struct iovec *parts, int count) {
    size_t total = 0;
    for (int i = 0; i < count; i++)
        total += parts[i].iov_len;
    return total;
}

// Whether a list is one that is looked at here: not empty, and not too long.
static inline int has_bytes(const struct iovec *parts, size_t count) {
    return count > 0 && count <= PARTS_MAX && sum(parts, (int)count) > 0;
}

// The bytes from `skip` on, at most `limit`, as a list of its own.
#pragma GCC visibility push(hidden)
int cut(const struct iovec *parts, int count, size_t skip, size_t limit, struct iovec *into);
#pragma GCC visibility pop
