"""NCCL's three protocols: the latency and bandwidth of each, and which one a message takes.

LL sends every 4 bytes of data with a flag of 4 bytes, so that the receiver needs no other signal:
it has the shortest latency and at most half of the bandwidth. LL128 sends a flag of 8 bytes with
120 bytes of data, which needs stores of 128 bytes that arrive whole. Simple sends data without
flags and synchronizes once per chunk: it has all of the bandwidth and the longest latency. NCCL
predicts the time of each and takes the fastest; so does `cost.all_reduce_seconds` with the links
of `protocol_links`.

Source: NCCL 2.30.7, commit 5067397c. src/graph/tuning.cc has
baseLatencies and hwLatencies (rings; over the network those of trees, which NCCL takes for one GPU
a node), the shares (0.5 for LL; 0.92 for LL128, 2 % below 120 of 128 bytes) and llMaxBws (Ampere
and Hopper in one node; beyond two nodes those of AMD hosts). src/graph/topo.h has the bandwidth of
an NVLink (20.0 GB/s on sm_80, 20.6 GB/s on sm_90); src/graph/topo.cc has that of a PCIe lane.
The protocols are described in Hu et al., 2025, arXiv 2507.04786.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from labcore.checks import non_negative, one_of
from labcore.parallel.cost import Link, all_reduce_seconds

__all__ = ["PROTOCOLS", "fastest_protocol", "protocol_links"]

PROTOCOLS = ("LL", "LL128", "Simple")
"""NCCL's protocols, from the shortest latency to the largest bandwidth."""

_BASE = (6.6, 14.0, 8.4)  # us that a ring costs once, by protocol
_SHARES = (0.5, 0.92, 1.0)  # of the bandwidth
_NVLINK, _PCI, _NET = (0.6, 1.9, 3.4), (1.0, 2.5, 5.7), (5.0, 8.5, 14.0)  # us per step
# us per step by protocol, GB/s that NCCL expects of the hardware, and the most that LL reaches.
_LINKS: Mapping[str, tuple[tuple[float, ...], float, float]] = {
    "NVLink 4": (_NVLINK, 18 * 20.6, 141.0),
    "NVLink 3": (_NVLINK, 12 * 20.0, 87.7),
    "PCIe 5.0 x16": (_PCI, 16 * 240 / 80, math.inf),
    "PCIe 4.0 x16": (_PCI, 16 * 120 / 80, math.inf),
    "InfiniBand 400 Gb/s": (_NET, 50.0, 19.0),
    "InfiniBand 100 Gb/s": (_NET, 12.5, 19.0),
}


def protocol_links(name: str, *, base: float | None = None) -> dict[str, Link]:
    """Return a link of `cost.LINKS` under each of PROTOCOLS, with NCCL's own figures.

    name: a key of LINKS. base: seconds that a collective costs once, for all three protocols; None
    takes NCCL's figures, which differ by protocol.
    The bandwidths are those that NCCL expects of the hardware, 370.8 GB/s for NVLink 4 and not the
    data sheet's 450. Steps are a ring's; we assume that a step of the other algorithms of
    `collectives.ALL_REDUCES` takes as long. Sums in the switch (NVLink SHARP) aren't modeled.
    Raises ValueError for another name.
    """
    steps, bandwidth, most = _LINKS[one_of("name", name, _LINKS)]
    if base is not None:
        non_negative("base", base, "pass seconds")
    found = {}
    for protocol, once, alpha, share in zip(PROTOCOLS, _BASE, steps, _SHARES, strict=True):
        reached = min(share * bandwidth, most if protocol == "LL" else math.inf)
        found[protocol] = Link(
            name=f"{name}, {protocol}",
            alpha=alpha * 1e-6,
            beta=1e-9 / reached,
            base=once * 1e-6 if base is None else base,
            source=f"{protocol} in src/graph/tuning.cc and topo.h of NCCL 2.30.7",
        )
    return found


def fastest_protocol(
    links: Mapping[str, Link], ranks: int, nbytes: float, *, algorithm: str = "ring"
) -> str:
    """Return the key of the link on which an all-reduce of nbytes takes least.

    links: as from `protocol_links`. Arguments and errors are those of `cost.all_reduce_seconds`.
    """
    return min(links, key=lambda one: all_reduce_seconds(algorithm, ranks, nbytes, links[one]))
