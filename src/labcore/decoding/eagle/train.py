"""Train the shipped head: `python -m labcore.decoding.eagle.train --out FOLDER --commit COMMIT`.

FOLDER gets the target's own words and checkpoints from which an interrupted training resumes;
FOLDER/head is what is shipped.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from labcore.decoding.eagle.shipped import export_eagle, trained_eagle
from labcore.models.shipping import checked_commit


def main() -> int:
    """Train and export; return 2 for invalid arguments."""
    parser = argparse.ArgumentParser(prog="labcore.decoding.eagle.train", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--commit", required=True, help="of the training code, for the card")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    told = parser.parse_args()
    torch.set_num_threads(told.threads)
    try:
        checked_commit(told.commit)
        export_eagle(*trained_eagle(told.out), told.out / "head", commit=told.commit)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"labcore.decoding.eagle.train: {error}\n")
        return 2
    sys.stdout.write((told.out / "head" / "README.md").read_text("utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
