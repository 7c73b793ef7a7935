/* A library whose constructor, which runs before that of anything preloaded, calls one function of libc, by the name in FIRST,
 * before any other that Highwire hooks; and with -DUSER the program that is linked with it. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;
long first_result(void);

#ifdef USER
int main(void) {
    printf("%ld\n", first_result());
    return 0;
}
#else
static long result = -2;

static long status_of(pid_t child) {
    int status = -1;
    return waitpid(child, &status, 0) == child && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static int in_a_clone(void *unused) {
    (void)unused;
    _exit(3);
}

static int formatted(const char *format, ...) {
    va_list list;
    va_start(list, format);
    int written = vdprintf(2, format, list);
    va_end(list);
    return written;
}

__attribute__((constructor)) static void begin(void) {
    static char stack[65536];
    static char *command[] = {"sh", "-c", "exit 7", NULL};
    const char *first = getenv("FIRST");
    struct timeval at_once = {0, 0};
    struct timespec none = {0, 0};
    struct epoll_event event;
    pid_t child = 0;
    fd_set set;
    FD_ZERO(&set);
#define IS(name) (first != NULL && strcmp(first, name) == 0)
    if (IS("vfork")) {
        child = vfork();
        if (child == 0) _exit(6);
        result = status_of(child);
    } else if (IS("fork")) {
        child = fork();
        if (child == 0) _exit(4);
        result = status_of(child);
    } else if (IS("_Fork")) {
        child = _Fork();
        if (child == 0) _exit(5);
        result = status_of(child);
    } else if (IS("clone")) {
        result = status_of(clone(in_a_clone, stack + sizeof stack, SIGCHLD, NULL));
    } else if (IS("posix_spawn")) {
        result = posix_spawn(&child, "/bin/sh", NULL, NULL, command, environ) == 0 ? status_of(child) : -1;
    } else if (IS("posix_spawnp")) {
        result = posix_spawnp(&child, "sh", NULL, NULL, command, environ) == 0 ? status_of(child) : -1;
    } else if (IS("execv")) {
        unsetenv("FIRST");
        execv("/bin/sh", command);
    } else if (IS("execvp")) {
        unsetenv("FIRST");
        execvp("sh", command);
    } else if (IS("execvpe")) {
        unsetenv("FIRST");
        execvpe("sh", command, environ);
    } else if (IS("fexecve")) {
        unsetenv("FIRST");
        int file = open("/bin/sh", O_RDONLY | O_CLOEXEC);
        fexecve(file, command, environ);
    } else if (IS("execveat")) {
        unsetenv("FIRST");
        execveat(AT_FDCWD, "/bin/sh", command, environ, 0);
    } else if (IS("posix_spawn_file_actions_adddup2")) {
        posix_spawn_file_actions_t actions;
        result = posix_spawn_file_actions_init(&actions) == 0 && posix_spawn_file_actions_adddup2(&actions, 1, 40) == 0;
        posix_spawn_file_actions_destroy(&actions);
    } else if (IS("system")) {
        unsetenv("FIRST");
        result = system("exit 8");
    } else if (IS("popen")) {
        unsetenv("FIRST");
        FILE *stream = popen("exit 9", "r");
        result = stream != NULL ? pclose(stream) : -1;
    } else if (IS("select")) {
        result = select(0, NULL, NULL, NULL, &at_once);
    } else if (IS("pselect")) {
        result = pselect(0, &set, NULL, NULL, &none, NULL);
    } else if (IS("epoll_pwait2")) {
        result = epoll_pwait2(-1, &event, 1, &none, NULL);
    } else if (IS("closefrom")) {
        int high = open("/dev/null", O_RDONLY);
        closefrom(high);
        result = write(high, "", 0);
    } else if (IS("fdopen")) {
        result = fdopen(open("/dev/null", O_RDONLY), "r") != NULL;
    } else if (IS("vdprintf")) {
        result = formatted("%s", "abc");
    }
}

long first_result(void) {
    return result;
}
#endif
