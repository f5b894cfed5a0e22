"""The purposes of a training step's bytes: one type for measurements and predictions."""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["Breakdown"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Breakdown:
    """Bytes that one device holds at one moment of a training step.

    parameters: weights and buffers. gradients: of the parameters. optimizer: its state.
    activations: what the forward saves for the backward, and what checkpointing recomputes.
    workspace: everything else that's temporary, such as intermediate results and weights gathered
    from other devices.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    workspace: int = 0

    @property
    def total(self) -> int:
        """The sum of all five parts."""
        kept = self.parameters + self.gradients + self.optimizer
        return kept + self.activations + self.workspace

    def parts(self) -> dict[str, int]:
        """Return the five parts by name, in the order in which figures stack them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
