"""Conversion of a model's BatchNorm layers to ghost batch normalization."""

from __future__ import annotations

from torch import nn

from labcore.checks import one_of, positive_int
from labcore.norm.ghosts import POLICIES, Running
from labcore.norm.layers import GhostBatchNorm1d, GhostBatchNorm2d, GhostBatchNorm3d

__all__ = ["convert_ghost_batchnorm"]

_Ghost = GhostBatchNorm1d | GhostBatchNorm2d | GhostBatchNorm3d
_KINDS: dict[type[nn.Module], type[_Ghost]] = {
    nn.BatchNorm1d: GhostBatchNorm1d,
    nn.BatchNorm2d: GhostBatchNorm2d,
    nn.BatchNorm3d: GhostBatchNorm3d,
    GhostBatchNorm1d: GhostBatchNorm1d,
    GhostBatchNorm2d: GhostBatchNorm2d,
    GhostBatchNorm3d: GhostBatchNorm3d,
}


def convert_ghost_batchnorm(
    model: nn.Module,
    ghost_size: int,
    *,
    running: Running = "sequential",
    fused: bool = False,
) -> nn.Module:
    """Replace every BatchNorm layer of `model` by ghost batch normalization, in place.

    The new layers share the old layers' parameters and buffers, so existing optimizers stay valid,
    and they keep device, dtype and `training`. Hooks and attributes set on a layer carry over, and
    a hook's handle still removes it. A layer that the model uses in several places stays one layer.
    Layers that already are ghost batch normalization get the new settings.

    Returns `model`, or a new layer if `model` is itself a BatchNorm, as torch's
    `convert_sync_batchnorm` does. Convert before `torch.compile` and DistributedDataParallel.

    ghost_size, running, fused: as for GhostBatchNorm1d.
    Raises TypeError, before replacing any layer, for a subclass of BatchNorm that would lose its
    own behavior (SyncBatchNorm, a lazy layer, a parametrized layer).
    """
    positive_int("ghost_size", ghost_size, "pass the number of rows per ghost")
    one_of("running", running, POLICIES)
    places = list(model.named_modules(remove_duplicate=False))
    made: dict[nn.Module, _Ghost] = {}
    for path, layer in places:
        if layer in made:
            continue
        if type(layer) in _KINDS:
            made[layer] = _ghosts_of(layer, ghost_size, running, fused)
        elif isinstance(layer, nn.modules.batchnorm._BatchNorm):
            raise TypeError(
                f"only torch's BatchNorm1d, 2d and 3d can be converted, got {type(layer).__name__} "
                f"at {path or 'the root'!r}; replace it with one of these first"
            )
    for path, layer in places:
        if layer in made and path:
            model.set_submodule(path, made[layer])
    return made.get(model, model)


def _ghosts_of(layer: nn.Module, ghost_size: int, running: Running, fused: bool) -> _Ghost:
    kind = _KINDS[type(layer)]
    ghost = kind.__new__(kind)
    vars(ghost).update(vars(layer))
    # Copy the dicts, so that replacing a parameter of one layer does not change the other.
    ghost._parameters = layer._parameters.copy()
    ghost._buffers = layer._buffers.copy()
    ghost.ghost_size = ghost_size
    ghost.running = running
    ghost.fused = fused
    return ghost
