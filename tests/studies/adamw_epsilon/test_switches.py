"""A weight with three formats moves as torch's and labcore's optimizers move it."""

import functools
import math

import pytest
import torch

from labcore.optim import AdamW
from labcore.studies.adamw_epsilon import epsilon, switches

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FP64 = {"fp64": torch.float64, "fp32": torch.float32}


@pytest.mark.parametrize("eps", [1e-8, 1e-6])
@pytest.mark.parametrize("name", DTYPES)
def test_all_in_one_format_is_torchs_loop(name: str, eps: float) -> None:
    steps = 7
    paths = switches.weight_paths(
        0.01, dtypes={name: DTYPES[name]}, arithmetic=name, eps=eps, steps=steps
    )
    ends = paths[name, name, name].weights
    make = functools.partial(torch.optim.AdamW, foreach=False)
    for after in (1, steps):
        theirs = epsilon.weight_after(
            0.01, dtype=DTYPES[name], eps=eps, steps=after, optimizer=make
        )
        # torch rounds in another order.
        assert ends[after].item() == pytest.approx(theirs, rel=2 * torch.finfo(DTYPES[name]).eps)


@pytest.mark.parametrize("weight", ["bf16", "fp16"])
@pytest.mark.parametrize("state", DTYPES)
def test_arithmetic_in_float32_is_labcores_optimizer(weight: str, state: str, seed: int) -> None:
    gradient = torch.tensor(1e-3 * (1 + seed % 7), dtype=DTYPES[weight]).item()
    paths = switches.weight_paths(gradient, dtypes=DTYPES, arithmetic="fp32", steps=60)
    ours = epsilon.weight_after(
        gradient,
        dtype=DTYPES[weight],
        steps=60,
        optimizer=AdamW,
        state_dtype=DTYPES[state],
    )
    end = paths[weight, state, "fp32"].weights[-1].item()
    assert end == pytest.approx(ours, rel=torch.finfo(DTYPES[weight]).eps)


def test_exact_arithmetic_moves_by_the_predicted_share(seed: int) -> None:
    gradient, eps = 10 ** -(3 + seed % 5), 1e-6
    paths = switches.weight_paths(
        gradient, dtypes=FP64, arithmetic="fp64", eps=eps, steps=41, lr=0.01
    )
    path = paths["fp64", "fp64", "fp64"]
    share = epsilon.predict_attenuation(gradient, eps)
    assert path.updates.tolist() == pytest.approx([share] * 41)
    assert path.weights.tolist() == pytest.approx([1 - 0.01 * share * n for n in range(42)])


def test_a_lost_second_moment_makes_updates_grow_as_the_correction_does() -> None:
    path = switches.weight_paths(1e-3, dtypes=DTYPES, arithmetic="fp32", steps=200)
    updates = path["fp32", "fp16", "fp32"].updates
    t = torch.arange(1, 201, dtype=torch.float64)
    predicted = ((1 - 0.999**t) / (1 - 0.999)).sqrt()
    # The first moment is rounded to fp16 too.
    torch.testing.assert_close(updates, predicted, rtol=0.01, atol=0.0)


def test_every_combination_is_there_once() -> None:
    found = switches.all_paths(1e-3, dtypes=DTYPES, epsilons=(1e-8, 1e-4), steps=2)
    assert list(found) == [1e-8, 1e-4]
    for paths in found.values():
        assert len(paths) == 27
        assert all(path.weights.shape == (3,) for path in paths.values())
        assert all(path.updates.shape == (2,) for path in paths.values())
    alone = switches.weight_paths(1e-3, dtypes=DTYPES, arithmetic="bf16", eps=1e-4, steps=2)
    for formats, path in alone.items():
        assert torch.equal(path.weights, found[1e-4][formats].weights)
    assert math.isinf(found[1e-8]["fp32", "fp32", "fp16"].updates[0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtypes": {"int": torch.int8}, "arithmetic": "int"}, "dtype must be one of"),
        ({"dtypes": DTYPES, "arithmetic": "fp8"}, "arithmetic must be one of"),
        ({"dtypes": DTYPES, "arithmetic": "fp32", "eps": -1.0}, "eps must be"),
        ({"dtypes": DTYPES, "arithmetic": "fp32", "steps": 0}, "steps must be"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        switches.weight_paths(1e-3, **settings)
