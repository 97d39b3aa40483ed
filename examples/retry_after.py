"""Retry-After: a small HTTP server asks for half a minute, and gets it. Virtual time counts the wait and skips it."""

from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from urllib.request import ProxyHandler, build_opener

import reefknot as rk

requests = 0


class Busy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        global requests
        requests += 1
        self.send_response(429 if requests == 1 else 200)
        if requests == 1:
            self.send_header("Retry-After", "30")
        self.end_headers()

    def log_message(self, *about: object) -> None:
        """The example talks for itself."""


server = HTTPServer(("127.0.0.1", 0), Busy)
Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
open_url = build_opener(ProxyHandler({})).open


@rk.retry(base_delay=0.1)
def status() -> int:
    with open_url(f"http://127.0.0.1:{server.server_port}/", timeout=2) as answer:
        return int(answer.status)


with rk.testing.virtual_time() as clock:
    print(f"answered with {status()} after {requests} requests")
    print(f"waited {clock.waited:.2f} s, although the own backoff is 0.1 s at most")
    assert 30 <= clock.waited < 31

    requests = 0
    try:
        status.using(deadline=20)()
    except OSError as error:
        print(f"with a deadline of 20 s: {error}, at once")
    assert requests == 1

server.shutdown()
server.server_close()
