"""Counts for the steps of the HIP port: nothing here is a time, and nothing runs on a GPU.

The emulator's counters and errors are simulated. The resources are what compilers reported when the
committed table was written. `python -m labcore.hip` times the steps on a GPU. `port/others` counts
in other people's code, which isn't part of this repository; see `others`.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.runner import Measurement, case, exact
from labcore.hip import build, emulate
from labcore.hip.compile import beside_triton
from labcore.hip.mfma import INSTRUCTIONS
from labcore.hip.occupancy import occupancy
from labcore.hip.survey import PROJECTS, survey

TESTS = Path(__file__).resolve().parent.parent / "tests"
RESOURCES, TRITON = TESTS / "hip_resources.json", TESTS / "kernel_resources.json"
COMPILED = ("gfx90a", "gfx942")
LENGTH, HEADS = 256, 2  # the shape whose work is counted
FORMATS = {"float16": torch.float16, "float32": torch.float32}
AWKWARD = ((1, 1), (31, 63), (100, 129), (129, 31))  # queries, keys
COUNTERS = tuple(emulate.LaunchCounters.__dataclass_fields__)
# The matrix instruction of a step, by number format and head dimension.
PRODUCTS = {
    (3, "float16", 64): "16x16x16_f16",
    (3, "float16", 128): "32x32x8_f16",
    (4, "float16", 64): "32x32x8_f16",
    (4, "float16", 128): "32x32x8_f16",
}


def drawn(heads: int, queries: int, keys: int, dim: int, seed: int) -> list[Tensor]:
    """Draw query, key and value in fp32 from a normal distribution."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, heads, n, dim, generator=generator) for n in (queries, keys, keys)]


@case("emulated/work", minutes=2.0, needs="cpu")
def work() -> list[Measurement]:
    """Return every counter of every step, and comparisons of the steps."""
    found = []
    name = "float16"
    for dim in (64, 128):
        inputs = [x.to(FORMATS[name]) for x in drawn(HEADS, LENGTH, LENGTH, dim, seed=60)]
        counts: dict[int, emulate.LaunchCounters] = {}
        for step in build.STEPS:
            counters = emulate.forward(*inputs, step=step, count=True).counters
            if counters is None:
                raise RuntimeError(f"step {step} must return counters, got none; pass count=True")
            counts[step] = counters
        at = f"{name}, D {dim}"
        shape: dict[str, Any] = {"batch, heads, tokens, D": [1, HEADS, LENGTH, dim]}
        for step, counters in counts.items():
            for quantity in COUNTERS:
                value = getattr(counters, quantity)
                label = f"{quantity}/step {step}, {at}"
                found.append(exact(label, "count", value, mode="simulated", **shape))
        found += compared(counts, name, dim)
    return found


def compared(counts: dict[int, emulate.LaunchCounters], name: str, dim: int) -> list[Measurement]:
    """Compare steps: how much a later step saves, and its products relative to those needed."""
    at = f"{name}, D {dim}"

    def ratio(what: str, field: str, earlier: int, later: int) -> Measurement:
        value = getattr(counts[earlier], field) / max(1, getattr(counts[later], field))
        label = f"{what}, step {earlier} over step {later}/{at}"
        return exact(label, "ratio", value, mode="simulated")

    conflicts = counts[4].lds_conflicts / counts[4].lds_accesses
    found = [
        ratio("transactions, as compiled", "merged_transactions", 1, 2),
        ratio("transactions, as compiled", "merged_transactions", 2, 3),
        ratio("transactions, as compiled", "merged_transactions", 3, 4),
        ratio("transactions, as written", "transactions", 1, 2),
        ratio("LDS accesses, as compiled", "merged_lds", 2, 3),
        ratio("LDS accesses, as compiled", "merged_lds", 3, 4),
        exact(f"LDS conflicts an access, step 4/{at}", "cycles", conflicts, mode="simulated"),
    ]
    needed = 4 * HEADS * LENGTH * LENGTH * dim
    for step in (3, 4):
        flops = INSTRUCTIONS[PRODUCTS[step, name, dim]].flops * counts[step].mfma
        label = f"products on matrix cores, of those needed, step {step}/{at}"
        found.append(exact(label, "ratio", flops / needed, mode="simulated"))
    return found


def errors(step: int, name: str, dim: int, *, is_causal: bool) -> tuple[float, float]:
    """Return the largest errors of a step and of plain torch against fp64, over AWKWARD lengths."""
    ours, plain = 0.0, 0.0
    for seed, (queries, keys) in enumerate(AWKWARD):
        inputs = [x.to(FORMATS[name]) for x in drawn(2, queries, keys, dim, seed=600 + seed)]
        unseen = torch.ones(queries, keys, dtype=torch.bool).triu(1) if is_causal else None
        query, key, value = (x.double() for x in inputs)
        right = attention(query, key, value, unseen)
        out = emulate.forward(*inputs, step=step, is_causal=is_causal).out
        query, key, value = inputs
        theirs = attention(query, key, value, unseen)
        ours = max(ours, float((out - right).abs().max()))
        plain = max(plain, float((theirs - right).abs().max()))
    return ours, plain


def attention(query: Tensor, key: Tensor, value: Tensor, unseen: Tensor | None) -> Tensor:
    """Compute attention by three operations in the inputs' dtype."""
    scores = query @ key.mT * query.shape[-1] ** -0.5
    if unseen is not None:
        scores = scores.masked_fill(unseen, -math.inf)
    return torch.softmax(scores, dim=-1) @ value


@case("emulated/errors", minutes=1.0, needs="cpu")
def largest_errors() -> list[Measurement]:
    """Largest errors over awkward lengths, head dimensions and masks, compared with plain torch."""
    found = []
    for name, step in itertools.product(FORMATS, build.STEPS):
        pairs = [
            errors(step, name, dim, is_causal=is_causal)
            for dim, is_causal in itertools.product((64, 128), (False, True))
        ]
        ours, plain = (max(column) for column in zip(*pairs, strict=True))
        more = {"error": ours, "plain error": plain, "lengths": [list(x) for x in AWKWARD]}
        label = f"error over plain torch's/step {step}, {name}"
        found.append(exact(label, "ratio", ours / plain, mode="simulated", **more))
    return found


def missing() -> str:
    """Return what `port/others` needs before it can run here, or ""."""
    if os.environ.get("LABCORE_CUDA_SOURCES"):
        return ""
    names = ", ".join(
        f"{name} ({one.repository} at {one.commit})" for name, one in PROJECTS.items()
    )
    return f"LABCORE_CUDA_SOURCES must name a folder with the checkouts {names}"


@case("port/others", minutes=0.5, lacks=missing)
def others() -> list[Measurement]:
    """Count what hipify changes in public attention kernels, and what stays.

    LABCORE_CUDA_SOURCES: a folder with a checkout for each name in `PROJECTS`.
    """
    if problem := missing():
        raise RuntimeError(problem)
    folder = Path(os.environ["LABCORE_CUDA_SOURCES"])
    found = []
    for name, project in PROJECTS.items():
        done = survey(folder / name, project)
        told: dict[str, Any] = {
            "repository": project.repository,
            "commit": project.commit,
            "license": project.license,
            "files": {file: list(counts) for file, counts in done.files.items()},
            "lines": done.lines,
            "changed": done.changed,
            "left": done.left,
            "device": dict(zip(("lines", "changed", "left"), done.device, strict=True)),
            "constructs": dict(done.constructs),
        }
        label = f"changed lines that hipify changes/{name}"
        found.append(exact(label, "share", done.share, **told))
    return found


@case("compiled/resources", minutes=0.01)
def compiled() -> list[Measurement]:
    """Summarize the compile gate's committed table, compared with that of the Triton kernels."""
    table, triton = (json.loads(file.read_text(encoding="utf-8")) for file in (RESOURCES, TRITON))
    return summarized(table, triton)


def summarized(table: dict[str, Any], triton: dict[str, Any]) -> list[Measurement]:
    """Summarize a table of the compile gate beside one of Triton's kernels."""
    count = functools.partial(exact, mode="compiled")
    found = []
    for target in COMPILED:
        rows = {form: needs[target] for form, needs in table["forms"].items() if target in needs}
        tuned = [need for form, need in rows.items() if form.startswith(("step3", "step4"))]
        most = max(need["lds"] for need in rows.values())
        spilled = sum(need["spills"] > 0 for need in tuned)
        wrong = sum(predicted(target, need) != need["occupancy"] for need in rows.values())
        details = {"compiler": table["compilers"][target], "forms": rows}
        found += [
            count(f"forms compiled/{target}", "forms", len(rows), **details),
            count(f"largest LDS of a block/{target}", "bytes", most),
            count(f"forms on matrix cores that spill/{target}", "forms", spilled),
            count(
                f"forms without matrix instruction, steps 3 and 4/{target}",
                "forms",
                sum(not need["mfma"] for need in tuned),
            ),
            count(f"occupancies predicted wrong/{target}", "forms", wrong),
        ]
    beside = beside_triton(table, triton)
    told = {"rows": beside, "triton": triton["triton"]}
    return [*found, count("kernels beside Triton's", "kernels", len(beside), **told)]


def predicted(target: str, need: dict[str, int]) -> int:
    """Return the waves per SIMD that `labcore.hip.occupancy` predicts."""
    names = ("vgprs", "agprs", "sgprs", "lds", "threads")
    return occupancy(target, **{name: need[name] for name in names}).waves_per_simd
