"""The ranges hold every combination of what is assumed, and the ways cost what they cost."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from labcore import claims, records
from labcore.parallel.protocols import protocol_links
from labcore.parallel.step import GPUS, MODELS, decode_step
from labcore.parallel.timeline import simulate_timeline
from labcore.studies.tensor_parallel import ranges


def machine(reach: float, base: float, link: str):
    sheet = GPUS["H100 SXM"]
    gpu = replace(sheet, flops=reach * sheet.flops, bandwidth=reach * sheet.bandwidth)
    table = protocol_links(link)
    return gpu, {name: replace(one, base=base * one.base) for name, one in table.items()}


def test_a_range_covers_any_reach_and_base_between_its_ends(seed: int) -> None:
    dice = random.Random(seed)
    model, link = dice.choice(("7B", "70B")), dice.choice(("NVLink 4", "PCIe 5.0 x16"))
    batch, launch = dice.choice((1, 16, 64)), dice.uniform(3e-5, 6e-5)
    ops = decode_step(MODELS[model], ranks=8, batch=batch)
    share = ranges.share(model, link, batch)
    gain = ranges.gain(model, link, batch, launch)
    within = [(dice.uniform(0.5, 1), dice.uniform(0, 2)) for _ in range(4)]
    for reach, base in [*itertools.product((0.5, 1), (0, 2)), *within]:  # corners, which are ends
        gpu, links = machine(reach, base, link)
        eager, graph = (
            simulate_timeline(ops, gpu, links, graph=way, launch=launch) for way in (False, True)
        )
        plain = simulate_timeline(ops, gpu, links, graph=True)
        assert share.low - 1e-9 <= plain.wire_share <= share.high + 1e-9
        assert gain.low - 1e-9 <= eager.seconds / graph.seconds <= gain.high + 1e-9
    for one in (share, gain):
        assert one.low < one.middle < one.high
    fewer = ranges.share(model, link, batch, bases=(1.0, 2.0))
    assert share.low < fewer.low < fewer.middle == share.middle < fewer.high == share.high


def test_a_rule_that_cuts_a_range_leaves_it_undecided(seed: int) -> None:
    dice = random.Random(seed)
    low, middle, high = sorted(dice.uniform(0, 1) for _ in range(3))
    one = ranges.Range(low=low, middle=middle, high=high)
    for rule, least, most in (
        (low, "holds", "undecided"),
        (middle, "undecided", "undecided"),
        (high, "undecided", "holds"),
        (low - 0.1, "holds", "does not hold"),
        (high + 0.1, "does not hold", "holds"),
    ):
        assert (one.verdict(rule, above=True), one.verdict(rule, above=False)) == (least, most)


def test_what_a_way_adds_is_compared_with_one_stream() -> None:
    gpu, links = machine(0.75, 1.0, "NVLink 4")
    free = {"free": replace(links["LL"], alpha=0.0, beta=0.0, base=0.0)}
    for way, batch in (("two halves", 64), ("parallel block", 1), ("one sum", 1)):
        shaped, compared, how = ranges.WAYS[way]
        ops, plain = (
            decode_step(MODELS["7B"], ranks=8, batch=batch, **one) for one in (shaped, compared)
        )
        bare, one, forked = (
            simulate_timeline(each, gpu, wire, graph=True, **more).seconds
            for each, wire, more in ((plain, free, {}), (plain, links, {}), (ops, links, how))
        )
        found = ranges.added("7B", "NVLink 4", batch, way)
        assert found.middle == pytest.approx((forked - bare) / (one - bare))
    with pytest.raises(ValueError, match="way must be"):
        ranges.added("7B", "NVLink 4", 2, "magic")
    with pytest.raises(ValueError, match="multiple of micro_batches"):
        ranges.added("7B", "NVLink 4", 1, "two halves")


@pytest.mark.parametrize(("model", "batch"), [("7B", 1), ("70B", 1), ("70B", 64)])
def test_a_fork_hides_no_more_of_a_parallel_block_than_one_sum_saves(
    model: str, batch: int
) -> None:
    forked, saved = (
        ranges.added(model, "NVLink 4", batch, way) for way in ("parallel block", "one sum")
    )
    for end in ("low", "middle", "high"):
        assert getattr(forked, end) > getattr(saved, end) - 1e-9
    assert 0.47 < saved.low < saved.high < 0.51


def test_pytorch_launches_several_operators_per_kernel() -> None:
    assert 3 < ranges.operator_launch() / ranges.OPERATOR < 12


@pytest.mark.parametrize("name", ["share", "hide", "graph_speed"])
def test_the_card_names_the_parts_that_the_recorded_ranges_leave_undecided(name: str) -> None:
    one = claims.claim(f"tensor_parallel.{name}")
    undecided = 0
    for part in one.parts:
        if part.rule is not None:
            _, setting = part.quantity.split("/")
            low, high = (
                records.find(one.slug, part.case, f"{end}/{setting}").p50
                for end in ("smallest", "largest")
            )
            above = part.rule.at_least is not None
            rule = float(part.rule.at_least if above else part.rule.at_most)
            verdict = ranges.Range(low=low, middle=low, high=high).verdict(rule, above=above)
            says = part.name.endswith(" (undecided, counted as not holding)")
            assert says == (verdict == "undecided")
            undecided += says
    assert undecided


def test_published_latencies_decide_two_settings_and_change_no_other_verdict() -> None:
    """The chapter says so of bases from once to twice NCCL's own."""
    later = {"bases": (1.0, 2.0)}
    for link, batch, way in (
        ("NVLink 4", 64, "two halves"),
        ("NVLink 4", 256, "two halves"),
        ("PCIe 5.0 x16", 256, "two halves"),
        ("NVLink 4", 1, "parallel block"),
    ):
        model = "7B" if way == "parallel block" else "70B"
        both = (ranges.added(model, link, batch, way, **more) for more in ({}, later))
        assert len({one.verdict(0.5, above=False) for one in both}) == 1
    for model, batch, committed in (
        ("7B", 1, "undecided"),
        ("70B", 1, "does not hold"),
        ("70B", 64, "does not hold"),
    ):
        first, then = (
            ranges.gain(model, "NVLink 4", batch, ranges.BARE_LAUNCH, **more).verdict(
                1.1, above=True
            )
            for more in ({}, later)
        )
        assert (first, then) == (committed, "does not hold")


def test_a_graph_launched_node_by_node_costs_more_than_it_saves() -> None:
    """The chapter says so of a 7B step on bare launches, at a published microsecond per node."""
    ops = decode_step(MODELS["7B"], ranks=8)
    for reach, base in itertools.product((0.5, 1), (0, 2)):
        gpu, links = machine(reach, base, "NVLink 4")
        eager, graph = (
            simulate_timeline(ops, gpu, links, graph=way, launch=ranges.BARE_LAUNCH).seconds
            for way in (False, True)
        )
        assert eager - graph < 1e-6 * len(ops)
