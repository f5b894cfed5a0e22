"""One device's part of a model: what it keeps for the backward, term by term.

The formulas follow `models.Llama` operation by operation. Letters: B rows, T tokens, C hidden_size,
I intermediate_size, H and Hkv heads, D head_dim, V vocab_size; g bytes per element of the weights
and of the residual stream, e bytes per element of a product (2 under autocast).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from labcore.memory.accounting.shapes import Shape, adapter_shapes, layer_shapes, share
from labcore.memory.accounting.stepping import STATE, buffer_bytes
from labcore.models.config import LlamaConfig

__all__ = ["FLOAT", "INDEX", "Part"]

FLOAT = 4  # bytes of a float32: a row's 1/rms, its log-sum-exp, a logarithm of a probability
INDEX = 8  # bytes of a token or a target


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
    earlier: bool = False  # whether gradients of earlier micro-batches exist
    fused: bool = False  # whether the optimizer's step is one kernel without temporaries
    chunk: int | None = None  # tokens whose logits exist at a time; None: all
    offload: bool = False  # whether the optimizer's state stays and its step runs in main memory
    rank: int = 0  # of LoRA's adapters, which alone are trained; 0: all weights are
    bits: float = 0.0  # per weight of the layers' frozen matrices, stored as codes; 0: not coded

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
    def layer_shapes(self) -> dict[str, Shape]:
        """The shapes of one layer's parameters, by name."""
        whole = layer_shapes(self.config, self.shares)
        return whole | adapter_shapes(whole, self.rank)

    @cached_property
    def shapes(self) -> list[Shape]:
        """The shapes of this part's parameters, in the order of the model."""
        config = self.config
        table = (share(config.vocab_size, self.shares), config.hidden_size)
        tied = config.tie_word_embeddings and self.embedding
        found: list[Shape] = [table] * self.embedding
        found += [*self.layer_shapes.values()] * self.layers
        if self.head:
            found += [(config.hidden_size,), *[table] * (not tied)]
        return found

    @cached_property
    def trained_shapes(self) -> list[Shape]:
        """The shapes of the parameters that are trained, in the order of the model."""
        if not self.rank:
            return self.shapes
        layer = layer_shapes(self.config, self.shares)
        return [*adapter_shapes(layer, self.rank).values()] * self.layers

    def elements(self, within: str = "") -> int:
        """Return the elements of one layer's parameters whose names contain `within`."""
        return sum(math.prod(shape) for name, shape in self.layer_shapes.items() if within in name)

    def gradients(self, within: str = "") -> int:
        """Return the bytes of the gradients of one layer's parameters whose names have `within`."""
        adapters = (".A", ".B") if self.rank else ""
        sizes = (
            math.prod(shape)
            for name, shape in self.layer_shapes.items()
            if within in name and name.endswith(adapters)
        )
        return sum(sizes) * self.wide

    @cached_property
    def sizes(self) -> list[int]:
        """The elements of each trained parameter, in the order of the model."""
        return [math.prod(shape) for shape in self.trained_shapes]

    @property
    def trained(self) -> int:
        """Bytes of the trained parameters, and of all gradients."""
        return sum(self.sizes) * self.wide

    @cached_property
    def parameters(self) -> int:
        """Elements of all parameters."""
        return sum(map(math.prod, self.shapes))

    @cached_property
    def weights(self) -> int:
        """Bytes of the parameters."""
        return self.parameters * self.wide - self.layers * self.spared

    @cached_property
    def spared(self) -> int:
        """Bytes by which the codes of a layer's matrices are smaller than its matrices."""
        coded = self.elements("proj.weight") if self.bits else 0
        return round(coded * (self.wide - self.bits / 8))

    @property
    def dequantized(self) -> int:
        """Bytes of the largest coded matrix, which exists while its product is computed."""
        largest = max(math.prod(shape) for shape in self.layer_shapes.values())
        return largest * self.narrow if self.bits else 0

    @cached_property
    def state(self) -> int:
        """Bytes of the optimizer's state between steps."""
        if self.offload:
            return 0
        bytes_of, counts = STATE[self.optimizer], Counter(self.trained_shapes)
        return sum(bytes_of(shape, self.weight_dtype) * n for shape, n in counts.items())

    @cached_property
    def table(self) -> int:
        """Elements of the embedding or of the head."""
        return share(self.config.vocab_size, self.shares) * self.config.hidden_size

    @property
    def largest(self) -> int:
        """Elements of the largest parameter."""
        return max(map(math.prod, self.shapes))

    @cached_property
    def unit(self) -> int:
        """Bytes of one layer's weights."""
        return self.elements() * self.wide - self.spared

    @cached_property
    def buffers(self) -> int:
        """Bytes of workspace that the optimizer keeps between steps."""
        return buffer_bytes(self.optimizer, self.sizes, self.wide, gpu=self.gpu)

    # What autograd keeps ----------------------------------------------------

    @property
    def tokens(self) -> int:
        """Tokens per forward."""
        return self.batch * self.length

    @cached_property
    def stream(self) -> int:
        """The residual stream: [B, T, C] with g bytes per element."""
        return self.tokens * self.config.hidden_size * self.wide

    @property
    def logits(self) -> int:
        """The logits that exist at a time: [B, T, V] in float32, or fewer tokens' of them."""
        tokens = min(self.tokens, self.chunk or self.tokens)
        return tokens * share(self.config.vocab_size, self.shares) * FLOAT

    @cached_property
    def row(self) -> int:
        """One of the MLP's rows: [B, T, I] with e bytes per element."""
        return self.tokens * share(self.config.intermediate_size, self.shares) * self.narrow

    def read(self, products: int) -> int:
        """Return a norm's output as products keep it: once, or under autocast a copy for each."""
        copy = self.tokens * self.config.hidden_size * self.narrow
        return copy * products if self.mixed else copy

    @cached_property
    def norm_input(self) -> int:
        """A norm's input: [B, T, C] in float32, the stream itself if that is float32."""
        return self.tokens * self.config.hidden_size * FLOAT

    def _norm(self, name: str, products: int) -> dict[str, int]:
        """Return what a norm and the products that read its output keep."""
        return {
            f"{name}: input in fp32": self.norm_input,
            f"{name}: 1/rms": self.tokens * FLOAT,
            # Only the gradient of the norm's weight needs it.
            f"{name}: normalized": 0 if self.rank else self.stream,
            f"{name}: output": self.read(products) if products else 0,
        }

    def norm(self, products: int) -> int:
        """Return the bytes of a norm whose output that many products read."""
        return sum(self._norm("", products).values())

    def _attention(self, outputs: int) -> dict[str, int]:
        """Return queries, keys, values, `outputs` copies of the output, and log-sum-exps."""
        heads, keys = share(self.config.num_attention_heads, self.shares), self.config.kv_heads
        head = self.tokens * self.config.head_size * self.narrow
        return {
            "queries": heads * head,
            "keys": share(keys, self.shares) * head,
            "values": share(keys, self.shares) * head,
            "attention's output": outputs * heads * head,
            "attention's log-sum-exp": self.tokens * heads * FLOAT,
        }

    @cached_property
    def terms(self) -> Mapping[str, int]:
        """What a layer keeps for its backward, by what it is; their sum is `layer`."""
        return {
            **self._norm("first norm", 3),
            # On a CPU, attention's output is laid out by head, so o_proj reads a copy of it.
            **self._attention(1 if self.gpu else 2),
            **self._norm("second norm", 2),
            **dict.fromkeys(("gate", "silu(gate)", "up", "silu(gate) * up"), self.row),
            "16-bit copies of the weights": self.casts,
            "products with the adapters' A": 7 * self.tokens * self.rank * self.narrow,
        }

    @cached_property
    def attention(self) -> int:
        """What a layer's attention keeps, without the norm before it."""
        return sum(self._attention(1 if self.gpu else 2).values())

    @cached_property
    def casts(self) -> int:
        """The 16-bit copies of a layer's matrices that autocast makes and products keep."""
        kept = self.mixed and not self.bits  # a coded matrix is dequantized again instead
        return self.elements("proj.weight") * self.narrow if kept else 0

    @property
    def cached(self) -> int:
        """What autocast keeps of `casts` until its region ends: copies of trained weights only."""
        return 0 if self.rank else self.casts

    @cached_property
    def layer(self) -> int:
        """What a layer keeps."""
        return sum(self.terms.values())

    @property
    def ids(self) -> int:
        """The batch: int64 [B, T + 1]."""
        return self.batch * (self.length + 1) * INDEX

    @cached_property
    def inputs(self) -> int:
        """The batch, and the rotation's cosines and sines, which all layers share."""
        return self.ids + self.tokens * self.config.head_size * self.wide

    @cached_property
    def top(self) -> int:
        """What the final norm, the head and the loss keep."""
        if not self.head:
            return 0
        # A frozen head keeps no input. In chunks, the loss computed the gradients already.
        norm = self.norm(0 if self.rank or self.chunk else 1)
        if self.chunk:
            return norm + self.stream + (0 if self.rank else self.table * self.wide)
        cast = self.table * self.narrow if self.mixed else 0
        return norm + cast + self.logits + self.tokens * INDEX

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

    @cached_property
    def segment(self) -> int:
        """What a segment keeps: its input; "selective": also results of products and attention."""
        if self.checkpointing != "selective":
            return self.stream
        attention = sum(self._attention(1).values())
        return self.stream + attention + 2 * self.last_product + 2 * self.row

    @cached_property
    def stack(self) -> int:
        """What the layers keep between forward and backward."""
        return len(self.segments) * self.segment if self.segments else self.layers * self.layer

    @cached_property
    def kept(self) -> int:
        """What one micro-batch keeps at the end of its forward."""
        return self.inputs + self.stack + self.top
