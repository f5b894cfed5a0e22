"""Greedy decoding is the same alone, graphed, divided, and from the command line."""

from __future__ import annotations

import itertools
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from labcore import processes
from labcore.models import (
    Llama,
    LlamaConfig,
    from_pretrained,
    pretrained,
    prompts,
    save_pretrained,
    shipped_tokenizer,
)
from labcore.models.shipped import FILES
from labcore.parallel.greedy import Decoded, _alone, decode, timed_decode
from labcore.parallel.llama import load_parallel, parallelize
from labcore.parallel.recording import Launch
from tests.parallel.test_graphs_captured import FakeGpu

CONFIG = LlamaConfig(
    vocab_size=44,
    hidden_size=24,
    intermediate_size=20,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=6,
    tie_word_embeddings=True,
)
TOKENS = 12


def made(seed: int, eos: tuple[int, ...] = ()) -> Llama:
    """Its weights are far apart, so that two tokens are seldom nearly equally likely."""
    settings = {name: getattr(CONFIG, name) for name in CONFIG.__dataclass_fields__}
    settings |= {"eos_token_ids": eos, "initializer_range": 0.5}
    generator = torch.Generator().manual_seed(seed)
    return Llama(LlamaConfig(**settings), generator=generator).eval()


@torch.no_grad()
def rereading(model: Llama, tokens: list[int], count: int) -> list[int]:
    """Greedy decoding without a cache: the whole text is read again for each token."""
    row = list(tokens)
    for _ in range(count):
        row.append(int(model(torch.tensor([row])).logits[0, -1].argmax()))
    return row[len(tokens) :]


@pytest.fixture
def prompt(generator: torch.Generator) -> list[int]:
    return torch.randint(CONFIG.vocab_size, (5,), generator=generator).tolist()


@torch.no_grad()
def clear_of_ties(seed: int, prompt: list[int]) -> int:
    """The first seed from `seed` on whose model prefers each of its tokens by 1e-3 or more."""

    def closest(model: Llama) -> float:
        row = torch.tensor([prompt + rereading(model, prompt, TOKENS)])
        best = model(row).logits[0, :-1].topk(2).values
        return float((best[:, 0] - best[:, 1]).min())

    return next(one for one in itertools.count(seed) if closest(made(one)) > 1e-3)


@pytest.mark.parametrize("graphed", [False, True])
def test_the_likeliest_tokens_come(graphed: bool, seed: int, prompt: list[int]) -> None:
    seed = clear_of_ties(seed, prompt)
    model = made(seed)
    expected = rereading(model, prompt, TOKENS)
    assert decode(model, prompt, max_tokens=TOKENS, graphed=graphed) == expected
    assert decode(model, prompt[:1], max_tokens=1, graphed=graphed) == rereading(
        model, prompt[:1], 1
    )
    last = expected[5]
    ending = made(seed, eos=(last, CONFIG.vocab_size - 1))
    until = next(n for n, one in enumerate(expected) if one in ending.config.eos_token_ids) + 1
    found = timed_decode(ending, prompt, max_tokens=TOKENS, graphed=graphed)
    assert list(found.tokens) == expected[:until]
    assert found.steps == until - 1
    assert (found.all_reduces, found.all_reduce_seconds) == (0, 0.0)
    assert found.seconds > 0 or not found.steps


def test_rates_are_per_step() -> None:
    found = Decoded(
        tokens=(1, 2, 3, 4, 5), steps=4, seconds=2.0, all_reduces=3, all_reduce_seconds=0.125
    )
    assert found.tokens_per_second == 2.0
    assert found.all_reduce_share == 0.25
    one = Decoded(tokens=(1,), steps=0, seconds=0.0, all_reduces=3, all_reduce_seconds=0.1)
    assert one.tokens_per_second is None and one.all_reduce_share is None


def test_a_prompt_that_is_none_is_refused(seed: int) -> None:
    model = made(seed)
    for tokens, told in (([], "at least one token"), ([44], "from 0 to 43, got"), ([-1], "got")):
        with pytest.raises(ValueError, match=told):
            decode(model, tokens, max_tokens=3)
    with pytest.raises(ValueError, match="max_tokens must be at least 1"):
        decode(model, [1], max_tokens=0)
    with pytest.raises(ValueError, match="repeats must be at least 1"):
        timed_decode(model, [1], max_tokens=1, repeats=0)


def together(seed: int, prompt: list[int], folder: str) -> tuple[list[Decoded], list[int]]:
    model = parallelize(made(seed))
    runs = [
        timed_decode(model, prompt, max_tokens=TOKENS, graphed=graphed, repeats=2)
        for graphed in (False, True)
    ]
    launch = Launch(op="c10d.allreduce_", shapes=((1, 1, 24),), dtypes=(torch.float32,))
    with pytest.MonkeyPatch.context() as monkeypatch:
        gpu = FakeGpu().install(monkeypatch)
        assert _alone([launch] * 3, None, torch.device("cpu"), 4, graphed=True) > 0
    assert gpu.log == [
        "on cpu", "capture in a pool of its own, aside, thread_local", *["replay"] * 5, "reset"
    ]  # fmt: skip
    return runs, decode(load_parallel(Path(folder)), prompt, max_tokens=TOKENS)


def test_ranks_say_what_one_process_says(seed: int, prompt: list[int], tmp_path: Path) -> None:
    seed = clear_of_ties(seed, prompt)
    whole = made(seed)
    save_pretrained(whole, tmp_path)
    expected = rereading(whole, prompt, TOKENS)
    assert decode(from_pretrained(tmp_path), prompt, max_tokens=TOKENS) == expected
    for runs, loaded in processes.run(together, 2, seed, prompt, str(tmp_path)):
        assert loaded == expected
        for found in runs:
            assert list(found.tokens) == expected
            assert found.all_reduces == 2 * CONFIG.num_hidden_layers + 1
            assert found.all_reduce_seconds > 0


PROMPT = prompts("code")[0]


def text_of(name: str, count: int) -> str:
    tokenizer, model = shipped_tokenizer(), pretrained(name)
    given = tokenizer.encode(PROMPT)
    return tokenizer.decode([*given, *decode(model, given, max_tokens=count)])


def command(*arguments: str) -> int:
    """The command in this process: as a module that nothing imports, whatever other tests did."""
    sys.modules.pop("labcore.parallel.generate", None)
    main = runpy.run_module("labcore.parallel.generate", run_name="the_command")["main"]
    return main(["--prompt", PROMPT, *arguments])


@pytest.mark.parametrize("more", [[], ["--graph"]])
def test_the_command_alone(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--model", "draft", "--tokens", "9", *more) == 0
    told = capsys.readouterr()
    assert told.out.startswith(text_of("draft", 9) + "\n\n")
    summary = told.out.rsplit("\n\n", 1)[1]
    assert re.fullmatch(
        r"9 tokens on 1 × CPU: [\d.]+ tokens/s; 0 all-reduces per token, which alone take 0.0% "
        r"of its time\n",
        summary,
    )
    assert not told.err


def test_the_command_takes_a_folder_and_a_dtype(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_pretrained(made(seed).bfloat16(), tmp_path)
    model = ["--model", str(tmp_path), "--tokens", "1"]

    def refused(*arguments: str) -> str:
        assert command(*arguments) == 2
        told = capsys.readouterr()
        assert not told.out and told.err.count("\n") == 1
        return told.err

    assert "tokenizer.json does not exist" in refused(*model)
    (tmp_path / "tokenizer.json").write_text("{}", "utf-8")
    assert f"{tmp_path} must hold a readable checkpoint, got " in refused(*model)
    (tmp_path / "tokenizer.json").write_bytes((FILES / "tokenizer.json").read_bytes())
    assert "empty for a model without a bos token" in refused(*model, "--prompt", "")
    assert "from 0 to 43, got [" in refused(*model)  # a tokenizer of another model
    assert "must be at least 1, got 0" in refused(*model, "--tokens", "0")
    for nowhere in (str(tmp_path / "none"), str(tmp_path / "tokenizer.json")):
        assert "--model must be target, draft or " in refused("--model", nowhere)
    assert command("--model", "draft", "--tokens", "1", "--prompt", "", "--dtype", "bfloat16") == 0
    assert "1 tokens on 1 × CPU; a rate needs" in capsys.readouterr().out
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    assert f"{tmp_path} must hold a readable checkpoint, got Safe" in refused(*model)


@pytest.mark.parametrize(("ranks", "more"), [(2, ["--graph"]), (4, [])])
def test_the_command_under_torchrun(ranks: int, more: list[str]) -> None:
    count = 6
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
         str(ranks), "-m", "labcore.parallel.generate", "--model", "target", "--prompt", PROMPT,
         "--tokens", str(count), *more],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(text_of("target", count) + "\n\n")  # from one rank only
    summary = done.stdout.rsplit("\n\n", 1)[1]
    assert re.fullmatch(
        rf"{count} tokens on {ranks} × CPU: [\d.]+ tokens/s; 13 all-reduces per token, "
        r"which alone take [\d.]+% of its time\n",
        summary,
    )
    assert "Warning" not in done.stderr
