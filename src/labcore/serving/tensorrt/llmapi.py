"""Rules of `tensorrt_lint` about model.yaml, the file of the current layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from labcore.serving.tensorrt.repository import Finding, Repository, mapping, pbtxt_of
from labcore.serving.tensorrt.rules import both_limits, too_small
from labcore.serving.triton.pbtxt import first

__all__ = ["RENAMED", "arguments", "cache_limits", "capacity", "collisions", "triton_config"]

YAML = "tensorrt_llm/1/model.yaml"
_POLICIES = ("GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH")

# What the older layout calls it: where LLM() has it.
RENAMED: Mapping[str, str] = {
    "kv_cache_free_gpu_mem_fraction": "kv_cache_config.free_gpu_memory_fraction",
    "free_gpu_memory_fraction": "kv_cache_config.free_gpu_memory_fraction",
    "max_tokens_in_paged_kv_cache": "kv_cache_config.max_tokens",
    "enable_kv_cache_reuse": "kv_cache_config.enable_block_reuse",
    "kv_cache_host_memory_bytes": "kv_cache_config.host_cache_size",
    "batch_scheduler_policy": "scheduler_config.capacity_scheduler_policy",
    "capacity_scheduler_policy": "scheduler_config.capacity_scheduler_policy",
    "enable_chunked_context": "enable_chunked_prefill",
    "triton_max_batch_size": "max_batch_size",
    "decoupled_mode": "triton_config.decoupled",
    "decoupled": "triton_config.decoupled",
    "tokenizer_dir": "tokenizer",
    "engine_dir": "model",
}


def arguments(repository: Repository) -> Iterator[Finding]:
    """A model, and names that LLM() knows."""
    if not repository.llm:
        return
    if not repository.llm.get("model"):
        yield Finding(
            setting="model",
            file=YAML,
            what="no model is named",
            why="LLM() has nothing to load",
            instead="write a folder with a checkpoint, or a name on the Hugging Face Hub",
            refused=True,
        )
    for name in sorted(RENAMED.keys() & repository.llm.keys()):
        yield Finding(
            setting=name,
            file=YAML,
            what=f"{name} stands among the arguments of LLM()",
            why="LLM() refuses an argument that it does not know, at its outermost level too",
            instead=f"write {RENAMED[name]}",
            refused=True,
        )


def triton_config(repository: Repository) -> Iterator[Finding]:
    """The server's side of model.yaml: two values that must be there, and one that must be 0."""
    own = mapping(repository.llm, "triton_config")
    for name in ("max_batch_size", "decoupled"):
        if name not in own and repository.llm:
            yield Finding(
                setting=f"triton_config.{name}",
                file=YAML,
                what=f"{name} is missing",
                why="the model reads it when the server asks for its configuration, and fails",
                instead="write 0" if name == "max_batch_size" else "write true or false",
                refused=True,
            )
    size = own.get("max_batch_size", 0)
    if size != 0:
        batch = repository.runtime_batch
        yield Finding(
            setting="triton_config.max_batch_size",
            file=YAML,
            what=f"max_batch_size is {size} for Triton",
            why="this is not the runtime batch: it makes the server put a batch dimension before "
            "the prompt, and the model takes one prompt a request and refuses two dimensions",
            instead="write 0 here; requests of many clients are batched by LLM(), up to its own "
            f"max_batch_size ({batch or 'not set'})",
            refused=True,
        )


def collisions(repository: Repository) -> Iterator[Finding]:
    """What model.yaml decides must not stand in config.pbtxt too."""
    fields, own = (
        repository.models.get("tensorrt_llm", {}),
        mapping(repository.llm, "triton_config"),
    )
    size = first(fields, "max_batch_size", default=0)
    path = ("model_transaction_policy", "decoupled")
    flag = first(fields, *path)
    pairs = []
    if isinstance(size, int) and size:
        wanted = own.get("max_batch_size", 0)
        pairs.append(("max_batch_size", size, wanted, isinstance(wanted, int) and size > wanted))
    if flag is not None:
        wanted = own.get("decoupled", False)
        pairs.append(("model_transaction_policy", flag, wanted, flag != wanted))
    for name, here, there, refused in pairs:
        yield Finding(
            setting=name,
            file=pbtxt_of("tensorrt_llm"),
            what=f"{name} is {str(here).lower()} here and {str(there).lower()} in model.yaml",
            why="the model sets it from model.yaml and may not change what config.pbtxt says",
            instead="take it out of config.pbtxt",
            refused=refused,
        )


def cache_limits(repository: Repository) -> Iterator[Finding]:
    """Two limits of one pool, and a pool that is smaller than one request."""
    cache = mapping(repository.llm, "kv_cache_config")
    share, tokens = "free_gpu_memory_fraction", "max_tokens"
    most, longest = cache.get(tokens), repository.llm.get("max_seq_len")
    prefix = "kv_cache_config."
    yield from both_limits(YAML, (prefix + share, prefix + tokens), (cache.get(share), most))
    if isinstance(most, int) and isinstance(longest, int) and most < longest:
        yield too_small(YAML, prefix + tokens, most, longest)


def capacity(repository: Repository) -> Iterator[Finding]:
    """The policy in capital letters; STATIC_BATCH is the older layout's V1."""
    name = "capacity_scheduler_policy"
    value = mapping(repository.llm, "scheduler_config").get(name)
    if value is not None and value not in _POLICIES:
        yield Finding(
            setting=f"scheduler_config.{name}",
            file=YAML,
            what=f"the policy is {value}",
            why="LLM() knows GUARANTEED_NO_EVICT, MAX_UTILIZATION and STATIC_BATCH, in capital "
            "letters, and raises for anything else",
            instead=f"write {str(value).upper()}"
            if str(value).upper() in _POLICIES
            else "write one of the three",
            refused=True,
        )
    elif value == "STATIC_BATCH":
        yield Finding(
            setting=f"scheduler_config.{name}",
            file=YAML,
            what="the policy is STATIC_BATCH",
            why="batches are static: all of one wait for the slowest, and nobody joins meanwhile",
            instead="write GUARANTEED_NO_EVICT",
        )
