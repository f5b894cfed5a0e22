"""Rules of `tensorrt_lint` about files: placeholders, code, instances, the ensemble's graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from labcore.serving.tensorrt.repository import PLACE, Finding, Repository, pbtxt_of
from labcore.serving.triton.pbtxt import every, first

__all__ = ["code", "instances", "placeholders", "wiring"]


def placeholders(repository: Repository) -> Iterator[Finding]:
    """`${name}` outside the parameters: the template was copied and not filled in."""

    def inside(value: object) -> Iterator[str]:
        if isinstance(value, str):
            yield from PLACE.findall(value)
        elif isinstance(value, Mapping):
            for name, values in value.items():
                if name != "parameters":
                    yield from (found for one in values for found in inside(one))

    for model, fields in repository.models.items():
        for name in sorted(set(inside(fields))):
            yield Finding(
                setting=name,
                file=pbtxt_of(model),
                what=f"${{{name}}} is still the template's placeholder",
                why="the server does not fill it in, and does not load the model",
                instead="fill the template in, or write the repository with write_repository",
                refused=True,
            )


def instances(repository: Repository) -> Iterator[Finding]:
    """An instance of the engine's model is a whole engine."""
    count = repository.count("tensorrt_llm") or 1
    ids = repository.parameter("tensorrt_llm", "gpu_device_ids")
    sets = [] if ids is None else [one for one in ids.split(";") if one.strip()]
    if count > 1 and len(sets) != count:
        yield Finding(
            setting="instance_group",
            file=pbtxt_of("tensorrt_llm"),
            what=f"{count} instances and {len(sets)} sets in gpu_device_ids",
            why="each instance loads the whole model; without a set of GPUs of its own it does "
            "not load, or all meet on the same GPU",
            instead="write one instance, or one set an instance as in 0,1;2,3",
            refused=True,
        )


def code(repository: Repository) -> Iterator[Finding]:
    """Names, version folders and the code of Python models."""
    old = " 1.2; later versions removed it" * (repository.layout == "inflight_batcher_llm")
    for model, fields in repository.models.items():
        name = first(fields, "name", default=model)
        if name != model:
            yield Finding(
                setting="name",
                file=pbtxt_of(model),
                what=f"the model is called {name} in a folder called {model}",
                why="the server wants the same name for both and does not load the model",
                instead=f"write {model}, or leave the name out",
                refused=True,
            )
        version = repository.root / model / "1"
        python = first(fields, "backend") == "python"
        if not version.is_dir() or (python and not (version / "model.py").is_file()):
            yield Finding(
                setting="model.py" if python else "1",
                file=f"{model}/1/model.py" if python else f"{model}/1",
                what="the model's code is missing" if python else "no version folder",
                why="the server loads a model's code from its version folder",
                instead=f"copy it from triton_backend/all_models of TensorRT-LLM{old}"
                if python
                else "make an empty folder of this name",
                refused=True,
            )


def wiring(repository: Repository) -> Iterator[Finding]:
    """Every tensor of the ensemble comes from somewhere, with the type that its reader wants."""
    whole = repository.models.get("ensemble")
    if whole is None:
        return
    file = pbtxt_of("ensemble")
    types = {first(one, "name"): first(one, "data_type") for one in every(whole, "input")}
    steps = every(whole, "ensemble_scheduling", "step")
    problems: list[str] = []
    for way, side in (("output_map", "output"), ("input_map", "input")):
        for step in steps:
            model = str(first(step, "model_name", default=""))
            if model not in repository.models:
                problems += [f"step {model} has no folder"] * (way == "output_map")
                continue
            own = {first(one, "name"): one for one in every(repository.models[model], side)}
            pairs = {first(one, "key"): first(one, "value") for one in every(step, way)}
            problems += [f"{model} has no {side} {key}" for key in pairs if key not in own]
            if side == "output":
                types |= {pairs[key]: first(own[key], "data_type") for key in pairs if key in own}
                continue
            needed = {key for key, one in own.items() if not first(one, "optional", default=False)}
            problems += [f"{model} gets no {key}" for key in sorted(needed - pairs.keys())]
            for key, value in pairs.items():
                if value not in types:
                    problems.append(f"nobody makes {value} for {model}'s {key}")
                elif key in own and first(own[key], "data_type") != types[value]:
                    problems.append(f"{model}'s {key} has another type than {value}")
    made = {first(one, "value") for step in steps for one in every(step, "output_map")}
    for one in every(whole, "output"):
        name = first(one, "name")
        if name not in made or name not in types:
            problems.append(f"nobody makes the output {name}")
        elif first(one, "data_type") != types[name]:
            problems.append(f"the output {name} has another type than its maker gives")
    for problem in problems:
        yield Finding(
            setting="ensemble_scheduling",
            file=file,
            what=problem,
            why="the server checks the whole graph when it loads the ensemble, and refuses it",
            instead="compare the names and types of both sides",
            refused=True,
        )
