"""Whole traces, written down by hand or known from elsewhere: who reads how much in which step."""

import pytest

from labcore.serving.engine.plan import StepPlan
from labcore.serving.engine.scheduler import POLICIES
from tests.serving.toy import request, server


def reads(plan: StepPlan) -> dict[str, int]:
    """Tokens that each request reads."""
    read = {chunk.id: chunk.count for chunk in plan.chunks}
    return read | {decode.id: decode.drafted + 1 for decode in plan.decodes}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("block_size", [1, 16, 37])
def test_the_trace_of_vllm(policy: str, block_size: int) -> None:
    """Three prompts of 800 tokens, a budget of 1024, chunks of 400.

    Source: `test_schedule_concurrent_partial_requests` of vLLM's tests of its v1 scheduler.
    """
    one = server(
        7,
        num_blocks=-(-2600 // block_size),
        block_size=block_size,
        policy=policy,
        max_num_batched_tokens=1024,
        chunk=400,
        toy={"ends": False},
    )
    for id in "abc":
        one.add(request(id, 800, 16))
    trace = [reads(one.step()) for _ in range(4)]
    assert trace == [
        {"a": 400, "b": 400, "c": 224},
        {"a": 400, "b": 400, "c": 224},
        {"a": 1, "b": 1, "c": 352},
        {"a": 1, "b": 1, "c": 1},
    ]
    assert [one.states[id].computed for id in "abc"] == [802, 802, 801]
    one.drain()


# Pool of 5 blocks of 2 tokens, 2 slots; a reads 3 + 4, b 2 + 2, c 1 + 2 tokens at most. A step
# each: who reads how much, who came in, who was preempted.
SMALL = {
    # b and c have to wait for a, though b's slot is free after its two tokens.
    "static": [
        ({"a": 3, "b": 2}, "ab", ""),
        ({"a": 1, "b": 1}, "", ""),
        ({"a": 1}, "", ""),
        ({"a": 1}, "", ""),
        ({"c": 1}, "c", ""),
        ({"c": 1}, "", ""),
    ],
    # c takes b's slot as soon as b ends.
    "guaranteed_no_evict": [
        ({"a": 3, "b": 2}, "ab", ""),
        ({"a": 1, "b": 1}, "", ""),
        ({"a": 1, "c": 1}, "c", ""),
        ({"a": 1, "c": 1}, "", ""),
    ],
    "max_utilization": [
        ({"a": 3, "b": 2}, "ab", ""),
        ({"a": 1, "b": 1}, "", ""),
        ({"a": 1, "c": 1}, "c", ""),
        ({"a": 1, "c": 1}, "", ""),
    ],
}
# The same with a pool of 4: the worst cases of a and b, 3 + 2 blocks, do not fit beside each other.
TIGHT = {
    "static": [
        ({"a": 3}, "a", ""),
        ({"a": 1}, "", ""),
        ({"a": 1}, "", ""),
        ({"a": 1}, "", ""),
        ({"b": 2, "c": 1}, "bc", ""),
        ({"b": 1, "c": 1}, "", ""),
    ],
    # c would fit beside a; nobody overtakes the head of the queue.
    "guaranteed_no_evict": [
        ({"a": 3}, "a", ""),
        ({"a": 1}, "", ""),
        ({"a": 1}, "", ""),
        ({"a": 1}, "", ""),
        ({"b": 2, "c": 1}, "bc", ""),
        ({"b": 1, "c": 1}, "", ""),
    ],
    # b comes in on its prompt's block and takes the last one for its token.
    "max_utilization": [
        ({"a": 3, "b": 2}, "ab", ""),
        ({"a": 1, "b": 1}, "", ""),
        ({"a": 1, "c": 1}, "c", ""),
        ({"a": 1, "c": 1}, "", ""),
    ],
}
# And of 3 blocks, b with 3 tokens of output: b lacks a block, and is the newest itself.
FULL = [
    ({"a": 3, "b": 2}, "ab", ""),
    ({"a": 1}, "", "b"),
    ({"a": 1}, "", ""),
    ({"a": 1}, "", ""),
    ({"b": 3, "c": 1}, "bc", ""),
    ({"b": 1, "c": 1}, "", ""),
]


@pytest.mark.parametrize(
    ("pool", "outputs", "policy", "trace"),
    [
        *((5, (4, 2, 2), policy, trace) for policy, trace in SMALL.items()),
        *((4, (4, 2, 2), policy, trace) for policy, trace in TIGHT.items()),
        (3, (4, 3, 2), "max_utilization", FULL),
    ],
)
def test_a_small_trace_of_each_policy(pool, outputs, policy, trace) -> None:
    one = server(
        3,
        num_blocks=pool,
        block_size=2,
        policy=policy,
        max_num_seqs=2,
        max_num_batched_tokens=8,
        enable_prefix_caching=False,
        toy={"ends": False},
    )
    for id, prompt, output in zip("abc", (3, 2, 1), outputs, strict=True):
        one.add(request(id, prompt, output))
    one.drain()
    found = [(reads(p), "".join(p.admitted), "".join(p.preempted)) for p in one.plans]
    assert found == trace


def test_drafted_tokens_take_what_is_left() -> None:
    """A budget of 6: a and b decode, c reads its prompt, the drafts take the rest in turn."""
    one = server(
        5, max_num_batched_tokens=6, max_num_seqs=3, block_size=2, toy={"ends": False, "luck": 0.0}
    )
    for id in "ab":
        one.add(request(id, 2, 9))
    one.step()
    one.add(request("c", 3, 4))
    drafts = {"a": 4, "b": 4}
    assert reads(one.step(drafts)) == {"a": 2, "b": 1, "c": 3}
    assert reads(one.step(drafts)) == {"a": 4, "b": 1, "c": 1}
    assert [one.states[id].wasted for id in "abc"] == [4, 0, 0]
    one.drain()
