"""Kernels that are forked from the session instead of started: they find torch imported.

Starting one takes most of the time of grading a small notebook: it would import again what the
session has just imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from ipykernel.kernelapp import IPKernelApp
from jupyter_client.provisioning import local_provisioner

__all__ = ["fork_kernels"]


class _Forked:
    """A kernel's process, with as much of `subprocess.Popen` as jupyter_client uses."""

    stdin = stdout = stderr = None

    def __init__(self, command: Sequence[str], **_: object) -> None:
        self.returncode: int | None = None
        arguments = [*command[command.index("-f") :]]
        # It ends when this process does, also where no sandbox ends both.
        arguments.append(f"--IPKernelApp.parent_handle={os.getpid()}")
        self.pid = os.fork()
        if self.pid == 0:
            _be_kernel(arguments)
        with contextlib.suppress(PermissionError, ProcessLookupError):
            # Both do this, so that no signal to the kernel's group comes too early, and thus here.
            os.setpgid(self.pid, self.pid)

    def poll(self) -> int | None:
        """Return the exit code, None while the process runs."""
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self) -> int:
        """Wait for the end; return the exit code."""
        while (code := self.poll()) is None:
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask the process to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the process."""
        self.send_signal(signal.SIGKILL)


def _be_kernel(arguments: Sequence[str]) -> NoReturn:
    """Run a kernel in this forked process, as `python -m ipykernel_launcher` would."""
    code = 1
    try:
        os.setpgid(0, 0)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # the session's requests and sockets
        # The fork happens within the session's event loop, which is not the kernel's.
        asyncio._set_running_loop(None)
        asyncio.set_event_loop(None)
        sys.argv = ["ipykernel_launcher.py", *arguments]
        IPKernelApp.launch_instance()
        code = 0
    finally:
        os._exit(code)


def fork_kernels() -> None:
    """Make jupyter_client fork this process's kernels from now on."""
    local_provisioner.launch_kernel = _Forked  # type: ignore[assignment]  # all that is asked of it
