"""Batch work over local files: the folder is placed into each container, and each Call takes its share.

python examples/batch_files.py [FOLDER]
"""

import os
import sys
from pathlib import Path

import outerproduct as op

SHARES = 2
base = op.Image.from_registry(os.environ.get("OUTERPRODUCT_BASE_IMAGE", "python:3.12-slim"))


def line_counts(share: int, shares: int) -> dict[str, int]:
    """Lines of every `shares`-th file."""
    files = sorted(path for path in Path("/data").rglob("*") if path.is_file())
    return {str(path.relative_to("/data")): len(path.read_bytes().splitlines()) for path in files[share::shares]}


def main() -> None:
    folder = sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).parent)
    client = op.init()
    image = base.add_local_dir(folder, "/data")
    totals: dict[str, int] = {}
    for part in client.map(line_counts, range(SHARES), [SHARES] * SHARES, image=image, memory_bytes=256 * 1024**2):
        totals |= part
    for name, lines in sorted(totals.items()):
        print(f"{lines:6} {name}")


if __name__ == "__main__":
    main()
