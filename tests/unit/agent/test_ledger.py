"""The agent's account of a machine: cases by hand, and a state machine that tries to give something out twice."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.unit.agent.machines import GIB, machine

from outerproduct_agent.cpuset import CpuSet
from outerproduct_agent.gpu_groups import GpuLinks
from outerproduct_agent.gpus import Gpu, GpuHealth, GpuInventory, GpuProcess
from outerproduct_agent.ledger import (
    Allocation,
    Capacity,
    Declined,
    GpuState,
    Ledger,
    default_memory_reserve_bytes,
)
from outerproduct_agent.spec import ComputeSpec

if TYPE_CHECKING:
    from outerproduct_agent.topology import Topology

MIB = 1 << 20


def gpu(name: str, **changes: object) -> Gpu:
    plain = Gpu(f"GPU-{name}", "abcdefgh".index(name), "L4", "NVIDIA L4", memory_bytes=24 * GIB)
    return replace(plain, **changes)  # type: ignore[arg-type]


def inventory(*gpus: Gpu, links: GpuLinks | None = None) -> GpuInventory:
    return GpuInventory(gpus, links or GpuLinks())


def ledger(*gpus: Gpu, topology: Topology | None = None, memory_bytes: int = 32 * GIB, **options: bool) -> Ledger:
    """By default one socket of 4 cores with 2 hyper-threads, without reserves."""
    return Ledger(
        topology or machine(), inventory(*gpus), memory_bytes, reserve_cpus=0, reserve_memory_bytes=0, **options
    )


def given(answer: Allocation | Declined) -> Allocation:
    assert isinstance(answer, Allocation), answer
    return answer


def declined(answer: Allocation | Declined) -> str:
    assert isinstance(answer, Declined), answer
    return answer.reason


def states(account: Ledger) -> dict[str, GpuState]:
    return {status.gpu.uuid: status.state for status in account.gpu_statuses()}


ONE_L4 = ComputeSpec(1, GIB, "L4", 1)


class TestCpusAndMemory:
    def test_an_attempt_gets_what_it_asks_for(self) -> None:
        account = ledger()
        assert given(account.allocate("a", ComputeSpec(2, GIB))) == Allocation(CpuSet.parse("0,4"), GIB)
        assert account.free() == Capacity(6, 31 * GIB, {})
        assert account.allocated() == Capacity(2, GIB, {})
        assert account.totals() == Capacity(8, 32 * GIB, {})

    def test_too_many_cpus_are_declined_with_the_numbers(self) -> None:
        account = ledger()
        account.allocate("a", ComputeSpec(6, GIB))
        assert declined(account.allocate("b", ComputeSpec(3, GIB))) == "3 CPUs asked for, 2 of 8 free"

    def test_too_much_memory_is_declined_with_the_numbers(self) -> None:
        account = ledger()
        account.allocate("a", ComputeSpec(1, 31 * GIB))
        reason = declined(account.allocate("b", ComputeSpec(1, 2 * GIB)))
        assert reason == "2048 MiB of memory asked for, 1024 MiB of 32768 MiB free"

    def test_what_is_declined_takes_nothing(self) -> None:
        account = ledger(gpu("a"))
        before = account.free()
        account.allocate("a", ComputeSpec(1, GIB, "L4", 2))
        assert account.free() == before

    def test_release_gives_all_of_it_back(self) -> None:
        account = ledger()
        allocation = account.allocate("a", ComputeSpec(3, GIB))
        assert account.release("a") == allocation
        assert account.free() == account.totals()
        assert account.release("a") is None

    def test_asking_twice_gives_the_same(self) -> None:
        account = ledger()
        assert account.allocate("a", ComputeSpec(2, GIB)) == account.allocate("a", ComputeSpec(2, GIB))
        assert account.free().cpus == 6


class TestReserves:
    def test_totals_are_without_the_reserve(self) -> None:
        account = Ledger(machine(), inventory(), 32 * GIB, reserve_cpus=2, reserve_memory_bytes=GIB)
        assert account.totals() == Capacity(6, 31 * GIB, {})
        assert str(account.cpus) == "1-3,5-7"
        assert "0" not in str(given(account.allocate("a", ComputeSpec(6, GIB))).cpus)

    def test_the_default_memory_reserve_grows_with_the_machine(self) -> None:
        assert default_memory_reserve_bytes(4 * GIB) == 512 * MIB
        assert default_memory_reserve_bytes(400 * GIB) == 20 * GIB

    @pytest.mark.parametrize("reserve_memory_bytes", [-1, GIB, 2 * GIB])
    def test_an_impossible_memory_reserve_is_refused(self, reserve_memory_bytes: int) -> None:
        with pytest.raises(ValueError, match="memory reserve"):
            Ledger(machine(), inventory(), GIB, reserve_memory_bytes=reserve_memory_bytes)


class TestNumaMemory:
    TWO = machine(nodes=2, node_memory_bytes=16 * GIB)

    def test_memory_that_fits_the_node_is_bound_to_it(self) -> None:
        account = ledger(topology=self.TWO)
        assert given(account.allocate("a", ComputeSpec(2, 10 * GIB))).numa_nodes == (0,)

    def test_the_node_with_room_for_the_memory_is_chosen(self) -> None:
        account = ledger(topology=self.TWO)
        account.allocate("a", ComputeSpec(2, 10 * GIB))
        second = given(account.allocate("b", ComputeSpec(2, 10 * GIB)))
        assert (str(second.cpus), second.numa_nodes) == ("4,12", (1,))

    def test_memory_that_fits_no_node_any_more_is_not_bound(self) -> None:
        account = ledger(topology=self.TWO)
        account.allocate("a", ComputeSpec(2, 10 * GIB))
        account.allocate("b", ComputeSpec(2, 10 * GIB))
        assert given(account.allocate("c", ComputeSpec(2, 10 * GIB))).numa_nodes == ()

    def test_being_near_the_gpus_comes_before_room_for_the_memory(self) -> None:
        account = ledger(gpu("a", numa_node=0), topology=self.TWO)
        account.allocate("a", ComputeSpec(2, 10 * GIB))
        second = given(account.allocate("b", ComputeSpec(2, 10 * GIB, "L4", 1)))
        assert (str(second.cpus), second.numa_nodes) == ("1,9", ())

    def test_binding_can_be_switched_off(self) -> None:
        account = ledger(topology=self.TWO, bind_memory=False)
        assert given(account.allocate("a", ComputeSpec(2, GIB))).numa_nodes == ()

    def test_memory_that_is_not_bound_may_lie_anywhere(self) -> None:
        account = ledger(topology=self.TWO)
        account.allocate("wide", ComputeSpec(10, 10 * GIB))
        assert given(account.allocate("b", ComputeSpec(2, 6 * GIB))).numa_nodes != ()
        assert given(account.allocate("c", ComputeSpec(2, 6 * GIB))).numa_nodes == ()

    def test_the_reserve_may_lie_anywhere(self) -> None:
        account = Ledger(self.TWO, inventory(), 32 * GIB, reserve_cpus=0, reserve_memory_bytes=8 * GIB)
        assert given(account.allocate("a", ComputeSpec(2, 9 * GIB))).numa_nodes == ()
        account.release("a")
        assert given(account.allocate("b", ComputeSpec(2, 8 * GIB))).numa_nodes == (0,)

    def test_an_attempt_over_two_nodes_is_not_bound(self) -> None:
        assert given(ledger(topology=self.TWO).allocate("a", ComputeSpec(10, GIB))).numa_nodes == ()

    def test_a_machine_with_one_node_binds_nothing(self) -> None:
        assert given(ledger().allocate("a", ComputeSpec(1, GIB))).numa_nodes == ()

    def test_a_node_of_unknown_size_binds_nothing(self) -> None:
        account = ledger(topology=machine(nodes=2, node_memory_bytes=0))
        assert given(account.allocate("a", ComputeSpec(1, GIB))).numa_nodes == ()


class TestGpus:
    def test_gpus_are_given_by_uuid(self) -> None:
        account = ledger(gpu("a"), gpu("b"))
        assert given(account.allocate("x", ONE_L4)).gpu_uuids == ("GPU-a",)
        assert given(account.allocate("y", ONE_L4)).gpu_uuids == ("GPU-b",)
        assert states(account) == {"GPU-a": GpuState.ALLOCATED, "GPU-b": GpuState.ALLOCATED}

    def test_a_permutation_of_indices_changes_no_holder(self) -> None:
        account = ledger(gpu("a"), gpu("b"))
        account.allocate("x", ONE_L4)
        account.refresh_gpus(inventory(gpu("b", index=0), gpu("a", index=1)))
        assert given(account.allocate("y", ONE_L4)).gpu_uuids == ("GPU-b",)

    def test_only_the_type_asked_for_is_given(self) -> None:
        account = ledger(gpu("a"), gpu("b", type="H100"))
        assert account.totals().gpus == {"L4": 1, "H100": 1}
        assert given(account.allocate("x", ComputeSpec(1, GIB, "H100", 1))).gpu_uuids == ("GPU-b",)
        reason = declined(account.allocate("y", ComputeSpec(1, GIB, "H100", 1)))
        assert reason.startswith("1 x H100 asked for, 0 of 1 free")

    def test_the_closest_group_is_given(self) -> None:
        links = GpuLinks({frozenset(("GPU-b", "GPU-c")): 100})
        account = Ledger(machine(), inventory(gpu("a"), gpu("b"), gpu("c"), links=links), 32 * GIB)
        assert given(account.allocate("x", ComputeSpec(1, GIB, "L4", 2))).gpu_uuids == ("GPU-b", "GPU-c")

    def test_cpus_are_near_the_gpus(self) -> None:
        account = ledger(gpu("a", numa_node=1), topology=machine(nodes=2))
        assert str(given(account.allocate("x", ComputeSpec(2, GIB, "L4", 1))).cpus) == "4,12"

    def test_a_gpu_with_enough_cpus_beside_it_is_preferred(self) -> None:
        account = ledger(gpu("a", numa_node=0), gpu("b", numa_node=1), topology=machine(nodes=2))
        account.allocate("cpus only", ComputeSpec(7, GIB))
        assert given(account.allocate("x", ComputeSpec(2, GIB, "L4", 1))).gpu_uuids == ("GPU-b",)

    def test_unhealthy_and_excluded_gpus_are_neither_given_nor_counted(self) -> None:
        ill = gpu("a", health=GpuHealth.UNHEALTHY, reason="fallen off the bus")
        account = ledger(ill, gpu("b", excluded="not offered"))
        assert account.totals().gpus == {}
        assert states(account) == {"GPU-a": GpuState.UNHEALTHY, "GPU-b": GpuState.EXCLUDED}
        reason = declined(account.allocate("x", ONE_L4))
        assert "GPU-a: fallen off the bus" in reason
        assert "GPU-b: not offered" in reason

    def test_a_gpu_that_becomes_unhealthy_leaves_totals_and_allocated_and_comes_back(self) -> None:
        account = ledger(gpu("a"), gpu("b"))
        account.allocate("x", ONE_L4)
        account.refresh_gpus(inventory(gpu("a", health=GpuHealth.UNHEALTHY, reason="ECC"), gpu("b")))
        assert account.totals().gpus == {"L4": 1}
        assert account.allocated().gpus == {}
        assert next(one for one in account.gpu_statuses() if one.gpu.uuid == "GPU-a").attempt == "x"
        account.refresh_gpus(inventory(gpu("a"), gpu("b")))
        assert account.totals().gpus == {"L4": 2}
        assert account.allocated().gpus == {"L4": 1}

    def test_a_released_gpu_is_given_again_only_when_its_memory_is_free(self) -> None:
        account = ledger(gpu("a"))
        account.allocate("x", ONE_L4)
        account.release("x")
        assert states(account) == {"GPU-a": GpuState.RELEASING}
        for busy in (gpu("a", memory_used_bytes=20 * GIB), gpu("a", processes=(GpuProcess(7, 0),))):
            account.refresh_gpus(inventory(busy))
            assert "its last Attempt has ended" in declined(account.allocate("y", ONE_L4))
        account.refresh_gpus(inventory(gpu("a", memory_used_bytes=100 * MIB)))
        assert given(account.allocate("y", ONE_L4)).gpu_uuids == ("GPU-a",)

    def test_a_released_gpu_that_does_not_tell_its_use_is_not_taken_for_idle(self) -> None:
        account = ledger(gpu("a"))
        account.allocate("x", ONE_L4)
        account.release("x")
        account.refresh_gpus(inventory(gpu("a", use_known=False)))
        assert states(account) == {"GPU-a": GpuState.RELEASING}
        account.refresh_gpus(inventory(gpu("a")))
        assert states(account) == {"GPU-a": GpuState.FREE}

    def test_a_gpu_in_foreign_use_is_avoided_and_the_reason_names_process_and_memory(self) -> None:
        foreign = gpu("a", processes=(GpuProcess(4711, 0),), memory_used_bytes=70 * GIB)
        account = ledger(foreign, gpu("b"))
        assert states(account)["GPU-a"] is GpuState.FOREIGN_USE
        assert given(account.allocate("x", ONE_L4)).gpu_uuids == ("GPU-b",)
        reason = declined(account.allocate("y", ONE_L4))
        assert "process 4711 (71680 MiB)" in reason
        assert account.totals().gpus == {"L4": 2}
        assert account.free().gpus == {}

    def test_memory_in_use_without_a_visible_process_is_foreign_use(self) -> None:
        assert states(ledger(gpu("a", memory_used_bytes=GIB))) == {"GPU-a": GpuState.FOREIGN_USE}

    def test_foreign_use_can_be_ignored(self) -> None:
        busy = gpu("a", processes=(GpuProcess(4711, 0),))
        account = ledger(busy, ignore_foreign_use=True)
        given(account.allocate("x", ONE_L4))
        account.release("x")
        account.refresh_gpus(inventory(busy))
        given(account.allocate("y", ONE_L4))

    def test_use_by_its_own_attempt_is_not_foreign(self) -> None:
        account = ledger(gpu("a"))
        account.allocate("x", ONE_L4)
        account.refresh_gpus(inventory(gpu("a", processes=(GpuProcess(7, 0),))))
        assert states(account) == {"GPU-a": GpuState.ALLOCATED}


class TestAdoption:
    HELD = Allocation(CpuSet.parse("0,4"), GIB, ("GPU-a",))

    def test_an_adopted_allocation_is_held(self) -> None:
        account = ledger(gpu("a"), gpu("b"))
        account.adopt("old", self.HELD)
        assert account.allocations == {"old": self.HELD}
        new = given(account.allocate("new", ONE_L4))
        assert new.gpu_uuids == ("GPU-b",)
        assert new.cpus.isdisjoint(self.HELD.cpus)

    def test_adopting_twice_is_harmless(self) -> None:
        account = ledger(gpu("a"))
        account.adopt("old", self.HELD)
        account.adopt("old", self.HELD)
        assert account.allocated() == Capacity(2, GIB, {"L4": 1})

    def test_what_somebody_else_holds_cannot_be_adopted(self) -> None:
        account = ledger(gpu("a"))
        account.adopt("old", self.HELD)
        with pytest.raises(ValueError, match="old holds CPUs 4 too"):
            account.adopt("other", Allocation(CpuSet.parse("4-5"), GIB))
        with pytest.raises(ValueError, match="old holds GPU-a too"):
            account.adopt("other", Allocation(CpuSet.parse("1"), GIB, ("GPU-a",)))
        with pytest.raises(ValueError, match="already holds"):
            account.adopt("old", Allocation(CpuSet.parse("1"), GIB))

    def test_more_than_is_offered_now_can_be_adopted(self) -> None:
        account = Ledger(machine(), inventory(), 8 * GIB, reserve_cpus=2, reserve_memory_bytes=4 * GIB)
        account.adopt("old", Allocation(CpuSet.parse("0,4"), 6 * GIB, ("GPU-gone",)))
        assert account.free() == Capacity(6, 0, {})
        account.release("old")
        assert account.free() == Capacity(6, 4 * GIB, {})


class TestLabels:
    @pytest.mark.parametrize(
        "allocation",
        [
            Allocation(CpuSet.parse("0-3,8"), 5),
            Allocation(CpuSet.parse("1"), GIB, ("GPU-a", "MIG-b"), (1,)),
        ],
    )
    def test_an_allocation_survives_a_label(self, allocation: Allocation) -> None:
        assert Allocation.from_json(json.loads(json.dumps(allocation.to_json()))) == allocation

    @pytest.mark.parametrize(
        "change",
        [{"cpus": 3}, {"cpus": "x"}, {"memory_bytes": "1"}, {"gpu_uuids": [1]}, {"gpu_uuids": "GPU-a"}],
    )
    def test_a_damaged_label_is_refused(self, change: dict[str, object]) -> None:
        values = Allocation(CpuSet.parse("0"), 1).to_json() | change
        with pytest.raises(ValueError, match="not an"):
            Allocation.from_json(values)

    def test_an_empty_label_is_refused(self) -> None:
        with pytest.raises(ValueError, match="not an allocation"):
            Allocation.from_json({})


class LedgerMachine(RuleBasedStateMachine):
    """Any order of assignments, ends, restarts and readings of the GPUs on a machine with two NUMA nodes."""

    NODE_MEMORY = 16 * GIB
    TOPOLOGY = machine(nodes=2, cores_per_node=3, node_memory_bytes=NODE_MEMORY, isolated=[5])
    GPUS = tuple(gpu(name, numa_node=number // 2) for number, name in enumerate("abcd"))

    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count()
        self.gpus = {one.uuid: one for one in self.GPUS}
        self.ledger = self.new_ledger()

    def new_ledger(self) -> Ledger:
        return Ledger(
            self.TOPOLOGY,
            inventory(*self.gpus.values()),
            2 * self.NODE_MEMORY,
            reserve_cpus=1,
            reserve_memory_bytes=GIB,
        )

    @rule(cpus=st.integers(1, 6), gibibytes=st.sampled_from([1, 7, 10, 16, 20]), gpus=st.integers(0, 3))
    def assign(self, cpus: int, gibibytes: int, gpus: int) -> None:
        free = self.ledger.free()
        spec = ComputeSpec(cpus, gibibytes * GIB, "L4" if gpus else "", gpus)
        fits = cpus <= free.cpus and spec.memory_bytes <= free.memory_bytes and gpus <= free.gpus.get("L4", 0)
        answer = self.ledger.allocate(f"attempt {next(self.numbers)}", spec)
        assert isinstance(answer, Allocation) == fits
        if isinstance(answer, Allocation):
            assert (len(answer.cpus), answer.memory_bytes, len(answer.gpu_uuids)) == (
                cpus,
                spec.memory_bytes,
                gpus,
            )

    @rule(number=st.integers(0, 9))
    def end(self, number: int) -> None:
        for name in sorted(self.ledger.allocations)[number : number + 1]:
            self.ledger.release(name)

    @rule(uuid=st.sampled_from([one.uuid for one in GPUS]), healthy=st.booleans(), used=st.booleans())
    def read(self, uuid: str, healthy: bool, used: bool) -> None:
        self.gpus[uuid] = replace(
            self.gpus[uuid],
            health=GpuHealth.HEALTHY if healthy else GpuHealth.UNHEALTHY,
            memory_used_bytes=GIB if used else 0,
        )
        self.ledger.refresh_gpus(inventory(*self.gpus.values()))

    @rule()
    def restart(self) -> None:
        before = self.ledger
        self.ledger = self.new_ledger()
        for name, allocation in before.allocations.items():
            self.ledger.adopt(name, Allocation.from_json(allocation.to_json()))
        assert self.ledger.allocated() == before.allocated()

    @invariant()
    def nothing_is_given_twice(self) -> None:
        held = list(self.ledger.allocations.values())
        cpus = [cpu for allocation in held for cpu in allocation.cpus]
        gpus = [uuid for allocation in held for uuid in allocation.gpu_uuids]
        assert len(cpus) == len(set(cpus))
        assert len(gpus) == len(set(gpus))
        assert CpuSet.of(cpus) <= self.ledger.cpus

    @invariant()
    def memory_is_never_over_committed(self) -> None:
        held = list(self.ledger.allocations.values())
        assert sum(allocation.memory_bytes for allocation in held) <= self.ledger.totals().memory_bytes
        for node in (0, 1):
            bound = sum(allocation.memory_bytes for allocation in held if allocation.numa_nodes == (node,))
            assert bound <= self.NODE_MEMORY

    @invariant()
    def totals_are_what_is_held_and_what_is_not(self) -> None:
        totals, allocated, free = self.ledger.totals(), self.ledger.allocated(), self.ledger.free()
        assert totals.cpus == allocated.cpus + free.cpus
        assert totals.memory_bytes == allocated.memory_bytes + free.memory_bytes
        assert totals.gpus.get("L4", 0) >= allocated.gpus.get("L4", 0) + free.gpus.get("L4", 0)


LedgerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestAnyOrderOfEvents = LedgerMachine.TestCase
