"""Submissions that attack whoever grades them, each with what has to become of it.

What runs is written for the sandbox alone: dangerous code begins with GUARD, which raises wherever
the machine is not called "sandbox".
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.labs import mini

GUARD = "import socket\nassert socket.gethostname() == 'sandbox', 'this is no sandbox'\n"
SQUARE = "def square(x):\n    return x * x\n"
STOPPED = "graded; a cell ran out of time"
DIED = "graded; a cell killed the kernel (skipped)"
GONE = "not graded: it killed the sandbox that it ran in"
LATE = "did not finish within"


@dataclass(frozen=True, kw_only=True)
class World:
    """What a submission may aim at. spots: paths that it must not read; port, name: listeners'."""

    mark: str
    secret: str
    spots: tuple[str, ...]
    labcore: str
    port: int
    name: str

    def filled(self, text: str) -> str:
        """The text with the world's names in the place of `@NAME@`."""
        found = {
            "@MARK@": self.mark,
            "@SECRET@": self.secret,
            "@SPOTS@": repr(self.spots),
            "@LABCORE@": self.labcore,
            "@PORT@": str(self.port),
            "@SOCKET@": repr(self.name),
        }
        for name, value in found.items():
            text = text.replace(name, value)
        return text


Change = Callable[[mini.Notebook], object]


@dataclass(frozen=True, kw_only=True)
class Hostile:
    """A submission and what has to become of it.

    double, square, extra: code of the cells; extra stands in a cell of its own below the others.
    change: what else is done to the notebook. points: of 5. status: all of it; "" is no row.
    page, flags: texts that stand there. guarded: whether it must never run outside of a sandbox.
    """

    points: float
    status: str = "graded"
    also: tuple[str, ...] = ()
    double: str = "def double(x):\n    return 2 * x"
    square: str = SQUARE
    extra: str = ""
    change: Change = bool
    page: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    guarded: bool = False

    def notebook(self, release: mini.Notebook, world: World) -> mini.Notebook:
        """The notebook that is handed in."""
        made = mini.solved(copy.deepcopy(release))
        guard = GUARD if self.guarded else ""
        for name, text in {"double": self.double, "square": self.square}.items():
            own = guard if text != getattr(Hostile, name) else ""
            mini.cell(made, name)["source"] = own + world.filled(text)
        if self.extra:
            # A guard would stand above a cell's magic; those of this corpus do no harm outside.
            head = "" if self.extra.startswith(("%", "!")) else guard
            made["cells"].append(mini.code("extra", head + world.filled(self.extra)))
        self.change(made)
        return made


def placed(folder: Path, notebook: mini.Notebook) -> None:
    """Writes a notebook into a student's folder; with what JSON has beyond UTF-8 escaped."""
    folder.mkdir(parents=True)
    (folder / "mini.ipynb").write_text(json.dumps(notebook), encoding="ascii")


def wrong(body: str, more: str = "") -> str:
    """A `square` with this body, which gives no right answer."""
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    return f"{more}def square(x):\n{lines}\n"


ENDLESS = {
    "loop in a cell": Hostile(points=2, status=STOPPED, square="while True: pass"),
    "loop in the function": Hostile(
        points=2, status=STOPPED, square=wrong("while True: pass"), page=(LATE,)
    ),
    "loop that catches the interrupt": Hostile(
        points=2,
        status=STOPPED,
        square="import time\nend = time.monotonic() + 40\nwhile time.monotonic() < end:\n"
        "    try:\n        time.sleep(40)\n    except BaseException:\n        pass",
        page=("could not be interrupted",),
    ),
    "fork bomb in a cell": Hostile(
        guarded=True,
        points=2,
        status=STOPPED,
        square="import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n"
        "        pass",
    ),
    "fork bomb in the function": Hostile(
        guarded=True,
        points=2,
        square=wrong(
            "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
        ),
        status=STOPPED,
        flags=("uses os",),
    ),
    "memory bomb": Hostile(
        guarded=True, points=2, square="kept = bytearray(8 << 30)", page=("MemoryError",)
    ),
    "memory bomb in the function": Hostile(
        guarded=True, points=2, square=wrong("return bytearray(8 << 30)"), page=("memory",)
    ),
    "memory of many processes": Hostile(
        guarded=True,
        points=0,
        status="not graded: the notebook's processes together used more than the limit of "
        f"{mini.MEMORY_MIB} MiB",
        square="import os, time\nfor _ in range(30):\n    if os.fork() == 0:\n"
        "        kept = b'x' * (200 << 20)\n        time.sleep(50)\ntime.sleep(50)",
    ),
    "disk filler at home": Hostile(
        guarded=True,
        points=2,
        square="for n in range(9):\n    open(f'{n}', 'wb').write(bytes(32 << 20))",
        page=("No space left on device",),
    ),
    "disk filler of tmp": Hostile(
        guarded=True,
        points=0,
        square="for n in range(9):\n    open(f'/tmp/{n}', 'wb').write(bytes(32 << 20))",
        status="not graded: its answers could not be saved (OSError: [Errno 28] No space left on "
        "device)",
    ),
    "disk filler of shared memory": Hostile(
        guarded=True,
        points=2,
        square="for n in range(9):\n    open(f'/dev/shm/{n}', 'wb').write(bytes(32 << 20))",
        page=("No space left on device",),
    ),
    "4 MB of output": Hostile(
        points=5,
        extra="for _ in range(40):\n    print('x' * 100_000, flush=True)",
        page=("More output was left out",),
    ),
    "one print of 100 MB": Hostile(
        points=5, extra="print('x' * 100_000_000)", also=(STOPPED, DIED)
    ),
    "prints without end": Hostile(
        points=5, status=STOPPED, extra="while True:\n    print('y' * 50)"
    ),
    "display without end": Hostile(
        points=5,
        status=STOPPED,
        extra="from IPython.display import HTML, clear_output, display\nwhile True:\n"
        "    display(HTML('<b>z</b>' * 500))\n    clear_output()",
    ),
    "threads that print forever": Hostile(
        points=5,
        extra="import threading\ndef tell():\n    while True:\n        print('t' * 50)\n"
        "for _ in range(3):\n    threading.Thread(target=tell, daemon=True).start()",
        also=(STOPPED, DIED),
        flags=("uses threading",),
    ),
    "message with a false signature": Hostile(
        points=5,
        status=DIED,
        extra="from IPython import get_ipython\nkernel = get_ipython().kernel\n"
        "parts = [b'<IDS|MSG>', b'false', b'{}', b'{}', b'{}', b'{}']\n"
        "kernel.iopub_thread.send_multipart(parts)",
    ),
    "answer without end": Hostile(
        points=2,
        square=wrong("while True:\n    yield x"),
        page=("only arrays", "got generator"),
    ),
    "answer of a gigabyte": Hostile(
        points=2,
        square=wrong("import numpy\nreturn numpy.zeros(10**9, dtype='int8')"),
    ),
    "answer nested deeply": Hostile(
        points=2,
        square=wrong(
            "import sys\nsys.setrecursionlimit(10**6)\nfor _ in range(5000):\n    x = [x]\nreturn x"
        ),
        flags=("uses sys",),
    ),
}

ENDS = {
    "exit in a cell": Hostile(points=2, status=DIED, square="import os\nos._exit(0)"),
    "exit in the function": Hostile(
        points=2, square=wrong("import os\nos._exit(0)"), page=("ended the process",)
    ),
    "exit when it is unpickled": Hostile(
        points=2,
        square="import os\nclass Ends:\n    def __call__(self, x):\n        return x * x\n"
        "    def __reduce__(self):\n        return os._exit, (0,)\nsquare = Ends()",
        page=("killed the sandbox",),
    ),
    "exit at exit": Hostile(
        points=5,
        extra="import atexit, os, time\natexit.register(lambda: (time.sleep(50), os.abort()))",
    ),
    "SystemExit": Hostile(points=2, square=wrong("raise SystemExit"), page=("SystemExit",)),
    "GeneratorExit": Hostile(
        points=2, square=wrong("raise GeneratorExit('out')"), page=("GeneratorExit",)
    ),
    "an exception of its own kind": Hostile(
        points=2,
        square="class Odd(BaseException):\n    def __str__(self):\n        import os\n"
        "        os._exit(3)\n" + wrong("raise Odd"),
        page=("ended the process",),
    ),
    "kills its parent": Hostile(
        guarded=True,
        points=0,
        status=GONE,
        square="import os, time\nos.kill(os.getppid(), 9)\ntime.sleep(20)",
    ),
    "kills everything": Hostile(
        guarded=True, points=0, status=GONE, square="import os\nos.kill(-1, 9)"
    ),
    "kills everything in the function": Hostile(
        guarded=True,
        points=2,
        square=wrong("import os\nos.kill(-1, 9)"),
        page=("killed the sandbox",),
    ),
    "signal handlers": Hostile(
        points=5,
        extra="import signal\nfor one in (2, 14, 15):\n"
        "    signal.signal(one, lambda *_: None)\nsignal.alarm(1)",
        flags=("uses signal",),
    ),
    "a daemon that outlives its cell": Hostile(
        guarded=True,
        points=5,
        extra="import subprocess, sys\nsubprocess.Popen(\n"
        "    [sys.executable, '-c', 'import time; time.sleep(300)', '@MARK@'],\n"
        "    start_new_session=True, stdin=-3, stdout=-3, stderr=-3)\nprint('left', 'behind')",
        page=("left behind",),
        flags=("uses subprocess",),
    ),
    "a daemon of the function": Hostile(
        guarded=True,
        points=2,
        square=wrong(
            "import subprocess, sys\nsubprocess.Popen(\n"
            "    [sys.executable, '-c', 'import time; time.sleep(300)', '@MARK@'],\n"
            "    start_new_session=True)\nreturn 'started'"
        ),
        page=("hidden square",),
    ),
    "rm -rf": Hostile(
        points=5,
        extra="%%bash\n[ $(hostname) = sandbox ] && rm -rf ~ @LABCORE@ /usr/bin 2>/dev/null\n"
        "echo all   gone",
        page=("all gone",),
        flags=("runs a system command",),
    ),
    "removes what it hands in": Hostile(
        guarded=True,
        points=0,
        status="not graded: its answers could not be saved (FileNotFoundError: [Errno 2] No such "
        "file or directory: '/tmp/handed-in/double')",
        extra="import shutil\nshutil.rmtree('/tmp/handed-in')",
    ),
    "opens all it can": Hostile(
        guarded=True,
        points=0,
        status="not graded: its answers could not be saved",
        extra="kept = []\nwhile True:\n    kept.append(open('/dev/null'))",
    ),
    "waits for input": Hostile(
        points=5, extra="import getpass\ngetpass.getpass()\ninput()", page=("StdinNotImplemented",)
    ),
}
