"""What all of the isolation suite shares: an image that asks for more than it may have, and a metadata service."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.register_assert_rewrite("tests.isolation.properties")

from tests.isolation.machine import metadata_service  # noqa: E402 - after the rewriting of its imports was asked for
from tests.support.engine import build_image, ensure_base_image  # noqa: E402


@pytest.fixture(scope="session")
def hostile_image() -> str:
    """Its environment names all GPUs, as those of CUDA images do, and indices of another machine."""
    return build_image(
        "outerproduct-test:hostile",
        ["ENV NVIDIA_VISIBLE_DEVICES=all", "ENV CUDA_VISIBLE_DEVICES=3"],
        ensure_base_image(),
    )


@pytest.fixture(scope="session")
def metadata() -> Iterator[None]:
    with metadata_service():
        yield
