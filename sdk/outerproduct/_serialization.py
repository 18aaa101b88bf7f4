"""Pickling with errors that say what to change."""

from __future__ import annotations

import pickle
import pickletools
import sys
from collections.abc import Iterator, Mapping
from typing import Any


def dumps(value: object, what: str, parts: Mapping[str, object]) -> bytes:
    """cloudpickle. Raises TypeError that names the part (an argument, a captured variable) that can not travel."""
    import cloudpickle

    try:
        data: bytes = cloudpickle.dumps(value, protocol=pickle.DEFAULT_PROTOCOL)
    except Exception as error:
        culprits = [name for name, part in parts.items() if not _can_travel(part)]
        where = f" ({', '.join(culprits)})" if culprits else ""
        raise TypeError(
            f"{what}{where} can not be pickled: {error}. Open files, locks, connections and running generators can "
            "not travel: create them inside the function, or pass what is needed to create them."
        ) from error
    return data


def _can_travel(value: object) -> bool:
    import cloudpickle

    try:
        cloudpickle.dumps(value)
    except Exception:  # noqa: BLE001 - user classes may raise anything; the caller reports the first error itself
        return False
    return True


def mentioned_modules(data: bytes) -> set[str]:
    """Names of loaded modules that a pickle may need: every string in it that is one. More than needed does no
    harm, since only local modules are sent along."""
    return {text for text in _strings(data) if text in sys.modules}


def _strings(data: bytes) -> Iterator[str]:
    for opcode, argument, _ in pickletools.genops(data):
        if isinstance(argument, str):
            # GLOBAL has "module name" in one string.
            yield argument.partition(" ")[0] if opcode.name == "GLOBAL" else argument


def loads(data: bytes) -> Any:
    """Unpickles what the caller's own function returned."""
    return pickle.loads(data)
