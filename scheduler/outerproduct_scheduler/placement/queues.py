"""Who is next: one queue per class and priority, owners in fair order, first come first served within an owner.

A class is the accelerator a Call names: a type, any type, or none. Classes do not block each other. Within a queue
the owner with the smallest dominant share of the cluster goes first (dominant resource fairness, Ghodsi et al.,
NSDI 2011), and equal owners by age. Waiting Calls of one shape stand together, so that a shape that fits nowhere is
passed over whole. Which node a Call gets is decided elsewhere.
"""

import bisect
import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from outerproduct_scheduler.placement.nodes import Node, Shape
from outerproduct_scheduler.placement.types import ComputeSpec, NodeCapacity, WaitingCall

Age = tuple[float, int]
# An owner's place in a queue: its dominant share, the age of its oldest Call, its name.
OwnerKey = tuple[float, Age, str]

# Fairness and luck may put a Call back this often; a user of a busy class sees it as a small unfairness.
PASSES_BEFORE_OVERDUE = 32

# Asking so few nodes whether a shape fits is cheaper than asking its index.
FEW_NODES = 4

ANY_ACCELERATOR = "any"
NO_ACCELERATOR = ""


def class_of(spec: ComputeSpec) -> str:
    """Name of the class whose queues the Call waits in."""
    if not spec.accelerator_count:
        return NO_ACCELERATOR
    return spec.accelerator.casefold() or ANY_ACCELERATOR


@dataclass(slots=True, eq=False)
class Waiting:
    """A Call in its queue. `live` is False once it has left, wherever references to it remain."""

    call: WaitingCall
    shape: Shape
    age: Age
    queue: "Queue"
    live: bool = True

    timeout_seconds: float = field(init=False)
    """The bound on run time, infinite where there is none."""

    def __post_init__(self) -> None:
        timeout = self.call.timeout_seconds
        self.timeout_seconds = math.inf if timeout is None else timeout

    def is_overdue(self) -> bool:
        """Whether it is the oldest of its queue and was passed too often."""
        return self.queue.passed >= PASSES_BEFORE_OVERDUE and self.queue.line.head is self


@dataclass(frozen=True, slots=True)
class Opening:
    """Which Calls of one shape and queue may start: those that run no longer than `longest_run` seconds (all where
    it is infinite), and those that go before one of `holders`, who hold reservations where the shape fits."""

    longest_run: float
    holders: Sequence[Waiting]

    def admits(self, waiting: Waiting) -> bool:
        """Whether the Call is one of these."""
        return waiting.timeout_seconds <= self.longest_run or any(precedes(waiting, h) for h in self.holders)

    def ends_before(self, key: "OwnerKey", shape: Shape) -> bool:
        """Whether it admits no Call of the owner with this place in the order, or of any later one."""
        return self.longest_run < shape.shortest_timeout and not any(
            (holder_key := h.queue.owners[h.call.owner].key) is not None and key <= holder_key for h in self.holders
        )


def precedes(waiting: Waiting, holder: Waiting) -> bool:
    """Whether the holder's reservation does not bind the Call: it is its own, or the Call is before it in the order."""
    if waiting is holder:
        return True
    if waiting.queue.priority != holder.queue.priority:
        return waiting.queue.priority > holder.queue.priority
    return waiting.queue is holder.queue and not holder.is_overdue() and waiting.queue.precedes(waiting, holder)


class Line:
    """Waiting Calls by age. One that left stays in the heap until it comes up or such entries are the majority.

    `head` is the oldest, None where there is none.
    """

    __slots__ = ("_heap", "head", "live")

    def __init__(self) -> None:
        self._heap: list[tuple[Age, Waiting]] = []
        self.head: Waiting | None = None
        self.live = 0

    def add(self, waiting: Waiting) -> None:
        """Put the Call at the place that its age gives it."""
        heapq.heappush(self._heap, (waiting.age, waiting))
        self.head = self._heap[0][1]
        self.live += 1

    def left(self) -> None:
        """Count one that is no longer live."""
        self.live -= 1
        heap = self._heap
        if len(heap) > 2 * self.live + 16:
            heap = self._heap = [entry for entry in heap if entry[1].live]
            heapq.heapify(heap)
        while heap and not heap[0][1].live:
            heapq.heappop(heap)
        self.head = heap[0][1] if heap else None

    def oldest(self) -> Iterator[Waiting]:
        """All of them in order, as long as nothing joins or leaves."""
        if self.head is None:
            return
        yield self.head
        # Walks down the heap from its root, so it costs by what it returns and not by the length of the line.
        heap, front = self._heap, [(self._heap[0][0], 0)]
        while front:
            _, index = heapq.heappop(front)
            waiting = heap[index][1]
            if waiting.live and index:
                yield waiting
            for child in (2 * index + 1, 2 * index + 2):
                if child < len(heap):
                    heapq.heappush(front, (heap[child][0], child))

    def ahead_of(self, waiting: Waiting, limit: int) -> int:
        """How many live ones are older, counted up to `limit`."""
        count = 0
        for age, other in self._heap:
            if other.live and age < waiting.age:
                count += 1
                if count >= limit:
                    break
        return count


class OwnerLine:
    """One owner's Calls in one queue: all by age, and by shape and length of run."""

    __slots__ = ("by_shape", "key", "line")

    def __init__(self) -> None:
        self.line = Line()
        self.by_shape: dict[Shape, dict[int, Line]] = {}
        self.key: OwnerKey | None = None


def run_length(timeout_seconds: float | None) -> int:
    """Group of Calls whose bounds on run time are within a factor of two, since backfill may admit the shorter ones
    and not the longer; -1 stands for no bound."""
    return -1 if timeout_seconds is None else int(timeout_seconds).bit_length()


class Reach(Enum):
    """Where a shape that is open may fit: on any node, or only on those that grew since placement last looked."""

    ANYWHERE = "anywhere"
    GROWN_NODES = "grown nodes"


class Queue:
    """The waiting Calls of one class and priority.

    `open_shapes` are those that may fit somewhere: placement asks for these only. `passed` counts the Calls that
    started, with no better claim than fairness or luck, since the oldest Call here became the oldest.
    """

    def __init__(self, class_name: str, priority: int) -> None:
        self.class_name = class_name
        self.priority = priority
        self.line = Line()
        self.owners: dict[str, OwnerLine] = {}
        self.shapes: dict[Shape, int] = {}
        self.open_shapes: dict[Shape, Reach] = {}
        self.passed = 0
        self._order: list[OwnerKey] = []

    def add(self, waiting: Waiting, share: float) -> None:
        """Let a Call join; `share` is its owner's dominant share."""
        call = waiting.call
        owner = self.owners.get(call.owner)
        if owner is None:
            owner = self.owners[call.owner] = OwnerLine()
        oldest = self.line.head
        if oldest is not None and waiting.age < oldest.age:
            self.passed = 0
        self.line.add(waiting)
        owner.line.add(waiting)
        lines = owner.by_shape.setdefault(waiting.shape, {})
        length = run_length(call.timeout_seconds)
        line = lines.get(length)
        if line is None:
            line = lines[length] = Line()
        line.add(waiting)
        self.shapes[waiting.shape] = self.shapes.get(waiting.shape, 0) + 1
        self.open_shapes[waiting.shape] = Reach.ANYWHERE
        self.move_owner(call.owner, share)

    def remove(self, waiting: Waiting, share: float) -> None:
        """Let a Call leave."""
        if waiting is self.line.head:
            self.passed = 0
        waiting.live = False
        self.line.left()
        call, shape = waiting.call, waiting.shape
        owner = self.owners[call.owner]
        owner.line.left()
        length = run_length(call.timeout_seconds)
        lines = owner.by_shape[shape]
        lines[length].left()
        if not lines[length].live:
            del lines[length]
            if not lines:
                del owner.by_shape[shape]
        self.shapes[shape] -= 1
        if not self.shapes[shape]:
            del self.shapes[shape]
            self.open_shapes.pop(shape, None)
        self.move_owner(call.owner, share)

    def move_owner(self, name: str, share: float) -> None:
        """Put the owner where its share and its oldest Call say."""
        owner = self.owners.get(name)
        if owner is None:
            return
        oldest = owner.line.head
        key = None if oldest is None else (share, oldest.age, name)
        if key == owner.key:
            return
        if owner.key is not None:
            del self._order[bisect.bisect_left(self._order, owner.key)]
        if key is None:
            del self.owners[name]
        else:
            bisect.insort(self._order, key)
            owner.key = key

    def owners_in_order(self) -> Iterator[tuple[str, OwnerLine]]:
        """The owners, the one whose turn it is first."""
        return ((key[2], self.owners[key[2]]) for key in self._order)

    def close_shapes_that_fit_none_of(self, grown: Sequence[Node]) -> None:
        """Close the shapes that were opened for these nodes and fit there no longer."""
        if len(grown) > FEW_NODES:
            return
        closed = []
        for shape, reach in self.open_shapes.items():
            if reach is Reach.ANYWHERE:
                continue
            for node in grown:
                if shape.cpus <= node.cpus and shape.fitting_accelerators(node) is not None:
                    break
            else:
                closed.append(shape)
        for shape in closed:
            del self.open_shapes[shape]

    def candidates(self, opening_of: Callable[[Shape], Opening | None]) -> Iterator[Waiting]:
        """Calls that may start by their shape's opening, in order: of each line only the first, since the others are
        no better off. Shapes without an opening for anybody left are closed. Start anew after the order changed.
        """
        for key in self._order:
            if not self.open_shapes:
                return
            by_shape = self.owners[key[2]].by_shape
            few, many = (
                (by_shape, self.open_shapes) if len(by_shape) < len(self.open_shapes) else (self.open_shapes, by_shape)
            )
            firsts = [line.head for shape in few if shape in many for line in by_shape[shape].values() if line.head]
            firsts.sort(key=_age_of)
            for waiting in firsts:
                shape = waiting.shape
                if shape not in self.open_shapes:
                    continue
                opening = opening_of(shape)
                if opening is None or opening.ends_before(key, shape):
                    del self.open_shapes[shape]
                elif opening.admits(waiting):
                    yield waiting

    def precedes(self, first: Waiting, second: Waiting) -> bool:
        """Whether the first of two Calls of this queue is before the second in its order."""
        if first.call.owner == second.call.owner:
            return first.age < second.age
        first_key, second_key = self.owners[first.call.owner].key, self.owners[second.call.owner].key
        return first_key is not None and second_key is not None and first_key < second_key

    def in_order(self) -> Iterator[Waiting]:
        """The Calls in their order, one owner's after another's, as long as nothing changes."""
        for key in self._order:
            yield from self.owners[key[2]].line.oldest()


def _age_of(waiting: Waiting) -> Age:
    return waiting.age


class Shares:
    """What each owner holds, and its dominant share: the largest of its fractions of the cluster's resources."""

    def __init__(self) -> None:
        self._totals = NodeCapacity(0, 0)
        self._used: dict[str, tuple[int, int, dict[str, int]]] = {}
        self._shares: dict[str, float] = {}

    def set_totals(self, totals: NodeCapacity) -> list[str]:
        """Change what there is; returns the owners whose shares changed with it."""
        self._totals = totals
        for owner in self._used:
            self._shares[owner] = self._dominant(owner)
        return list(self._used)

    def add(self, owner: str, spec: ComputeSpec, accelerator: str, sign: int) -> None:
        """Count a Call that took (1) or gave back (-1) its resources."""
        cpus, memory_bytes, accelerators = self._used.get(owner, (0, 0, {}))
        cpus += sign * spec.cpus
        memory_bytes += sign * spec.memory_bytes
        if spec.accelerator_count:
            count = accelerators.get(accelerator, 0) + sign * spec.accelerator_count
            accelerators[accelerator] = count
            if not count:
                del accelerators[accelerator]
        if cpus or memory_bytes or accelerators:
            self._used[owner] = (cpus, memory_bytes, accelerators)
            self._shares[owner] = self._dominant(owner)
        else:
            self._used.pop(owner, None)
            self._shares.pop(owner, None)

    def of(self, owner: str) -> float:
        """The owner's dominant share."""
        return self._shares.get(owner, 0.0)

    def _dominant(self, owner: str) -> float:
        cpus, memory_bytes, accelerators = self._used[owner]
        totals = self._totals
        share = max(cpus / (totals.cpus or 1), memory_bytes / (totals.memory_bytes or 1))
        for name, count in accelerators.items():
            share = max(share, count / (totals.accelerators.get(name, 0) or count or 1))
        return share
