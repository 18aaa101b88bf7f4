"""Where the address and the key come from."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

SOCKET_VARIABLE = "OUTERPRODUCT_SOCKET"


@dataclass(frozen=True)
class Credentials:
    base_url: str
    api_key: str

    def __repr__(self) -> str:
        return f"Credentials(base_url={self.base_url!r}, api_key=...)"


def local_file() -> Path:
    """What `outerproduct up` leaves for this user on this machine."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "outerproduct" / "local.json"


def _left_by_up() -> dict[str, str]:
    try:
        left = json.loads(local_file().read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise RuntimeError(f"{local_file()} can not be read: {error}. Start `outerproduct up` again.") from error
    if not isinstance(left, dict):
        raise RuntimeError(f"{local_file()} does not hold a JSON object. Start `outerproduct up` again.")  # noqa: TRY004
    return left


def find_credentials(api_key: str | None = None, base_url: str | None = None) -> Credentials:
    """Arguments, else OUTERPRODUCT_API_KEY and OUTERPRODUCT_BASE_URL, else what `outerproduct up` left.

    Raises RuntimeError that says what to set.
    """
    api_key = api_key or os.environ.get("OUTERPRODUCT_API_KEY")
    base_url = base_url or os.environ.get("OUTERPRODUCT_BASE_URL")
    if not (api_key and base_url):
        left = _left_by_up()
        # The key that was left is for the address that was left, and for no other.
        if not base_url or base_url == left.get("base_url"):
            api_key = api_key or left.get("api_key")
            base_url = base_url or left.get("base_url")
    if not api_key or not base_url:
        missing = " and ".join(
            name
            for name, value in (("OUTERPRODUCT_API_KEY", api_key), ("OUTERPRODUCT_BASE_URL", base_url))
            if not value
        )
        raise RuntimeError(
            f"No scheduler is configured: set {missing}, pass api_key and base_url to op.init, or start "
            "`outerproduct up` on this machine."
        )
    return Credentials(base_url, api_key)
