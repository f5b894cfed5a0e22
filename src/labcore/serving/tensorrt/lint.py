"""Settings of TensorRT-LLM on the Triton Inference Server that people get wrong, explained.

Reads a model repository of either layout, ours or anyone's, also TensorRT-LLM's templates that
nobody filled in. Schema-checked here, never run here: what a server would do is said after its
sources (triton_backend in https://github.com/NVIDIA/TensorRT-LLM, `core` and `server` in
https://github.com/triton-inference-server), not after a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from labcore.serving.tensorrt import files, llmapi, rules
from labcore.serving.tensorrt.repository import ENDPOINTS, Finding, Rule, read_repository

__all__ = ["ENDPOINTS", "RULES", "Finding", "lint"]

_BOTH: tuple[Rule, ...] = (
    files.placeholders,
    files.code,
    files.instances,
    rules.decoupled,
    rules.chunks,
    rules.cancellation,
)

RULES: Mapping[str, tuple[Rule, ...]] = {
    "llmapi": (
        *_BOTH,
        llmapi.arguments,
        llmapi.triton_config,
        llmapi.collisions,
        llmapi.cache_limits,
        llmapi.capacity,
    ),
    "inflight_batcher_llm": (
        *_BOTH,
        files.wiring,
        rules.decoupled_chain,
        rules.bls_instances,
        rules.triton_batch,
        rules.batching,
        rules.capacity,
        rules.cache_limits,
        rules.queue,
        rules.tokenizers,
        rules.engine_folder,
    ),
}


def lint(
    folder: str | Path,
    *,
    endpoint: str = "generate",
    runtime_batch: int | None = None,
    paths: bool = True,
) -> list[Finding]:
    """Settings of a model repository that do not do what they seem to, refused ones first.

    endpoint: what clients post to, "generate", "generate_stream" or "infer". runtime_batch: most
    requests in a step of the engine, where neither the engine's folder nor model.yaml says it
    here. paths: whether the folders that the files name must exist on this machine.
    Schema-checked here, never run here. Raises ValueError for a folder that is no repository of
    TensorRT-LLM; files that cannot be read are findings.
    """
    repository = read_repository(
        folder, endpoint=endpoint, runtime_batch=runtime_batch, paths=paths
    )
    found = list(repository.unread)
    for rule in RULES[repository.layout]:
        found += rule(repository)
    return sorted(found, key=lambda one: (not one.refused, one.file, one.setting))
