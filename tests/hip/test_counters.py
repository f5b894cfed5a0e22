"""Each counter of the emulator that a profiler has too is named once."""

from labcore.hip import LaunchCounters
from labcore.hip.counters import ROCPROF


def test_counters_are_distinct_and_name_fields_that_exist() -> None:
    fields = [one.field for one in ROCPROF if one.field]
    assert len(set(fields)) == len(fields)
    assert set(fields) == {"merged_lds", "lds_conflicts", "mfma", "merged_lines"}
    assert set(fields) < set(LaunchCounters.__dataclass_fields__)
    assert len({one.name for one in ROCPROF}) == len(ROCPROF)
    assert all(one.counts and one.differs for one in ROCPROF)
