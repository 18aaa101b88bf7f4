"""Archives that users made are unpacked by root: nothing leaves the folder, nothing keeps special bits."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from outerproduct_agent import archives


def archive(path: Path, *entries: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for entry, data in entries:
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return path


def entry(name: str, *, kind: bytes = tarfile.REGTYPE, mode: int = 0o644, link: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.mode, made.linkname = kind, mode, link
    return made


def test_files_and_modes_come_out_plain(tmp_path: Path) -> None:
    made = archive(tmp_path / "a.tgz", (entry("pkg/run.sh", mode=0o4755), b"x"), (entry("pkg/data", mode=0o666), b"y"))
    archives.unpack(made, tmp_path / "out")
    assert (tmp_path / "out/pkg/run.sh").stat().st_mode & 0o7777 == 0o755
    assert (tmp_path / "out/pkg/data").stat().st_mode & 0o7777 == 0o644


@pytest.mark.parametrize(
    "evil",
    [
        entry("../outside"),
        entry("/etc/absolute"),
        entry("pkg/../../outside"),
        entry("link", kind=tarfile.SYMTYPE, link="/etc/passwd"),
        entry("hard", kind=tarfile.LNKTYPE, link="../outside"),
        entry("device", kind=tarfile.CHRTYPE),
        entry("pipe", kind=tarfile.FIFOTYPE),
    ],
    ids=lambda made: made.name,
)
def test_what_leads_outside_or_is_no_file_is_refused(tmp_path: Path, evil: tarfile.TarInfo) -> None:
    made = archive(tmp_path / "a.tgz", (evil, b""))
    if evil.name == "/etc/absolute":
        # The data filter takes the leading slash off: it stays inside.
        archives.unpack(made, tmp_path / "out")
        assert (tmp_path / "out/etc/absolute").exists()
        return
    with pytest.raises(archives.BadArchive):
        archives.unpack(made, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tgz", "out"]


def test_a_bomb_is_stopped_before_it_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MAX_UNPACKED_BYTES", 1000)
    made = archive(tmp_path / "a.tgz", (entry("zeros"), bytes(2000)))
    with pytest.raises(archives.BadArchive, match="more than"):
        archives.unpack(made, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_what_is_no_archive_is_an_error_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "a.tgz").write_bytes(b"not gzip")
    with pytest.raises(archives.BadArchive):
        archives.unpack(tmp_path / "a.tgz", tmp_path / "out")
