"""`python -m labcore.serving.triton.process --socket PATH`: one engine behind a Unix socket.

One thread does everything in turn: it reads the lines that have come, runs one step of the engine,
and writes what the step brought. The protocol is one JSON object per line, in UTF-8.

To the engine: `submit` (id, prompt as text or token ids, fields of SamplingConfig, priority,
timeout in seconds), `cancel` (id), `stats`. From the engine: any number of `tokens` (id, tokens,
text) and one `finish` (id, finish, reason) or `error` (id or null, code, reason) per submit;
`stats` (values). Error codes: invalid, overloaded. Ids belong to their connection, and its requests
are cancelled when it ends or its client stops reading.
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
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
from labcore.serving.engine.outputs import Output
from labcore.serving.engine.scheduler import QueueFull
from labcore.serving.triton.client import unix_socket

__all__ = ["EngineServer", "main"]

LIMIT = 1 << 20  # bytes of a line
UNREAD = 1 << 23  # bytes that a client may leave unread before it counts as lost
SHIPPED = ("target", "draft")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SAMPLING = ("max_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "stop", "seed")
FIELDS = ("type", "id", "prompt", "priority", "timeout", *SAMPLING)


class _Client:
    """A connection: bytes that wait to be parsed, and bytes that wait to be sent."""

    def __init__(self, end: socket.socket, number: int) -> None:
        self.end, self.number = end, number
        self.read, self.unsent = bytearray(), bytearray()
        self.requests: set[str] = set()  # the engine's ids

    def send(self, **message: Any) -> None:
        self.unsent += json.dumps(message).encode("ascii") + b"\n"


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
        self._listener.listen()
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._owners: dict[str, _Client] = {}  # by the engine's ids
        self._count = 0

    def serve(self, ended: Callable[[], bool], parent: int | None = None) -> None:
        """Serve until `ended()`, or until the file descriptor `parent` is closed."""
        if parent is not None:
            self._selector.register(parent, selectors.EVENT_READ)
        try:
            while not ended():
                for key, events in self._selector.select(0 if not self.engine.idle else 0.05):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj == parent:
                        if not os.read(key.fd, 4096):
                            return
                    else:
                        self._attend(key.data, events)
                if not self.engine.idle:
                    for output in self.engine.step():
                        self._tell(output)
        finally:
            self.engine.close()
            for key in list(self._selector.get_map().values()):
                if isinstance(key.data, _Client):
                    key.data.end.close()
            self._selector.close()
            self._listener.close()
            self.path.unlink(missing_ok=True)

    def _accept(self) -> None:
        with suppress(OSError):  # it may have left already
            end, _ = self._listener.accept()
            end.setblocking(False)
            self._count += 1
            self._selector.register(end, selectors.EVENT_READ, _Client(end, self._count))

    def _attend(self, client: _Client, events: int) -> None:
        """Read and write what is possible without waiting."""
        try:
            if events & selectors.EVENT_READ:
                data = client.end.recv(1 << 16)
                if not data:
                    self._lose(client)
                    return
                client.read += data
                self._lines(client)
            self._flush(client)
        except BlockingIOError:
            pass
        except OSError:
            self._lose(client)

    def _flush(self, client: _Client) -> None:
        if client.unsent:
            with suppress(BlockingIOError):
                del client.unsent[: client.end.send(client.unsent)]
        if len(client.unsent) > UNREAD:
            raise OSError("the client doesn't read")
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.unsent else 0)
        self._selector.modify(client.end, wanted, client)

    def _lines(self, client: _Client) -> None:
        *lines, rest = bytes(client.read).split(b"\n")
        client.read = bytearray(rest)
        if len(rest) > LIMIT:
            raise OSError("a line without end")
        for line in filter(bytes.strip, lines):
            name = None
            try:
                if len(line) > LIMIT:
                    raise ValueError(f"a line must have at most {LIMIT} bytes, got {len(line)}")
                message = json.loads(line)
                if not isinstance(message, dict):
                    raise TypeError(f"a line must be a JSON object, got a {type(message).__name__}")
                name = message.get("id")
                self._obey(client, message)
            except QueueFull as error:
                client.send(type="error", id=name, code="overloaded", reason=str(error))
            except (TypeError, ValueError, OverflowError, RecursionError) as error:
                client.send(type="error", id=name, code="invalid", reason=str(error)[:500])

    def _obey(self, client: _Client, message: Mapping[str, Any]) -> None:
        kind = one_of("type", message.get("type"), ("submit", "cancel", "stats"))
        if kind == "stats":
            told = asdict(self.engine.stats())
            finished = told.pop("finished")
            told |= {f"finished_{why}": count for why, count in finished.items()}
            client.send(type="stats", values=told)
            return
        if not isinstance(message.get("id"), str) or len(message["id"]) > 256:
            raise TypeError("id must be a string of at most 256 characters")
        name = f"{client.number}:{message['id']}"
        if kind == "cancel":
            self.engine.cancel(name)  # an unknown id isn't an error: it may have just ended
            return
        for field in message:
            one_of("field of submit", field, FIELDS)
        wanted = {field: message[field] for field in SAMPLING if message.get(field) is not None}
        if "stop" in wanted:
            if not isinstance(wanted["stop"], list):
                raise TypeError(f"stop must be a list of texts, got {wanted['stop']!r}")
            wanted["stop"] = tuple(wanted["stop"])
        seconds = message.get("timeout")
        if seconds is not None and not seconds > 0:
            raise ValueError(f"timeout must be above 0 seconds, got {seconds}")
        self.engine.submit(
            message.get("prompt", ()),
            SamplingConfig(**wanted),
            id=name,
            priority=message.get("priority", 0),
            deadline=None if seconds is None else self.engine.clock.now() + seconds,
        )
        self._owners[name] = client
        client.requests.add(name)

    def _tell(self, output: Output) -> None:
        client = self._owners.get(output.id)
        if client is None:
            return
        name = output.id.partition(":")[2]
        if output.tokens or output.text:
            client.send(type="tokens", id=name, tokens=list(output.tokens), text=output.text)
        if output.finish:
            client.send(type="finish", id=name, finish=output.finish, reason=output.reason)
            client.requests.discard(output.id)
            del self._owners[output.id]
        try:
            self._flush(client)
        except OSError:
            self._lose(client)

    def _lose(self, client: _Client) -> None:
        """Forget a client and cancel its requests."""
        with suppress(KeyError, ValueError):
            self._selector.unregister(client.end)
        client.end.close()
        for name in client.requests:
            self._owners.pop(name, None)
            self.engine.cancel(name)
        client.requests.clear()


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
    add("--attached", action="store_true", help="exit when standard input closes")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return the exit code."""
    told = vars(_parser().parse_args(arguments))
    path, name, attached = told.pop("socket"), told.pop("model"), told.pop("attached")
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
    server.serve(ended.is_set, parent=0 if attached else None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
