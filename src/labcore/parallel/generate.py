"""Greedy decoding from the command line, by one process or several.

One process:
    python -m labcore.parallel.generate --model target --prompt "def add(" --tokens 32
All GPUs here:
    torchrun --nproc-per-node gpu -m labcore.parallel.generate --model FOLDER …
Two machines of 8:
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500
        -m labcore.parallel.generate --model FOLDER …

Processes talk through NCCL where there are GPUs, a GPU for each, and through gloo elsewhere. Each
reads its part of the weights. The first one prints the text, tokens a second, and what share of a
token's time its all-reduces take when they run alone.
"""

# The package's face gives the name `decode` to a function: nothing may import this file.

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from labcore.checks import positive_int
from labcore.device import gpu_visible
from labcore.models.checkpoint import from_pretrained
from labcore.models.llama import Llama
from labcore.models.shipped import FILES, NAMES
from labcore.models.tokenizer import Tokenizer
from labcore.parallel.greedy import Decoded, timed_decode
from labcore.parallel.llama import load_parallel
from labcore.processes import rank_and_world

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    made = argparse.ArgumentParser(
        prog="labcore.parallel.generate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "--model",
        required=True,
        metavar="FOLDER_OR_NAME",
        help=f"a Hugging Face checkpoint with tokenizer.json, or {' or '.join(NAMES)}",
    )
    made.add_argument("--prompt", required=True, metavar="TEXT")
    made.add_argument("--tokens", type=int, default=64, metavar="N", help="the most to write")
    made.add_argument("--graph", action="store_true", help="replay steps as a CUDA graph")
    made.add_argument(
        "--dtype", choices=[*DTYPES], help="of the weights (default: float32, on a GPU bfloat16)"
    )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Decode and print; 2 for what was asked wrongly or cannot run."""
    asked = parser().parse_args(arguments)
    rank, ranks = rank_and_world()
    try:
        text = _run(asked, ranks)
    except (FileNotFoundError, RuntimeError, TypeError, ValueError) as error:
        # torchrun ends the other ranks.
        who = f"rank {rank}: " if ranks > 1 else ""
        sys.stderr.write(f"labcore.parallel.generate: {who}{error}\n")
        return 2
    if rank == 0:
        sys.stdout.write(text)
        sys.stdout.flush()
    if dist.is_initialized():
        dist.barrier()  # who ends early would break the connections of who still talks
        dist.destroy_process_group()
    return 0


def _run(asked: argparse.Namespace, ranks: int) -> str:
    positive_int("--tokens", asked.tokens)
    folder = FILES / asked.model if asked.model in NAMES else Path(asked.model)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"--model must be {', '.join(NAMES)} or the folder of a checkpoint, got "
            f"{asked.model!r}, where there is no folder"
        )
    device = _own_device()
    if ranks > 1 and device.type == "cuda":
        dist.init_process_group("nccl", device_id=device)
    elif ranks > 1:
        dist.init_process_group("gloo")
    default = torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype = DTYPES[asked.dtype] if asked.dtype else default
    tokenizer, model = _loaded(folder, ranks, dtype, device)
    prompt = tokenizer.encode(asked.prompt, special=True)
    if not prompt:  # a text from nothing begins with the token that begins all texts
        begin = model.config.bos_token_id
        if begin is None:
            raise ValueError(
                "the prompt must not be empty for a model without a bos token, got none"
            )
        prompt = [begin]
    found = timed_decode(model, prompt, max_tokens=asked.tokens, graphed=asked.graph)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return f"{tokenizer.decode([*prompt, *found.tokens])}\n\n{_summary(found, ranks, where)}\n"


def _loaded(
    folder: Path, ranks: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tokenizer, Llama]:
    load: Callable[..., Llama] = load_parallel if ranks > 1 else from_pretrained
    try:
        return Tokenizer.from_pretrained(folder), load(folder, dtype=dtype, device=device)
    except (FileNotFoundError, RuntimeError, TypeError, ValueError):
        raise
    except Exception as problem:  # tokenizers and safetensors have errors of their own
        raise ValueError(
            f"{folder} must hold a checkpoint that can be read, got {type(problem).__name__}: "
            f"{problem}"
        ) from problem


def _own_device() -> torch.device:
    """The GPU of this process, or the CPU."""
    if not gpu_visible():
        return torch.device("cpu")
    local, gpus = dist.get_node_local_rank(fallback_rank=0), torch.cuda.device_count()
    if local >= gpus:
        raise RuntimeError(
            f"NCCL wants one GPU for each process, got process {local + 1} on a machine of {gpus}; "
            f"start torchrun with --nproc-per-node {gpus}"
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def _summary(found: Decoded, ranks: int, where: str) -> str:
    told = f"{len(found.tokens)} tokens on {ranks} × {where}"
    if found.tokens_per_second is None or found.all_reduce_share is None:
        return f"{told}; a rate needs two tokens or more"
    return (
        f"{told}: {found.tokens_per_second:.1f} tokens/s; {found.all_reduces} all-reduces a token, "
        f"which alone take {found.all_reduce_share:.1%} of its time"
    )


if __name__ == "__main__":
    sys.exit(main())
