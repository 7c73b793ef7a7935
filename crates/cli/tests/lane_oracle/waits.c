/* The calls that wait for readiness, and what they say of each descriptor. */
#define _GNU_SOURCE
#include "oracle.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <time.h>

#include "raw.h"

enum { ASKED_NS = 200 * 1000, EVENTS_MAX = 16, CLOCK_SLACK_US = 50, LATE_US = 3 * 1000 * 1000 };

void describe_events(char *text, size_t room, uint32_t events)
{
    static const struct {
        uint32_t bit;
        const char *name;
    } names[] = {
        {EPOLLIN, "IN"}, {EPOLLPRI, "PRI"}, {EPOLLOUT, "OUT"}, {EPOLLERR, "ERR"}, {EPOLLHUP, "HUP"},
        {EPOLLRDHUP, "RDHUP"}, {EPOLLRDNORM, "RDNORM"}, {EPOLLRDBAND, "RDBAND"}, {EPOLLWRNORM, "WRNORM"},
        {EPOLLET, "ET"}, {EPOLLONESHOT, "ONESHOT"}, {EPOLLEXCLUSIVE, "EXCLUSIVE"}, {POLLNVAL, "NVAL"},
    };
    size_t used = 0;
    text[0] = 0;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (events & names[i].bit && used < room)
            used += (size_t)snprintf(text + used, room - used, "%s%s", used ? "|" : "", names[i].name);
    if (!used)
        snprintf(text, room, "0");
}

static void note_events(struct outcome *outcome, int slot, uint32_t events)
{
    char text[120];
    describe_events(text, sizeof text, events);
    note(outcome, " s%d=%s", slot, text);
}

/* Whether a wait took as long as it said; a spin must neither cut it short nor go on for ever. */
static void note_duration(const struct call *call, struct outcome *outcome, uint64_t began_us)
{
    uint64_t took_us = now_us() - began_us;
    if (outcome->result == 0 && call->timeout_ms > 0 && fault(11))
        took_us = 0;
    if (outcome->result == 0 && took_us + CLOCK_SLACK_US < (uint64_t)call->timeout_ms * 1000)
        note(outcome, " !! EARLY");
    if (took_us > (uint64_t)call->timeout_ms * 1000 + LATE_US)
        note(outcome, " !! LATE");
}

static struct timespec span(int ms)
{
    return (struct timespec){ms / 1000, (long)(ms % 1000) * 1000000};
}

static void wait_by_poll(const struct call *call, struct outcome *outcome)
{
    struct pollfd watch[WATCHED_MAX];
    for (int i = 0; i < call->watched; i++)
        watch[i] = (struct pollfd){descriptor_of(call->watch[i].slot), (short)call->watch[i].events, 0};
    struct timespec time = span(call->timeout_ms);
    outcome->result = call->way == BY_POLL ? poll(watch, (nfds_t)call->watched, call->timeout_ms)
                                           : ppoll(watch, (nfds_t)call->watched, &time, NULL);
    outcome->error = errno;
    if (outcome->result > 0 && fault(3))
        outcome->result = 0;
    for (int i = 0; outcome->result > 0 && i < call->watched; i++)
        if (watch[i].revents)
            note_events(outcome, call->watch[i].slot, (uint16_t)watch[i].revents);
}

static void wait_by_select(const struct call *call, struct outcome *outcome)
{
    fd_set readable, writable, exceptional;
    int highest = -1;
    FD_ZERO(&readable);
    FD_ZERO(&writable);
    FD_ZERO(&exceptional);
    for (int i = 0; i < call->watched; i++) {
        int descriptor = descriptor_of(call->watch[i].slot);
        if (call->watch[i].events & POLLIN)
            FD_SET(descriptor, &readable);
        if (call->watch[i].events & POLLOUT)
            FD_SET(descriptor, &writable);
        if (call->watch[i].events & POLLPRI)
            FD_SET(descriptor, &exceptional);
        highest = descriptor > highest ? descriptor : highest;
    }
    struct timeval time = {call->timeout_ms / 1000, (call->timeout_ms % 1000) * 1000};
    struct timespec fine = span(call->timeout_ms);
    outcome->result = call->way == BY_SELECT ? select(highest + 1, &readable, &writable, &exceptional, &time)
                                             : pselect(highest + 1, &readable, &writable, &exceptional, &fine, NULL);
    outcome->error = errno;
    for (int i = 0; outcome->result > 0 && i < call->watched; i++) {
        int descriptor = descriptor_of(call->watch[i].slot);
        uint32_t events = (FD_ISSET(descriptor, &readable) ? EPOLLIN : 0) |
                          (FD_ISSET(descriptor, &writable) ? EPOLLOUT : 0) |
                          (FD_ISSET(descriptor, &exceptional) ? EPOLLPRI : 0);
        if (events)
            note_events(outcome, call->watch[i].slot, events);
    }
}

void perform_wait(const struct call *call, struct outcome *outcome)
{
    uint64_t began = now_us();
    if (call->way == BY_POLL || call->way == BY_PPOLL)
        wait_by_poll(call, outcome);
    else
        wait_by_select(call, outcome);
    note_duration(call, outcome, began);
}

static int by_slot(const void *left, const void *right)
{
    uint32_t a = (uint32_t)((const struct epoll_event *)left)->data.u64;
    uint32_t b = (uint32_t)((const struct epoll_event *)right)->data.u64;
    return a < b ? -1 : a > b;
}

/* For each descriptor in each set: whether an edge-triggered watcher was told that it can be written to. */
static bool told_writable[SLOTS][SLOTS];

/* It can not be written to any more, so there will be another edge. */
void forget_writable(int slot)
{
    for (int set = 0; set < SLOTS; set++)
        told_writable[set][slot] = false;
}

/* With each packet that comes in, the kernel tells edge-triggered watchers once more that the socket can be written to.
 * Nobody is promised that; the first time, and after it could not be written to, it is. */
static int leave_out_repeated(struct epoll_event *events, int count, int set)
{
    int kept = 0;
    for (int i = 0; i < count; i++) {
        struct epoll_event event = events[i];
        int slot = (int)(uint32_t)event.data.u64;
        bool edge = event.data.u64 >> 32 & EPOLLET;
        if (edge && event.events & EPOLLOUT) {
            if (told_writable[set][slot])
                event.events &= ~(uint32_t)EPOLLOUT;
            told_writable[set][slot] = true;
        }
        if (event.events)
            events[kept++] = event;
    }
    return kept;
}

/* What came last by TCP is known to a set no later than this, while lanes have something to tell. */
static void let_the_kernel_be_asked(void)
{
    struct timespec time = {0, ASKED_NS};
    raw3(SYS_nanosleep, (long)&time, 0, 0);
}

void perform_epoll_wait(const struct call *call, struct outcome *outcome)
{
    struct epoll_event events[EVENTS_MAX];
    int set = descriptor_of(call->slot);
    struct timespec time = span(call->timeout_ms);
    let_the_kernel_be_asked();
    uint64_t began = now_us();
    int count;
    if (call->way == BY_EPOLL_WAIT)
        count = epoll_wait(set, events, EVENTS_MAX, call->timeout_ms);
    else if (call->way == BY_EPOLL_PWAIT)
        count = epoll_pwait(set, events, EVENTS_MAX, call->timeout_ms, NULL);
    else
        count = epoll_pwait2(set, events, EVENTS_MAX, &time, NULL);
    outcome->error = errno;
    outcome->result = count;
    note_duration(call, outcome, began);
    if (count > 0)
        count = leave_out_repeated(events, count, call->slot);
    if (count > 0 && fault(10))
        count = 0;
    outcome->result = count;
    /* In which order several are ready is not promised. */
    if (count > 1)
        qsort(events, (size_t)count, sizeof events[0], by_slot);
    for (int i = 0; i < count; i++)
        note_events(outcome, (int)(uint32_t)events[i].data.u64, events[i].events);
}

void perform_epoll_control(const struct call *call, struct outcome *outcome)
{
    if (call->kind == KIND_EPOLL_CREATE) {
        outcome->result = call->flags ? epoll_create1(EPOLL_CLOEXEC) : epoll_create(1);
        outcome->error = errno;
        remember_descriptor(call->slot, (int)outcome->result);
        memset(told_writable[call->slot], 0, sizeof told_writable[call->slot]);
        return;
    }
    /* What comes back with an event tells who is meant, and how it is watched. */
    struct epoll_event event = {(uint32_t)call->value, {.u64 = (uint64_t)call->value << 32 | (uint32_t)call->other}};
    outcome->result = epoll_ctl(descriptor_of(call->slot), call->way, descriptor_of(call->other),
                                call->way == EPOLL_CTL_DEL ? NULL : &event);
    outcome->error = errno;
    if (outcome->result == 0)
        told_writable[call->slot][call->other] = false;
}
