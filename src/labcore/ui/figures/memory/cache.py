"""How many requests fit into GPUs beside the weights, by `memory.cache.serving_room`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import plotly.graph_objects as go

from labcore.memory.cache import WEIGHTS, Room, serving_room
from labcore.models import LlamaConfig
from labcore.models.cache import CODES, KV_DTYPES, SCALE
from labcore.ui import draw
from labcore.ui.figures.memory.choices import SERVED, in_bytes
from labcore.ui.theme import PALETTE
from labcore.ui.twin import Formula

__all__ = ["HEADS", "MEMORIES", "REQUESTS_FORMULA", "requests"]

MEMORIES = (24, 80, 141, 192)  # GB on the labels of an RTX 4090, an H100, an H200 and an MI300X
HEADS = ("as published", "MHA", "MQA")
PAGE, BATCHED = 16, 2048
CONTEXTS = tuple(2**power for power in range(9, 18))


def _with_heads(model: str, heads: str) -> LlamaConfig:
    config = SERVED[model]
    few = {"MHA": config.num_attention_heads, "MQA": 1}
    return replace(config, num_key_value_heads=few.get(heads, config.kv_heads))


def requests(
    model: str = "Llama 3.1 8B",
    card: int = 80,
    devices: int = 1,
    weights: str = "bfloat16",
    kv: str = "bfloat16",
    heads: str = "as published",
    context: int = 8192,
    reserve: int = 8,
) -> go.Figure:
    """Draw how many requests fit at the same time against the tokens that each holds.

    model: a key of SERVED. card: GB of each GPU. devices: GPUs that share the model by tensor
    parallelism. weights, kv: as in `serving_room`. heads: one of HEADS; "MHA" has a key head per
    query head and "MQA" one for all. context: the tokens marked, at most the model's longest.
    reserve: percent of each GPU that the server leaves free; vLLM's default, a
    `gpu_memory_utilization` of 0.92, leaves 8.
    The dashed line is a server that reserves the model's longest context for every request.
    """
    config = _with_heads(model, heads)
    longest = config.max_position_embeddings

    usable = card * 10**7 * (100 - reserve)

    def divided(tokens: int) -> Room:
        return serving_room(
            config, usable, context=tokens, kv=kv, page=PAGE, weights=weights, devices=devices,
            batched_tokens=BATCHED,
        )  # fmt: skip

    def fit(tokens: int) -> int | None:
        return divided(tokens).requests or None

    counts = [fit(tokens) if tokens <= longest else None for tokens in CONTEXTS]
    reserved = [fit(longest) if tokens <= longest else None for tokens in CONTEXTS]
    marked = min(context, longest)
    room = divided(marked)
    title = f"{room.requests:,} requests of {marked:,} tokens in {in_bytes(room.cache)}"
    if not room.cache:
        title = f"No room: {in_bytes(room.weights)} of weights, {in_bytes(usable)} per GPU"
    return go.Figure(
        [
            {
                "x": CONTEXTS,
                "y": counts,
                "name": "in pages of 16",
                "mode": "lines",
                "line": {"color": PALETTE["blue"], "width": 3},
            },
            {
                "x": CONTEXTS,
                "y": reserved,
                "name": "longest context reserved",
                "mode": "lines",
                "line": draw.PREDICTED,
            },
            {
                "x": [marked],
                "y": [room.requests or None],
                "name": "chosen",
                "mode": "markers",
                "marker": {"color": PALETTE["vermillion"], "size": 12},
            },
        ],
        {
            "title": {"text": title},
            "xaxis": {
                "title": "tokens that each request holds",
                "type": "log",
                "tickvals": CONTEXTS[::2],
                "ticktext": ["512", "2k", "8k", "32k", "128k"],
                "range": [2.65, 5.2],
            },
            "yaxis": {
                "title": "requests at the same time",
                "type": "log",
                "range": [-0.15, 5.15],
                "tickvals": [10**power for power in range(6)],
                "ticktext": ["1", "10", "100", "1,000", "10,000", "100,000"],
            },
            "height": 440,
        },
    )


def _points() -> dict[str, Any]:
    """Return what the page needs to repeat `serving_room` for `requests`."""
    models: dict[str, dict[str, Any]] = {}
    for name, config in SERVED.items():
        shapes = {heads: _with_heads(name, heads) for heads in HEADS}
        models[name] = {
            "layers": config.num_hidden_layers,
            "size": config.head_size,
            "width": config.hidden_size,
            "wide": config.intermediate_size,
            "longest": config.max_position_embeddings,
            "heads": {heads: shape.kv_heads for heads, shape in shapes.items()},
            "weights": {
                heads: {
                    weights: serving_room(shape, 10**9, context=1, weights=weights).weights
                    for weights in WEIGHTS
                }
                for heads, shape in shapes.items()
            },
        }
    scaled = {name: SCALE * (dtype in CODES) for name, dtype in KV_DTYPES.items()}
    return {
        "models": models,
        "bytes": {name: dtype.itemsize for name, dtype in KV_DTYPES.items()},
        "scale": scaled,
        "page": PAGE,
        "batched": BATCHED,
        "contexts": CONTEXTS,
    }


REQUESTS_FORMULA = Formula("memoryRequests", _points)
