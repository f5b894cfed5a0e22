"""Kernels forked from a process that has torch: a group of their own, its end, not its files."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

CELLS = [
    "import os, sys\nprint(os.getppid(), os.getpgid(0) == os.getpid(), 'torch' in sys.modules)",
    "try:\n    os.write({fd}, b'x')\nexcept OSError as problem:\n    print(type(problem).__name__)",
    "while True: pass",
    "print(sys.argv[1], sys.modules['__main__'].__name__)",
    "os._exit(7)",
]
PROGRAM = """
import json, os, sys, torch
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError
from nbformat.v4 import new_code_cell, new_notebook
from labcore.grading.forked import fork_kernels

fork_kernels()
reader, writer = os.pipe()
cells = [new_code_cell(text.replace("{fd}", str(writer))) for text in json.loads(sys.argv[1])]
client = NotebookClient(
    new_notebook(cells=cells), timeout=3, interrupt_on_timeout=True, allow_errors=True,
    error_on_timeout={"ename": "Late", "evalue": "", "traceback": []},
)
died = False
try:
    client.execute()
except DeadKernelError:
    died = True
os.set_blocking(reader, False)
os.close(writer)
said = ["".join(one.get("text", "") for one in cell.outputs).split() for cell in cells]
print(json.dumps([os.getpid(), said, died, os.read(reader, 9).decode()]))
"""


def test_a_forked_kernel_is_a_process_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(CELLS)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    pid, said, died, written = json.loads(done.stdout.splitlines()[-1])
    assert said[0] == [str(pid), "True", "True"]
    assert (said[1], written) == (["OSError"], "")
    assert said[3] == ["-f", "__main__"]  # the loop before it was interrupted
    assert died


ORPHAN = """
import os
from jupyter_client.manager import start_new_kernel
from labcore.grading.forked import fork_kernels

fork_kernels()
manager, client = start_new_kernel()
print(manager.provisioner.pid, flush=True)
os._exit(0)
"""


def test_a_kernel_ends_with_the_process_that_it_was_forked_from() -> None:
    done = subprocess.run([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, timeout=120)
    kernel = Path("/proc", done.stdout.decode().strip())
    for _ in range(300):
        if not kernel.exists() or "Z (zombie)" in (kernel / "status").read_text():
            break
        time.sleep(0.1)
    else:
        raise AssertionError(f"{kernel} still runs")
