"""Train a shipped model: `python -m labcore.models.ship target --out FOLDER --commit COMMIT`.

FOLDER receives tokenizer.json (learned if it's missing) and a checkpoint for resuming an
interrupted training. With --commit, the finished model is also written to FOLDER/<name> in Hugging
Face's format, with its model card. After the training, exporting again takes a minute.
"""

# Nothing may import this file, because `python -m` would then warn.

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from labcore.models.recipes import RECIPES
from labcore.models.shipping import checked_commit, export, trained


def main() -> int:
    """Train or export a shipped model; return 2 for invalid arguments."""
    parser = argparse.ArgumentParser(prog="labcore.models.ship", description=__doc__)
    parser.add_argument("name", choices=[*RECIPES])
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument(
        "--commit", help="commit of the training code; also export the finished model"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--eager", action="store_true", help="don't use torch.compile, which needs a C++ compiler"
    )
    parser.add_argument("--export-only", action="store_true", help="export without training")
    told = parser.parse_args()
    torch.set_num_threads(told.threads)
    try:
        if told.commit is not None:
            checked_commit(told.commit)
        elif told.export_only:
            raise ValueError("--export-only needs --commit COMMIT, got none")
        if not told.export_only:
            trained(told.name, told.out, compiled=not told.eager)
        if told.commit is not None:
            place = export(told.name, told.out, commit=told.commit)
            sys.stdout.write((place / "README.md").read_text("utf-8"))
    except (ValueError, FileNotFoundError) as error:
        sys.stderr.write(f"labcore.models.ship: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
