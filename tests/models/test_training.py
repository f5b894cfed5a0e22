"""Training: exact accumulation, resumption to the bit, the hook, the curve."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from labcore.models import Llama, LlamaConfig, next_token_loss, train, windows
from labcore.optim import Lion
from tests.models.shapes import CONFIGS, model_of, tokens_of

TINY = LlamaConfig(vocab_size=17, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                   num_attention_heads=2, num_key_value_heads=1)  # fmt: skip
TEXT = [(n * n + n // 3) % 17 for n in range(400)]


def fresh(kind=torch.optim.AdamW) -> tuple[Llama, torch.optim.Optimizer]:
    model = Llama(TINY, generator=torch.Generator().manual_seed(7))
    return model, kind(model.parameters(), lr=3e-3)


def run(model, optimizer, steps: int, checkpoint=None, **options):
    """A run with all that a checkpoint must restore."""
    told = {
        "accumulate": 2,
        "clip": lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 0.5),
        "schedule": lambda step: 1 / (1 + step),
        "save_every": 4,
        "progress": False,
    }
    batches = windows(TEXT, batch=2, length=9, seed=3)
    return train(model, batches, optimizer, steps=steps, checkpoint=checkpoint, **told | options)


def test_ragged_accumulation_is_one_large_batch(generator: torch.Generator) -> None:
    """Rows of 1 predict nothing, a batch of only those must not make NaN."""
    tokens = tokens_of(CONFIGS["tied"], (6, 11), generator)
    counts = torch.tensor([11, 2, 1, 1, 7, 4], dtype=torch.int32)
    model = model_of(CONFIGS["tied"], generator).double()
    seen = {}

    def keep(parameters):
        seen["gradients"] = [p.grad.clone() for p in parameters]

    curve = train(
        model, lambda n: (tokens[2 * n : 2 * n + 2], counts[2 * n : 2 * n + 2]),
        torch.optim.SGD(model.parameters(), lr=0.0), steps=1, accumulate=3, clip=keep,
        progress=False,
    )  # fmt: skip
    model.zero_grad()
    losses = [
        F.cross_entropy(model(row[None, :n]).logits[0, :-1], row[1:n], reduction="sum")
        for row, n in zip(tokens, counts.tolist(), strict=True)
        if n > 1
    ]
    mean = sum(losses) / int((counts - 1).sum())
    mean.backward()
    assert curve.tokens == [20] and curve.norms == [None]
    assert curve.losses[0] == pytest.approx(float(mean.detach()), rel=1e-12)
    for ours, parameter in zip(seen["gradients"], model.parameters(), strict=True):
        torch.testing.assert_close(ours, parameter.grad, rtol=1e-10, atol=1e-12)
    mean_of_means = (
        sum(loss.detach() / (n - 1) for loss, n in zip(losses, (10, 1, 6, 3), strict=True)) / 4
    )
    # The loss is known to 1e-12 (above); the two means come this near in 3 of 10^9 runs.
    assert abs(float(mean_of_means) - curve.losses[0]) > 1e-9


@pytest.mark.parametrize("kind", [torch.optim.AdamW, Lion])
def test_a_run_in_pieces_equals_an_unbroken_one(kind, tmp_path: Path) -> None:
    whole, optimizer = fresh(kind)
    curve = run(whole, optimizer, 11)
    for steps in (3, 4, 11, 11):
        model, optimizer = fresh(kind)
        pieces = run(model, optimizer, steps, tmp_path / "run.pt")
    assert pieces == curve
    assert len(curve.losses) == 11 and len(set(curve.rates)) == 11
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


KILLED = """
import sys
import torch
torch.set_num_threads(1)
from tests.models import test_training as t
def batches(n, inner=t.windows(t.TEXT, batch=2, length=9, seed=3)):
    if n >= 12:
        print("reached", flush=True)
        sys.stdin.read()
    return inner(n)
model, optimizer = t.fresh()
t.train(model, batches, optimizer, steps=11, accumulate=2, checkpoint=sys.argv[1], save_every=4,
        clip=lambda p: torch.nn.utils.clip_grad_norm_(p, 0.5), schedule=lambda s: 1 / (1 + s),
        progress=False)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="kill -9 is POSIX")
def test_a_killed_run_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    whole, optimizer = fresh()
    curve = run(whole, optimizer, 11)
    root = Path(__file__).resolve().parents[2]
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path / "run.pt")], cwd=root,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)},
    )  # fmt: skip
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "reached\n"  # in step 6, saved after step 4
        child.send_signal(signal.SIGKILL)
    model, optimizer = fresh()
    assert run(model, optimizer, 11, tmp_path / "run.pt") == curve
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


def test_a_save_that_breaks_off_leaves_the_last_checkpoint(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "run.pt"
    model, optimizer = fresh()
    run(model, optimizer, 4, path)
    before = path.read_bytes()

    def half(value, file) -> None:
        file.write(b"half of it")
        raise OSError("disk full")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", half)
        with pytest.raises(OSError, match="disk full"):
            run(*fresh(), 8, path)
    assert path.read_bytes() == before
    assert len(run(*fresh(), 8, path).losses) == 8


def test_a_small_model_learns_its_text() -> None:
    model = Llama(TINY, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    curve = train(model, windows([1, 2, 3, 4] * 20, batch=4, length=8), optimizer, steps=60,
                  progress=False)  # fmt: skip
    assert curve.losses[0] > 2.5 and curve.losses[-1] < 0.1
    assert model.training


def test_the_bar_shows_steps_and_loss(capsys: pytest.CaptureFixture[str]) -> None:
    run(*fresh(), 3, progress=True)
    shown = capsys.readouterr().err
    assert "3/3" in shown and "loss=" in shown


def test_windows_are_the_texts_and_the_numbers() -> None:
    batches = windows(TEXT, batch=3, length=9, seed=5)
    tokens, counts = batches(4)
    assert counts is None and tokens.shape == (3, 10)
    assert torch.equal(tokens, batches(4)[0]) and not torch.equal(tokens, batches(5)[0])
    assert not torch.equal(tokens, windows(TEXT, batch=3, length=9, seed=6)(4)[0])
    joined = ",".join(map(str, TEXT))
    assert all(",".join(map(str, row)) in joined for row in tokens.tolist())
    assert windows([1, 2, 3], batch=1, length=2)(0)[0].tolist() == [[1, 2, 3]]
    with pytest.raises(ValueError, match="more than 3 tokens"):
        windows([1, 2, 3], batch=1, length=3)


def test_wrong_runs_are_refused(tmp_path: Path) -> None:
    model, optimizer = fresh()
    run(model, optimizer, 1, tmp_path / "run.pt")
    with pytest.raises(ValueError, match="accumulate must be 2"):
        run(*fresh(), 2, tmp_path / "run.pt", accumulate=3)
    with pytest.raises(ValueError, match="no token to predict"):
        train(model, lambda n: (torch.zeros(2, 3, dtype=torch.long), torch.ones(2)), optimizer,
              steps=1, progress=False)  # fmt: skip
    loss, predicted = next_token_loss(model, torch.zeros(2, 1, dtype=torch.long))
    assert (float(loss.detach()), predicted) == (0.0, 0)
