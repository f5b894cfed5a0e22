"""What others published about Medusa on GPUs, with sources."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["SCORERS", "VLLM"]

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
    "Mistral 7B, sampled": {
        1: (126.73, 164.38),
        2: (245.80, 297.65),
        4: (452.16, 554.67),
        8: (799.73, 911.56),
        16: (1281.70, 1414.85),
        32: (1902.74, 1739.18),
        64: (1876.10, 1818.85),
    },
    "Llama 3 8B, sampled": {
        1: (121.05, 147.08),
        2: (236.39, 281.95),
        4: (420.49, 512.31),
        8: (740.42, 838.49),
        16: (1246.62, 1185.55),
        32: (1712.22, 1457.75),
        64: (2291.75, 1606.42),
    },
}
"""Requests at once -> tokens per second without and with Medusa's heads, in vLLM on one H100.

MT-Bench, at temperature 0, or 1 where it says sampled; chains of each head's first guess.
Source: vLLM pull request 4978, May 2024, https://github.com/vllm-project/vllm/pull/4978.
"""

SCORERS: Mapping[int, tuple[float, float]] = {
    4: (15.4, 13.7),
    8: (17.7, 14.8),
    16: (23.9, 18.4),
    32: (36.4, 25.5),
    64: (54.5, 35.1),
    128: (96.2, 70.9),
}
"""Requests at once -> milliseconds to check 5 guesses each, by batch expansion and by one kernel.

Batch expansion makes a sequence of each guess; the kernel takes several queries per sequence. vLLM
with a Llama 7B on one A100. Source: vLLM pull request 5691, July 2024,
https://github.com/vllm-project/vllm/pull/5691.
"""
