"""`Placement`: the one object that the live scheduler and the simulator drive with events and ask for assignments.

It keeps the accounts of nodes and owners, lets the queues say who is next, the nodes say where, and reservations
say who has to hold back. It does not talk to anyone, keeps nothing on disk and never reads a clock.

What bounds a wait. Whenever a Call starts that has no better claim than the oldest Call of a queue that could have
used the same node, that queue counts it. At `PASSES_BEFORE_HOLDING` the front of that queue holds a reservation even
against other classes; at `PASSES_BEFORE_OVERDUE` its oldest Call goes before every other Call of its priority, and its
reservation holds against all of them. Then it waits for the Calls that run on its node, and for those of a higher
priority: what an operator puts first goes first, however long the others have waited.
"""

import math
from collections.abc import Iterator, Mapping
from itertools import count, islice

from outerproduct_scheduler.placement import explain
from outerproduct_scheduler.placement.nodes import Node, Nodes, Shape, Tenant
from outerproduct_scheduler.placement.queues import (
    ANY_ACCELERATOR,
    NO_ACCELERATOR,
    PASSES_BEFORE_OVERDUE,
    Opening,
    Queue,
    Reach,
    Shares,
    Waiting,
    class_of,
    precedes,
)
from outerproduct_scheduler.placement.ranking import Demand, Rank
from outerproduct_scheduler.placement.reservations import Reservation, outlook
from outerproduct_scheduler.placement.types import (
    Assignment,
    ComputeSpec,
    NodeCapacity,
    NodeCondition,
    Unsupported,
    WaitingCall,
)

# Another class may use the CPUs of a node a few times before a blocked Call holds on to it: most blocked Calls start
# before that, and choosing a node to hold costs more than placing a Call.
PASSES_BEFORE_HOLDING = 8
# A node held for a large Call runs emptier, and every held node is looked at apart. So a class holds one node, and
# one more for this many nodes, up to a few.
NODES_PER_RESERVATION = 32
MOST_RESERVATIONS_PER_CLASS = 2
# Nodes looked at when choosing where to hold; those with most free come first, and the best is among them.
RESERVATION_CANDIDATES = 8


class Placement:
    """Decides which node each waiting Call goes to. Not thread-safe; one event loop or thread drives it."""

    def __init__(self) -> None:
        self._demand = Demand()
        self._nodes = Nodes(self._demand)
        self._shares = Shares()
        self._waiting: dict[str, Waiting] = {}
        self._node_of: dict[str, Node] = {}
        self._queues: dict[tuple[str, int], Queue] = {}
        self._reservations: dict[str, Reservation] = {}
        self._held_fits_of: dict[Shape, list[tuple[Rank, str, str, Reservation]]] = {}
        self._held_fits_version = -1
        self._examined = 0
        self._numbers = count()
        # A reservation that ends while queues are served may let Calls start whose queue had its turn already.
        self._node_let_go = False
        # The nodes for whose sake shapes were opened last.
        self._grown: list[Node] = []
        # Blocked Calls that found no node to hold; whatever starts meanwhile, they find none until one is let go.
        self._without_hold: set[Waiting] = set()

    # --- nodes

    def set_node(self, name: str, capacity: NodeCapacity, condition: NodeCondition, labels: Mapping[str, str]) -> None:
        """Register a node or change it. A node smaller than its use keeps its Calls and takes no new ones."""
        node = self._nodes.get_or_add(name)
        known = (node.registered, node.capacity, node.condition, node.labels)
        if known == (True, capacity, condition, labels):
            return
        if node.capacity != capacity:
            node.resize(capacity)
        node.registered, node.condition, node.labels = True, condition, dict(labels)
        self._drop_reservation_on(node)
        self._nodes.touch(node, grew=True)
        self._topology_changed()

    def remove_node(self, name: str) -> None:
        """Forget a node; Calls that it holds stay counted until they are released. Unknown names are ignored."""
        node = self._nodes.by_name.get(name)
        if node is None or not node.registered:
            return
        self._drop_reservation_on(node)
        node.registered = False
        node.resize(NodeCapacity(0, 0))
        self._nodes.touch(node, grew=True)
        self._forget_if_empty(node)
        self._topology_changed()

    def free(self, name: str) -> NodeCapacity:
        """What the node has left; negative where it shrank below its use. Raises `KeyError` for an unknown name."""
        node = self._node(name)
        return NodeCapacity(node.cpus, node.memory_bytes, dict(node.accelerators))

    def used(self, name: str) -> NodeCapacity:
        """What the node's Calls hold. Raises `KeyError` for an unknown name."""
        return self._node(name).used()

    def reservations(self) -> dict[str, str]:
        """The blocked Calls that hold a node, with its name."""
        return {call_id: reservation.node.name for call_id, reservation in self._reservations.items()}

    # --- Calls

    def submit(self, call: WaitingCall) -> None:
        """Let a Call wait. Raises `ValueError` if it waits already or holds resources."""
        if call.call_id in self._waiting or call.call_id in self._node_of:
            raise ValueError(f"Call {call.call_id} was submitted twice: release or withdraw it first")
        shape = self._nodes.shape(call.spec, call.labels, call.avoid_nodes)
        self._nodes.shape_waits(shape)
        key = (class_of(call.spec), call.priority)
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = Queue(*key)
        waiting = Waiting(call, shape, (call.submitted_at, next(self._numbers)), queue)
        shape.shortest_timeout = min(shape.shortest_timeout, waiting.timeout_seconds)
        self._waiting[call.call_id] = waiting
        queue.add(waiting, self._shares.of(call.owner))
        self._demand.observe(call.spec)

    def withdraw(self, call_id: str) -> bool:
        """Take a waiting Call out; False if it does not wait."""
        waiting = self._waiting.get(call_id)
        if waiting is None:
            return False
        self._leave(waiting)
        return True

    def occupy(  # noqa: PLR0917 - an Attempt as the database and the agents know it
        self,
        call_id: str,
        node: str,
        spec: ComputeSpec,
        accelerator: str,
        started_at: float,
        timeout_seconds: float | None,
        owner: str,
    ) -> None:
        """Count a Call that is known to hold resources on a node, whether or not they fit or the node is registered.

        `accelerator` is the concrete type. Raises `ValueError` if it is counted on another node.
        """
        holder = self._node_of.get(call_id)
        if holder is not None:
            if holder.name == node:
                return
            raise ValueError(f"Call {call_id} runs on {holder.name} and cannot run on {node} too: release it first")
        self.withdraw(call_id)
        ends_at = _ends_at(started_at, timeout_seconds)
        tenant = Tenant(call_id, spec, accelerator, owner, ends_at, next(self._numbers))
        self._take(self._nodes.get_or_add(node), tenant)

    def release(self, call_id: str) -> None:
        """Take back the resources of a Call that ended. Reports may repeat, so an unknown Call is ignored."""
        node = self._node_of.pop(call_id, None)
        if node is None:
            return
        tenant = node.give_back(call_id)
        self._nodes.touch(node, grew=True)
        self._share_changed(tenant.owner, tenant.spec, tenant.accelerator, -1)
        self._forget_if_empty(node)

    # --- decisions

    def place(self, now: float) -> list[Assignment]:
        """Assign every Call that may start now, in order. `now` is in seconds, on the clock of `started_at`."""
        if self._nodes.settle():
            for owner in self._shares.set_totals(self._nodes.totals):
                self._move_owner(owner)
        assignments: list[Assignment] = []
        self._node_let_go = True
        while self._node_let_go:
            self._open_shapes_of_grown_nodes(now)
            self._node_let_go = False
            self._without_hold.clear()
            for queue in sorted((q for q in self._queues.values() if q.open_shapes), key=_queue_order):
                assignments += self._start_all(queue, now)
        for key in [key for key, queue in self._queues.items() if not queue.line.live]:
            del self._queues[key]
        return assignments

    def pending_reason(self, call_id: str, now: float) -> str:
        """Why the Call waits, true at `now`. Raises `KeyError` for a Call that does not wait."""
        waiting = self._waiting.get(call_id)
        if waiting is None:
            raise KeyError(f"Call {call_id} does not wait for placement")
        return explain.pending_reason(
            waiting, self._nodes, self._reservations, explain.place_in_queue(waiting, self._queues.values()), now
        )

    def check_supported(self, spec: ComputeSpec, labels: Mapping[str, str]) -> Unsupported | None:
        """None if some registered node, in whatever condition, could hold such a Call when empty."""
        return explain.unsupported(spec, labels, self._nodes)

    def _start_all(self, queue: Queue, now: float) -> list[Assignment]:
        """Start what may start of one queue, and whatever of its priority became overdue meanwhile."""
        assignments = []
        while assignment := self._start_overdue(queue.priority, now) or self._start_next(queue, now):
            assignments.append(assignment)
        queue.open_shapes.clear()
        return assignments

    def _start_overdue(self, priority: int, now: float) -> Assignment | None:
        """Try the oldest Calls of this priority that were passed too often, before any other of it."""
        overdue = [
            queue.line.head
            for queue in self._queues.values()
            if queue.passed >= PASSES_BEFORE_OVERDUE and queue.priority == priority and queue.line.head is not None
        ]
        if not overdue:
            return None
        for waiting in sorted(overdue, key=_waiting_age):
            if waiting.shape in waiting.queue.open_shapes and (found := self._find(waiting, now)) is not None:
                return self._assign(waiting, *found, now)
            if waiting.call.call_id not in self._reservations and waiting not in self._without_hold:
                self._hold(waiting, now)
        return None

    def _start_next(self, queue: Queue, now: float) -> Assignment | None:
        """Start the first Call in the queue's order that may start; those that turn out blocked are left behind."""
        queue.close_shapes_that_fit_none_of(self._grown)
        openings: dict[Shape, Opening | None] = {}

        def opening_of(shape: Shape) -> Opening | None:
            if shape not in openings:
                openings[shape] = self._opening(queue, shape, now)
            return openings[shape]

        for waiting in queue.candidates(opening_of):
            found = self._find(waiting, now)
            if found is not None and self._hold_for_those_passed(waiting, found[0], now):
                openings.clear()
                found = self._find(waiting, now)
            if found is not None:
                return self._assign(waiting, *found, now)
        return None

    def _opening(self, queue: Queue, shape: Shape, now: float) -> Opening | None:
        """Which of the queue's Calls of this shape may start now; None if none may."""
        if self._nodes.best(shape) is not None:
            return Opening(math.inf, ())
        longest, own = -math.inf, []
        for _, _, accelerator, reservation in self._held_fits(shape):
            holder = reservation.holder
            if queue.priority > holder.queue.priority:
                return Opening(math.inf, ())
            if holder.queue is queue:
                own.append(holder)
            longest = max(longest, reservation.longest_run(shape.spec, accelerator, now))
        if not own and longest < shape.shortest_timeout:
            return None
        return Opening(longest, own)

    def _find(self, waiting: Waiting, now: float) -> tuple[Node, str] | None:
        """The best node where the Call fits and may start."""
        best: tuple[Rank, str, Node, str] | None = None
        unreserved = self._nodes.best(waiting.shape)
        if unreserved is not None:
            rank, node, accelerator = unreserved
            best = (rank, node.name, node, accelerator)
        for rank, name, accelerator, reservation in self._held_fits(waiting.shape):
            if (best is None or (rank, name) < best[:2]) and (
                precedes(waiting, reservation.holder)
                or waiting.timeout_seconds <= reservation.longest_run(waiting.shape.spec, accelerator, now)
            ):
                best = (rank, name, reservation.node, accelerator)
        return None if best is None else best[2:]

    def _held_fits(self, shape: Shape) -> list[tuple[Rank, str, str, Reservation]]:
        """The held nodes where the shape fits, whoever may use them; remembered until a node changes."""
        if self._held_fits_version != self._nodes.version:
            self._held_fits_version = self._nodes.version
            self._held_fits_of.clear()
        fits = self._held_fits_of.get(shape)
        if fits is None:
            fits = self._held_fits_of[shape] = [
                (fit[0], reservation.node.name, fit[1], reservation)
                for reservation in self._reservations.values()
                if shape.cpus <= reservation.node.cpus and (fit := self._nodes.fit(shape, reservation.node)) is not None
            ]
        return fits

    # --- reservations

    def _hold_for_those_passed(self, waiting: Waiting, node: Node, now: float) -> bool:
        """Give reservations to blocked Calls that this one is about to pass; True if the node found is now held."""
        for other in list(self._those_passed(waiting)):
            if other.call.call_id not in self._reservations and other not in self._without_hold:
                self._hold(other, now)
        return node.reserved

    def _those_passed(self, waiting: Waiting) -> Iterator[Waiting]:
        """Blocked Calls that deserve a node before this one goes: those of other classes that were passed often,
        those first that were passed most, then the front of its own class."""
        own, patient = [], []
        for queue in self._queues.values():
            if queue.priority < waiting.queue.priority or queue.line.head is None:
                continue
            if queue.class_name == waiting.queue.class_name:
                own.append(queue)
            elif queue.passed >= PASSES_BEFORE_HOLDING and queue.line.head.shape not in queue.open_shapes:
                patient.append(queue)
        for queue in sorted(patient, key=_passed_most):
            if queue.line.head is not None:
                yield queue.line.head
        for queue in sorted(own, key=_queue_order):
            for front in islice(queue.in_order(), self._allowed_reservations()):
                if front is waiting or (queue is waiting.queue and queue.precedes(waiting, front)):
                    break
                yield front

    def _allowed_reservations(self) -> int:
        return min(MOST_RESERVATIONS_PER_CLASS, 1 + len(self._nodes.by_name) // NODES_PER_RESERVATION)

    def _hold(self, waiting: Waiting, now: float) -> None:
        """Reserve a node for a blocked Call if its class may hold one more, and any node could hold it."""
        self._without_hold.add(waiting)
        peers = [r for r in self._reservations.values() if r.holder.queue.class_name == waiting.queue.class_name]
        if len(peers) >= self._allowed_reservations():
            weakest = min(peers, key=_claim_of_holder)
            if _claim(waiting) <= _claim(weakest.holder):
                return
            self._drop_reservation(weakest)
        best: tuple[tuple[float, str], Node] | None = None
        looked_at = 0
        for node in self._nodes.freest(waiting.shape):
            if node.reserved or not self._nodes.may_hold(waiting.shape, node):
                continue
            expected = outlook(waiting.shape, node, now)
            if expected is not None and (best is None or expected.starts_at < best[0][0]):
                best = ((expected.starts_at, node.name), node)
            looked_at += 1
            if looked_at >= RESERVATION_CANDIDATES:
                break
        if best is not None:
            node = best[1]
            node.reserved = True
            self._reservations[waiting.call.call_id] = Reservation(waiting, node)
            self._nodes.touch(node, grew=False)

    def _drop_reservation(self, reservation: Reservation) -> None:
        del self._reservations[reservation.holder.call.call_id]
        reservation.node.reserved = False
        self._node_let_go = True
        self._without_hold.clear()
        self._nodes.touch(reservation.node, grew=True)

    def _drop_reservation_on(self, node: Node) -> None:
        if node.reserved:
            self._drop_reservation(next(r for r in self._reservations.values() if r.node is node))

    # --- accounts

    def _assign(self, waiting: Waiting, node: Node, accelerator: str, now: float) -> Assignment:
        call = waiting.call
        self._count_passes(waiting, node)
        self._leave(waiting)
        ends_at = _ends_at(now, call.timeout_seconds)
        tenant = Tenant(call.call_id, call.spec, accelerator, call.owner, ends_at, next(self._numbers))
        self._take(node, tenant)
        return Assignment(call.call_id, node.name, accelerator, call.spec)

    def _count_passes(self, waiting: Waiting, node: Node) -> None:
        """Note with each queue that its oldest Call was passed by this one."""
        for queue in self._queues.values():
            oldest = queue.line.head
            if oldest is None or oldest is waiting or queue.priority < waiting.queue.priority:
                continue
            if queue is waiting.queue and oldest.call.owner == waiting.call.owner and waiting.age < oldest.age:
                continue
            if self._nodes.may_hold(oldest.shape, node):
                queue.passed += 1

    def _take(self, node: Node, tenant: Tenant) -> None:
        node.take(tenant)
        self._node_of[tenant.call_id] = node
        self._nodes.touch(node, grew=False)
        self._share_changed(tenant.owner, tenant.spec, tenant.accelerator, 1)

    def _leave(self, waiting: Waiting) -> None:
        call = waiting.call
        del self._waiting[call.call_id]
        reservation = self._reservations.get(call.call_id)
        if reservation is not None:
            self._drop_reservation(reservation)
        waiting.queue.remove(waiting, self._shares.of(call.owner))
        self._nodes.shape_left(waiting.shape)

    def _share_changed(self, owner: str, spec: ComputeSpec, accelerator: str, sign: int) -> None:
        self._shares.add(owner, spec, accelerator, sign)
        self._move_owner(owner)

    def _move_owner(self, owner: str) -> None:
        share = self._shares.of(owner)
        for queue in self._queues.values():
            queue.move_owner(owner, share)

    def _topology_changed(self) -> None:
        self._nodes.topology_changed()
        for queue in self._queues.values():
            for shape in queue.shapes:
                if shape.avoid:
                    queue.open_shapes[shape] = Reach.ANYWHERE

    def _open_shapes_of_grown_nodes(self, now: float) -> None:
        nodes = self._nodes
        grown = self._grown = [node for node in nodes.grown.values() if node.registered]
        nodes.grown.clear()
        held = {r.node.name: r for r in self._reservations.values() if r.node in grown}
        for queue in self._queues.values():
            accepts = next(iter(queue.shapes)).accepts if queue.class_name and queue.shapes else None
            if accepts and not any(n > 0 and accepts(kind) for node in grown for kind, n in node.accelerators.items()):
                # None of the grown nodes has what the class names, so its indexes need not look at them.
                for shape in queue.shapes:
                    if shape.seen >= self._examined and shape not in queue.open_shapes:
                        shape.seen = nodes.version
                continue
            for shape in queue.shapes:
                if shape in queue.open_shapes:
                    continue
                for node in grown:
                    if shape.cpus > node.cpus or (types := shape.fitting_accelerators(node)) is None:
                        continue
                    reservation = held.get(node.name)
                    if reservation is None or self._may_use(queue, shape, types, reservation, now):
                        queue.open_shapes[shape] = Reach.GROWN_NODES
                        break
                else:
                    # None of the grown nodes is a candidate, so its index need not look at them.
                    if shape.seen >= self._examined:
                        shape.seen = nodes.version
        self._examined = nodes.version

    def _may_use(
        self, queue: Queue, shape: Shape, accelerators: list[str], reservation: Reservation, now: float
    ) -> bool:
        """Whether any Call of the shape in the queue might start on the held node; False only if none may."""
        other = reservation.holder.queue
        if queue is other or queue.priority > other.priority:
            return True
        expected = reservation.outlook(now)
        return (
            expected is None
            or (shape.shortest_timeout < math.inf and now + shape.shortest_timeout <= expected.starts_at)
            or any(expected.leaves_room_for(shape.spec, name) for name in accelerators)
        )

    def _forget_if_empty(self, node: Node) -> None:
        if not node.registered and not node.tenants:
            self._nodes.forget(node)

    def _node(self, name: str) -> Node:
        node = self._nodes.by_name.get(name)
        if node is None:
            raise KeyError(f"node {name} is not registered")
        return node


def _ends_at(started_at: float, timeout_seconds: float | None) -> float:
    return math.inf if timeout_seconds is None else started_at + timeout_seconds


def _claim(waiting: Waiting) -> tuple[int, bool]:
    """How strong a blocked Call's claim to one of its class's reservations is; among equals who has one keeps it."""
    return waiting.queue.priority, waiting.is_overdue()


def _claim_of_holder(reservation: Reservation) -> tuple[tuple[int, bool], tuple[float, int]]:
    seconds, number = reservation.holder.age
    return _claim(reservation.holder), (-seconds, -number)


def _waiting_age(waiting: Waiting) -> tuple[float, int]:
    return waiting.age


def _passed_most(queue: Queue) -> tuple[int, str, int]:
    return -queue.passed, queue.class_name, queue.priority


def _queue_order(queue: Queue) -> tuple[int, int, str]:
    """Higher priorities first; then Calls that name a type, those that take any, those without GPUs, since the later
    ones have more nodes to choose from."""
    kind = {ANY_ACCELERATOR: 1, NO_ACCELERATOR: 2}.get(queue.class_name, 0)
    return -queue.priority, kind, queue.class_name
