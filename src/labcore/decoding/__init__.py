"""Several tokens from one forward: proposers, verifiers, generation."""

from labcore.decoding import exact, overlap, speedup
from labcore.decoding.audit import Audit, near_tie_audit
from labcore.decoding.contract import (
    Accepted,
    Decoder,
    Draft,
    Proposer,
    SamplingConfig,
    Verifier,
)
from labcore.decoding.decoders import LlamaDecoder, TransformersDecoder, as_decoder
from labcore.decoding.gallery import FAULTS, Fault
from labcore.decoding.generation import Generation, generate, stream
from labcore.decoding.proposers import Adaptive, DraftModel, Gated, NGram, NoProposer
from labcore.decoding.sampling import probabilities, tree_probabilities
from labcore.decoding.trace import Statistics, Step, Trace
from labcore.decoding.verify import (
    LOSSLESS,
    VERIFIERS,
    TypicalAcceptance,
    greedy_match,
    rejection_sampling,
    residual,
    sample_and_compare,
)

__all__ = [
    "FAULTS",
    "LOSSLESS",
    "VERIFIERS",
    "Accepted",
    "Adaptive",
    "Audit",
    "Decoder",
    "Draft",
    "DraftModel",
    "Fault",
    "Gated",
    "Generation",
    "LlamaDecoder",
    "NGram",
    "NoProposer",
    "Proposer",
    "SamplingConfig",
    "Statistics",
    "Step",
    "Trace",
    "TransformersDecoder",
    "TypicalAcceptance",
    "Verifier",
    "as_decoder",
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
    "tree_probabilities",
]
