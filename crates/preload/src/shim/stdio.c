// stdio, which reads and writes inside libc: a connection that it gets stays plain.
#include "inside.h"

// What the lane still has is in the file's buffer from the beginning, as if it had been read ahead.
static void read_ahead(FILE *file, int fd) {
    int there = 0;
    if (EXPORTED(ioctl)(fd, FIONREAD, &there) != 0 || there <= 0)
        return;
    // Like any buffer that a program gives to a file, it outlives it.
    size_t room = (size_t)there < BUFSIZ ? BUFSIZ : (size_t)there;
    char *buffer = malloc(room);
    if (buffer == NULL || setvbuf(file, buffer, _IOFBF, room) != 0)
        return;
    ssize_t bytes = EXPORTED(recv)(fd, buffer, (size_t)there, MSG_DONTWAIT);
    if (bytes > 0)
        file->_IO_read_end = buffer + bytes;
}

static ssize_t read_input(void *unused, char *into, size_t bytes) {
    (void)unused;
    return EXPORTED(read)(0, into, bytes);
}

static int close_input(void *unused) {
    (void)unused;
    return EXPORTED(close)(0);
}

// The program was started with a connection as its standard input: what stdio reads of it comes through the hooks. False
// where there is no memory for that.
int hw_replace_input(void) {
    FILE *file = fopencookie(NULL, "r", (cookie_io_functions_t){.read = read_input, .close = close_input});
    if (file == NULL)
        return 0;
    file->_fileno = 0;
    stdin = file;
    return 1;
}

FILE *EXPORTED(fdopen)(int fd, const char *mode) {
    ENSURE(fdopen)
    if (!concerns(fd))
        return real_fdopen(fd, mode);
    hw_plain(fd, BY_STDIO);
    FILE *file = real_fdopen(fd, mode);
    if (file != NULL && (file->_flags & 4) == 0 && hw_unread(fd) > 0) // _IO_NO_READS
        KEEPING_ERRNO(read_ahead(file, fd));
    return file;
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
