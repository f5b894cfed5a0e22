"""What verifying one drafted token emits, in closed form, under three rules of rejection.

p is the target's distribution and q the draft's. A token x drawn from q is accepted with
probability min(1, p(x) / q(x)), so x is emitted by acceptance with probability min(p(x), q(x)). The
rule decides what is emitted after a rejection.
Source: Leviathan et al., 2023, arXiv 2211.17192, section 2.3 and appendix A.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from labcore.checks import one_of
from labcore.decoding.verify import residual

__all__ = ["RULES", "OneToken", "one_token", "toward"]

RULES = ("residual", "softmaxed residual", "p again")
"""What to draw from after a rejection: the normalized residual (p - q)+, which is exact; its
softmax, as a library once did by mistake; or p itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OneToken:
    """Where the probability of each token comes from; all fp64 [V].

    accepted: min(p, q). replaced: what the rule adds after a rejection. Together they sum to 1.
    """

    accepted: Tensor
    replaced: Tensor

    @property
    def out(self) -> Tensor:
        """The distribution of the emitted token, [V]."""
        return self.accepted + self.replaced

    @property
    def acceptance(self) -> float:
        """P(the drafted token is accepted) = sum min(p, q), which is 1 - total variation(p, q)."""
        return float(self.accepted.sum())

    def distance(self, p: Tensor) -> float:
        """Return the total variation between the emitted token and p: 0 is exact, 1 is disjoint."""
        return float((self.out - p.double()).abs().sum() / 2)


def _distribution(name: str, row: Tensor) -> Tensor:
    found = torch.as_tensor(row).double()
    if found.dim() != 1 or bool((found < 0).any()) or abs(float(found.sum()) - 1) > 1e-4:
        raise ValueError(
            f"{name} must be one row [V] of probabilities that sum to 1, got shape "
            f"{tuple(found.shape)} and sum {float(found.sum()):.6g}"
        )
    return found / found.sum()


def toward(p: Tensor, q: Tensor, share: float) -> Tensor:
    """Return a draft between q (share 0) and p (share 1): (1 - share) q + share p, fp64 [V]."""
    if not 0 <= share <= 1:
        raise ValueError(f"share must be from 0 (q) to 1 (p), got {share}")
    return torch.lerp(_distribution("q", q), _distribution("p", p), share)


def one_token(p: Tensor, q: Tensor, rule: str = "residual") -> OneToken:
    """Return what is emitted if p [V] judges a token from q [V]; rule: one of RULES.

    Raises ValueError for rows that aren't distributions over the same vocabulary.
    """
    one_of("rule", rule, RULES)
    target, draft = _distribution("p", p), _distribution("q", q)
    if target.shape != draft.shape:
        raise ValueError(f"p and q must have the same length, got {len(target)} and {len(draft)}")
    left = (target - draft).clamp(min=0)
    drawn = {
        "residual": residual(target, draft),
        "softmaxed residual": left.softmax(-1),
        "p again": target,
    }
    return OneToken(accepted=torch.minimum(target, draft), replaced=drawn[rule] * left.sum())
