"""Image: the recipe of what a function runs in."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

MAX_BASE_CHARACTERS = 1024
MAX_LAYERS = 64
MAX_PACKAGES = 256
MAX_PACKAGE_CHARACTERS = 512

_BASE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*")


@dataclass(frozen=True)
class LocalFiles:
    """A local file or folder, and where it is placed in the container."""

    local_path: str
    """Absolute, as resolved when the Image was defined."""
    remote_path: str
    is_directory: bool


@dataclass(frozen=True)
class Image:
    """A frozen recipe: a registry base, layers of packages, and local files placed over it at each start.

    Equal recipes are equal and hash equally. Example::

        image = (
            op.Image.from_registry("python:3.12-slim")
            .with_uv_pip_install("numpy", "torch==2.9.0")
            .add_local_dir("data", "/data")
        )
    """

    base: str
    layers: tuple[tuple[str, ...], ...] = ()
    mounts: tuple[LocalFiles, ...] = ()

    def __post_init__(self) -> None:
        _check_base(self.base)
        if len(self.layers) > MAX_LAYERS:
            raise ValueError(f"layers: {len(self.layers)} are more than the {MAX_LAYERS} that an Image may have")
        for packages in self.layers:
            _check_packages(packages)

    @classmethod
    def from_registry(cls, uri: str) -> Image:
        """An Image of a registry, such as "python:3.12-slim" or "registry.example.com/team/train:v3".

        Raises ValueError for anything else than a reference of at most 1,024 characters without scheme or "..".
        """
        return cls(uri)

    def with_uv_pip_install(self, *packages: str) -> Image:
        """With one more layer: these requirements, installed by `uv pip install`.

        Raises ValueError for no or more than 256 requirements, one of more than 512 characters, one that begins with
        "-" or holds a line break, and beyond 64 layers.
        """
        return replace(self, layers=(*self.layers, tuple(packages)))

    def add_local_dir(self, local_path: str | os.PathLike[str], remote_path: str) -> Image:
        """With the files of a local folder (hidden ones too) at an absolute path of the container.

        Nothing is rebuilt: they are placed there when each container starts; later ones win. The folder is looked at
        when a Run is submitted.
        """
        return self._with(local_path, remote_path, is_directory=True)

    def add_local_file(self, local_path: str | os.PathLike[str], remote_path: str) -> Image:
        """With a local file at an absolute path of the container; see `add_local_dir`."""
        return self._with(local_path, remote_path, is_directory=False)

    def _with(self, local_path: str | os.PathLike[str], remote_path: str, *, is_directory: bool) -> Image:
        path = PurePosixPath(remote_path)
        if not path.is_absolute() or ".." in path.parts or path == PurePosixPath("/"):
            raise ValueError(f'remote_path={remote_path!r} must be an absolute path below "/", without ".."')
        local = os.path.abspath(os.fspath(local_path))
        return replace(self, mounts=(*self.mounts, LocalFiles(local, str(path), is_directory)))


def check_local_files(files: LocalFiles) -> None:
    """Raises ValueError when the local path is not there, or is not what was said."""
    path = Path(files.local_path)
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise ValueError(f"local_path={files.local_path!r} can not be read: {error.strerror}") from error
    if files.is_directory and not stat.S_ISDIR(mode):
        raise ValueError(f"local_path={files.local_path!r} is not a folder: use add_local_file for a file")
    if not files.is_directory and not stat.S_ISREG(mode):
        raise ValueError(f"local_path={files.local_path!r} is not a file: use add_local_dir for a folder")


def _check_base(base: object) -> None:
    if not isinstance(base, str):
        raise TypeError(f'base={base!r} must be a registry reference, such as "python:3.12-slim"')
    shown = base if len(base) <= 100 else base[:100] + "…"
    if len(base) > MAX_BASE_CHARACTERS:
        raise ValueError(f"base={shown!r} has more than {MAX_BASE_CHARACTERS} characters")
    if "://" in base or ".." in base or not _BASE.fullmatch(base):
        raise ValueError(f'base={shown!r} must be a registry reference without scheme or "..", as "python:3.12-slim"')


def _check_packages(packages: tuple[str, ...]) -> None:
    if not 1 <= len(packages) <= MAX_PACKAGES:
        raise ValueError(f"packages: a layer has 1 to {MAX_PACKAGES} requirements, not {len(packages)}")
    for package in packages:
        if not isinstance(package, str):
            raise TypeError(f'packages: {package!r} must be a requirement, such as "numpy>=2"')
        if not package.strip() or package.startswith("-"):
            raise ValueError(f'packages: {package!r} must be a requirement, such as "numpy>=2", not an option')
        if len(package) > MAX_PACKAGE_CHARACTERS:
            raise ValueError(f"packages: {package[:60]!r}… has more than {MAX_PACKAGE_CHARACTERS} characters")
        if len(package.splitlines()) != 1:
            raise ValueError(f"packages: {package!r} holds a line break")
