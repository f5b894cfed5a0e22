"""Whose a server's folder is: told by a lock, never by what a dead server wrote."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from labcore.serving.triton.client import Addresses
from labcore.serving.triton.server import main
from labcore.serving.triton.state import Claim, running, with_free_ports

AT = Addresses(http=1, grpc=2, metrics=3)
HOLDER = (
    "import sys; from pathlib import Path; from labcore.serving.triton.state import Claim; "
    "claim = Claim(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
)


def test_a_folder_has_one_owner_and_says_who(tmp_path: Path) -> None:
    assert running(tmp_path / "none") is None and running(tmp_path) is None
    claim = Claim(tmp_path / "s")
    assert running(tmp_path / "s") == {"pid": os.getpid()}
    claim.write(model="lm", path=tmp_path / "engine", addresses=AT)
    told = running(tmp_path / "s")
    assert told is not None and told["pid"] == os.getpid() and told["model"] == "lm"
    assert Addresses(**told["addresses"]) == AT
    with pytest.raises(RuntimeError, match=f"process {os.getpid()}.*; stop it first"):
        Claim(tmp_path / "s")
    assert running(tmp_path / "s") == told  # the second took nothing away
    claim.release()
    claim.release()  # harmless
    assert running(tmp_path / "s") is None
    Claim(tmp_path / "s").release()


def test_an_owner_that_is_killed_owns_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its number may be another's by then: neither status nor stop may take that one for it."""
    sockets = Path(tempfile.mkdtemp(prefix="labcore-server-"))
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as holder:  # fmt: skip
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        assert running(tmp_path) == {"pid": holder.pid}
        assert main(["status", "--folder", str(tmp_path)]) == 1
        assert f"(process {holder.pid}) is starting" in capsys.readouterr().out
        holder.kill()
        holder.wait()
    state = {"model": "lm", "socket": str(sockets / "engine"), "addresses": {}}
    (tmp_path / "server.json").write_text(json.dumps(state))
    (tmp_path / "server.lock").write_text(str(os.getpid()))
    for command in ("status", "stop"):
        assert main([command, "--folder", str(tmp_path)]) == 1  # this process still runs
    assert running(tmp_path) is None and sockets.exists()
    claim = Claim(tmp_path)
    assert not sockets.exists()
    claim.release()


def test_a_server_that_has_not_said_its_number_is_not_signalled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """0 would be the group of whoever asks."""
    claim = Claim(tmp_path)
    (tmp_path / "server.lock").write_text("")
    assert running(tmp_path) == {"pid": 0}
    assert main(["stop", "--folder", str(tmp_path)]) == 1
    assert "a server is just starting" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="process unknown"):
        Claim(tmp_path)
    claim.release()
    claim = Claim(tmp_path)
    claim.release()
    assert (tmp_path / "server.lock").read_text() == ""


@pytest.mark.parametrize("left", ["{", "[]", "{}", '{"socket": "/etc/passwd"}', "\x00"])
def test_damaged_state_is_nothing_and_only_our_own_sockets_go(tmp_path: Path, left: str) -> None:
    kept = tmp_path / "labcore-server-elsewhere" / "engine"
    kept.parent.mkdir()
    kept.touch()
    (tmp_path / "server.json").write_text(left)
    (tmp_path / "server.lock").write_text("no number")
    claim = Claim(tmp_path)
    assert running(tmp_path) == {"pid": os.getpid()}
    claim.release()
    full = {"model": "lm", "socket": str(kept), "addresses": {}}
    (tmp_path / "server.json").write_text(json.dumps(full))
    Claim(tmp_path).release()
    assert kept.exists()  # not in the system's folder for such


def test_free_ports_are_three_and_a_taken_one_is_said() -> None:
    found = with_free_ports(Addresses(http=0, grpc=0, metrics=0))
    assert len({found.http, found.grpc, found.metrics}) == 3
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"grpc port {port} of 127.0.0.1 must be free"):
            with_free_ports(Addresses(http=0, grpc=port, metrics=0))
    with pytest.raises(ValueError, match="http port 70000 .* must be free"):
        with_free_ports(Addresses(http=70000, grpc=0, metrics=0))


def test_write_says_where_and_which_engine_it_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["write", "--folder", "here", "--model", "draft"]) == 0
    said = capsys.readouterr().out
    config = (tmp_path / "here" / "models" / "lm" / "config.pbtxt").read_text()
    assert f'string_value: "{tmp_path}/here/engine"' in config  # the server stands elsewhere
    assert f"--socket {tmp_path}/here/engine --model draft" in said
    claim = Claim(tmp_path / "here")
    assert main(["write", "--folder", "here"]) == 1
    assert "a server runs from" in capsys.readouterr().err
    claim.release()
