"""Medusa: heads on a frozen backbone that predict several tokens, and trees of their candidates."""

from labcore.decoding.medusa.fused import FusedHeads
from labcore.decoding.medusa.heads import (
    PROJECTIONS,
    MedusaHeads,
    ResidualBlock,
    load_heads,
    save_heads,
)
from labcore.decoding.medusa.known_text import replay_text
from labcore.decoding.medusa.proposer import Medusa
from labcore.decoding.medusa.shipped import heads_card, pretrained_heads
from labcore.decoding.medusa.training import (
    HeadsCurve,
    HiddenStates,
    head_accuracies,
    hidden_states,
    medusa_loss,
    train_heads,
    training_bytes,
)
from labcore.decoding.medusa.trees import (
    Tree,
    chain_tree,
    dense_tree,
    expected_tokens,
    node_chances,
    sparse_tree,
)

__all__ = [
    "PROJECTIONS",
    "FusedHeads",
    "HeadsCurve",
    "HiddenStates",
    "Medusa",
    "MedusaHeads",
    "ResidualBlock",
    "Tree",
    "chain_tree",
    "dense_tree",
    "expected_tokens",
    "head_accuracies",
    "heads_card",
    "hidden_states",
    "load_heads",
    "medusa_loss",
    "node_chances",
    "pretrained_heads",
    "replay_text",
    "save_heads",
    "sparse_tree",
    "train_heads",
    "training_bytes",
]
