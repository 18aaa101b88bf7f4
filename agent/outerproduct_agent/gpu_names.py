"""Canonical GPU type names: what `gpu_type` takes, derived from NVML's product name and total memory.

A type is the model, followed by the memory size where the model alone does not say it: "L4", "RTX-4090",
"A100-80GB". Form factor and cooling (SXM, PCIe, NVL) are not part of it. Names that the table does not know
become a slug of themselves, so that a GPU newer than this file can be used. Which types match a request such
as "A100" is the scheduler's business.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_BRANDS = frozenset({"nvidia", "tesla", "geforce"})

# Words of product names that say how a board is built, sold or cooled, not what it computes with.
_IGNORED_WORD = re.compile(
    r"SXM\d?|PCIE|NVL|HBM\d?E?|AC|DGXS|DGX|FHHL|GENERATION|GPU|EDITION|WITH|DESIGN|WORKSTATION|SERVER|BLACKWELL"
    r"|ACTIVE",
    re.IGNORECASE,
)
_MEMORY_WORD = re.compile(r"(\d+)GB?", re.IGNORECASE)
_MIG_SUFFIX = re.compile(r"\s+MIG\s+(\S+)\s*$")

_GIB = 1 << 30
# NVML's total is below the size on the box by what firmware and ECC keep: up to 6 % with inline ECC (A10G,
# L4).
_MEMORY_TOLERANCE = 0.08


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Memory sizes in GB as sold; a GPU of the usual size is called by its model alone."""

    sizes: tuple[int, ...]
    usual: int | None = None


# Models sold with more than one memory size, and models whose product name has a size that says nothing new.
# The GB in "GH200 480GB" is the CPU's memory.
_MODELS = {
    "A100": _Sizes((40, 64, 80)),
    "A800": _Sizes((40, 80)),
    "V100": _Sizes((16, 32)),
    "P100": _Sizes((12, 16)),
    "V100S": _Sizes((32,), usual=32),
    "H100": _Sizes((64, 80, 94, 96), usual=80),
    "H800": _Sizes((80,), usual=80),
    "H200": _Sizes((141,), usual=141),
    "H20": _Sizes((96, 141), usual=96),
    "GH200": _Sizes((96, 144), usual=96),
    "GTX-1060": _Sizes((3, 6), usual=6),
    "RTX-2060": _Sizes((6, 12), usual=6),
    "RTX-3050": _Sizes((4, 6, 8), usual=8),
    "RTX-3060": _Sizes((8, 12), usual=12),
    "RTX-3080": _Sizes((10, 12), usual=10),
    "RTX-4060-Ti": _Sizes((8, 16), usual=8),
    "RTX-5060-Ti": _Sizes((8, 16), usual=16),
    "RTX-A2000": _Sizes((6, 12), usual=6),
}


def canonical_type(product_name: str, memory_bytes: int) -> str:
    """The canonical type of a GPU.

    Args:
        product_name: as NVML gives it, such as "NVIDIA A100-SXM4-80GB"; a MIG profile at its end is ignored.
        memory_bytes: total memory of the (whole) GPU; 0 where it is not known.

    Returns:
        Such as "A100-80GB"; never empty, without spaces.
    """
    words = re.split(r"[^A-Za-z0-9.]+", _MIG_SUFFIX.sub("", product_name))
    words = [word for word in words if word]
    while words and words[0].lower() in _BRANDS:
        words.pop(0)
    stated = next((int(match[1]) for word in words if (match := _MEMORY_WORD.fullmatch(word))), None)
    kept = [word for word in words if not _IGNORED_WORD.fullmatch(word) and not _MEMORY_WORD.fullmatch(word)]
    model = "-".join(kept) or "GPU"
    known = _MODELS.get(model)
    if known is None:
        return f"{model}-{stated}GB" if stated else model
    size = _size_as_sold(known, memory_bytes) if memory_bytes else stated
    return model if size is None or size == known.usual else f"{model}-{size}GB"


def mig_type(parent_type: str, profile: str) -> str:
    """The type of a MIG device: "A100-40GB" and "3g.20gb" give "A100-40GB:3g.20gb"."""
    return f"{parent_type}:{profile}"


def mig_profile(product_name: str) -> str:
    """The profile at the end of a MIG device's product name, such as "3g.20gb"; empty where it has none."""
    match = _MIG_SUFFIX.search(product_name)
    return match[1] if match else ""


def _size_as_sold(known: _Sizes, memory_bytes: int) -> int:
    gib = memory_bytes / _GIB
    nearest = min(known.sizes, key=lambda size: abs(size - gib))
    return nearest if abs(nearest - gib) <= nearest * _MEMORY_TOLERANCE else round(gib)
