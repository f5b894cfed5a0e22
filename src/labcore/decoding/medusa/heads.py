"""Medusa heads: small networks on a frozen backbone that predict tokens further ahead.

Letters: B rows, C hidden_size, V vocabulary, K heads. Head i, from 0, reads the backbone's state at
a token and predicts the token i + 2 positions later; the backbone itself predicts the next one.
Source: Cai et al., Medusa, 2024, arXiv 2401.10774.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from labcore.checks import one_of, positive_int
from labcore.models import Llama

__all__ = ["PROJECTIONS", "MedusaHeads", "ResidualBlock", "load_heads", "save_heads"]

PROJECTIONS = ("full", "low_rank", "tied")
_WEIGHTS, _CONFIG = "medusa_lm_head.safetensors", "medusa_config.json"


class ResidualBlock(nn.Module):
    """x + silu(W x + b), [..., C] to [..., C]. W and b start at 0: the block changes nothing."""

    def __init__(
        self, width: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, device=device, dtype=dtype)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., C] to [..., C]."""
        return x + F.silu(self.linear(x))


class _LowRank(nn.Module):
    """A head's addition to the backbone's projection: A B x, with A [V, rank] starting at 0."""

    def __init__(
        self, width: int, vocab: int, rank: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.down = nn.Linear(width, rank, bias=False, device=device, dtype=dtype)
        self.up = nn.Linear(rank, vocab, bias=False, device=device, dtype=dtype)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x))


class MedusaHeads(nn.Module):
    """K heads beside a backbone's own; each has residual blocks and a projection to V tokens.

    backbone: doesn't change and isn't a submodule, so `parameters()` are what is trained, on the
    backbone's device and in its dtype. heads: K. layers: residual blocks per head.
    projection: "full", a matrix [V, C] per head that starts as a copy of the backbone's;
    "low_rank", the backbone's matrix plus a product of rank `rank` per head; "tied", the backbone's
    matrix for all heads. An untrained head gives the backbone's next-token logits, whatever the
    projection. Only "low_rank" uses rank.
    Raises ValueError for another projection and for numbers below 1.
    """

    def __init__(
        self,
        backbone: Llama,
        *,
        heads: int = 4,
        layers: int = 1,
        projection: str = "full",
        rank: int = 64,
    ) -> None:
        super().__init__()
        self.config = backbone.config
        self.heads, self.layers = positive_int("heads", heads), positive_int("layers", layers)
        self.projection = one_of("projection", projection, PROJECTIONS)
        self.rank = positive_int("rank", rank)
        self._backbone = (backbone,)  # a tuple hides it from parameters() and state_dict()
        weight = self.backbone_projection
        vocab, width = weight.shape
        # A separate block per head and layer: `[block] * n` would share one.
        self.blocks = nn.ModuleList(
            nn.Sequential(
                *(ResidualBlock(width, weight.device, weight.dtype) for _ in range(layers))
            )
            for _ in range(heads)
        )
        self.projections = nn.ModuleList()
        for _ in range(heads if projection != "tied" else 0):
            if projection == "low_rank":
                own: nn.Module = _LowRank(width, vocab, rank, weight.device, weight.dtype)
            else:
                own = nn.Linear(width, vocab, bias=False, device=weight.device, dtype=weight.dtype)
                own.weight.data.copy_(weight)
            self.projections.append(own)

    @property
    def backbone_projection(self) -> Tensor:
        """The backbone's matrix from hidden states to logits, [V, C], without a gradient."""
        (backbone,) = self._backbone
        return (backbone.lm_head or backbone.embed_tokens).weight.detach()

    def states(self, hidden: Tensor) -> Tensor:
        """Return what each head projects: [K, ..., C] from the backbone's hidden [..., C]."""
        return torch.stack([block(hidden) for block in self.blocks])

    def head(self, index: int, hidden: Tensor) -> Tensor:
        """Return logits [..., V] of one head, from 0, for the token index + 2 positions later."""
        state = self.blocks[index](hidden)
        if self.projection == "full":
            logits: Tensor = self.projections[index](state)
            return logits
        logits = F.linear(state, self.backbone_projection)
        return logits if self.projection == "tied" else logits + self.projections[index](state)

    def forward(self, hidden: Tensor, count: int | None = None) -> Tensor:
        """Return logits [count, ..., V] of the first heads, None for all K.

        hidden: [..., C], after the backbone's final norm.
        """
        asked = range(self.heads)[:count]
        return torch.stack([self.head(index, hidden) for index in asked])


def save_heads(heads: MedusaHeads, folder: str | Path) -> None:
    """Write medusa_lm_head.safetensors and medusa_config.json to `folder`.

    The file uses the names of the authors' checkpoints: for head i and layer j, `i.j.linear.weight`
    and `.bias`, then the projection as layer number `layers`. A tied projection isn't in it.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    told = {
        "medusa_num_heads": heads.heads,
        "medusa_num_layers": heads.layers,
        "projection": heads.projection,
        "rank": heads.rank,
        "hidden_size": heads.config.hidden_size,
        "vocab_size": heads.config.vocab_size,
    }
    tensors = {name: tensor.contiguous() for name, tensor in _stored(heads).items()}
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
    (folder / _WEIGHTS).chmod(0o644)  # safetensors lets only the owner read it
    (folder / _CONFIG).write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


def load_heads(
    folder: str | Path, backbone: Llama, *, dtype: torch.dtype | None = None
) -> MedusaHeads:
    """Return heads that `save_heads` wrote, on the backbone's device, in evaluation mode.

    dtype: None is the backbone's. Raises FileNotFoundError for a missing file; ValueError for heads
    that don't fit the backbone's shape, and for missing, unexpected or wrongly shaped tensors.
    """
    folder = Path(folder)
    for name in (_CONFIG, _WEIGHTS):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} holds no {name}; save_heads writes it")
    told = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    for key in ("hidden_size", "vocab_size"):
        ours = getattr(backbone.config, key)
        if told.get(key, ours) != ours:
            raise ValueError(
                f"heads must be made for the backbone's {key} of {ours}, got {told[key]} in "
                f"{folder}; load the backbone that they were trained on"
            )
    heads = MedusaHeads(
        backbone,
        heads=told["medusa_num_heads"],
        layers=told["medusa_num_layers"],
        projection=told.get("projection", "full"),
        rank=told.get("rank", 64),
    )
    found = load_file(folder / _WEIGHTS)
    wanted = _stored(heads)
    wrong = sorted(found.keys() ^ wanted.keys()) or sorted(
        name for name in wanted if found[name].shape != wanted[name].shape
    )
    if wrong:
        raise ValueError(
            f"{_WEIGHTS} must hold the tensors that {_CONFIG} describes, got missing, unexpected "
            f"or wrongly shaped ones: {', '.join(wrong[:5])}"
        )
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.copy_(found[name])
    return (heads if dtype is None else heads.to(dtype)).eval()


def _stored(heads: MedusaHeads) -> dict[str, Tensor]:
    """Return the parameters by their names in the file."""
    named: dict[str, Tensor] = {}
    for name, parameter in heads.named_parameters():
        kind, index, rest = name.split(".", 2)
        layer = "" if kind == "blocks" else f"{heads.layers}."
        named[f"{index}.{layer}{rest}"] = parameter.detach()
    return named
