"""NVIDIA's Triton Inference Server in front of one engine, on this machine's loopback.

`python -m labcore.serving.triton.server install | write | start | stop | status`. `start` runs two
processes, the engine and the server (whose python backend runs model.py in a process of its own),
and starts again what dies: a plain loop with a limit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from labcore.serving.triton import environment as triton_environment
from labcore.serving.triton.client import Addresses, EngineClient, examples, ready

__all__ = ["ServerFailed", "TritonServer", "main", "write_repository"]

ENVIRONMENT = Path(".venv-triton")
FOLDER = Path(".cache/triton_server")
FILES = Path(__file__).parent / "files"
STATE = "server.json"
LOOK_S = 0.1  # between two looks at the processes
STARTS, WITHIN_S = 8, 60.0  # more starts than that within that time, and the server gives up
FREE = range(20_000, 32_000)  # below Linux's ephemeral ports: no connection gets one meanwhile
ENDING = [
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)
]


class ServerFailed(RuntimeError):
    """A process didn't become ready, or died again and again; the message ends with its log."""


class TritonServer:
    """The server, its model `lm` and its engine, from start() to stop() or in a `with` block.

    folder: holds the model repository and the logs. environment: the folder into which
    `triton_environment.install` installed the server. engine: the command of the engine's process,
    to which its socket is added; None means `python -m labcore.serving.triton.process` with
    `engine_options`. addresses: 0 for a free port; None means free ports.
    failure: why it gave up, "" while it runs.
    Raises RuntimeError if the server isn't installed, ValueError for a port that isn't free.
    """

    def __init__(
        self,
        folder: Path = FOLDER,
        *,
        environment: Path = ENVIRONMENT,
        engine: Sequence[str] | None = None,
        engine_options: Sequence[str] = (),
        addresses: Addresses | None = None,
    ) -> None:
        if lack := triton_environment.missing(environment):
            raise RuntimeError(lack)
        self.folder = folder.absolute()
        self.addresses = with_free_ports(addresses or Addresses(http=0, grpc=0, metrics=0))
        self.failure = ""
        self._installed = triton_environment.load(environment)
        self._sockets = Path(tempfile.mkdtemp(prefix="labcore-server-"))  # short, for this user
        self.socket = self._sockets / "engine"
        own = [sys.executable, "-m", "labcore.serving.triton.process", "--attached"]
        command = [*own, *engine_options] if engine is None else [*engine]
        self._engine_command = [*command, "--socket", str(self.socket)]
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._starts: dict[str, deque[float]] = {"engine": deque(), "server": deque()}
        self._stub: int | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="triton-server", daemon=True)

    def start(self, timeout: float = 90.0) -> TritonServer:
        """Start everything and return once the server accepts requests. Raises ServerFailed."""
        try:
            if found := running(self.folder):
                raise RuntimeError(
                    f"a server runs from {self.folder} (process {found['pid']}); stop it first "
                    "with `python -m labcore.serving.triton.server stop`, or choose another folder"
                )
            write_repository(self.folder / "models", self.socket)
            self._remove_shared_memory()
            self._backends = self._installed.write_backends(self.folder / "backends")
            shutil.rmtree(self.folder / "logs", ignore_errors=True)
            (self.folder / "logs").mkdir(parents=True)
            me = {"pid": os.getpid(), "started": started(os.getpid())}
            told = {**me, "socket": str(self.socket), **asdict(self.addresses)}
            (self.folder / STATE).write_text(json.dumps(told), "utf-8")
            self._thread.start()
            self.wait_ready(timeout)
        except BaseException:
            self.stop()
            raise
        return self

    def wait_ready(self, timeout: float = 60.0) -> None:
        """Return once server, stub and engine answer. Raises ServerFailed."""
        until = time.monotonic() + timeout
        while not (ready(self.addresses) and self._answers()):
            if self.failure or time.monotonic() > until:
                reason = self.failure or f"the server was not ready within {timeout:.0f} s"
                raise ServerFailed(f"{reason}; its logs end:\n{self._logs()}")
            time.sleep(LOOK_S)

    def stop(self) -> None:
        """Stop the server and the engine. Calling it again is harmless."""
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join()
            (self.folder / STATE).unlink(missing_ok=True)
        shutil.rmtree(self._sockets, ignore_errors=True)

    def pids(self) -> dict[str, int | None]:
        """Return the process ids of "server", "stub" and "engine"; None if one isn't running."""
        alive = {name: one.pid for name, one in list(self._processes.items()) if one.poll() is None}
        return {"server": alive.get("server"), "stub": self._stub, "engine": alive.get("engine")}

    def client(self, timeout: float = 10.0) -> EngineClient:
        """Connect to the engine directly, without the server."""
        return EngineClient(self.socket, timeout=timeout)

    def __enter__(self) -> TritonServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _keep(self) -> None:
        """Start both processes, and again whenever one is gone, until told to end."""
        try:
            while not self._ending.is_set() and not self.failure:
                for name in ("engine", "server"):
                    if self._gone(name):
                        self._start(name)
                self._ending.wait(LOOK_S)
        except Exception as error:
            self.failure = f"the processes could not be kept running: {error!r}"
        finally:
            for name in ("server", "engine"):
                self._end(name)

    def _gone(self, name: str) -> bool:
        process = self._processes.get(name)
        if process is None or process.poll() is not None:
            return True
        if name == "server":
            # The server reports that it's ready even if its python backend's process has died.
            if self._stub is None:
                self._stub = next(iter(children(process.pid)), None)
            return self._stub is not None and not started(self._stub)
        return False

    def _start(self, name: str) -> None:
        self._end(name)
        starts, now = self._starts[name], time.monotonic()
        while starts and now - starts[0] > WITHIN_S:
            starts.popleft()
        if len(starts) >= STARTS:
            self.failure = f"the {name} had to be started {STARTS} times in {WITHIN_S:.0f} s"
            return
        starts.append(now)
        own = name == "engine"
        with (self.folder / "logs" / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                self._engine_command if own else self._server_command(),
                stdin=subprocess.PIPE,  # the engine exits when it closes, so also if we are killed
                stdout=log,
                stderr=subprocess.STDOUT,
                env=None if own else self._installed.variables(dict(os.environ)),
                start_new_session=True,  # Ctrl-C is for this process alone
            )

    def _end(self, name: str) -> None:
        """End a process and its children, and remove what a killed server leaves behind."""
        process = self._processes.pop(name, None)
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        if name == "server":
            process.terminate()
            self._stub = None
        with suppress(subprocess.TimeoutExpired):
            process.wait(5.0)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # children may outlive the process
        process.wait()
        if name == "server":
            self._remove_shared_memory()

    def _remove_shared_memory(self) -> None:
        """Remove what a killed server left; the next one would use a different name."""
        for region in Path("/dev/shm").glob(f"{region_prefix(self.folder)}*"):
            region.unlink(missing_ok=True)

    def _server_command(self) -> list[str]:
        at = self.addresses
        return [
            *TIED,
            str(os.getpid()),
            str(self._installed.binary),
            f"--model-repository={self.folder / 'models'}",
            f"--backend-directory={self._backends}",
            f"--backend-config=python,shm-region-prefix-name={region_prefix(self.folder)}",
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

    def _answers(self) -> bool:
        try:
            with self.client(timeout=1.0) as client:
                client.stats()
        except OSError:
            return False
        return self._stub is not None

    def _logs(self) -> str:
        ends = []
        for log in sorted((self.folder / "logs").glob("*.log")):
            lines = log.read_text("utf-8", "replace").splitlines()[-12:]
            ends.append(f"{log.name}:\n" + "\n".join(lines))
        return "\n".join(ends)


# Asks the kernel to kill the server when this process dies, then becomes the server.
TIED = (
    sys.executable,
    "-S",
    "-c",
    "import ctypes, os, sys\n"
    "ctypes.CDLL(None).prctl(1, 9)\n"
    "sys.exit(1) if os.getppid() != int(sys.argv[1]) else os.execv(sys.argv[2], sys.argv[2:])\n",
)


def write_repository(folder: Path, engine: str | Path) -> Path:
    """Write the model repository into `folder`; engine: the path of the engine's socket."""
    model = folder / "lm"
    (model / "1").mkdir(parents=True, exist_ok=True)
    quoted = str(engine).replace("\\", "\\\\").replace('"', '\\"')
    text = (FILES / "config.pbtxt").read_text("utf-8").replace('"{socket}"', f'"{quoted}"')
    (model / "config.pbtxt").write_text(text, "utf-8")
    shutil.copyfile(FILES / "model.py", model / "1" / "model.py")
    return folder


def region_prefix(folder: Path) -> str:
    """Return the prefix of the names of the shared memory that a folder's server has."""
    return "labcore_" + hashlib.sha1(os.fsencode(folder.absolute())).hexdigest()[:10]


def children(pid: int) -> list[int]:
    """Return the process ids of a process's children."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # a thread that has ended
            found += map(int, task.read_text().split())
    return sorted(found)


def started(pid: int) -> str:
    """Return when a process started, in ticks since the boot; "" if it has ended."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]  # a zombie has ended
    return ""


def running(folder: Path) -> dict[str, Any] | None:
    """Return pid, socket and ports of the server that runs from `folder`, or None."""
    try:
        told: dict[str, Any] = json.loads((folder / STATE).read_text("utf-8"))
        same = told["started"] == started(told["pid"])
    except (OSError, ValueError, KeyError):
        return None
    return told if same else None  # else the number is another process's by now


def with_free_ports(asked: Addresses) -> Addresses:
    """Return the requested ports, with a free port for each 0; ValueError if one is in use."""
    found: dict[str, int] = {}
    held = []
    try:
        for name in ("http", "grpc", "metrics"):
            port = getattr(asked, name)
            for wanted in [port] if port else random.SystemRandom().sample(FREE, 100):
                probe = socket.socket()
                held.append(probe)  # kept open, or two names could get the same port
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                with suppress(OSError, OverflowError):
                    probe.bind((asked.host, wanted))
                    probe.listen()  # or a second socket could be bound here
                    found[name] = wanted
                    break
            else:
                raise ValueError(
                    f"{name} port {port} of {asked.host} must be free; choose another, or 0 for any"
                )
    finally:
        for probe in held:
            probe.close()
    return Addresses(host=asked.host, **found)


class _Ended(BaseException):
    """A signal arrived while the server was starting."""


@contextmanager
def _signals(ended: threading.Event) -> Iterator[Callable[[], None]]:
    starting = True

    def end(_number: int, _frame: object) -> None:
        first = not ended.is_set()
        ended.set()
        if first and starting:
            raise _Ended

    def ready() -> None:
        nonlocal starting
        starting = False

    heard = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, end) for number in heard}
    try:
        yield ready
    except _Ended:
        pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _start(told: argparse.Namespace) -> int:
    if any(port is not None for port in (told.http, told.grpc, told.metrics)):
        addresses = Addresses(http=told.http or 0, grpc=told.grpc or 0, metrics=told.metrics or 0)
    else:
        try:
            addresses = with_free_ports(Addresses())
        except ValueError:
            addresses = Addresses(http=0, grpc=0, metrics=0)
    options = ["--model", told.model]
    server = TritonServer(
        told.folder, environment=told.environment, engine_options=options, addresses=addresses
    )
    ended = threading.Event()
    with _signals(ended) as ready_to_wait, server:
        ready_to_wait()
        at = server.addresses
        command = f"{shlex.quote(sys.executable)} -m labcore.serving.triton.server"
        folder = f"--folder {shlex.quote(str(server.folder))}"
        _say(
            f"ready: http://{at.host}:{at.http}, gRPC {at.host}:{at.grpc}, model lm; logs in "
            f"{server.folder / 'logs'}\n\nIn another terminal:\n\n{examples(at)}\n"
            f"{command} status {folder}\n{command} stop {folder}\n\nPress Ctrl-C to stop it here.",
        )
        while not ended.wait(0.5):
            if server.failure:
                raise ServerFailed(f"{server.failure}; its logs end:\n{server._logs()}")
    return 0


def _stop(told: argparse.Namespace) -> int:
    state = running(told.folder)
    if state is None:
        _say(f"no server runs from {told.folder}")
        return 1
    os.kill(state["pid"], signal.SIGTERM)
    until = time.monotonic() + 60
    while running(told.folder) is not None:
        if time.monotonic() > until:
            raise RuntimeError(
                f"process {state['pid']} did not exit within 60 s; look into "
                f"{told.folder / 'logs'}, then kill it with `kill -9 {state['pid']}`"
            )
        time.sleep(0.1)
    _say("stopped")
    return 0


def _status(told: argparse.Namespace) -> int:
    state = running(told.folder)
    if state is None:
        _say(f"no server runs from {told.folder}")
        return 1
    at = Addresses(**{name: state[name] for name in ("host", "http", "grpc", "metrics")})
    up = ready(at, timeout=5.0)
    _say(
        f"server {'ready' if up else 'not ready'} at http://{at.host}:{at.http}, gRPC "
        f"{at.host}:{at.grpc}, metrics {at.host}:{at.metrics}, process {state['pid']}"
    )
    try:
        with EngineClient(state["socket"], timeout=5.0) as client:
            _say("\n".join(f"{name} {value}" for name, value in client.stats().items()))
    except OSError as error:
        _say(f"engine: {error}")
        return 1
    return 0 if up else 1


def _write(told: argparse.Namespace) -> int:
    folder = told.folder.absolute()
    models = write_repository(folder / "models", folder / "engine")
    command = f"{shlex.quote(sys.executable)} -m labcore.serving.triton.process"
    _say(f"{models}\nits engine: {command} --socket {folder / 'engine'} --model {told.model}")
    return 0


def _install(told: argparse.Namespace) -> int:
    triton_environment.install(told.environment)
    return 0


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "install": _install,
    "write": _write,
    "start": _start,
    "stop": _stop,
    "status": _status,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m labcore.serving.triton.server",
        description=(__doc__ or "").splitlines()[0],
    )
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="repository, logs and state")
    parser.add_argument(
        "--environment", type=Path, default=ENVIRONMENT, help="the server's virtual environment"
    )
    parser.add_argument("--model", default="target", help="target, draft or a checkpoint folder")
    for name in ("http", "grpc", "metrics"):
        parser.add_argument(f"--{name}", type=int, help="port; 0 picks a free one")
    told = parser.parse_args(arguments)
    try:
        return COMMANDS[told.command](told)
    except (OSError, RuntimeError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
