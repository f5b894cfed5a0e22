"""Speculative decoding, several tokens from one forward: proposers, verifiers, generation."""

from labcore.decoding.audit import near_tie_audit
from labcore.decoding.contract import Accepted, Draft, Proposer, SamplingConfig
from labcore.decoding.generation import Generation, generate, stream
from labcore.decoding.proposers import Adaptive, DraftModel, Gated, NGram, NoProposer
from labcore.decoding.sampling import probabilities
from labcore.decoding.suffix import Suffix
from labcore.decoding.theory import exact, overlap, speedup
from labcore.decoding.verify import (
    VERIFIERS,
    TypicalAcceptance,
    block_verification,
    greedy_match,
    rejection_sampling,
    residual,
    sample_and_compare,
)

__all__ = [
    "VERIFIERS",
    "Accepted",
    "Adaptive",
    "Draft",
    "DraftModel",
    "Gated",
    "Generation",
    "NGram",
    "NoProposer",
    "Proposer",
    "SamplingConfig",
    "Suffix",
    "TypicalAcceptance",
    "block_verification",
    "exact",
    "generate",
    "greedy_match",
    "near_tie_audit",
    "overlap",
    "probabilities",
    "rejection_sampling",
    "residual",
    "sample_and_compare",
    "speedup",
    "stream",
]
