"""The base class of Lion and AdamW: a `torch.optim.Optimizer` that keeps state and picks a path.

All paths compute the same rule: a loop over `rules` (the reference), `foreach` (chunks on a CPU,
torch's `_foreach` operations on a GPU) and `fused` (one Triton launch per device and dtype).
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from labcore import checks, device
from labcore.optim.chunked import Chunk, ChunkedStep
from labcore.optim.fused import Tables
from labcore.optim.precision import Rule, apply_rule, store

NONFINITE = ("propagate", "raise", "skip")
PATHS = ("foreach", "fused", "capturable")
STATE_DTYPES = (None, torch.float32, torch.bfloat16, torch.float16)
Item = tuple[Tensor, Tensor, dict[str, Tensor]]  # parameter, gradient, its state


class Shell(Optimizer):
    """State, checks and paths of an optimizer whose update is a pure rule.

    A subclass defines its rule, moments and hyperparameters, and a fast implementation per path.
    """

    rule: ClassVar[Rule]
    moments: ClassVar[tuple[str, ...]]
    counts_steps: ClassVar[bool]
    # Defaults for settings that state dicts of older versions or of torch may not have.
    neutral: ClassVar[dict[str, Any]] = {
        "maximize": False,
        "foreach": None,
        "fused": None,
        "capturable": False,
        "state_dtype": None,
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
        self._plans: dict[int, ChunkedStep] = {}
        self._tables = Tables()
        super().__init__(params, defaults)

    # Defined by subclasses ------------------------------------------------

    def _hyperparameters(self, group: dict[str, Any], *, tensors: bool) -> dict[str, Any]:
        """Return the rule's keyword arguments, as Python floats unless `tensors`."""
        raise NotImplementedError

    def cpu_update(self, group: dict[str, Any]) -> Chunk | None:
        """Return an in-place update of 1-D pieces of one dtype, or None to use the rule."""
        raise NotImplementedError

    def _foreach(self, group: dict[str, Any], items: list[Item]) -> bool:
        """Take one step by torch._foreach operations, or return False if they don't support it."""
        raise NotImplementedError

    def _fused(self, group: dict[str, Any], items: list[Item]) -> None:
        """Take one step by Triton."""
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
        self._plans.clear()

    def _check_group(self, group: dict[str, Any]) -> None:
        checks.non_negative("lr", group["lr"], "pass lr=0 to freeze the weights")
        betas = group["betas"]
        if len(betas) != 2:
            raise ValueError(f"betas must be two numbers (beta1, beta2), got {len(betas)}")
        checks.fraction("betas[0]", betas[0])
        checks.fraction("betas[1]", betas[1])
        checks.non_negative("weight_decay", group["weight_decay"])
        checks.one_of("nonfinite", group["nonfinite"], NONFINITE)
        checks.one_of("state_dtype", group["state_dtype"], STATE_DTYPES)
        if group["foreach"] and group["fused"]:
            raise ValueError("foreach and fused must not both be True; set only one of them")
        if group["master_weights"] and group["stochastic_rounding"]:
            raise ValueError(
                "master_weights and stochastic_rounding must not both be True: each keeps small "
                "updates; choose one"
            )
        if group["capturable"] and group["nonfinite"] != "propagate":
            raise ValueError(
                "capturable=True never reads a gradient on the host, got "
                f"nonfinite={group['nonfinite']!r}; use nonfinite='propagate'"
            )
        for param in group["params"]:
            self._check_param(group, param)

    def _check_param(self, group: dict[str, Any], param: Tensor) -> None:
        low_precision = group["master_weights"] or group["stochastic_rounding"]
        if param.is_complex() and (
            group["state_dtype"] is not None or low_precision or group["fused"]
        ):
            raise ValueError(
                "state_dtype, master_weights, stochastic_rounding and fused need real "
                f"parameters, got {param.dtype}; leave them at their defaults in its group"
            )
        if group["stochastic_rounding"] and param.dtype == torch.float16:
            raise ValueError(
                "stochastic_rounding rounds to bfloat16, got a torch.float16 parameter; "
                "use master_weights=True"
            )
        if group["fused"]:
            if param.dtype == torch.float64:
                raise ValueError(
                    "fused computes in float32, got a torch.float64 parameter; use foreach=True"
                )
            if group["capturable"] and group["stochastic_rounding"]:
                raise ValueError(
                    "a captured fused step would always replay the same seed, got "
                    "stochastic_rounding=True; use foreach=True, or master_weights=True"
                )
            try:
                device.choose_backend("triton", param, op=type(self).__name__)
            except ValueError as error:
                raise ValueError(f"fused=True cannot run; use fused=False: {error}") from None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "skipped": self.skipped, "generator": self.generator}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._plans, self._tables = {}, Tables()
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
        name = type(self).__name__
        wanted = {*self.moments, *(["step"] if self.counts_steps else [])}
        for entry in saved["state"].values():
            came = set(entry) - {"master"}
            if entry and came != wanted:
                raise ValueError(
                    f"{name} keeps {sorted(wanted)} for each parameter, got a state with "
                    f"{sorted(came)}; load a state dict saved by the same kind of optimizer"
                )

    def _loaded(
        self, group: dict[str, Any], param: Tensor, saved: dict[str, Any]
    ) -> dict[str, Tensor]:
        state = self._new_state(group, param)
        for name in state:
            if name in saved:
                state[name].copy_(torch.as_tensor(saved[name]))
        return state

    def _state_dtype(self, group: dict[str, Any], param: Tensor) -> torch.dtype:
        """Return the dtype of a parameter's moments."""
        return group["state_dtype"] or param.dtype

    def _new_state(self, group: dict[str, Any], param: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {}
        if self.counts_steps:
            # Keep it on the host, where reading it costs no wait, unless a graph replays it.
            where = param.device if group["capturable"] else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=where)
        dtype = self._state_dtype(group, param)
        for name in self.moments:
            state[name] = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
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
        for index, (group, params) in enumerate(todo):
            if params:
                self._step_group(index, group, params)
        return loss

    def _with_gradient(self, index: int, group: dict[str, Any]) -> list[Tensor]:
        params = []
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
            params.append(param)
        if group["nonfinite"] == "propagate":
            return params
        bad = [param for param in params if not bool(torch.isfinite(param.grad).all())]
        if bad and group["nonfinite"] == "raise":
            raise RuntimeError(
                f"{type(self).__name__} needs finite gradients, got NaN or infinity for "
                f"{self._name(index, bad[0])}; no weight was changed. Lower the learning rate, "
                "clip the gradients, or pass nonfinite='skip'"
            )
        self.skipped += len(bad)
        dropped = {id(param) for param in bad}
        return [param for param in params if id(param) not in dropped]

    def _name(self, index: int, param: Tensor) -> str:
        group = self.param_groups[index]
        place = next(i for i, other in enumerate(group["params"]) if other is param)
        names = group.get("param_names")
        return f"parameter {names[place]!r}" if names else f"parameter {place} of group {index}"

    def _step_group(self, index: int, group: dict[str, Any], params: list[Tensor]) -> None:
        states = []
        for param in params:
            state = self.state[param]
            if not state:
                state.update(self._new_state(group, param))
            states.append(state)
        if group["fused"]:
            self._fused(group, _real_items(params, states))
            return
        if group["foreach"] is not False:
            if all(param.device.type == "cpu" for param in params):
                self._chunked(index, group, params, states)
                return
            if self._foreach(group, _real_items(params, states)):
                return
        for param, grad, state in _real_items(params, states):
            self._by_rule(group, param, grad, state)

    def _by_rule(
        self, group: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> None:
        tensors = group["capturable"]
        arrays = {name: value for name, value in state.items() if name != "step"}
        step: float | Tensor = 0.0
        if self.counts_steps:
            step = state["step"].clone() if tensors else float(state["step"])
            state["step"] += 1
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

    def _chunked(
        self,
        index: int,
        group: dict[str, Any],
        params: list[Tensor],
        states: list[dict[str, Tensor]],
    ) -> None:
        plan = self._plans.get(index)
        if plan is None or not plan.fits(params, states):
            plan = self._plans[index] = ChunkedStep(params, states)
        hyperparameters = self._hyperparameters(group, tensors=False)
        rounding = {"stochastic": group["stochastic_rounding"], "generator": self.generator}

        def by_rule(param: Tensor, grad: Tensor, state: dict[str, Tensor], step: float) -> None:
            apply_rule(
                type(self).rule,
                param,
                grad,
                state,
                step=step,
                maximize=group["maximize"],
                **rounding,
                **hyperparameters,
            )

        plan.step(
            self.cpu_update(group),
            by_rule,
            functools.partial(store, **rounding),
            maximize=group["maximize"],
        )


def _real_items(params: list[Tensor], states: list[dict[str, Tensor]]) -> list[Item]:
    """View complex tensors as pairs of reals, so that rules act on each component."""
    items = []
    for param, state in zip(params, states, strict=True):
        grad = param.grad
        if grad is None:
            continue
        if param.is_complex():
            state = {
                name: torch.view_as_real(value) if value.is_complex() else value
                for name, value in state.items()
            }
            param, grad = torch.view_as_real(param), torch.view_as_real(grad.resolve_conj())
        items.append((param, grad, state))
    return items


def is_plain(items: list[Item]) -> bool:
    """Return whether all tensors have the same dtype, float32 or float64, and no master copy."""
    dtypes = {
        t.dtype
        for param, grad, state in items
        for t in (param, grad, *(value for name, value in state.items() if name != "step"))
    }
    master = any("master" in state for _, _, state in items)
    return len(dtypes) == 1 and dtypes <= {torch.float32, torch.float64} and not master
