"""Unpacks archives that users made, as root, and therefore with suspicion: regular files and folders only, inside the
target, without special bits, within limits. Nothing that exists changes its mode or owner.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

MAX_FILES = 200_000
MAX_UNPACKED_BYTES = 64 * 1024**3


class BadArchive(Exception):
    """The archive is not one that the SDK makes."""


def unpack(archive: Path, target: Path) -> None:
    """Into a folder that is made for it. Blocks. Raises BadArchive."""
    target.mkdir(parents=True, exist_ok=True)
    target.chmod(0o755)
    files = size = 0
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for entry in tar:
                files += 1
                size += entry.size
                if files > MAX_FILES or size > MAX_UNPACKED_BYTES:
                    raise BadArchive(f"more than {MAX_FILES} files or {MAX_UNPACKED_BYTES} bytes")
                if not entry.isfile() and not entry.isdir():
                    raise BadArchive(f"{entry.name!r} is neither a file nor a folder")
                entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
                entry.uid = entry.gid = 0
                entry.uname = entry.gname = ""
                # The data filter refuses absolute paths, "..", and what leads outside (PEP 706).
                tar.extract(entry, target, filter="data")
    except (tarfile.TarError, OSError, EOFError, ValueError) as error:
        raise BadArchive(f"{error}") from error
