// Forks and new programs, who share connections; sandboxes, after which nothing is acquired.
#include "inside.h"

static pid_t fork_with(pid_t (*real)(void)) {
    hw_before_fork();
    pid_t child = real();
    KEEPING_ERRNO(hw_after_fork(child));
    return child;
}

pid_t EXPORTED(fork)(void) {
    ENSURE(fork)
    return fork_with(real_fork);
}

pid_t EXPORTED(_Fork)(void) {
    ENSURE(_Fork)
    return fork_with(real__Fork != NULL ? real__Fork : real_fork);
}

int EXPORTED(clone)(int (*function)(void *), void *stack, int flags, void *argument, ...) {
    ENSURE(clone)
    va_list rest;
    va_start(rest, argument);
    void *a = va_arg(rest, void *), *b = va_arg(rest, void *), *c = va_arg(rest, void *);
    va_end(rest);
    // Threads share everything; others are children, which learn it when they first call a hook.
    int is_thread = flags & CLONE_FILES, shares_memory = flags & CLONE_VM, is_awaited = flags & CLONE_VFORK;
    if (!is_thread) {
        if (!shares_memory)
            hw_before_fork();
        else if (is_awaited)
            hw_before_vfork();
        else
            hw_before_shared_memory();
    }
    int child = real_clone(function, stack, flags, argument, a, b, c);
    if (!is_thread) {
        if (shares_memory)
            KEEPING_ERRNO(hw_after_spawn(child > 0 ? child : 0));
        else
            KEEPING_ERRNO(hw_after_fork(child));
    }
    return child;
}

#define BEFORE_EXEC(call)                                                                                              \
    do {                                                                                                               \
        hw_before_exec();                                                                                              \
        return call;                                                                                                   \
    } while (0)

// TELL(program, searched, environment): the log names programs that will run plain.
#define TELL(program, searched, environment) KEEPING_ERRNO(hw_tell_program(program, searched, environment));

int EXPORTED(execve)(const char *path, char *const arguments[], char *const environment[]) {
    TELL(path, 0, environment)
    BEFORE_EXEC(real_execve(path, arguments, environment));
}
int EXPORTED(execv)(const char *path, char *const arguments[]) {
    TELL(path, 0, environ)
    ENSURE(execv) BEFORE_EXEC(real_execv(path, arguments));
}
int EXPORTED(execvp)(const char *file, char *const arguments[]) {
    TELL(file, 1, environ)
    ENSURE(execvp) BEFORE_EXEC(real_execvp(file, arguments));
}
int EXPORTED(execvpe)(const char *file, char *const arguments[], char *const environment[]) {
    TELL(file, 1, environment)
    ENSURE(execvpe) BEFORE_EXEC(real_execvpe(file, arguments, environment));
}
int EXPORTED(fexecve)(int fd, char *const arguments[], char *const environment[]) {
    KEEPING_ERRNO(hw_tell_program_at(fd, "", environment, AT_EMPTY_PATH));
    ENSURE(fexecve) BEFORE_EXEC(real_fexecve(fd, arguments, environment));
}

int EXPORTED(execveat)(int folder, const char *path, char *const arguments[], char *const environment[], int flags) {
    KEEPING_ERRNO(hw_tell_program_at(folder, path, environment, flags));
    ENSURE(execveat) BEFORE_EXEC(real_execveat(folder, path, arguments, environment, flags));
}

// The arguments of execl and its kin as an array on the stack.
#define COLLECT(first)                                                                                                 \
    va_list counting;                                                                                                  \
    va_start(counting, first);                                                                                         \
    size_t count = 1;                                                                                                  \
    while (va_arg(counting, char *) != NULL)                                                                           \
        count++;                                                                                                       \
    va_end(counting);                                                                                                  \
    char **arguments = __builtin_alloca((count + 1) * sizeof *arguments);                                              \
    va_list taking;                                                                                                    \
    va_start(taking, first);                                                                                           \
    arguments[0] = (char *)first;                                                                                      \
    for (size_t i = 1; i <= count; i++)                                                                                \
        arguments[i] = va_arg(taking, char *);

int EXPORTED(execl)(const char *path, const char *first, ...) {
    COLLECT(first)
    va_end(taking);
    return EXPORTED(execv)(path, arguments);
}

int EXPORTED(execlp)(const char *file, const char *first, ...) {
    COLLECT(first)
    va_end(taking);
    return EXPORTED(execvp)(file, arguments);
}

int EXPORTED(execle)(const char *path, const char *first, ...) {
    COLLECT(first)
    char *const *environment = va_arg(taking, char *const *);
    va_end(taking);
    return EXPORTED(execve)(path, arguments, environment);
}

// For a thread that is cancelled while it waits for a command.
static void ended(void *unused) {
    (void)unused;
    hw_after_spawn(0);
}

#define SPAWN(name, searched)                                                                                          \
    int EXPORTED(name)(pid_t *child, const char *program, const posix_spawn_file_actions_t *actions,                   \
                       const posix_spawnattr_t *attributes, char *const arguments[], char *const environment[]) {      \
        ENSURE(name)                                                                                                   \
        pid_t started = 0;                                                                                             \
        TELL(program, searched, environment)                                                                           \
        hw_before_spawn();                                                                                             \
        int result = real_##name(&started, program, actions, attributes, arguments, environment);                      \
        hw_after_spawn(result == 0 ? started : 0);                                                                     \
        if (child != NULL && result == 0)                                                                              \
            *child = started;                                                                                          \
        return result;                                                                                                 \
    }
SPAWN(posix_spawn, 0)
SPAWN(posix_spawnp, 1)

// libc starts these without the function that is hooked. The first has ended when it returns.
int EXPORTED(system)(const char *command) {
    ENSURE(system)
    if (command == NULL)
        return real_system(NULL);
    int result;
    TELL("/bin/sh", 0, environ)
    hw_before_spawn();
    pthread_cleanup_push(ended, NULL);
    result = real_system(command);
    pthread_cleanup_pop(0);
    KEEPING_ERRNO(hw_after_spawn(0));
    return result;
}

FILE *EXPORTED(popen)(const char *command, const char *kind) {
    ENSURE(popen)
    TELL("/bin/sh", 0, environ)
    hw_before_spawn();
    FILE *stream = real_popen(command, kind);
    KEEPING_ERRNO(stream != NULL ? hw_after_unknown_spawn() : hw_after_spawn(0));
    return stream;
}

// What the program that is started then has of it is not closed by exec.
int EXPORTED(posix_spawn_file_actions_adddup2)(posix_spawn_file_actions_t *actions, int fd, int to) {
    ENSURE(posix_spawn_file_actions_adddup2)
    if (concerns(fd))
        hw_handed(fd);
    return real_posix_spawn_file_actions_adddup2(actions, fd, to);
}

// ---- sandboxes

#define CONFINED(changes, call)                                                                                        \
    do {                                                                                                               \
        int confines = changes, result = call;                                                                         \
        if (result == 0 && confines)                                                                                   \
            hw_sandboxed();                                                                                            \
        return result;                                                                                                 \
    } while (0)

int EXPORTED(chroot)(const char *path) { CONFINED(1, real_chroot(path)); }
int EXPORTED(unshare)(int flags) { CONFINED(1, real_unshare(flags)); }
int EXPORTED(setns)(int fd, int type) { CONFINED(1, real_setns(fd, type)); }
int EXPORTED(setuid)(uid_t user) { CONFINED(user != geteuid(), real_setuid(user)); }
int EXPORTED(setgid)(gid_t group) { CONFINED(group != getegid(), real_setgid(group)); }
int EXPORTED(seteuid)(uid_t user) { CONFINED(user != geteuid(), real_seteuid(user)); }
int EXPORTED(setreuid)(uid_t real, uid_t effective) {
    CONFINED(effective != (uid_t)-1 && effective != geteuid(), real_setreuid(real, effective));
}
int EXPORTED(setresuid)(uid_t real, uid_t effective, uid_t saved) {
    CONFINED(effective != (uid_t)-1 && effective != geteuid(), real_setresuid(real, effective, saved));
}
int EXPORTED(prctl)(int option, unsigned long a, unsigned long b, unsigned long c, unsigned long d) {
    if (option == 22) // PR_SET_SECCOMP
        hw_sandboxed();
    return real_prctl(option, a, b, c, d);
}
