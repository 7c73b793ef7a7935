/* Requests per second and latency of memcached's GET over one connection: an ordinary client.
 *
 *   memcached_get PORT SIZE MILLISECONDS
 *
 * Stores a value of SIZE bytes at 127.0.0.1:PORT, asks for it again and again, and prints one line: requests in the
 * time measured, that time in nanoseconds, and the 99th percentile of the latency in nanoseconds. Every answer is
 * checked for its length, and those before the clock starts for their contents.
 */
#include "stream.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>

enum { WARM_REQUESTS = 1000 };

/* Latencies are counted in buckets: 64 for each doubling, so that one is wrong by less than 2 %. */
enum { BUCKETS_EACH = 64, BUCKETS = 64 * BUCKETS_EACH };

static uint64_t buckets[BUCKETS];

static void count_latency(uint64_t nanoseconds)
{
    int shift = 0;
    while (nanoseconds >> shift >= 2 * BUCKETS_EACH)
        shift++;
    buckets[shift * BUCKETS_EACH + (nanoseconds >> shift)]++;
}

static uint64_t percentile(uint64_t requests, double part)
{
    uint64_t wanted = (uint64_t)(part * requests), found = 0;
    for (int i = 0; i < BUCKETS; i++) {
        found += buckets[i];
        if (found > wanted) {
            int shift = i < 2 * BUCKETS_EACH ? 0 : i / BUCKETS_EACH - 1;
            return (uint64_t)(i - shift * BUCKETS_EACH) << shift;
        }
    }
    return 0;
}

int main(int count, char **arguments)
{
    static const char GET[] = "get value\r\n", STORED[] = "STORED\r\n";
    if (count != 4) {
        fprintf(stderr, "usage: memcached_get PORT SIZE MILLISECONDS\n");
        return 2;
    }
    size_t size = strtoul(arguments[2], NULL, 10);
    uint64_t duration = strtoull(arguments[3], NULL, 10) * 1000000;
    char *expected = malloc(size + 128), *answer = malloc(size + 128);
    if (!expected || !answer)
        fail("memory");
    /* The head of an answer, its value, and its end. */
    size_t head = sprintf(expected, "VALUE value 0 %zu\r\n", size);
    for (size_t i = 0; i < size; i++)
        expected[head + i] = 'a' + i % 26;
    memcpy(expected + head + size, "\r\nEND\r\n", 7);
    size_t length = head + size + 7;

    int connection = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), yes = 1;
    struct sockaddr_in server = { .sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(arguments[1])) };
    server.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (connection < 0 || connect(connection, (struct sockaddr *)&server, sizeof server) < 0)
        fail("connect");
    if (setsockopt(connection, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes) < 0)
        fail("TCP_NODELAY");

    char command[64];
    send_all(connection, command, sprintf(command, "set value 0 0 %zu\r\n", size), 0);
    send_all(connection, expected + head, size + 2, 0);
    receive_all(connection, answer, sizeof STORED - 1, 0);
    if (memcmp(answer, STORED, sizeof STORED - 1) != 0) {
        errno = 0;
        fail("set");
    }
    for (int i = 0; i < WARM_REQUESTS; i++) {
        send_all(connection, GET, sizeof GET - 1, 0);
        receive_all(connection, answer, length, 0);
        if (memcmp(answer, expected, length) != 0) {
            errno = 0;
            fail("get");
        }
    }
    uint64_t began = now_ns(), before = began, after = began, requests = 0;
    while (after - began < duration) {
        send_all(connection, GET, sizeof GET - 1, 0);
        receive_all(connection, answer, length, 0);
        after = now_ns();
        count_latency(after - before);
        before = after;
        requests++;
    }
    printf("%llu %llu %llu\n", (unsigned long long)requests, (unsigned long long)(after - began),
           (unsigned long long)percentile(requests, 0.99));
    return 0;
}
