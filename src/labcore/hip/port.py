"""What PyTorch's hipify does to the CUDA original, and what it leaves wrong.

hipify only renames. It doesn't change a kernel's assumptions about the hardware. `findings` looks
for five such assumptions, and says what goes wrong on a wavefront of 64 lanes and what to write
instead. `mend` applies those fixes.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from labcore.checks import one_of
from labcore.hip.build import SOURCE

__all__ = ["RULES", "Finding", "Rule", "diff", "findings", "hipified", "mend", "on_cpu", "original"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """An assumption: how to find it, what goes wrong on AMD, and what to write instead.

    mends: (pattern, replacement) pairs that fix it in the hipified original.
    """

    pattern: str
    wrong: str
    remedy: str
    mends: tuple[tuple[str, str], ...]


RULES: Mapping[str, Rule] = {
    "mask": Rule(
        pattern=r"\b0x[fF]{8}[uUlL]*\b",
        wrong="a mask of 32 lanes. Before HIP 7, __shfl_xor_sync and its kin exist only on "
        "request. HIP 7 refuses a mask without 64 bits. A mask widened to 64 bits leaves out the "
        "lanes from 32 on.",
        remedy="write __shfl_xor(x, step) without a mask: a wavefront runs in step",
        mends=((r"(__\w+)_sync\(0x[fF]{8}[uUlL]*, ", r"\1("),),
    ),
    "vote": Rule(
        pattern=r"\b(?:unsigned int|unsigned|uint32_t|int)\s+\w+\s*=\s*__(?:ballot|activemask)"
        r"|__(?:ffs|popc|clz)\(",
        wrong="a vote in 32 bits: __ballot returns 64, and the lanes from 32 on lose theirs "
        "without a warning",
        remedy="keep votes in unsigned long long and use __ffsll, __popcll, __clzll",
        mends=((r"\bunsigned int\b", "unsigned long long"), (r"__ffs\(", "__ffsll(")),
    ),
    "width": Rule(
        # 32 or 31 in a lane count, 5 in a shift, 16 at the start of a reduction.
        pattern=r"[/%*&]\s*3[12]u?\b|\+=\s*32\b|>>\s*5\b|=\s*16\s*;\s*\w+\s*>\s*0"
        r"|\b(?:const|constexpr)\s+(?:unsigned\s+)?(?:int|unsigned|auto|size_t|u?int32_t)\s+\w+"
        r"\s*=\s*32u?\b|#define\s+\w+\s+32\b",
        wrong="a warp of 32 lanes: two such warps stand in one wavefront, lane 0 answers for both, "
        "and a reduction that begins at 16 never meets the other half",
        remedy="count in wavefronts of 64 (CDNA): 64 for 32, 63 for 31, 6 for 5, 32 for 16",
        mends=((r"([/*%+=]=?) 32\b", r"\1 64"), (r"= 16;", "= 32;")),
    ),
    "assembly": Rule(
        pattern=r"\b(?:asm|__asm|__asm__)\b(?:\s+(?:volatile|__volatile__))?\s*\(",
        wrong="PTX, NVIDIA's assembly: no AMD compiler takes it",
        remedy="call the function that it stands for, here exp2f, or a builtin of the compiler",
        mends=((r'asm\("ex2[^;]*;[^;]*;', "y = exp2f(x);"),),
    ),
    "launch": Rule(
        # Before hipify: a launch with a comma in braces or template brackets. After: the wrong cut.
        pattern=r"<<<(?:(?!>>>)[^;])*?(?:\{[^;{}]*,[^;{}]*\}|\w<[^;<>]*,[^;<>]*>)"
        r"|dim3\([^;{}]*\{[^;{}]*\), dim3\(|dim3\(\w+<[^;<>]*\), dim3\(",
        wrong="a launch whose grid or block has a comma in braces or template brackets: hipify "
        "takes it for the comma between the two and cuts there",
        remedy="name grid and block before the launch, or leave <<< >>>, which hipcc takes as well",
        mends=(
            (
                r"dim3\(dim3\{([^;]*?)\), dim3\(([^;]*?)\}\), ([^;,]*), ([^;,]*), ",
                r"dim3(\1, \2), \3, \4, 0, ",
            ),
        ),
    ),
}

COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One match: its line (from 1), the rule's name, the line's code, the problem and the fix."""

    line: int
    rule: str
    code: str
    wrong: str
    remedy: str

    def __str__(self) -> str:
        """Return the line, code, problem and fix in one sentence."""
        return f"line {self.line}: {self.code}: {self.wrong.removesuffix('.')}; {self.remedy}"


def original() -> str:
    """Return the CUDA original, `source/step0_cuda.cu`."""
    return (SOURCE / "step0_cuda.cu").read_text(encoding="utf-8")


def hipified(source: str | None = None) -> str:
    """Rewrite `source` (default: the CUDA original) with PyTorch's hipify. Needs no GPU.

    A source in which hipify finds nothing to change is returned as it is.
    """
    from torch.utils.hipify import hipify_python

    with tempfile.TemporaryDirectory() as folder:
        cuda, out = Path(folder) / "cuda", Path(folder) / "hip"
        cuda.mkdir()
        text = original() if source is None else source
        (cuda / "kernel.cu").write_text(text, encoding="utf-8")
        quiet = io.StringIO()
        with contextlib.redirect_stderr(quiet), contextlib.redirect_stdout(quiet):
            results = hipify_python.hipify(
                project_directory=str(cuda),
                output_directory=str(out),
                includes=[f"{out}/*"],
                is_pytorch_extension=True,
                show_progress=False,
            )
        written = [path for path in out.iterdir() if path.suffix == ".hip"]
        if written:
            return written[0].read_text(encoding="utf-8")
        result = results.get(str(out / "kernel.cu"))
        if result is not None and "no changes" in result.status:
            return text
        raise RuntimeError(
            f"hipify must write a .hip file, got none; its output: {quiet.getvalue()}"
        )


def diff(source: str | None = None) -> str:
    """Return hipify's changes to `source` (default: the CUDA original) as a unified diff."""
    text = original() if source is None else source
    lines = difflib.unified_diff(
        text.splitlines(), hipified(text).splitlines(), "cuda", "hip", n=1, lineterm=""
    )
    return "\n".join(lines)


def findings(source: str) -> tuple[Finding, ...]:
    """Return the places in `source`, CUDA or hipified, that are wrong on AMD, ordered by line.

    Ignores comments. It only matches the spellings in `RULES`, so code without findings may still
    be wrong.
    """
    code = COMMENT.sub(lambda comment: re.sub(r"[^\n]", " ", comment[0]), source)
    lines = source.splitlines()
    found = {
        (code.count("\n", 0, match.start()) + 1, name)
        for name, rule in RULES.items()
        for match in re.finditer(rule.pattern, code)
    }
    return tuple(
        Finding(
            line=line,
            rule=name,
            code=" ".join(lines[line - 1].split()),
            wrong=RULES[name].wrong,
            remedy=RULES[name].remedy,
        )
        for line, name in sorted(found)
    )


def mend(source: str, rules: Iterable[str] = tuple(RULES)) -> str:
    """Fix the hipified original `source` according to `rules`."""
    for name in rules:
        for pattern, replacement in RULES[one_of("rule", name, RULES)].mends:
            start, parts = 0, []
            for comment in COMMENT.finditer(source):
                parts += [re.sub(pattern, replacement, source[start : comment.start()]), comment[0]]
                start = comment.end()
            source = "".join([*parts, re.sub(pattern, replacement, source[start:])])
    return source


def on_cpu(source: str) -> str:
    """Prepare a hipified `source` for `labcore.hip.emulate.load(…, check=False)`.

    The emulator allocates dynamic LDS with a macro. PTX is replaced, because a CPU can't run it.
    """
    dynamic = r"extern\s+__shared__\s+(\w+)\s+(\w+)\s*\[\s*\]\s*;"
    return re.sub(dynamic, r"HIP_DYNAMIC_SHARED(\1, \2)", mend(source, ["assembly"]))
