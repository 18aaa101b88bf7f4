"""What placement keeps in any sequence of events, and the bound on a wait whatever others do."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from outerproduct_scheduler.accelerators import matches
from outerproduct_scheduler.placement import (
    Assignment,
    ComputeSpec,
    NodeCapacity,
    NodeCondition,
    Placement,
    WaitingCall,
)
from outerproduct_scheduler.placement.queues import PASSES_BEFORE_OVERDUE

NAMES = ("a", "b", "c", "d")
OWNERS = ("ann", "bob", "eve")
SPECS = st.builds(
    lambda cpus, memory, kind_count: ComputeSpec(cpus, memory, *kind_count),
    st.integers(0, 6),
    st.integers(0, 6),
    st.sampled_from([("", 0), ("", 0), ("", 1), ("", 3), ("L4", 1), ("L4", 4), ("A100", 1), ("A100-80GB", 2)]),
)
CAPACITIES = st.builds(
    NodeCapacity,
    st.integers(1, 12),
    st.integers(1, 12),
    st.sampled_from([{}, {"L4": 4}, {"L4": 2, "A100-80GB": 2}, {"A100-40GB": 4}, {"A100-40GB:3g.20gb": 2}]),
)
LABELS = st.sampled_from([{}, {}, {"zone": "x"}])


class PlacementMachine(RuleBasedStateMachine):
    """Drives placement with any events beside plain books of its own, and compares."""

    def __init__(self) -> None:
        super().__init__()
        self.placement = Placement()
        self.nodes: dict[str, tuple[NodeCapacity, NodeCondition, dict[str, str]]] = {}
        self.waiting: dict[str, WaitingCall] = {}
        self.running: dict[str, Assignment] = {}
        self.now = 0.0
        self.count = 0

    def used(self, node: str) -> tuple[int, int, dict[str, int]]:
        here = [a for a in self.running.values() if a.node == node]
        gpus: dict[str, int] = {}
        for a in here:
            if a.spec.accelerator_count:
                gpus[a.accelerator] = gpus.get(a.accelerator, 0) + a.spec.accelerator_count
        return sum(a.spec.cpus for a in here), sum(a.spec.memory_bytes for a in here), gpus

    def fits(self, spec: ComputeSpec, node: str) -> bool:
        capacity = self.nodes[node][0]
        cpus, memory, gpus = self.used(node)
        return (
            spec.cpus <= capacity.cpus - cpus
            and spec.memory_bytes <= capacity.memory_bytes - memory
            and (
                not spec.accelerator_count
                or any(
                    total - gpus.get(kind, 0) >= spec.accelerator_count and matches(spec.accelerator, kind)
                    for kind, total in capacity.accelerators.items()
                )
            )
        )

    @rule(name=st.sampled_from(NAMES), capacity=CAPACITIES, condition=st.sampled_from(NodeCondition), labels=LABELS)
    def node_changes(self, name: str, capacity: NodeCapacity, condition: NodeCondition, labels: dict[str, str]) -> None:
        self.placement.set_node(name, capacity, condition, labels)
        self.nodes[name] = (capacity, condition, labels)

    @rule(name=st.sampled_from(NAMES), capacity=CAPACITIES)
    def node_is_ready(self, name: str, capacity: NodeCapacity) -> None:
        self.node_changes(name, capacity, NodeCondition.READY, {})

    @rule(name=st.sampled_from(NAMES))
    def node_goes(self, name: str) -> None:
        self.placement.remove_node(name)
        self.nodes.pop(name, None)

    @rule(
        spec=SPECS,
        owner=st.sampled_from(OWNERS),
        priority=st.integers(0, 1),
        timeout=st.none() | st.integers(1, 20),
        labels=LABELS,
        avoid=st.sampled_from([frozenset(), frozenset(), frozenset({"a"}), frozenset({"a", "b"})]),
        ago=st.integers(0, 2),
        copies=st.integers(1, 3),
    )
    def calls_arrive(
        self,
        *,
        spec: ComputeSpec,
        owner: str,
        priority: int,
        timeout: int | None,
        labels: dict[str, str],
        avoid: frozenset[str],
        ago: int,
        copies: int,
    ) -> None:
        for _ in range(copies):
            self.count += 1
            call = WaitingCall(f"c{self.count}", spec, owner, priority, self.now - ago, timeout, labels, avoid)
            self.placement.submit(call)
            self.waiting[call.call_id] = call

    @rule(data=st.data())
    def a_waiting_call_goes(self, data: st.DataObject) -> None:
        if self.waiting:
            call_id = data.draw(st.sampled_from(sorted(self.waiting)))
            assert self.placement.withdraw(call_id)
            del self.waiting[call_id]

    @rule(data=st.data())
    def a_running_call_ends(self, data: st.DataObject) -> None:
        if self.running:
            call_id = data.draw(st.sampled_from(sorted(self.running)))
            self.placement.release(call_id)
            del self.running[call_id]

    @rule(spec=SPECS, node=st.sampled_from(NAMES), timeout=st.none() | st.integers(1, 20))
    def a_call_is_found_running(self, spec: ComputeSpec, node: str, timeout: int | None) -> None:
        self.count += 1
        kind = "L4" if spec.accelerator_count else ""
        self.placement.occupy(f"f{self.count}", node, spec, kind, self.now, timeout, "bob")
        self.running[f"f{self.count}"] = Assignment(f"f{self.count}", node, kind, spec)

    @rule(seconds=st.integers(0, 10))
    def time_passes_and_calls_are_placed(self, seconds: int) -> None:
        self.now += seconds
        for assignment in self.placement.place(self.now):
            call = self.waiting.pop(assignment.call_id)
            _, condition, labels = self.nodes[assignment.node]
            assert assignment.spec == call.spec
            assert self.fits(call.spec, assignment.node)
            assert condition is NodeCondition.READY
            assert call.labels.items() <= labels.items()
            if call.spec.accelerator_count:
                assert matches(call.spec.accelerator, assignment.accelerator)
            self.running[assignment.call_id] = assignment
            capacity = self.nodes[assignment.node][0]
            cpus, memory, gpus = self.used(assignment.node)
            assert cpus <= capacity.cpus
            assert memory <= capacity.memory_bytes
            assert all(
                count <= capacity.accelerators[kind] for kind, count in gpus.items() if kind == assignment.accelerator
            )
        self.nothing_that_fits_waits_without_a_reservation()
        assert self.placement.place(self.now) == []

    def nothing_that_fits_waits_without_a_reservation(self) -> None:
        held = {node: self.waiting[call_id].priority for call_id, node in self.placement.reservations().items()}
        for call in self.waiting.values():
            for name, (_, condition, labels) in self.nodes.items():
                bound = name in held and held[name] >= call.priority
                if condition is NodeCondition.READY and call.labels.items() <= labels.items() and not bound:
                    assert name in call.avoid_nodes or not self.fits(call.spec, name), (call, name)

    @invariant()
    def accounts_agree(self) -> None:
        for name, (capacity, _, _) in self.nodes.items():
            cpus, memory, gpus = self.used(name)
            used, free = self.placement.used(name), self.placement.free(name)
            assert (used.cpus, used.memory_bytes) == (cpus, memory)
            assert {kind: n for kind, n in used.accelerators.items() if n} == gpus
            assert free.cpus == capacity.cpus - cpus

    @invariant()
    def every_waiting_call_has_a_short_reason(self) -> None:
        for call_id in self.waiting:
            assert 0 < len(self.placement.pending_reason(call_id, self.now)) < 1000

    def teardown(self) -> None:
        for call_id in self.running:
            self.placement.release(call_id)
        for name in self.nodes:
            used = self.placement.used(name)
            assert (used.cpus, used.memory_bytes) == (0, 0)
            assert not any(used.accelerators.values())


PlacementMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_any_sequence_of_events = PlacementMachine.TestCase


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    kind=st.sampled_from(["gpus", "cpus", "small"]),
    arrivals=st.lists(
        st.tuples(
            st.integers(0, 2), st.integers(1, 4), st.integers(-1, 0), st.none() | st.integers(1, 8), st.booleans()
        ),
        min_size=4,
        max_size=12,
    ),
    endless_seconds=st.integers(2, 12),
)
def test_no_call_waits_for_ever_while_its_resources_pass_by(
    kind: str, arrivals: list[tuple[int, int, int, int | None, bool]], endless_seconds: int
) -> None:
    """An adversary keeps the nodes full with Calls of new users, of other classes and of lower priority, for ever.

    Calls run to their timeouts, those without one for `endless_seconds`. The victim must start after at most
    PASSES_BEFORE_OVERDUE passes and one draining of a node, however the adversary mixes its Calls.
    """
    placement = Placement()
    for name in ("a", "b"):
        placement.set_node(name, NodeCapacity(8, 8, {"L4": 4}), NodeCondition.READY, {})
    ends: dict[str, int] = {}
    lasts: dict[str, int] = {}
    number = 0

    def arrive(now: int) -> None:
        nonlocal number
        for gpus, cpus, priority, timeout, new_user in arrivals:
            number += 1
            owner = f"user{number}" if new_user else "rival"
            spec = ComputeSpec(cpus, 1, "L4" if gpus else "", gpus)
            placement.submit(WaitingCall(f"c{number}", spec, owner, priority, now, timeout))
            lasts[f"c{number}"] = timeout or endless_seconds

    arrive(0)
    for assignment in placement.place(0.0):
        ends[assignment.call_id] = lasts[assignment.call_id]
    victim = {
        "gpus": ComputeSpec(1, 1, "L4", 4),
        "cpus": ComputeSpec(8, 1),
        "small": ComputeSpec(1, 1, "L4", 1),
    }[kind]
    placement.submit(WaitingCall("victim", victim, "victim", 0, 0.5))
    # The adversary keeps both nodes full, so within the longest run some Call starts on each. Each Call of the
    # victim's queue that is older than it has its turn first.
    longest = max(endless_seconds, *(timeout or 0 for _, _, _, timeout, _ in arrivals))
    older = len(lasts) - len(ends)
    bound = (older + 1) * (PASSES_BEFORE_OVERDUE + 2) * longest
    for now in range(1, bound + 1):
        for call_id in [c for c, end in ends.items() if end <= now]:
            placement.release(call_id)
            del ends[call_id]
        arrive(now)
        for assignment in placement.place(float(now)):
            if assignment.call_id == "victim":
                return
            ends[assignment.call_id] = now + lasts[assignment.call_id]
    pytest.fail(f"the victim did not start within {bound} s")


@given(st.lists(SPECS, min_size=1, max_size=30))
@settings(max_examples=30, deadline=None)
def test_the_same_events_give_the_same_assignments(specs: list[ComputeSpec]) -> None:
    def run() -> list[Assignment]:
        placement = Placement()
        for name in NAMES:
            placement.set_node(name, NodeCapacity(8, 8, {"L4": 2, "A100-80GB": 2}), NodeCondition.READY, {})
        found = []
        for number, spec in enumerate(specs):
            placement.submit(WaitingCall(f"c{number}", spec, OWNERS[number % 3]))
            found += placement.place(float(number))
        return found

    assert run() == run()
