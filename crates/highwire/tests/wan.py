"""A path between two network namespaces: a delay each way, a rate and a queue that drops what it has no room for.

usage: wan.py NAMESPACE ADDRESS/PREFIX NAMESPACE ADDRESS/PREFIX BYTES_PER_SECOND DELAY_MS QUEUE_BYTES

Each namespace gets a TAP device with its address. Prints "ready"; ends when its standard input ends.
"""
import collections, ctypes, fcntl, os, select, struct, subprocess, sys, time

TUNSETIFF, IFF_TAP, IFF_NO_PI, CLONE_NEWNET = 0x400454CA, 2, 0x1000, 0x40000000


def tap(namespace, address, name):
    """The file of a new device in a namespace."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    subprocess.run(["ip", "link", "set", name, "netns", namespace], check=True)
    for command in (["address", "add", address, "dev", name], ["link", "set", name, "up"], ["link", "set", "lo", "up"]):
        subprocess.run(["ip", "-n", namespace, *command], check=True)
    return file


class Direction:
    def __init__(self, source, target, rate, delay, room):
        self.source, self.target, self.rate, self.delay, self.room = source, target, rate, delay, room
        self.free_at, self.waiting = 0.0, collections.deque()

    def take(self, now):
        for _ in range(64):
            try:
                frame = os.read(self.source, 65536)
            except BlockingIOError:
                return
            begin = max(now, self.free_at)
            # Bytes that wait for the path, of which there is room for so many.
            if (begin - now) * self.rate + len(frame) > self.room:
                continue
            self.free_at = begin + len(frame) / self.rate
            self.waiting.append((self.free_at + self.delay, frame))

    def give(self, now):
        while self.waiting and self.waiting[0][0] <= now:
            try:
                os.write(self.target, self.waiting.popleft()[1])
            except OSError:
                pass  # The other end is gone, or its queue is full.

    def next(self):
        return self.waiting[0][0] if self.waiting else float("inf")


def main():
    here, here_address, there, there_address, rate, delay, room = sys.argv[1:]
    files = tap(here, here_address, "wan-a"), tap(there, there_address, "wan-b")
    shape = float(rate), float(delay) / 1000, float(room)
    ways = Direction(*files, *shape), Direction(*files[::-1], *shape)
    print("ready", flush=True)
    while True:
        wait = min(way.next() for way in ways) - time.monotonic()
        ready, _, _ = select.select([*files, 0], [], [], max(0.0, min(wait, 0.1)))
        if 0 in ready and not os.read(0, 1):
            return
        now = time.monotonic()
        for way in ways:
            way.take(now)
            way.give(now)


main()
