"""`python -m labcore.serving.triton.process --socket PATH`: one engine behind a Unix socket.

One thread does everything in turn: it reads the lines that have come, runs one step of the engine,
and writes what the step brought. The protocol is one JSON object per line, in UTF-8.

To the engine: `{"type": "submit"}` with prompt (text or token ids), fields of SamplingConfig,
priority, timeout in seconds, and since, the time.monotonic() from which the timeout counts; or
`{"type": "stats"}`. From the engine: for a submit, lines with the fields of an `Output`, the last
with a finish; for stats, a line with numbers, such as the process id. A refused line gets the
finish "error", a reason, and the code INVALID_ARG or UNAVAILABLE. A connection carries one request
at a time, which is canceled when the connection ends or its client stops reading.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from labcore.checks import one_of
from labcore.decoding import SamplingConfig
from labcore.device import default_device
from labcore.models import Llama, from_pretrained, pretrained, shipped_tokenizer
from labcore.models.tokenizer import Tokenizer
from labcore.serving.engine.engine import Engine
from labcore.serving.engine.scheduler import QueueFull
from labcore.serving.triton.client import unix_socket

__all__ = ["EngineServer", "main"]

LIMIT = 1 << 20  # bytes of a line
UNREAD = 1 << 23  # bytes that a client may leave unread before it counts as lost
SHIPPED = ("target", "draft")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SAMPLING = ("max_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "stop", "seed")
FIELDS = ("type", "prompt", "priority", "timeout", "since", *SAMPLING)


class _Client:
    """A connection: bytes of a line that isn't whole yet, and bytes that wait to be sent."""

    def __init__(self, end: socket.socket, name: str) -> None:
        self.end, self.name = end, name  # the name is also that of its request
        self.unread, self.unsent = b"", bytearray()

    def receive(self) -> list[bytes]:
        """Return the lines that have come. Raises OSError if the connection has ended."""
        data = self.end.recv(1 << 16)
        *lines, self.unread = (self.unread + data).split(b"\n")
        if not data or len(self.unread) > LIMIT:
            raise ConnectionError("the connection or a line has no end")
        return lines

    def send(self, **message: Any) -> None:
        """Append a line to what waits to be sent."""
        self.unsent += json.dumps(message).encode("ascii") + b"\n"

    def flush(self) -> None:
        """Send what the client takes. Raises OSError if it doesn't read."""
        if self.unsent:
            with suppress(BlockingIOError):
                del self.unsent[: self.end.send(self.unsent)]
        if len(self.unsent) > UNREAD:
            raise ConnectionError("the client doesn't read")


class EngineServer:
    """Serves an engine on the socket `path`, in the thread that calls `serve`.

    Raises ValueError if something else is at the path, or the path is too long for a socket.
    """

    def __init__(self, engine: Engine, path: str | Path) -> None:
        self.engine, self.path = engine, Path(path)
        if self.path.is_socket():
            with unix_socket() as probe:
                if probe.connect_ex(str(self.path)) == 0:
                    raise ValueError(f"another engine listens on {self.path}; stop it first")
            self.path.unlink()  # of a process that was killed
        self._listener = unix_socket()
        try:
            self._listener.bind(str(self.path))
        except OSError as error:
            self._listener.close()
            raise ValueError(
                f"path must be free and short enough for a socket, got {self.path} ({error})"
            ) from None
        self.path.chmod(0o600)  # for this user only
        self._listener.listen(4096)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._clients: dict[str, _Client] = {}
        self._count = 0

    def serve(self, ended: Callable[[], bool]) -> None:
        """Serve until `ended()`."""
        try:
            while not ended():
                for key, _ in self._selector.select(0.05 if self.engine.idle else 0):
                    if key.data is None:
                        self._accept()
                    else:
                        self._read(key.data)
                for output in [] if self.engine.idle else self.engine.step():
                    if client := self._clients.get(output.id):  # else it has left
                        client.send(**asdict(output))
                for client in list(self._clients.values()):
                    with self._losing(client):
                        client.flush()
        finally:
            self.engine.close()
            for client in self._clients.values():
                client.end.close()
            self._selector.close()
            self._listener.close()
            self.path.unlink(missing_ok=True)

    def _accept(self) -> None:
        with suppress(OSError):  # until no more wait
            while True:
                end, _ = self._listener.accept()
                end.setblocking(False)
                self._count += 1
                client = self._clients[f"c{self._count}"] = _Client(end, f"c{self._count}")
                self._selector.register(end, selectors.EVENT_READ, client)
                self._read(client)  # now, not after the next step

    @contextmanager
    def _losing(self, client: _Client) -> Iterator[None]:
        """Forget a client whose connection ends, and cancel its request."""
        try:
            yield
        except BlockingIOError:  # nothing has come yet
            pass
        except OSError:
            del self._clients[client.name]
            self._selector.unregister(client.end)
            client.end.close()
            self.engine.cancel(client.name)

    def _read(self, client: _Client) -> None:
        with self._losing(client):
            for line in filter(bytes.strip, client.receive()):
                try:
                    if len(line) > LIMIT:
                        raise ValueError(f"a line must have at most {LIMIT} bytes, got {len(line)}")
                    self._obey(client, json.loads(line))
                except QueueFull as error:
                    client.send(finish="error", code="UNAVAILABLE", reason=str(error))
                except (TypeError, ValueError, OverflowError, RecursionError) as error:
                    client.send(finish="error", code="INVALID_ARG", reason=str(error)[:500])

    def _obey(self, client: _Client, message: Mapping[str, Any]) -> None:
        if not isinstance(message, dict):
            raise TypeError(f"a line must be a JSON object, got a {type(message).__name__}")
        if one_of("type", message.get("type"), ("submit", "stats")) == "stats":
            told = asdict(self.engine.stats())
            finished = {f"finished_{why}": count for why, count in told.pop("finished").items()}
            client.send(pid=os.getpid(), **told, **finished)
            return
        for field in message:
            one_of("field of submit", field, FIELDS)
        wanted = {field: message[field] for field in SAMPLING if message.get(field) is not None}
        if "stop" in wanted:
            if not isinstance(wanted["stop"], list):
                raise TypeError(f"stop must be a list of texts, got {wanted['stop']!r}")
            wanted["stop"] = tuple(wanted["stop"])
        now, seconds = self.engine.clock.now(), message.get("timeout")
        if seconds is not None and not seconds > 0:
            raise ValueError(f"timeout must be above 0 seconds, got {seconds}")
        self.engine.submit(
            message.get("prompt", ()),
            SamplingConfig(**wanted),
            id=client.name,
            priority=message.get("priority", 0),
            deadline=None if seconds is None else message.get("since", now) + seconds,
        )


def load(name: str, *, dtype: torch.dtype = torch.float32) -> tuple[Llama, Tokenizer]:
    """Load a shipped model or a folder's checkpoint, with its tokenizer, on the default device."""
    if name in SHIPPED:
        return pretrained(name, dtype=dtype).to(default_device()), shipped_tokenizer()
    folder = Path(name)
    if not folder.is_dir():
        raise ValueError(f"model must be target, draft or a checkpoint folder, got {name!r}")
    model = from_pretrained(folder, dtype=dtype, device=default_device())
    return model, Tokenizer.from_pretrained(folder)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m labcore.serving.triton.process", description=(__doc__ or "").splitlines()[0]
    )
    add = parser.add_argument
    add("--socket", required=True, help="path of the Unix socket")
    add("--model", default="target", help="target, draft or a checkpoint folder")
    add("--dtype", default="float32", choices=sorted(DTYPES))
    add("--num-blocks", type=int, default=256, help="blocks in the pool")
    add("--block-size", type=int, default=16, help="tokens per block")
    add("--max-num-seqs", type=int, default=8, help="requests running at once")
    add("--max-num-batched-tokens", type=int, default=256, help="tokens per step")
    add("--chunk", type=int, help="tokens of one prompt per step")
    add("--policy", default="guaranteed_no_evict")
    add("--max-waiting", type=int, default=1024, help="requests in the queue")
    add("--proposer", choices=["ngram"], help="speculation")
    add("--threads", type=int, help="torch threads on a CPU")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return the exit code."""
    told = vars(_parser().parse_args(arguments))
    path, name = told.pop("socket"), told.pop("model")
    threads, dtype = told.pop("threads"), DTYPES[told.pop("dtype")]
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    if threads:
        torch.set_num_threads(threads)
    try:
        server = EngineServer(Engine(*load(name, dtype=dtype), **told), path)
    except (OSError, RuntimeError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    server.serve(ended.is_set)
    return 0


if __name__ == "__main__":
    sys.exit(main())
