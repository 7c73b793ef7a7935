"""Fetches what a web server has, with urllib and over one kept connection. Prints a digest of each answer."""

import hashlib
import http.client
import sys
import urllib.request

port, names = int(sys.argv[1]), sys.argv[2:]
for name in names:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/{name}", timeout=20) as answer:
        print("urllib", name, answer.status, hashlib.sha256(answer.read()).hexdigest())
kept = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
for turn in range(8):
    for name in names:
        kept.request("GET", f"/{name}")
        answer = kept.getresponse()
        body = answer.read()
        if turn % 3 == 0:
            print("kept", name, answer.status, hashlib.sha256(body).hexdigest())
kept.request("GET", "/no-such-file")
print("kept", kept.getresponse().status)
