/* Something else that is preloaded: it says so when the program that it is preloaded into begins to speak. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <unistd.h>

int puts(const char *text) {
    static int (*real)(const char *);
    if (real == NULL) {
        real = (int (*)(const char *))dlsym(RTLD_NEXT, "puts");
        real("preloaded");
    }
    return real(text);
}
