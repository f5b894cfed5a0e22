"""A model in a folder: made as a whole, stopped at any moment, gone on with, and exported."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from labcore.capstone.plan import Choices, shape
from labcore.capstone.project import Project
from labcore.decoding import SamplingConfig, generate
from labcore.models import Tokenizer, from_pretrained
from tests.capstone.conftest import write_texts

pytestmark = pytest.mark.long


def command(folder: Path, texts: Path, *more: str) -> list[str]:
    """The program, for a model of a few seconds."""
    asked = [str(folder), "--minutes", "0.1", "--text", str(texts), *more]
    return [sys.executable, "-m", "labcore.capstone", *asked]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts") / "mine")


@pytest.fixture(scope="module")
def made(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A finished model's folder, and what the program said; as many steps on any machine."""
    folder = tmp_path_factory.mktemp("capstone") / "mine"
    Project.open(folder, minutes=0.1, text=str(texts), choices=Choices(spike=True))
    told = json.loads((folder / "plan.json").read_text("utf-8"))
    # The same model and steps on any machine, and a checkpoint every ten.
    told["plan"] |= {"config": asdict(shape(32)), "accumulate": 1, "steps": 120, "seconds": 0.5}
    (folder / "plan.json").write_text(json.dumps(told), "utf-8")
    (folder / "draft.json").write_text('{"steps": 120}', "utf-8")
    done = subprocess.run(
        command(folder, texts, "--spike"), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_the_program_says_what_it_does(made: tuple[Path, str]) -> None:
    said = made[1]
    for part in ("Text: mine, ", "Plan: ", "MiB predicted", "Step 1 of", "bits per byte"):
        assert part in said
    assert "Spike at step " in said and "rows came from planted noise" in said
    for name in ("plain", "n-grams", "EAGLE"):
        assert f"Decoding on the CPU, {name}: " in said
    assert said.count("same text for 100% of the prompts") == 3


def test_transformers_loads_the_export_to_the_same_tokens(made: tuple[Path, str]) -> None:
    place = made[0] / "model"
    theirs, ours = AutoModelForCausalLM.from_pretrained(place), from_pretrained(place)
    their_tokenizer = AutoTokenizer.from_pretrained(place)
    tokenizer = Tokenizer.from_pretrained(place)
    prompt = tokenizer.encode("a line of the text")
    assert their_tokenizer.encode("a line of the text") == prompt
    wanted = generate(ours, [prompt], SamplingConfig(max_tokens=24)).tokens[0]
    found = theirs.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)
    assert found[0, len(prompt) :].tolist() == wanted
    assert their_tokenizer.decode(wanted) == tokenizer.decode(wanted, special=True)


def test_the_card_tells_what_was_decided_planned_and_measured(made: tuple[Path, str]) -> None:
    told = json.loads((made[0] / "model" / "card.json").read_text("utf-8"))
    assert told["decided: optimizer"] == "AdamW" and told["decided: minutes"] == 0.1
    assert told["text"] == "mine" and told["weights"] > 0
    assert told["bits per byte of held-out text"] > 0
    assert told["spikes of the loss"] == "step 73, 4 of 4 rows from planted noise"
    text = (made[0] / "model" / "README.md").read_text("utf-8")
    assert text.startswith("# mine\n") and "| decided: optimizer | AdamW |" in text


def test_the_same_command_again_changes_nothing(made: tuple[Path, str], texts: Path) -> None:
    files = [made[0] / "model" / name for name in ("model.safetensors", "card.json")]
    before = [file.read_bytes() for file in files]
    done = subprocess.run(
        command(made[0], texts, "--spike"), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "Step " not in done.stdout
    assert f"Resuming in {made[0]}" in done.stdout
    assert [file.read_bytes() for file in files] == before


@pytest.mark.parametrize("at", ["training.pt", "draft.pt"])
def test_a_killed_program_ends_as_if_nothing_had_happened(
    at: str, made: tuple[Path, str], texts: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in ("plan.json", "text.pt", "tokenizer.json", "draft.json"):
        shutil.copy(made[0] / name, folder)
    asked = command(folder, texts, "--spike")
    with subprocess.Popen(asked, stdout=subprocess.PIPE, text=True) as running:
        while not (folder / at).exists():
            assert running.poll() is None
            time.sleep(0.01)
        os.kill(running.pid, signal.SIGKILL)
    assert not (folder / "model").exists()
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Step 1 of" not in done.stdout  # it went on from a checkpoint
    for weights in ("model/model.safetensors", "draft.pt"):
        assert (folder / weights).read_bytes() == (made[0] / weights).read_bytes()


def test_a_text_that_changes_meanwhile_changes_nothing(
    made: tuple[Path, str], tmp_path: Path
) -> None:
    asked = json.loads((made[0] / "plan.json").read_text("utf-8"))["asked"]
    choices = Choices(spike=True)
    before = Project.open(made[0], minutes=0.1, text=asked["text"], choices=choices)
    moved = Path(asked["text"]).rename(tmp_path / "moved")
    try:
        after = Project.open(made[0], minutes=0.1, text=asked["text"], choices=choices)
    finally:
        moved.rename(asked["text"])
    assert torch.equal(before.text.train, after.text.train)
    assert before.text.files == after.text.files and before.plan == after.plan


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--text", "/nowhere/at/all"], "a folder or an installed package"),
        (["--minutes", "0"], "minutes must be"),
        (["--memory", "0.5"], "memory must be at least"),
        (["--memory", "inf"], "memory must be"),
        (["--port", "70000"], "port must be"),
        (["--clip", "-1"], "clip must be"),
    ],
)
def test_what_cannot_be_done_is_said_and_nothing_is_left(
    more: list[str], said: str, texts: Path, tmp_path: Path
) -> None:
    done = subprocess.run(
        command(tmp_path / "mine", texts, *more), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "mine").exists()


def test_a_folder_of_other_decisions_or_files_is_left_alone(
    made: tuple[Path, str], texts: Path, tmp_path: Path
) -> None:
    asked = {"minutes": 0.1, "text": str(texts)}
    with pytest.raises(ValueError, match="optimizer must be 'AdamW' to go on"):
        Project.open(made[0], choices=Choices(optimizer="Lion", spike=True), **asked)  # type: ignore[arg-type]
    (tmp_path / "letter.txt").write_text("Dear reader")
    with pytest.raises(ValueError, match="new, empty or one that a capstone began"):
        Project.open(tmp_path, **asked)  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == ["letter.txt"]


def test_a_served_model_answers_and_ends_with_the_program(
    made: tuple[Path, str], texts: Path
) -> None:
    asked = command(made[0], texts, "--spike", "--serve", "--draft", "n-grams")
    with subprocess.Popen(asked, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        line = next(one for one in running.stdout if one.startswith("Serving "))
        assert "http://127.0.0.1:" in line and "#token=" in line
        token, port = line.split("#token=")[1].strip(), int(line.split(":")[-1].split("/")[0])
        connection = http.client.HTTPConnection("127.0.0.1", port)
        body = json.dumps({"model": "mine", "prompt": "a line of", "max_tokens": 4})
        headers = {"Authorization": f"Bearer {token}"}
        connection.request("POST", "/v1/completions", body, headers)
        assert json.load(connection.getresponse())["usage"]["completion_tokens"] == 4
        connection.close()
        running.send_signal(signal.SIGINT)
        assert "Stopped serving" in running.stdout.read() and running.wait(60) == 0
