"""NVIDIA's Triton Inference Server in front of one engine, on this machine's loopback.

`python -m labcore.serving.triton.server install | write | start | stop | status`. `start` keeps
three processes alive: the server, the stub in which its python backend runs model.py, and the
engine. A process that dies is restarted within seconds. Its clients get an error, and the blocks
of their requests are freed.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType

from labcore.serving.remote.client import EngineClient, EngineError
from labcore.serving.remote.supervisor import Part, Supervisor, SupervisorError
from labcore.serving.triton import environment as triton_environment
from labcore.serving.triton.client import Addresses, examples, ready
from labcore.serving.triton.repository import write_repository
from labcore.serving.triton.state import SOCKETS, Claim, alive, regions, running, with_free_ports

__all__ = ["TritonServer", "main"]

ENVIRONMENT = Path(".venv-triton")
FOLDER = Path(".cache/triton_server")
ASK_S = 1.0
STOPS_S = 60.0
ENDING = [
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)
]


class TritonServer:
    """The server, its model and its engine, from start() to stop() or in a `with` block.

    folder: holds the repository, logs and state of one server at a time. environment: the folder
    into which `triton_environment.install` installed the server. model: the model's name in the
    server. engine: the command of the engine's process without `--socket` and `--spare`, which are
    added; None means `python -m labcore.serving.remote.process` with `engine_options`.
    addresses: 0 for a free port.
    Raises RuntimeError if the server's environment is missing.
    """

    def __init__(
        self,
        folder: Path = FOLDER,
        *,
        environment: Path = ENVIRONMENT,
        model: str = "lm",
        engine: Sequence[str] | None = None,
        engine_options: Sequence[str] = (),
        addresses: Addresses | None = None,
    ) -> None:
        if lack := triton_environment.missing(environment):
            raise RuntimeError(lack)
        self.folder = folder.absolute()
        self.model = model
        self._installed = triton_environment.load(environment)
        self.addresses = with_free_ports(addresses or Addresses(http=0, grpc=0, metrics=0))
        self._sockets = Path(tempfile.mkdtemp(prefix=SOCKETS))  # a short path, for this user only
        self.socket = self._sockets / "engine"
        self._engine = _Watched(self.socket)
        own = [
            sys.executable,
            "-m",
            "labcore.serving.remote.process",
            "--attached",
            *engine_options,
        ]
        self._command = [*(own if engine is None else engine), "--socket", str(self.socket)]
        self._supervisor: Supervisor | None = None
        self._claim: Claim | None = None

    def write(self) -> Path:
        """Write the model repository and return its folder."""
        return write_repository(self.folder / "models", name=self.model, socket=self.socket)

    def start(self, timeout: float = 90.0) -> TritonServer:
        """Start everything and return once the server accepts requests.

        Raises RuntimeError if a server already runs from the folder, SupervisorError if a process
        doesn't become healthy.
        """
        try:
            self._claim = Claim(self.folder)
            self._supervisor = self._supervised()
            self._supervisor.start(timeout)
            self._claim.write(model=self.model, path=self.socket, addresses=self.addresses)
        except BaseException:
            self.stop()
            raise
        return self

    def _supervised(self) -> Supervisor:
        self.write()
        backends = self._installed.write_backends(self.folder / "backends")
        self._remove_shared_memory()  # of a server that was killed
        logs = self.folder / "logs"
        shutil.rmtree(logs, ignore_errors=True)
        return Supervisor(
            [
                Part(
                    name="engine",
                    command=self._command,
                    log=logs / "engine.log",
                    healthy=self._engine.healthy,
                    spare=True,
                    attached=True,
                    clean=self._engine.forget,
                ),
                Part(
                    name="server",
                    command=self._server_command(backends),
                    log=logs / "server.log",
                    environment=self._installed.variables(dict(os.environ)),
                    healthy=lambda: self._engine.stub_is_there() and ready(self.addresses),
                    silence=30.0,  # includes the engine's start: until then the stub is invisible
                    broken=self._engine.stub_is_gone,
                    clean=self._clean_server,
                ),
            ]
        )

    def stop(self) -> None:
        """Stop the server and the engine. Calling it again is harmless."""
        if self._supervisor is not None:
            self._supervisor.stop()
        self._engine.forget()
        if self._claim is not None:
            self._claim.release()
        shutil.rmtree(self._sockets, ignore_errors=True)

    def wait_healthy(self, timeout: float = 30.0) -> None:
        """Return once server, stub and engine answer. Raises SupervisorError."""
        self.supervisor.wait_healthy(timeout)

    @property
    def supervisor(self) -> Supervisor:
        """The supervisor of the processes. Raises RuntimeError before start()."""
        if self._supervisor is None:
            raise RuntimeError("the server was not started; call start() first")
        return self._supervisor

    def pids(self) -> dict[str, int | None]:
        """Return the process ids of "server", "stub" and "engine"; None if one isn't running."""
        return {
            "server": self.supervisor.pid("server"),
            "stub": self._engine.stub,
            "engine": self.supervisor.pid("engine"),
        }

    def client(self, timeout: float = 10.0) -> EngineClient:
        """Connect to the engine directly, bypassing the server, for its stats.

        Raises ConnectionError if the engine isn't running.
        """
        return EngineClient(self.socket, name="observer", timeout=timeout)

    def __enter__(self) -> TritonServer:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.stop()

    def _server_command(self, backends: Path) -> list[str]:
        at = self.addresses
        return [
            str(self._installed.binary),
            f"--model-repository={self.folder / 'models'}",
            f"--backend-directory={backends}",
            f"--backend-config=python,shm-region-prefix-name={regions(self.folder)[0]}",
            "--model-control-mode=none",
            "--disable-auto-complete-config",
            f"--http-address={at.host}",
            f"--http-port={at.http}",
            f"--grpc-address={at.host}",
            f"--grpc-port={at.grpc}",
            f"--metrics-address={at.host}",
            f"--metrics-port={at.metrics}",
            "--allow-gpu-metrics=false",  # without NVML, errors would fill the log
            "--exit-timeout-secs=3",
        ]

    def _clean_server(self) -> None:
        self._engine.stub = None
        self._remove_shared_memory()

    def _remove_shared_memory(self) -> None:
        """Remove what a killed server left; the next server would use a different name."""
        for region in regions(self.folder)[1]:
            with suppress(FileNotFoundError):
                region.unlink()


class _Watched:
    """The supervisor's view of the engine: its health, and the stub connected to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stub: int | None = None  # the last stub that was seen
        self._there = False
        self._client: EngineClient | None = None

    def healthy(self) -> bool:
        """Return whether the engine answers; record its stub."""
        self._there = False
        try:
            if self._client is None:
                self._client = EngineClient(self.path, name="supervisor", timeout=ASK_S)
            clients = self._client.health()["clients"]
        except (ConnectionError, EngineError, TimeoutError):
            self.forget()
            return False
        stubs = [one["pid"] for one in clients if one["name"] == "stub" and alive(one["pid"])]
        if stubs:
            self.stub, self._there = stubs[-1], True
        return True

    def stub_is_there(self) -> bool:
        """Return whether a stub was connected at the last check."""
        return self._there

    def stub_is_gone(self) -> str:
        """Return why the server must be restarted, or ""; it reports ready even without a stub."""
        if self.stub is not None and not alive(self.stub):
            return "its stub process ended"
        return ""

    def forget(self) -> None:
        """Close the connection; the next check opens a new one."""
        client, self._client = self._client, None
        if client is not None:
            client.close()


class _Ended(BaseException):
    """A signal arrived before the server was ready."""


def _start(told: argparse.Namespace, say: Callable[[str], object]) -> int:
    ended = threading.Event()
    starting = True

    def end(_number: int, _frame: FrameType | None) -> None:
        first = not ended.is_set()
        ended.set()
        if starting and first:
            raise _Ended

    before = {number: signal.signal(number, end) for number in ENDING}
    try:
        server = TritonServer(
            told.folder,
            environment=told.environment,
            engine_options=["--model", told.model],
            addresses=_asked(told),
        )
        with server:
            starting = False
            say(_greeting(server))
            while not ended.wait(0.5):
                if server.supervisor.failure:
                    raise SupervisorError(server.supervisor.report())
    except _Ended:
        pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0


def _asked(told: argparse.Namespace) -> Addresses:
    """Return the command line's ports, or the default ports, or free ones if those are taken."""
    if any(port is not None for port in (told.http, told.grpc, told.metrics)):
        return Addresses(http=told.http or 0, grpc=told.grpc or 0, metrics=told.metrics or 0)
    try:
        return with_free_ports(Addresses())
    except ValueError:
        return Addresses(http=0, grpc=0, metrics=0)


def _greeting(server: TritonServer) -> str:
    at = server.addresses
    command = f"{shlex.quote(sys.executable)} -m labcore.serving.triton.server"
    folder = f"--folder {shlex.quote(str(server.folder))}"
    return (
        f"ready: http://{at.host}:{at.http}, gRPC {at.host}:{at.grpc}, model {server.model}; logs "
        f"in {server.folder / 'logs'}\n\nIn another terminal:\n\n"
        f"{examples(at, model=server.model)}\n"
        f"{command} status {folder}\n{command} stop {folder}\n\nPress Ctrl-C to stop it here.\n"
    )


def _stop(told: argparse.Namespace, say: Callable[[str], object]) -> int:
    state = running(told.folder)
    if state is None:
        say(f"no server runs from {told.folder}\n")
        return 1
    if state["pid"] <= 0:  # it has claimed the folder but not yet written its id
        raise RuntimeError(f"a server is just starting from {told.folder}; try again in a second")
    os.kill(state["pid"], signal.SIGTERM)
    until = time.monotonic() + STOPS_S
    while running(told.folder) is not None:
        if time.monotonic() > until:
            raise RuntimeError(
                f"process {state['pid']} did not exit within {STOPS_S:.0f} s; look into "
                f"{told.folder / 'logs'}, then kill it with `kill -9 {state['pid']}`"
            )
        time.sleep(0.1)
    say("stopped\n")
    return 0


def _status(told: argparse.Namespace, say: Callable[[str], object]) -> int:
    state = running(told.folder)
    if state is None:
        say(f"no server runs from {told.folder}\n")
        return 1
    if "addresses" not in state:
        say(f"the server (process {state['pid']}) is starting\n")
        return 1
    at = Addresses(**state["addresses"])
    up = ready(at, timeout=5.0)
    say(f"server {'ready' if up else 'not ready'} at http://{at.host}:{at.http}, ")
    say(f"gRPC {at.host}:{at.grpc}, metrics {at.host}:{at.metrics}, process {state['pid']}\n")
    try:
        with EngineClient(state["socket"], name="status", timeout=5.0) as client:
            for name, value in client.stats().items():
                say(f"{name} {value}\n")
    except (ConnectionError, EngineError, TimeoutError) as error:
        say(f"engine: {error}\n")
        up = False
    return 0 if up else 1


def _write(told: argparse.Namespace, say: Callable[[str], object]) -> int:
    folder = told.folder.absolute()
    if running(folder) is not None:
        raise RuntimeError(f"a server runs from {folder}; stop it first, or choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    models = write_repository(folder / "models", socket=folder / "engine")
    say(f"{models}\nits engine: {shlex.quote(sys.executable)} -m labcore.serving.remote.process ")
    say(f"--socket {shlex.quote(str(folder / 'engine'))} --model {shlex.quote(told.model)}\n")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m labcore.serving.triton.server",
        description=(__doc__ or "").splitlines()[0],
    )
    parser.add_argument("command", choices=["install", "write", "start", "stop", "status"])
    parser.add_argument("--folder", type=Path, default=FOLDER, help="repository, logs and state")
    parser.add_argument(
        "--environment", type=Path, default=ENVIRONMENT, help="the server's virtual environment"
    )
    parser.add_argument("--model", default="target", help="target, draft or a checkpoint folder")
    for name in ("http", "grpc", "metrics"):
        parser.add_argument(f"--{name}", type=int, help="port; 0 picks a free one")
    told = parser.parse_args(arguments)

    def say(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    try:
        if told.command == "install":
            triton_environment.install(told.environment, say=say)
            return 0
        actions = {"start": _start, "stop": _stop, "status": _status, "write": _write}
        return actions[told.command](told, say)
    except (RuntimeError, ValueError, OSError, SupervisorError) as error:
        sys.stderr.write(f"{error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
