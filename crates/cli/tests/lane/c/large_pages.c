// Preloaded: a kernel with pages of 64 KiB, as far as programs are told.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/auxv.h>

unsigned long getauxval(unsigned long type) {
    if (type == AT_PAGESZ)
        return 65536;
    unsigned long (*next)(unsigned long) = (unsigned long (*)(unsigned long))dlsym(RTLD_NEXT, "getauxval");
    return next(type);
}
