"""A server on this machine that says whatever a test wants, byte by byte, in threads of its own."""

import socket
import threading
from contextlib import suppress
from typing import Self

PATIENCE_S = 120.0


class SocketServer:
    """A server that does the same with each connection: `serve`."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._thread = threading.Thread(target=self._run, daemon=True)

    def serve(self, link: socket.socket) -> None:
        """Talk, until one of the two hangs up."""
        raise NotImplementedError

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                link, _ = self._listening.accept()
                threading.Thread(target=self._accepted, args=(link,), daemon=True).start()

    def _accepted(self, link: socket.socket) -> None:
        with suppress(OSError), link:
            link.settimeout(PATIENCE_S)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.serve(link)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *ended: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._thread.join(PATIENCE_S)
