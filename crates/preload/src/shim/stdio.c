// stdio, which reads and writes inside libc: a connection that it gets stays plain.
#include "inside.h"

FILE *EXPORTED(fdopen)(int fd, const char *mode) {
    ENSURE(fdopen)
    if (concerns(fd))
        hw_plain(fd, BY_STDIO);
    return real_fdopen(fd, mode);
}

int EXPORTED(vdprintf)(int fd, const char *format, va_list arguments) {
    ENSURE(vdprintf)
    if (concerns(fd))
        hw_plain(fd, BY_STDIO);
    return real_vdprintf(fd, format, arguments);
}

int EXPORTED(dprintf)(int fd, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int result = EXPORTED(vdprintf)(fd, format, arguments);
    va_end(arguments);
    return result;
}

int EXPORTED(__vdprintf_chk)(int fd, int flag, const char *format, va_list arguments) {
    (void)flag;
    return EXPORTED(vdprintf)(fd, format, arguments);
}

int EXPORTED(__dprintf_chk)(int fd, int flag, const char *format, ...) {
    (void)flag;
    va_list arguments;
    va_start(arguments, format);
    int result = EXPORTED(vdprintf)(fd, format, arguments);
    va_end(arguments);
    return result;
}
