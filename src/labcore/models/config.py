"""The configuration of a Llama, converted to and from Hugging Face's `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from labcore.checks import one_of, positive, positive_int

__all__ = ["Llama3Scaling", "LlamaConfig"]

_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
# Keys that don't affect what this model computes.
_IGNORED = {
    "_attn_implementation_autoset",
    "_name_or_path",
    "architectures",
    "chunk_size_feed_forward",
    "dtype",
    "id2label",
    "is_llama_config",
    "label2id",
    "layer_types",
    "max_window_layers",
    "model_type",
    "pad_token_id",
    "problem_type",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "use_cache",
}
# Keys with a single supported value, which is also the default.
_FIXED: dict[str, tuple[Any, ...]] = {
    "attention_dropout": (0, None),
    "hidden_act": ("silu",),
    "is_encoder_decoder": (False,),
    "mlp_bias": (False,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "partial_rotary_factor": (1, None),
    "pretraining_tp": (1,),
    "return_dict": (True,),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "use_sliding_window": (False,),
}
_READ = {
    *_REQUIRED,
    "attention_bias",
    "bos_token_id",
    "eos_token_id",
    "head_dim",
    "initializer_range",
    "max_position_embeddings",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "tie_word_embeddings",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's scaling of the rotary embedding to contexts longer than in pretraining.

    Wavelengths above `original_max_position_embeddings / low_freq_factor` tokens grow by `factor`.
    Wavelengths below `original_max_position_embeddings / high_freq_factor` don't change. Between
    the two, the change is gradual.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        positive("factor", self.factor)
        positive("low_freq_factor", self.low_freq_factor)
        positive_int("original_max_position_embeddings", self.original_max_position_embeddings)
        if not self.high_freq_factor > self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor must be above low_freq_factor, got {self.high_freq_factor} "
                f"and {self.low_freq_factor}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaConfig:
    """The configuration of a Llama, with the names of Hugging Face's `config.json`.

    num_key_value_heads: None means one per attention head.
    head_dim: None means hidden_size / num_attention_heads; it must be even.
    qkv_bias: whether the query, key and value projections have a bias (Qwen2).
    output_bias: whether attention's output projection has a bias too (Llama's `attention_bias`).
    rope_scaling: None for plain rotary embedding.
    max_position_embeddings: the context length that the checkpoint was trained for; not enforced.
    initializer_range: standard deviation of initial weights.
    Raises TypeError or ValueError for invalid values.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Llama3Scaling | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in (*_REQUIRED, "max_position_embeddings"):
            positive_int(name, getattr(self, name))
        for name in ("rms_norm_eps", "rope_theta", "initializer_range"):
            positive(name, getattr(self, name))
        if self.num_key_value_heads is None:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"hidden_size must be a multiple of num_attention_heads, got "
                    f"{self.hidden_size} and {self.num_attention_heads}; or pass head_dim"
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        if self.num_attention_heads % positive_int("num_key_value_heads", self.kv_heads):
            raise ValueError(
                "num_attention_heads must be a multiple of num_key_value_heads, got "
                f"{self.num_attention_heads} and {self.num_key_value_heads}"
            )
        if positive_int("head_dim", self.head_size) % 2:
            raise ValueError(f"head_dim must be even for rotary embedding, got {self.head_dim}")

    @property
    def kv_heads(self) -> int:
        """Hkv: key and value heads per layer."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """D: the dimension of a head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @classmethod
    def from_hugging_face(cls, told: Mapping[str, Any]) -> LlamaConfig:
        """Convert the contents of a Llama or Qwen2 checkpoint's `config.json`.

        told: the file's contents. The rotary embedding may be given as `rope_theta` with
        `rope_scaling`, or as `rope_parameters`.
        Raises ValueError that names every key that asks for an unsupported computation.
        """
        family = one_of("model_type", told.get("model_type"), ("llama", "qwen2"))
        _refuse(told)
        if missing := [name for name in _REQUIRED if told.get(name) is None]:
            raise ValueError(f"config.json must have {', '.join(_REQUIRED)}; missing: {missing}")
        theta, scaling = _rope(told)
        bias = bool(told.get("attention_bias", False))
        eos = told.get("eos_token_id")
        optional = {
            name: told[name]
            for name in ("initializer_range", "max_position_embeddings", "rms_norm_eps")
            if told.get(name) is not None
        }
        return cls(
            **{name: told[name] for name in _REQUIRED},
            **optional,
            num_key_value_heads=told.get("num_key_value_heads"),
            head_dim=told.get("head_dim"),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_word_embeddings=bool(told.get("tie_word_embeddings", False)),
            qkv_bias=bias or family == "qwen2",
            output_bias=bias and family == "llama",
            bos_token_id=told.get("bos_token_id"),
            eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        )

    def to_hugging_face(self) -> dict[str, Any]:
        """Return the contents of a `config.json` from which transformers builds the same model.

        The rotary embedding is written as `rope_theta` and `rope_scaling`, which every version
        reads. Raises ValueError for a bias on the output projection alone, which no model family
        has.
        """
        if self.output_bias and not self.qkv_bias:
            raise ValueError(
                "output_bias=True must come with qkv_bias=True to be saved, got qkv_bias=False; no "
                "model family has a bias on the output projection alone"
            )
        qwen2 = self.qkv_bias and not self.output_bias
        scaling = self.rope_scaling
        told: dict[str, Any] = {name: getattr(self, name) for name in _REQUIRED}
        told |= {
            "architectures": ["Qwen2ForCausalLM" if qwen2 else "LlamaForCausalLM"],
            "model_type": "qwen2" if qwen2 else "llama",
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_size,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": scaling
            and {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_position_embeddings,
            },
            "tie_word_embeddings": self.tie_word_embeddings,
            "initializer_range": self.initializer_range,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": _one_or_all(self.eos_token_ids),
        }
        return told if qwen2 else told | {"attention_bias": self.output_bias}


def _one_or_all(ids: tuple[int, ...]) -> int | list[int] | None:
    return None if not ids else ids[0] if len(ids) == 1 else list(ids)


def _refuse(told: Mapping[str, Any]) -> None:
    """Raise ValueError that names the keys with unsupported values."""
    problems = [
        f"{key}={told[key]!r} (only {allowed[0]!r} is supported)"
        for key, allowed in _FIXED.items()
        if key in told and told[key] not in allowed
    ]
    if any(kind != "full_attention" for kind in told.get("layer_types") or ()):
        problems.append(f"layer_types={told['layer_types']!r} (only 'full_attention')")
    # Qwen2 gives a window size even if use_sliding_window turns the window off.
    if told.get("sliding_window") is not None and told.get("model_type") != "qwen2":
        problems.append(f"sliding_window={told['sliding_window']!r} (only None)")
    if told.get("attention_bias") and told.get("model_type") == "qwen2":
        problems.append("attention_bias=True (a qwen2 checkpoint has its own rule)")
    known = _IGNORED | _FIXED.keys() | _READ
    problems += [f"{key}={told[key]!r} (unknown)" for key in told if key not in known]
    if problems:
        raise ValueError(
            f"config.json has settings that Llama doesn't support: {'; '.join(problems)}"
        )


def _rope(told: Mapping[str, Any]) -> tuple[float, Llama3Scaling | None]:
    """Return the rotary embedding's base and scaling, from either spelling."""
    place = "rope_parameters" if told.get("rope_parameters") else "rope_scaling"
    asked = dict(told.get(place) or {})
    base = asked.pop("rope_theta", None)
    if base is None:
        base = told.get("rope_theta")
    theta = 10000.0 if base is None else float(base)
    legacy = asked.pop("type", None)
    kind = asked.pop("rope_type", legacy) or "default"
    if asked.pop("partial_rotary_factor", 1) not in (1, None):
        raise ValueError(f"config.json: {place}.partial_rotary_factor must be 1")
    one_of(f"config.json: {place}.rope_type", kind, ("default", "llama3"))
    if kind == "default":
        return theta, None
    wanted = set(Llama3Scaling.__dataclass_fields__)
    if asked.keys() != wanted:
        raise ValueError(
            f"config.json: {place} of type llama3 must have {sorted(wanted)}, got {sorted(asked)}"
        )
    return theta, Llama3Scaling(**asked)
