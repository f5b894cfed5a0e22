"""Figures for the chapter `hip`: numbers in, plotly figures out."""

from __future__ import annotations

import math
from collections.abc import Mapping

import plotly.graph_objects as go

from labcore.attention import traffic
from labcore.hip.mfma import INSTRUCTIONS, Instruction, element
from labcore.hip.occupancy import LIMITS, Occupancy, occupancy
from labcore.ui.explorer import describe
from labcore.ui.theme import PALETTE

__all__ = ["banks", "decode", "lanes", "residents", "work"]

BANKS = 32  # of 4 bytes each
ROW = 64  # words of a row of the tile in `banks`, without padding
_STEPS = ("vermillion", "orange", "blue", "green")
_KIB = 1024
_REGISTERS = tuple(range(16, 513, 8))
_LAW = {"dash": "dash", "width": 1.5}


def place(instruction: Instruction, matrix: str, item: int) -> str:
    """Return where a lane keeps element `item`: a register, and which half if two share one."""
    if matrix == "D" or instruction.bits == 32:
        return f"register {item}"
    return f"register {item // 2}, {('low', 'high')[item % 2]} half"


def _many(count: int, name: str) -> str:
    return f"{count} {name}{'' if count == 1 else 's'}"


def lanes(instruction: str = "32x32x8_f16", matrix: str = "A", lane: int = 37) -> go.Figure:
    """Draw which lane and register hold which element of a matrix, and everything one lane holds.

    instruction: a key of `mfma.INSTRUCTIONS`; matrix: "A", "B" or "D"; lane: 0 to 63. An element's
    color is its place within its lane; rings mark the elements of `lane`.
    """
    chosen = INSTRUCTIONS[instruction]
    held = chosen.results if matrix == "D" else chosen.operands
    rows = chosen.depth if matrix == "B" else chosen.tile
    columns = chosen.depth if matrix == "A" else chosen.tile
    owner = [[0] * columns for _ in range(rows)]
    items = [[0] * columns for _ in range(rows)]
    for number in range(64):
        for item in range(held):
            row, column = element(chosen, matrix, number, item)
            owner[row][column], items[row][column] = number, item
    mine = [element(chosen, matrix, lane, item) for item in range(held)]
    figure = go.Figure(
        {
            "type": "heatmap", "z": items, "customdata": owner, "text": owner,
            "texttemplate": "%{text}" if max(rows, columns) <= 16 else "",
            "textfont": {"size": 9}, "zmin": 0, "zmax": max(15, held - 1),
            "colorscale": [[0, "#e7f1fa"], [1, "#5a9fd4"]], "showscale": False,
            "xgap": 1, "ygap": 1,
            "hovertemplate": "row %{y}, column %{x}: lane %{customdata}, element %{z}"
            "<extra></extra>",
        }
    )  # fmt: skip
    ring = {
        "symbol": "square-open",
        "size": 12,
        "color": PALETTE["vermillion"],
        "line": {"width": 3},
    }
    figure.add_scatter(
        x=[column for _, column in mine], y=[row for row, _ in mine],
        mode="markers", marker=ring, name=f"lane {lane}", hoverinfo="skip",
    )  # fmt: skip
    (row, column), (last_row, last_column) = mine[0], mine[-1]
    registers = len({place(chosen, matrix, item).split(",")[0] for item in range(held)})
    figure.update_layout(
        title=f"{_many(held, 'element')} per lane, in {_many(registers, 'register')}",
        xaxis={"title": "column", "range": [-0.5, columns - 0.5], "constrain": "domain"},
        yaxis={
            "title": "row",
            "range": [rows - 0.5, -0.5],
            "scaleanchor": "x",
            "constrain": "domain",
        },
        height=464,
        showlegend=False,
    )
    return describe(
        figure,
        f"{instruction}, {matrix} [{rows}, {columns}]: lane {lane} holds "
        f"{_many(held, 'element')}, the first at [{row}, {column}] in {place(chosen, matrix, 0)}, "
        f"the last at [{last_row}, {last_column}] in {place(chosen, matrix, held - 1)}.",
    )


def turns(width: int, banks: int) -> list[list[int]]:
    """Return the groups of lanes that are served together when 64 lanes read `width` bytes each.

    All banks give 4 bytes at a time, so a group has 4 * banks / width lanes. They are neighbors,
    except for 16 bytes (32 banks: see `source/cpu_check.h`; 64 banks:
    https://github.com/triton-lang/triton/pull/11365).
    """
    count = 4 * banks // width
    if width == 16:
        fours: tuple[tuple[int, ...], ...] = ((0, 20), (4, 16), (8, 28), (12, 24))
        if banks != BANKS:
            fours = ((0, 12, 20, 24), (4, 8, 16, 28))
        return [
            [half + first + i for first in group for i in range(4)]
            for half in (0, 32)
            for group in fours
        ]
    return [list(range(first, first + count)) for first in range(0, 64, count)]


def banks(
    padding: int = 0,
    width: int = 4,
    chip: str = "CDNA2, CDNA3",
    *,
    data: Mapping[tuple[int, int], int] | None = None,
) -> go.Figure:
    """Draw how often each bank of LDS is wanted when 64 lanes read down a column.

    padding: 4-byte words after each row of 64; width: bytes per lane (4, 8, 16); chip: 32 banks, or
    64 for "CDNA4". Lane l reads row l from its start. The bars are for the group of lanes that is
    served first. data: (width, padding) -> cycles beyond one per group that the emulator counted.
    """
    count = 2 * BANKS if chip == "CDNA4" else BANKS
    groups = turns(width, count)
    cycles = []
    shown = [0] * count
    for at, group in enumerate(groups):
        hits = [0] * count
        for lane in group:
            for word in range(width // 4):
                hits[(lane * (ROW + padding) + word) % count] += 1
        cycles.append(max(hits))
        shown = hits if at == 0 else shown
    counted = ""
    if count == BANKS and data is not None and (width, padding) in data:
        counted = f", {len(groups) + data[width, padding]} emulated"
    title = f"{sum(cycles)} bank cycles, {len(groups)} at best{counted}"
    if 4 * padding % width:
        title = f"rows aren't aligned to {width} bytes"
    figure = go.Figure()
    free = sum(cycles) == len(groups) and 4 * padding % width == 0
    color = PALETTE["blue" if free else "vermillion"]
    figure.add_bar(x=list(range(count)), y=shown, marker={"color": color}, name="words")
    figure.update_layout(
        title=title,
        xaxis={"title": f"bank ({len(groups[0])} lanes at a time)", "range": [-0.6, count - 0.4]},
        yaxis={"title": "words wanted from it", "range": [0, BANKS + 1]},
        height=364,
        showlegend=False,
    )
    used = count - shown.count(0)
    return describe(
        figure,
        f"{width} bytes per lane, rows of {ROW} words and {padding} of padding: {title}. "
        f"{len(groups[0])} lanes are served together and use {used} of {count} banks.",
    )


def residents(
    registers: int = 168,
    lds_kib: int = 17,
    waves: int = 4,
    arch: str = "gfx942",
    *,
    data: Mapping[str, Mapping[str, int]] | None = None,
) -> go.Figure:
    """Draw the waves that one SIMD holds, by the registers per lane, and what limits them.

    registers: per lane, vector and accumulation together, 16 to 512; lds_kib: KiB per workgroup;
    waves: per workgroup; data: kernel -> registers, lds (bytes), threads and occupancy that a
    compiler reported. Those with the chosen LDS, rounded up to KiB, and waves are diamonds.
    """

    def found(count: int) -> int:
        return _fits(count, lds_kib, waves, arch).waves_per_simd

    here = _fits(registers, lds_kib, waves, arch)
    by_lds = min(here.allowed["lds"], LIMITS[arch].slots)
    figure = go.Figure()
    figure.add_scatter(
        x=list(_REGISTERS), y=[found(count) for count in _REGISTERS], mode="lines",
        name="waves on a SIMD", line={"color": PALETTE["blue"], "shape": "vh"},
    )  # fmt: skip
    figure.add_scatter(
        x=[_REGISTERS[0], _REGISTERS[-1]], y=[by_lds] * 2, mode="lines", name="allowed by LDS",
        line={"color": PALETTE["orange"], **_LAW},
    )  # fmt: skip
    ring = {"symbol": "circle-open", "size": 18, "color": PALETTE["gray"], "line": {"width": 3}}
    figure.add_scatter(
        x=[registers], y=[here.waves_per_simd], mode="markers", name="chosen", marker=ring
    )
    shown = {
        kernel: need
        for kernel, need in (data or {}).items()
        if (-(-need["lds"] // _KIB), need["threads"]) == (lds_kib, waves * LIMITS[arch].wave)
    }
    figure.add_scatter(
        x=[need["registers"] for need in shown.values()],
        y=[need["occupancy"] for need in shown.values()],
        text=list(shown), mode="markers", name="by the compiler",
        marker={"symbol": "diamond", "size": 10, "color": PALETTE["vermillion"]},
    )  # fmt: skip
    bound = "no workgroup fits" if not here.groups else _bound(here)
    title = f"{_many(here.waves_per_simd, 'wave')} per SIMD, {bound}"
    figure.update_layout(
        title=title,
        xaxis={"title": "registers of a lane", "range": [0, 520], "dtick": 64},
        yaxis={"title": "waves on a SIMD", "range": [0, 8.6], "dtick": 1},
        height=404,
    )
    return describe(
        figure,
        f"{arch}, {registers} registers per lane, {lds_kib} KiB of LDS and {_many(waves, 'wave')} "
        f"per workgroup: {title}; a compute unit holds {_many(here.groups, 'workgroup')}.",
    )


def _fits(registers: int, lds_kib: int, waves: int, arch: str) -> Occupancy:
    most = LIMITS[arch].lane_registers
    return occupancy(
        arch,
        vgprs=min(registers, most),
        agprs=max(0, registers - most),
        lds=lds_kib * _KIB,
        threads=waves * LIMITS[arch].wave,
    )


def _bound(found: Occupancy) -> str:
    """Return which of the two resources in the figure limits the waves."""
    if "slots" in found.bound_by:
        return "all that it has room for"
    said = {"registers": "registers", "lds": "LDS"}
    return f"bound by {' and '.join(said[name] for name in found.bound_by if name in said)}"


def work(counts: Mapping[str, Mapping[str, float]], *, title: str) -> go.Figure:
    """Draw counts by step on a logarithmic axis; a count of zero has no bar.

    counts: step -> counter -> count.
    """
    figure, words = go.Figure(), []
    for (step, counters), color in zip(counts.items(), _STEPS, strict=False):
        figure.add_bar(
            x=[name.replace(" ", "<br>") for name in counters],
            y=[value or None for value in counters.values()],
            name=step,
            marker={"color": PALETTE[color]},
        )
        said = ", ".join(f"{name} {value:,.0f}" for name, value in counters.items())
        words.append(f"{step}: {said}")
    figure.update_layout(
        title=title,
        xaxis={"tickangle": 0},
        yaxis={"type": "log", "title": "count", "dtick": 1, "exponentformat": "power"},
        height=460,
    )
    return describe(figure, f"{title}. {'; '.join(words)}.")


# Bytes that one block of the decode kernel has on their way: 4 wavefronts, 64 lanes, 8 loads of 16.
IN_FLIGHT = 4 * 64 * 8 * 16
RESIDENT = 2  # such blocks on one unit
PASS = 64  # keys that a block works on at once; a piece is a multiple
_SPLITS = (1, 2, 4, 8, 16, 32, 64)


def decode(batch: int = 1, context: int = 8192, group: int = 4, latency: float = 1.0) -> go.Figure:
    """Draw the time of one layer's decode step against the pieces a sequence is cut into.

    8 key heads of 128 in 16 bits; group: query heads per key head; latency: of memory, in us.
    The model: a step takes as long as its slowest part. Reading takes `decode_bytes` over the
    memory's bandwidth, or over what the blocks that run at once keep in flight per `latency`; the
    products take their FLOPs over the matrix units' peak. A piece has a multiple of 64 keys, and
    pieces without keys do nothing. Both GPUs run the same blocks at the same latency, and the
    launch that combines the pieces costs only its bytes.
    """
    figure, words = go.Figure(), []
    shape = traffic.Shape(
        batch=batch, heads=8 * group, length=1, head_dim=128, kv_heads=8, key_length=context
    )
    for name, color in (("MI300X", "vermillion"), ("H100", "blue")):
        gpu = traffic.GPUS[name]
        times, limits = [], []
        for splits in _SPLITS:
            each = -(-context // (splits * PASS)) * PASS
            pieces = -(-context // each)
            moved = traffic.decode_bytes(shape, pieces)
            flight = min(8 * batch * pieces, RESIDENT * gpu.units) * IN_FLIGHT
            parts = {
                "bandwidth": moved / gpu.bandwidth,
                "latency": moved * latency * 1e-6 / flight,
                "products": traffic.flops(shape) / gpu.matmul,
            }
            limits.append(max(parts, key=parts.__getitem__))
            times.append(1e6 * max(parts.values()))
        best = min(range(len(times)), key=times.__getitem__)
        figure.add_scatter(
            x=list(_SPLITS), y=times, text=limits, mode="lines+markers", name=name,
            line={"color": PALETTE[color]}, hovertemplate="%{y:.1f} us, bound by %{text}",
        )  # fmt: skip
        words.append(
            f"{name}: {times[0]:.1f} us with one piece (bound by {limits[0]}), at best "
            f"{times[best]:.1f} us with {_SPLITS[best]} (bound by {limits[best]})"
        )
    shown = [time for curve in figure.data for time in curve.y]
    decades = [math.floor(math.log10(min(shown))), math.ceil(math.log10(max(shown)))]
    figure.update_layout(
        title="One layer's decode step, modeled",
        xaxis={"title": "pieces per sequence", "type": "log", "tickvals": list(_SPLITS)},
        yaxis={"title": "time (us)", "type": "log", "range": decades, "dtick": 1},
        height=404,
    )
    return describe(figure, f"Modeled decode step. {'; '.join(words)}.")
