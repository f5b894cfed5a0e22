"""One norm for a gradient that is split across several workers."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Change, Mistake

__all__ = ["SHARDS"]

LIMITS = (0.5, 0.8, 1.25, 1.6, 2.5)  # student 0 has 1


def clipped_shards(
    shards: Sequence[Sequence[Tensor]],
    replicated: Sequence[bool],
    *,
    max_norm: float,
    norm_type: float,
) -> tuple[float, list[list[Tensor]]]:
    """The norm of the whole gradient, and each worker's tensors clipped by it."""
    parts = [
        part
        for worker, held in enumerate(shards)
        for part, copied in zip(held, replicated, strict=True)
        if worker == 0 or not copied
    ]
    whole = torch.cat([part.flatten() for part in parts])
    norm = torch.linalg.vector_norm(whole, norm_type).item()
    factor = max_norm / norm if norm > max_norm else 1.0
    return norm, [[factor * part for part in held] for held in shards]


def _length(parts: Sequence[Tensor]) -> float:
    return math.sqrt(sum(part.square().sum().item() for part in parts))


def _shard_cases(seed: int) -> list[dict[str, Any]]:
    """Gradients of a few parameters on 2 to 4 workers, cut unevenly along their first axis."""
    generator = torch.Generator().manual_seed(seed)
    chance = random.Random(seed)

    def cut(rows: int, workers: int) -> list[int]:
        marks = sorted(chance.randint(0, rows) for _ in range(workers - 1))
        ends = [0, *marks, rows]
        return [end - start for start, end in itertools.pairwise(ends)]

    cases = []
    # The norm of the whole gradient: far above every limit, above, below, and zero.
    for workers, norm in ((3, 30.0), (2, 4.0), (4, 0.3), (2, 0.0)):
        shapes = [(5, 3), (7,), (4, 2, 2), (3,)]
        copied = [False, False, False, True]
        chance.shuffle(copied)
        whole = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        length = _length(whole)
        whole = [norm / length * grad for grad in whole]
        held: list[list[Tensor]] = [[] for _ in range(workers)]
        for grad, same in zip(whole, copied, strict=True):
            pieces = [grad] * workers if same else grad.split(cut(len(grad), workers))
            for mine, piece in zip(held, pieces, strict=True):
                mine.append(piece.clone())
        cases.append({"shards": held, "replicated": copied, "norm_type": 2.0})
    return cases


# The cases use only the Euclidean norm, which `_length` is.
_EDITS: dict[str, Change] = {
    "replicated counted by every worker": ("if worker == 0 or not copied", ""),
    "replicated left out": ("worker == 0 or ", ""),
    "norms of the workers added": (
        "torch.linalg.vector_norm(whole, norm_type).item()",
        "sum(_length([p for p, copied in zip(held, replicated) if worker == 0 or not copied])"
        " for worker, held in enumerate(shards))",
    ),
    "norms of the tensors added": (
        "torch.linalg.vector_norm(whole, norm_type)",
        "sum(part.norm(norm_type) for part in parts)",
    ),
    "first worker alone": ("for part in parts", "for part in shards[0]"),
    "root forgotten": (".item()", ".item() ** 2"),
    "each worker by its own norm": ("factor *", "max_norm / max(_length(held), max_norm) *"),
    "each tensor by its own norm": ("factor *", "max_norm / max(part.norm(norm_type), max_norm) *"),
    "raised to the limit": ("if norm > max_norm", "if norm"),
    "1e-6 added": ("max_norm / norm", "max_norm / (norm + 1e-6)"),
    "norm after clipping": ("return norm", "return min(norm, max_norm)"),
}
_HINTS = {
    "replicated counted by every worker": "Your norm is too large: a parameter that every worker "
    "has whole is counted once for each of them. The more workers, the harder the same gradient "
    "would be clipped.",
    "replicated left out": "Your norm is too small: the parameters that every worker has whole are "
    "not in it at all.",
    "norms of the workers added": "You add the workers' norms. The norm of two parts at right "
    "angles is shorter than their lengths together; what does add up?",
    "norms of the tensors added": "You add the norms of the tensors. The norm of two parts at "
    "right angles is shorter than their lengths together; what does add up?",
    "first worker alone": "Your norm is that of the first worker's tensors. The others hold parts "
    "of the same gradient.",
    "root forgotten": "Your norm is the square of the right one.",
    "each worker by its own norm": "Your norm is right, but each worker's tensors are scaled by a "
    "factor of that worker's own. Put together, the parts then point elsewhere, and the copies of "
    "a replicated parameter drift apart.",
    "each tensor by its own norm": "Your norm is right, but each tensor is scaled by a factor of "
    "its own: the gradient as a whole then points elsewhere.",
    "raised to the limit": "A gradient that is shorter than `max_norm` is made longer. Clipping "
    "never scales up.",
    "1e-6 added": "Your factor is max_norm / (norm + 1e-6), as that of torch's clip_grad_norm_ is. "
    "Here nothing is added: the result is to have a norm of just `max_norm`.",
    "norm after clipping": "The tensors are right. The norm that you return is the one after "
    "clipping; a log of it would never show a spike.",
}

SHARDS = Exercise(
    id="clipping.shards",
    points=6,
    beyond=2,
    reference=clipped_shards,
    mistakes=[Mistake(name, _EDITS[name], hint) for name, hint in _HINTS.items()],
    cases=_shard_cases,
    variant=lambda student: {
        "max_norm": random.Random(f"max_norm:{student}").choice(LIMITS) if student else 1.0
    },
    returns=("norm", "tensors"),
    rtol=1e-9,
    explanation="The norm asks for each element of the gradient once, wherever it lies: so the "
    "result must not depend on how many workers there are or where the cuts are. That is the test "
    "to write first. Here all parts stand in one process and can be put into one line. On real "
    "workers each sums |g|^p over the parts that it alone answers for, one all-reduce adds the "
    "sums, and the root is taken afterwards; for the infinite norm the all-reduce takes the "
    "maximum. All then compute the same factor, and copies stay equal.",
    hints=(
        "In the example the norm is 7. Which squares add up to 49, and how often is 6 squared "
        "among them?",
        "Squares add up and norms do not, so compute one norm from all elements of the model, "
        "with only one worker's copy of each replicated parameter. The one factor that follows "
        "from this norm multiplies every tensor of every worker, copies included.",
        "`parts = [part for worker, held in enumerate(shards) for part, copied in zip(held, "
        "replicated) if worker == 0 or not copied]` collects the tensors that count for the norm.",
    ),
)
