"""The base class of the optimizers: a `torch.optim.Optimizer` whose update is a pure rule.

It holds what all have in common: settings and their checks, state and its round trip, and a step
that looks at every gradient before it changes a weight. `elementwise` and `tensorwise` add the fast
paths, which compute the same rule.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from labcore import checks
from labcore.optim.precision import Rule, apply_rule, store

NONFINITE = ("propagate", "raise", "skip")
PATHS = ("foreach", "fused", "capturable")
Item: TypeAlias = tuple[Tensor, Tensor, dict[str, Tensor]]  # parameter, gradient, its state
Layout: TypeAlias = dict[str, tuple[tuple[int, ...], torch.dtype]]  # state name: shape, dtype


def layout_bytes(layout: Layout) -> int:
    """Return the bytes of a state with these shapes and dtypes."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in layout.values())


def check_betas(betas: tuple[float | Tensor, ...]) -> None:
    """Raise ValueError unless betas are two numbers in [0, 1)."""
    if len(betas) != 2:
        raise ValueError(f"betas must be two numbers (beta1, beta2), got {len(betas)}")
    checks.fraction("betas[0]", betas[0])
    checks.fraction("betas[1]", betas[1])


class Shell(Optimizer):
    """Settings, state and the step of an optimizer whose update is a pure rule.

    A subclass defines its rule, its state's layout and how it updates the tensors of a group.
    """

    rule: ClassVar[Rule]
    # Defaults for settings that state dicts of older versions or of torch may not have.
    neutral: ClassVar[dict[str, Any]] = {
        "maximize": False,
        "foreach": None,
        "master_weights": False,
        "stochastic_rounding": False,
        "nonfinite": "propagate",
    }

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        generator: torch.Generator | None,
    ) -> None:
        self.generator = generator
        self.skipped = 0
        super().__init__(params, defaults)

    # Defined by subclasses ------------------------------------------------

    def _hyperparameters(self, group: dict[str, Any], *, tensors: bool = False) -> dict[str, Any]:
        """Return the rule's keyword arguments, as Python floats unless `tensors`."""
        raise NotImplementedError

    def _layout(self, group: dict[str, Any], param: Tensor) -> Layout:
        """Return names, shapes and dtypes of a parameter's state, including the step count."""
        raise NotImplementedError

    def _foreach(self, group: dict[str, Any], items: list[Item]) -> bool:
        """Take one step by torch._foreach operations, or return False if they don't support it."""
        raise NotImplementedError

    def _update(self, index: int, group: dict[str, Any], items: list[Item]) -> None:
        """Take one step of the tensors in group number `index`."""
        raise NotImplementedError

    # Groups, state and their round trip -----------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group. Its settings override the optimizer's and are checked the same way."""
        super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1])
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def _check_group(self, group: dict[str, Any]) -> None:
        checks.non_negative("lr", group["lr"], "pass lr=0 to freeze the weights")
        checks.non_negative("weight_decay", group["weight_decay"])
        checks.one_of("nonfinite", group["nonfinite"], NONFINITE)
        if group["master_weights"] and group["stochastic_rounding"]:
            raise ValueError(
                "master_weights and stochastic_rounding must not both be True: each keeps small "
                "updates; choose one"
            )
        for param in group["params"]:
            self._check_param(group, param)

    def _check_param(self, group: dict[str, Any], param: Tensor) -> None:
        if group["stochastic_rounding"] and param.dtype == torch.float16:
            raise ValueError(
                "stochastic_rounding rounds to bfloat16, got a torch.float16 parameter; "
                "use master_weights=True"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "skipped": self.skipped, "generator": self.generator}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("skipped", 0)
        self.__dict__.setdefault("generator", None)
        for group in self.param_groups:
            for name, value in self.neutral.items():
                group.setdefault(name, value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this kind of optimizer. Settings missing in the dict do not change.

        Neither do foreach, fused and capturable, because they depend on this machine, not the one
        that saved. torch casts every float state to its parameter's dtype; here, state keeps the
        dtype that the group asks for (`state_dtype`, float32 for `master`). Tensors are copied,
        never shared with the dict.
        Raises ValueError for a state from another kind of optimizer.
        """
        seen: list[dict[str, Any]] = []

        def complete(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            groups = [dict(group) for group in given["param_groups"]]
            for group, ours in zip(groups, self.param_groups, strict=False):
                for name in ours.keys() - {"params", "param_names"}:
                    if name in PATHS or name not in group:
                        group[name] = ours[name]
                self._check_group({**group, "params": ours["params"]})
            self._check_loaded({**given, "param_groups": groups})
            seen.append({**given, "param_groups": groups})
            return seen[-1]

        def recast(_: Optimizer) -> None:
            for saved, group in zip(seen[-1]["param_groups"], self.param_groups, strict=True):
                for key, param in zip(saved["params"], group["params"], strict=True):
                    if seen[-1]["state"].get(key):
                        self.state[param] = self._loaded(group, param, seen[-1]["state"][key])

        before = self.register_load_state_dict_pre_hook(complete)
        after = self.register_load_state_dict_post_hook(recast, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def _check_loaded(self, saved: dict[str, Any]) -> None:
        for theirs, ours in zip(saved["param_groups"], self.param_groups, strict=False):
            for key, param in zip(theirs["params"], ours["params"], strict=False):
                entry = saved["state"].get(key)
                if not entry:
                    continue
                came = {
                    name: tuple(torch.as_tensor(value).shape)
                    for name, value in entry.items()
                    if name != "master"
                }
                layout = self._saved_layout({**ours, **theirs}, param, entry)
                wanted = {name: shape for name, (shape, _) in layout.items()}
                if came != wanted:
                    raise ValueError(
                        f"{type(self).__name__} keeps {wanted} for a parameter of shape "
                        f"{tuple(param.shape)}, got a state with {came}; load a state dict saved "
                        "by the same kind of optimizer for the same shapes and settings"
                    )

    def _saved_layout(
        self,
        group: dict[str, Any],
        param: Tensor,
        entry: dict[str, Any],  # noqa: ARG002 (for SM3, whose entries differ)
    ) -> Layout:
        """Return the layout that a parameter's saved state must have."""
        return self._layout(group, param)

    def _loaded(
        self, group: dict[str, Any], param: Tensor, saved: dict[str, Any]
    ) -> dict[str, Tensor]:
        state = self._new_state(group, param)
        for name in state:
            if name in saved:
                state[name].copy_(torch.as_tensor(saved[name]))
        return state

    def _new_state(self, group: dict[str, Any], param: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {}
        for name, (shape, dtype) in self._layout(group, param).items():
            if name == "step":  # on the host, where reading it costs no wait
                state[name] = torch.zeros(shape, dtype=dtype)
            elif shape == param.shape:  # and strides like the parameter's
                state[name] = torch.zeros_like(param, dtype=dtype)
            else:
                state[name] = torch.zeros(shape, dtype=dtype, device=param.device)
        if group["master_weights"] and param.dtype in (torch.bfloat16, torch.float16):
            state["master"] = param.detach().to(torch.float32, copy=True)
        return state

    # One step -------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. Return the closure's loss, if given.

        Before any weight changes, raises RuntimeError for a sparse gradient, or for a non-finite
        one with nonfinite="raise".
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        todo = [
            (group, self._with_gradient(index, group))
            for index, group in enumerate(self.param_groups)
        ]
        for index, (group, pairs) in enumerate(todo):
            if pairs:
                self._update(index, group, [self._item(group, *pair) for pair in pairs])
        return loss

    def _with_gradient(self, index: int, group: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
        pairs = []
        for param in group["params"]:
            grad = param.grad
            if grad is None:
                continue
            if grad.layout is not torch.strided:
                raise RuntimeError(
                    f"{type(self).__name__} needs dense gradients, got a sparse one for "
                    f"{self._name(index, param)}; use sparse=False in the embedding, "
                    "or torch.optim.SparseAdam"
                )
            pairs.append((param, grad))
        if group["nonfinite"] == "propagate":
            return pairs
        bad = [param for param, grad in pairs if not bool(torch.isfinite(grad).all())]
        if bad and group["nonfinite"] == "raise":
            raise RuntimeError(
                f"{type(self).__name__} needs finite gradients, got NaN or infinity for "
                f"{self._name(index, bad[0])}; no weight was changed. Lower the learning rate, "
                "clip the gradients, or pass nonfinite='skip'"
            )
        self.skipped += len(bad)
        dropped = {id(param) for param in bad}
        return [pair for pair in pairs if id(pair[0]) not in dropped]

    def _name(self, index: int, param: Tensor) -> str:
        group = self.param_groups[index]
        place = next(i for i, other in enumerate(group["params"]) if other is param)
        names = group.get("param_names")
        return f"parameter {names[place]!r}" if names else f"parameter {place} of group {index}"

    def _item(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> Item:
        state = self.state[param]
        if not state:
            state.update(self._new_state(group, param))
        return param, grad, state

    def _by_rule(
        self,
        group: dict[str, Any],
        param: Tensor,
        grad: Tensor,
        state: dict[str, Tensor],
        *,
        tensors: bool = False,
    ) -> None:
        """Take one step of one tensor by the rule itself, the form that all paths agree with."""
        arrays = {name: value for name, value in state.items() if name != "step"}
        step: float | Tensor = 0.0
        if "step" in state:
            step = state["step"].clone() if tensors else float(state["step"])
            state["step"] += 1
        self._apply(group, param, grad, arrays, step, tensors=tensors)

    def _apply(
        self,
        group: dict[str, Any],
        param: Tensor,
        grad: Tensor,
        arrays: dict[str, Tensor],
        step: float | Tensor,
        *,
        tensors: bool = False,
    ) -> None:
        """Apply the rule with the group's settings; `step` counts the steps before this one."""
        apply_rule(
            type(self).rule,
            param,
            grad,
            arrays,
            step=step,
            maximize=group["maximize"],
            stochastic=group["stochastic_rounding"],
            generator=self.generator,
            **self._hyperparameters(group, tensors=tensors),
        )

    def _store(self, group: dict[str, Any], param: Tensor, value: Tensor) -> None:
        """Round `value` into `param` as the group's settings say."""
        stochastic = group["stochastic_rounding"]
        store(param, value, stochastic=stochastic, generator=self.generator)


def is_plain(items: list[Item]) -> bool:
    """Return whether all tensors have the same dtype, float32 or float64, and no master copy."""
    dtypes = {
        t.dtype
        for param, grad, state in items
        for t in (param, grad, *(value for name, value in state.items() if name != "step"))
    }
    master = any("master" in state for _, _, state in items)
    return len(dtypes) == 1 and dtypes <= {torch.float32, torch.float64} and not master
