"""Which CPUs an Attempt gets: cases by hand, and properties over generated machines against brute force."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.agent.machines import machine

from outerproduct_agent.cpus import NotEnoughCpusError, allocate, default_reserve_count, reserve
from outerproduct_agent.cpuset import CpuSet
from outerproduct_agent.topology import CoreKind, LogicalCpu, NumaNode, Topology


def take(topology: Topology, free: str, count: int, *near: int) -> str:
    return str(allocate(topology, CpuSet.parse(free), count, near))


# One socket: cores {0,4} {1,5} {2,6} {3,7}. Two sockets of four cores: node 0 has {0,8} … {3,11}, node 1 {4,12} …
ONE, TWO = machine(), machine(nodes=2)


class TestCores:
    def test_both_hyper_threads_of_a_core_go_to_one_attempt(self) -> None:
        assert take(ONE, "0-7", 2) == "0,4"
        assert take(ONE, "0-7", 4) == "0-1,4-5"

    def test_a_whole_core_is_taken_rather_than_two_halves(self) -> None:
        assert take(ONE, "0-1,3,7", 2) == "3,7"

    def test_an_odd_count_takes_its_last_cpu_from_a_core_that_is_split_already(self) -> None:
        assert take(ONE, "1-7", 1) == "4"
        assert take(ONE, "1-7", 3) == "1,4-5"

    def test_a_new_core_is_split_only_where_none_is(self) -> None:
        assert take(ONE, "1-3,5-7", 1) == "1"

    def test_halves_are_taken_where_nothing_else_is_left(self) -> None:
        assert take(ONE, "0-2", 3) == "0-2"

    def test_the_smallest_piece_that_is_enough_is_taken(self) -> None:
        # Cores {0,2,4,6} and {1,3,5,7}, of which 3 and 1 hyper-threads are free.
        assert take(machine(cores_per_node=2, threads=4), "0,2,4,1", 1) == "1"

    def test_where_no_piece_is_enough_the_largest_is_taken_first(self) -> None:
        # Cores {0,4,8,12} {1,5,9,13} {2,6,10,14} {3,7,11,15}, of which 1, 1, 2 and 2 hyper-threads are free.
        assert take(machine(threads=4), "0-3,6-7", 4) == "2-3,6-7"

    def test_without_hyper_threads_the_first_cores_are_taken(self) -> None:
        assert take(machine(threads=1), "0-3", 3) == "0-2"


class TestNumaNodes:
    def test_one_node_is_enough_where_it_fits(self) -> None:
        assert take(TWO, "0-15", 8) == "0-3,8-11"
        assert take(TWO, "0-1,4-9,12-15", 6) == "4-6,12-14"

    def test_one_node_is_better_than_whole_cores(self) -> None:
        assert take(TWO, "0-3,4,12", 4) == "0-3"

    def test_the_preferred_node_is_taken(self) -> None:
        assert take(TWO, "0-15", 4, 1) == "4-5,12-13"

    def test_another_node_is_better_than_two(self) -> None:
        assert take(TWO, "0-4,8-12", 4, 1) == "0-1,8-9"

    def test_of_two_nodes_the_fuller_one_is_filled_up(self) -> None:
        assert take(TWO, "0-7,12-15,9-11", 2) == "1,9"

    def test_a_request_over_two_nodes_fills_the_preferred_one(self) -> None:
        assert take(TWO, "0-15", 10, 1) == "0,4-8,12-15"

    def test_many_nodes_are_handled_in_bounded_time(self) -> None:
        big = machine(nodes=32, cores_per_node=4)
        chosen = allocate(big, big.usable, 128)
        assert len(chosen) == 128
        assert len(big.nodes_of(chosen)) == 16


class TestKinds:
    # Performance cores {0,2} {1,3}, efficiency cores 4 … 7.
    HYBRID = machine(cores_per_node=2, efficiency_cores=4)

    def test_performance_cores_are_preferred(self) -> None:
        assert take(self.HYBRID, "0-7", 2) == "0,2"

    def test_kinds_are_not_mixed_where_one_has_enough(self) -> None:
        assert take(self.HYBRID, "0-1,4-7", 4) == "4-7"

    def test_kinds_are_mixed_where_none_has_enough(self) -> None:
        assert take(self.HYBRID, "0-7", 6) == "0-5"


class TestUnusableCpus:
    def test_isolated_cpus_are_never_given(self) -> None:
        assert take(machine(isolated=[0, 4]), "0-7", 2) == "1,5"

    def test_cpus_that_the_agent_may_not_use_are_never_given(self) -> None:
        assert take(machine(allowed="2-3,6-7"), "0-7", 4) == "2-3,6-7"

    def test_a_core_with_an_unusable_hyper_thread_counts_as_whole(self) -> None:
        assert take(machine(isolated=[4]), "0-3,5-7", 1) == "0"

    def test_unknown_cpus_are_ignored(self) -> None:
        with pytest.raises(NotEnoughCpusError, match="9 CPUs asked for, 8 free"):
            take(ONE, "0-99", 9)

    def test_fewer_than_one_is_refused(self) -> None:
        with pytest.raises(ValueError, match="at least 1"):
            take(ONE, "0-7", 0)


class TestReserve:
    def test_the_system_keeps_whole_cores_from_cpu_0_on(self) -> None:
        assert str(reserve(ONE, 2)) == "0,4"
        assert str(reserve(ONE, 4)) == "0-1,4-5"

    def test_a_reserve_is_rounded_up_to_whole_cores(self) -> None:
        assert str(reserve(ONE, 1)) == "0,4"

    def test_a_reserve_leaves_something_to_offer(self) -> None:
        assert str(reserve(machine(cores_per_node=1), 1)) == "0"

    def test_no_reserve_is_none(self) -> None:
        assert str(reserve(ONE, 0)) == ""

    @pytest.mark.parametrize("count", [-1, 8, 9])
    def test_an_impossible_reserve_is_refused(self, count: int) -> None:
        with pytest.raises(ValueError, match="set a reserve between"):
            reserve(ONE, count)

    def test_the_reserve_is_of_usable_cpus(self) -> None:
        assert str(reserve(machine(allowed="2-3,6-7"), 1)) == "2,6"

    def test_small_machines_reserve_nothing_by_default(self) -> None:
        assert default_reserve_count(machine(cores_per_node=2)) == 0
        assert default_reserve_count(ONE) == 1


@st.composite
def machines(draw: st.DrawFn, *, hybrid: bool = True) -> Topology:
    """Machines of up to ten CPUs with cores of 1, 2 or 4 hyper-threads, numbered in any order."""
    kinds = list(CoreKind) if hybrid else [CoreKind.PERFORMANCE]
    core = st.tuples(st.sampled_from([1, 2, 4]), st.integers(0, 2), st.sampled_from(kinds))
    cores = draw(st.lists(core, min_size=1, max_size=6).filter(lambda cores: sum(one[0] for one in cores) <= 10))
    numbers = iter(draw(st.permutations(range(sum(width for width, _, _ in cores)))))
    cpus = []
    for width, node, kind in cores:
        threads = sorted(itertools.islice(numbers, width))
        isolated = draw(st.booleans()) and draw(st.booleans())
        cpus += [LogicalCpu(cpu, threads[0], node, node, kind, isolated) for cpu in threads]
    return Topology(
        tuple(sorted(cpus, key=lambda cpu: cpu.id)),
        tuple(NumaNode(node, 1 << 30) for node in range(3)),
        CpuSet.of(cpu.id for cpu in cpus),
    )


def kinds_used(topology: Topology, taken: CpuSet) -> tuple[int, bool]:
    kinds = {topology.by_id[cpu].kind for cpu in taken}
    return len(kinds), CoreKind.EFFICIENCY in kinds


def cost(topology: Topology, free: CpuSet, taken: CpuSet) -> tuple[int, ...]:
    """Kinds, NUMA nodes spanned, cores shared with somebody or nobody, and of these newly split ones."""
    split = [core for core in topology.cores.values() if not core.isdisjoint(taken) and not core <= taken]
    return (
        *kinds_used(topology, taken),
        len(topology.nodes_of(taken)),
        len(split),
        sum(core <= free for core in split),
    )


@st.composite
def requests(draw: st.DrawFn) -> tuple[Topology, CpuSet, int]:
    topology = draw(machines())
    free = CpuSet(draw(st.frozensets(st.sampled_from([cpu.id for cpu in topology.cpus]))))
    return topology, free, draw(st.integers(1, 10))


@settings(max_examples=400, deadline=None)
@given(requests())
def test_no_choice_is_better_than_the_one_made(request: tuple[Topology, CpuSet, int]) -> None:
    topology, free, count = request
    candidates = free & topology.usable
    if len(candidates) < count:
        with pytest.raises(NotEnoughCpusError):
            allocate(topology, free, count)
        return
    chosen = allocate(topology, free, count)
    assert len(chosen) == count
    assert chosen <= candidates
    best = min(cost(topology, candidates, CpuSet.of(choice)) for choice in itertools.combinations(candidates, count))
    assert cost(topology, candidates, chosen) == best


@settings(max_examples=200, deadline=None)
@given(requests(), st.frozensets(st.integers(0, 2)))
def test_preferring_a_node_never_costs_another(
    request: tuple[Topology, CpuSet, int], preferred: frozenset[int]
) -> None:
    topology, free, count = request
    if len(free & topology.usable) >= count:
        plain, near = allocate(topology, free, count), allocate(topology, free, count, preferred)
        assert kinds_used(topology, near) == kinds_used(topology, plain)
        assert len(topology.nodes_of(near)) == len(topology.nodes_of(plain))


@settings(max_examples=200, deadline=None)
@given(machines(), st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=30))
def test_what_is_given_never_overlaps_and_all_of_it_comes_back(
    topology: Topology, steps: list[tuple[bool, int]]
) -> None:
    free, held = topology.usable, list[CpuSet]()
    for takes, number in steps:
        if takes and 1 <= number <= len(free):
            chosen = allocate(topology, free, number)
            assert all(chosen.isdisjoint(other) for other in held)
            held.append(chosen)
            free -= chosen
        elif not takes and number < len(held):
            free |= held.pop(number)
    for chosen in held:
        free |= chosen
    assert free == topology.usable


@settings(max_examples=100, deadline=None)
@given(machines(), st.integers(0, 10))
def test_a_reserve_has_the_count_and_leaves_cpus(topology: Topology, count: int) -> None:
    if count and count >= len(topology.usable):
        with pytest.raises(ValueError, match="leaves nothing"):
            reserve(topology, count)
    else:
        kept = reserve(topology, count)
        assert count <= len(kept) <= len(topology.usable)
        assert kept <= topology.usable
        assert kept != topology.usable or not kept
