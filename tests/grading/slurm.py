"""A real Slurm of one node for the tests: Debian's slurmctld, slurmd, slurm-client and munge."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "scontrol", "squeue")
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def until(what: str, holds: Callable[[], Any], seconds: float = 600) -> Any:
    """What `holds` returns as soon as that is true."""
    end = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.1)
    return found


class Slurm:
    """One node, run by this user: its daemons, and its commands as methods."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("SLURM")},
            "PATH": PATH,
            "SLURM_CONF": str(folder / "slurm.conf"),
        }

    def begin(self) -> None:
        folder, host = self.folder, socket.gethostname().partition(".")[0]
        user = pwd.getpwuid(os.getuid()).pw_name
        key, munge = folder / "key", folder / "munge" / "socket"
        for name in ("munge", "state", "spool", "no-cgroups"):
            (folder / name).mkdir(mode=0o755)
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(socket.socket()) for _ in range(2)]
            for one in sockets:
                one.bind(("127.0.0.1", 0))
            ports = [one.getsockname()[1] for one in sockets]
        (folder / "slurm.conf").write_text(f"""\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={munge}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
JobRequeue=0
KillWait=5
MessageTimeout=60
BatchStartTimeout=120
MinJobAge=3600
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 RealMemory=65536
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE
""")
        # From 24.05 on Slurm does without control groups; before, with a place that has none.
        told = re.search(r"(\d+)\.(\d+)", self.say("slurmd", "-V"))
        assert told is not None
        without = (int(told[1]), int(told[2])) >= (24, 5)
        (folder / "cgroup.conf").write_text(
            "CgroupPlugin=disabled\n"
            if without
            else f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={folder}/no-cgroups/\n"
        )
        self._daemon(
            "munged", "--foreground", "--force", f"--socket={munge}", f"--key-file={key}",
            f"--pid-file={folder}/munged.pid", f"--seed-file={folder}/seed",
        )  # fmt: skip
        until("munged", munge.exists)
        self._daemon("slurmctld", "-D")
        self._daemon("slurmd", "-D")
        until("the node", lambda: "idle" in self.say("sinfo", "-h", "-o", "%T", fine=False))

    def _daemon(self, name: str, *words: str) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            # It ends with these tests, also where they are killed.
            command = [
                "setpriv",
                "--pdeathsig",
                "TERM",
                shutil.which(name, path=PATH) or name,
                *words,
            ]
            self._daemons.append(
                subprocess.Popen(command, stdout=log, stderr=log, env=self.environment)
            )

    def end(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def say(self, *command: str, fine: bool = True) -> str:
        found = shutil.which(command[0], path=PATH) or command[0]
        ran = subprocess.run(
            [found, *command[1:]], env=self.environment, capture_output=True, text=True
        )
        assert not fine or ran.returncode == 0, ran.stderr
        return ran.stdout

    def states(self, job: str) -> list[tuple[str, str]]:
        """(state, exit code) of a job, or of each task of an array."""
        shown = self.say("scontrol", "show", "job", job)
        states = re.findall(r"JobState=(\w+)", shown)
        return list(zip(states, re.findall(r"[^d]ExitCode=(\S+)", shown), strict=True))

    def over(self, jobs: list[str]) -> bool:
        return not self.say("squeue", "-h", "-j", ",".join(jobs)).strip()
