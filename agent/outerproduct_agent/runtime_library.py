"""The folder that is mounted at /run/outerproduct/lib: the runner, a cloudpickle and the SDK, copied from the agent's
own installation. It is named by its content, so an upgraded agent makes a new one and running containers keep theirs.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("outerproduct_runner", "cloudpickle", "outerproduct")
LEFT_OUT = {"outerproduct": ("v1", "_cli")}
"""Of the SDK: generated code and command line need packages that an image does not have."""


def prepare_library(folder: Path) -> Path:
    """The library below `folder`, made unless it is there. Blocks."""
    files = [(source, name) for package in PACKAGES for source, name in _files(package)]
    digest = hashlib.sha256()
    for source, name in files:
        digest.update(name.encode() + b"\0" + source.read_bytes())
    target = folder / digest.hexdigest()[:16]
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder, prefix="new-"))
    for source, name in files:
        copy = temporary / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
    for path in (temporary, *temporary.rglob("*")):
        # Any user of any image must be able to read it, whatever the agent's umask is.
        path.chmod(0o755 if path.is_dir() else 0o644)
    try:
        temporary.rename(target)
    except OSError:
        shutil.rmtree(temporary)  # Another agent of this machine was faster.
    return target


def _files(package: str) -> Iterator[tuple[Path, str]]:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError(
            f"the package {package} is not installed beside the agent: install outerproduct-onprem[agent]"
        )
    root = Path(spec.submodule_search_locations[0])
    for parent, folders, names in os.walk(root):
        relative = Path(parent).relative_to(root)
        folders[:] = sorted(
            name
            for name in folders
            if name != "__pycache__" and not (relative == Path() and name in LEFT_OUT.get(package, ()))
        )
        for name in sorted(names):
            if name.endswith((".py", ".typed")):
                yield Path(parent) / name, (Path(package) / relative / name).as_posix()
