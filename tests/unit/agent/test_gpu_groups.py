"""The choice of GPUs that belong together."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outerproduct_agent.gpu_groups import GpuLinks, choose_group

NVLINK, SAME_SWITCH, SAME_NODE, FAR = 100, 50, 20, 10


def links(default: int, **pairs: int) -> GpuLinks:
    """Links among the GPUs a … h; `ab=100` sets one pair, the others have the default."""
    everything = {"".join(pair): default for pair in itertools.combinations("abcdefgh", 2)} | pairs
    return GpuLinks({frozenset(pair): score for pair, score in everything.items()})


def islands() -> GpuLinks:
    """Two halves abcd and efgh, with NVLink bridges ab, cd, ef, gh."""
    scores = {
        frozenset(pair): SAME_NODE if (pair[0] in "abcd") == (pair[1] in "abcd") else FAR
        for pair in itertools.combinations("abcdefgh", 2)
    }
    return GpuLinks(scores | {frozenset(pair): NVLINK for pair in ("ab", "cd", "ef", "gh")})


@pytest.mark.parametrize(
    ("free", "count", "expected"),
    [
        ("abcdefgh", 2, "ab"),
        ("acdefgh", 2, "cd"),
        ("abcdefgh", 4, "abcd"),
        ("abdefgh", 4, "efgh"),
        ("aceg", 2, "ac"),
        ("abcdefgh", 8, "abcdefgh"),
    ],
)
def test_the_best_connected_group_is_chosen(free: str, count: int, expected: str) -> None:
    assert "".join(choose_group(free, count, islands())) == expected


@pytest.mark.parametrize(
    ("free", "expected"),
    [
        ("abcdefgh", "a"),
        # b has no partner: taking it breaks no bridge.
        ("cdbefgh", "b"),
        # b and f have no partner; f has no neighbours either.
        ("bcdf", "f"),
    ],
)
def test_a_single_gpu_breaks_no_better_group(free: str, expected: str) -> None:
    assert choose_group(free, 1, islands()) == (expected,)


def test_a_pair_that_keeps_a_larger_group_whole_is_preferred() -> None:
    # ab and fg are equally close; f and g have ties to h as well, a and b have none.
    connected = links(FAR, ab=NVLINK, fg=NVLINK, fh=NVLINK, gh=NVLINK)
    assert "".join(choose_group("fghab", 2, connected)) == "ab"


def test_without_links_the_first_are_taken() -> None:
    assert "".join(choose_group("hgfe", 2, GpuLinks())) == "hg"
    assert "".join(choose_group("hgfe", 2, links(NVLINK))) == "hg"


@pytest.mark.parametrize("count", [0, 3])
def test_a_group_that_does_not_exist_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match="of 2 free ones"):
        choose_group("ab", count, GpuLinks())


def test_a_large_machine_gets_a_whole_island() -> None:
    gpus = [f"GPU-{number:02}" for number in range(72)]
    scores = {
        frozenset(pair): NVLINK if int(pair[0][4:]) // 9 == int(pair[1][4:]) // 9 else FAR
        for pair in itertools.combinations(gpus, 2)
    }
    assert choose_group(gpus, 9, GpuLinks(scores)) == tuple(gpus[:9])


@given(
    st.lists(st.integers(0, 300), min_size=28, max_size=28),
    st.permutations("abcdefgh"),
    st.integers(1, 8),
)
def test_no_group_is_better_connected(scores: list[int], free: list[str], count: int) -> None:
    pairs = [frozenset(pair) for pair in itertools.combinations("abcdefgh", 2)]
    connected = GpuLinks(dict(zip(pairs, scores, strict=True)))

    def inside(group: tuple[str, ...]) -> int:
        return sum(connected.between(*pair) for pair in itertools.combinations(group, 2))

    chosen = choose_group(free, count, connected)
    assert len(set(chosen)) == count
    assert inside(chosen) == max(inside(group) for group in itertools.combinations(free, count))
