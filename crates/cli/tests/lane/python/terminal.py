"""Runs a command at a terminal of its own, types Ctrl-C when it says "ready", and tells how it ended."""

import os
import pty
import select
import sys

child, terminal = pty.fork()
if child == 0:
    os.execvp(sys.argv[1], sys.argv[1:])
seen = b""
while b"ready" not in seen:
    if not select.select([terminal], [], [], 20)[0]:
        sys.exit(f"it was never ready: {seen!r}")
    seen += os.read(terminal, 1024)
os.write(terminal, b"\x03")
_, status = os.waitpid(child, 0)
if os.WIFSIGNALED(status):
    print("ended by signal", os.WTERMSIG(status))
else:
    print("ended with", os.WEXITSTATUS(status), seen)
