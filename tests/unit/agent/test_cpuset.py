"""The kernel's list format, and sets of CPUs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outerproduct_agent.cpuset import CpuSet, format_id_list, parse_id_list

ids = st.frozensets(st.integers(min_value=0, max_value=300))


@pytest.mark.parametrize(
    ("text", "members", "printed"),
    [
        ("", [], ""),
        ("\n", [], ""),
        ("0", [0], "0"),
        ("0-3,8\n", [0, 1, 2, 3, 8], "0-3,8"),
        ("8,0-1", [0, 1, 8], "0-1,8"),
        ("0,1,2", [0, 1, 2], "0-2"),
        ("3-3", [3], "3"),
        ("0-31,64-95", [*range(32), *range(64, 96)], "0-31,64-95"),
    ],
)
def test_lists_are_parsed_and_printed_as_the_kernel_does(text: str, members: list[int], printed: str) -> None:
    cpus = CpuSet.parse(text)
    assert list(cpus) == members
    assert str(cpus) == printed


@pytest.mark.parametrize("text", ["a", "1-", "-1", "3-1", "0,,1", "0-3-5", "1.5", "(null)", "0-999999999", "²", "0x1"])
def test_what_is_not_a_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not an id list"):
        parse_id_list(text)


def test_negative_ids_are_refused() -> None:
    with pytest.raises(ValueError, match="start at 0"):
        CpuSet.of([1, -1])


@given(ids)
def test_printing_and_parsing_give_the_same_set(members: frozenset[int]) -> None:
    assert parse_id_list(format_id_list(members)) == members


@given(ids, ids)
def test_sets_behave_as_sets(first: frozenset[int], second: frozenset[int]) -> None:
    one, two = CpuSet(first), CpuSet(second)
    assert (one | two).ids == first | second
    assert (one & two).ids == first & second
    assert (one - two).ids == first - second
    assert (one <= two) == (first <= second)
    assert one.isdisjoint(two) == first.isdisjoint(second)
    assert len(one) == len(first)
    assert bool(one) == bool(first)
    assert all(cpu in one for cpu in first)


def test_iteration_is_in_ascending_order() -> None:
    assert list(CpuSet.of([9, 1, 70, 3])) == [1, 3, 9, 70]
