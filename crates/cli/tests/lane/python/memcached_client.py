"""Sets and gets values in memcached's own protocol, one by one and many at once. Prints a digest of every answer."""

import hashlib
import random
import socket
import sys

draw = random.Random(sys.argv[2])
digest = hashlib.sha256()
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=20)
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
stream = connection.makefile("rb")


def ask(request, ends):
    connection.sendall(request)
    lines = []
    while not lines or lines[-1].split()[0] not in ends:
        lines.append(stream.readline())
        if not lines[-1]:
            sys.exit("memcached closed the connection")
        if lines[-1].startswith(b"VALUE"):
            lines.append(stream.read(int(lines[-1].split()[3]) + 2))
            lines.append(stream.readline())
            while lines[-1].startswith(b"VALUE"):
                lines.append(stream.read(int(lines[-1].split()[3]) + 2))
                lines.append(stream.readline())
    digest.update(b"".join(lines))
    return lines


for number in range(600):
    key = b"%s-%d" % (sys.argv[2].encode(), draw.randrange(60))
    value = draw.randbytes(draw.choice([1, 100, 8192, 60000 if number % 20 == 0 else 30]))
    ask(b"set %s 7 0 %d\r\n%s\r\n" % (key, len(value), value), [b"STORED"])
    several = b" ".join(b"%s-%d" % (sys.argv[2].encode(), draw.randrange(60)) for _ in range(5))
    ask(b"get %s\r\n" % key, [b"END"])
    if number % 7 == 0:
        ask(b"get %s\r\n" % several, [b"END"])
    if number % 5 == 0:
        ask(b"append %s 0 0 4\r\nmore\r\n" % key, [b"STORED", b"NOT_STORED"])
    if number % 11 == 0:
        ask(b"delete %s\r\n" % key, [b"DELETED", b"NOT_FOUND"])
print(sys.argv[2], digest.hexdigest())
