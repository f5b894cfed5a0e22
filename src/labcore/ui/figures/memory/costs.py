"""Tables of bytes, predicted and measured, and of what each method saves and costs."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from labcore import records
from labcore.claims import Measured
from labcore.memory import estimate
from labcore.records import Record
from labcore.ui.figures.memory.choices import MODELS
from labcore.ui.intervals import number
from labcore.ui.tables import Table, table

__all__ = ["compared", "price", "summary"]

_WORDS = {  # for the keys of records, word by word
    "AdamW8bit": "8-bit AdamW",
    "bfloat16": "bf16",
    "checkpointing, accumulation": "recomputed, 4 parts",
    "every 1": "every layer recomputed",
    "every 2": "layers recomputed in twos",
    "float16, scaled": "fp16, loss scaled",
    "gpipe": "GPipe",
    "1f1b": "1F1B",
}
_COLUMNS = ("", "MB predicted", "MB measured", "bytes / plain", "time / plain", "loss − plain")


def compared(sizes: Mapping[str, tuple[float, float]], *, note: str = "") -> Table:
    """Tabulate {name: (predicted bytes, measured bytes)} of a live run.

    Where all predictions round to the measurements, a sentence of the note says it for all.
    """
    rows = [
        [name, number(said / 1e6), number(saw / 1e6), f"{100 * (said / saw - 1):+.1f}%"]
        for name, (said, saw) in sizes.items()
    ]
    if any(abs(said / saw - 1) >= 0.0005 for said, saw in sizes.values()):
        return table(("live", "MB predicted", "MB measured", "prediction off by"), rows, note=note)
    exact = all(said == saw for said, saw in sizes.values())
    close = "exact to the byte" if exact else "within 0.05%"
    told = f"{'The prediction is' if len(rows) == 1 else 'All predictions are'} {close}."
    return table(
        ("live", "MB measured"), [[row[0], row[2]] for row in rows], note=f"{told} {note}".strip()
    )


def price(method: str, *keys: str, note: str = "") -> Table:
    """Tabulate the recorded bytes, time and held-out loss of variants of one method.

    method, keys: of the cases `bytes/method` and `price/method`. Raises KeyError without a record.
    """
    rows = [_row(f"bytes/{method}", f"price/{method}", key) for key in keys]
    first = records.find("memory", f"bytes/{method}", f"peak/{keys[0]}")
    said = "Mean and 95% interval; loss in nats per byte. Recorded: "
    return table(_COLUMNS, rows, note=f"{note} {said}{records.provenance(first)}.".strip())


def summary(methods: Mapping[str, Mapping[str, Mapping[str, Any] | None]]) -> Table:
    """Tabulate bytes and mean losses of several methods: {method: {key: settings}}.

    method, key: as for `price`. settings: of `estimate`, for the share that the method leaves of a
    7B's peak on a GPU; None if `estimate` doesn't count it.
    """
    large = functools.partial(estimate, MODELS["7B"], batch=4, length=1024, device="gpu")
    rows = []
    for method, keys in methods.items():
        for key, settings in keys.items():
            name, _, *sizes, _, loss = _row(f"bytes/{method}", f"price/{method}", key)
            over = "" if settings is None else f"{large(**settings).total / large().total:.3f}"
            rows.append([name, *sizes, over, loss.partition(" [")[0]])
    return table(("", *_COLUMNS[2:4], "7B: bytes / plain", _COLUMNS[5]), rows)


def _row(sizes: str, prices: str, key: str) -> list[str]:
    """Return one row: bytes, and time and loss where they were measured."""
    size, share = (records.find("memory", sizes, f"{what}/{key}") for what in _SIZES)
    predicted = "".join(number(told / 1e6) for told in size.peers.get("predicted", ()))
    whole = key.split(", stage")[0]  # a pipeline's stages have one time
    costs = [_cost(prices, f"{what}/{whole}", digits) for what, digits in _PRICES.items()]
    return [_named(key), predicted, number(size.p50 / 1e6), f"{share.p50:.3f}", *costs]


_SIZES = ("peak", "peak over plain")
_PRICES = {"time over plain": 2, "loss minus plain": 4}


def _cost(case: str, quantity: str, digits: int) -> str:
    try:
        record: Record = records.find("memory", case, quantity)
    except KeyError:
        return ""
    one = Measured.recorded(record)
    mean, low, high = (
        f"{round(x, digits) + 0.0:.{digits}f}" for x in (one.mean, one.low, one.high)
    )
    return mean if low == high else f"{mean} [{low}, {high}]"


def _named(key: str) -> str:
    for word, said in _WORDS.items():
        key = key.replace(word, said)
    return key
