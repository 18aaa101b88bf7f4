"""What is free on which node, and the best node for each shape of Call.

A shape's candidates are a heap of (rank, node, version). A change of a node only gives it a new version and moves it
to the end of the list of recent changes; a shape catches up with that list when it is next asked, and drops entries
of older versions when they come up. So an event costs by the nodes it touched, whatever the number of nodes. Which
Call is next, and who holds reservations, is decided elsewhere; a reserved node is only left out of the heaps here.
"""

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from outerproduct_scheduler.accelerators import matches
from outerproduct_scheduler.placement.ranking import Demand, Rank, rank_cpu_call, rank_gpu_call
from outerproduct_scheduler.placement.types import ComputeSpec, NodeCapacity, NodeCondition

# Shapes without waiting Calls whose index is kept, since the next Call is likely to have one of them.
IDLE_SHAPES = 64
# Stands beside the accelerator types where nodes are filed by how much they have free.
CPUS = ""


@dataclass(slots=True)
class Tenant:
    """A Call that holds resources on a node. `ends_at` is infinite for one without a timeout."""

    call_id: str
    spec: ComputeSpec
    accelerator: str
    owner: str
    ends_at: float
    number: int


class Node:
    """One machine: its totals, what is free of them, and the Calls that hold the rest."""

    __slots__ = (
        "accelerators",
        "capacity",
        "condition",
        "cpus",
        "labels",
        "memory_bytes",
        "name",
        "registered",
        "reserved",
        "tenants",
        "version",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.registered = False
        self.capacity = NodeCapacity(0, 0)
        self.condition = NodeCondition.UNREACHABLE
        self.labels: Mapping[str, str] = {}
        self.cpus = 0
        self.memory_bytes = 0
        self.accelerators: dict[str, int] = {}
        self.tenants: dict[str, Tenant] = {}
        self.reserved = False
        self.version = 0

    def take(self, tenant: Tenant) -> None:
        """Give the Call its resources; the caller has checked that they fit, or must record that they do not."""
        self.tenants[tenant.call_id] = tenant
        self._change(tenant, -1)

    def give_back(self, call_id: str) -> Tenant:
        """Take the Call's resources back."""
        tenant = self.tenants.pop(call_id)
        self._change(tenant, 1)
        return tenant

    def resize(self, capacity: NodeCapacity) -> None:
        """Change the totals; what is free may become negative."""
        self.capacity = capacity
        self.cpus, self.memory_bytes = capacity.cpus, capacity.memory_bytes
        self.accelerators = dict(capacity.accelerators)
        for tenant in self.tenants.values():
            self._change(tenant, -1)

    def used(self) -> NodeCapacity:
        """What its Calls hold."""
        accelerators = {
            name: self.capacity.accelerators.get(name, 0) - free for name, free in self.accelerators.items()
        }
        return NodeCapacity(
            self.capacity.cpus - self.cpus, self.capacity.memory_bytes - self.memory_bytes, accelerators
        )

    def _change(self, tenant: Tenant, sign: int) -> None:
        spec = tenant.spec
        self.cpus += sign * spec.cpus
        self.memory_bytes += sign * spec.memory_bytes
        if spec.accelerator_count:
            free = self.accelerators.get(tenant.accelerator, 0) + sign * spec.accelerator_count
            self.accelerators[tenant.accelerator] = free
            if not free and tenant.accelerator not in self.capacity.accelerators:
                del self.accelerators[tenant.accelerator]


ShapeKey = tuple[ComputeSpec, frozenset[tuple[str, str]], frozenset[str]]


class Shape:
    """Everything about a Call that decides which nodes can hold it, with the index of those that can now."""

    __slots__ = (
        "avoid",
        "avoids",
        "cpus",
        "epoch",
        "heap",
        "key",
        "labels",
        "seen",
        "shortest_timeout",
        "spec",
        "takes",
        "waiting",
    )

    def __init__(self, key: ShapeKey) -> None:
        self.key = key
        self.spec, labels, self.avoid = key
        self.labels = tuple(labels)
        self.cpus = self.spec.cpus
        self.shortest_timeout = math.inf
        self.takes: dict[str, bool] = {}
        self.waiting = 0
        self.heap: list[tuple[Rank, str, int, str]] = []
        self.avoids: frozenset[str] = frozenset()
        self.seen = 0
        self.epoch = (-1, -1)

    def accepts(self, offered: str) -> bool:
        """Whether GPUs of this canonical type would do."""
        answer = self.takes.get(offered)
        if answer is None:
            answer = self.takes[offered] = matches(self.spec.accelerator, offered)
        return answer

    def allowed_on(self, node: Node) -> bool:
        """Whether the node carries the labels."""
        return not self.labels or all(node.labels.get(name) == value for name, value in self.labels)

    def could_fit(self, node: Node) -> bool:
        """Whether the empty node could hold it."""
        spec, capacity = self.spec, node.capacity
        if spec.cpus > capacity.cpus or spec.memory_bytes > capacity.memory_bytes or not self.allowed_on(node):
            return False
        if not spec.accelerator_count:
            return True
        for name, count in capacity.accelerators.items():
            if count >= spec.accelerator_count and self.accepts(name):
                return True
        return False

    def fitting_accelerators(self, node: Node) -> list[str] | None:
        """The types of which the node has enough free now ([""] for a Call without GPUs), or None if it lacks any
        resource. Looks at amounts only, not at labels or condition."""
        spec = self.spec
        if spec.cpus > node.cpus or spec.memory_bytes > node.memory_bytes:
            return None
        if not spec.accelerator_count:
            return [""]
        count = spec.accelerator_count
        return [name for name, free in node.accelerators.items() if free >= count and self.accepts(name)] or None


class Nodes:
    """All nodes, their shapes' indexes, and which nodes grew since placement last looked."""

    def __init__(self, demand: Demand) -> None:
        self.by_name: dict[str, Node] = {}
        self.grown: dict[str, Node] = {}
        self.totals = NodeCapacity(0, 0)
        self.topology = 0
        self._settled = 0
        self._demand = demand
        self._recent: dict[str, Node] = {}
        self.version = 0
        self._shapes: dict[ShapeKey, Shape] = {}
        self._idle: dict[ShapeKey, Shape] = {}
        self._by_free: dict[str, dict[int, dict[str, Node]]] = {}
        self._placed_in: dict[str, list[tuple[str, int]]] = {}

    def get_or_add(self, name: str) -> Node:
        """The node of that name; one that is not registered yet is made, so that Calls found on it are counted."""
        node = self.by_name.get(name)
        if node is None:
            node = self.by_name[name] = Node(name)
        return node

    def registered(self) -> Iterator[Node]:
        """The registered nodes, in a fixed order."""
        return (self.by_name[name] for name in sorted(self.by_name) if self.by_name[name].registered)

    def touch(self, node: Node, *, grew: bool) -> None:
        """Note that what is free, or who may use it, changed; `grew` if a Call may fit now that did not before."""
        self.version += 1
        node.version = self.version
        self._recent.pop(node.name, None)
        self._recent[node.name] = node
        if grew:
            self.grown[node.name] = node
        self._file(node)

    def topology_changed(self) -> None:
        """Note that totals, conditions or labels changed; `settle` counts anew once, however many nodes did."""
        self.topology += 1

    def settle(self) -> bool:
        """Bring the totals up to date; False if nothing changed since the last time."""
        if self._settled == self.topology:
            return False
        self._settled = self.topology
        cpus = memory_bytes = 0
        accelerators: dict[str, int] = {}
        for node in self.by_name.values():
            cpus += node.capacity.cpus
            memory_bytes += node.capacity.memory_bytes
            for name, count in node.capacity.accelerators.items():
                accelerators[name] = accelerators.get(name, 0) + count
        self.totals = NodeCapacity(cpus, memory_bytes, accelerators)
        self._demand.set_capacity(accelerators)
        return True

    def forget(self, node: Node) -> None:
        """Drop a node that is no longer registered and holds nothing."""
        self._unfile(node)
        for table in (self.by_name, self._recent, self.grown):
            table.pop(node.name, None)

    def shape(self, spec: ComputeSpec, labels: Mapping[str, str], avoid: frozenset[str]) -> Shape:
        """The one `Shape` of such Calls."""
        key = (spec, frozenset(labels.items()), avoid)
        shape = self._shapes.get(key)
        if shape is None:
            shape = self._shapes[key] = Shape(key)
        return shape

    def shape_waits(self, shape: Shape) -> None:
        """Count one more waiting Call of the shape."""
        shape.waiting += 1
        self._idle.pop(shape.key, None)

    def shape_left(self, shape: Shape) -> None:
        """Count one waiting Call less; the least recently used of the idle shapes are dropped."""
        shape.waiting -= 1
        if not shape.waiting:
            self._idle[shape.key] = shape
            if len(self._idle) > IDLE_SHAPES:
                oldest = next(iter(self._idle))
                del self._idle[oldest], self._shapes[oldest]

    def best(self, shape: Shape) -> tuple[Rank, Node, str] | None:
        """The unreserved ready node that ranks first for the shape, and the accelerator type to use there."""
        if shape.seen != self.version or shape.epoch[1] != self._demand.epoch:
            self._catch_up(shape)
        heap = shape.heap
        while heap:
            rank, name, version, accelerator = heap[0]
            node = self.by_name.get(name)
            if node is not None and node.version == version:
                return rank, node, accelerator
            heapq.heappop(heap)
        return None

    def fit(self, shape: Shape, node: Node) -> tuple[Rank, str] | None:
        """Rank of the node and the best accelerator type there, or None if the shape may not or cannot go there now.

        Leaves reservations out of account.
        """
        if node.condition is not NodeCondition.READY or not node.registered:
            return None
        accelerators = shape.fitting_accelerators(node)
        if accelerators is None or not shape.allowed_on(node):
            return None
        if shape.avoid and node.name in self._effective_avoid(shape):
            return None
        free = (node.cpus, node.memory_bytes, node.accelerators)
        spec = shape.spec
        if not spec.accelerator_count:
            return rank_cpu_call(self._demand, spec, free, has_gpus=bool(node.capacity.accelerators)), ""
        return min((rank_gpu_call(self._demand, spec, name, free), name) for name in accelerators)

    def freest(self, shape: Shape) -> Iterator[Node]:
        """Registered nodes that could hold the shape when empty, those with most free of what it asks for first."""
        wants_gpus = shape.spec.accelerator_count > 0
        kinds = [kind for kind in self._by_free if kind and shape.accepts(kind)] if wants_gpus else [CPUS]
        levels = [(free, kind) for kind in kinds for free in self._by_free.get(kind, ())]
        for free, kind in sorted(levels, reverse=True):
            for node in self._by_free[kind][free].values():
                if node.registered and shape.could_fit(node):
                    yield node

    def may_hold(self, shape: Shape, node: Node) -> bool:
        """Whether the node takes Calls now and could hold the shape when empty."""
        return (
            node.registered
            and node.condition is NodeCondition.READY
            and shape.could_fit(node)
            and not (shape.avoid and node.name in self._effective_avoid(shape))
        )

    def _effective_avoid(self, shape: Shape) -> frozenset[str]:
        """The nodes to avoid, or none where no other ready node is large enough."""
        if shape.epoch[0] != self.topology:
            self._refresh_avoid(shape)
        return shape.avoids

    def _refresh_avoid(self, shape: Shape) -> None:
        others = any(
            node.registered
            and node.condition is NodeCondition.READY
            and name not in shape.avoid
            and shape.could_fit(node)
            for name, node in self.by_name.items()
        )
        shape.avoids = shape.avoid if others else frozenset()

    def _catch_up(self, shape: Shape) -> None:
        epoch = (self.topology if shape.avoid else 0, self._demand.epoch)
        if shape.epoch[0] != epoch[0]:
            if shape.avoid:
                self._refresh_avoid(shape)
            self._rebuild(shape, self.by_name.values())
        elif shape.epoch != epoch or len(shape.heap) > 2 * len(self.by_name) + 32:
            # Ranks moved, but nodes that did not change fit as before: only those in the heap and the changed ones.
            nodes = {node.name: node for node in self._changed_since(shape.seen)}
            for _, name, version, _ in shape.heap:
                node = self.by_name.get(name)
                if node is not None and node.version == version:
                    nodes[name] = node
            self._rebuild(shape, nodes.values())
        else:
            for node in self._changed_since(shape.seen):
                if (entry := self._entry(shape, node)) is not None:
                    heapq.heappush(shape.heap, entry)
        shape.epoch = epoch
        shape.seen = self.version

    def _changed_since(self, version: int) -> Iterator[Node]:
        for node in reversed(self._recent.values()):
            if node.version <= version:
                return
            yield node

    def _rebuild(self, shape: Shape, nodes: Iterable[Node]) -> None:
        shape.heap = [entry for node in nodes if (entry := self._entry(shape, node)) is not None]
        heapq.heapify(shape.heap)

    def _entry(self, shape: Shape, node: Node) -> tuple[Rank, str, int, str] | None:
        if node.reserved or shape.cpus > node.cpus:
            return None
        found = self.fit(shape, node)
        return None if found is None else (found[0], node.name, node.version, found[1])

    def _file(self, node: Node) -> None:
        """Keep the node under how much it has free of each kind."""
        places = [(CPUS, node.cpus), *node.accelerators.items()]
        if places == self._placed_in.get(node.name):
            return
        self._unfile(node)
        for kind, free in places:
            self._by_free.setdefault(kind, {}).setdefault(free, {})[node.name] = node
        self._placed_in[node.name] = places

    def _unfile(self, node: Node) -> None:
        for kind, free in self._placed_in.pop(node.name, ()):
            level = self._by_free[kind][free]
            del level[node.name]
            if not level:
                del self._by_free[kind][free]
