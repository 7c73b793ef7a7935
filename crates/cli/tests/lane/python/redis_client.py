"""Talks to redis in its own protocol: mixed commands under a prefix of its own, or a channel. Prints a digest of every answer.

    redis_client.py PORT mixed PREFIX COUNT
    redis_client.py PORT subscribe CHANNEL COUNT
    redis_client.py PORT publish CHANNEL COUNT
    redis_client.py PORT save
    redis_client.py PORT digest
"""

import hashlib
import random
import socket
import sys
import time


class Redis:
    def __init__(self, port):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=20)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.buffer = b""

    def send(self, *commands):
        parts = []
        for command in commands:
            parts.append(b"*%d\r\n" % len(command))
            for argument in command:
                argument = argument if isinstance(argument, bytes) else str(argument).encode()
                parts.append(b"$%d\r\n%s\r\n" % (len(argument), argument))
        self.socket.sendall(b"".join(parts))

    def more(self):
        data = self.socket.recv(65536)
        if not data:
            sys.exit("redis closed the connection")
        self.buffer += data

    def line(self):
        while b"\r\n" not in self.buffer:
            self.more()
        line, self.buffer = self.buffer.split(b"\r\n", 1)
        return line

    def answer(self):
        line = self.line()
        kind, rest = line[:1], line[1:]
        if kind in b"+-:":
            return line
        length = int(rest)
        if length < 0:
            return None
        if kind == b"*":
            return [self.answer() for _ in range(length)]
        while len(self.buffer) < length + 2:
            self.more()
        data, self.buffer = self.buffer[:length], self.buffer[length + 2 :]
        return data

    def ask(self, *command):
        self.send(command)
        return self.answer()


def mixed(redis, prefix, count):
    draw = random.Random(prefix)
    digest = hashlib.sha256()
    key = lambda kind: f"{prefix}:{kind}:{draw.randrange(20)}"
    value = lambda: draw.randbytes(draw.choice([1, 3, 40, 600, 8192, 8192, 70000 if draw.random() < 0.2 else 10]))
    makers = [
        lambda: ("SET", key("s"), value()),
        lambda: ("GET", key("s")),
        lambda: ("APPEND", key("s"), draw.randbytes(20)),
        lambda: ("GETRANGE", key("s"), draw.randrange(100), 5000),
        lambda: ("SETRANGE", key("s"), draw.randrange(5000), b"in between"),
        lambda: ("STRLEN", key("s")),
        lambda: ("INCRBY", key("n"), draw.randrange(1000)),
        lambda: ("LPUSH", key("l"), value(), value()),
        lambda: ("RPOP", key("l")),
        lambda: ("LRANGE", key("l"), 0, 4),
        lambda: ("HSET", key("h"), draw.randrange(9), value()),
        lambda: ("HGET", key("h"), draw.randrange(9)),
        lambda: ("SADD", key("e"), draw.randrange(50), draw.randrange(50)),
        lambda: ("SCARD", key("e")),
        lambda: ("ZADD", key("z"), draw.randrange(1000), draw.randrange(50)),
        lambda: ("ZRANGE", key("z"), 0, -1, "WITHSCORES"),
        lambda: ("MGET", key("s"), key("s"), key("s")),
        lambda: ("DEL", key("s"), key("l")),
        lambda: ("EXISTS", key("s"), key("l")),
        lambda: ("NO-SUCH-COMMAND", key("s")),
        lambda: ("LPUSH", key("s"), "wrong kind"),
    ]
    done = 0
    while done < count:
        shape = draw.random()
        if shape < 0.6:
            commands = [draw.choice(makers)()]
        elif shape < 0.9:
            commands = [draw.choice(makers)() for _ in range(draw.randrange(2, 17))]
        else:
            commands = [("MULTI",), *[draw.choice(makers[:-2])() for _ in range(3)], ("EXEC",)]
        redis.send(*commands)
        for command in commands:
            digest.update(repr((command, redis.answer())).encode())
        done += len(commands)
    print(prefix, digest.hexdigest())


def subscribe(redis, channel, count):
    digest = hashlib.sha256()
    redis.ask("SUBSCRIBE", channel)
    print("subscribed", flush=True)
    for _ in range(count):
        digest.update(repr(redis.answer()).encode())
    digest.update(repr(redis.ask("UNSUBSCRIBE", channel)).encode())
    print(channel, digest.hexdigest())


def publish(redis, channel, count):
    draw = random.Random(channel)
    for number in range(count):
        message = b"%d " % number + draw.randbytes(draw.choice([5, 100, 9000]))
        heard = redis.ask("PUBLISH", channel, message)
        if heard != b":2":
            sys.exit(f"message {number} was heard by {heard!r}")
    print("published", count)


def save(redis):
    print(redis.ask("BGSAVE"))
    for _ in range(400):
        state = dict(line.split(b":", 1) for line in redis.ask("INFO", "persistence").split(b"\r\n") if b":" in line)
        if state[b"rdb_bgsave_in_progress"] == b"0":
            break
        time.sleep(0.02)
    print(state[b"rdb_last_bgsave_status"])


redis = Redis(int(sys.argv[1]))
if sys.argv[2] == "mixed":
    mixed(redis, sys.argv[3], int(sys.argv[4]))
elif sys.argv[2] == "subscribe":
    subscribe(redis, sys.argv[3], int(sys.argv[4]))
elif sys.argv[2] == "publish":
    publish(redis, sys.argv[3], int(sys.argv[4]))
elif sys.argv[2] == "save":
    save(redis)
elif sys.argv[2] == "digest":
    print(redis.ask("DEBUG", "DIGEST"), redis.ask("DBSIZE"))
