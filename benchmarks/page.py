"""The page `README.md` beside this file: the aims on a CPU, and what the records say.

`python -m benchmarks --page` writes it from the records.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median

from labcore import records
from labcore.claims import Measured

__all__ = ["AIMS", "PAGE", "Aim", "text"]

PAGE = Path(__file__).resolve().parent / "README.md"
HEAD = """\
# labcore beside other libraries, on a CPU

`python -m benchmarks --page` writes this page from the records. In each row with a peer,
labcore and the peer took turns in a single run on one thread. The columns "labcore" and "peer" are
medians. The ratio is a mean over repetitions, with its 95% interval. Where the aim says "at most",
it is labcore's time over the peer's; where it says "at least", it is labcore's speed over the
peer's. The last rows have no peer: their "ratio" is a time, with an interval if it was measured
more than once. A date in parentheses means that the code has changed since.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Aim:
    """A row: where its records are, and what to reach.

    slug, case: of the benchmark. ratio: the quantity that is to reach `most` or `least`; it may be
    a time. values: the quantity with ours and, among its peers, the peer's; "" where there is no
    peer.
    """

    what: str
    slug: str
    case: str
    ratio: str
    values: str = ""
    peer: str = ""
    most: float | None = None
    least: float | None = None

    def aim(self) -> str:
        """The aim in words."""
        return f"at least {self.least:g}" if self.least is not None else f"at most {self.most:g}"

    def row(self) -> list[str]:
        """The cells of the row."""
        try:
            found = records.find(self.slug, self.case, self.ratio, kind="cpu")
        except KeyError:
            return [self.what, "", "", "not measured yet", self.aim(), "", ""]
        told = Measured.recorded(found)
        spread = f" [{told.low:.2f}, {told.high:.2f}]" if told.n > 1 else ""
        unit = "" if found.unit == "ratio" else f" {found.unit}"
        ours = peer = ""
        if self.values:
            both = records.find(self.slug, self.case, self.values, kind="cpu")
            ours = _amount(both.p50, both.unit)
            peer = f"{_amount(median(both.peers[self.peer]), both.unit)}, {self.peer}"
        return [
            self.what,
            ours,
            peer,
            f"{told.mean:.2f}{unit}{spread}",
            self.aim() + unit,
            f"{found.hardware['name']}, {found.hardware['cores']} cores",
            f"({found.date[:10]})" if records.is_stale(found) else found.date[:10],
        ]


def _amount(value: float, unit: str) -> str:
    """A number and its unit, with microseconds as milliseconds."""
    return f"{value / 1000:.3g} ms" if unit == "us" else f"{value:.3g} {unit}"


def _step(what: str, ours: str, peer: str, most: float, size: str = "quarter-gpt2") -> Aim:
    return Aim(
        what=what,
        slug="lion",
        case=f"step-time/{size}",
        ratio=f"{ours} over {peer}",
        values=f"{ours} step",
        peer=peer,
        most=most,
    )


def _attention(tokens: int) -> Aim:
    return Aim(
        what=f"attention forward, causal, {tokens:,} tokens",
        slug="attention",
        case="cpu/forward",
        ratio=f"forward speed over SDPA FLASH/causal, {tokens} tokens",
        values=f"forward/causal, {tokens} tokens",
        peer="SDPA FLASH",
        least=0.8,
    )


def _clip(what: str, case: str, most: float) -> Aim:
    return Aim(
        what=what,
        slug="clipping",
        case=f"clip-time/{case}",
        ratio="labcore over torch foreach",
        values="clip_by_global_norm",
        peer="torch foreach",
        most=most,
    )


def _norm(what: str, ours: str, peer: str, ghost: int, most: float) -> Aim:
    return Aim(
        what=f"{what}, both passes, ghosts of {ghost}",
        slug="ghost_norm",
        case=f"layer-time/{ours[-2:]}",
        ratio=f"{ours} fused over {peer}/ghosts of {ghost}",
        values=f"{ours} fused/ghosts of {ghost}",
        peer=peer,
        most=most,
    )


def _decode(kind: str, least: float) -> Aim:
    return Aim(
        what="plain greedy decoding",
        slug="speculative",
        case=f"decoding/{kind}",
        ratio=f"plain over transformers' plain/{kind}",
        values=f"tokens a second/{kind}",
        peer="transformers plain",
        least=least,
    )


def _course(what: str, case: str, seconds: str, most: float) -> Aim:
    return Aim(what=what, slug="course", case=case, ratio=seconds, most=most)


AIMS = (
    _step("Lion's step, fused", "Lion fused", "torch AdamW fused", 0.75),
    _step("AdamW's step, fused", "AdamW fused", "torch AdamW fused", 1.0),
    *(
        _norm("ghost normalization in 1d", "GhostBatchNorm1d", "BatchNorm1d", n, 1.25)
        for n in (16, 32, 128)
    ),
    _norm("ghost normalization in 2d", "GhostBatchNorm2d", "BatchNorm2d", 32, 1.05),
    _clip("clipping that clips", "clipping", 0.9),
    _clip("clipping that doesn't", "not-clipping", 0.45),
    *map(_attention, (512, 1024, 2048, 4096)),
    Aim(
        what="paged decoding",
        slug="attention",
        case="cpu/decode",
        ratio="speed over SDPA, whole rows",
        values="decode step",
        peer="SDPA, whole rows",
        least=0.9,
    ),
    _decode("64 tokens of code", 3.5),
    *(
        _course(
            f"import of labcore{name} after torch",
            "import",
            f"import beyond torch's/labcore{name}",
            0.3,
        )
        for name in (".memory", ".serving", ".ui")
    ),
    _course("`make course` to JupyterLab, warm cache", "start", "make course to JupyterLab", 90),
    _course("the book, cold", "book", "strict build from nothing", 360),
)


def text() -> str:
    """The page, in Markdown."""
    names = ["what", "labcore", "peer", "ratio", "aim", "machine", "measured"]
    rows = [names, ["---"] * len(names), *(aim.row() for aim in AIMS)]
    return HEAD + "\n" + "\n".join(f"| {' | '.join(cells)} |" for cells in rows) + "\n"
