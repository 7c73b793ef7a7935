/* How bytes get into a socket and out of it: calls of every kind, stdio, corks, files, pipes; and what is left of them when
 * one end is killed. */
#include "lane.h"
#include <sys/sendfile.h>

#define ROUNDS 200

/* Every call that sends, and every one that receives, in turn, in one conversation. */
static void put_some_way(struct wire *wire, size_t length, unsigned way) {
    unsigned char *bytes = (unsigned char *)pattern(wire->out, wire->sent);
    size_t third = length / 3;
    struct iovec parts[3] = {{bytes, third}, {bytes + third, 0}, {bytes + third, length - third}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 3};
    struct mmsghdr messages[2] = {{.msg_hdr = {.msg_iov = &parts[0], .msg_iovlen = 1}},
                                  {.msg_hdr = {.msg_iov = &parts[2], .msg_iovlen = 1}}};
    ssize_t sent;
    switch (way % 8) {
    case 0: sent = write(wire->fd, bytes, length); break;
    case 1: sent = send(wire->fd, bytes, length, 0); break;
    case 2: sent = sendto(wire->fd, bytes, length, MSG_NOSIGNAL, NULL, 0); break;
    case 3: sent = writev(wire->fd, parts, 3); break;
    case 4: sent = sendmsg(wire->fd, &message, 0); break;
    case 5: {
        int count = sendmmsg(wire->fd, messages, 2, 0);
        CHECK(count == 2);
        sent = messages[0].msg_len + messages[1].msg_len;
        break;
    }
    case 6: sent = pwritev2(wire->fd, parts, 3, -1, 0); break;
    default: sent = send(wire->fd, bytes, length, MSG_DONTWAIT); break;
    }
    if (sent != (ssize_t)length) die("way %u sent %zd of %zu", way % 8, sent, length);
    wire->sent += sent;
}

static void take_some_way(struct wire *wire, size_t length, unsigned way) {
    while (length > 0) {
        unsigned char bytes[4096], peeked[64];
        size_t third = length / 3;
        struct iovec parts[3] = {{bytes, third}, {bytes + third, 0}, {bytes + third, length - third}};
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = 3};
        struct mmsghdr messages[1] = {{.msg_hdr = message}};
        ssize_t got, seen;
        switch (way % 8) {
        case 0: got = read(wire->fd, bytes, length); break;
        case 1: got = recv(wire->fd, bytes, length, MSG_WAITALL); break;
        case 2: got = recvfrom(wire->fd, bytes, length, 0, NULL, NULL); break;
        case 3: got = readv(wire->fd, parts, 3); break;
        case 4: got = recvmsg(wire->fd, &message, 0); break;
        case 5: got = recvmmsg(wire->fd, messages, 1, 0, NULL) == 1 ? (ssize_t)messages[0].msg_len : -1; break;
        case 6: got = preadv2(wire->fd, parts, 3, -1, 0); break;
        default:
            /* What is looked at is what is read then. */
            seen = recv(wire->fd, peeked, length < sizeof peeked ? length : sizeof peeked, MSG_PEEK);
            CHECK(seen > 0);
            got = recv(wire->fd, bytes, seen, 0);
            if (got != seen || memcmp(bytes, peeked, got) != 0) die("%zd bytes were looked at, %zd read", seen, got);
        }
        if (got <= 0) die("way %u: received %zd of %zu", way % 8, got, length);
        verify(wire, bytes, got);
        length -= got;
    }
}

static void calls_server(int listener) {
    struct wire wire = server_end(accept_one(listener), 0);
    answer_polling(&wire, ROUNDS);
    for (unsigned number = 0; number < 1600; number++) {
        take_some_way(&wire, round_length(number), number);
        put_some_way(&wire, round_length(number + 5), number / 8);
    }
    hold();
    say("server done");
}

static void calls_client(int port) {
    struct wire wire = client_end(connect_to(port), 0);
    ask_polling(&wire, ROUNDS);
    for (unsigned number = 0; number < 1600; number++) {
        put_some_way(&wire, round_length(number), number / 8);
        take_some_way(&wire, round_length(number + 5), number);
    }
    expect_end(&wire);
    say("client done");
}

/* A lot, both ways at once, in pieces of every size. */
static void *put_lots(void *argument) {
    struct wire *wire = argument;
    for (unsigned number = 0; wire->sent < 24 << 20; number++) put(wire, 1 + number * 7919u % 70000);
    CHECK(shutdown(wire->fd, SHUT_WR) == 0);
    return NULL;
}

static void lots(struct wire *wire) {
    pthread_t writer;
    struct wire outward = *wire;
    CHECK(pthread_create(&writer, NULL, put_lots, &outward) == 0);
    static __thread unsigned char bytes[100000];
    ssize_t got;
    for (unsigned number = 0; (got = recv(wire->fd, bytes, 1 + number * 104729u % sizeof bytes, 0)) > 0; number++)
        verify(wire, bytes, got);
    CHECK(got == 0);
    CHECK(pthread_join(writer, NULL) == 0);
    say("sent %llu got %llu", (unsigned long long)outward.sent, (unsigned long long)wire->got);
}

static void lots_server(int listener) {
    struct wire wire = server_end(accept_one(listener), 0);
    answer_polling(&wire, ROUNDS);
    lots(&wire);
    hold();
}

static void lots_client(int port) {
    struct wire wire = client_end(connect_to(port), 0);
    ask_polling(&wire, ROUNDS);
    lots(&wire);
}

/* Lines by stdio, in the ways of real programs: two FILEs on one socket, one for both, fgets after recv, dprintf, and a
 * header by fgets whose body is read by fread. */
static void stdio_server(int listener) {
    for (unsigned turn = 0; turn < 3; turn++) {
        int fd = accept_one(listener);
        struct wire wire = server_end(fd, 0);
        if (turn > 0) {
            answer_polling(&wire, ROUNDS);
            let_it_come(&wire);
        }
        FILE *input = fdopen(fd, turn == 2 ? "r+" : "r"), *output = turn == 2 ? input : fdopen(dup(fd), "w");
        CHECK(input != NULL && output != NULL);
        char line[256];
        unsigned lines = 0;
        while (fgets(line, sizeof line, input) != NULL) {
            unsigned number, length;
            lines++;
            if (sscanf(line, "body %u %u", &number, &length) == 2) {
                unsigned char body[512];
                CHECK(length <= sizeof body && fread(body, 1, length, input) == length);
                CHECK(memcmp(body, pattern(7, number), length) == 0);
            } else {
                CHECK(sscanf(line, "line %u", &number) == 1);
            }
            if (turn == 2) fseek(output, 0, SEEK_CUR);
            fprintf(output, "answer %u to %s", number, line);
            fflush(output);
        }
        CHECK(feof(input) && !ferror(input));
        say("turn %u: %u lines", turn, lines);
        if (output != input) fclose(output);
        fclose(input);
    }
}

static void stdio_client(int port) {
    for (unsigned turn = 0; turn < 3; turn++) {
        int fd = connect_to(port);
        struct wire wire = client_end(fd, 0);
        if (turn > 0) ask_polling(&wire, ROUNDS);
        FILE *input = fdopen(dup(fd), "r");
        setvbuf(input, NULL, turn == 0 ? _IOFBF : _IONBF, turn == 0 ? 4096 : 0);
        for (unsigned number = 0; number < 300; number++) {
            char question[64], expected[128], answer[128];
            if (number % 3 == 0) {
                unsigned char whole[700];
                unsigned length = 1 + number * 31 % 500;
                int head = snprintf(question, sizeof question, "body %u %u\n", number, length);
                memcpy(whole, question, head);
                memcpy(whole + head, pattern(7, number), length);
                CHECK(send(fd, whole, head + length, MSG_NOSIGNAL) == (ssize_t)(head + length));
            } else {
                snprintf(question, sizeof question, "line %u\n", number);
                if (number % 3 == 1) CHECK(dprintf(fd, "line %u\n", number) > 0);
                else CHECK(send(fd, question, strlen(question), MSG_NOSIGNAL) == (ssize_t)strlen(question));
            }
            snprintf(expected, sizeof expected, "answer %u to %s", number, question);
            if (turn > 0 && number % 2 == 0) {
                /* The buffer is empty, so both ways of reading are right. */
                size_t length = strlen(expected);
                for (size_t got = 0; got < length;) {
                    ssize_t part = recv(fd, answer + got, length - got, number % 4 ? MSG_DONTWAIT : 0);
                    if (part < 0 && errno == EAGAIN) continue;
                    CHECK(part > 0);
                    got += part;
                }
                answer[length] = 0;
            } else {
                CHECK(fgets(answer, sizeof answer, input) != NULL);
            }
            if (strcmp(answer, expected) != 0) die("turn %u, line %u: %s instead of %s", turn, number, answer, expected);
        }
        CHECK(shutdown(fd, SHUT_WR) == 0);
        char rest[16];
        CHECK(fgets(rest, sizeof rest, input) == NULL && feof(input));
        fclose(input);
        close(fd);
    }
    say("client done");
}

/* Corked writes and MSG_MORE: nothing of it is lost or out of order, and an uncorked whole arrives at once. */
static void cork_client(int port) {
    struct wire wire = client_end(connect_to(port), 0);
    ask_polling(&wire, ROUNDS);
    for (unsigned turn = 0; turn < 100; turn++) {
        int one = 1, zero = 0;
        if (turn % 2) {
            CHECK(setsockopt(wire.fd, IPPROTO_TCP, TCP_CORK, &one, sizeof one) == 0);
            put(&wire, 20);
            put(&wire, 3000);
            put(&wire, 5);
            CHECK(setsockopt(wire.fd, IPPROTO_TCP, TCP_CORK, &zero, sizeof zero) == 0);
        } else {
            for (unsigned part = 0; part < 3; part++) {
                size_t length = part == 0 ? 20 : part == 1 ? 3000 : 5;
                CHECK(send(wire.fd, pattern(wire.out, wire.sent), length, part < 2 ? MSG_MORE : 0) == (ssize_t)length);
                wire.sent += length;
            }
        }
        take_polling(&wire, 10);
        ask_polling(&wire, 10);
    }
    say("client done");
}

static void cork_server(int listener) {
    struct wire wire = server_end(accept_one(listener), 0);
    answer_polling(&wire, ROUNDS);
    for (unsigned turn = 0; turn < 100; turn++) {
        if (turn % 4 < 2) take(&wire, 3025);
        else take_polling(&wire, 3025);
        put(&wire, 10);
        answer_polling(&wire, 10);
    }
    expect_end(&wire);
    say("server done");
}

/* Urgent bytes, which are beside the stream and have a place in it. */
static void urgent_client(int port) {
    struct wire wire = client_end(connect_to(port), 0);
    ask_polling(&wire, ROUNDS);
    for (unsigned turn = 0; turn < 20; turn++) {
        put(&wire, 10);
        CHECK(send(wire.fd, "!", 1, MSG_OOB | MSG_NOSIGNAL) == 1);
        take_polling(&wire, 1);
        put(&wire, 10);
        ask_polling(&wire, 10);
    }
    say("client done");
}

static void urgent_server(int listener) {
    struct wire wire = server_end(accept_one(listener), 0);
    answer_polling(&wire, ROUNDS);
    for (unsigned turn = 0; turn < 20; turn++) {
        struct pollfd wait = {wire.fd, POLLPRI, 0};
        char byte = 0;
        int mark = -1;
        CHECK(poll(&wait, 1, 5000) == 1 && wait.revents == POLLPRI);
        CHECK(ioctl(wire.fd, SIOCATMARK, &mark) == 0 && mark == 0);
        unsigned char bytes[64];
        ssize_t got = recv(wire.fd, bytes, sizeof bytes, 0);
        if (got != 10) die("recv before the mark returned %zd", got);
        verify(&wire, bytes, got);
        CHECK(ioctl(wire.fd, SIOCATMARK, &mark) == 0 && mark == 1);
        CHECK(recv(wire.fd, &byte, 1, MSG_OOB) == 1 && byte == '!');
        put(&wire, 1);
        if (turn % 2) take(&wire, 10);
        else take_polling(&wire, 10);
        answer_polling(&wire, 10);
    }
    say("server done");
}

/* A file goes out by sendfile between records that do not. */
static void sendfile_server(int listener) {
    struct wire wire = server_end(accept_one(listener), 0);
    answer_polling(&wire, ROUNDS);
    for (unsigned turn = 0; turn < 10; turn++) {
        FILE *file = tmpfile();
        size_t length = turn % 2 ? 300000 : 2000;
        put(&wire, 100);
        for (size_t done = 0; done < length; done += 1000)
            CHECK(fwrite(pattern(wire.out, wire.sent + done), 1, 1000, file) == 1000);
        CHECK(fflush(file) == 0);
        off_t offset = 0;
        while ((size_t)offset < length) CHECK(sendfile(wire.fd, fileno(file), &offset, length - offset) > 0);
        fclose(file);
        wire.sent += length;
        put(&wire, 50);
        answer_polling(&wire, 10);
    }
    expect_end(&wire);
    say("server done");
}

static void sendfile_client(int port) {
    struct wire wire = client_end(connect_to(port), 0);
    ask_polling(&wire, ROUNDS);
    for (unsigned turn = 0; turn < 10; turn++) {
        if (turn % 4 < 2) take(&wire, 150 + (turn % 2 ? 300000 : 2000));
        else take_polling(&wire, 150 + (turn % 2 ? 300000 : 2000));
        ask_polling(&wire, 10);
    }
    say("client done");
}

/* A proxy that moves bytes from socket to pipe to socket, after it has read and written some itself. */
static int splice_some(int from, int to, int pipe_ends[2]) {
    ssize_t got = splice(from, NULL, pipe_ends[1], NULL, 65536, SPLICE_F_MOVE);
    if (got < 0) die("splice from the socket");
    for (ssize_t left = got; left > 0;) {
        ssize_t moved = splice(pipe_ends[0], NULL, to, NULL, left, SPLICE_F_MOVE);
        if (moved <= 0) die("splice to the socket returned %zd", moved);
        left -= moved;
    }
    return got > 0;
}

static void splicing_server(int listener) {
    int origin = listen_on(0, 0);
    pid_t child = fork_child();
    if (child == 0) {
        close(listener);
        CHECK(echo_until_end(accept_one(origin)) > 0);
        exit(0);
    }
    int back = connect_to(port_of(origin)), front = accept_one(listener);
    unsigned char bytes[4096];
    /* First by read and write. */
    for (uint64_t total = 0; total < 20100;) {
        ssize_t got = recv(front, bytes, sizeof bytes, 0);
        CHECK(got > 0 && send(back, bytes, got, MSG_NOSIGNAL) == got);
        for (ssize_t left = got; left > 0;) {
            ssize_t part = recv(back, bytes, left, 0);
            CHECK(part > 0 && send(front, bytes, part, MSG_NOSIGNAL) == part);
            left -= part;
        }
        total += got;
    }
    struct wire next = {.fd = front};
    let_it_come(&next);
    int forth_pipe[2], back_pipe[2];
    CHECK(pipe(forth_pipe) == 0 && pipe(back_pipe) == 0);
    for (int open = 3; open & 2;) {
        struct pollfd wait[2] = {{open & 1 ? front : -1, POLLIN, 0}, {back, POLLIN, 0}};
        CHECK(poll(wait, 2, 10000) > 0);
        if (wait[0].revents && !splice_some(front, back, forth_pipe)) {
            open &= ~1;
            CHECK(shutdown(back, SHUT_WR) == 0);
        }
        if (wait[1].revents && !splice_some(back, front, back_pipe)) open &= ~2;
    }
    close(front);
    expect_child(child);
    say("proxy done");
}

static void splicing_client(int port) {
    struct wire wire = echo_client(connect_to(port), 0);
    ask_echo(&wire, ROUNDS);
    for (unsigned turn = 0; turn < 10; turn++) {
        ask_echo(&wire, 20);
        put(&wire, 40000);
        take_polling(&wire, 40000);
    }
    CHECK(shutdown(wire.fd, SHUT_WR) == 0);
    expect_end(&wire);
    say("client done: %llu", (unsigned long long)wire.got);
}

/* The client is killed while it writes; what it had written arrives, and then the stream ends. How much that was is in a
 * file, which is told after each send. */
static uint64_t *progress_file(void) {
    CHECK(argument_count > 4);
    int fd = open(arguments[4], O_RDWR);
    uint64_t *progress = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(fd >= 0 && progress != MAP_FAILED);
    close(fd);
    return progress;
}

static void killed_writer_client(int port) {
    uint64_t *progress = progress_file();
    struct wire wire = client_end(connect_to(port), 0);
    ask_polling(&wire, ROUNDS);
    say("now");
    for (unsigned number = 0;; number++) {
        put(&wire, 1 + number * 7919u % (number % 8 ? 300 : 40000));
        __atomic_store_n(progress, wire.sent, __ATOMIC_RELEASE);
    }
}

static void killed_writer_server(int listener) {
    uint64_t *progress = progress_file();
    struct wire wire = server_end(accept_one(listener), 0);
    static unsigned char bytes[50000];
    answer_polling(&wire, ROUNDS);
    ssize_t got;
    double began = now_s();
    for (unsigned number = 0;; number++) {
        /* Both kinds of reader: one that polls, one that sleeps. */
        got = recv(wire.fd, bytes, 1 + number * 104729u % sizeof bytes, number % 2 ? MSG_DONTWAIT : 0);
        if (got < 0 && errno == EAGAIN) continue;
        if (got <= 0) break;
        verify(&wire, bytes, got);
        CHECK(now_s() - began < 15);
    }
    if (got != 0) die("recv returned %zd", got);
    uint64_t written = __atomic_load_n(progress, __ATOMIC_ACQUIRE);
    if (wire.got < written)
        die("%llu bytes were written, %llu arrived", (unsigned long long)written, (unsigned long long)wire.got);
    say("everything that was written, then the end");
}

/* The client is killed while it reads; the writer hears of it. */
static void killed_reader_client(int port) {
    struct wire wire = client_end(connect_to(port), 0);
    ask_polling(&wire, ROUNDS);
    say("now");
    for (unsigned number = 0;; number++) {
        if (number % 2) take(&wire, 1000);
        else take_polling(&wire, 1000);
    }
}

static void killed_reader_server(int listener) {
    struct wire wire = server_end(accept_one(listener), 0);
    answer_polling(&wire, ROUNDS);
    double began = now_s();
    for (unsigned number = 0;; number++) {
        ssize_t sent = send(wire.fd, pattern(wire.out, wire.sent), 1 + number * 7919u % 5000, MSG_NOSIGNAL);
        if (sent < 0) break;
        wire.sent += sent;
        CHECK(now_s() - began < 15);
    }
    CHECK(errno == EPIPE || errno == ECONNRESET);
    CHECK(send(wire.fd, "x", 1, MSG_NOSIGNAL) < 0);
    char byte;
    ssize_t got = recv(wire.fd, &byte, 1, 0);
    CHECK(got == 0 || (got < 0 && errno == ECONNRESET));
    say("broken");
}

/* Killed in the middle of a conversation: an end or a reset, nothing else. */
static void killed_talker_client(int port) {
    struct wire wire = client_end(connect_to(port), 0);
    ask_polling(&wire, ROUNDS);
    say("now");
    for (;;) {
        ask_polling(&wire, ROUNDS);
        ask(&wire, ROUNDS);
    }
}

static void killed_talker_server(int listener) {
    struct wire wire = server_end(accept_one(listener), 0);
    answer_polling(&wire, ROUNDS);
    for (unsigned number = 0;;) {
        unsigned char bytes[512];
        size_t missing = round_length(number % ROUNDS);
        ssize_t got = 0;
        while (missing > 0 && (got = recv(wire.fd, bytes, missing, 0)) > 0) {
            verify(&wire, bytes, got);
            missing -= got;
        }
        if (got == 0 || (got < 0 && errno == ECONNRESET)) break;
        CHECK(got > 0);
        ssize_t sent = send(wire.fd, pattern(wire.out, wire.sent), round_length(number % ROUNDS + 5), MSG_NOSIGNAL);
        if (sent < 0 && (errno == EPIPE || errno == ECONNRESET)) break;
        CHECK(sent > 0);
        wire.sent += sent;
        number++;
    }
    say("ended");
}

/* Calls that carry more than bytes, an address, control data or flags, and between them calls that carry bytes only: what
 * comes first stays first. */
static void put_with_more(struct wire *wire, size_t length, unsigned way) {
    struct sockaddr_in peer;
    socklen_t peer_length = sizeof peer;
    CHECK(getpeername(wire->fd, (struct sockaddr *)&peer, &peer_length) == 0);
    struct iovec part = {(unsigned char *)pattern(wire->out, wire->sent), length};
    struct msghdr named = {.msg_iov = &part, .msg_iovlen = 1, .msg_name = &peer, .msg_namelen = peer_length};
    union {
        struct cmsghdr header;
        char room[CMSG_SPACE(sizeof(uint32_t))];
    } control = {.header = {CMSG_LEN(sizeof(uint32_t)), SOL_SOCKET, SO_TIMESTAMPING}}; /* no timestamp at all */
    struct msghdr controlled = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control.room};
    struct mmsghdr message = {.msg_hdr = named};
    ssize_t sent;
    switch (way % 6) {
    case 0: sent = sendto(wire->fd, part.iov_base, length, 0, (struct sockaddr *)&peer, peer_length); break;
    case 1: sent = sendmsg(wire->fd, &named, 0); break;
    case 2: sent = sendmsg(wire->fd, &controlled, 0); break;
    case 3: sent = sendmmsg(wire->fd, &message, 1, 0) == 1 ? (ssize_t)message.msg_len : -1; break;
    case 4: sent = pwritev2(wire->fd, &part, 1, -1, RWF_HIPRI); break;
    default: sent = pwritev2(wire->fd, &part, 1, -1, RWF_NOWAIT); break;
    }
    if (sent != (ssize_t)length) die("way %u sent %zd of %zu", way % 6, sent, length);
    wire->sent += sent;
}

static void take_with_flags(struct wire *wire, size_t length, unsigned way) {
    double began = now_s();
    while (length > 0) {
        unsigned char bytes[256];
        struct iovec part = {bytes, length};
        ssize_t got = preadv2(wire->fd, &part, 1, -1, way % 2 ? RWF_HIPRI : RWF_NOWAIT);
        if (now_s() - began > 3) die("preadv2 found nothing for 3 s");
        if (got < 0 && errno == EAGAIN && way % 2 == 0) continue;
        if (got <= 0) die("preadv2 returned %zd", got);
        verify(wire, bytes, got);
        length -= got;
    }
}

static void with_more_server(int listener) {
    struct wire wire = server_end(accept_one(listener), 0);
    alarm(5);
    answer_polling(&wire, ROUNDS);
    for (unsigned number = 0; number < 200; number++) {
        take_polling(&wire, 2 * round_length(number));
        put(&wire, 1);
    }
    for (unsigned number = 0; number < 200; number++) {
        if (number % 10 == 0) let_it_come(&wire);
        take_with_flags(&wire, round_length(number), number / 10);
        put(&wire, 1);
    }
    hold();
    say("server done");
}

static void with_more_client(int port) {
    struct wire wire = client_end(connect_to(port), 0);
    alarm(5);
    ask_polling(&wire, ROUNDS);
    for (unsigned number = 0; number < 200; number++) {
        put_with_more(&wire, round_length(number), number);
        put(&wire, round_length(number));
        take_polling(&wire, 1);
    }
    for (unsigned number = 0; number < 200; number++) {
        put(&wire, round_length(number));
        take_polling(&wire, 1);
    }
    expect_end(&wire);
    say("client done");
}

/* A stream that is opened on a connection while bytes wait there. */
static void opened_late_server(int listener) {
    for (unsigned turn = 0; turn < 6; turn++) {
        struct wire wire = server_end(accept_one(listener), 0);
        answer_polling(&wire, ROUNDS / 4);
        put(&wire, 1);
        take_polling(&wire, 1);
        sleep_us(30000);
        alarm(3);
        FILE *stream = fdopen(wire.fd, turn % 2 ? "r" : "r+");
        char line[64];
        if (stream == NULL || fgets(line, sizeof line, stream) == NULL) die("no line");
        alarm(0);
        fputs(line, stdout);
        if (turn == 5) hold();
        fclose(stream);
    }
}

static void opened_late_client(int port) {
    for (unsigned turn = 0; turn < 6; turn++) {
        struct wire wire = client_end(connect_to(port), 0);
        ask_polling(&wire, ROUNDS / 4);
        take_polling(&wire, 1);
        put(&wire, 1);
        /* It looked a moment ago, and looks no more before it opens. */
        char line[] = {'0' + turn, '\n'};
        CHECK(send(wire.fd, line, sizeof line, MSG_NOSIGNAL) == sizeof line);
        expect_end(&wire);
        close(wire.fd);
    }
    say("client done");
}

/* Bytes wait, and the pipe that they are to go to has no room: that is told, not waited for, and they stay where they are. */
static void full_pipe_server(int listener) {
    static unsigned char bytes[1 << 16];
    struct wire wire = server_end(accept_one(listener), 0);
    int ends[2];
    CHECK(pipe(ends) == 0);
    answer_polling(&wire, ROUNDS);
    for (unsigned turn = 0; turn < 10; turn++) {
        set_nonblocking(ends[1], 1);
        size_t filled = 0;
        for (ssize_t some; (some = write(ends[1], bytes, sizeof bytes)) > 0;) filled += some;
        set_nonblocking(ends[1], 0);
        put(&wire, 1);
        let_it_come(&wire);
        alarm(3);
        ssize_t moved = splice(wire.fd, NULL, ends[1], NULL, 4096, SPLICE_F_NONBLOCK);
        if (moved >= 0 || errno != EAGAIN) die("splice to a full pipe returned %zd", moved);
        alarm(0);
        while (filled > 0) {
            ssize_t got = read(ends[0], bytes, sizeof bytes);
            CHECK(got > 0);
            filled -= got;
        }
        memset(bytes, 0, sizeof bytes);
        for (size_t missing = 100; missing > 0; missing -= moved) {
            moved = splice(wire.fd, NULL, ends[1], NULL, missing, 0);
            CHECK(moved > 0 && read(ends[0], bytes, moved) == moved);
            verify(&wire, bytes, moved);
        }
        answer_polling(&wire, 20);
    }
    hold();
    say("server done");
}

static void full_pipe_client(int port) {
    struct wire wire = client_end(connect_to(port), 0);
    ask_polling(&wire, ROUNDS);
    for (unsigned turn = 0; turn < 10; turn++) {
        take_polling(&wire, 1);
        put(&wire, 100);
        ask_polling(&wire, 20);
    }
    expect_end(&wire);
    say("client done");
}

static const struct scenario scenarios[] = {
    {"calls", calls_server, calls_client},
    {"lots", lots_server, lots_client},
    {"stdio", stdio_server, stdio_client},
    {"cork", cork_server, cork_client},
    {"urgent", urgent_server, urgent_client},
    {"sendfile", sendfile_server, sendfile_client},
    {"splicing", splicing_server, splicing_client},
    {"killed_writer", killed_writer_server, killed_writer_client},
    {"killed_reader", killed_reader_server, killed_reader_client},
    {"killed_talker", killed_talker_server, killed_talker_client},
    {"with_more", with_more_server, with_more_client},
    {"opened_late", opened_late_server, opened_late_client},
    {"full_pipe", full_pipe_server, full_pipe_client},
};

int main(int argc, char **argv) {
    return play(scenarios, sizeof scenarios / sizeof *scenarios, argc, argv);
}
