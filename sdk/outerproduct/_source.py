"""Archives of local code and files: the same content gives the same bytes, so it is uploaded once.

Which of the imported modules are local, which files of them travel, and how the archive is made. Every submission looks
at the files again, and reads those that have changed since the last one.
"""

from __future__ import annotations

import ast
import fnmatch
import functools
import gzip
import io
import os
import site
import sys
import sysconfig
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

MAX_SOURCE_BYTES = 256 * 1024**2
"""Code is small. Data in a package's folder belongs into Image.add_local_dir, which is not sent with every change."""
MAX_MOUNT_BYTES = 4 * 1024**3
"""An archive is made in memory. More belongs into an Image or a shared file system."""
LISTED_FILES = 5
REMEMBERED_FILES = 4096
REMEMBERED_ARCHIVES = 4
"""Sources of a few programs' worth of functions: a loop of `run` reads each file once."""

_NEVER = ("__pycache__", "*.pyc", "*.pyo", ".git", ".hg", ".svn", ".venv", "venv", ".tox", ".nox", "node_modules")
_NEVER_TOO = (".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", ".ipynb_checkpoints", "*.egg-info")
_OWN_PACKAGES = frozenset({"outerproduct", "outerproduct_runner"})
"""The agent brings these along."""


def is_local(module: ModuleType) -> bool:
    """Whether a module is the user's own code: from a file that neither Python nor an installer has put there."""
    path = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
    if not path or module.__name__.partition(".")[0] in _OWN_PACKAGES:
        return False
    resolved = os.path.realpath(path)
    return not any(resolved.startswith(folder + os.sep) for folder in _installed_folders())


def _installed_folders() -> set[str]:
    paths = sysconfig.get_paths()
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = {paths[name] for name in names} | set(site.getsitepackages()) | {site.getusersitepackages()}
    return {os.path.realpath(folder) for folder in folders}


def local_roots(module_names: Iterable[str]) -> dict[str, ModuleType]:
    """Top-level names of the local modules among these, and of the local modules that their files import."""
    found: dict[str, ModuleType] = {}
    waiting = {name.partition(".")[0] for name in module_names}
    while waiting:
        name = waiting.pop()
        module = sys.modules.get(name)
        if name in found or name == "__main__" or module is None or not is_local(module):
            continue
        found[name] = module
        for path, _ in _files_of(module):
            if path.suffix == ".py":
                waiting |= _imported_names(_seen(path, ""))
    return found


@dataclass(frozen=True)
class _SeenFile:
    """A file as it was when it was looked at; equal as long as it has not been touched."""

    path: Path
    arcname: str
    size_bytes: int
    modified_nanoseconds: int
    changed_nanoseconds: int
    """Of its inode, so a file that was replaced by an older one counts too."""


def _seen(path: Path, arcname: str) -> _SeenFile:
    found = path.stat()
    return _SeenFile(path, arcname, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


@functools.lru_cache(maxsize=REMEMBERED_FILES)
def _imported_names(file: _SeenFile) -> frozenset[str]:
    try:
        tree = ast.parse(file.path.read_bytes())
    except (SyntaxError, ValueError):
        return frozenset()  # Not code of this Python; if it matters, the import in the container says so.
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return frozenset(names)


def source_archive(roots: dict[str, ModuleType]) -> bytes:
    """One archive of these top-level modules. Raises ValueError that lists the largest files when it is too large."""
    files = sorted(
        ((path, arcname) for module in roots.values() for path, arcname in _files_of(module)), key=lambda pair: pair[1]
    )
    _check_size(files, MAX_SOURCE_BYTES, f"The source of {', '.join(sorted(roots))}", "Image.add_local_dir")
    return _remembered_archive(tuple(_seen(path, arcname) for path, arcname in files))


@functools.lru_cache(maxsize=REMEMBERED_ARCHIVES)
def _remembered_archive(files: tuple[_SeenFile, ...]) -> bytes:
    return _archive([(file.path, file.arcname) for file in files])


def folder_archive(folder: Path) -> bytes:
    """All files of a folder, hidden ones too."""
    files = sorted(
        (
            (Path(parent) / name, (Path(parent) / name).relative_to(folder).as_posix())
            for parent, _, names in os.walk(folder)
            for name in names
            # Pipes and sockets have no content, and a link that leads nowhere is none.
            if (Path(parent) / name).is_file()
        ),
        key=lambda pair: pair[1],
    )
    _check_size(files, MAX_MOUNT_BYTES, f"The folder {folder}", "an Image that has the files in it")
    return _archive(files)


def _files_of(module: ModuleType) -> Iterator[tuple[Path, str]]:
    """Files that travel with a top-level module, and their names in the archive."""
    folders = list(getattr(module, "__path__", ()))
    if not folders:
        path = Path(str(module.__file__))
        yield path, path.name
        return
    for folder in folders:
        yield from _walk(Path(folder), module.__name__, _ignored_in(Path(folder).parent))


def _walk(folder: Path, arcname: str, ignored: tuple[str, ...]) -> Iterator[tuple[Path, str]]:
    ignored = (*ignored, *_ignored_in(folder))
    for entry in sorted(folder.iterdir()):
        if _matches(entry, ignored) or (entry.is_dir() and (entry / "pyvenv.cfg").exists()):
            continue
        if entry.is_dir() and not entry.is_symlink():
            yield from _walk(entry, f"{arcname}/{entry.name}", ignored)
        elif entry.is_file():
            yield entry, f"{arcname}/{entry.name}"


def _ignored_in(folder: Path) -> tuple[str, ...]:
    """Simple patterns (names) of a folder's .gitignore; patterns with paths or negation are left to git."""
    try:
        lines = (folder / ".gitignore").read_text(errors="replace").splitlines()
    except OSError:
        return ()
    patterns = (line.strip().rstrip("/") for line in lines)
    return tuple(p for p in patterns if p and not p.startswith(("#", "!")) and "/" not in p)


def _matches(path: Path, ignored: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatch(path.name, pattern) for pattern in (*_NEVER, *_NEVER_TOO, *ignored))


def _check_size(files: list[tuple[Path, str]], limit: int, what: str, instead: str) -> None:
    sizes = sorted(((path.stat().st_size, arcname) for path, arcname in files), reverse=True)
    total = sum(size for size, _ in sizes)
    if total > limit:
        largest = ", ".join(f"{arcname} ({size:,} bytes)" for size, arcname in sizes[:LISTED_FILES])
        raise ValueError(
            f"{what} has {total:,} bytes, more than the {limit:,} that are sent. Largest: {largest}. Name what is not "
            f"needed in .gitignore, or use {instead}."
        )


def _archive(files: list[tuple[Path, str]]) -> bytes:
    """Canonical: sorted names, no times, owners or umask in it."""
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0, compresslevel=6) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for path, arcname in files:
            entry = tarfile.TarInfo(arcname)
            entry.size = path.stat().st_size
            entry.mode = 0o755 if os.access(path, os.X_OK) else 0o644
            with path.open("rb") as file:
                tar.addfile(entry, file)
    return buffer.getvalue()
