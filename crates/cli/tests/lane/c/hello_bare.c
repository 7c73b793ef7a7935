/* Says hello without any library: as a 32-bit program, and as a loader that is not glibc's. */
static long call(long number, long first, const void *second, long third) {
    long result;
#if defined(__i386__)
    __asm__ volatile("int $0x80" : "=a"(result) : "a"(number), "b"(first), "c"(second), "d"(third) : "memory");
#elif defined(__x86_64__)
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(first), "S"(second), "d"(third) : "rcx", "r11", "memory");
#endif
    return result;
}

#if defined(__i386__)
#define WRITE 4
#define EXIT 1
#else
#define WRITE 1
#define EXIT 60
#endif

__attribute__((noreturn)) void _start(void) {
    call(WRITE, 1, "hello\n", 6);
    call(EXIT, 7, 0, 0);
    for (;;) {}
}
