// The look-up of libc's own functions, and system calls as they are: for before the constructor has run, and for looks
// that must not wait.
#include "real.h"
#include <dlfcn.h>
#include <link.h>
#include <string.h>

static inline long raw6(long number, long a, long b, long c, long d, long e, long f) {
#if defined(__x86_64__)
    long result;
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    register long r9 __asm__("r9") = f;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
#elif defined(__aarch64__)
    register long x8 __asm__("x8") = number;
    register long x0 __asm__("x0") = a;
    register long x1 __asm__("x1") = b;
    register long x2 __asm__("x2") = c;
    register long x3 __asm__("x3") = d;
    register long x4 __asm__("x4") = e;
    register long x5 __asm__("x5") = f;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
    return x0;
#else
#error "the preload library knows x86-64 and aarch64"
#endif
}

// For Rust: never a hook, never errno.
long hw_raw(long number, long a, long b, long c, long d, long e, long f) { return raw6(number, a, b, c, d, e, f); }

static long result_of(long raw) {
    if (unlikely((unsigned long)raw > -4096UL)) {
        errno = (int)-raw;
        return -1;
    }
    return raw;
}

#define A1(n, a) (n, (long)a, 0, 0, 0, 0, 0)
#define A2(n, a, b) (n, (long)a, (long)b, 0, 0, 0, 0)
#define A3(n, a, b, c) (n, (long)a, (long)b, (long)c, 0, 0, 0)
#define A4(n, a, b, c, d) (n, (long)a, (long)b, (long)c, (long)d, 0, 0)
#define A5(n, a, b, c, d, e) (n, (long)a, (long)b, (long)c, (long)d, (long)e, 0)
#define A6(n, a, b, c, d, e, f) (n, (long)a, (long)b, (long)c, (long)d, (long)e, (long)f)

#define REAL(ret, name, params, call)                                                                                  \
    static ret early_##name params { return (ret)result_of(raw6 call); }                                               \
    ret(*real_##name) params = early_##name;
#define LATE(ret, name, params) ret(*real_##name) params;
#include "functions.inc"
#undef REAL
#undef LATE

static void *next(const char *name, void *otherwise) {
    void *found = dlsym(RTLD_NEXT, name);
    return found != NULL ? found : otherwise;
}

#define REAL(ret, name, params, call) LATE(ret, name, params)
#define LATE(ret, name, params) real_##name = (ret(*) params)next(#name, (void *)real_##name);
void look_up(void) {
#include "functions.inc"
}

// The loader's list: a failing look-up by name would allocate its error.
static int is_sanitizer(struct dl_phdr_info *object, size_t size, void *unused) {
    static const char *const names[] = {"/libasan.so",       "/libtsan.so",       "/libhwasan.so",
                                        "/libclang_rt.asan", "/libclang_rt.tsan", "/libclang_rt.hwasan"};
    (void)size, (void)unused;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (object->dlpi_name != NULL && strstr(object->dlpi_name, names[i]) != NULL)
            return 1;
    return 0;
}

int hw_has_sanitizer(void) { return dl_iterate_phdr(is_sanitizer, NULL); }
