/* Ping-pong and blast over a stream socket: an ordinary program, which knows nothing of Highwire.
 *
 *   pingpong listen  tcp PORT|unix PATH block|spin CPU     (PORT 0 is any; the port is printed)
 *   pingpong connect tcp PORT|unix PATH block|spin CPU
 *
 * Both ends stay connected and read the same commands from their standard input, one on a line:
 *
 *   ping SIZE WARM COUNT     the connecting end sends, the listening end sends back what it got
 *   blast SIZE WARM COUNT    the connecting end sends, the listening end acknowledges all with one byte
 *
 * What goes before the clock starts (WARM messages) carries a pattern that is checked byte by byte. Each command is
 * answered by a line on standard output: nanoseconds of the COUNT messages, and nanoseconds that this end waited for
 * its CPU meanwhile. `block` sleeps in send and recv; `spin` calls them with MSG_DONTWAIT again and again.
 */
#define _GNU_SOURCE
#include "stream.h"
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/un.h>
#include <unistd.h>

/* A command that takes longer has lost its other end, or waits for it in vain: SIGALRM ends the program. */
enum { PATIENCE_SECONDS = 20 };

/* Who receives a stream of small messages takes as many of them at a time as most programs do. */
enum { BLAST_BUFFER_LEAST = 65536 };

/* Prime, so that a piece that is lost or comes twice is noticed whatever its size. */
enum { PATTERN_PERIOD = 251 };

static int connection;
static int flags;
static char *buffer;
static size_t capacity;

/* What the kernel has kept this thread waiting for its CPU so far; 0 where it does not say. */
static uint64_t waited_ns(void)
{
    char text[96];
    unsigned long long ran, waited = 0;
    int file = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return 0;
    ssize_t length = read(file, text, sizeof text - 1);
    close(file);
    if (length > 0) {
        text[length] = 0;
        if (sscanf(text, "%llu %llu", &ran, &waited) != 2)
            waited = 0;
    }
    return waited;
}

static void fill(char *bytes, size_t size, uint64_t place)
{
    for (size_t i = 0; i < size; i++)
        bytes[i] = (char)((place + i) % PATTERN_PERIOD);
}

static void check(const char *bytes, size_t size, uint64_t place)
{
    for (size_t i = 0; i < size; i++) {
        if (bytes[i] != (char)((place + i) % PATTERN_PERIOD)) {
            fprintf(stderr, "pingpong: byte %llu of the stream: ", (unsigned long long)(place + i));
            errno = 0;
            fail("wrong contents");
        }
    }
}

static void ping(size_t size, size_t count, int checked)
{
    for (size_t i = 0; i < count; i++) {
        if (checked)
            fill(buffer, size, (uint64_t)i * size);
        send_all(connection, buffer, size, flags);
        if (checked)
            memset(buffer, 0xff, size);
        receive_all(connection, buffer, size, flags);
        if (checked)
            check(buffer, size, (uint64_t)i * size);
    }
}

static void pong(size_t size, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        receive_all(connection, buffer, size, flags);
        send_all(connection, buffer, size, flags);
    }
}

static void pour(size_t size, size_t count, int checked)
{
    char acknowledgement;
    for (size_t i = 0; i < count; i++) {
        if (checked)
            fill(buffer, size, (uint64_t)i * size);
        send_all(connection, buffer, size, flags);
    }
    receive_all(connection, &acknowledgement, 1, flags);
}

static void drain(size_t size, size_t count, int checked)
{
    uint64_t place = 0, end = (uint64_t)size * count;
    while (place < end) {
        size_t most = end - place < capacity ? end - place : capacity;
        size_t received = receive_some(connection, buffer, most, flags);
        if (checked)
            check(buffer, received, place);
        place += received;
    }
    send_all(connection, "", 1, flags);
}

static void burst(int listening, int blast, size_t size, size_t count, int checked)
{
    if (listening && blast)
        drain(size, count, checked);
    else if (listening)
        pong(size, count);
    else if (blast)
        pour(size, count, checked);
    else
        ping(size, count, checked);
}

static void serve_commands(int listening)
{
    char line[128], kind[16];
    size_t size, warm, count;
    while (fgets(line, sizeof line, stdin)) {
        int understood = sscanf(line, "%15s %zu %zu %zu", kind, &size, &warm, &count) == 4;
        int blast = understood && strcmp(kind, "blast") == 0;
        if (!understood || (!blast && strcmp(kind, "ping") != 0) || size == 0) {
            fprintf(stderr, "pingpong: not understood: %s", line);
            exit(2);
        }
        size_t needed = size > BLAST_BUFFER_LEAST ? size : BLAST_BUFFER_LEAST;
        if (needed > capacity) {
            free(buffer);
            buffer = aligned_alloc(4096, (needed + 4095) / 4096 * 4096);
            if (!buffer)
                fail("memory");
            memset(buffer, 1, needed);
            capacity = needed;
        }
        alarm(PATIENCE_SECONDS);
        burst(listening, blast, size, warm, 1);
        uint64_t waited = waited_ns();
        uint64_t began = now_ns();
        burst(listening, blast, size, count, 0);
        uint64_t took = now_ns() - began;
        waited = waited_ns() - waited;
        alarm(0);
        printf("%llu %llu\n", (unsigned long long)took, (unsigned long long)waited);
        fflush(stdout);
    }
}

static int make_socket(const char *family, const char *place, struct sockaddr_storage *name, socklen_t *length)
{
    memset(name, 0, sizeof *name);
    if (strcmp(family, "tcp") == 0) {
        struct sockaddr_in *internet = (struct sockaddr_in *)name;
        internet->sin_family = AF_INET;
        internet->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        internet->sin_port = htons((uint16_t)atoi(place));
        *length = sizeof *internet;
    } else {
        struct sockaddr_un *local = (struct sockaddr_un *)name;
        local->sun_family = AF_UNIX;
        if (strlen(place) >= sizeof local->sun_path) {
            errno = ENAMETOOLONG;
            fail(place);
        }
        strcpy(local->sun_path, place);
        *length = sizeof *local;
    }
    int made = socket(name->ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (made < 0)
        fail("socket");
    return made;
}

int main(int count, char **arguments)
{
    if (count != 6) {
        fprintf(stderr, "usage: pingpong listen|connect tcp|unix PORT|PATH block|spin CPU\n");
        return 2;
    }
    int listening = strcmp(arguments[1], "listen") == 0;
    int internet = strcmp(arguments[2], "tcp") == 0;
    flags = strcmp(arguments[4], "spin") == 0 ? MSG_DONTWAIT : 0;
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    CPU_SET(atoi(arguments[5]), &cpus);
    if (sched_setaffinity(0, sizeof cpus, &cpus) < 0)
        fail("sched_setaffinity");

    struct sockaddr_storage name;
    socklen_t length;
    int made = make_socket(arguments[2], arguments[3], &name, &length);
    alarm(PATIENCE_SECONDS);
    if (listening) {
        if (bind(made, (struct sockaddr *)&name, length) < 0 || listen(made, 1) < 0)
            fail("listen");
        if (internet) {
            if (getsockname(made, (struct sockaddr *)&name, &length) < 0)
                fail("getsockname");
            printf("%d\n", ntohs(((struct sockaddr_in *)&name)->sin_port));
        } else {
            printf("%s\n", arguments[3]);
        }
        fflush(stdout);
        connection = accept4(made, NULL, NULL, SOCK_CLOEXEC);
        if (connection < 0)
            fail("accept");
        close(made);
    } else {
        if (connect(made, (struct sockaddr *)&name, length) < 0)
            fail("connect");
        connection = made;
        printf("connected\n");
        fflush(stdout);
    }
    alarm(0);
    int yes = 1;
    if (internet && setsockopt(connection, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes) < 0)
        fail("TCP_NODELAY");
    serve_commands(listening);
    return 0;
}
