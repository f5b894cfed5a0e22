"""The figure shows the requests that `serving_room` counts, and its page computes every setting."""

import itertools
import random
from dataclasses import replace

import plotly.graph_objects as go
import pytest

from labcore.memory.cache import WEIGHTS, kv_bytes, serving_room
from labcore.models.cache import KV_DTYPES
from labcore.ui import Choice, IntSlider, explore, twin
from labcore.ui.compact import dumps
from labcore.ui.figures import memory as figures

CONTEXTS = tuple(2**power for power in range(9, 18))
REQUESTS = {
    "reserve": IntSlider(low=0, high=30, default=8),
    "model": Choice(options=tuple(figures.SERVED), default="Llama 3.1 8B"),
    "card": Choice(options=figures.MEMORIES, default=80),
    "devices": Choice(options=(1, 2, 4, 8)),
    "weights": Choice(options=tuple(WEIGHTS)),
    "kv": Choice(options=tuple(KV_DTYPES), default="bfloat16"),
    "heads": Choice(options=figures.HEADS),
    "context": Choice(options=CONTEXTS, default=8192),
}


def drawn(**settings: object) -> tuple[dict[int, float | None], dict[int, float | None], go.Figure]:
    """Requests by context in pages, those with the longest context reserved, and the figure."""
    figure = figures.requests(**settings)
    pages, reserved, _ = figure.data
    return (
        dict(zip(pages.x, pages.y, strict=True)),
        dict(zip(reserved.x, reserved.y, strict=True)),
        figure,
    )


def test_requests_are_those_of_the_room() -> None:
    config = figures.SERVED["Llama 3.1 8B"]
    pages, reserved, figure = drawn(kv="int8", card=24, weights="int4", context=4096, reserve=25)
    usable = 18 * 10**9
    for tokens, count in pages.items():
        room = serving_room(config, usable, context=tokens, kv="int8", weights="int4", page=16)
        assert count == (room.requests or None)
    longest = serving_room(config, usable, context=131_072, kv="int8", weights="int4")
    assert set(reserved.values()) == {longest.requests}
    room = serving_room(config, usable, context=4096, kv="int8", weights="int4")
    assert figure.layout.title.text.startswith(f"{room.requests} requests of 4,096 tokens in ")
    assert figure.data[2].x == (4096,) and figure.data[2].y == (room.requests,)


def test_heads_change_what_a_token_takes() -> None:
    published, shared, own = (
        drawn(heads=heads)[0][8192] for heads in ("as published", "MQA", "MHA")
    )
    config = figures.SERVED["Llama 3.1 8B"]
    assert kv_bytes(replace(config, num_key_value_heads=1), 1) * 8 == kv_bytes(config, 1)
    assert shared > 8 * published and own < published / 3.9


def test_contexts_end_at_the_models_longest() -> None:
    pages, _, figure = drawn(model="Llama 2 7B", context=32_768)
    assert [tokens for tokens, count in pages.items() if count] == [512, 1024, 2048, 4096]
    assert figure.data[2].x == (4096,)


def test_weights_that_do_not_fit_serve_nobody() -> None:
    pages, reserved, figure = drawn(model="Llama 3.1 70B", card=80)
    assert not any(pages.values()) and not any(reserved.values())
    assert figure.layout.title.text == "No room: 141 GB of weights, 73.6 GB per GPU"
    larger = drawn(model="Llama 3.1 70B", card=141)[2].layout.title.text
    assert larger == "No room: 141 GB of weights, 130 GB per GPU"  # a larger card shows


def test_titles_fit_a_phone_and_lines_their_axis(seed: int) -> None:
    points = [
        dict(zip(REQUESTS, values, strict=True))
        for values in itertools.product(*(control.positions() for control in REQUESTS.values()))
    ]
    for point in random.Random(seed).sample(points, 150):
        pages, reserved, figure = drawn(**point)
        assert len(figure.layout.title.text) <= 48
        counts = [count for count in (*pages.values(), *reserved.values()) if count]
        low, high = figure.layout.yaxis.range
        assert all(10**low < count < 10**high for count in counts), point
        assert [trace.name for trace in figure.data][2] == "chosen"


def test_the_static_page_computes_every_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABCORE_BOOK", "1")
    shown = explore(figures.requests, alt="x", formula=figures.REQUESTS_FORMULA, **REQUESTS)
    packed = shown._repr_mimebundle_()[twin.MIME]
    assert [control["name"] for control in packed["controls"]] == list(REQUESTS)
    assert packed["fixed"] == [] and twin.first_slice(packed) == packed
    assert len(dumps(packed)) < 20_000
