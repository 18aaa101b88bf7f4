"""What placement decides in single situations: which node, in which order, who may pass whom, and what users read."""

from collections.abc import Mapping

import pytest

from outerproduct_scheduler.placement import (
    ComputeSpec,
    NodeCapacity,
    NodeCondition,
    Placement,
    WaitingCall,
)
from outerproduct_scheduler.placement.queues import PASSES_BEFORE_OVERDUE

GIB = 1 << 30


def spec(gpus: int = 0, kind: str = "", cpus: int = 1, gib: int = 1) -> ComputeSpec:
    return ComputeSpec(cpus, gib * GIB, kind, gpus)


def call(
    call_id: str,
    wants: ComputeSpec,
    owner: str = "ann",
    *,
    at: float = 0.0,
    priority: int = 0,
    timeout: float | None = None,
    labels: Mapping[str, str] | None = None,
    avoid: frozenset[str] = frozenset(),
) -> WaitingCall:
    return WaitingCall(call_id, wants, owner, priority, at, timeout, labels or {}, avoid)


def add_node(
    placement: Placement,
    name: str,
    gpus: Mapping[str, int] | None = None,
    *,
    cpus: int = 64,
    gib: int = 256,
    condition: NodeCondition = NodeCondition.READY,
    labels: Mapping[str, str] | None = None,
) -> None:
    placement.set_node(name, NodeCapacity(cpus, gib * GIB, gpus or {}), condition, labels or {})


def cluster(**nodes: Mapping[str, int]) -> Placement:
    placement = Placement()
    for name, gpus in nodes.items():
        add_node(placement, name, gpus)
    return placement


def placed(placement: Placement, now: float = 0.0) -> dict[str, str]:
    return {assignment.call_id: assignment.node for assignment in placement.place(now)}


def started(placement: Placement, now: float = 0.0) -> list[str]:
    return [assignment.call_id for assignment in placement.place(now)]


# --- which node


def test_a_call_goes_where_fewest_gpus_are_left() -> None:
    placement = cluster(big={"L4": 8}, small={"L4": 2})
    placement.submit(call("c", spec(2, "L4")))
    assert placed(placement) == {"c": "small"}


def test_equal_nodes_are_taken_in_the_order_of_their_names() -> None:
    placement = cluster(b={"L4": 2}, a={"L4": 2})
    placement.submit(call("c", spec(1, "L4")))
    assert placed(placement) == {"c": "a"}


def test_a_call_without_gpus_goes_to_a_node_without_gpus() -> None:
    placement = cluster(a_gpu={"L4": 8}, plain={})
    placement.submit(call("c", spec(cpus=4)))
    assert placed(placement) == {"c": "plain"}


def test_a_call_without_gpus_goes_where_it_strands_no_gpu() -> None:
    placement = cluster(idle={"L4": 8}, busy={"L4": 8})
    placement.occupy("old", "busy", spec(8, "L4", cpus=8), "L4", 0.0, None, "bob")
    placement.submit(call("c", spec(cpus=32)))
    assert placed(placement) == {"c": "busy"}


def test_a_call_that_takes_any_type_leaves_the_type_that_others_name() -> None:
    placement = cluster(a={"H100": 4}, b={"L4": 8})
    placement.place(0.0)
    for number in range(4):
        placement.submit(call(f"named-{number}", spec(1, "H100", cpus=8), at=1.0))
    placement.submit(call("any", spec(4, cpus=8)))
    assert {a.call_id: a.accelerator for a in placement.place(1.0)}["any"] == "L4"


def test_all_gpus_of_a_call_are_of_one_type() -> None:
    placement = cluster(mixed={"L4": 2, "A100-40GB": 2})
    placement.submit(call("c", spec(3)))
    assert placed(placement) == {}
    placement.submit(call("d", spec(2)))
    assert placed(placement) == {"d": "mixed"}


def test_a_mig_slice_is_given_only_to_a_call_that_names_it() -> None:
    placement = cluster(sliced={"A100-40GB:3g.20gb": 2})
    placement.submit(call("any", spec(1)))
    placement.submit(call("a100", spec(1, "A100")))
    placement.submit(call("slice", spec(1, "A100-40GB:3g.20gb")))
    assert placed(placement) == {"slice": "sliced"}


@pytest.mark.parametrize("condition", [c for c in NodeCondition if c is not NodeCondition.READY])
def test_only_a_ready_node_takes_calls(condition: NodeCondition) -> None:
    placement = Placement()
    add_node(placement, "n", condition=condition)
    placement.submit(call("c", spec()))
    assert placed(placement) == {}
    add_node(placement, "n")
    assert placed(placement) == {"c": "n"}


def test_a_call_goes_only_to_nodes_with_its_labels() -> None:
    placement = Placement()
    add_node(placement, "a", labels={"zone": "x"})
    add_node(placement, "b", labels={"zone": "y", "disk": "fast"})
    placement.submit(call("c", spec(), labels={"zone": "y"}))
    assert placed(placement) == {"c": "b"}


def test_a_call_waits_for_another_node_than_those_it_avoids() -> None:
    placement = cluster(bad={}, good={})
    placement.occupy("old", "good", spec(cpus=64), "", 0.0, None, "bob")
    placement.submit(call("c", spec(), avoid=frozenset({"bad"})))
    assert placed(placement) == {}
    placement.release("old")
    assert placed(placement) == {"c": "good"}


def test_an_avoided_node_is_taken_when_no_other_ready_node_is_large_enough() -> None:
    placement = cluster(bad={}, good={})
    placement.occupy("old", "good", spec(cpus=64), "", 0.0, None, "bob")
    placement.submit(call("c", spec(), avoid=frozenset({"bad"})))
    assert placed(placement) == {}
    add_node(placement, "good", condition=NodeCondition.CORDONED)
    assert placed(placement) == {"c": "bad"}


def test_a_node_smaller_than_its_use_takes_nothing_until_enough_came_back() -> None:
    placement = cluster(n={"L4": 4})
    placement.occupy("old", "n", spec(4, "L4"), "L4", 0.0, None, "bob")
    add_node(placement, "n", {"L4": 2})
    assert placement.free("n").accelerators == {"L4": -2}
    placement.submit(call("c", spec(1, "L4")))
    assert placed(placement) == {}
    placement.release("old")
    assert placed(placement) == {"c": "n"}


# --- accounts


def test_what_a_call_took_comes_back() -> None:
    placement = cluster(n={"L4": 4})
    before = placement.free("n")
    placement.submit(call("c", spec(2, "L4", cpus=8, gib=16)))
    placement.place(0.0)
    assert placement.used("n") == NodeCapacity(8, 16 * GIB, {"L4": 2})
    placement.release("c")
    placement.release("c")
    assert placement.free("n") == before


def test_a_call_found_on_a_node_that_registers_later_is_counted_there() -> None:
    placement = Placement()
    placement.occupy("old", "n", spec(3, "L4"), "L4", 0.0, None, "bob")
    add_node(placement, "n", {"L4": 4})
    assert placement.free("n").accelerators == {"L4": 1}


def test_a_removed_node_that_returns_still_counts_what_it_holds() -> None:
    placement = cluster(n={"L4": 4})
    placement.occupy("old", "n", spec(3, "L4"), "L4", 0.0, None, "bob")
    placement.remove_node("n")
    add_node(placement, "n", {"L4": 4})
    assert placement.free("n").accelerators == {"L4": 1}


def test_a_call_cannot_run_on_two_nodes() -> None:
    placement = cluster(a={}, b={})
    placement.occupy("c", "a", spec(), "", 0.0, None, "bob")
    with pytest.raises(ValueError, match="c runs on a and cannot run on b"):
        placement.occupy("c", "b", spec(), "", 0.0, None, "bob")


def test_a_call_cannot_wait_twice() -> None:
    placement = cluster(n={})
    placement.submit(call("c", spec()))
    with pytest.raises(ValueError, match="c was submitted twice"):
        placement.submit(call("c", spec()))


def test_a_withdrawn_call_never_starts() -> None:
    placement = cluster(n={})
    placement.submit(call("c", spec()))
    assert placement.withdraw("c")
    assert not placement.withdraw("c")
    assert placed(placement) == {}


# --- order


def test_within_a_priority_the_older_call_starts_first() -> None:
    placement = cluster(n={"L4": 1})
    placement.submit(call("young", spec(1, "L4"), at=2.0))
    placement.submit(call("old", spec(1, "L4"), at=1.0))
    assert started(placement) == ["old"]


def test_a_higher_priority_starts_first() -> None:
    placement = cluster(n={"L4": 1})
    placement.submit(call("low", spec(1, "L4"), at=1.0))
    placement.submit(call("high", spec(1, "L4"), at=2.0, priority=5))
    assert started(placement) == ["high"]


def test_a_blocked_gpu_call_does_not_hold_up_calls_without_gpus() -> None:
    placement = cluster(n={"L4": 1}, plain={})
    placement.occupy("old", "n", spec(1, "L4"), "L4", 0.0, None, "bob")
    placement.submit(call("gpu", spec(1, "L4"), at=1.0))
    placement.submit(call("cpu", spec(), at=2.0))
    assert started(placement) == ["cpu"]


def test_a_single_call_of_one_user_starts_next_beside_ten_thousand_of_another() -> None:
    placement = cluster(n={"L4": 4})
    for number in range(10_000):
        placement.submit(call(f"a{number}", spec(1, "L4"), "ann", at=number))
    running = started(placement)
    placement.submit(call("b", spec(1, "L4"), "bob", at=20_000))
    assert started(placement) == []
    placement.release(running[0])
    assert started(placement) == ["b"]


# --- reservations


def blocked_by_a_large_call(large: ComputeSpec, first_ends: float | None, second_ends: float | None) -> Placement:
    """Four GPUs: one free, one used until `first_ends`, two until `second_ends`, and `large` waiting for them."""
    placement = cluster(n={"L4": 4})
    placement.occupy("first", "n", spec(1, "L4"), "L4", 0.0, first_ends, "x")
    placement.occupy("second", "n", spec(2, "L4"), "L4", 0.0, second_ends, "x")
    placement.submit(call("large", large, at=1.0))
    return placement


def test_a_later_call_that_would_delay_the_blocked_one_does_not_start() -> None:
    placement = blocked_by_a_large_call(spec(4, "L4"), 100.0, 100.0)
    placement.submit(call("endless", spec(1, "L4"), at=2.0))
    placement.submit(call("long", spec(1, "L4"), at=3.0, timeout=101.0))
    assert started(placement) == []
    assert placement.reservations() == {"large": "n"}


def test_a_later_call_that_ends_in_time_starts() -> None:
    placement = blocked_by_a_large_call(spec(4, "L4"), 100.0, 100.0)
    placement.submit(call("short", spec(1, "L4"), at=2.0, timeout=100.0))
    assert started(placement) == ["short"]


def test_a_later_call_that_fits_beside_the_blocked_one_starts() -> None:
    placement = blocked_by_a_large_call(spec(3, "L4"), None, 50.0)
    placement.submit(call("endless", spec(1, "L4"), at=2.0))
    assert started(placement) == []
    placement = blocked_by_a_large_call(spec(2, "L4"), 50.0, None)
    placement.submit(call("endless", spec(1, "L4"), at=2.0))
    assert started(placement) == []
    placement = blocked_by_a_large_call(spec(2, "L4"), None, 50.0)
    placement.submit(call("endless", spec(1, "L4"), at=2.0))
    assert started(placement) == ["endless"]


def test_the_blocked_call_starts_when_its_node_is_free() -> None:
    placement = blocked_by_a_large_call(spec(4, "L4"), None, None)
    placement.submit(call("small", spec(1, "L4"), at=2.0))
    assert started(placement) == []
    placement.release("first")
    placement.release("second")
    assert started(placement, 1.0) == ["large"]
    assert placement.reservations() == {}


def test_a_call_that_was_passed_often_goes_first_within_its_priority_only() -> None:
    placement = cluster(n={"L4": 4})
    placement.submit(call("first", spec(2, "L4"), timeout=1.0))
    placement.place(0.0)
    placement.submit(call("patient", spec(4, "L4"), at=0.5))
    for number in range(2 * PASSES_BEFORE_OVERDUE):
        # Each ends in time, so it passes the blocked Call by right.
        placement.submit(call(f"short-{number}", spec(1, "L4"), at=1.0, timeout=0.1))
        assert started(placement, 0.6) == [f"short-{number}"]
        placement.release(f"short-{number}")
    assert placement.reservations() == {"patient": "n"}
    placement.submit(call("peer", spec(2, "L4"), "bob", at=2.0))
    assert started(placement, 0.7) == []
    placement.submit(call("urgent", spec(2, "L4"), "bob", at=2.0, priority=1))
    assert started(placement, 0.7) == ["urgent"]


def test_an_urgent_call_takes_over_the_reservation_of_a_lesser_one() -> None:
    placement = cluster(n={"L4": 4})
    placement.submit(call("first", spec(2, "L4")))
    placement.submit(call("lesser", spec(4, "L4"), at=1.0))
    placement.submit(call("small", spec(1, "L4"), "bob", at=2.0))
    assert started(placement) == ["first", "small"]
    placement.submit(call("urgent", spec(4, "L4"), at=3.0, priority=1))
    placement.submit(call("last", spec(1, "L4"), "eve", at=3.0, timeout=1.0))
    placement.place(3.0)
    assert placement.reservations() == {"urgent": "n"}


def test_a_call_that_no_ready_node_could_hold_reserves_nothing() -> None:
    placement = cluster(n={"L4": 4})
    add_node(placement, "away", {"L4": 8}, condition=NodeCondition.UNREACHABLE)
    placement.submit(call("large", spec(8, "L4"), at=1.0))
    placement.submit(call("small", spec(1, "L4"), at=2.0))
    assert started(placement) == ["small"]
    assert placement.reservations() == {}


def test_withdrawing_the_blocked_call_lets_the_others_start() -> None:
    placement = blocked_by_a_large_call(spec(4, "L4"), None, None)
    placement.submit(call("small", spec(1, "L4"), at=2.0))
    placement.place(0.0)
    placement.withdraw("large")
    assert started(placement) == ["small"]


def test_a_reservation_ends_with_its_node_taking_calls() -> None:
    placement = blocked_by_a_large_call(spec(4, "L4"), None, None)
    placement.submit(call("small", spec(1, "L4"), at=2.0))
    placement.place(0.0)
    add_node(placement, "n", {"L4": 4}, condition=NodeCondition.DRAINING)
    assert placement.reservations() == {}


# --- what users read


def test_a_waiting_call_says_what_is_free_where_and_its_place() -> None:
    placement = cluster(**{"gpu-1": {"L4": 4}})
    add_node(placement, "gpu-2", {"L4": 4}, condition=NodeCondition.DRAINING)
    placement.occupy("old", "gpu-1", spec(3, "L4"), "L4", 0.0, None, "x")
    placement.submit(call("first", spec(2, "L4"), at=1.0))
    placement.submit(call("second", spec(2, "L4"), at=2.0))
    assert placement.place(0.0) == []
    assert placement.pending_reason("second", 0.0) == (
        "waiting for 2 x L4: gpu-1 has 1 of 4 free, gpu-2 is draining; 2nd in the queue"
    )


def test_the_reason_names_the_cpus_when_gpus_are_free() -> None:
    placement = cluster(n={"L4": 4})
    placement.occupy("old", "n", spec(cpus=60), "", 0.0, None, "x")
    placement.submit(call("c", spec(1, "L4", cpus=8)))
    placement.place(0.0)
    assert "n has 4 of 64 CPUs free" in placement.pending_reason("c", 0.0)


def test_the_reason_names_the_call_for_which_a_node_is_held() -> None:
    placement = blocked_by_a_large_call(spec(4, "L4"), None, None)
    placement.submit(call("small", spec(1, "L4"), at=2.0))
    placement.place(0.0)
    assert "n is held for Call large" in placement.pending_reason("small", 0.0)


def test_the_reason_never_names_the_call_of_another_user() -> None:
    placement = blocked_by_a_large_call(spec(4, "L4"), None, None)
    placement.submit(call("small", spec(1, "L4"), owner="bob", at=2.0))
    placement.place(0.0)
    reason = placement.pending_reason("small", 0.0)
    assert "large" not in reason
    assert "n is held for a Call of another user" in reason


def test_the_reason_counts_nodes_that_it_does_not_name() -> None:
    placement = cluster(**{f"n{number:02}": {"L4": 1} for number in range(15)})
    for number in range(15):
        placement.occupy(f"old{number}", f"n{number:02}", spec(1, "L4"), "L4", 0.0, None, "x")
    placement.submit(call("c", spec(1, "L4")))
    placement.place(0.0)
    assert "and 12 more; 1st in the queue" in placement.pending_reason("c", 0.0)


def test_asking_why_a_call_waits_that_does_not_is_an_error() -> None:
    with pytest.raises(KeyError, match="c does not wait"):
        Placement().pending_reason("c", 0.0)


def test_an_unknown_accelerator_is_answered_with_those_on_offer() -> None:
    placement = cluster(a={"L4": 4}, b={"A100-80GB": 8})
    unsupported = placement.check_supported(spec(1, "H100"), {})
    assert unsupported is not None
    assert "1 x H100" in unsupported.message
    assert "offer A100-80GB, L4" in unsupported.message


def test_a_call_that_is_too_large_is_answered_with_the_nearest_node_and_what_it_lacks() -> None:
    placement = cluster(a={"L4": 4}, b={"L4": 2})
    unsupported = placement.check_supported(spec(4, "L4", cpus=96), {})
    assert unsupported is not None
    assert "the nearest, a, has 64 of the 96 CPUs" in unsupported.message


@pytest.mark.parametrize("condition", list(NodeCondition))
def test_a_node_in_any_condition_counts_as_registered(condition: NodeCondition) -> None:
    placement = Placement()
    add_node(placement, "n", {"L4": 4}, condition=condition)
    assert placement.check_supported(spec(4, "L4"), {}) is None


def test_without_nodes_the_answer_says_so() -> None:
    unsupported = Placement().check_supported(spec(), {})
    assert unsupported is not None
    assert "no node has registered yet" in unsupported.message


def test_labels_that_no_node_carries_are_named() -> None:
    unsupported = cluster(n={}).check_supported(spec(), {"zone": "x"})
    assert unsupported is not None
    assert "zone=x" in unsupported.message


def test_a_spec_that_names_an_accelerator_and_wants_none_is_refused() -> None:
    with pytest.raises(ValueError, match="accelerator_count"):
        ComputeSpec(1, GIB, "L4", 0)
