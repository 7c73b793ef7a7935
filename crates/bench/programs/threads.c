/* Requests per second over many connections, each of which has a thread of the server.
 *
 *   threads serve PORT
 *   threads ask PORT CONNECTIONS MILLISECONDS
 *
 * The server answers with what it was sent. The client has one thread, which asks over one connection after the other, and
 * prints one line: requests in the time measured, that time in nanoseconds, and the 99th percentile of the latency in
 * nanoseconds. Every answer is checked.
 */
#define _GNU_SOURCE
#include "stream.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

enum { SIZE = 64, CONNECTIONS_MAX = 8192, STACK = 128 * 1024, LATENCIES_MAX = 1 << 20 };
/* So many that whoever makes a connection fast has done so. */
enum { WARM_ROUNDS = 12 };

static int connections[CONNECTIONS_MAX];
static uint64_t latencies[LATENCIES_MAX];

static struct sockaddr_in address_of(const char *port)
{
    struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(port)) };
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return address;
}

static void without_delay(int connection)
{
    int yes = 1;
    if (setsockopt(connection, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes) < 0)
        fail("TCP_NODELAY");
}

static void *answer(void *argument)
{
    int connection = (int)(intptr_t)argument;
    char bytes[SIZE];
    for (;;) {
        size_t have = 0;
        while (have < SIZE) {
            ssize_t received = recv(connection, bytes + have, SIZE - have, 0);
            if (received < 0 && errno == EINTR)
                continue;
            if (received <= 0) {
                close(connection);
                return NULL;
            }
            have += (size_t)received;
        }
        for (size_t gone = 0; gone < SIZE;) {
            ssize_t sent = send(connection, bytes + gone, SIZE - gone, MSG_NOSIGNAL);
            if (sent < 0 && errno == EINTR)
                continue;
            if (sent < 0) {
                close(connection);
                return NULL;
            }
            gone += (size_t)sent;
        }
    }
}

static void serve(const char *port)
{
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), yes = 1;
    struct sockaddr_in address = address_of(port);
    pthread_attr_t small;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (listener < 0 || bind(listener, (struct sockaddr *)&address, sizeof address) < 0 || listen(listener, 4096) < 0)
        fail("listen");
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, STACK);
    pthread_attr_setdetachstate(&small, PTHREAD_CREATE_DETACHED);
    for (;;) {
        pthread_t thread;
        int connection = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (connection < 0) {
            if (errno == EINTR || errno == ECONNABORTED)
                continue;
            fail("accept");
        }
        without_delay(connection);
        if ((errno = pthread_create(&thread, &small, answer, (void *)(intptr_t)connection)) != 0)
            fail("a thread");
    }
}

static void ask(int connection, uint64_t number)
{
    char question[SIZE], received[SIZE];
    for (int i = 0; i < SIZE; i++)
        question[i] = (char)(number * 31 + (uint64_t)i);
    send_all(connection, question, SIZE, 0);
    receive_all(connection, received, SIZE, 0);
    if (memcmp(question, received, SIZE) != 0) {
        errno = 0;
        fail("answer");
    }
}

static int by_size(const void *left, const void *right)
{
    uint64_t a = *(const uint64_t *)left, b = *(const uint64_t *)right;
    return a < b ? -1 : a > b;
}

static void ask_all(const char *port, int count, uint64_t duration)
{
    struct sockaddr_in address = address_of(port);
    for (int i = 0; i < count; i++) {
        connections[i] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (connections[i] < 0 || connect(connections[i], (struct sockaddr *)&address, sizeof address) < 0)
            fail("connect");
        without_delay(connections[i]);
    }
    uint64_t requests = 0;
    for (int round = 0; round < WARM_ROUNDS; round++)
        for (int i = 0; i < count; i++)
            ask(connections[i], requests++);
    uint64_t began = now_ns(), before = began, after = began;
    for (requests = 0; after - began < duration; requests++) {
        ask(connections[requests % (uint64_t)count], requests);
        after = now_ns();
        latencies[requests % LATENCIES_MAX] = after - before;
        before = after;
    }
    uint64_t known = requests < LATENCIES_MAX ? requests : LATENCIES_MAX;
    qsort(latencies, known, sizeof *latencies, by_size);
    printf("%llu %llu %llu\n", (unsigned long long)requests, (unsigned long long)(after - began),
           (unsigned long long)latencies[known * 99 / 100]);
}

int main(int count, char **arguments)
{
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
    int wanted = count == 5 ? atoi(arguments[3]) : 0;
    if (count == 3 && strcmp(arguments[1], "serve") == 0) {
        serve(arguments[2]);
    } else if (wanted > 0 && wanted <= CONNECTIONS_MAX && strcmp(arguments[1], "ask") == 0) {
        ask_all(arguments[2], wanted, strtoull(arguments[4], NULL, 10) * 1000000);
        return 0;
    }
    fprintf(stderr, "usage: threads serve PORT | threads ask PORT CONNECTIONS MILLISECONDS\n");
    return 2;
}
