"""Packing: `python -m benchmarks.packing --nodes FILE --tasks FILE` prints the table of policies, with `--json` the
figures of ours on the last line; `--optimum N` compares ours with the optimum on small random clusters instead."""

import argparse
import itertools
import json
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.packing.bounds import linear_bound, optimum
from benchmarks.packing.policies import OTHERS, OURS, Ours, make
from benchmarks.packing.trace import Task, arrivals, read_nodes, read_tasks, synthetic_nodes, synthetic_spec
from outerproduct_scheduler.placement import ComputeSpec, NodeCapacity

SECONDS_PER_OPTIMUM = 20.0


@dataclass(slots=True)
class Replay:
    """What came of one sequence of arrivals.

    `gpu_allocation` is GPUs given out over GPUs there at the end; `gpu_allocation_around` the paper's figure, which
    averages over the arrivals that round to the same percentage of demand, and so stays below 1 at 100 %.
    """

    gpu_allocation: float = 0.0
    gpu_allocation_around: float = 0.0
    offered: Counter[int] = field(default_factory=Counter)
    refused: Counter[int] = field(default_factory=Counter)
    specs: list[ComputeSpec] = field(default_factory=list)


def replay(name: str, nodes: Mapping[str, NodeCapacity], tasks: list[Task], arrived: float, seed: int) -> Replay:
    """Offer tasks until their GPU demand reaches `arrived` times the cluster, and on to the end of that percentage
    for the paper's average; everything but that average is as of when the demand was reached."""
    policy = make(name, nodes, tasks)
    capacity = sum(sum(c.accelerators.values()) for c in nodes.values())
    result = Replay()
    demand = given = 0
    samples = []
    for spec in arrivals(tasks, seed):
        gpus = spec.accelerator_count
        demand += gpus
        if round(100 * demand / capacity) > round(100 * arrived):
            break
        before_the_end = demand - gpus < arrived * capacity
        placed = policy.offer(spec)
        given += gpus * placed
        if before_the_end:
            result.specs.append(spec)
            result.offered[gpus] += 1
            result.refused[gpus] += not placed
            result.gpu_allocation = given / capacity
        if round(100 * demand / capacity) == round(100 * arrived):
            samples.append(given / capacity)
    result.gpu_allocation_around = sum(samples) / len(samples) if samples else result.gpu_allocation
    return result


def compare_with_optimum(
    node_count: int, instances: int, seed: int, trace: tuple[Mapping[str, NodeCapacity], list[Task]] | None
) -> dict[str, object]:
    """Ours against CP-SAT: random small clusters, Calls with GPUs arriving until their demand equals the capacity.

    Nodes and Calls are drawn from the trace, or made up where there is none. A Call without GPUs would only give the
    optimum, which may refuse it, an advantage.
    """
    ratios = []
    skipped = 0
    for number in range(instances):
        rng = random.Random(f"{seed}-{node_count}-{number}")
        nodes = synthetic_nodes(node_count, rng)
        if trace is not None:
            nodes = dict(rng.sample(sorted(trace[0].items(), key=lambda item: item[0]), node_count))
            tasks = [task.spec for task in trace[1] if task.spec.accelerator_count]
        capacity = sum(sum(c.accelerators.values()) for c in nodes.values())
        specs: list[ComputeSpec] = []
        demand = 0
        while demand < capacity:
            spec = synthetic_spec(rng) if trace is None else rng.choice(tasks)
            # A Call beyond the capacity is drawn anew: the optimum could only refuse it, or others for it.
            if demand + spec.accelerator_count <= capacity:
                specs.append(spec)
                demand += spec.accelerator_count
        best = optimum(nodes, specs, SECONDS_PER_OPTIMUM)
        if best is None:
            skipped += 1
            continue
        policy = Ours(nodes)
        ratios.append(sum(s.accelerator_count for s in specs if policy.offer(s)) / best)
    return {
        "policy": OURS,
        "nodes": node_count,
        "instances": len(ratios),
        "not_solved": skipped,
        "mean_of_optimum": sum(ratios) / len(ratios),
        "worst_of_optimum": min(ratios),
    }


def print_table(nodes: Mapping[str, NodeCapacity], tasks: list[Task], arrived: list[float], seeds: list[int]) -> None:
    """A row per policy: GPUs given out, then the share of tasks of each size refused at the first `arrived`."""
    sizes = sorted({task.spec.accelerator_count for task in tasks})
    print("| policy | " + " | ".join(f"{a:.0%}" for a in arrived), end=" | ")
    print(" | ".join(f"{size} GPUs refused" for size in sizes) + " |")
    print("| --- " * (1 + len(arrived) + len(sizes)) + "|")
    capacity = sum(sum(c.accelerators.values()) for c in nodes.values())
    bounds: list[float] = []
    for name in (*OTHERS, OURS):
        by_arrived = [[replay(name, nodes, tasks, a, seed) for seed in seeds] for a in arrived]
        if not bounds:
            bounds = [
                sum(linear_bound(nodes, r.specs) / capacity for r in replays) / len(replays) for replays in by_arrived
            ]
        figures = [sum(r.gpu_allocation for r in replays) / len(replays) for replays in by_arrived]
        refused: Counter[int] = sum((r.refused for r in by_arrived[0]), Counter())
        offered: Counter[int] = sum((r.offered for r in by_arrived[0]), Counter())
        shares = [refused[size] / offered[size] if offered[size] else 0.0 for size in sizes]
        print(f"| {name} | " + " | ".join(f"{figure:.1%}" for figure in itertools.chain(figures, shares)) + " |")
    print("| bound (linear program) | " + " | ".join(f"{b:.1%}" for b in bounds) + " |" + " |" * len(sizes))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.packing", description=__doc__)
    parser.add_argument("--nodes", type=Path, help="CSV of nodes")
    parser.add_argument("--tasks", type=Path, help="CSV of tasks")
    parser.add_argument("--shared", choices=("drop", "round-up"), default="drop", help="tasks that share a GPU")
    parser.add_argument("--arrived", type=float, action="append", help="demand over capacity; may be repeated")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1, help="average the table over this many seeds")
    parser.add_argument("--policy", choices=(*OTHERS, OURS), default=OURS, help="the policy of --json")
    parser.add_argument("--json", action="store_true", help="figures of one policy as JSON on the last line")
    parser.add_argument("--optimum", type=int, metavar="NODES", help="compare with CP-SAT on clusters of this size")
    parser.add_argument("--instances", type=int, default=200, help="how many of them")
    options = parser.parse_args()
    trace = None
    if options.nodes is not None and options.tasks is not None:
        trace = read_nodes(options.nodes), read_tasks(options.tasks, shared=options.shared)
    if options.optimum:
        print(json.dumps(compare_with_optimum(options.optimum, options.instances, options.seed, trace)))
        return
    if trace is None:
        parser.error("--nodes and --tasks are needed (or --optimum)")
    nodes, tasks = trace
    arrived = options.arrived or [1.0]
    if not options.json:
        print_table(nodes, tasks, arrived, list(range(options.seed, options.seed + options.seeds)))
        return
    result = replay(options.policy, nodes, tasks, arrived[0], options.seed)
    capacity = sum(sum(c.accelerators.values()) for c in nodes.values())
    print(
        json.dumps(
            {
                "policy": options.policy,
                "gpu_allocation": result.gpu_allocation,
                "gpu_allocation_around": result.gpu_allocation_around,
                "bound": linear_bound(nodes, result.specs) / capacity,
                "arrived": arrived[0],
                "seed": options.seed,
                "offered_by_gpus": {str(k): v for k, v in sorted(result.offered.items())},
                "refused_by_gpus": {str(k): v for k, v in sorted(result.refused.items())},
            }
        )
    )


if __name__ == "__main__":
    main()
