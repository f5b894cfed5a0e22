"""A draft head that is autoregressive over features, in the manner of EAGLE.

Letters: B rows, T positions, C hidden_size, H attention heads, Hkv key and value heads, D head_dim,
V vocabulary, S steps of training-time test.

A position holds a pair: the backbone's state at a token, and the token after it. From the pairs so
far, one decoder layer makes a feature, and the backbone's projection turns it into the logits of
the token after the pair. To go on, the next pair holds the head's own feature in place of a state
of the backbone. Knowing the next token is what Medusa's heads lack.

Sources: Li et al., EAGLE, 2024, arXiv 2401.15077; EAGLE-3, 2025, arXiv 2503.01840. What differs
from EAGLE-3: the head reads one state, after the final norm, where EAGLE-3 fuses three layers'; it
adds the projected state and embedding where EAGLE-3 concatenates them before the layer; and it
shares the backbone's embedding and projection, for all of the vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from labcore.checks import positive, positive_int
from labcore.models import Llama
from labcore.models.llama import RMSNorm, apply_rotary, causal_attention, inverse_frequencies

__all__ = ["EagleHead", "load_eagle", "save_eagle"]

_WEIGHTS, _CONFIG = "model.safetensors", "eagle_config.json"
_FITTING = ("hidden_size", "intermediate_size", "num_attention_heads", "kv_heads", "vocab_size")


class EagleHead(nn.Module):
    """One decoder layer beside a frozen backbone, with the backbone's embedding and projection.

    backbone: doesn't change and isn't a submodule, so `parameters()` are what is trained. The layer
    starts as a copy of the backbone's last, which learns several times faster than random weights.
    sharpness: multiplies the logits where the head says how sure it is, a number that is fitted to
    greedy decoding after training.
    Raises ValueError for numbers that aren't above 0 and for a backbone with biases.
    """

    def __init__(self, backbone: Llama, *, sharpness: float = 1.0) -> None:
        super().__init__()
        self.config = config = backbone.config
        if config.qkv_bias or config.output_bias:
            raise ValueError("backbone must have no attention biases, got a config with them")
        self.sharpness = positive("sharpness", sharpness)
        self._backbone = (backbone,)  # a tuple hides it from parameters() and state_dict()
        like = self.backbone_projection
        made: Any = {"device": like.device, "dtype": like.dtype}
        width, kv = config.hidden_size, config.kv_heads * config.head_size
        queries = config.num_attention_heads * config.head_size
        self.from_hidden = nn.Linear(width, width, bias=False, **made)
        self.from_token = nn.Linear(width, width, bias=False, **made)
        self.before_attention = RMSNorm(width, config.rms_norm_eps, **made)
        self.q_proj = nn.Linear(width, queries, bias=False, **made)
        self.k_proj = nn.Linear(width, kv, bias=False, **made)
        self.v_proj = nn.Linear(width, kv, bias=False, **made)
        self.o_proj = nn.Linear(queries, width, bias=False, **made)
        self.before_mlp = RMSNorm(width, config.rms_norm_eps, **made)
        self.gate_proj = nn.Linear(width, config.intermediate_size, bias=False, **made)
        self.up_proj = nn.Linear(width, config.intermediate_size, bias=False, **made)
        self.down_proj = nn.Linear(config.intermediate_size, width, bias=False, **made)
        self.norm = RMSNorm(width, config.rms_norm_eps, **made)
        self._begin(backbone)

    @torch.no_grad()
    def _begin(self, backbone: Llama) -> None:
        last = backbone.layers[-1]
        attention = ("q_proj", "k_proj", "v_proj", "o_proj")
        for name, source in (
            ("before_attention", last.input_layernorm),
            *((name, getattr(last.self_attn, name)) for name in attention),
            ("before_mlp", last.post_attention_layernorm),
            *(
                (f"{name}_proj", getattr(last.mlp, f"{name}_proj"))
                for name in ("gate", "up", "down")
            ),
            ("norm", backbone.norm),
        ):
            getattr(self, name).weight.copy_(source.weight)
        nn.init.eye_(self.from_token.weight)
        size = float(backbone.norm.weight.square().mean() * self.config.hidden_size) ** -0.5
        generator = torch.Generator(self.norm.weight.device).manual_seed(0)
        self.from_hidden.weight.normal_(0.0, size, generator=generator)

    @property
    def backbone_projection(self) -> Tensor:
        """The backbone's matrix from features to logits, [V, C], without a gradient."""
        (backbone,) = self._backbone
        return (backbone.lm_head or backbone.embed_tokens).weight.detach()

    @property
    def backbone_embedding(self) -> Tensor:
        """The backbone's embeddings of tokens, [V, C], without a gradient."""
        (backbone,) = self._backbone
        return backbone.embed_tokens.weight.detach()

    @property
    def token_table(self) -> Tensor:
        """The backbone's embeddings, each scaled to a root mean square of 1: [V, C]."""
        table = self.backbone_embedding
        return F.rms_norm(table, table.shape[-1:], eps=1e-12)

    def logits(self, features: Tensor) -> Tensor:
        """Return logits [..., V] for features [..., C]."""
        return F.linear(features, self.backbone_projection)

    def forward(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Return features [B, T, C] from pairs of hidden [B, T, C] and the next tokens [B, T]."""
        return self.unrolled(hidden, tokens, 1)[0]

    def unrolled(self, hidden: Tensor, tokens: Tensor, steps: int) -> list[Tensor]:
        """Return the features of each of S steps of training-time test, [B, T, C] each.

        hidden: the backbone's states at positions 0 .. T - 1. tokens: integers [B, T], those at
        positions 1 .. T. In step 0 every position has the backbone's states, its own included. In
        step s the last s pairs before and at a position hold the head's features of steps 0 ..
        s - 1, as they do when it drafts; the pairs before those hold the backbone's states.
        Positions below s repeat what isn't there and mean nothing.
        """
        embedded = self.from_token(F.embedding(tokens, self.token_table))
        width = tokens.shape[1]
        angles = torch.arange(width, device=tokens.device)[:, None].float()
        angles = angles * inverse_frequencies(self.config, tokens.device)
        turns = angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        features: list[Tensor] = []
        given = hidden
        for _ in range(positive_int("steps", steps)):
            x = self.from_hidden(given) + embedded
            normed = self.before_attention(x)
            q = apply_rotary(self._heads(self.q_proj(normed)), *turns)
            keys.append(apply_rotary(self._heads(self.k_proj(normed)), *turns))
            values.append(self._heads(self.v_proj(normed)))
            x = x + self.o_proj(_attended(q, keys, values).transpose(1, 2).flatten(2))
            normed = self.before_mlp(x)
            x = x + self.down_proj(F.silu(self.gate_proj(normed)) * self.up_proj(normed))
            features.append(self.norm(x))
            # The pair at position t holds what the step before made of position t - 1.
            given = features[-1].roll(1, dims=1)
        return features

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.config.head_size)).transpose(1, 2)  # [B, H, T, D]


def _attended(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Return attention [B, H, T, D] of step s = len(keys) - 1 from q [B, H, T, D].

    keys, values: [B, Hkv, T, D] of each step. The query at t sees step 0 at positions up to t - s,
    and step i at position t - s + i, its own at t.
    """
    steps = len(keys) - 1
    if not steps:
        return causal_attention(q, keys[0], values[0])
    groups, width = q.shape[1] // keys[0].shape[1], q.shape[2]
    scale = q.shape[-1] ** -0.5
    shaped = q.unflatten(1, (-1, groups))  # [B, Hkv, G, T, D]
    seen = torch.ones(width, width, dtype=torch.bool, device=q.device).tril(-steps)
    scores = (shaped @ keys[0][:, :, None].transpose(-1, -2)) * scale
    scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    own = [
        (shaped * keys[i].roll(steps - i, dims=2)[:, :, None]).sum(-1, keepdim=True) * scale
        for i in range(1, steps + 1)
    ]
    weights = torch.cat((scores, *own), -1).float().softmax(-1).to(q.dtype)
    mixed = weights[..., :width] @ values[0][:, :, None]
    for i in range(1, steps + 1):
        at = width + i - 1
        mixed = mixed + weights[..., at : at + 1] * values[i].roll(steps - i, dims=2)[:, :, None]
    return mixed.flatten(1, 2)


def save_eagle(head: EagleHead, folder: str | Path) -> None:
    """Write model.safetensors and eagle_config.json to `folder`, without the backbone's tensors."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().contiguous() for name, tensor in head.state_dict().items()}
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
    (folder / _WEIGHTS).chmod(0o644)  # safetensors lets only the owner read it
    told = {
        "sharpness": head.sharpness,
        **{name: getattr(head.config, name) for name in _FITTING},
    }
    (folder / _CONFIG).write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


def load_eagle(
    folder: str | Path, backbone: Llama, *, dtype: torch.dtype | None = None
) -> EagleHead:
    """Return a head that `save_eagle` wrote, on the backbone's device, in evaluation mode.

    dtype: None is the backbone's. Raises FileNotFoundError for a missing file; ValueError for a
    head of another shape than the backbone's, and for missing, unexpected or wrongly shaped
    tensors.
    """
    folder = Path(folder)
    for name in (_CONFIG, _WEIGHTS):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} holds no {name}; save_eagle writes it")
    told = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    for key in _FITTING:
        ours = getattr(backbone.config, key)
        if told[key] != ours:
            raise ValueError(
                f"a head must be made for the backbone's {key} of {ours}, got {told[key]} in "
                f"{folder}; load the backbone that it was trained on"
            )
    head = EagleHead(backbone, sharpness=told["sharpness"])
    found, wanted = load_file(folder / _WEIGHTS), head.state_dict()
    wrong = sorted(found.keys() ^ wanted.keys()) or sorted(
        name for name in wanted if found[name].shape != wanted[name].shape
    )
    if wrong:
        raise ValueError(
            f"{_WEIGHTS} must hold the tensors of an EagleHead, got missing, unexpected or wrongly "
            f"shaped ones: {', '.join(wrong[:5])}"
        )
    head.load_state_dict(found)
    return (head if dtype is None else head.to(dtype)).eval()
