"""Bad input is refused before anything starts, by an error that names the field, the value and what would be right."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from tests.integration.programs import inside
from tests.support.stack import Stack

import outerproduct as op

pytestmark = pytest.mark.docker


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"cpu": 0}, ["cpu=0", "1 or more"]),
        ({"cpu": -1}, ["cpu=-1", "1 or more"]),
        ({"cpu": 1.5}, ["cpu=1.5", "whole number"]),
        ({"cpu": "4"}, ["cpu='4'", "whole number"]),
        ({"cpu": True}, ["cpu=True", "whole number"]),
        ({"memory_bytes": 0}, ["memory_bytes=0", "or more"]),
        ({"memory_bytes": -5}, ["memory_bytes=-5", "or more"]),
        ({"memory_bytes": 1e9}, ["memory_bytes=1000000000.0", "whole number"]),
        ({"memory_bytes": 1024}, ["memory_bytes=1024", "64 MiB"]),
        ({"gpu_type": ""}, ["gpu_type=''", "L4"]),
        ({"gpu": 0, "gpu_type": "L4"}, ["gpu=0", "gpu_type='L4'"]),
        ({"gpu": -1}, ["gpu=-1", "0 or more"]),
        ({"timeout_seconds": 0}, ["timeout_seconds=0", "above 0"]),
        ({"env_vars": {"A B": "1"}}, ["A B", "not a name"]),
    ],
    ids=str,
)
def test_a_parameter_that_cannot_be_right(
    client: op.OuterProductClient, image: op.Image, settings: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        client.run(fn=inside.add, args=(1, 2), image=image, **settings)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"gpu": 1}, ["GPU", "no GPUs"]),
        ({"gpu_type": "H100"}, ["H100"]),
        ({"cpu": 4000}, ["4000", "box"]),
        ({"memory_bytes": 2**50}, ["box", "GiB"]),
    ],
    ids=str,
)
def test_what_no_node_could_ever_hold_is_an_error_at_submission(
    client: op.OuterProductClient, image: op.Image, settings: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(op.UnsupportedConfiguration) as caught:
        client.run(fn=inside.add, args=(1, 2), image=image, **settings)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_function_that_cannot_be_pickled_names_what_it_captures(
    client: op.OuterProductClient, image: op.Image
) -> None:
    lock = threading.Lock()

    def holds_a_lock() -> bool:
        return lock.locked()

    with pytest.raises(TypeError, match="lock"):
        client.run(fn=holds_a_lock, image=image)


def test_an_argument_that_cannot_be_pickled_is_named(client: op.OuterProductClient, image: op.Image) -> None:
    with pytest.raises(TypeError, match=r"args\[1\]"):
        client.run(fn=inside.add, args=(1, threading.Lock()), image=image)


def test_arguments_that_do_not_fit_are_an_error_at_submission(client: op.OuterProductClient, image: op.Image) -> None:
    with pytest.raises(TypeError, match="do not fit"):
        client.run(fn=inside.add, args=(1, 2, 3, 4), image=image)


def test_an_unknown_key_is_refused(stack: Stack) -> None:
    with pytest.raises(op.AccessDenied, match="unknown or revoked"):
        stack.client(api_key="op-wrong").list_nodes()


def test_nothing_was_started_for_any_of_them(client: op.OuterProductClient) -> None:
    assert client.list_runs() == []
