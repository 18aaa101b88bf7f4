"""Image: a frozen recipe with limits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import outerproduct as op
from outerproduct._image import check_local_files

BASE = op.Image.from_registry("python:3.12-slim")


def test_equal_recipes_are_equal_and_hash_equally() -> None:
    def recipe() -> op.Image:
        return op.Image.from_registry("python:3.12").with_uv_pip_install("a", "b").add_local_dir("x", "/x")

    assert recipe() == recipe()
    assert len({recipe(), recipe()}) == 1
    assert recipe() != recipe().with_uv_pip_install("c")


def test_each_step_gives_a_new_image() -> None:
    BASE.with_uv_pip_install("numpy")
    BASE.add_local_file("f", "/f")
    assert op.Image.from_registry("python:3.12-slim") == BASE


@pytest.mark.parametrize(
    "uri",
    [
        "python:3.12-slim",
        "registry.example.com:5000/team/train:v3",
        "busybox@sha256:" + "a" * 64,
        "a" * 1024,
    ],
)
def test_references_that_are_taken(uri: str) -> None:
    assert op.Image.from_registry(uri).base == uri


@pytest.mark.parametrize("uri", ["", "https://example.com/a", "a/../b", "a b", "a\nb", "-v", "a" * 1025, "$(id)"])
def test_references_that_are_refused(uri: str) -> None:
    with pytest.raises(ValueError, match="base="):
        op.Image.from_registry(uri)


@pytest.mark.parametrize(
    "packages",
    [(), ("",), (" ",), ("-r requirements.txt",), ("a\nb",), ("a\rb",), ("a" * 513,), ("a",) * 257],
    ids=["none", "empty", "blank", "option", "newline", "return", "long", "many"],
)
def test_requirements_that_are_refused(packages: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="packages:"):
        BASE.with_uv_pip_install(*packages)


def test_the_limits_themselves_are_allowed() -> None:
    image = BASE.with_uv_pip_install(*["a" * 512] * 256)
    for _ in range(63):
        image = image.with_uv_pip_install("numpy")
    with pytest.raises(ValueError, match="64"):
        image.with_uv_pip_install("numpy")


def test_local_paths_are_resolved_where_the_image_is_defined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    image = BASE.add_local_dir("data", "/data")
    monkeypatch.chdir("/")
    assert image.mounts[0].local_path == os.path.join(tmp_path, "data")


def test_local_paths_are_looked_at_only_when_they_are_sent(tmp_path: Path) -> None:
    image = BASE.add_local_dir(tmp_path / "nothing", "/data").add_local_dir(__file__, "/code")
    for mount in image.mounts:
        with pytest.raises(ValueError, match="local_path="):
            check_local_files(mount)


@pytest.mark.parametrize("remote_path", ["data", "/", "/a/../b", ""])
def test_remote_paths_are_absolute_and_below_the_root(remote_path: str) -> None:
    with pytest.raises(ValueError, match="remote_path="):
        BASE.add_local_dir("data", remote_path)
