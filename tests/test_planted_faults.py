"""The table of planted faults can be run: every fault has its place in the code, and its test."""

from __future__ import annotations

from collections import Counter

import planted_faults


def test_each_fault_has_its_place_and_its_test():
    """A change that moves a line carries its fault along; `old` is that line as it is now."""
    faults = planted_faults.faults()
    planted_faults.places(faults)
    assert all(fault.old != fault.new for fault in faults)
    counts = Counter(fault.area for fault in faults)
    assert set(counts) == set(planted_faults.AREAS) and min(counts.values()) >= 8
    assert len({fault.name for fault in faults}) == len(faults) >= 60
