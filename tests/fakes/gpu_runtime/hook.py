"""Stands in for nvidia-container-runtime-hook: Docker runs it as a prestart hook of every container with GPUs.

It gets the OCI state on standard input (https://github.com/opencontainers/runtime-spec/blob/main/runtime.md#state),
reads from the bundle's environment which GPUs were asked for, as NVIDIA's does, and makes device nodes in the
container's /dev: /dev/nvidiaN for the N-th GPU of the machine. It writes down what it was asked for. Standard library
only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

NVIDIA_MAJOR = 195
"""https://docs.kernel.org/admin-guide/devices.html"""
CONFIGURATION = Path(__file__).with_name("gpus.json")
RECORD = Path(__file__).with_name("asked.jsonl")


def main() -> None:
    state = json.load(sys.stdin)
    bundle = Path(state["bundle"])
    config = json.loads((bundle / "config.json").read_text())
    env = dict(entry.split("=", 1) for entry in config["process"]["env"] if "=" in entry)
    uuids = env["NVIDIA_VISIBLE_DEVICES"].split(",")
    machine: list[str] = json.loads(CONFIGURATION.read_text())
    devices = Path(config["root"]["path"], "dev")
    for uuid in uuids:
        index = machine.index(uuid)
        node = ["mknod", "-m", "666", str(devices / f"nvidia{index}"), "c", str(NVIDIA_MAJOR), str(index)]
        subprocess.run(["nsenter", "--mount", "--target", str(state["pid"]), *node], check=True)
    line = json.dumps({"uuids": uuids, "capabilities": env.get("NVIDIA_DRIVER_CAPABILITIES", "")})
    descriptor = os.open(RECORD, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, f"{line}\n".encode())
    os.close(descriptor)


if __name__ == "__main__" and sys.argv[1:] == ["prestart"]:
    main()
