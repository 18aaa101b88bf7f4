"""Cost of a decision: `python -m benchmarks.placement --nodes 1000 --waiting 100000 --json` fills a cluster, lets
Calls wait, and measures the CPU time from one completion to the assignments that follow from it, and of arrivals.

The last line is JSON: `median_ms` and `p99_ms` for completions, `arrival_median_ms` and `arrival_p99_ms`, and with
`--curve` the same for growing numbers of nodes, waiting Calls and shapes.
"""

import argparse
import gc
import heapq
import json
import random
import time

from outerproduct_scheduler.placement import (
    Assignment,
    ComputeSpec,
    NodeCapacity,
    NodeCondition,
    Placement,
    WaitingCall,
)

GIB = 1 << 30
TYPES = ("L4", "A100-80GB", "H100")
# Completions before measuring, so that indexes exist and what is usual is known.
WARM_UP_EVENTS = 300


def build(nodes: int, rng: random.Random) -> Placement:
    """A cluster of 8-GPU nodes of three types, and one in eight nodes without GPUs."""
    placement = Placement()
    for number in range(nodes):
        kind = TYPES[number % len(TYPES)]
        gpus = {} if number % 8 == 7 else {kind: 8}
        cpus = rng.choice((64, 96, 128))
        capacity = NodeCapacity(cpus, cpus * 8 * GIB, gpus)
        placement.set_node(f"node-{number:05}", capacity, NodeCondition.READY, {})
    return placement


def random_shapes(count: int, rng: random.Random) -> list[ComputeSpec]:
    """Different things to ask for: a fifth without GPUs, a few without a type, the rest by type."""
    shapes: dict[ComputeSpec, None] = {}
    while len(shapes) < count:
        gpus = rng.choices((0, 1, 2, 4, 8), weights=(20, 50, 15, 10, 5))[0]
        kind = rng.choice((*TYPES, *TYPES, "A100", "")) if gpus else ""
        cpus = rng.randint(1, 12) * max(1, gpus)
        shapes[ComputeSpec(cpus, cpus * rng.choice((2, 4, 6)) * GIB, kind, gpus)] = None
    return list(shapes)


def measure(nodes: int, waiting: int, shapes: int, *, owners: int, events: int, seed: int) -> dict[str, float | int]:
    """Milliseconds of CPU per completion and per arrival in steady state: each completion is replaced by an arrival."""
    rng = random.Random(seed)
    placement = build(nodes, rng)
    specs = random_shapes(shapes, rng)
    number = 0
    now = 0.0
    ends: list[tuple[float, str]] = []
    durations: dict[str, float] = {}

    def arrive() -> None:
        nonlocal number
        number += 1
        call_id = f"c{number}"
        durations[call_id] = rng.expovariate(1 / 600)
        timeout = rng.choice((None, 600.0, 3600.0))
        if timeout is not None:
            durations[call_id] = min(durations[call_id], timeout)
        owner = f"user-{rng.randrange(owners)}"
        placement.submit(WaitingCall(call_id, rng.choice(specs), owner, 0, now, timeout))

    def follow(assignments: list[Assignment]) -> None:
        for assignment in assignments:
            heapq.heappush(ends, (now + durations.pop(assignment.call_id), assignment.call_id))

    while number - len(ends) < waiting:
        for _ in range(min(waiting, 1000)):
            arrive()
        follow(placement.place(now))
    completions: list[int] = []
    arrivals: list[int] = []
    gc.collect()
    gc.freeze()
    for event in range(WARM_UP_EVENTS + events):
        now, call_id = heapq.heappop(ends)
        begin = time.thread_time_ns()
        placement.release(call_id)
        assignments = placement.place(now)
        middle = time.thread_time_ns()
        follow(assignments)
        between = time.thread_time_ns()
        arrive()
        follow(placement.place(now))
        end = time.thread_time_ns()
        if event >= WARM_UP_EVENTS:
            completions.append(middle - begin)
            arrivals.append(end - between)
    gc.unfreeze()
    return {
        "nodes": nodes,
        "waiting": waiting,
        "shapes": shapes,
        "owners": owners,
        "events": events,
        "median_ms": _milliseconds(completions, 0.5),
        "p99_ms": _milliseconds(completions, 0.99),
        "max_ms": _milliseconds(completions, 1.0),
        "arrival_median_ms": _milliseconds(arrivals, 0.5),
        "arrival_p99_ms": _milliseconds(arrivals, 0.99),
    }


def _milliseconds(nanoseconds: list[int], fraction: float) -> float:
    ordered = sorted(nanoseconds)
    return round(ordered[min(len(ordered) - 1, int(fraction * len(ordered)))] / 1e6, 4)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.placement", description=__doc__)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--waiting", type=int, default=100_000)
    parser.add_argument("--shapes", type=int, default=60, help="different requests among the waiting Calls")
    parser.add_argument("--owners", type=int, default=20)
    parser.add_argument("--events", type=int, default=3000, help="completions to measure")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--curve", action="store_true", help="measure growing sizes up to the given ones first")
    parser.add_argument("--json", action="store_true", help="only the JSON line")
    options = parser.parse_args()
    nodes, waiting, shapes = options.nodes, options.waiting, options.shapes
    sizes = [(nodes, waiting, shapes)]
    if options.curve or not options.json:
        sizes = [
            (nodes // 10, waiting // 10, shapes),
            (nodes, waiting // 10, shapes),
            (nodes, waiting, shapes // 4),
            *sizes,
        ]
    results = [
        measure(max(1, n), max(1, w), max(1, s), owners=options.owners, events=options.events, seed=options.seed)
        for n, w, s in sizes
    ]
    if not options.json:
        columns = list(results[0])
        print("| " + " | ".join(columns) + " |")
        print("| --- " * len(columns) + "|")
        for result in results:
            print("| " + " | ".join(str(result[column]) for column in columns) + " |")
    print(json.dumps({**results[-1], "curve": results[:-1]}))


if __name__ == "__main__":
    main()
