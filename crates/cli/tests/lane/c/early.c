/* A library whose constructor does, before anything that is preloaded has begun, what libraries do there; and with -DUSER the
 * program that is linked with it. */
#define _GNU_SOURCE
#include <poll.h>
#include <sched.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include <fcntl.h>

extern char **environ;
const char *early_result(void);

#ifdef USER
int main(void) {
    printf("%s\n", early_result());
    return 0;
}
#else
static char result[1024];

static void note(const char *what, long value) {
    snprintf(result + strlen(result), sizeof result - strlen(result), "%s=%ld ", what, value);
}

static int in_a_clone(void *unused) {
    (void)unused;
    _exit(3);
}

static long status_of(pid_t child) {
    int status = -1;
    return waitpid(child, &status, 0) == child && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

__attribute__((constructor)) static void begin(void) {
    struct timeval at_once = {0, 0};
    struct timespec none = {0, 0};
    struct epoll_event event;
    struct pollfd nothing = {-1, 0, 0};
    fd_set set;
    int ends[2], unread = -1;
    char text[8] = "";
    FD_ZERO(&set);
    note("prctl", prctl(PR_GET_DUMPABLE));
    note("syscall", syscall(SYS_getpid) == getpid());
    note("select", select(0, NULL, NULL, NULL, &at_once));
    note("pselect", pselect(0, &set, NULL, NULL, &none, NULL));
    note("poll", poll(&nothing, 1, 0));
    note("ppoll", ppoll(&nothing, 1, &none, NULL));
    int epoll = epoll_create1(EPOLL_CLOEXEC);
    note("epoll_wait", epoll_wait(epoll, &event, 1, 0));
    note("epoll_pwait", epoll_pwait(epoll, &event, 1, 0, NULL));
    note("epoll_pwait2", epoll_pwait2(epoll, &event, 1, &none, NULL));
    note("close", close(epoll));
    note("socketpair", socketpair(AF_UNIX, SOCK_STREAM, 0, ends));
    note("dprintf", dprintf(ends[0], "%s", "abc"));
    note("ioctl", ioctl(ends[1], FIONREAD, &unread));
    note("unread", unread);
    note("read", read(ends[1], text, 2));
    FILE *file = fdopen(dup(ends[1]), "r");
    note("fdopen", file != NULL && fgetc(file) == 'c');
    note("fclose", fclose(file));
    pid_t child = fork();
    if (child == 0) _exit(4);
    note("fork", status_of(child));
    child = _Fork();
    if (child == 0) _exit(5);
    note("_Fork", status_of(child));
    child = vfork();
    if (child == 0) _exit(6);
    note("vfork", status_of(child));
    static char stack[65536];
    note("clone", status_of(clone(in_a_clone, stack + sizeof stack, SIGCHLD, NULL)));
    /* The programs that it starts are not to start programs in turn. */
    char *const none_of_it[] = {NULL}, *const command[] = {"sh", "-c", "exit 7", NULL};
    note("posix_spawn", posix_spawn(&child, "/bin/sh", NULL, NULL, command, none_of_it));
    note("status", status_of(child));
    child = fork();
    if (child == 0) {
        execve("/bin/sh", command, none_of_it);
        _exit(127);
    }
    note("execve", status_of(child));
    note("setuid", setuid(getuid()));
    note("setgid", setgid(getgid()));
    note("seteuid", seteuid(geteuid()));
    note("setresuid", setresuid(-1, -1, -1));
    int high = fcntl(ends[0], F_DUPFD, 500);
    note("close_range", close_range(high, high, 0));
    high = fcntl(ends[0], F_DUPFD, 500);
    closefrom(500);
    note("closefrom", fcntl(high, F_GETFD));
    close(ends[0]);
    close(ends[1]);
}

const char *early_result(void) {
    return result;
}
#endif
