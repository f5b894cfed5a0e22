"""An engine behind a Unix socket: many clients, many requests each, JSON lines both ways.

The protocol is that of `messages`. Ids belong to the connection: two clients may use the same id.
When a connection is lost, or its client doesn't read for `patience` seconds, its requests are
cancelled and their blocks freed.
"""

from __future__ import annotations

import itertools
import os
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from labcore.checks import positive, positive_int
from labcore.serving.remote.client import unix_socket
from labcore.serving.remote.messages import (
    LIMIT,
    LineBuffer,
    MessageError,
    Submit,
    encode,
    parse,
    parse_submit,
)

__all__ = ["Backend", "Listener", "Overloaded", "Running"]

# In bytes: the size of a Unix socket's address on each system.
LONGEST_PATH = 107 if sys.platform == "linux" else 103
CHUNK = 1 << 16
QUESTIONS = 16  # pending stats requests per connection


class Overloaded(RuntimeError):
    """A backend has no room for another request; the client gets this error and may retry."""


class Running(Protocol):
    """A request that a backend accepted: an iterator over its outputs, and a way to cancel it."""

    def __iter__(self) -> Iterator[Any]:
        """Yield outputs with new tokens, new text, finish ("" until the last) and reason."""

    def cancel(self) -> None:
        """End the request: the iterator yields an output with finish "cancelled".

        It is harmless if the request has already ended.
        """


class Backend(Protocol):
    """The part behind the socket that answers requests; several threads call its methods."""

    def submit(self, request: Submit, name: str) -> Running:
        """Accept a request under a unique name. Raises Overloaded, ValueError or TypeError."""

    def health(self) -> Mapping[str, Any]:
        """Return a few JSON values; raise if the engine can't recover."""

    def stats(self) -> Mapping[str, Any]:
        """Return statistics by name: numbers and strings."""


class Listener:
    """Serve clients on the socket `path` from start() to close().

    limit: maximum bytes per line. most: maximum requests in flight over all connections.
    patience: seconds that a client may leave its lines unread before it counts as lost.
    Raises ValueError if the path is too long, exists but is not a socket, or belongs to a socket
    that another process listens on.
    """

    def __init__(
        self,
        backend: Backend,
        path: str | Path,
        *,
        limit: int = LIMIT,
        most: int = 1024,
        patience: float = 5.0,
    ) -> None:
        self.backend = backend
        self.path = Path(path)
        self.limit = positive_int("limit", limit)
        self.patience = positive("patience", patience)
        self._places = threading.BoundedSemaphore(positive_int("most", most))
        self._lock = threading.Lock()
        self._connections: set[_Connection] = set()
        self._numbers = itertools.count(1)
        self._closing = False
        if len(os.fsencode(self.path)) > LONGEST_PATH:
            raise ValueError(
                f"the path of a Unix socket must have at most {LONGEST_PATH} bytes, got "
                f"{self.path}; choose a shorter folder"
            )
        _remove_stale(self.path)
        self._socket = unix_socket()
        try:
            self._socket.bind(str(self.path))
            self.path.chmod(0o600)  # for this user only; nobody can connect before listen()
            self._socket.listen(128)
        except OSError:
            self._socket.close()
            raise
        self._thread = threading.Thread(target=self._accept, name="ipc-accept", daemon=True)

    def start(self) -> Listener:
        """Start accepting connections."""
        self._thread.start()
        return self

    def close(self) -> None:
        """Close every connection, cancel the running requests, and remove the socket."""
        with self._lock:
            self._closing = True
            there = list(self._connections)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for connection in there:
            connection.lose()
        if self._thread.ident is not None:
            self._thread.join()
        for connection in there:
            connection.join()
        with suppress(OSError):
            self.path.unlink()

    def __enter__(self) -> Listener:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def clients(self) -> list[dict[str, Any]]:
        """Return the name, pid and number of requests in flight of each connection."""
        with self._lock:
            there = list(self._connections)
        return [one.told() for one in there]

    def _accept(self) -> None:
        while True:
            try:
                end, _ = self._socket.accept()
            except OSError:
                if self._closing:
                    return
                time.sleep(0.01)  # the client has left, or no file descriptor is free
                continue
            connection = _Connection(self, end, next(self._numbers))
            with self._lock:
                if self._closing:
                    end.close()
                    return
                self._connections.add(connection)
            try:
                connection.start()
            except RuntimeError:  # can't start a thread: drop this client, keep serving others
                end.close()
                self._forget(connection)

    def _forget(self, connection: _Connection) -> None:
        with self._lock:
            self._connections.discard(connection)


class _Connection:
    """One client: a thread that reads its lines, and a thread for each of its requests."""

    def __init__(self, listener: Listener, end: socket.socket, number: int) -> None:
        self.listener = listener
        self.number = number
        self.name, self.pid = "", 0
        self._end = end
        self._tasks: dict[str, _Task] = {}
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._asking = threading.Semaphore(QUESTIONS)
        self._lost = False
        self._reader = threading.Thread(target=self._read, name=f"ipc-{number}", daemon=True)
        # Only sending may time out: in `_read`, recv waits as long as the client is silent.
        whole = int(listener.patience)
        interval = struct.pack("@ll", whole, int((listener.patience - whole) * 1e6))
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, interval)

    def start(self) -> None:
        self._reader.start()

    def join(self) -> None:
        with self._lock:
            threads = [self._reader, *(task.thread for task in self._tasks.values())]
        for thread in threads:
            if thread.ident is not None:
                thread.join()

    def told(self) -> dict[str, Any]:
        with self._lock:
            return {"name": self.name, "pid": self.pid, "requests": len(self._tasks)}

    def lose(self) -> None:
        """End the connection and cancel its requests. Calling it again is harmless."""
        with self._lock:
            self._lost = True
            tasks = list(self._tasks.values())
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)  # wakes the reader, which closes the socket
        for task in tasks:
            task.cancel()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one whole line; if that fails, the client is lost."""
        if self._lost:
            return
        try:
            with self._writing:
                self._end.sendall(encode(message))
        except OSError:
            self.lose()

    def fail(self, name: str | None, code: str, reason: object) -> None:
        self.send({**_error(code, reason), "id": name})

    def _read(self) -> None:
        lines = LineBuffer(self.listener.limit)
        try:
            while not self._lost and (data := self._end.recv(CHUNK)):
                for line in lines.feed(data):
                    self._take(line)
        except OSError:
            pass
        finally:
            self.lose()
            self._end.close()
            self.listener._forget(self)

    def _take(self, line: bytes | None) -> None:
        name: str | None = None
        try:
            if line is None:
                limit = self.listener.limit
                raise MessageError(f"a line must have at most {limit} bytes", code="too_long")
            message = parse(line)
            name = message.get("id")
            getattr(self, f"_on_{message['type']}")(message)
        except MessageError as error:
            self.fail(error.id, error.code, error)
        except Exception as error:  # one request's fault must not end the others' connection
            self.fail(name, "internal", f"{type(error).__name__}: {error}")

    def _on_hello(self, message: Mapping[str, Any]) -> None:
        pid = message.get("pid", 0)
        with self._lock:
            self.name = str(message.get("name", ""))[:64]
            self.pid = pid if isinstance(pid, int) else 0

    def _on_health(self, message: Mapping[str, Any]) -> None:
        values = dict(self.listener.backend.health())
        values |= {"pid": os.getpid(), "clients": self.listener.clients()}
        self.send({"type": "health", "id": message.get("id"), "values": values})

    def _on_stats(self, message: Mapping[str, Any]) -> None:
        # An engine in a long step must not hold up the lines that follow.
        if not self._asking.acquire(blocking=False):
            self.fail(message.get("id"), "overloaded", "too many stats are pending; wait for them")
            return
        try:
            threading.Thread(target=self._stats, args=(message.get("id"),), daemon=True).start()
        except BaseException:
            self._asking.release()
            raise

    def _stats(self, name: str | None) -> None:
        try:
            values = dict(self.listener.backend.stats())
            self.send({"type": "stats", "id": name, "values": values})
        except Exception as error:
            self.fail(name, "internal", f"{type(error).__name__}: {error}")
        finally:
            self._asking.release()

    def _on_cancel(self, message: Mapping[str, Any]) -> None:
        with self._lock:
            task = self._tasks.get(message.get("id", ""))
        # An unknown id is not an error: the request may have just ended.
        if task is not None:
            task.cancel()

    def _on_submit(self, message: Mapping[str, Any]) -> None:
        request = parse_submit(message)
        with self._lock:
            if request.id in self._tasks:
                # Omit the id, or the client would think that the first request had ended.
                reason = f"id {request.id!r} is in use; choose another or wait for its end"
                raise MessageError(reason, code="duplicate")
        if not self.listener._places.acquire(blocking=False):
            self.fail(request.id, "overloaded", "too many requests are in flight; try again later")
            return
        # In a separate thread, because a backend may take a whole step to answer.
        task = _Task(self, request)
        with self._lock:
            self._tasks[request.id] = task
            lost = self._lost
        if lost:
            task.cancel()
        try:
            task.thread.start()
        except RuntimeError:  # can't start a thread
            self.finished(task)
            raise

    def finished(self, task: _Task) -> None:
        with self._lock:
            del self._tasks[task.request.id]
        self.listener._places.release()


class _Task:
    """One request of a connection, from its submit to its last line, in a thread."""

    def __init__(self, connection: _Connection, request: Submit) -> None:
        self.connection = connection
        self.request = request
        self.thread = threading.Thread(target=self._run, name="ipc-request", daemon=True)
        self._lock = threading.Lock()
        self._running: Running | None = None
        self._cancelled = False

    def cancel(self) -> None:
        """Cancel the request, even before the backend has accepted it."""
        with self._lock:
            self._cancelled = True
            running = self._running
        if running is not None:
            running.cancel()

    def _run(self) -> None:
        try:
            last = self._tell()
        except Overloaded as error:
            last = _error("overloaded", error)
        except Exception as error:
            last = _error("internal", f"{type(error).__name__}: {error}")
        self.connection.finished(self)  # first: the id must be free when the client reads this
        self.connection.send({**last, "id": self.request.id})

    def _tell(self) -> dict[str, Any]:
        """Send the backend's outputs for the request; return the last message."""
        name = f"{self.connection.number}:{self.request.id}"
        try:
            running = self.connection.listener.backend.submit(self.request, name)
        except (TypeError, ValueError) as error:
            return _error("invalid", error)
        with self._lock:
            self._running = running
            cancelled = self._cancelled
        if cancelled:
            running.cancel()
        for output in running:
            if output.tokens or output.text:
                tokens = [int(token) for token in output.tokens]
                told = {"type": "tokens", "tokens": tokens, "text": output.text}
                self.connection.send({**told, "id": self.request.id})
            if output.finish:
                return {"type": "finish", "finish": output.finish, "reason": output.reason}
        return _error("internal", "the engine ended this request without a finish")


def _error(code: str, reason: object) -> dict[str, Any]:
    return {"type": "error", "code": code, "reason": str(reason)}


def _remove_stale(path: Path) -> None:
    """Remove the socket that a killed process left behind."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ValueError(
            f"path must be unused or a socket, got the file {path}; choose another path"
        )
    with unix_socket() as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError as error:
            raise ValueError(f"{path} does not answer ({error}); remove it first") from None
    raise ValueError(f"another process listens on {path}; stop it or choose another path")
