"""Simulates a cluster on the very core that the scheduler runs: `python -m benchmarks.simulate --nodes FILE --tasks
FILE` replays arrivals and durations and prints utilisation, stranded GPUs and waits by size, the last line as JSON.

Arrivals are scaled in time so that the GPU demand is `--load` times the cluster. `--plot FILE` draws GPUs in use.
"""

import argparse
import heapq
import json
import random
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.packing.trace import Task, read_nodes, read_tasks
from outerproduct_scheduler.placement import NodeCapacity, NodeCondition, Placement, WaitingCall

# A Call's timeout is this many times its duration: users leave themselves room.
TIMEOUT_SLACK = 1.5
END, ARRIVAL = 0, 1


@dataclass(slots=True)
class Outcome:
    """What happened: waits in seconds by GPUs asked for, and GPU seconds used and stranded while Calls arrived."""

    waits: dict[int, list[float]] = field(default_factory=dict)
    gpu_seconds: float = 0.0
    stranded_gpu_seconds: float = 0.0
    seconds: float = 0.0
    in_use: list[tuple[float, int]] = field(default_factory=list)


def simulate(
    nodes: dict[str, NodeCapacity],
    tasks: list[Task],
    *,
    load: float,
    share_with_timeout: float,
    longest: float,
    seed: int,
) -> Outcome:
    """Replay the tasks in a random order, as a Poisson process of the given load; those too large are left out."""
    rng = random.Random(seed)
    placement = Placement()
    for name, capacity in nodes.items():
        placement.set_node(name, capacity, NodeCondition.READY, {})
    tasks = [
        Task(t.spec, 0.0, min(longest, t.deleted_at - t.created_at))
        for t in tasks
        if t.deleted_at > t.created_at and not placement.check_supported(t.spec, {})
    ]
    rng.shuffle(tasks)
    total = sum(sum(c.accelerators.values()) for c in nodes.values())
    demand = sum(t.spec.accelerator_count * (t.deleted_at - t.created_at) for t in tasks)
    rate = len(tasks) * load * total / demand
    events: list[tuple[float, int, int]] = []
    arrived_at = []
    now = 0.0
    for number in range(len(tasks)):
        now += rng.expovariate(rate)
        arrived_at.append(now)
        events.append((now, ARRIVAL, number))
    heapq.heapify(events)
    # The cluster starts empty: the first third of the arrivals fills it and is not counted.
    last_arrival, before, used = now, now / 3, 0
    outcome = Outcome(seconds=last_arrival - before)
    while events:
        now, kind, number = heapq.heappop(events)
        until = min(now, last_arrival)
        if until > before:
            outcome.gpu_seconds += used * (until - before)
            outcome.stranded_gpu_seconds += _stranded(placement, nodes) * (until - before)
            before = until
        task = tasks[number]
        if kind == END:
            placement.release(str(number))
            used -= task.spec.accelerator_count
        else:
            timeout = TIMEOUT_SLACK * (task.deleted_at - task.created_at)
            bounded = rng.random() < share_with_timeout
            owner = f"user-{rng.randrange(10)}"
            placement.submit(WaitingCall(str(number), task.spec, owner, 0, now, timeout if bounded else None))
        for assignment in placement.place(now):
            started = int(assignment.call_id)
            gpus = assignment.spec.accelerator_count
            if arrived_at[started] >= last_arrival / 3:
                outcome.waits.setdefault(gpus, []).append(now - arrived_at[started])
            used += gpus
            heapq.heappush(events, (now + tasks[started].deleted_at - tasks[started].created_at, END, started))
        outcome.in_use.append((now, used))
    return outcome


def _stranded(placement: Placement, nodes: dict[str, NodeCapacity]) -> int:
    """GPUs that are free on nodes without a free CPU."""
    stranded = 0
    for name in nodes:
        free = placement.free(name)
        if free.cpus <= 0:
            stranded += sum(free.accelerators.values())
    return stranded


def _quantile(values: list[float], fraction: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]


def _plot(outcome: Outcome, total: int, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4))
    axes.step([t / 3600 for t, _ in outcome.in_use], [used / total for _, used in outcome.in_use], where="post")
    axes.set(xlabel="hours", ylabel="share of GPUs in use", ylim=(0, 1.02))
    figure.savefig(path)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulate", description=__doc__)
    parser.add_argument("--nodes", type=Path, required=True, help="CSV of nodes")
    parser.add_argument("--tasks", type=Path, required=True, help="CSV of tasks with times")
    parser.add_argument("--use-nodes", type=int, default=60, help="a random sample of this many nodes")
    parser.add_argument("--use-tasks", type=int, default=10000, help="this many of the tasks, drawn at random")
    parser.add_argument("--shared", choices=("drop", "round-up"), default="drop")
    parser.add_argument("--load", type=float, default=0.95, help="GPU demand over GPUs")
    parser.add_argument("--longest-hours", type=float, default=4.0, help="durations are cut to this")
    parser.add_argument("--with-timeout", type=float, default=1.0, help="share of Calls that give a timeout")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plot", type=Path, help="write a plot of GPUs in use here")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    every_node = read_nodes(options.nodes)
    nodes = dict(rng.sample(sorted(every_node.items(), key=str), min(options.use_nodes, len(every_node))))
    tasks = rng.choices(read_tasks(options.tasks, shared=options.shared), k=options.use_tasks)
    outcome = simulate(
        nodes,
        tasks,
        load=options.load,
        share_with_timeout=options.with_timeout,
        longest=options.longest_hours * 3600,
        seed=options.seed,
    )
    total = sum(sum(c.accelerators.values()) for c in nodes.values())
    if options.plot is not None:
        _plot(outcome, total, options.plot)
    waits = {
        str(gpus): {"calls": len(w), "p50_s": round(_quantile(w, 0.5)), "p99_s": round(_quantile(w, 0.99))}
        for gpus, w in sorted(outcome.waits.items())
    }
    print("| GPUs | Calls | wait p50 s | wait p99 s |\n| --- | --- | --- | --- |")
    for gpus, row in waits.items():
        print(f"| {gpus} | {row['calls']} | {row['p50_s']} | {row['p99_s']} |")
    capacity_seconds = total * outcome.seconds
    print(
        json.dumps(
            {
                "gpu_utilisation": round(outcome.gpu_seconds / capacity_seconds, 4),
                "stranded_gpus": round(outcome.stranded_gpu_seconds / outcome.seconds, 2),
                "gpus": total,
                "waits_by_gpus": waits,
            }
        )
    )


if __name__ == "__main__":
    main()
