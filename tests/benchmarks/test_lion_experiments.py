"""The cases that train run small: every quantity that the chapter asks for is there."""

from benchmarks import lion as cases
from labcore.studies.language import curves
from tests.benchmarks.measurements import by_quantity


def test_the_precision_case_has_every_remedy_beside_plain_bf16() -> None:
    found = by_quantity(cases.digits_bf16(cases.SMALL))
    assert set(found) == {f"accuracy/lr {lr}" for lr in ("0.0001", "0.0003", "0.001")}
    for item in found.values():
        assert set(item.peers) == set(cases.PRECISIONS) - {"bf16"}
        assert all(len(samples) == 2 for samples in (item.samples, *item.peers.values()))


def test_losses_on_the_language_model_are_compared_seed_by_seed() -> None:
    found = by_quantity(cases._language_loss(8_192))
    assert set(found) == {
        f"{name} minus AdamW" for name in cases.COMPARED[8_192] if name != "AdamW"
    }
    lion, adamw = (curves.reported(8_192, name).held_out for name in ("Lion", "AdamW"))
    gaps = [a - b for a, b in zip(lion, adamw, strict=True)]
    assert list(found["Lion minus AdamW"].samples) == gaps and len(gaps) == 4


def test_whole_steps_are_timed_against_adamws() -> None:
    found = by_quantity(cases._step_times(2_048, repetitions=1))
    assert set(found) == {"AdamW", "Lion over AdamW", "Muon over AdamW"}
    assert all(min(item.samples) > 0 for item in found.values())
