"""Where op.init finds the address and the key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import outerproduct as op
from outerproduct._credentials import Credentials, find_credentials


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state folder of a user who has set nothing."""
    for name in ("OUTERPRODUCT_API_KEY", "OUTERPRODUCT_BASE_URL", "OUTERPRODUCT_SOCKET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


def leave(state: Path, text: str) -> None:
    (state / "outerproduct").mkdir()
    (state / "outerproduct" / "local.json").write_text(text)


def test_arguments_come_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTERPRODUCT_API_KEY", "env")
    monkeypatch.setenv("OUTERPRODUCT_BASE_URL", "http://env:1")
    assert find_credentials("arg", "http://arg:1") == Credentials("http://arg:1", "arg")
    assert find_credentials("arg") == Credentials("http://env:1", "arg")


def test_the_environment_comes_before_what_outerproduct_up_left(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(state, json.dumps({"api_key": "left", "base_url": "http://left:1"}))
    assert find_credentials() == Credentials("http://left:1", "left")
    monkeypatch.setenv("OUTERPRODUCT_API_KEY", "env")
    assert find_credentials() == Credentials("http://left:1", "env")


def test_the_key_that_was_left_goes_to_no_other_address(state: Path) -> None:
    leave(state, json.dumps({"api_key": "left", "base_url": "http://left:1"}))
    with pytest.raises(RuntimeError, match="OUTERPRODUCT_API_KEY"):
        find_credentials(base_url="http://elsewhere:1")


def test_nothing_at_all_says_what_to_set() -> None:
    with pytest.raises(RuntimeError, match="OUTERPRODUCT_API_KEY and OUTERPRODUCT_BASE_URL"):
        op.init()


@pytest.mark.parametrize("text", ["{", "[]", '"text"'])
def test_a_broken_file_is_named(state: Path, text: str) -> None:
    leave(state, text)
    with pytest.raises(RuntimeError, match=r"local\.json"):
        find_credentials()


def test_the_key_is_not_shown() -> None:
    assert "secret" not in repr(Credentials("http://a:1", "secret"))
