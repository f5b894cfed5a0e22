"""Where one device's step may peak: points in the order in which a step passes them.

A layer's forward has one point, its backward three: in the MLP, in the norm before the MLP, and in
the norm before attention. What lies between two points holds less. From layer to layer the bytes
grow or shrink evenly, so that `whole=False` leaves out all but the first and the last ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from labcore.memory.accounting.part import FLOAT, INDEX, Part
from labcore.memory.accounting.stepping import step_bytes

__all__ = ["Held", "backward", "forward", "step"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """What is held at one point of a step, besides weights and optimizer state.

    place: what runs. layer: its number from 1; 0 outside the layers.
    """

    place: str
    activations: float
    layer: int = 0
    gradients: float = 0.0
    sent: float = 0.0  # of the gradients: those that offload has moved away by then
    workspace: float = 0.0
    done: int = 0  # layers whose backward is over
    gathered: int = 2  # layers whose weights FSDP2 has gathered: this one and the next
    reached: int | None = None  # layers whose weights stage 2 has gathered; None: all
    first: bool = False  # the first layer's forward, beside the flat copy of all other weights


def _ends(count: int, whole: bool) -> list[int]:
    """Return 0 to count - 1, or the first two and the last two."""
    every = range(count)
    return [*every] if whole else sorted({*every[:2], *every[-2:]})


def forward(part: Part, whole: bool = True) -> Iterator[Held]:
    """Yield the points of a forward, without the gradients of earlier micro-batches."""
    yield Held(place="embedding", activations=part.inputs + part.stream, first=True)
    yield from _stack_forward(part, whole)
    cached = part.layers * part.cached if part.segments else 0  # otherwise part of `kept`
    place, working = "end", 0
    if part.head:
        place, working = "loss", part.logits
        if part.chunk:  # the norm's output, a chunk's logits, and what one operation makes of them
            working = 2 * part.logits + part.stream
            if part.wide == 2 and not part.rank:  # the head's gradient is summed in float32
                summing = 3 * part.logits // 2 + part.stream + 4 * part.table
                working = max(working + 2 * part.table, summing)
        else:
            yield from _head(part)
    yield Held(place=place, activations=part.kept, workspace=working + cached, gathered=0)


def _head(part: Part) -> Iterator[Held]:
    """Yield the points before the loss: the last norm and the product with the head."""
    below = part.kept - part.logits - part.tokens * INDEX
    if not part.mixed and part.wide == 2:
        read = 0 if part.rank else part.read(1)
        work = part.stream + part.norm_input
        yield Held(place="final norm", activations=below - read, workspace=work, gathered=1)
    yield Held(place="head", activations=below, workspace=part.logits, gathered=1)


def _stack_forward(part: Part, whole: bool) -> Iterator[Held]:
    """Yield a point for each layer: at its end, or within it if nothing of it is kept."""
    segments = part.segments or [1] * part.layers
    each = part.segment if part.segments else part.layer
    # While x + mlp(x) is computed, the product and the sum stand. The next norm keeps the sum and
    # this layer's norms kept both inputs if those are float32; otherwise they stand beside copies.
    waits = part.stream if part.wide == FLOAT else 0
    adding = part.stream if part.wide == FLOAT else 4 * part.stream
    for number in _ends(len(segments), whole):
        below, size = part.inputs + (number + 1) * each, segments[number]
        for within in _ends(size, whole):
            layer = number * segments[0] + within + 1
            if part.segments:
                streams = 2 if size == 1 else 3  # one layer shares the segment's input
                working = streams * part.stream + 2 * part.row
                if part.checkpointing != "selective":
                    working += max(3 * part.row, part.attention) - 2 * part.row
                working, kept = working + layer * part.cached, below
            else:
                working, kept = adding, below + waits
            yield Held(
                place="layer",
                layer=layer,
                activations=kept,
                workspace=working + part.dequantized,
                reached=min(layer + 1, part.layers),
            )


def backward(part: Part, whole: bool = True) -> Iterator[Held]:
    """Yield the points of a backward: loss, final norm, each layer from the last, embedding."""
    width, head = part.norm_input, 0
    norm = 5 * width
    if part.head:
        if not part.chunk:
            below = part.kept - part.tokens * INDEX
            yield Held(place="loss", activations=below, workspace=2 * part.logits, gathered=0)
        if not part.rank:
            head = (part.table + part.config.hidden_size) * part.wide
        yield Held(
            place="final norm",
            activations=part.kept - part.top + width,
            gradients=head,
            workspace=norm,
            gathered=0,
        )
    yield from _stack_backward(part, head, whole)
    if part.embedding and not part.rank:
        workspace = part.stream
        if part.config.tie_word_embeddings and part.head:  # two gradients and their sum
            table = part.table * part.wide
            workspace = max(part.stream, table) + table
        yield Held(
            place="embedding",
            activations=part.ids,
            gradients=part.trained,
            sent=_sent_head(part, head) + part.layers * part.gradients(),
            workspace=workspace,
            done=part.layers,
        )


def _sent_head(part: Part, head: int) -> int:
    """Return what of the head's gradients is complete before the layers: a tied table's isn't."""
    tied = part.config.tie_word_embeddings and part.embedding
    return head and head - tied * part.table * part.wide


def _stack_backward(part: Part, head: int, whole: bool) -> Iterator[Held]:
    """Yield three points for each layer, from the last. head: gradients that exist before them."""
    width = part.norm_input
    wider = part.stream if part.wide < FLOAT else 0  # a norm's input in float32 is not the stream
    down, mlp = part.elements("down_proj.weight"), part.elements("mlp.")
    product = part.row + (2 * down if part.casts else 0)  # what down_proj's backward frees
    freed = 4 * part.row + part.norm(2) - width + (mlp * 2 if part.casts else 0)
    segments = part.segments or [1] * part.layers
    each = part.segment if part.segments else part.layer
    # A segment's backward begins with all of it recomputed, beside its input.
    apart = wider + part.last_product if part.segments else 0
    for number in reversed(_ends(len(segments), whole)):
        begins = part.inputs + (number + 1) * each
        if part.segments:
            begins += segments[number] * part.layer + apart - part.segment
        for within in reversed(_ends(segments[number], whole)):
            layer = number * segments[0] + within + 1
            done = part.layers - layer
            gradients = head + done * part.gradients()
            sent = _sent_head(part, head) + done * part.gradients()
            below = begins - (segments[number] - 1 - within) * part.layer
            yield Held(
                place="MLP",
                activations=below - product,
                gradients=gradients + part.gradients("down_proj."),
                sent=sent,
                workspace=part.stream + 3 * part.row + part.dequantized,
                done=done,
                layer=layer,
            )
            yield Held(
                place="second norm",
                activations=below - freed,
                gradients=gradients + part.gradients("mlp."),
                sent=sent,
                workspace=5 * width + wider,
                done=done,
                layer=layer,
            )
            yield Held(
                place="first norm",
                activations=below - part.layer - apart + width,
                gradients=gradients + part.gradients(),
                sent=sent,
                workspace=5 * width,
                done=done,
                layer=layer,
            )


def step(part: Part) -> Iterator[Held]:
    """Yield where the optimizer's step may peak."""
    workspace = 0
    if not part.fused and not part.offload:  # offloaded, the CPU computes it
        workspace = step_bytes(part.optimizer, part.sizes, part.wide, gpu=part.gpu)
    yield Held(
        place="optimizer",
        activations=part.ids,
        gradients=part.trained,
        sent=part.trained,
        workspace=workspace,
    )
