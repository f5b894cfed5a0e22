"""One device's part of a model: what it keeps per micro-batch, and where its step may peak.

The formulas follow `models.Llama` operation by operation. Letters: B rows, T tokens, C hidden_size,
I intermediate_size, H and Hkv heads, D head_dim, V vocab_size; g bytes per element of the weights
and of the residual stream, e bytes per element of a product (2 under autocast).

Per token, a layer keeps two norms (the input in float32, 1/rms, the normalized input, and the
output, which autocast copies for every product that reads it), the rotated queries and keys, the
values, attention's output and its log-sum-exp, and four rows of I in the MLP.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch

from labcore.models.config import LlamaConfig
from labcore.optim import SM3, Adafactor, AdamW8bit, chunked, tensorwise
from labcore.optim.chunked import CHUNK

__all__ = ["Held", "Part", "parameter_shapes"]

Shape = tuple[int, ...]

FLOAT = 4  # bytes of a float32: a row's 1/rms, its log-sum-exp, a logarithm of a probability
INDEX = 8  # bytes of a token or a target
# Float32 arrays at a time in our optimizers' CPU steps, each for a piece of a parameter. Float32
# parameters come first, then half-precision ones, which are widened.
TEMPORARIES = {"lion": (0, 3), "adafactor": (1, 3), "sm3": (1, 3), "adamw8bit": (11, 13)}

# Copies of all weights that the foreach implementations, the default on a GPU, hold at a time.
FOREACH = {"adamw": 1, "lion": 2, "adafactor": 1, "sm3": 1}

# Bytes of one parameter's state. AdamW and Lion keep moments in its dtype, as torch does.
STATE: dict[str, Callable[[Shape, torch.dtype], int]] = {
    "adamw": lambda shape, dtype: 2 * math.prod(shape) * dtype.itemsize + FLOAT,  # the step counter
    "sgd": lambda *_: 0,
    "lion": lambda shape, dtype: math.prod(shape) * dtype.itemsize,
    "adafactor": Adafactor.state_bytes,
    "sm3": SM3.state_bytes,
    "adamw8bit": AdamW8bit.state_bytes,
}


def _share(whole: int, shares: int) -> int:
    """Return the largest of `shares` shares."""
    return -(-whole // shares)


def _layer_shapes(config: LlamaConfig, shares: int = 1) -> dict[str, Shape]:
    """Return one layer's parameters: products split by output, o_proj and down_proj by input."""
    width, wide = config.hidden_size, _share(config.intermediate_size, shares)
    queries = _share(config.num_attention_heads, shares) * config.head_size
    keys = _share(config.kv_heads, shares) * config.head_size
    shapes: dict[str, Shape] = {"input_layernorm.weight": (width,)}
    for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        shapes[f"self_attn.{name}.weight"] = (rows, width)
        if config.qkv_bias:
            shapes[f"self_attn.{name}.bias"] = (rows,)
    shapes["self_attn.o_proj.weight"] = (width, queries)
    if config.output_bias:
        shapes["self_attn.o_proj.bias"] = (width,)
    shapes["post_attention_layernorm.weight"] = (width,)
    shapes["mlp.gate_proj.weight"] = shapes["mlp.up_proj.weight"] = (wide, width)
    shapes["mlp.down_proj.weight"] = (width, wide)
    return shapes


def parameter_shapes(config: LlamaConfig) -> dict[str, Shape]:
    """Return the name and shape of every parameter of `Llama(config)`; a tied head adds none."""
    table = (config.vocab_size, config.hidden_size)
    shapes: dict[str, Shape] = {"embed_tokens.weight": table}
    for layer in range(config.num_hidden_layers):
        one = _layer_shapes(config)
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in one.items()}
    shapes["norm.weight"] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = table
    return shapes


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """What is held at one point of a step, besides weights and optimizer state."""

    activations: float
    gradients: float = 0.0
    workspace: float = 0.0
    done: int = 0  # layers whose backward is over
    gathered: int = 2  # layers whose weights FSDP2 has gathered: this one and the next
    first: bool = False  # the first layer's forward, beside the flat copy of all other weights


@dataclass(frozen=True, kw_only=True)
class Part:
    """One device's part of the model, and the batches that pass through it."""

    config: LlamaConfig
    batch: int
    length: int
    dtype: str
    optimizer: str
    checkpointing: int | str | None
    shares: int  # devices of a tensor-parallel group
    layers: int
    embedding: bool
    head: bool
    in_flight: int  # micro-batches whose activations are kept at a time
    gpu: bool

    # Weights ----------------------------------------------------------------

    @property
    def mixed(self) -> bool:
        """Whether autocast computes the products."""
        return self.dtype == "mixed"

    @property
    def weight_dtype(self) -> torch.dtype:
        """The dtype of weights, gradients and moments."""
        return torch.float32 if self.mixed else getattr(torch, self.dtype)

    @property
    def wide(self) -> int:
        """Bytes per element of the weights and of the residual stream: g."""
        return self.weight_dtype.itemsize

    @property
    def narrow(self) -> int:
        """Bytes per element of a product: e."""
        return 2 if self.mixed else self.wide

    @cached_property
    def shapes(self) -> list[tuple[Shape, int]]:
        """The shapes of this part's parameters, and the number of each."""
        config = self.config
        table = (_share(config.vocab_size, self.shares), config.hidden_size)
        found = [(shape, self.layers) for shape in _layer_shapes(config, self.shares).values()]
        tables = self.embedding + (
            self.head and not (config.tie_word_embeddings and self.embedding)
        )
        return [*found, (table, int(tables)), ((config.hidden_size,), int(self.head))]

    def _elements(self, within: str = "") -> int:
        """Return the elements of one layer's parameters whose names contain `within`."""
        shapes = _layer_shapes(self.config, self.shares)
        return sum(math.prod(shape) for name, shape in shapes.items() if within in name)

    @cached_property
    def parameters(self) -> int:
        """Elements of all parameters."""
        return sum(math.prod(shape) * count for shape, count in self.shapes)

    @property
    def weights(self) -> int:
        """Bytes of the parameters."""
        return self.parameters * self.wide

    @property
    def state(self) -> int:
        """Bytes of the optimizer's state."""
        bytes_of = STATE[self.optimizer]
        return sum(bytes_of(shape, self.weight_dtype) * count for shape, count in self.shapes)

    @property
    def table(self) -> int:
        """Elements of the embedding or of the head."""
        return _share(self.config.vocab_size, self.shares) * self.config.hidden_size

    @property
    def largest(self) -> int:
        """Elements of the largest parameter."""
        return max(math.prod(shape) for shape, count in self.shapes if count)

    @property
    def unit(self) -> int:
        """Bytes of one layer's weights."""
        return self._elements() * self.wide

    # What autograd keeps ----------------------------------------------------

    @property
    def tokens(self) -> int:
        """Tokens per forward."""
        return self.batch * self.length

    @property
    def stream(self) -> int:
        """The residual stream: [B, T, C] with g bytes per element."""
        return self.tokens * self.config.hidden_size * self.wide

    @property
    def logits(self) -> int:
        """The logits: [B, T, V] in float32."""
        return self.tokens * _share(self.config.vocab_size, self.shares) * FLOAT

    @property
    def row(self) -> int:
        """One of the MLP's rows: [B, T, I] with e bytes per element."""
        return self.tokens * _share(self.config.intermediate_size, self.shares) * self.narrow

    def _read(self, products: int) -> int:
        """Return a norm's output as products keep it: once, or under autocast a copy for each."""
        copy = self.tokens * self.config.hidden_size * self.narrow
        return copy * products if self.mixed else copy

    @property
    def norm_input(self) -> int:
        """A norm's input: [B, T, C] in float32, the stream itself if that is float32."""
        return self.tokens * self.config.hidden_size * FLOAT

    def _norm(self, products: int) -> int:
        statistic = self.tokens * FLOAT
        return self.norm_input + statistic + self.stream + self._read(products)

    def _attention(self, outputs: int) -> int:
        """Return queries, keys, values, log-sum-exp, and `outputs` copies of the output."""
        heads = _share(self.config.num_attention_heads, self.shares)
        keys = _share(self.config.kv_heads, self.shares)
        elements = ((1 + outputs) * heads + 2 * keys) * self.config.head_size
        return self.tokens * (elements * self.narrow + heads * FLOAT)

    @property
    def attention(self) -> int:
        """What a layer's attention keeps, without the norm before it."""
        # On a CPU, attention's output is laid out by head, so o_proj reads a copy of it.
        return self._attention(1 if self.gpu else 2)

    @property
    def casts(self) -> int:
        """The 16-bit copies of a layer's matrices that autocast makes and products keep."""
        return self._elements("proj.weight") * self.narrow if self.mixed else 0

    @property
    def layer(self) -> int:
        """What a layer keeps."""
        return self._norm(3) + self.attention + self._norm(2) + 4 * self.row + self.casts

    @property
    def ids(self) -> int:
        """The batch: int64 [B, T + 1]."""
        return self.batch * (self.length + 1) * INDEX

    @property
    def inputs(self) -> int:
        """The batch, and the rotation's cosines and sines, which all layers share."""
        return self.ids + self.tokens * self.config.head_size * self.wide

    @property
    def top(self) -> int:
        """What the final norm, the head and the loss keep."""
        if not self.head:
            return 0
        cast = self.table * self.narrow if self.mixed else 0
        return self._norm(1) + cast + self.logits + self.tokens * INDEX

    @cached_property
    def segments(self) -> list[int]:
        """The number of layers in each segment that is recomputed as one."""
        if self.checkpointing is None:
            return []
        every = 1 if isinstance(self.checkpointing, str) else self.checkpointing
        whole, rest = divmod(self.layers, every)
        return [every] * whole + ([rest] if rest else [])

    @property
    def last_product(self) -> int:
        """down_proj's result, which "selective" keeps although the backward never reads it."""
        narrow = self.tokens * self.config.hidden_size * self.narrow
        return narrow if self.checkpointing == "selective" else 0

    @property
    def segment(self) -> int:
        """What a segment keeps: its input; "selective": also results of products and attention."""
        if self.checkpointing != "selective":
            return self.stream
        return self.stream + self._attention(1) + 2 * self.last_product + 2 * self.row

    @property
    def stack(self) -> int:
        """What the layers keep between forward and backward."""
        return len(self.segments) * self.segment if self.segments else self.layers * self.layer

    @property
    def kept(self) -> int:
        """What one micro-batch keeps at the end of its forward."""
        return self.inputs + self.stack + self.top

    # The moments of a step --------------------------------------------------

    def forward(self) -> list[Held]:
        """Return where a forward may peak, without the gradients of earlier micro-batches."""
        width = self.norm_input
        loss = self.logits if self.head else 0
        cached = self.layers * self.casts if self.segments else 0  # otherwise part of `kept`
        found = [
            Held(activations=self.kept, workspace=loss + cached, gathered=0),
            Held(activations=self.inputs + self.stream, first=True),
        ]
        if self.head:  # before the loss
            before = self.kept - self.logits - self.tokens * INDEX
            found.append(Held(activations=before, workspace=loss, gathered=1))
            if not self.mixed and self.wide == 2:
                before -= self._read(1)
                found.append(Held(activations=before, workspace=self.stream + width, gathered=1))
            below = self.kept - self.top + self.stream
            found.append(Held(activations=below, workspace=self.stream))
        if self.segments:  # nothing of the current layer is kept
            streams = 2 if self.segments[-1] == 1 else 3  # one layer shares the segment's input
            mixing = 2 * self.row
            if self.checkpointing != "selective":
                mixing = max(3 * self.row, self.attention)
            working = streams * self.stream + mixing + cached
            found.append(Held(activations=self.inputs + self.stack, workspace=working))
        return found

    def backward(self) -> list[Held]:
        """Return where a backward may peak: loss, norms, last and first MLP, embedding."""
        g, width = self.wide, self.norm_input
        wider = self.stream if g < FLOAT else 0  # a norm's input in float32 is not the stream
        norm, mlp = 5 * width, self.stream + 3 * self.row
        down, mlp_elements = self._elements("down_proj.weight"), self._elements("mlp.")
        found: list[Held] = []

        def hold(kept: int, gradients: int, workspace: int, **place: Any) -> None:
            held = Held(activations=kept, gradients=gradients, workspace=workspace)
            found.append(replace(held, **place))

        head = 0
        if self.head:
            hold(self.kept - self.tokens * INDEX, 0, 2 * self.logits, gathered=0)
            head = (self.table + self.config.hidden_size) * g
            hold(self.kept - self.top + width, head, norm, gathered=0)
        one = self.row + (2 * down if self.mixed else 0)
        stretches = self.segments or [1] * self.layers
        waits = self.segment if self.segments else self.layer
        last = len(stretches) - 1
        for number in sorted({0, max(0, last - 1), last}):  # those between hold less
            below = self.inputs + (number + 1) * waits
            if self.segments:
                apart = wider + self.last_product
                below += stretches[number] * self.layer + apart - self.segment
            over = sum(stretches[number + 1 :])
            hold(below - one, head + over * self.unit + down * g, mlp, done=over)
        freed = 4 * self.row + self._norm(2) - width + (mlp_elements * 2 if self.mixed else 0)
        hold(below - freed, head + mlp_elements * g, norm + wider)
        every = head + self.layers * self.unit
        hold(self.inputs + width, every, norm, done=self.layers - 1)
        if self.embedding:
            workspace = self.stream
            if self.config.tie_word_embeddings and self.head:  # two gradients and their sum
                workspace = max(self.stream, self.table * g) + self.table * g
            hold(self.ids, self.weights, workspace, done=self.layers)
        return found

    def buffers(self) -> int:
        """Return the workspace that the optimizer keeps between steps: only Lion's, on a CPU."""
        if self.optimizer != "lion" or self.gpu:
            return 0
        line = self._below(chunked.SMALL)
        return 2 * FLOAT * min(CHUNK, self.parameters) + 2 * line * self.wide

    def _below(self, size: int) -> int:
        """Return the elements of parameters under `size`, which our optimizers step together."""
        return sum(math.prod(s) * n for s, n in self.shapes if math.prod(s) < size)

    def _adamw_elements(self) -> int:
        """Return AdamW's peak: two temporaries per parameter, plus one of the previous one's."""
        layer = [math.prod(s) for s in _layer_shapes(self.config, self.shares).values()]
        order = [self.table * self.embedding, *layer, *layer]
        order += [self.config.hidden_size, self.table] if self.head else []
        return max(2 * now + before for before, now in pairwise([0, *order]))

    def step(self) -> list[Held]:
        """Return where the optimizer's step may peak."""
        g, largest = self.wide, self.largest
        if self.gpu and self.optimizer in FOREACH and (g == FLOAT or self.optimizer == "adamw"):
            workspace = FOREACH[self.optimizer] * self.weights
        elif self.optimizer == "adamw":
            workspace = g * self._adamw_elements()
        elif self.optimizer == "sgd":
            workspace = 0
        else:
            arrays, line = TEMPORARIES[self.optimizer][g < FLOAT], largest
            if self.optimizer == "lion":  # two pieces' moments overlap
                line = max(line, self._below(chunked.SMALL))
                arrays += g < FLOAT and line >= 2 * CHUNK
            elif self.optimizer != "adamw8bit" and g == FLOAT:
                line = max(line, self._below(tensorwise.SMALL + 1))
            workspace = arrays * FLOAT * min(CHUNK, line)
        return [Held(activations=self.ids, gradients=self.weights, workspace=workspace)]
