"""Training memory: a meter for a step's bytes, an estimate of them, and ten ways to save some."""

from labcore.memory.accounting.breakdown import Breakdown
from labcore.memory.accounting.meter import Meter, Moment
from labcore.memory.accounting.prediction import estimate, film
from labcore.memory.accumulation import accumulate
from labcore.memory.checkpointing import set_checkpointing
from labcore.memory.distill import distillation_loss
from labcore.memory.experts import SwitchMLP, balance_loss, with_experts
from labcore.memory.linear_loss import linear_cross_entropy
from labcore.memory.offload import Offload
from labcore.memory.offload_runs import offloaded
from labcore.memory.pipeline import Stage, train_stage
from labcore.memory.quantization.conversion import convert
from labcore.memory.quantization.scheme import INT4, INT8, QuantizedLinear, Scheme
from labcore.memory.shards.loading import RecordFiles
from labcore.memory.tiers import Disk, Host
from labcore.memory.zero import divide

__all__ = [
    "INT4",
    "INT8",
    "Breakdown",
    "Disk",
    "Host",
    "Meter",
    "Moment",
    "Offload",
    "QuantizedLinear",
    "RecordFiles",
    "Scheme",
    "Stage",
    "SwitchMLP",
    "accumulate",
    "balance_loss",
    "convert",
    "distillation_loss",
    "divide",
    "estimate",
    "film",
    "linear_cross_entropy",
    "offloaded",
    "set_checkpointing",
    "train_stage",
    "with_experts",
]
