"""Tables of bytes, predicted and measured, and of what each method saves."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from labcore import records
from labcore.claims import Measured
from labcore.memory import estimate
from labcore.ui.figures.memory.choices import MODELS
from labcore.ui.intervals import number
from labcore.ui.tables import Table, table

__all__ = ["compared", "summary"]

_WORDS = {  # for the keys of records, word by word
    "AdamW8bit": "8-bit AdamW",
    "bfloat16": "bf16",
    "every 1": "every layer recomputed",
    "gpipe": "GPipe",
    "1f1b": "1F1B",
}


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


def summary(methods: Mapping[str, Mapping[str, Mapping[str, Any] | None]]) -> Table:
    """Tabulate bytes and mean losses of several methods: {method: {key: settings}}.

    method, key: of the cases `bytes/method` and `price/method`. settings: of `estimate`, for the
    share that the method leaves of a 7B's peak on a GPU; None if `estimate` doesn't count it.
    Raises KeyError without a record of the bytes.
    """
    large = functools.partial(estimate, MODELS["7B"], batch=4, length=1024, device="gpu")
    rows = []
    for method, keys in methods.items():
        for key, settings in keys.items():
            size, share = (
                records.find("memory", f"bytes/{method}", f"{what}/{key}").p50
                for what in ("peak", "peak over plain")
            )
            over = "" if settings is None else f"{large(**settings).total / large().total:.3f}"
            rows.append([_named(key), number(size / 1e6), f"{share:.3f}", over, _loss(method, key)])
    return table(("", "MB measured", "bytes / plain", "7B: bytes / plain", "loss − plain"), rows)


def _loss(method: str, key: str) -> str:
    """Return the mean held-out loss minus plain training's, "" where it wasn't measured."""
    whole = key.split(", stage")[0]  # a pipeline's stages have one loss
    try:
        record = records.find("memory", f"price/{method}", f"loss minus plain/{whole}")
    except KeyError:
        return ""
    return f"{round(Measured.recorded(record).mean, 4) + 0.0:.4f}"


def _named(key: str) -> str:
    for word, said in _WORDS.items():
        key = key.replace(word, said)
    return key
