"""NVIDIA's Triton Inference Server in front of one engine, on this machine's loopback.

`python -m labcore.serving.triton.server install | start | stop | status`. `start` runs two
processes, the engine and the server (whose python backend runs model.py in a process of its own),
and starts again what dies: a plain loop with a limit.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from labcore.serving.triton import environment as triton_environment
from labcore.serving.triton import machine
from labcore.serving.triton.client import Addresses, ServerError, examples, metrics
from labcore.serving.triton.process import SHIPPED

__all__ = ["ServerFailed", "TritonServer", "main", "write_repository"]

ENVIRONMENT = Path(".venv-triton")
FOLDER = Path(".cache/triton_server")
FILES = Path(__file__).parent / "files"
LOOK_S = 0.1  # between checks of the processes
STUB = "triton_python_backend_stub"  # a server that crashes also has addr2line as a child
ENGINE_PID = 'labcore_engine{value="pid"}'
STARTS, WITHIN_S = 8, 60.0  # more starts than that within that time, and the server gives up


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
        self._installed = triton_environment.load(environment)
        self.folder = folder.absolute()
        self.addresses = machine.with_free_ports(addresses or Addresses(http=0, grpc=0, metrics=0))
        self.failure = ""
        self._sockets = Path(tempfile.mkdtemp(prefix="labcore-server-"))  # short, for this user
        self.socket = self._sockets / "engine"
        own = [sys.executable, "-m", "labcore.serving.triton.process", *engine_options]
        self._engine_command = [*(engine or own), "--socket", str(self.socket)]
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._starts: dict[str, list[float]] = {"engine": [], "server": []}
        self._stub: int | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="triton-server", daemon=True)
        self._held = ExitStack()

    def start(self, timeout: float = 90.0) -> TritonServer:
        """Start everything and return once the server accepts requests. Raises ServerFailed."""
        try:
            self._held.enter_context(machine.hold(self.folder, self.addresses))
            write_repository(self.folder / "models", self.socket)
            shutil.rmtree(self.folder / "logs", ignore_errors=True)
            (self.folder / "logs").mkdir()
            self._thread.start()
            self.wait_ready(timeout)
        except BaseException:
            self.stop()
            raise
        return self

    def wait_ready(self, timeout: float = 60.0) -> None:
        """Return once server, stub and engine answer. Raises ServerFailed."""
        until = time.monotonic() + timeout
        while not self._answers():
            if self.failure or time.monotonic() > until:
                reason = self.failure or f"the server was not ready within {timeout:.0f} s"
                raise self.failed(reason)
            time.sleep(LOOK_S)

    def stop(self) -> None:
        """Stop the server and the engine. Calling it again is harmless."""
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._held.close()
        shutil.rmtree(self._sockets, ignore_errors=True)

    def pids(self) -> dict[str, int | None]:
        """Return the process ids of "server", "stub" and "engine"; None if one isn't running."""
        alive = {name: one.pid for name, one in list(self._processes.items()) if one.poll() is None}
        return {"server": alive.get("server"), "stub": self._stub, "engine": alive.get("engine")}

    def failed(self, reason: str) -> ServerFailed:
        """Return an error with the last lines of the logs."""
        for log in sorted((self.folder / "logs").glob("*.log")):
            lines = log.read_text("utf-8", "replace").splitlines()[-12:]
            reason = "\n".join([f"{reason}\n{log.name} ends:", *lines])
        return ServerFailed(reason)

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
        if name == "engine":
            return False
        # The server reports that it's ready even if its python backend's process has died.
        known = self._stub
        if known is None or STUB not in machine.command(known):
            self._stub = machine.child(process.pid, STUB)
        return known is not None and self._stub is None

    def _start(self, name: str) -> None:
        self._end(name)
        now = time.monotonic()
        starts = self._starts[name] = [at for at in self._starts[name] if now - at < WITHIN_S]
        if len(starts) >= STARTS:
            self.failure = f"the {name} had to be started {STARTS} times in {WITHIN_S:.0f} s"
            return
        starts.append(now)
        command, variables = self._engine_command, dict(os.environ)
        if name == "server":
            command, variables = self._server_command(), self._installed.variables(variables)
        with (self.folder / "logs" / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                machine.tied(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=variables,
                start_new_session=True,  # Ctrl-C is for this process alone
            )

    def _end(self, name: str) -> None:
        """End a process and its children, and remove what a killed server leaves behind."""
        if process := self._processes.pop(name, None):
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(5.0)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # children may outlive the process
            process.wait()
        if name == "server":
            self._stub = None
            for region in machine.regions(self.folder):  # the next one would use a different name
                region.unlink(missing_ok=True)

    def _server_command(self) -> list[str]:
        at = self.addresses
        return [
            str(self._installed.binary),
            f"--model-repository={self.folder / 'models'}",
            f"--backend-directory={self._installed.backends}",
            f"--backend-config=python,shm-region-prefix-name={machine.region_prefix(self.folder)}",
            "--model-control-mode=none",
            "--disable-auto-complete-config",
            *(f"--{name}-address={at.host}" for name in machine.PORTS),
            *(f"--{name}-port={getattr(at, name)}" for name in machine.PORTS),
            "--allow-gpu-metrics=false",  # without NVML, errors would fill the log
            "--exit-timeout-secs=3",
        ]

    def _answers(self) -> bool:
        try:
            shown = metrics(self.addresses)
        except (OSError, ServerError):
            return False
        return shown.get(ENGINE_PID, 0) == self.pids()["engine"]  # so the stub has reached it


def write_repository(folder: Path, engine: str | Path) -> Path:
    """Write the model repository into `folder`; engine: the path of the engine's socket."""
    model = folder / "lm"
    (model / "1").mkdir(parents=True, exist_ok=True)
    text = (FILES / "config.pbtxt").read_text("utf-8").replace('"{socket}"', f'"{engine}"')
    (model / "config.pbtxt").write_text(text, "utf-8")
    shutil.copyfile(FILES / "model.py", model / "1" / "model.py")
    return folder


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _interrupt(_number: int, _frame: object) -> None:
    """End the program at the first signal; the next ones must not interrupt that."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _start(told: argparse.Namespace) -> None:
    if told.model not in SHIPPED and not Path(told.model, "config.json").is_file():
        raise ValueError(
            f"--model must be {', '.join(SHIPPED)} or a folder with a config.json, got "
            f"{told.model!r}; an export of the capstone is in <its folder>/model"
        )
    given = {name: port for name in machine.PORTS if (port := getattr(told, name)) is not None}
    addresses = Addresses(**{**dict.fromkeys(machine.PORTS, 0), **given})
    if not given:
        with suppress(ValueError):  # else free ones
            addresses = machine.with_free_ports(Addresses())
    options = ["--model", told.model]
    server = TritonServer(
        told.folder, environment=told.environment, engine_options=options, addresses=addresses
    )
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    with suppress(KeyboardInterrupt), server:
        command = f"{shlex.quote(sys.executable)} -m labcore.serving.triton.server"
        folder = f"--folder {shlex.quote(str(server.folder))}"
        _say(
            f"ready: {server.addresses}, model lm; logs in {server.folder / 'logs'}\n\n"
            f"In another terminal:\n\n{examples(server.addresses)}\n"
            f"{command} status {folder}\n{command} stop {folder}\n\nPress Ctrl-C to stop it here.",
        )
        while not server.failure:
            time.sleep(0.5)
        raise server.failed(server.failure)


def _stop(told: argparse.Namespace) -> None:
    pid, _ = _running(told)
    os.kill(pid, signal.SIGTERM)
    until = time.monotonic() + 60
    while machine.running(told.folder):
        if time.monotonic() > until:
            raise RuntimeError(
                f"process {pid} did not exit within 60 s; look into {told.folder / 'logs'}, then "
                f"kill it with `kill -9 {pid}`"
            )
        time.sleep(0.1)
    _say("stopped")


def _status(told: argparse.Namespace) -> None:
    pid, addresses = _running(told)
    shown = metrics(addresses)
    if not shown.get(ENGINE_PID):
        raise RuntimeError(f"the server's engine is away; look into {told.folder / 'logs'}")
    _say(f"ready: {addresses}, process {pid}; its engine:")
    for name, value in shown.items():
        if name.startswith("labcore_engine"):
            _say(f"{name.split(chr(34))[1]} {value:g}")


def _install(told: argparse.Namespace) -> None:
    triton_environment.install(told.environment)


def _running(told: argparse.Namespace) -> tuple[int, Addresses]:
    state = machine.running(told.folder)
    if state is None:
        raise RuntimeError(f"no server runs from {told.folder}; start one with `make server`")
    return state


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m labcore.serving.triton.server",
        description=(__doc__ or "").splitlines()[0],
    )
    commands = {"install": _install, "start": _start, "stop": _stop, "status": _status}
    parser.add_argument("command", choices=commands)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="repository, logs and state")
    parser.add_argument(
        "--environment", type=Path, default=ENVIRONMENT, help="the server's virtual environment"
    )
    parser.add_argument("--model", default="target", help="target, draft or a checkpoint folder")
    for name in machine.PORTS:
        parser.add_argument(f"--{name}", type=int, help="port; 0 picks a free one")
    told = parser.parse_args(arguments)
    try:
        commands[told.command](told)
    except (OSError, RuntimeError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
