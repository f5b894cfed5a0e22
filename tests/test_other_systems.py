"""What Windows lacks is taken away before labcore is imported: no fork, no fcntl, no Triton."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import NEEDS_LINUX

# Their kernels are Triton's: labcore asks for them only where Triton is.
KERNELS = {
    *("labcore.attention.backward", "labcore.attention.decode", "labcore.attention.forward"),
    *("labcore.attention.delta", "labcore.attention.descriptors", "labcore.attention.tiling"),
    "labcore.optim.kernels",
    "labcore.optim.kernels_8bit",
}

WALK = """
import importlib, pkgutil
import labcore

def walk():
    failed = {}
    for module in pkgutil.walk_packages(labcore.__path__, "labcore.", onerror=lambda name: None):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except Exception as problem:
                failed[module.name] = repr(problem)
    return failed
"""

ALL = """
import json, sys
failed = walk()
print(json.dumps([failed, [name for name in sys.modules if name.split(".")[0] != "labcore"]]))
"""

# Other people's modules come first: they look at the system that they are on. O_NONBLOCK stays:
# Python 3.14's shutil removes folders with it here, and without it on Windows.
WITHOUT = """
import contextlib, functools, importlib, json, os, platform, signal, socket, subprocess, sys

GONE = {"fcntl", "grp", "pwd", "resource", "termios", "triton"}
for name in json.load(sys.stdin):
    if name.split(".")[0] not in GONE:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
for name in [name for name in sys.modules if name.split(".")[0] in GONE]:
    del sys.modules[name]
sys.modules.update(dict.fromkeys(GONE))
socket.socketpair = functools.partial(socket.socketpair, socket.AF_UNIX)  # Windows has its own.
subprocess.Popen.kill = lambda self: self.send_signal(9)  # and this too
for module, names in {
    os: "chown fchmod fork forkpty getegid geteuid getgid getloadavg getpgid getuid killpg mkfifo "
    "nice pread sched_getaffinity set_blocking setsid statvfs sysconf uname wait waitid WNOHANG "
    "O_CLOEXEC O_DIRECTORY O_NOFOLLOW",
    signal: "SIGALRM SIGCHLD SIGHUP SIGKILL SIGPIPE SIGQUIT SIGSTOP SIGUSR1 SIGUSR2 alarm "
    "pthread_sigmask setitimer siginterrupt",
    socket: "AF_UNIX",
}.items():
    for name in names.split():
        delattr(module, name)
sys.platform = "win32"
platform.system = lambda: "Windows"
"""

LOOK = """
import io
import torch
failed = walk()

from labcore import device, parallel, processes
from labcore.exercises.topics import lion
from labcore.serving.triton.client import engine_stream

def sentence(call):
    try:
        return repr(call())
    except (RuntimeError, ValueError) as problem:
        return str(problem)

def command(module, *arguments):
    sys.argv[1:] = arguments
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = importlib.import_module(module).main()
    return [code, said.getvalue()]

exercise = lion.EXERCISES[0]
outcome = exercise.check(exercise.reference)
wrong = exercise.check(lambda **arguments: None)
print(json.dumps({
    "failed": failed,
    "badge": device.badge(),
    "kernel": sentence(lambda: device.choose_backend("triton", torch.ones(2), op="f")),
    "right": [outcome.kind, outcome.message],
    "wrong": [wrong.kind, wrong.message],
    "ranks": processes.run(processes.rank_and_world, 2),
    "engine": sentence(lambda: list(engine_stream("nowhere", "x"))),
    "grade": command("labcore.__main__", "grade", "class"),
    "grade all the same": command("labcore.__main__", "grade", "class", "--unsandboxed"),
    "server": command("labcore.serving.triton.server", "start", "--folder", sys.argv[1]),
}))
"""


def python(code: str, *arguments: str, stdin: str = "") -> str:
    """The last line that the code prints."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_labcore_works_without_what_windows_lacks(tmp_path: Path) -> None:
    failed, others = json.loads(python(WALK + ALL))
    assert failed == {}
    folder = str(tmp_path)
    told = json.loads(python(WITHOUT + WALK + LOOK, folder, stdin=json.dumps(others)))
    assert told["failed"].keys() == KERNELS
    assert all("triton" in words for words in told["failed"].values())
    assert "no Triton here" in told["badge"]
    assert "use backend='torch'" in told["kernel"]
    assert told["right"][0] == "right", told["right"]
    assert told["wrong"][0] in ("wrong", "error"), told["wrong"]
    assert told["ranks"] == [[0, 2], [1, 2]]
    # What needs Linux says so in a sentence.
    assert "needs Linux or macOS" in told["engine"]
    for name in ("grade", "grade all the same"):
        code, said = told[name]
        assert code == 1 and "grading needs Linux" in said and "\n" not in said.strip()
    code, said = told["server"]
    assert code == 1 and "Linux" in said and "\n" not in said.strip(), said


def test_linux_tests_are_skipped_elsewhere_with_a_reason() -> None:
    here = Path(__file__).parent
    for name in (name for names in NEEDS_LINUX.values() for name in names):
        assert (here / name).exists(), name
    some = [str(here / name) for name in ("grading/test_sandbox.py", "processes/test_run.py")]
    code = (
        "import sys, pytest, torch; sys.platform = 'darwin'; "
        "pytest.main(['-q', '-rs', '-p', 'no:cacheprovider', *sys.argv[1:]])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *some], cwd=here.parent, capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1].startswith("2 skipped"), done.stdout + done.stderr
    assert done.stdout.count("need Linux") == 2
