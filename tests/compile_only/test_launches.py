"""What is launched is what the table holds, whatever the shapes."""

import random

import pytest

from labcore import compile_only, device
from labcore.compile_only.launches import launching
from tests.compile_only import launched
from tests.compile_only.test_table import TABLE

pytest.importorskip("triton", reason=device.triton_problem() or "Triton")


@pytest.fixture(scope="module")
def pool():
    with compile_only.compilers() as processes:
        yield processes


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_no_shape_launches_a_program_outside_the_table(pool, target: str, seed: int) -> None:
    kernels = compile_only.read(TABLE)["kernels"]
    draws = random.Random(seed)
    for one in [draws.randrange(1 << 30) for _ in range(3)]:
        names = pool.submit(launched.random_launches, target, one).result()
        assert len(names) > 10
        outside = [name for name in names if target not in kernels.get(name, {})]
        assert outside == [], f"seed {one}"


def test_layouts_and_widths_share_their_programs(pool) -> None:
    rows = [(4096, "BTHD"), (5120, "BTHD"), (6144, "fused rows"), (12288, "fused rows")]
    rows.append((4096, "BHTD"))
    names = [pool.submit(launched.of_width, "sm_90", *row).result() for row in rows]
    assert len(names[0]) == 4 and all(other == names[0] for other in names)


def test_each_target_has_its_own_knowledge_in_any_order(pool) -> None:
    nvidia, amd = ["tt.divisibility"], ["tt.divisibility", "tt.pointer_range"]
    orders = ("sm_90", "gfx942", "sm_80"), ("gfx90a", "sm_100")
    found = [pool.submit(launched.attributes, *order).result() for order in orders]
    assert found == [[nvidia, amd, nvidia], [amd, nvidia]]


def test_a_launch_that_loads_otherwise_is_outside_the_table_by_name(pool) -> None:
    names = pool.submit(launched.odd, "sm_90").result()
    assert "forward_kernel/bfloat16-d64-odd:q_ptr,k_ptr,v_ptr" in names
    assert "forward_kernel/bfloat16-d64-odd:qt,kt,vt" in names
    assert not set(names) & set(compile_only.read(TABLE)["kernels"])


def test_tensors_over_2_gib_have_programs_of_their_own_on_amd(pool) -> None:
    kernels = compile_only.read(TABLE)["kernels"]
    for target, suffix in (("gfx942", "-large:k_ptr,v_ptr"), ("sm_90", "")):
        (name,) = pool.submit(launched.large, target).result()
        assert name == f"decode_kernel/bfloat16-group8-page16-d128-m16{suffix}"
        assert target in kernels[name]


@pytest.mark.skipif(not device.interpreting(), reason="this process has no interpreter")
def test_the_interpreter_launches_nothing_to_compile() -> None:
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=0"), launching("sm_90"):
        pass
