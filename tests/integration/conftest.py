"""One stack for the integration tests that only run Calls; those that break things start their own."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator

import docker
import pytest
from tests.support.engine import attempt_containers, ensure_base_image
from tests.support.stack import Stack, running_stack

import outerproduct as op


@pytest.fixture(scope="session")
def base_image() -> str:
    return ensure_base_image()


@pytest.fixture(scope="session")
def image(base_image: str) -> op.Image:
    return op.Image.from_registry(base_image)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, base_image: str) -> Iterator[Stack]:
    """Scheduler and one agent; at the end no container of the agent may be left."""
    with running_stack(tmp_path_factory.mktemp("stack")) as running:
        yield running
    assert attempt_containers(running.agent_id()) == []


@pytest.fixture
def client(stack: Stack) -> op.OuterProductClient:
    return stack.client()


@pytest.fixture(scope="session")
def bare_image() -> str:
    """An image with one static file and no Python at all."""

    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        entry = tarfile.TarInfo("etc/hostname")
        tar.addfile(entry)
    client = docker.from_env()
    try:
        client.api.import_image_from_data(archive.getvalue(), repository="outerproduct-test", tag="bare")
    finally:
        client.close()
    return "outerproduct-test:bare"
