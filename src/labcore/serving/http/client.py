"""A server in a thread of this program, and a client of it from Python's own library alone."""

from __future__ import annotations

import asyncio
import html
import http.client
import json
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from labcore.serving.http.server import Server

__all__ = ["Answer", "ask", "running"]

LINES = 12  # that a notebook shows: a model of seconds may write little but line breaks


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Answer:
    """A streamed completion. A notebook shows it with the guessed text marked.

    pieces: texts as they came, each with whether a draft had guessed it.
    tokens: how many. waited: seconds until the first piece. seconds: until the last.
    """

    prompt: str
    pieces: tuple[tuple[str, bool], ...]
    tokens: int
    waited: float
    seconds: float

    @property
    def text(self) -> str:
        """All pieces together."""
        return "".join(text for text, _ in self.pieces)

    def __repr__(self) -> str:
        return self.prompt + self.text

    def _repr_html_(self) -> str:
        left, marked = len("\n".join(self.text.split("\n")[:LINES])), ""
        rest = "…" if left < len(self.text) else ""
        for text, guessed in self.pieces:
            part, left = html.escape(text[:left]), max(left - len(text), 0)
            marked += f"<mark>{part}</mark>" if guessed and part else part
        marked = marked.replace("</mark><mark>", "") + rest
        wraps = "white-space: pre-wrap; overflow-wrap: anywhere"
        return f'<pre style="{wraps}"><b>{html.escape(self.prompt)}</b>{marked}</pre>'


def ask(server: Server, prompt: str, **options: Any) -> Answer:
    """Stream a completion; options are fields of the API. Raises RuntimeError if it fails."""
    body = {"model": server.name, "prompt": prompt, **options}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    began, waited, pieces, tokens = time.perf_counter(), 0.0, [], 0
    with closing(http.client.HTTPConnection("127.0.0.1", server.port)) as connection:
        headers = {"Authorization": f"Bearer {server.token}"}
        connection.request("POST", "/v1/completions", json.dumps(body).encode(), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(json.load(response)["error"]["message"])
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            told = json.loads(line.removeprefix(b"data: "))
            if "error" in told:
                raise RuntimeError(told["error"]["message"])
            waited = waited or time.perf_counter() - began
            pieces += [(one["text"], one["guessed"]) for one in told["choices"] if one["text"]]
            tokens = told.get("usage", {}).get("completion_tokens", tokens)
    seconds = time.perf_counter() - began
    return Answer(
        prompt=prompt, pieces=tuple(pieces), tokens=tokens, waited=waited, seconds=seconds
    )


@contextmanager
def running(server: Server) -> Iterator[Server]:
    """Serve from a thread of this program until the block ends. Raises what the server raises."""
    ready, loop = threading.Event(), asyncio.new_event_loop()
    task = loop.create_task(server.run(ready.set))

    def run() -> None:
        with suppress(BaseException):  # `task` keeps it
            loop.run_until_complete(task)
        loop.run_until_complete(loop.shutdown_default_executor())
        ready.set()

    thread = threading.Thread(target=run, name="http-server", daemon=True)
    thread.start()
    ready.wait()
    try:
        if task.done():
            task.result()
        yield server
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        loop.close()
