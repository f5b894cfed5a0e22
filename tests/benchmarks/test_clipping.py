"""The experiments run small: every quantity that a claim asks for is there, and is what it says."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import clipping as cases
from benchmarks.runner import Measurement, cases_of
from labcore import claims
from labcore.clipping import study

ROOT = Path(__file__).resolve().parents[2]
RNN, CONV = {"width": 10, "gain": 0.5}, {"depth": 3, "channels": 3}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module, settings in {
        study: {
            "SEEDS": (0, 1),
            "STEPS": 24,
            "BAD_STEP": 21,
            "HEALTHY": {"RNN": RNN, "conv": CONV},
            "EXPLODING": RNN,
            "LOUD": {"RNN": "recurrent.", "conv": "layers.1."},
            "BATCH": {"RNN": 2, "conv": 4},
        },
        cases: {
            "DEPTHS": (2, 3),
            "FRESH": {
                name: (network, RNN if network == "RNN" else CONV)
                for name, (network, _) in cases.FRESH.items()
            },
        },
    }.items():
        for name, value in settings.items():
            monkeypatch.setattr(module, name, value)
    yield


def by_quantity(found: list[Measurement]) -> dict[str, Measurement]:
    text = json.dumps([(dict(x.details), list(x.samples), dict(x.peers)) for x in found])
    assert "NaN" not in text and "Infinity" not in text  # a record must be able to hold them
    names = [item.quantity for item in found]
    assert len(set(names)) == len(names)
    assert all(len(item.samples) == 2 for item in found)  # one a seed
    return {item.quantity: item for item in found}


def asked(case: str) -> set[str]:
    """The quantities of one case that the claims ask for."""
    every = [claim for claim in claims.load().values() if claim.slug == "clipping"]
    return {item.quantity for claim in every for item in claim.evidence if item.case == case}


def test_every_claim_and_every_look_up_of_the_chapter_names_a_case() -> None:
    names = {case.name for case in cases_of("clipping")}
    every = [claim for claim in claims.load().values() if claim.slug == "clipping"]
    of_claims = {item.case for claim in every for item in claim.evidence}
    assert of_claims and of_claims <= names
    cells = json.loads((ROOT / "book/clipping.ipynb").read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells)
    assert set(re.findall(r'records\.find,?\(?\s*"clipping",\s*"([^"]+)"', code)) <= names


def test_growth_has_a_prediction_beside_every_factor() -> None:
    found = by_quantity(cases.growth_factor())
    assert asked("growth/factor") <= set(found)
    for item in found.values():
        assert len(item.peers["predicted"]) == 2
        steps = 31 if "RNN" in item.quantity else CONV["depth"] - 1
        for factor, whole in zip(item.samples, item.details["whole way"], strict=True):
            assert factor**steps == pytest.approx(whole, rel=1e-6)


def test_directions_are_taken_at_a_tenth_of_each_norm() -> None:
    found = by_quantity(cases.direction_by_depth())
    wanted = {name.replace("conv of 16", "conv of 3") for name in asked("direction/depth")}
    assert wanted <= set(found)
    for depth in cases.DEPTHS:
        whole = found[f"cosine/conv of {depth}, global"]
        assert list(whole.samples) == pytest.approx([1, 1])
        assert whole.details["kept"] == pytest.approx([0.1, 0.1], rel=1e-5)
    change = found["local cosine, 3 convolutions minus 2"].samples
    deep, shallow = (found[f"cosine/conv of {d}, local, per layer"].samples for d in (3, 2))
    assert list(change) == [one - other for one, other in zip(deep, shallow, strict=True)]


@pytest.mark.parametrize(
    ("case", "function"),
    [
        ("bad-batch/RNN", cases.bad_batch_recurrent),
        ("bad-batch/conv", cases.bad_batch_convolutional),
    ],
)
def test_accuracy_is_lost_seed_by_seed(case: str, function) -> None:
    found = by_quantity(function())
    assert asked(case) <= set(found)
    for name, item in found.items():
        if name.startswith("accuracy lost"):
            pairs = zip(item.details["clean"], item.details["accuracy"], strict=True)
            assert list(item.samples) == [100 * (clean - lost) for clean, lost in pairs]
            assert len(item.details["losses of the first seed"]) <= study.STEPS
        if name.startswith("not finite"):
            assert set(item.samples) <= {0.0, 1.0}
    assert found["bad step over its median/SGD, none"].samples[0] > 50


def test_gradients_that_explode_by_themselves_are_counted_against_global_clipping() -> None:
    found = by_quantity(cases.natural())
    assert asked("natural/RNN") <= set(found)
    clean = [study.natural("global", "AdamW", seed).accuracy for seed in study.SEEDS]
    assert found["accuracy lost/AdamW, none"].details["clean"] == clean


def test_local_is_compared_with_global_seed_by_seed() -> None:
    found = by_quantity(cases.loud_layer())
    assert asked("loud-layer/training") <= set(found)
    for item in found.values():
        means = item.details["accuracy"]
        pairs = zip(means["local, per layer"], means["global"], strict=True)
        assert list(item.samples) == [100 * (local - whole) for local, whole in pairs]


def test_healthy_layers_keep_all_under_the_local_norm_and_little_under_the_global_one() -> None:
    found = by_quantity(cases.loud_first_step())
    assert asked("loud-layer/first-step") <= set(found)
    for name, item in found.items():
        if "local" in name:
            assert list(item.samples) == pytest.approx([1, 1])
        elif "SGD" in name:
            assert max(item.samples) < 0.5


def test_steps_are_measured_against_the_twenty_before_the_bad_batch() -> None:
    moves = [5.0] + [1.0] * 10 + [3.0] * 10 + [40.0, 1.0, 1.0]
    assert cases.bad_step(moves) == 40 / 2.0
    assert cases.usual_step(moves) == 2.0


def test_what_was_not_clipped_has_no_cosine() -> None:
    run = study.train("conv", lr=1e-3, steps=3, **CONV)
    assert cases.clipped_cosine(run) is None
    clip = study.METHODS["value"](1e-4)
    assert 0 < cases.clipped_cosine(study.train("conv", clip, lr=1e-3, steps=3, **CONV)) < 1
    assert cases.finite([1.23456, math.nan, math.inf]) == [1.235, None, None]
