"""Sets of logical CPU ids, and the kernel's list format ("0-3,8") that cgroups, sysfs and Docker use.

The format is parsed and printed here only; everything inside the agent holds `CpuSet`. NUMA node ids come in
the same format, hence the two functions on plain ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# The largest NR_CPUS that Linux can be built with (arch/x86/Kconfig): bounds what "0-999999999" can allocate.
_MAX_ID = 8192


def parse_id_list(text: str) -> frozenset[int]:
    """Parse the kernel's list format (Documentation/admin-guide/cgroup-v1/cpusets.rst, "List Format").

    Args:
        text: such as "0-3,8"; surrounding whitespace is ignored, an empty list is the empty set.

    Raises:
        ValueError: the text is not in that format.
    """
    ids: set[int] = set()
    stripped = text.strip()
    if not stripped:
        return frozenset()
    for part in stripped.split(","):
        first, dash, last = part.partition("-")
        bounds = (first, last) if dash else (first, first)
        if not all(bound.isascii() and bound.isdigit() for bound in bounds):
            raise ValueError(f"{text!r} is not an id list of the kernel: {part!r} is neither an id nor a range")
        low, high = int(bounds[0]), int(bounds[1])
        if low > high or high > _MAX_ID:
            raise ValueError(f"{text!r} is not an id list of the kernel: the range {part!r} is impossible")
        ids.update(range(low, high + 1))
    return frozenset(ids)


def format_id_list(ids: Iterable[int]) -> str:
    """Print ids in the kernel's list format, in ascending order with ranges: {0, 1, 2, 8} gives "0-2,8"."""
    ranges: list[list[int]] = []
    for number in sorted(set(ids)):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)


@dataclass(frozen=True, slots=True)
class CpuSet:
    """An immutable set of logical CPU ids; iterates in ascending order, prints in the kernel's format."""

    ids: frozenset[int] = frozenset()

    @classmethod
    def of(cls, ids: Iterable[int]) -> CpuSet:
        """The set of these ids.

        Raises:
            ValueError: an id is negative.
        """
        members = frozenset(ids)
        if members and min(members) < 0:
            raise ValueError(f"CPU ids start at 0, got {min(members)}")
        return cls(members)

    @classmethod
    def parse(cls, text: str) -> CpuSet:
        """Parse the kernel's list format, such as "0-3,8".

        Raises:
            ValueError: the text is not in that format.
        """
        return cls(parse_id_list(text))

    def __str__(self) -> str:
        return format_id_list(self.ids)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self.ids))

    def __len__(self) -> int:
        return len(self.ids)

    def __contains__(self, cpu: object) -> bool:
        return cpu in self.ids

    def __or__(self, other: CpuSet) -> CpuSet:
        return CpuSet(self.ids | other.ids)

    def __and__(self, other: CpuSet) -> CpuSet:
        return CpuSet(self.ids & other.ids)

    def __sub__(self, other: CpuSet) -> CpuSet:
        return CpuSet(self.ids - other.ids)

    def __le__(self, other: CpuSet) -> bool:
        return self.ids <= other.ids

    def isdisjoint(self, other: CpuSet) -> bool:
        """Whether no CPU is in both."""
        return self.ids.isdisjoint(other.ids)
