"""Speculative decoding, several tokens from one forward: proposers, verifiers, generation."""

from labcore.decoding.audit import near_tie_audit
from labcore.decoding.contract import Accepted, Decoder, Draft, Proposer, SamplingConfig, Verifier
from labcore.decoding.generation import Generation, generate, stream
from labcore.decoding.proposers import Adaptive, DraftModel, Gated, NGram, NoProposer
from labcore.decoding.sampling import probabilities
from labcore.decoding.theory import exact, overlap, speedup
from labcore.decoding.verify import (
    VERIFIERS,
    TypicalAcceptance,
    greedy_match,
    rejection_sampling,
    residual,
    sample_and_compare,
)

__all__ = [
    "VERIFIERS",
    "Accepted",
    "Adaptive",
    "Decoder",
    "Draft",
    "DraftModel",
    "Gated",
    "Generation",
    "NGram",
    "NoProposer",
    "Proposer",
    "SamplingConfig",
    "TypicalAcceptance",
    "Verifier",
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
