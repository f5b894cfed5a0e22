"""Models as generation sees them: our Llama, and any causal language model of transformers.

Letters: B rows, T tokens per forward, C width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from labcore.checks import positive_int
from labcore.decoding.contract import Decoder
from labcore.models import DenseCache, KVCache, Llama, LlamaOutput
from labcore.models.forms import fused_form

__all__ = ["LlamaDecoder", "TransformersCache", "TransformersDecoder", "as_decoder"]


def as_decoder(model: Any) -> Decoder:
    """Return the decoder of a model.

    model: a `Llama`, a causal language model of transformers, or a decoder, which is returned as it
    is. A `Llama` becomes its `FusedLlama`, with the weights that it has now, wherever `fused_form`
    gives one; `LlamaDecoder(model)` runs the modules themselves.
    Raises TypeError for anything else.
    """
    if isinstance(model, Llama):
        return fused_form(model) or LlamaDecoder(model)
    if hasattr(model, "new_cache"):
        return cast(Decoder, model)
    if isinstance(model, nn.Module) and hasattr(model, "prepare_inputs_for_generation"):
        return TransformersDecoder(model)
    raise TypeError(
        f"model must be a Llama, a causal language model of transformers or a decoder, got "
        f"{type(model).__name__}; a decoder has new_cache(batch, capacity)"
    )


class LlamaDecoder:
    """A `Llama` with a `DenseCache`, which verifies trees in one forward.

    model: stays on its device; the forward runs without gradients.
    """

    def __init__(self, model: Llama) -> None:
        self.model = model
        self.vocab_size = model.config.vocab_size
        self.eos_token_ids = model.config.eos_token_ids
        self.device: torch.device = model.norm.weight.device

    def new_cache(self, batch: int, capacity: int) -> DenseCache:
        """Return an empty cache of B rows; capacity: prompt, output and the nodes of one draft."""
        return DenseCache(
            self.model.config,
            batch=batch,
            capacity=capacity,
            dtype=self.model.norm.weight.dtype,
            device=self.device,
        )

    @torch.no_grad()
    def __call__(
        self, tokens: Tensor, *, counts: Tensor, cache: KVCache, tree: Tensor | None = None
    ) -> LlamaOutput:
        """Return logits [B, T, V] and hidden [B, T, C] for tokens [B, T]; see `Llama.forward`.

        counts: integers [B], the valid tokens of each row. tree: parents, int32 [B, T].
        """
        output: LlamaOutput = self.model(
            tokens.to(self.device),
            counts=counts.to(self.device),
            cache=cache,
            tree=None if tree is None else tree.to(self.device),
        )
        return output


class TransformersCache:
    """One transformers `DynamicCache` per row, so that each row rolls back independently.

    batch: B. lengths: int32 [B] on the CPU, the tokens of each row.
    """

    def __init__(self, batch: int) -> None:
        self.rows = [_empty_row() for _ in range(positive_int("batch", batch))]
        self.lengths = torch.zeros(batch, dtype=torch.int32)
        self._starts = [0] * batch  # lengths before the last forward

    def truncate(self, lengths: Tensor) -> None:
        """Forget all tokens of row b after its first lengths[b]; a shorter row doesn't change.

        lengths: integers [B]. Raises ValueError for another shape.
        """
        if lengths.shape != self.lengths.shape:
            raise ValueError(
                f"lengths must have shape {tuple(self.lengths.shape)}, got {tuple(lengths.shape)}"
            )
        for row, length in enumerate(lengths.tolist()):
            self._shorten(row, max(int(length), 0))

    def keep(self, row: int, slots: Tensor | Sequence[int]) -> None:
        """Keep the first K of a row's tokens in the last forward; slots: 0 to K - 1.

        Raises ValueError for other slots: without trees an accepted path has no gaps.
        """
        places = torch.as_tensor(slots).tolist()
        if places != list(range(len(places))):
            raise ValueError(
                f"slots must count up from 0, as a chain's do, got {places}; for trees use a Llama"
            )
        self._shorten(row, self._starts[row] + len(places))

    def advance(self, counts: Sequence[int]) -> None:
        """Count what a forward wrote: lengths += counts, B ints."""
        self._starts = self.lengths.tolist()
        self.lengths += torch.tensor(counts, dtype=torch.int32)

    def _shorten(self, row: int, length: int) -> None:
        surplus = int(self.lengths[row]) - length
        if surplus <= 0:
            return
        if length:
            self.rows[row].crop(-surplus)  # in all versions, a negative number is how many to drop
        else:
            self.rows[row] = _empty_row()
        self.lengths[row] = length


def _empty_row() -> Any:
    from transformers import DynamicCache

    # Without a config every layer keeps all its tokens, even with sliding-window attention, so the
    # cache can be rolled back.
    return DynamicCache()


class TransformersDecoder:
    """Any causal language model of transformers, with one forward per row.

    model: in evaluation mode. A row never sees padding, so no model needs an attention mask.
    Raises ValueError for encoder-decoders, for models whose state can't be rolled back (recurrent
    ones) and for a model in training mode.
    """

    def __init__(self, model: nn.Module) -> None:
        config: Any = model.config
        if getattr(config, "is_encoder_decoder", False):
            raise ValueError("model must be a causal language model, got an encoder-decoder")
        if getattr(model, "_is_stateful", False):
            raise ValueError(
                f"model must keep keys and values, which can be rolled back, got the recurrent "
                f"{type(model).__name__}; use a model of attention layers only"
            )
        if model.training:
            raise ValueError(
                "model must be in evaluation mode, or dropout changes its distribution; call "
                "model.eval()"
            )
        self.model = model
        head = cast(Any, model).get_output_embeddings()
        self.vocab_size = int(head.weight.shape[0])
        self.eos_token_ids = _eos_of(model)
        self.device: torch.device = head.weight.device

    def new_cache(self, batch: int, capacity: int) -> TransformersCache:
        """Return an empty cache of B rows. It grows on demand, so capacity is only validated."""
        positive_int("capacity", capacity)
        return TransformersCache(batch)

    @torch.no_grad()
    def __call__(
        self,
        tokens: Tensor,
        *,
        counts: Tensor,
        cache: TransformersCache,
        tree: Tensor | None = None,
    ) -> LlamaOutput:
        """Return logits [B, T, V] and the last hidden states [B, T, C], 0 at padding.

        tokens: integers [B, T], right-padded; counts: integers [B], the valid ones of each row.
        Raises ValueError for a tree: these models' masks are causal.
        """
        if tree is not None:
            raise ValueError(
                "tree must be None with a model of transformers, whose masks are causal, got a "
                "tree; verify chains or load the weights with labcore.models.from_pretrained"
            )
        if tokens.dim() != 2 or not (counts.shape == tokens.shape[:1] == (len(cache.rows),)):
            raise ValueError(
                f"tokens must be [B, T] and counts [B] for {len(cache.rows)} rows of the cache, "
                f"got {tuple(tokens.shape)} and {tuple(counts.shape)}"
            )
        tokens, valid = tokens.to(self.device), [int(count) for count in counts.tolist()]
        read = [
            self._row(tokens[row : row + 1, :count], cache.rows[row]) if count else None
            for row, count in enumerate(valid)
        ]
        cache.advance(valid)
        width = tokens.shape[1]
        return LlamaOutput(
            logits=_stack([None if out is None else out.logits for out in read], width),
            hidden=_stack([None if out is None else out.hidden for out in read], width),
        )

    def _row(self, tokens: Tensor, cache: Any) -> LlamaOutput:
        out = self.model(tokens, past_key_values=cache, use_cache=True, output_hidden_states=True)
        return LlamaOutput(logits=out.logits, hidden=out.hidden_states[-1])


def _stack(rows: Sequence[Tensor | None], width: int) -> Tensor:
    """Stack rows [1, count, X] to [B, width, X], with 0 at padding and for None."""
    some = next((row for row in rows if row is not None), None)
    if some is None:
        raise ValueError("counts must be above 0 in some row, got 0 in all; skip this forward")
    if len(rows) == 1 and some.shape[1] == width:
        return some
    stacked = some.new_zeros(len(rows), width, some.shape[2])
    for into, row in zip(stacked, rows, strict=True):
        if row is not None:
            into[: row.shape[1]] = row[0]
    return stacked


def _eos_of(model: Any) -> tuple[int, ...]:
    """Return the tokens that end an output: the generation config's, else the model config's."""
    told = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if told is None:
        told = getattr(model.config, "eos_token_id", None)
    if told is None:
        return ()
    return tuple(told) if isinstance(told, list | tuple) else (int(told),)
