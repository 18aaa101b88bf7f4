"""What no policy can exceed: a linear program for large clusters, the optimum by CP-SAT for small ones."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from ortools.sat.python import cp_model
from scipy.optimize import linprog  # type: ignore[import-untyped, unused-ignore]

from outerproduct_scheduler.placement import ComputeSpec, NodeCapacity

MIB = 1 << 20


def linear_bound(nodes: Mapping[str, NodeCapacity], specs: Sequence[ComputeSpec]) -> float:
    """An upper bound on the GPUs that can be given out: Calls divisible, nodes of one kind taken together."""
    kinds = Counter((c.cpus, c.memory_bytes, sum(c.accelerators.values())) for c in nodes.values())
    shapes = Counter((s.cpus, s.memory_bytes, s.accelerator_count) for s in specs if s.accelerator_count)
    pairs = [
        (i, j)
        for i, shape in enumerate(shapes)
        for j, kind in enumerate(kinds)
        if all(wanted <= has for wanted, has in zip(shape, kind, strict=True))
    ]
    shape_list, kind_list = list(shapes), list(kinds)
    rows = len(shapes) + 3 * len(kinds)
    matrix = np.zeros((rows, len(pairs)))
    limits = np.zeros(rows)
    limits[: len(shapes)] = list(shapes.values())
    for j, (kind, number) in enumerate(kinds.items()):
        for resource in range(3):
            limits[len(shapes) + 3 * j + resource] = 1.0 if kind[resource] else 0.0
            for column, (i, other) in enumerate(pairs):
                if other == j and kind[resource]:
                    row = len(shapes) + 3 * j + resource
                    matrix[row, column] = shape_list[i][resource] / (kind[resource] * number)
    for column, (i, _) in enumerate(pairs):
        matrix[i, column] = 1.0
    gain = [-float(shape_list[i][2]) for i, _ in pairs]
    solution = linprog(gain, A_ub=matrix, b_ub=limits, bounds=(0, None), method="highs")
    if not solution.success:
        raise RuntimeError(f"the linear program over {len(kind_list)} kinds of node failed: {solution.message}")
    return float(-solution.fun)


def optimum(nodes: Mapping[str, NodeCapacity], specs: Sequence[ComputeSpec], seconds: float) -> int | None:
    """The most GPUs that any choice of these Calls can be given; None if it was not proved within `seconds`."""
    model = cp_model.CpModel()
    chosen = [[model.new_bool_var(f"{i}-{j}") for j in range(len(nodes))] for i in range(len(specs))]
    for row in chosen:
        model.add_at_most_one(row)
    for j, capacity in enumerate(nodes.values()):
        limits = (capacity.cpus, capacity.memory_bytes // MIB, sum(capacity.accelerators.values()))
        for resource, limit in enumerate(limits):
            wanted = [(s.cpus, s.memory_bytes // MIB, s.accelerator_count)[resource] for s in specs]
            model.add(sum(w * row[j] for w, row in zip(wanted, chosen, strict=True)) <= limit)
    model.maximize(sum(s.accelerator_count * sum(row) for s, row in zip(specs, chosen, strict=True)))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    return round(solver.objective_value) if solver.solve(model) == cp_model.OPTIMAL else None
