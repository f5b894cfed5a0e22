"""Makes a shipped model: `python -m labcore.models.ship target --out FOLDER --commit COMMIT`.

FOLDER gets tokenizer.json (learned where it is missing) and a checkpoint from which a training
that was broken off goes on. With a commit, the finished model is written to FOLDER/<name> in the
format of Hugging Face, with its card; run again after the training, this takes a minute.
"""

# The package's face gives the name `train` to a function: nothing may import this file.

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from labcore.models.recipes import RECIPES
from labcore.models.shipping import checked_commit, export, trained


def main() -> int:
    """Train, or export, one of the shipped models; 2 for what was asked wrongly."""
    parser = argparse.ArgumentParser(prog="labcore.models.ship", description=__doc__)
    parser.add_argument("name", choices=[*RECIPES])
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--commit", help="of the code that trains: exports the finished model")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--eager", action="store_true", help="without torch.compile: no C++ needed")
    parser.add_argument("--export-only", action="store_true", help="refuse to train")
    told = parser.parse_args()
    torch.set_num_threads(told.threads)
    try:
        if told.commit is not None:
            checked_commit(told.commit)
        elif told.export_only:
            raise ValueError("an export needs --commit COMMIT, got none")
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
