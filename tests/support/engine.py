"""What is on the Docker engine of the tests: the base image, and what our label finds."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import docker

BASE_IMAGE = os.environ.get("OUTERPRODUCT_BASE_IMAGE", "outerproduct-base:latest")
ROOT = Path(__file__).resolve().parents[2]
ATTEMPT_LABEL = "outerproduct.attempt"


def ensure_base_image() -> str:
    """The name of an image with Python, made by the same script that the README's commands use."""
    subprocess.run(
        ["bash", "-c", f'. "{ROOT}/scripts/lib/common.sh" && need_docker && need_base_image'],
        check=True,
        timeout=600,
    )
    return BASE_IMAGE


def build_image(tag: str, changes: list[str], base: str = BASE_IMAGE) -> str:
    """An image like `base` with further Dockerfile instructions (ENV, USER, CMD): no build, so no network."""
    client = docker.from_env()
    try:
        container = client.containers.create(base, command=["true"])
        try:
            container.commit(repository=tag.partition(":")[0], tag=tag.partition(":")[2], changes="\n".join(changes))
        finally:
            container.remove()
    finally:
        client.close()
    return tag


def attempt_containers(agent_id: str | None = None) -> list[str]:
    """Names of the Attempts that have a container, running or not; those of one agent, or of all."""
    client = docker.from_env()
    try:
        found = client.containers.list(all=True, filters={"label": ATTEMPT_LABEL})
        return [
            container.labels[ATTEMPT_LABEL]
            for container in found
            if agent_id is None or container.labels.get("outerproduct.agent") == agent_id
        ]
    finally:
        client.close()
