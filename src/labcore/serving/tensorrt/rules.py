"""Rules of `tensorrt_lint` about settings, each a function from a repository to its findings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from labcore.serving.tensorrt.repository import Finding, Repository, mapping, pbtxt_of
from labcore.serving.tensorrt.settings import BATCHING, CAPACITY_POLICIES, LAYOUTS
from labcore.serving.triton.pbtxt import first

__all__ = [
    "batching",
    "bls_instances",
    "cache_limits",
    "cancellation",
    "capacity",
    "chunks",
    "decoupled",
    "decoupled_chain",
    "engine_folder",
    "queue",
    "tokenizers",
    "triton_batch",
]

ENGINE = pbtxt_of("tensorrt_llm")
YAML = "tensorrt_llm/1/model.yaml"


def _where(repository: Repository) -> str:
    return YAML if repository.layout == "llmapi" else ENGINE


def decoupled(repository: Repository) -> Iterator[Finding]:
    """The endpoint and the number of answers must fit."""
    if repository.decoupled and repository.endpoint == "generate":
        yield Finding(
            setting="decoupled",
            file=_where(repository),
            what="the model is decoupled and clients post to /generate",
            why="/generate takes exactly one answer to a request and turns a second one into an "
            "error, so every request that asks for a stream fails",
            instead="post to /generate_stream, or set decoupled to false where nothing streams",
        )
    elif repository.decoupled and repository.endpoint == "infer":
        yield Finding(
            setting="decoupled",
            file=_where(repository),
            what="the model is decoupled and clients post to /infer",
            why="the server refuses plain inference on a decoupled model, by HTTP and by gRPC",
            instead="use gRPC's ModelStreamInfer or /generate_stream",
            refused=True,
        )
    elif repository.decoupled is False and repository.endpoint == "generate_stream":
        yield Finding(
            setting="decoupled",
            file=_where(repository),
            what="the model is not decoupled and clients post to /generate_stream",
            why="a request that asks for a stream is an error, and one that does not gets its "
            "whole answer as one event",
            instead="set decoupled to true",
        )


def decoupled_chain(repository: Repository) -> Iterator[Finding]:
    """The BLS model streams only what the engine's model streams."""
    if "tensorrt_llm_bls" not in repository.models:
        return
    path = ("model_transaction_policy", "decoupled")
    own = first(repository.models["tensorrt_llm_bls"], *path, default=False)
    if isinstance(own, bool) and repository.decoupled not in (None, own):
        yield Finding(
            setting="decoupled",
            file=pbtxt_of("tensorrt_llm_bls"),
            what=f"decoupled is {str(own).lower()} here and {str(not own).lower()} in tensorrt_llm",
            why="a stream is refused by tensorrt_llm, which may answer once"
            if own
            else "the BLS model asks for one answer, and a decoupled model takes no such call",
            instead="set both to the same value",
            refused=not own,
        )
    accumulate = (repository.parameter("tensorrt_llm_bls", "accumulate_tokens") or "").lower()
    if own is True and accumulate not in ("true", "yes", "1", "t"):
        yield Finding(
            setting="accumulate_tokens",
            file=pbtxt_of("tensorrt_llm_bls"),
            what="a stream is turned into text one token at a time",
            why="many tokenizers need the tokens before: spaces go missing, and a character of "
            "several tokens comes out as replacement characters",
            instead="set accumulate_tokens to true, or join the tokens in the client",
        )


def bls_instances(repository: Repository) -> Iterator[Finding]:
    """An instance of the BLS model is busy with one request until its last token."""
    count, batch = repository.count("tensorrt_llm_bls"), repository.runtime_batch
    if count is not None and count < (batch or 2):
        known = f"the engine's batch is {batch}" if batch else "the engine's batch is not known"
        yield Finding(
            setting="bls_instance_count",
            file=pbtxt_of("tensorrt_llm_bls"),
            what=f"{count} instance{'s' * (count != 1)} of the BLS model, and {known}",
            why=f"an instance holds one request until its last token, so at most {count} run at "
            f"once through tensorrt_llm_bls, whatever the engine could batch",
            instead=f"set the count to {batch or 'the max_batch_size of the engine'}, or use the "
            f"ensemble",
        )


def triton_batch(repository: Repository) -> Iterator[Finding]:
    """Triton's max_batch_size is prompts in one request, not requests in one step."""
    sizes = {
        name: size
        for name, fields in repository.models.items()
        if isinstance(size := first(fields, "max_batch_size", default=0), int)
    }
    whole = sizes.get("ensemble", 0)
    for name, size in sizes.items():
        if name in LAYOUTS["inflight_batcher_llm"].models and 0 < size < whole:
            yield Finding(
                setting="triton_max_batch_size",
                file=pbtxt_of(name),
                what=f"max_batch_size is {size}, and the ensemble's {whole}",
                why="the server does not load an ensemble whose batch is larger than a step's",
                instead=f"write {whole} in all of them",
                refused=True,
            )
    size, batch = sizes.get("tensorrt_llm", 0), repository.runtime_batch
    if batch is None or size == batch:
        return
    few = "fewer" if size < batch else "more"
    yield Finding(
        setting="triton_max_batch_size",
        file=ENGINE,
        what=f"max_batch_size is {size}, {few} than the {batch} requests of a step of the engine",
        why="this number is the most prompts that one request to Triton may carry; how many "
        f"requests run at once is decided by the engine's scheduler, here up to {batch}",
        instead=f"change max_batch_size and max_num_tokens of trtllm-build to change what runs at "
        f"once, and write {batch} here",
    )


def batching(repository: Repository) -> Iterator[Finding]:
    """V1 is static batching; another word is none at all."""
    value = repository.parameter("tensorrt_llm", "gpt_model_type")
    if value in ("V1", "v1"):
        yield Finding(
            setting="batching_strategy",
            file=ENGINE,
            what=f"gpt_model_type is {value}",
            why="batches are static: all of one wait for the slowest, and nobody joins meanwhile",
            instead="write inflight_fused_batching",
        )
    elif value not in (*BATCHING, "inflight_batching"):
        yield Finding(
            setting="batching_strategy",
            file=ENGINE,
            what=f"gpt_model_type is {value or 'not set'}",
            why="the backend knows V1, inflight_batching and inflight_fused_batching, and does "
            "not load the model with anything else",
            instead="write inflight_fused_batching",
            refused=True,
        )


def capacity(repository: Repository) -> Iterator[Finding]:
    """The C++ backend takes another spelling of a policy, or of a bool, for its default."""
    value = repository.parameter("tensorrt_llm", "batch_scheduler_policy")
    if value is not None and value not in CAPACITY_POLICIES:
        yield Finding(
            setting="batch_scheduler_policy",
            file=ENGINE,
            what=f"the policy is {value}",
            why="the backend knows max_utilization and guaranteed_no_evict in small letters; with "
            "anything else it logs a warning and runs guaranteed_no_evict",
            instead="write one of the two, or leave the parameter out",
        )
    for name in ("enable_kv_cache_reuse", "enable_chunked_context", "exclude_input_in_output"):
        value = repository.parameter("tensorrt_llm", name)
        if value is not None and value not in ("true", "True", "TRUE", "1", "false", "False"):
            if value in ("FALSE", "0"):
                continue
            yield Finding(
                setting=name,
                file=ENGINE,
                what=f"{name} is {value}",
                why="the backend reads true, false, 1 and 0, and takes its default for the rest",
                instead="write true or false",
            )


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def both_limits(file: str, names: tuple[str, str], values: tuple[Any, Any]) -> Iterator[Finding]:
    """What holds for both limits of the cache in either layout."""
    (share, tokens), (part, most) = names, values
    number = _number(part)
    if part is not None and (number is None or not 0 < number <= 1):
        yield Finding(
            setting=share,
            file=file,
            what=f"the share of the free memory is {part}",
            why="it is a fraction of what is free beside the weights, above 0 and at most 1",
            instead="write 0.9 for nine tenths",
            refused=True,
        )
    if part is not None and most is not None:
        yield Finding(
            setting=tokens,
            file=file,
            what=f"both limits of the cache are set, {most} tokens and {part} of the free memory",
            why="the smaller of the two wins, and which one that is depends on the GPU and on the "
            "other processes there",
            instead=f"keep {tokens} for a pool of known size, or {share} for the largest that fits",
        )


def cache_limits(repository: Repository) -> Iterator[Finding]:
    """Two limits of one pool, and a pool that is smaller than one request."""
    share, tokens = "kv_cache_free_gpu_mem_fraction", "max_tokens_in_paged_kv_cache"
    part, most = (repository.parameter("tensorrt_llm", name) for name in (share, tokens))
    yield from both_limits(ENGINE, (share, tokens), (part, most))
    longest, number = repository.engine.get("max_seq_len"), _number(most)
    if isinstance(longest, int) and number is not None and number < longest:
        yield too_small(ENGINE, tokens, int(number), longest)


def too_small(file: str, tokens: str, most: int, longest: int) -> Finding:
    return Finding(
        setting=tokens,
        file=file,
        what=f"the cache has room for {most} tokens, a request for {longest}",
        why="a request of the greatest length that is allowed never fits",
        instead=f"set {tokens} to {longest} times the long requests that should run together",
    )


def queue(repository: Repository) -> Iterator[Finding]:
    """Triton's queue stands before the engine's own."""
    for model in ("preprocessing", "tensorrt_llm"):
        fields = repository.models.get(model, {})
        path = ("dynamic_batching", "max_queue_delay_microseconds")
        delay = first(fields, *path, default=0)
        if isinstance(delay, int) and delay > 0:
            yield Finding(
                setting="max_queue_delay_microseconds",
                file=pbtxt_of(model),
                what=f"requests wait up to {delay} us for company",
                why="in-flight batching takes a request in at the next step, alone or not: the "
                "wait lets two requests begin in the same step, adds to everyone's time to the "
                "first token, and makes no later step larger",
                instead="write 0; a wait pays only before V1's static batches",
            )
    policy = ("dynamic_batching", "default_queue_policy", "max_queue_size")
    size = first(repository.models.get("tensorrt_llm", {}), *policy, default=0)
    if size == 0:
        yield Finding(
            setting="max_queue_size",
            file=ENGINE,
            what="the queue has no limit",
            why="0 is no limit, not no queue: under overload every request waits longer than the "
            "one before, until clients give up on work that is still done",
            instead="write the requests that may wait, and let clients see the refusal",
        )


def tokenizers(repository: Repository) -> Iterator[Finding]:
    """Text needs a tokenizer on both ends, and the same one."""
    models = [name for name in ("preprocessing", "postprocessing") if name in repository.models]
    named = {name: repository.parameter(name, "tokenizer_dir") for name in models}
    for model, value in named.items():
        missing = value is not None and repository.paths and _gone(value)
        if value is None or missing:
            yield Finding(
                setting="tokenizer_dir",
                file=pbtxt_of(model),
                what=f"{value} is no folder here" if missing else "no tokenizer is named",
                why="the model loads its tokenizer when the server starts, and does not load",
                instead="give the folder as the server sees it, or a name on the Hugging Face Hub",
                refused=True,
            )
    if len(set(named.values()) - {None}) > 1:
        yield Finding(
            setting="tokenizer_dir",
            file=pbtxt_of("postprocessing"),
            what=f"{named['postprocessing']}, and preprocessing has {named['preprocessing']}",
            why="tokens of one vocabulary are read with another: fluent nonsense, no error",
            instead="name the same tokenizer in both",
        )


def _gone(path: str) -> bool:
    """Whether a name that can only be a path names no folder here."""
    return path.startswith(("/", "./", "../", "~")) and not Path(path).expanduser().is_dir()


def engine_folder(repository: Repository) -> Iterator[Finding]:
    """An engine is built before the server starts."""
    value = repository.parameter("tensorrt_llm", "gpt_model_path")
    if value is None or (repository.paths and not Path(value).is_dir()):
        yield Finding(
            setting="engine_dir",
            file=ENGINE,
            what="no engine is named" if value is None else f"{value} is no folder here",
            why="the backend loads the engine that trtllm-build wrote, and has none",
            instead="build the engine and give its folder in gpt_model_path",
            refused=True,
        )


def chunks(repository: Repository) -> Iterator[Finding]:
    """Long prompts stop everyone's decoding for the length of a step."""
    if repository.layout == "llmapi":
        name = "enable_chunked_prefill"
        on = not repository.llm or repository.llm.get(name) is True
    else:
        name = "enable_chunked_context"
        on = (repository.parameter("tensorrt_llm", name) or "").lower() not in ("", "false", "0")
    if not on:
        yield Finding(
            setting=name,
            file=_where(repository),
            what=f"{name} is off",
            why="a prompt is computed in one step: a long one holds up every running request for "
            "that step, and one above max_num_tokens is refused",
            instead=f"set {name} to true; the older layout's engine also needs "
            f"use_paged_context_fmha when it is built",
        )


def cancellation(repository: Repository) -> Iterator[Finding]:
    """A cancelled request keeps its blocks until somebody looks."""
    name = "cancellation_check_period_ms"
    if repository.layout == "llmapi":
        value = _number(mapping(repository.llm, "triton_config").get(name))
    else:
        value = _number(repository.parameter("tensorrt_llm", name))
    if value is not None and value > 1000:
        yield Finding(
            setting=name,
            file=_where(repository),
            what=f"cancelled requests are looked for every {value:g} ms",
            why="until then a client that left keeps its slot and its blocks of the cache",
            instead="write 100, the default",
        )
