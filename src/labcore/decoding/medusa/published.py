"""What others published about Medusa on GPUs, with sources."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["VLLM"]

VLLM: Mapping[str, Mapping[int, tuple[float, float]]] = {
    "Mistral 7B": {
        1: (128.73, 155.06),
        2: (245.14, 293.14),
        4: (453.78, 550.85),
        8: (792.05, 911.77),
        16: (1262.11, 1318.10),
        32: (1862.19, 1681.17),
        64: (2425.03, 1769.62),
    },
    "Llama 3 8B": {
        1: (121.27, 141.33),
        2: (235.47, 269.09),
        4: (429.29, 490.86),
        8: (760.38, 830.04),
        16: (1258.82, 1156.08),
        32: (1796.47, 1445.23),
        64: (2275.64, 1533.34),
    },
}
"""Requests at once -> tokens per second without and with Medusa's heads, in vLLM on one H100.

MT-Bench, temperature 0, chains of each head's first guess, without trees.
Source: vLLM pull request 4978, May 2024, https://github.com/vllm-project/vllm/pull/4978.
"""
