"""The sentences about placement that users read: why a Call waits, and why it could never run.

They are made when someone asks, from the same state that the decision uses, so they are true at that moment, and
they are bounded: a few nodes by name, the rest counted.
"""

from collections.abc import Collection, Iterable, Mapping
from itertools import islice

from outerproduct_scheduler.accelerators import matches
from outerproduct_scheduler.placement.nodes import Node, Nodes, Shape
from outerproduct_scheduler.placement.queues import Queue, Waiting
from outerproduct_scheduler.placement.reservations import Reservation
from outerproduct_scheduler.placement.types import ComputeSpec, NodeCondition, Unsupported

NODES_NAMED = 3
TYPES_NAMED = 12
# Counting a place further back costs time and tells nobody more.
PLACES_COUNTED = 1000

_CONDITIONS = {
    NodeCondition.CORDONED: "is cordoned",
    NodeCondition.DRAINING: "is draining",
    NodeCondition.UNREACHABLE: "is unreachable",
    NodeCondition.QUARANTINED: "is quarantined",
}


def format_bytes(amount: int) -> str:
    """A byte count in the largest binary unit that gives at least 1, with one decimal where it is not whole."""
    value, unit = float(amount), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if value == round(value) else f"{value:.1f} {unit}"


def describe(spec: ComputeSpec) -> str:
    """What a Call asks for, GPUs first."""
    rest = f"{_plural(spec.cpus, 'CPU')} and {format_bytes(spec.memory_bytes)}"
    return f"{_gpus(spec)} with {rest}" if spec.accelerator_count else rest


def place_in_queue(waiting: Waiting, queues: Iterable[Queue]) -> int:
    """The Call's place in its class, from 1, as the order stands now: Calls of higher priority, older ones of its
    owner, and of each other owner as many as take turns with those. Counted up to `PLACES_COUNTED`."""
    own = waiting.queue
    ahead = sum(q.line.live for q in queues if q.class_name == own.class_name and q.priority > own.priority)
    index = own.owners[waiting.call.owner].line.ahead_of(waiting, PLACES_COUNTED)
    before = True
    for name, owner in own.owners_in_order():
        if name == waiting.call.owner:
            ahead += index
            before = False
        else:
            ahead += min(owner.line.live, index + before)
        if ahead >= PLACES_COUNTED:
            break
    return min(ahead + 1, PLACES_COUNTED)


def pending_reason(
    waiting: Waiting, nodes: Nodes, reservations: Mapping[str, Reservation], place: int, now: float
) -> str:
    """What the Call waits for, what stands in the way on the likeliest nodes, and its place in the queue."""
    shape = waiting.shape
    held = {r.node.name: r.holder for r in reservations.values()}
    likely = list(islice((n for n in nodes.freest(shape) if nodes.may_hold(shape, n)), NODES_NAMED))
    away = _unavailable(shape, nodes)
    named = [f"{node.name} {_obstacle(shape, node, held.get(node.name), waiting)}" for node in likely]
    named += [f"{node.name} {_why_not(node)}" for node in islice(away, NODES_NAMED)]
    if not named:
        return f"waiting for {describe(shape.spec)}: no registered node could hold it now; {_place(place)}"
    more = sum(1 for n in nodes.registered() if shape.could_fit(n)) - len(named)
    if more > 0:
        named.append(f"and {more} more")
    return f"waiting for {_gpus_or_all(shape.spec)}: {', '.join(named)}; {_place(place)}"


def unsupported(spec: ComputeSpec, labels: Mapping[str, str], nodes: Nodes) -> Unsupported | None:
    """The reason why no registered node could hold such a Call when empty, or None if one could."""
    shape = Shape((spec, frozenset(labels.items()), frozenset()))
    registered = list(nodes.registered())
    if any(shape.could_fit(node) for node in registered):
        return None
    asked = f"no node can hold a Call with {describe(spec)}"
    if labels:
        asked += " on nodes labelled " + ", ".join(f"{name}={value}" for name, value in sorted(labels.items()))
    if not registered:
        return Unsupported(f"{asked}: no node has registered yet; start an agent and submit again")
    labelled = [node for node in registered if shape.allowed_on(node)]
    if not labelled:
        return Unsupported(f"{asked}: none of {_plural(len(registered), 'node')} carries these labels")
    if spec.accelerator_count:
        offered = {name for node in labelled for name in node.capacity.accelerators}
        if not any(matches(spec.accelerator, name) for name in offered):
            instead = "ask for one of these" if offered else "leave gpu and gpu_type out, or add a node that has them"
            return Unsupported(f"{asked}: the nodes offer {_names(offered)}; {instead}")
    nearest = min(labelled, key=lambda node: (_misses(shape, node), node.name))
    return Unsupported(f"{asked}: the nearest, {nearest.name}, has {', '.join(_missing(shape, nearest))}")


def _misses(shape: Shape, node: Node) -> tuple[int, float]:
    """How far a node is from holding the shape: in how many dimensions it falls short, and by which fraction."""
    spec, capacity = shape.spec, node.capacity
    pairs = [(spec.cpus, capacity.cpus), (spec.memory_bytes, capacity.memory_bytes)]
    if spec.accelerator_count:
        pairs.append((spec.accelerator_count, _best_count(shape, capacity.accelerators)))
    short = [1 - has / needs for needs, has in pairs if has < needs]
    return len(short), sum(short)


def _missing(shape: Shape, node: Node) -> list[str]:
    spec, capacity = shape.spec, node.capacity
    missing = []
    if spec.accelerator_count and (has := _best_count(shape, capacity.accelerators)) < spec.accelerator_count:
        missing.append(f"{has} of the {_gpus(spec)}")
    if capacity.cpus < spec.cpus:
        missing.append(f"{capacity.cpus} of the {_plural(spec.cpus, 'CPU')}")
    if capacity.memory_bytes < spec.memory_bytes:
        missing.append(f"{format_bytes(capacity.memory_bytes)} of the {format_bytes(spec.memory_bytes)}")
    return missing


def _obstacle(shape: Shape, node: Node, holder: Waiting | None, waiting: Waiting) -> str:
    """What stands in the way on a node that takes Calls and is large enough."""
    spec, parts = shape.spec, []
    if spec.accelerator_count:
        free = _best_count(shape, node.accelerators)
        total = sum(n for name, n in node.capacity.accelerators.items() if shape.accepts(name))
        if free < spec.accelerator_count:
            parts.append(f"{free} of {total}")
    if node.cpus < spec.cpus:
        parts.append(f"{max(0, node.cpus)} of {_plural(node.capacity.cpus, 'CPU')}")
    if node.memory_bytes < spec.memory_bytes:
        total_memory = format_bytes(node.capacity.memory_bytes)
        parts.append(f"{format_bytes(max(0, node.memory_bytes))} of {total_memory}")
    if parts:
        return f"has {' and '.join(parts)} free"
    if holder is waiting:
        return "is held for it"
    if holder is not None:
        # Whose Call it is and what it is called is nobody else's business.
        mine = holder.call.owner == waiting.call.owner
        return f"is held for {f'Call {holder.call.call_id}' if mine else 'a Call of another user'}, which is before it"
    return "has room: it starts with the next placement"


def _unavailable(shape: Shape, nodes: Nodes) -> Iterable[Node]:
    return (node for node in nodes.registered() if shape.could_fit(node) and not nodes.may_hold(shape, node))


def _why_not(node: Node) -> str:
    return _CONDITIONS.get(node.condition, "is avoided after failures there")


def _best_count(shape: Shape, accelerators: Mapping[str, int]) -> int:
    return max((max(0, n) for name, n in accelerators.items() if shape.accepts(name)), default=0)


def _gpus(spec: ComputeSpec) -> str:
    return f"{spec.accelerator_count} x {spec.accelerator or 'any GPU'}"


def _gpus_or_all(spec: ComputeSpec) -> str:
    return _gpus(spec) if spec.accelerator_count else describe(spec)


def _names(names: Collection[str]) -> str:
    if not names:
        return "no GPUs"
    listed = ", ".join(sorted(names)[:TYPES_NAMED])
    return f"{listed} and {len(names) - TYPES_NAMED} more" if len(names) > TYPES_NAMED else listed


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _place(place: int) -> str:
    if place >= PLACES_COUNTED:
        return f"{PLACES_COUNTED}th in the queue or later"
    suffix = "th" if place % 100 in {11, 12, 13} else {1: "st", 2: "nd", 3: "rd"}.get(place % 10, "th")
    return f"{place}{suffix} in the queue"
