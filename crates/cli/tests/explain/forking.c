/* A server of the old kind: it accepts, and a child that it forks serves. The child has made no socket of its own. */
#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

static void must(int good, const char *what)
{
    if (!good) {
        perror(what);
        exit(1);
    }
}

int main(int count, char **arguments)
{
    long rounds = count > 1 ? atol(arguments[1]) : 0;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    must(bind(listener, (struct sockaddr *)&address, length) == 0 && listen(listener, 1) == 0, "listen");
    must(getsockname(listener, (struct sockaddr *)&address, &length) == 0, "getsockname");
    printf("player: port %d\n", ntohs(address.sin_port));
    fflush(stdout);
    int connection = accept(listener, NULL, NULL);
    must(connection >= 0, "accept");
    pid_t child = fork();
    must(child >= 0, "fork");
    if (child == 0) {
        close(listener);
        char message[100];
        for (long round = 0; round < rounds; round++) {
            for (size_t done = 0; done < sizeof message;) {
                ssize_t bytes = recv(connection, message + done, sizeof message - done, 0);
                must(bytes > 0, "recv");
                done += bytes;
            }
            must(send(connection, message, sizeof message, 0) == sizeof message, "send");
        }
        printf("player: done %d\n", getpid());
        fflush(stdout);
        /* Whoever started it closes this when it has seen enough. */
        (void)!read(STDIN_FILENO, message, 1);
        return 0;
    }
    close(connection);
    must(waitpid(child, NULL, 0) == child, "waitpid");
    return 0;
}
