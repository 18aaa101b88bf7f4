"""Archives of local code: what is in them, and that the same content gives the same bytes."""

from __future__ import annotations

import importlib
import io
import json
import os
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from outerproduct import _source

WritePackage = Callable[[dict[str, str]], Path]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WritePackage]:
    """Writes files of a project whose folder is on the import path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def write(files: dict[str, str]) -> Path:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        importlib.invalidate_caches()
        return tmp_path

    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


def names(archive: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return tar.getnames()


def roots(*module_names: str) -> dict[str, ModuleType]:
    for name in module_names:
        importlib.import_module(name)
    return _source.local_roots(module_names)


def test_the_whole_top_level_package_travels(project: WritePackage) -> None:
    project({"pkg_a/__init__.py": "", "pkg_a/deep/__init__.py": "", "pkg_a/deep/m.py": "", "pkg_a/data.json": "{}"})
    archive = _source.source_archive(roots("pkg_a.deep.m"))
    assert names(archive) == ["pkg_a/__init__.py", "pkg_a/data.json", "pkg_a/deep/__init__.py", "pkg_a/deep/m.py"]


def test_local_modules_that_it_imports_travel_too(project: WritePackage) -> None:
    project({"main_b.py": "import helper_b, json", "helper_b.py": "from other_b import x", "other_b.py": "x = 1"})
    assert set(roots("main_b")) == {"main_b", "helper_b", "other_b"}


def test_installed_packages_and_the_sdk_do_not_travel() -> None:
    assert _source.local_roots({"json", "pytest", "grpc", "outerproduct", "sys", "__main__"}) == {}


def test_what_nobody_needs_stays(project: WritePackage) -> None:
    project(
        {
            "pkg_c/__init__.py": "",
            "pkg_c/__pycache__/x.pyc": "",
            "pkg_c/.git/config": "",
            "pkg_c/env/pyvenv.cfg": "",
            "pkg_c/big.bin": "",
            "pkg_c/.gitignore": "# large\n*.bin\n",
        }
    )
    assert names(_source.source_archive(roots("pkg_c"))) == ["pkg_c/.gitignore", "pkg_c/__init__.py"]


def test_the_same_content_gives_the_same_bytes(project: WritePackage) -> None:
    folder = project({"pkg_d/__init__.py": "", "pkg_d/a.py": "a = 1", "pkg_d/b.py": "b = 1"})
    first = _source.source_archive(roots("pkg_d"))
    (folder / "pkg_d" / "a.py").unlink()
    (folder / "pkg_d" / "a.py").write_text("a = 1")
    os.utime(folder / "pkg_d" / "b.py", (1, 1))
    assert _source.source_archive(roots("pkg_d")) == first
    (folder / "pkg_d" / "a.py").write_text("a = 20")
    assert _source.source_archive(roots("pkg_d")) != first


def test_too_much_is_refused_with_the_largest_files(project: WritePackage, monkeypatch: pytest.MonkeyPatch) -> None:
    project({"pkg_e/__init__.py": "", "pkg_e/weights.txt": "x" * 5000, "pkg_e/small.txt": "x"})
    monkeypatch.setattr(_source, "MAX_SOURCE_BYTES", 4096)
    with pytest.raises(ValueError, match=r"Largest: pkg_e/weights\.txt \(5,000 bytes\).*Image\.add_local_dir"):
        _source.source_archive(roots("pkg_e"))


def test_a_folder_travels_with_hidden_files_and_executables(tmp_path: Path) -> None:
    (tmp_path / ".hidden").write_text("h")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "tool").write_text("#!/bin/sh")
    (tmp_path / "sub" / "tool").chmod(0o700)
    with tarfile.open(fileobj=io.BytesIO(_source.folder_archive(tmp_path))) as tar:
        assert {entry.name: oct(entry.mode) for entry in tar} == {".hidden": "0o644", "sub/tool": "0o755"}


def test_a_folder_with_pipes_and_dead_links_travels_without_them(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dead").symlink_to("nowhere")
    (tmp_path / "kept").write_text(json.dumps({}))
    assert names(_source.folder_archive(tmp_path)) == ["kept"]
