"""Prefill and decode on separate simulated replicas, so that prompts never slow down outputs.

A prompt is read on a prefill replica, which also draws the first token. Its keys and values are
then sent to a decode replica, which draws the rest. Source: Zhong et al., DistServe, OSDI 2024,
arXiv 2401.09670.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from labcore.checks import non_negative
from labcore.serving.engine.plan import Decode, StepPlan
from labcore.serving.engine.request import Request
from labcore.serving.engine.scheduler import Scheduler
from labcore.serving.metrics import RequestMetrics
from labcore.serving.simulation.costs import CostModel, work
from labcore.serving.simulation.router import Routed, route_requests
from labcore.serving.simulation.workload import Workload

__all__ = ["Disaggregated", "disaggregate"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Disaggregated:
    """What both kinds of replicas did, and each request's times over both, in order of arrival."""

    prefill: Routed
    decode: Routed
    metrics: tuple[RequestMetrics, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Received(CostModel):
    """A decode replica's costs: keys and values of a prompt arrive, and its last token is read."""

    def seconds(self, plan: StepPlan) -> float:
        """Return the seconds that a plan takes; 0 if it reads nothing."""
        last = [chunk for chunk in plan.chunks if chunk.last]
        arrived = (Decode(one.id, start=one.start + one.count - 1) for one in last)
        return self.of(work((), (*plan.decodes, *arrived), idle=plan.rests))


def disaggregate(
    requests: Workload | Sequence[Request],
    scheduler: Callable[[], Scheduler],
    cost: CostModel,
    *,
    decoder: Callable[[], Scheduler] | None = None,
    prefill: int = 1,
    decode: int = 1,
    transfer: float = 0.0,
    lengths: Mapping[str, int] | None = None,
) -> Disaggregated:
    """Serve the requests on `prefill` replicas for prompts and `decode` replicas for outputs.

    scheduler: makes a prefill replica's scheduler. decoder: makes a decode replica's, whose token
    budget and chunk must hold whole prompts, because a prompt that arrives isn't read; it may not
    preempt. transfer: seconds to send one token's keys and values to
    another replica. lengths: as in `simulate`. Both kinds pick the replica with the fewest requests
    in flight.
    None as decoder means `scheduler`. Raises ValueError for a decoder that doesn't fit, or if a
    transfer would take negative time.
    """
    non_negative("transfer", transfer, "pass seconds")
    decoder = scheduler if decoder is None else decoder
    if isinstance(requests, Workload):
        lengths = requests.lengths if lengths is None else lengths
        requests = requests.requests()
    lengths = lengths or {}
    longest, sample = max((len(one.prompt) for one in requests), default=0), decoder()
    most = min(sample.chunk, sample.max_num_batched_tokens)
    if not sample.policy.promises or most <= longest:
        raise ValueError(
            f"a decode replica's scheduler must promise blocks and take {longest + 1} tokens of a "
            f"prompt per step, got the policy {sample.policy_name!r} and {most} tokens; pass "
            "decoder=…"
        )
    first = [replace(one, sampling=replace(one.sampling, max_tokens=1)) for one in requests]
    read = route_requests(first, prefill, scheduler, cost, policy="least_loaded")
    done = {one.id: one for one in read.metrics}
    rest = []
    for one in requests:
        most, begun = one.sampling.max_tokens, done[one.id]
        if begun.output and min(most, lengths.get(one.id, most)) > 1:
            arrival = begun.arrival + (begun.e2e or 0.0) + transfer * len(one.prompt)
            sampling = replace(one.sampling, max_tokens=most - 1)
            rest.append(replace(one, prompt=(*one.prompt, 0), arrival=arrival, sampling=sampling))
    left = {one.id: lengths[one.id] - 1 for one in rest if one.id in lengths}
    received = _Received(**asdict(cost))
    written = route_requests(rest, decode, decoder, received, policy="least_loaded", lengths=left)
    later = {one.id: one for one in written.metrics}
    metrics = tuple(_joined(one, later.get(one.id)) for one in read.metrics)
    return Disaggregated(prefill=read, decode=written, metrics=metrics)


def _joined(first: RequestMetrics, rest: RequestMetrics | None) -> RequestMetrics:
    """Return a request's times over both of its replicas."""
    if rest is None or first.ttft is None:
        return first
    ends = None if rest.e2e is None else rest.arrival + rest.e2e - first.arrival
    between = None if ends is None or not rest.output else (ends - first.ttft) / rest.output
    output = first.output + rest.output
    return replace(first, output=output, finish=rest.finish, tpot=between, e2e=ends)
