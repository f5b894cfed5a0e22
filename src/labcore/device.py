"""What this machine has: the only module that reads the environment and looks for a GPU."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
from dataclasses import dataclass
from typing import Literal

import torch

from labcore.checks import one_of

__all__ = [
    "Hardware",
    "badge",
    "building_book",
    "choose_backend",
    "default_device",
    "gpu_visible",
    "hardware",
    "interpreting",
    "kernels_compile_for",
    "prepare_interpreter",
    "seed_from_environment",
    "strict_claims",
    "triton_problem",
    "versions",
]

Backend = Literal["auto", "triton", "torch"]

INTERPRET = "TRITON_INTERPRET"
_CDNA = ("gfx908", "gfx90a", "gfx94", "gfx95")


@functools.cache
def gpu_visible() -> bool:
    """Return whether PyTorch sees a CUDA or ROCm device in this process."""
    return torch.cuda.is_available()


def default_device() -> torch.device:
    """Return the first GPU if there is one, and the CPU otherwise."""
    return torch.device("cuda", 0) if gpu_visible() else torch.device("cpu")


def prepare_interpreter() -> None:
    """Turn on Triton's interpreter on a machine without a GPU. `import labcore` calls this.

    Triton reads the flag when it is first imported and when a kernel is decorated, so this must
    run before both. A value that the user has set, including "0", does not change.
    """
    if INTERPRET not in os.environ and "triton" not in sys.modules and not gpu_visible():
        os.environ[INTERPRET] = "1"


def triton_problem() -> str | None:
    """Return None if Triton can be imported, and otherwise a sentence that says why not."""
    if importlib.util.find_spec("triton") is not None:
        return None
    if sys.platform != "linux":
        return (
            f"Triton has no build for {platform.system()}: its kernels run on Linux; "
            "plain PyTorch runs instead"
        )
    return "Triton is not installed: run pip install 'triton>=3.6,<3.10'"


def interpreting() -> bool:
    """Return whether this process runs Triton kernels in the interpreter."""
    if triton_problem() is not None or os.environ.get(INTERPRET) != "1":
        return False
    import triton.language as tl

    # Triton binds its library functions on import, so their type shows the mode it started in.
    return type(tl.standard.zeros_like).__name__ == "InterpretedFunction"


def kernels_compile_for(device: torch.device) -> bool:
    """Return whether labcore's kernels support `device`: NVIDIA sm_80 or newer, or AMD CDNA."""
    if device.type != "cuda" or triton_problem() is not None:
        return False
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.startswith(_CDNA)
    return torch.cuda.get_device_capability(device) >= (8, 0)


def choose_backend(backend: str, tensor: torch.Tensor, *, op: str) -> Literal["triton", "torch"]:
    """Choose the implementation of `op` to run on `tensor`: "triton" or "torch".

    backend: "auto" is Triton on a GPU that the kernels support and PyTorch everywhere else.
    "triton" on a CPU tensor runs the interpreter, which a process has only if it started without
    a visible GPU or with TRITON_INTERPRET=1.
    Raises ValueError for an unknown name, or for "triton" if no kernel can run.
    """
    one_of("backend", backend, ("auto", "triton", "torch"))
    if backend == "torch":
        return "torch"
    if backend == "auto":
        return "triton" if kernels_compile_for(tensor.device) and not interpreting() else "torch"
    problem = triton_problem()
    if problem is not None:
        raise ValueError(f"{op}: backend='triton' cannot run: {problem}; use backend='torch'")
    if tensor.device.type == "cuda":
        if kernels_compile_for(tensor.device):
            return "triton"
        name = torch.cuda.get_device_name(tensor.device)
        raise ValueError(
            f"{op}: the kernels need an NVIDIA GPU with sm_80 or newer, or AMD CDNA, got {name}; "
            "use backend='torch'"
        )
    if interpreting():
        return "triton"
    if gpu_visible():
        raise ValueError(
            f"{op}: backend='triton' needs a GPU tensor when a GPU is visible, got a CPU tensor; "
            f"move it to the GPU, use backend='torch', or start Python with {INTERPRET}=1"
        )
    raise ValueError(
        f"{op}: triton was imported before labcore, so its interpreter is off; import labcore "
        f"first, or start Python with {INTERPRET}=1"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """A machine. `kind` names its file of records ("cpu", "nvidia-h200")."""

    kind: str
    name: str
    cores: int
    memory_gib: float


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0


@functools.cache
def hardware() -> Hardware:
    """Describe this process's GPU, or its CPU if there is none; memory_gib is that device's."""
    cores = os.cpu_count() or 1
    if gpu_visible():
        properties = torch.cuda.get_device_properties(0)
        kind = re.sub(r"[^a-z0-9]+", "-", properties.name.lower()).strip("-")
        return Hardware(
            kind=kind,
            name=properties.name,
            cores=cores,
            memory_gib=round(properties.total_memory / 2**30, 1),
        )
    return Hardware(
        kind="cpu", name=_cpu_name(), cores=cores, memory_gib=round(_memory_bytes() / 2**30, 1)
    )


def versions() -> dict[str, str]:
    """Return the versions of Python, labcore and the installed libraries that affect results."""
    # torch.__version__ names the build ("+cpu", "+cu130"); the package metadata may not.
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("labcore", "triton", "numpy"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if torch.version.hip:
        found["hip"] = torch.version.hip
    return found


def badge() -> str:
    """Return a line for the top of a chapter: the device and how Triton kernels run on it."""
    machine = hardware()
    if triton_problem() is not None:
        kernels = "no Triton here: kernels are shown, and plain PyTorch runs instead"
    elif interpreting():
        kernels = "Triton kernels run in the interpreter (correct but slow)"
    elif kernels_compile_for(default_device()):
        kernels = "Triton kernels run on the GPU"
    else:
        kernels = "plain PyTorch runs instead of the kernels"
    which = "GPU" if gpu_visible() else "CPU"
    return (
        f"{which}: {machine.name} ({machine.memory_gib:g} GiB, {machine.cores} cores) · {kernels}"
        f" · torch {torch.__version__}"
    )


def building_book() -> bool:
    """Return whether the static book runs this notebook (LABCORE_BOOK=1): twins, not widgets."""
    return os.environ.get("LABCORE_BOOK") == "1"


def strict_claims() -> bool:
    """Return whether a live result that contradicts its record raises (LABCORE_STRICT_CLAIMS=1)."""
    return os.environ.get("LABCORE_STRICT_CLAIMS") == "1"


def seed_from_environment() -> int | None:
    """Return the seed set in LABCORE_SEED, or None."""
    text = os.environ.get("LABCORE_SEED")
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"LABCORE_SEED must be a whole number, got {text!r}") from None
