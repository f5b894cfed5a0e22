"""Greedy decoding from the command line, with one process or several.

One process:
    python -m labcore.parallel.generate --model target --prompt "def add(" --tokens 32
All GPUs of this machine:
    torchrun --nproc-per-node gpu -m labcore.parallel.generate --model FOLDER …
Two machines with 8 GPUs each:
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500
        -m labcore.parallel.generate --model FOLDER …

With GPUs, each process uses one, and they communicate through NCCL; without, through gloo. Each
process reads its part of the weights. The first one prints the text, tokens per second, and the
share of a token's time that its all-reduces take when run alone.
"""

# Nothing in the package may import this file, or `python -m` warns that it is already loaded.

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
    """Build the command's argument parser."""
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
    made.add_argument("--tokens", type=int, default=64, metavar="N", help="the most new tokens")
    made.add_argument("--graph", action="store_true", help="replay steps as CUDA graphs")
    made.add_argument(
        "--dtype", choices=[*DTYPES], help="weights; default: bfloat16 on a GPU, else float32"
    )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Decode and print; return 2 for invalid arguments or a run that can't start."""
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
        dist.barrier()  # exiting early would break connections that others still use
        dist.destroy_process_group()
    return 0


def _run(asked: argparse.Namespace, ranks: int) -> str:
    positive_int("--tokens", asked.tokens)
    folder = FILES / asked.model if asked.model in NAMES else Path(asked.model)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"--model must be {', '.join(NAMES)} or the folder of a checkpoint, got "
            f"{asked.model!r}, which isn't a folder"
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
    if not prompt:  # an empty prompt starts from the BOS token
        begin = model.config.bos_token_id
        if begin is None:
            raise ValueError("--prompt must not be empty for a model without a bos token, got ''")
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
    except Exception as problem:  # tokenizers and safetensors raise their own types
        raise ValueError(
            f"{folder} must hold a readable checkpoint, got {type(problem).__name__}: {problem}"
        ) from problem


def _own_device() -> torch.device:
    """Return this process's GPU, or the CPU."""
    if not gpu_visible():
        return torch.device("cpu")
    local, gpus = dist.get_node_local_rank(fallback_rank=0), torch.cuda.device_count()
    if local >= gpus:
        raise RuntimeError(
            f"NCCL needs one GPU per process, got process {local + 1} on a machine with {gpus} "
            f"GPUs; start torchrun with --nproc-per-node {gpus}"
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def _summary(found: Decoded, ranks: int, where: str) -> str:
    told = f"{len(found.tokens)} tokens on {ranks} × {where}"
    if found.tokens_per_second is None or found.all_reduce_share is None:
        return f"{told}; a rate needs at least two tokens"
    return (
        f"{told}: {found.tokens_per_second:.1f} tokens/s; {found.all_reduces} all-reduces per "
        f"token, which alone take {found.all_reduce_share:.1%} of its time"
    )


if __name__ == "__main__":
    sys.exit(main())
