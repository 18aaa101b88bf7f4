"""Matching of the accelerator a Call names against the canonical type names that nodes offer.

Pure string rules, shared by placement and by the messages about it. The agents make the canonical names from NVML
(`L4`, `A100-80GB`, `RTX-4090`; a MIG slice as `A100-40GB:3g.20gb`); nothing here knows a list of products, so a
new GPU needs no change.
"""

import re
from collections.abc import Iterable

_MEMORY_SIZE = re.compile(r"-\d+GB", re.IGNORECASE)
_MIG_SEPARATOR = ":"


def is_mig_slice(offered: str) -> bool:
    """Whether a canonical name stands for a MIG slice and not for a whole GPU."""
    return _MIG_SEPARATOR in offered


def matches(requested: str, offered: str) -> bool:
    """Whether a GPU of the canonical type `offered` satisfies a request for `requested`.

    Case does not matter. A name without a memory size takes every size (`A100` takes `A100-40GB`); a name with one
    takes only that. An empty request takes any whole GPU. A MIG slice is taken only under its full name.
    """
    if not requested:
        return not is_mig_slice(offered)
    wanted, given = requested.casefold(), offered.casefold()
    if wanted == given:
        return True
    return given.startswith(wanted) and _MEMORY_SIZE.fullmatch(offered, len(requested)) is not None


def matching(requested: str, offered: Iterable[str]) -> tuple[str, ...]:
    """The offered types that satisfy the request, sorted, each once."""
    return tuple(sorted({name for name in offered if matches(requested, name)}))
