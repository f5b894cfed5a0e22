"""The cases that train run small: every quantity that the chapter asks for is there."""

import pytest
import torch

from benchmarks import lion as cases
from labcore.optim import AdamW
from labcore.studies.language import curves
from tests.benchmarks.measurements import by_quantity


def test_the_precision_case_has_every_remedy_beside_plain_bf16() -> None:
    found = by_quantity(cases.digits_bf16(cases.SMALL))
    assert set(found) == {f"accuracy/lr {lr}" for lr in ("0.0001", "0.0003", "0.001")}
    for item in found.values():
        assert set(item.peers) == set(cases.PRECISIONS) - {"bf16"}
        assert all(len(samples) == 2 for samples in (item.samples, *item.peers.values()))


@pytest.mark.parametrize("batch", cases.COMPARED)
def test_losses_on_the_language_model_are_compared_seed_by_seed(batch: int) -> None:
    found = by_quantity(cases.language_losses(batch))
    others = set(cases.COMPARED[batch]) - {"AdamW"}
    assert set(found) == {
        name.format(other)
        for name in ("{} minus AdamW", "tokens, {} over AdamW")
        for other in others
    }
    lion, adamw = (curves.reported(batch, name).held_out for name in ("Lion", "AdamW"))
    gaps = [a - b for a, b in zip(lion, adamw, strict=True)]
    assert list(found["Lion minus AdamW"].samples) == gaps and len(gaps) == 4
    assert len(found["tokens, Lion over AdamW"].samples) == 4


@pytest.mark.parametrize("names", [cases.STEPPED, ("AdamW", "Lion")])
def test_whole_steps_are_timed_against_adamws(names: tuple[str, ...]) -> None:
    found = by_quantity(cases._step_times(2_048, repetitions=1, names=names))
    others = {f"{name} over {cases.FUSED}" for name in ("Lion", "Lion fused")} | {"Muon over AdamW"}
    others = others if cases.FUSED in names else set()
    assert set(found) == {"AdamW", "Lion over AdamW"} | others
    assert all(min(item.samples) > 0 for item in found.values())


def test_torchs_fused_adamw_takes_the_steps_of_ours() -> None:
    weights = [torch.nn.Parameter(torch.ones(3, 2)) for _ in range(2)]
    groups = [{"params": weights[:1], "weight_decay": 0.1}, {"params": weights[1:]}]
    ours = AdamW(groups, lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    fused = cases._fused(ours)
    for optimizer in (fused, ours):
        copies = [weight.detach().clone() for weight in weights]
        for weight in weights:
            weight.grad = torch.full_like(weight, 0.5)
        optimizer.step()
        moved = [(a - b).detach() for a, b in zip(weights, copies, strict=True)]
        if optimizer is fused:
            theirs = moved
    assert torch.allclose(moved[1], theirs[1], atol=1e-7) and not torch.equal(moved[0], moved[1])
    assert torch.allclose(moved[0], theirs[0], atol=2e-5)
