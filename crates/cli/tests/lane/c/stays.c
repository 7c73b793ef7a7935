/* Says its arguments, and stays until its standard input ends. With FILTER in its environment it limits its system calls to
 * all that there are, and becomes the program that its arguments name. With EXECUTE it becomes that one in another way, without
 * an environment. */
#include "lane.h"
#include <linux/filter.h>
#include <linux/seccomp.h>

int main(int argc, char **argv) {
    if (getenv("FILTER") != NULL) {
        struct sock_filter all[] = {{BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ALLOW}};
        struct sock_fprog filter = {1, all};
        CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
        CHECK(unsetenv("FILTER") == 0);
        CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0);
        execv(argv[1], argv + 1);
        die("execv of %s", argv[1]);
    }
    const char *execute = getenv("EXECUTE");
    if (execute != NULL) {
        char *const none[] = {NULL}, *name = strrchr(argv[1], '/');
        *name = 0;
        int folder = open(argv[1], O_PATH);
        *name = '/';
        int program = open(argv[1], O_RDONLY);
        if (strcmp(execute, "at") == 0) execveat(folder, name + 1, argv + 1, none, 0);
        if (strcmp(execute, "in") == 0) syscall(SYS_execveat, AT_FDCWD, argv[1], argv + 1, none, 0);
        if (strcmp(execute, "by") == 0) fexecve(program, argv + 1, none);
        die("another way to execute %s", argv[1]);
    }
    for (int number = 1; number < argc; number++) say("%s", argv[number]);
    hold();
    return 7;
}
