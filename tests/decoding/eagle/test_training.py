"""Training-time test: labels, the loss, going on after a kill, and the fitted sharpness."""

from __future__ import annotations

import pytest
import torch

from labcore.decoding.eagle import eagle_accuracies, eagle_loss, fitted_sharpness, train_eagle
from labcore.decoding.medusa import HiddenStates, hidden_states
from tests.decoding.eagle.made import made


def test_the_loss_is_that_of_a_loop_over_every_pair(generator) -> None:
    backbone, head = made("grouped", generator)
    tokens = torch.randint(37, (2, 9), generator=generator)
    with torch.no_grad():
        out = backbone(tokens[:, :7])
        loss, each = eagle_loss(head, out.hidden, tokens, steps=3, decay=0.6)
        unrolled = head.unrolled(out.hidden[:, :6], tokens[:, 1:7], 3)
        wanted = []
        for s in range(3):
            sums = [
                -float(
                    out.logits[row, t + 1].double().softmax(0)
                    @ backbone.head(unrolled[s][row, t]).double().log_softmax(0)
                )
                for row in range(2)
                for t in range(s, 6)
            ]
            wanted.append(sum(sums) / len(sums))
    assert each.tolist() == pytest.approx(wanted, abs=1e-4)
    assert float(loss) == pytest.approx(sum(0.6**s * x for s, x in enumerate(wanted)), abs=1e-3)


def test_training_lowers_every_step_and_resumes(generator, tmp_path) -> None:
    backbone, head = made("tied", generator, 0.02)
    before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    start = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    states = hidden_states(backbone, torch.randint(37, (500,), generator=generator), length=16)
    options = {"unroll": 3, "batch": 4, "rate": 3e-3, "warmup": 5, "progress": False}
    curve = train_eagle(head, states, steps=40, **options)
    floor = float(torch.tensor(curve.losses).min())
    assert floor < curve.losses[0]
    for s in range(3):
        assert sum(one[s] for one in curve.per_head[-5:]) < sum(
            one[s] for one in curve.per_head[:5]
        )
    trained = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    # Killed after 20 steps of 40, which is a checkpoint.
    head.load_state_dict(start)
    file = tmp_path / "at.pt"

    class Killed(Exception):
        pass

    def rows(index):
        if file.exists():
            raise Killed
        return HiddenStates.rows(states, index)

    broken = type("Broken", (), {"__len__": lambda _: len(states), "rows": staticmethod(rows)})()
    with pytest.raises(Killed):
        train_eagle(head, broken, steps=40, checkpoint=file, save_every=20, **options)
    head.load_state_dict(start)
    train_eagle(head, states, steps=40, checkpoint=file, save_every=20, **options)
    for name, tensor in head.state_dict().items():
        assert torch.equal(tensor, trained[name]), name
    for name, tensor in backbone.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_accuracies_count_the_texts_tokens(generator) -> None:
    backbone, head = made("grouped", generator)
    states = hidden_states(backbone, torch.randint(37, (200,), generator=generator), length=16)
    shares = eagle_accuracies(head, states, steps=3)
    right, seen = [0, 0, 0], [0, 0, 0]
    with torch.no_grad():
        for row in range(len(states)):
            hidden, tokens = states.rows(torch.tensor([row]))
            unrolled = head.unrolled(hidden.float(), tokens[:, 1:17], 3)
            for s in range(3):
                for t in range(s, 16):
                    right[s] += int(head.logits(unrolled[s][0, t]).argmax()) == tokens[0, t + 2]
                    seen[s] += 1
    assert shares == [a / b for a, b in zip(right, seen, strict=True)]


def test_sharpness_is_the_best_of_all(generator) -> None:
    backbone, head = made("tied", generator)
    states = hidden_states(backbone, torch.randint(37, (200,), generator=generator), length=16)
    train_eagle(head, states, steps=20, batch=4, rate=1e-2, warmup=5, unroll=2, progress=False)
    found = fitted_sharpness(head, states, steps=2)
    assert 0.5 < found < 4, "the best one lies outside of what is tried"

    @torch.no_grad()
    def loss(sharpness: float) -> float:
        total = 0.0
        for row in range(len(states)):
            hidden, tokens = states.rows(torch.tensor([row]))
            hidden = hidden.float()
            right = head.logits(hidden[0, 1:]).argmax(-1)
            for s, one in enumerate(head.unrolled(hidden[:, :15], tokens[:, 1:16], 2)):
                logs = (head.logits(one[0]).double() * sharpness).log_softmax(-1)
                total -= float(sum(logs[t, right[t]] for t in range(s, 15)))
        return total

    assert loss(found) < min(loss(found - 0.11), loss(found + 0.11))
