/* A client of web servers: files whose contents are known, fetched over connections that are kept.
 *
 *     web make DIRECTORY COUNT            makes the files
 *     web fetch PORT COUNT CONNECTIONS    fetches all of them, and compares each byte */
#include "lane.h"

static size_t file_length(unsigned number) {
    return 1 + number * 7919u % 2500;
}

static void make(const char *directory, unsigned count) {
    for (unsigned number = 0; number < count; number++) {
        char path[4096];
        snprintf(path, sizeof path, "%s/%u", directory, number);
        FILE *file = fopen(path, "w");
        CHECK(file != NULL && fwrite(pattern(3, number * 101u), 1, file_length(number), file) == file_length(number));
        CHECK(fclose(file) == 0);
    }
}

struct connection {
    int fd;
    unsigned number; /* what was asked for */
    int asked;
    char answer[8192];
    size_t length;
};

static unsigned reconnected;

static void ask_for(struct connection *connection, int port) {
    char request[128];
    int length = snprintf(request, sizeof request, "GET /%u HTTP/1.1\r\nHost: localhost\r\n\r\n", connection->number);
    for (unsigned attempt = 0;; attempt++) {
        if (connection->fd < 0) connection->fd = connect_to(port);
        if (send(connection->fd, request, length, MSG_NOSIGNAL) == length) break;
        /* A server that is about to go closes connections that rest. */
        CHECK(attempt < 3 && (errno == EPIPE || errno == ECONNRESET));
        close(connection->fd);
        connection->fd = -1;
        reconnected++;
    }
    connection->asked = 1;
    connection->length = 0;
}

/* Whether the answer is whole; it is right then. */
static int answered(struct connection *connection) {
    connection->answer[connection->length] = 0;
    char *body = strstr(connection->answer, "\r\n\r\n");
    if (body == NULL) return 0;
    body += 4;
    char *field = strstr(connection->answer, "Content-Length: ");
    if (strncmp(connection->answer, "HTTP/1.1 200", 12) != 0 || field == NULL || field > body)
        die("file %u: %.300s", connection->number, connection->answer);
    size_t expected = file_length(connection->number), there = connection->answer + connection->length - body;
    if (strtoul(field + 16, NULL, 10) != expected) die("file %u: %.300s", connection->number, connection->answer);
    if (there < expected) return 0;
    if (there > expected || memcmp(body, pattern(3, connection->number * 101u), expected) != 0)
        die("file %u: wrong contents, %zu bytes", connection->number, there);
    char *closing = strstr(connection->answer, "Connection: close");
    if (closing != NULL && closing < body) {
        close(connection->fd);
        connection->fd = -1;
        reconnected++;
    }
    return 1;
}

static void fetch(int port, unsigned count, unsigned connections) {
    struct connection *all = calloc(connections, sizeof *all);
    struct pollfd *waits = calloc(connections, sizeof *waits);
    unsigned next = 0, done = 0;
    for (unsigned which = 0; which < connections; which++) all[which].fd = -1;
    while (done < count) {
        for (unsigned which = 0; which < connections; which++) {
            if (!all[which].asked && next < count) {
                all[which].number = next++;
                ask_for(&all[which], port);
            }
            waits[which] = (struct pollfd){all[which].asked ? all[which].fd : -1, POLLIN, 0};
        }
        if (poll(waits, connections, 10000) <= 0) die("no answer for 10 s after %u files", done);
        for (unsigned which = 0; which < connections; which++) {
            struct connection *one = &all[which];
            if (!waits[which].revents) continue;
            ssize_t got = recv(one->fd, one->answer + one->length, sizeof one->answer - 1 - one->length, 0);
            if (got > 0) {
                one->length += got;
                if (answered(one)) {
                    one->asked = 0;
                    done++;
                }
                continue;
            }
            /* Closed before it began to answer: asked again. In the middle of an answer nobody may close. */
            if (one->length > 0 || (got < 0 && errno != ECONNRESET))
                die("file %u: recv returned %zd after %zu bytes", one->number, got, one->length);
            close(one->fd);
            one->fd = -1;
            reconnected++;
            CHECK(reconnected < count / 2 + 100);
            ask_for(one, port);
        }
    }
    hold();
    say("%u files", done);
}

int main(int argc, char **argv) {
    argument_count = argc;
    arguments = argv;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (argc == 4 && strcmp(argv[1], "make") == 0) {
        make(argv[2], atoi(argv[3]));
    } else if (argc == 5 && strcmp(argv[1], "fetch") == 0) {
        fetch(atoi(argv[2]), atoi(argv[3]), atoi(argv[4]));
    } else {
        return 2;
    }
    return 0;
}
