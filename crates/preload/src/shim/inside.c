#include "inside.h"

__thread struct inside inside;

void cancelled(void *record) {
    (void)record;
    struct inside stale = inside;
    inside.kind = OUTSIDE;
    hw_abandoned(&stale);
}

int is_elsewhere(void) {
    stack_t stack;
    int elsewhere;
    KEEPING_ERRNO(elsewhere = sigaltstack(NULL, &stack) == 0 && (stack.ss_flags & SS_ONSTACK));
    return elsewhere;
}
