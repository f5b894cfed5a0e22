"""Train the shipped heads: `python -m labcore.decoding.medusa.train --out FOLDER --commit COMMIT`.

FOLDER gets the backbone's own text and states (2.5 GB, once), and checkpoints from which an
interrupted training resumes; FOLDER/heads is what is shipped.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch

from labcore.decoding.medusa.heads import PROJECTIONS
from labcore.decoding.medusa.shipped import RECIPE, export_heads, trained_heads
from labcore.models.shipping import checked_commit


def main() -> int:
    """Train and export; return 2 for invalid arguments."""
    parser = argparse.ArgumentParser(prog="labcore.decoding.medusa.train", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--commit", required=True, help="of the training code, for the card")
    parser.add_argument("--projection", choices=PROJECTIONS, default=RECIPE.projection)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    told = parser.parse_args()
    torch.set_num_threads(told.threads)
    recipe = replace(RECIPE, projection=told.projection)
    try:
        checked_commit(told.commit)
        heads, curves, calibration = trained_heads(told.out, recipe)
        place = told.out / "heads"
        export_heads(heads, curves, calibration, place, commit=told.commit, recipe=recipe)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"labcore.decoding.medusa.train: {error}\n")
        return 2
    sys.stdout.write((place / "README.md").read_text("utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
