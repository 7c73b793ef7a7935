#include "parts.h"

int cut(const struct iovec *parts, int count, size_t skip, size_t limit, struct iovec *into) {
    int used = 0;
    for (int i = 0; i < count && limit > 0; i++) {
        size_t length = parts[i].iov_len;
        if (skip >= length) {
            skip -= length;
            continue;
        }
        size_t bytes = length - skip < limit ? length - skip : limit;
        into[used++] = (struct iovec){(char *)parts[i].iov_base + skip, bytes};
        skip = 0;
        limit -= bytes;
    }
    return used;
}
