"""The runner's own cloudpickle, kept apart from the one that the image may have.

A pickle made by cloudpickle names functions of the module `cloudpickle.cloudpickle`, so the module must go by that
name while something is pickled or unpickled; while the user's function runs, the image's own must be found there.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

LIBRARY = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

_ours: dict[str, ModuleType] = {}
_lock = threading.RLock()


def _take_out() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.partition(".")[0] == "cloudpickle"]
    return {name: sys.modules.pop(name) for name in names}


@contextmanager
def cloudpickle() -> Iterator[ModuleType]:
    """Our cloudpickle, under its public name for as long as the block runs. Always the same instance, since it
    remembers the classes that it has rebuilt."""
    with _lock:
        theirs = _take_out()
        try:
            if not _ours:
                sys.path.insert(0, LIBRARY)
                try:
                    importlib.import_module("cloudpickle.cloudpickle")
                finally:
                    sys.path.remove(LIBRARY)
                    if LIBRARY not in sys.path:
                        sys.path.append(LIBRARY)
                _ours.update(_take_out())
            sys.modules.update(_ours)
            yield _ours["cloudpickle"]
        finally:
            _take_out()
            sys.modules.update(theirs)
