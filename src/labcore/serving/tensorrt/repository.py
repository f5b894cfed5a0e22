"""A model repository of TensorRT-LLM, read for the rules of `tensorrt_lint`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labcore.checks import one_of, positive_int
from labcore.serving.triton.pbtxt import every, first, loads, parameters

__all__ = [
    "ENDPOINTS",
    "PLACE",
    "Finding",
    "Repository",
    "Rule",
    "mapping",
    "pbtxt_of",
    "read_repository",
]

ENDPOINTS = ("generate", "generate_stream", "infer")
PLACE = re.compile(r"\$\{(\w+)\}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One setting that does not do what it seems to.

    setting: its name in the file; file: its path below the repository, with `/`; what: what
    stands there; why: what comes of it; instead: what to write. refused: whether the server does
    not load the model or answers no request; otherwise it runs and does something else.
    """

    setting: str
    file: str
    what: str
    why: str
    instead: str
    refused: bool = False

    def __str__(self) -> str:
        return f"{self.file}: {self.setting}: {self.what}; {self.why}; {self.instead}"


@dataclass(kw_only=True)
class Repository:
    """A model repository as the rules see it.

    root: its folder. layout: "llmapi" or "inflight_batcher_llm". models: the fields of every
    config.pbtxt by its folder's name. llm: model.yaml, {} without one. unread: what could not be
    read. endpoint, paths: as in `tensorrt_lint.lint`. runtime_batch: most requests in a step, None
    if unknown. engine: the engine's own config.json, {} if it is not here.
    """

    root: Path
    layout: str
    models: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    llm: dict[str, Any] = field(default_factory=dict)
    unread: list[Finding] = field(default_factory=list)
    endpoint: str = "generate"
    runtime_batch: int | None = None
    engine: dict[str, Any] = field(default_factory=dict)
    paths: bool = True

    def parameter(self, model: str, name: str) -> str | None:
        """A parameter of a model; None where it is left out, empty or still a placeholder."""
        value = parameters(self.models.get(model, {})).get(name, "")
        return None if not value or PLACE.search(value) else value

    def count(self, model: str) -> int | None:
        """Instances of a model, all groups together; a group without a count has one.

        None for a model that is not there or whose count is still a placeholder.
        """
        if model not in self.models:
            return None
        groups = every(self.models[model], "instance_group")
        counts = [first(group, "count", default=1) for group in groups]
        return sum(counts) or 1 if all(isinstance(one, int) for one in counts) else None

    @property
    def decoupled(self) -> bool | None:
        """Whether the engine's model may answer a request more than once; None if unknown."""
        if self.layout == "llmapi":
            value = mapping(self.llm, "triton_config").get("decoupled", False)
        else:
            path = ("model_transaction_policy", "decoupled")
            value = first(self.models.get("tensorrt_llm", {}), *path, default=False)
        return value if isinstance(value, bool) else None


Rule = Callable[[Repository], Iterator[Finding]]


def mapping(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The mapping under `name`, {} where there is none."""
    value = values.get(name)
    return value if isinstance(value, dict) else {}


def pbtxt_of(model: str) -> str:
    """The path of a model's configuration below the repository."""
    return f"{model}/config.pbtxt"


def _read_models(repository: Repository) -> None:
    for path in sorted(repository.root.glob("*/config.pbtxt")):
        name = path.parent.name
        try:
            repository.models[name] = loads(path.read_text("utf-8"))
        except ValueError as error:
            repository.unread.append(
                Finding(
                    setting="config.pbtxt",
                    file=pbtxt_of(name),
                    what="the file is not protocol buffers' text format",
                    why=f"the server cannot read it: {error}",
                    instead="repair the line that is named",
                    refused=True,
                )
            )


def _read_yaml(repository: Repository, path: Path) -> None:
    import yaml

    why = ""
    try:
        loaded = yaml.safe_load(path.read_text("utf-8"))
        if isinstance(loaded, dict):
            repository.llm = loaded
        else:
            why = f"it holds {type(loaded).__name__} and not names with values"
    except (yaml.YAMLError, ValueError) as error:
        why = " ".join(str(error).split())
    if why:
        repository.unread.append(
            Finding(
                setting="model.yaml",
                file="tensorrt_llm/1/model.yaml",
                what="the file is not a YAML mapping",
                why=f"the model cannot read its arguments: {why}",
                instead="write one `name: value` a line",
                refused=True,
            )
        )


def _read_engine(repository: Repository) -> None:
    """The built engine's configuration, if it lies on this machine; it fixes the runtime batch."""
    folder = repository.parameter("tensorrt_llm", "gpt_model_path")
    path = Path(folder) / "config.json" if folder else None
    if path is not None and path.is_file():
        try:
            loaded = json.loads(path.read_text("utf-8"))
        except ValueError:
            return
        repository.engine = mapping(loaded, "build_config") if isinstance(loaded, dict) else {}


def read_repository(
    folder: str | Path,
    *,
    endpoint: str = "generate",
    runtime_batch: int | None = None,
    paths: bool = True,
) -> Repository:
    """Reads a repository for the rules; arguments and errors are those of `tensorrt_lint.lint`."""
    one_of("endpoint", endpoint, ENDPOINTS)
    if runtime_batch is not None:
        positive_int("runtime_batch", runtime_batch)
    root = Path(folder)
    arguments = root / "tensorrt_llm" / "1" / "model.yaml"
    if not (root / "tensorrt_llm" / "config.pbtxt").is_file() and not arguments.is_file():
        raise ValueError(
            f"a model repository for TensorRT-LLM must have tensorrt_llm/config.pbtxt, got {root}; "
            f"give the folder that the server gets as --model-repository"
        )
    repository = Repository(
        root=root,
        layout="llmapi" if arguments.is_file() else "inflight_batcher_llm",
        endpoint=endpoint,
        runtime_batch=runtime_batch,
        paths=paths,
    )
    _read_models(repository)
    if arguments.is_file():
        _read_yaml(repository, arguments)
        known = repository.llm.get("max_batch_size")
    else:
        _read_engine(repository)
        known = repository.engine.get("max_batch_size")
    if runtime_batch is None and isinstance(known, int) and known > 0:
        repository.runtime_batch = known
    return repository
