"""What a name on the command line means."""

from __future__ import annotations

import pytest

from outerproduct._cli.names import Kind, parse_name

RUN_ID = "3f0c9f1e-5f3a-4b55-9c3f-0a1b2c3d4e5f"


@pytest.mark.parametrize(
    ("text", "kind", "full"),
    [
        (RUN_ID, Kind.RUN, f"runs/{RUN_ID}"),
        (RUN_ID.upper(), Kind.RUN, f"runs/{RUN_ID}"),
        (f"runs/{RUN_ID}", Kind.RUN, f"runs/{RUN_ID}"),
        (f"runs/{RUN_ID}/", Kind.RUN, f"runs/{RUN_ID}"),
        (f"runs/{RUN_ID}/calls/0.3", Kind.CALL, f"runs/{RUN_ID}/calls/0.3"),
        (f"runs/{RUN_ID}/calls/0/attempts/2", Kind.ATTEMPT, f"runs/{RUN_ID}/calls/0/attempts/2"),
        ("gpu-1", Kind.NODE, "gpu-1"),
        ("gpu-1/A100-80GB", Kind.NODE, "gpu-1/A100-80GB"),
        (f"runs/{RUN_ID}/attempts/1", Kind.NODE, f"runs/{RUN_ID}/attempts/1"),
        ("runs", Kind.NODE, "runs"),
    ],
)
def test_names(text: str, kind: Kind, full: str) -> None:
    name = parse_name(text)
    assert (name.kind, name.full) == (kind, full)
