// The hooks as libc's callers see them. Everything that may wait is called from here, through the real libc: its waits
// are cancellation points, and a thread that is cancelled or jumps out of a signal handler unwinds these frames only.
// No lock is held and nothing is left to do in a frame that waits. What a hook decides is decided in Rust (`hw_*`),
// which never waits.
//
//     real.h  functions.inc  libc's own functions        receiving.c  sending.c      bytes
//     decide.h               what Rust is asked          waiting.c                   poll, select, epoll
//     inside.h               threads that are torn away  descriptors.c  stdio.c      what a descriptor is
//     parts.h                lists of buffers            processes.c  by_number.c    fork, exec, sandboxes; syscall
#include "decide.h"
#include "real.h"

__attribute__((constructor)) void begin(void) {
    static int begun;
    if (begun)
        return;
    begun = 1;
    look_up();
    hw_begin();
}
