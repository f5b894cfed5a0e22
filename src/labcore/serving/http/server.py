"""A model behind HTTP on this machine: `/v1/completions`, and a page to try it."""

from __future__ import annotations

import asyncio
import json
import secrets
import shlex
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from labcore.serving.engine.engine import Engine
from labcore.serving.engine.service import Service

__all__ = ["Server"]

MOST = 64  # requests under way, each of which holds a thread while it waits for the engine


@dataclass(kw_only=True, eq=False)
class Server:
    """Serves an engine to programs and browsers on this machine.

    Only this machine can reach it, and only with the token. A request whose client leaves is
    canceled.
    engine: an idle one with a tokenizer, which the server owns from now on. name: of the model.
    port: 0 takes a free one. prompt: an example, in the page and in the command. token: what a
    client must send; the default is random.
    Raises OSError if the port is taken, and TypeError for an engine without a tokenizer.
    """

    engine: Engine
    name: str
    port: int = 0
    prompt: str = "def area(width, height):\n"
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))

    def __post_init__(self) -> None:
        if self.engine.tokenizer is None:
            raise TypeError("engine must have a tokenizer, because HTTP carries text")
        try:
            self._socket = socket.create_server(("127.0.0.1", self.port))
        except OSError as problem:
            raise OSError(f"port must be free, got {self.port}: {problem}") from None
        self._socket.setblocking(False)
        self.port = self._socket.getsockname()[1]

    @property
    def address(self) -> str:
        """The page's address. A browser keeps what follows the # to itself."""
        return f"http://127.0.0.1:{self.port}/#token={self.token}"

    @property
    def example(self) -> str:
        """A shell command that asks for a completion."""
        asked = json.dumps({"model": self.name, "prompt": self.prompt})
        return (
            f"curl http://127.0.0.1:{self.port}/v1/completions \\\n"
            f"  -H 'Authorization: Bearer {self.token}' -d {shlex.quote(asked)}"
        )

    async def run(self, tell: Callable[[], None] = lambda: None) -> None:
        """Serve until the task is canceled. tell: called when the server answers."""
        from labcore.serving.http.handlers import listen  # brings tornado

        with Service(self.engine) as service, ThreadPoolExecutor(MOST) as threads:
            asyncio.get_running_loop().set_default_executor(threads)
            http = listen(self, service, self._socket, most=MOST)
            try:
                tell()
                await asyncio.Event().wait()
            finally:
                http.stop()
                service.close()
                await http.close_all_connections()
