"""Functions that tell which GPUs their container shows; standard library only."""

from __future__ import annotations

import os
import time
from typing import Any


def look() -> dict[str, Any]:
    """Device nodes, and the variables that say which are visible."""
    return {
        "devices": sorted(name for name in os.listdir("/dev") if name.startswith("nvidia")),
        "visible": os.environ.get("NVIDIA_VISIBLE_DEVICES"),
        "indices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "order": os.environ.get("CUDA_DEVICE_ORDER"),
    }


def look_for(seconds: float) -> dict[str, Any]:
    """The same, and when this was running, so that an overlap can be told."""
    began = time.time()
    time.sleep(seconds)
    return {**look(), "began": began, "ended": time.time()}
