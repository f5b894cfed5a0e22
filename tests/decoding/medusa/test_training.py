"""Training the heads: labels, the frozen backbone, going on after a kill."""

from __future__ import annotations

import json

import pytest
import torch
from torch.nn import functional as F

from labcore.decoding import medusa
from labcore.decoding.medusa import MedusaHeads, hidden_states, medusa_loss, train_heads, training
from tests.decoding.medusa.test_heads import backbone_of, shaken


def text(generator: torch.Generator, size: int = 400) -> torch.Tensor:
    return torch.randint(37, (size,), generator=generator)


def test_the_loss_is_that_of_a_loop_over_every_place(generator) -> None:
    """Head i at place t is asked for the token t + 2 + i of its own row, with weight 0.7^i."""
    tokens = torch.randint(11, (3, 9), generator=generator)
    logits = torch.randn(4, 3, 4, 11, generator=generator)
    loss, each = medusa_loss(logits, tokens, decay=0.7)
    wanted = [
        sum(
            -logits[i, row, t].double().log_softmax(0)[tokens[row, t + 2 + i]]
            for row in range(3)
            for t in range(4)
        )
        / 12
        for i in range(4)
    ]
    torch.testing.assert_close(each.double(), torch.stack(wanted), atol=1e-5, rtol=0)
    total = sum(0.7**i * one for i, one in enumerate(wanted))
    torch.testing.assert_close(loss.double(), total, atol=1e-5, rtol=0)
    one_by_one, _ = medusa_loss(iter(logits), tokens, decay=0.7)
    torch.testing.assert_close(one_by_one, loss)


def test_too_few_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="ahead=5"):
        medusa_loss(torch.zeros(4, 1, 6, 3), torch.zeros(1, 10, dtype=torch.int64))


def test_training_leaves_the_backbone_and_lowers_every_loss(generator) -> None:
    backbone = backbone_of(generator)
    before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    cycle = torch.arange(600) % 7
    states = hidden_states(backbone, cycle, length=24)
    for projection in medusa.PROJECTIONS:
        heads = MedusaHeads(backbone, heads=3, projection=projection, rank=6)
        curve = train_heads(heads, states, steps=60, batch=4, rate=3e-2, warmup=5, progress=False)
        first, last = curve.per_head[0], curve.per_head[-1]
        # A tied head has only what a random backbone's small projection can say.
        factor = 1.0 if projection == "tied" else 0.5
        assert all(b < factor * a for a, b in zip(first, last, strict=True)), projection
        assert not heads.training
    for name, tensor in backbone.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_a_training_that_was_broken_off_goes_on_to_the_bit(generator, tmp_path) -> None:
    backbone = backbone_of(generator)
    states = hidden_states(backbone, text(generator), length=16)
    told = {"batch": 3, "rate": 1e-2, "warmup": 2, "progress": False, "seed": 5}

    def fresh() -> MedusaHeads:
        return MedusaHeads(backbone, heads=2, projection="tied")

    whole, broken, file = fresh(), fresh(), tmp_path / "heads.pt"
    curve = train_heads(whole, states, steps=9, **told)

    class Killed(Exception):
        pass

    class Watched:
        """Stops the training in the middle of its fifth step."""

        def __init__(self) -> None:
            self.left = 5

        def __len__(self) -> int:
            return len(states)

        def rows(self, index):
            self.left -= 1
            if self.left == 0:
                raise Killed
            return states.rows(index)

    with pytest.raises(Killed):
        train_heads(broken, Watched(), steps=9, checkpoint=file, save_every=2, **told)
    resumed = fresh()
    again = train_heads(resumed, states, steps=9, checkpoint=file, save_every=2, **told)
    assert again.losses == curve.losses and again.per_head == curve.per_head
    for name, tensor in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], tensor), name
    with pytest.raises(ValueError, match="must hold these heads"):
        train_heads(
            MedusaHeads(backbone, heads=3, projection="tied"),
            states,
            steps=9,
            checkpoint=file,
            **told,
        )


def test_accuracies_count_places_by_rank(generator) -> None:
    backbone = backbone_of(generator)
    heads = shaken(MedusaHeads(backbone, heads=2, projection="tied"), generator)
    states = hidden_states(backbone, text(generator, 230), length=11)
    found = medusa.head_accuracies(heads, states, top=4)
    ranks = training.label_ranks(heads, states, top=4)
    counts = torch.zeros(2, 4, dtype=torch.float64)
    for row, (hidden, tokens) in enumerate(zip(states.hidden, states.tokens, strict=True)):
        logits = heads(hidden.float())
        for i in range(2):
            for t in range(11):
                order = logits[i, t].argsort(descending=True)[:4].tolist()
                label = int(tokens[t + 2 + i])
                if label in order:
                    counts[i, order.index(label)] += 1
                at = order.index(label) if label in order else 4
                assert ranks[row, t, i] == at
    torch.testing.assert_close(found, counts / (len(states) * 11), atol=1e-12, rtol=0)


def test_bytes_are_those_of_the_tensors(generator) -> None:
    backbone = backbone_of(generator)
    heads = MedusaHeads(backbone, projection="full")
    trained = sum(p.numel() for p in heads.parameters())
    frozen = sum(p.numel() for p in backbone.parameters())
    optimizer = torch.optim.AdamW(heads.parameters())
    F.mse_loss(heads(torch.ones(2, 20)), torch.zeros(4, 2, 37)).backward()
    optimizer.step()
    state = optimizer.state_dict()["state"].values()
    held = medusa.training_bytes(trained, frozen)
    assert held["weights"] == 4 * (trained + frozen)
    assert held["gradients"] == sum(p.grad.nbytes for p in heads.parameters())
    assert held["optimizer states"] == sum(
        one[key].nbytes for one in state for key in ("exp_avg", "exp_avg_sq")
    )
    assert json.dumps(held)
