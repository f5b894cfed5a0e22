"""The protocols of NCCL: their order, their figures, and the one that a message takes."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from labcore.parallel import cost
from labcore.parallel.collectives import ALL_REDUCES
from labcore.parallel.cost import LINKS, Link, all_reduce_seconds
from labcore.parallel.protocols import PROTOCOLS, fastest_protocol, protocol_links
from labcore.parallel.step import GPUS, MODELS, Collective, decode_step
from labcore.parallel.timeline import simulate_timeline

SIZES = [8 * 2**power for power in range(31)]


@pytest.mark.parametrize("name", LINKS)
def test_latency_is_paid_for_with_bandwidth(name: str) -> None:
    links = protocol_links(name)
    assert tuple(links) == PROTOCOLS
    for fewer, more in itertools.pairwise(links.values()):
        assert fewer.alpha < more.alpha and fewer.bandwidth < more.bandwidth
    least, middle, full = (link.bandwidth for link in links.values())
    assert least <= full / 2 and 0.9 < middle / full < 120 / 128
    assert full <= LINKS[name].bandwidth * (1 + 1e-12)  # no more than what the wire carries
    # The figures of LINKS are those of LL without what it costs once.
    assert links["LL"].alpha == pytest.approx(LINKS[name].alpha)
    assert all(link.base > 0 and "tuning.cc" in link.source for link in links.values())


def test_bandwidths_are_those_of_the_tuner() -> None:
    reached = {  # GB/s of LL and of Simple
        "NVLink 4": (141.0, 370.8),
        "NVLink 3": (87.7, 240.0),
        "PCIe 5.0 x16": (24.0, 48.0),
        "PCIe 4.0 x16": (12.0, 24.0),
        "InfiniBand 400 Gb/s": (19.0, 50.0),
        "InfiniBand 100 Gb/s": (6.25, 12.5),
    }
    assert list(reached) == list(LINKS)
    for name, (least, full) in reached.items():
        links = protocol_links(name)
        assert links["LL"].bandwidth == pytest.approx(least * 1e9)
        assert links["Simple"].bandwidth == pytest.approx(full * 1e9)


@pytest.mark.parametrize("ranks", [2, 4, 7, 8])
def test_a_message_takes_the_fastest_protocol(ranks: int, seed: int) -> None:
    dice = random.Random(seed)
    links = protocol_links(dice.choice(list(LINKS)))
    taken = []
    for size in SIZES:
        took = {one: all_reduce_seconds("ring", ranks, size, links[one]) for one in links}
        taken.append(fastest_protocol(links, ranks, size))
        assert all_reduce_seconds("ring", ranks, size, links) == took[taken[-1]]
        assert took[taken[-1]] == min(took.values())
    # A larger message never returns to a protocol of shorter latency.
    order = [PROTOCOLS.index(one) for one in taken]
    assert order == sorted(order) and order[0] == 0 and order[-1] == len(PROTOCOLS) - 1


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("ranks", [2, 5, 8])
def test_a_ring_takes_what_nccl_predicts(protocol: str, ranks: int) -> None:
    """Base and hops as in tuning.cc, and its algorithm's bandwidth: bus * N / (2 (N - 1))."""
    base, hop, bus = {
        "LL": (6.6e-6, 0.6e-6, 141e9),
        "LL128": (14e-6, 1.9e-6, 0.92 * 370.8e9),
        "Simple": (8.4e-6, 3.4e-6, 370.8e9),
    }[protocol]
    link = protocol_links("NVLink 4")[protocol]
    for size in SIZES:
        expected = base + 2 * (ranks - 1) * hop + size / (bus * ranks / (2 * (ranks - 1)))
        assert all_reduce_seconds("ring", ranks, size, link) == pytest.approx(expected)


def test_the_base_is_an_argument_and_is_paid_once(seed: int) -> None:
    dice = random.Random(seed)
    for name, algorithm in itertools.product(LINKS, ALL_REDUCES):
        base, size = dice.uniform(0, 5e-5), dice.randrange(1, 10**8)
        free, paid = protocol_links(name, base=0.0), protocol_links(name, base=base)
        for protocol in PROTOCOLS:
            for kind in ("all_reduce", "all_gather"):
                sums = Collective(name="x", kind=kind, ranks=8, nbytes=size)
                one, other = (sums.seconds(way[protocol], algorithm) for way in (free, paid))
                assert other - one == pytest.approx(base, rel=1e-6, abs=1e-15)
            assert all_reduce_seconds(algorithm, 1, size, paid[protocol]) == 0
        gather = Collective(name="x", kind="all_gather", ranks=8, nbytes=size)
        each = [gather.seconds(link, algorithm) for link in paid.values()]
        assert gather.seconds(paid, algorithm) == min(each)
    with pytest.raises(ValueError, match="base must be a finite number, at least 0"):
        protocol_links("NVLink 4", base=-1e-6)
    with pytest.raises(ValueError, match="base must be a finite number, at least 0"):
        Link(name="", alpha=0, beta=0, source="", base=math.inf)
    with pytest.raises(ValueError, match="name must be one of"):
        protocol_links("NVLink")


def test_a_base_moves_no_crossover(seed: int) -> None:
    dice = random.Random(seed)
    bare = Link(name="", alpha=dice.uniform(1e-7, 1e-5), beta=1e-10, source="")
    late = Link(name="", alpha=bare.alpha, beta=bare.beta, source="", base=1e-5)
    where = cost.crossover("ring", "one_shot", 8, bare)
    assert cost.crossover("ring", "one_shot", 8, late) == pytest.approx(where)


def test_a_token_pays_its_protocols() -> None:
    ops = decode_step(MODELS["7B"], ranks=8, batch=64)
    links = protocol_links("NVLink 3")
    run = simulate_timeline(ops, GPUS["A100 SXM"], links, graph=True)
    wires = [op.seconds(links, "ring") for op in ops if isinstance(op, Collective)]
    assert run.wire == pytest.approx(sum(wires))
    for link in (*links.values(), LINKS["NVLink 3"]):
        alone = simulate_timeline(ops, GPUS["A100 SXM"], link, graph=True)
        # No single protocol is faster, and the wire without base and at full rate is.
        assert (alone.wire < run.wire) == (link is LINKS["NVLink 3"])
