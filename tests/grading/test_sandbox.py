"""What a program in the sandbox can see, reach and use up, and what is left of it afterwards."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from labcore.grading import sandbox
from labcore.grading.sandbox import Limits, Process
from tests.grading.slurm import until
from tests.labs import mini

pytestmark = pytest.mark.usefixtures("bubblewrap")
ROOT = Path(__file__).resolve().parents[2]
SMALL = Limits(memory_mib=600, cpu_s=20, processes=40, file_mib=16, wall_s=60)


def said_by(program: str, limits: Limits = SMALL) -> tuple[str, str]:
    """What a Python program prints in the sandbox, and what ended it."""
    with Process([sys.executable, "-c", program], limits) as process:
        text = process.stdout.read().decode()
        return text or process.said, process.ended_by


def test_nothing_but_programs_python_and_labcore_can_be_seen(tmp_path: Path) -> None:
    (tmp_path / "grades.csv").write_text("secret")
    hidden = [tmp_path / "grades.csv", ROOT / "labs", ROOT / "tests", ROOT / ".git", "/etc/shadow"]
    program = f"""
import os, labcore
print([os.path.exists(one) for one in {[str(one) for one in hidden]}], labcore.__version__ != "")
for folder in ("/", "/home", "/root", {str(ROOT)!r}, os.path.dirname(labcore.__file__), "/usr/bin"):
    try:
        open(folder + "/mine", "w")
        print("written", folder)
    except OSError:
        pass
print(os.getcwd(), os.listdir("."), sorted(os.environ))
"""
    seen, _ = said_by(program, replace(SMALL, memory_mib=mini.MEMORY_MIB))
    assert seen.splitlines()[0] == f"{[False] * len(hidden)} True"
    assert "written" not in seen
    assert f"{sandbox.HOME} []" in seen and "LABCORE" not in seen and "SSH" not in seen


def test_it_is_nobody_and_stays_nobody() -> None:
    seen, _ = said_by(
        "import os; print(os.getuid(), os.geteuid(), open('/proc/self/status').read())\n"
        "os.setuid(0)"
    )
    assert seen.split()[0] != "0" and "CapEff:\t0000000000000000" in seen
    if os.geteuid() == 0:
        assert int(seen.split()[0]) >= sandbox.FIRST_USER


def test_there_is_no_network(seed: int) -> None:
    with socket.socket() as listener, socket.socket(socket.AF_UNIX) as abstract:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        name = f"\0labcore-{seed}-{secrets.token_hex(4)}"
        abstract.bind(name)
        abstract.listen()
        listener.settimeout(0.1)
        seen, _ = said_by(f"""
import socket
for family, place in ((socket.AF_INET, ("127.0.0.1", {listener.getsockname()[1]})),
                      (socket.AF_INET, ("192.0.2.1", 80)), (socket.AF_UNIX, {name!r})):
    one = socket.socket(family)
    one.settimeout(2)
    try:
        one.connect(place)
        print("reached", place)
    except OSError as problem:
        print("refused")
""")
        assert seen.split() == ["refused"] * 3
        with pytest.raises(TimeoutError):
            listener.accept()


def test_memory_counts_for_all_processes_together() -> None:
    alone, ended = said_by("x = [bytearray(10**8) for _ in range(20)]")
    assert "MemoryError" in alone and ended == ""
    several = """
import os, time
for _ in range(10):
    if os.fork() == 0:
        x = bytearray(b"x" * (150 * 10**6))
        time.sleep(60)
time.sleep(60)
"""
    assert said_by(several)[1] == sandbox.MEMORY


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("import os\nfor _ in range(99): os.fork() or __import__('time').sleep(60)", "BlockingIO"),
        ("open('a', 'wb').write(bytes(17 << 20))", "OSError"),
        ("for n in range(40): open(f'/tmp/{n}', 'wb').write(bytes(1 << 20))", "No space left"),
        ("for n in range(40): open(f'/dev/shm/{n}', 'wb').write(bytes(1 << 20))", "No space left"),
        ("open('/dev/more', 'wb')", "Read-only"),
    ],
)
def test_processes_and_files_are_bounded(program: str, told: str) -> None:
    # A file past its limit is a signal that Python turns into an error.
    assert told in said_by(program)[0]


def test_time_is_bounded_also_of_a_program_that_sleeps() -> None:
    limits = Limits(memory_mib=600, wall_s=2.0)
    assert said_by("import time; time.sleep(20)", limits)[1] == sandbox.TIME


def test_processor_time_is_bounded() -> None:
    text, ended = said_by("while True: pass", Limits(memory_mib=600, cpu_s=1, wall_s=50))
    assert (text, ended) == ("", "")


def test_nothing_lives_on() -> None:
    mark = f"labcore-{secrets.token_hex(8)}"
    program = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", {mark!r}],
                 start_new_session=True)
print("started", flush=True)
time.sleep(600)
"""
    with Process([sys.executable, "-c", program], SMALL) as process:
        assert process.stdout.readline() == b"started\n"
        until("the child", lambda: _running(mark), 10)
    until("the child's end", lambda: not _running(mark), 10)


def test_python_labcore_and_the_system_are_mounted_to_be_read() -> None:
    """Also as root, to whom the files' own permissions say nothing."""
    places = [str(Path(sandbox.__file__).parent), sys.prefix, "/usr"]
    seen, _ = said_by(f"import os\nprint([os.statvfs(p).f_flag & os.ST_RDONLY for p in {places}])")
    assert seen == "[1, 1, 1]\n"


def _running(mark: str) -> bool:
    """Whether a process has the mark as an argument of its own."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes().split(b"\0"):
                return True
    return False


def test_a_user_who_is_not_root_is_fenced_in_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        pytest.skip("the other tests run as a user who is not root")
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    places = [word for name in ("/usr", "/bin", "/lib", "/lib64") for word in _place(name)]
    monkeypatch.setattr(sandbox, "_system", lambda: places)
    monkeypatch.setattr(sandbox, "_own", list)
    written = "touch /mine /dev/mine; touch /tmp/mine && echo kept"
    loop = "for n in $(seq 99); do sleep 9 & done"
    script = f"id -u; grep CapEff /proc/self/status; ls /; {written}; {loop}"
    words = sandbox._wrapped(SMALL, ["sh", "-c", script])
    done = subprocess.run(words, user=1234, group=1234, extra_groups=[], capture_output=True)
    said = (done.stdout + done.stderr).decode()
    assert said.startswith("1234\nCapEff:\t0000000000000000\n") and "root" not in said
    assert "Cannot fork" in said
    assert said.count("Read-only file system") == 2 and "kept" in said


def _place(name: str) -> list[str]:
    path = Path(name)
    return (
        ["--symlink", os.readlink(path), name] if path.is_symlink() else ["--ro-bind", name, name]
    )


def test_a_machine_without_bubblewrap_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    sandbox.missing.cache_clear()
    try:
        assert "bwrap is missing" in sandbox.missing() and "apt-get install" in sandbox.missing()
        broken = tmp_path / "bwrap"
        for name in ("bwrap", "prlimit", "setpriv"):
            (tmp_path / name).write_text("#!/bin/sh\necho no namespaces here >&2\nexit 1\n")
            (tmp_path / name).chmod(0o755)
        sandbox.missing.cache_clear()
        assert broken.exists() and "no namespaces here" in sandbox.missing()
    finally:
        sandbox.missing.cache_clear()
