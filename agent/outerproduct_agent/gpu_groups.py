"""Which GPUs belong together: how closely each pair is connected, and the choice of a group for one Attempt.

Pure. The measurements come from `gpus.py`, the account of what is free from the ledger.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# Up to here all groups are compared: every request on machines of up to 16 GPUs (8 of 16 are 12,870 groups).
# Beyond, groups are grown GPU by GPU: comparing all would hold up assignments.
_MAX_GROUPS = 13_000


@dataclass(frozen=True)
class GpuLinks:
    """How closely pairs of GPUs are connected.

    Attributes:
        scores: closeness of each pair that is known, by the set of both UUIDs; higher is closer. Only the
            order and the sums matter, see `gpus.py` for the scale.
    """

    scores: Mapping[frozenset[str], int] = field(default_factory=dict)

    def between(self, first: str, second: str) -> int:
        """Closeness of two GPUs; 0 where it is not known."""
        return self.scores.get(frozenset((first, second)), 0)


def choose_group(candidates: Sequence[str], count: int, links: GpuLinks) -> tuple[str, ...]:
    """Choose `count` of the free GPUs for one Attempt.

    What is wanted, most important first:

    - the closest connections within the group (sum over its pairs)
    - the least connections cut between the group and what stays free, so that the best groups stay whole
    - the GPUs that come first

    Args:
        candidates: UUIDs of free GPUs of one type, the preferred first.
        count: at least 1.
        links: how closely they are connected.

    Returns:
        The UUIDs in the order of `candidates`.

    Raises:
        ValueError: there are not `count` candidates, or `count` is below 1.
    """
    if not 1 <= count <= len(candidates):
        raise ValueError(f"a group of {count} GPUs was asked for, of {len(candidates)} free ones")
    if len({links.between(*pair) for pair in itertools.combinations(candidates, 2)}) <= 1:
        # All behind one switch, MIG devices, or nothing is known: any group is as good.
        return tuple(candidates[:count])
    strength = {gpu: sum(links.between(gpu, other) for other in candidates if other != gpu) for gpu in candidates}
    if math.comb(len(candidates), count) > _MAX_GROUPS:
        return _grown_group(candidates, count, links, strength)

    def badness(group: tuple[str, ...]) -> tuple[int, int]:
        inside = _inside(group, links)
        return -inside, sum(strength[gpu] for gpu in group) - 2 * inside

    # `combinations` keeps the order of the candidates, and `min` the first of equals.
    return min(itertools.combinations(candidates, count), key=badness)


def _inside(group: Sequence[str], links: GpuLinks) -> int:
    return sum(links.between(first, second) for first, second in itertools.combinations(group, 2))


def _grown_group(
    candidates: Sequence[str], count: int, links: GpuLinks, strength: Mapping[str, int]
) -> tuple[str, ...]:
    """The best of the groups grown from each candidate by always adding the GPU closest to the group."""
    groups = []
    for seed in candidates:
        group = [seed]
        while len(group) < count:
            rest = [gpu for gpu in candidates if gpu not in group]
            closeness = {gpu: (sum(links.between(gpu, one) for one in group), -strength[gpu]) for gpu in rest}
            group.append(max(rest, key=closeness.__getitem__))
        groups.append(group)
    best = max(groups, key=lambda group: _inside(group, links))
    return tuple(gpu for gpu in candidates if gpu in best)
