"""How a function travels, and when it gets its client."""

from __future__ import annotations

import functools
import io
import json
import tarfile
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.sdk import programs

import outerproduct as op
from outerproduct._functions import FunctionPreparer, PreparedCall, is_importable, qualified_name, wants_client


def local_function(x: int) -> Callable[[], int]:
    def closure() -> int:
        return x

    return closure


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (programs.add, "tests.unit.sdk.programs:add"),
        (programs.Model.train, "tests.unit.sdk.programs:Model.train"),
        (json.dumps, "json:dumps"),
        (len, "builtins:len"),
    ],
)
def test_what_its_module_has_under_its_name_goes_by_name(fn: Callable[..., Any], name: str) -> None:
    assert is_importable(fn)
    assert qualified_name(fn) == name
    assert FunctionPreparer(fn).prepare((1,), {}).pickled_function == b""


@pytest.mark.parametrize(
    "fn",
    [lambda x: x, local_function(1), functools.partial(programs.add, 1), programs.Model().predict],
    ids=["lambda", "closure", "partial", "bound method"],
)
def test_everything_else_goes_by_value(fn: Callable[..., Any]) -> None:
    assert not is_importable(fn)
    assert FunctionPreparer(fn).by_value


def test_a_function_of_main_goes_by_value() -> None:
    def script_function() -> None: ...

    script_function.__module__, script_function.__qualname__ = "__main__", "script_function"
    assert not is_importable(script_function)


def test_a_function_that_its_module_has_replaced_goes_by_value() -> None:
    def add(a: int) -> int:
        return a

    add.__module__, add.__qualname__ = programs.__name__, "add"
    assert not is_importable(add)


def test_what_is_not_callable_is_refused() -> None:
    with pytest.raises(TypeError, match="must be a function"):
        FunctionPreparer(3)  # type: ignore[arg-type]


def string_annotated(x: "op.OuterProductClient", y: int) -> None: ...  # noqa: UP037


@pytest.mark.parametrize(
    ("fn", "args", "kwargs", "expected"),
    [
        (programs.annotated, (1,), {}, True),
        (string_annotated, (1,), {}, True),
        (programs.named_client, (1,), {}, True),
        (programs.named_client, (), {"x": 1}, True),
        (programs.named_runtime, (1,), {}, True),
        (programs.add, (1,), {}, False),
        (programs.add, (1,), {"b": 2}, False),
        (programs.hosted_style, (1,), {}, True),
        (programs.hosted_style, (1, 2), {}, False),
        (lambda *args: args, (), {}, False),
        (len, ([],), {}, False),
    ],
)
def test_who_gets_its_client(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], expected: bool
) -> None:
    assert wants_client(fn, args, kwargs) is expected


@pytest.mark.parametrize(
    ("fn", "args"),
    [(programs.add, (1, 2, 3, 4)), (programs.named_client, (1, 2)), (programs.annotated, ())],
)
def test_arguments_that_fit_neither_way_are_refused(fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match=r"do not fit tests\.unit\.sdk\.programs:"):
        wants_client(fn, args, {})


@pytest.mark.parametrize(
    ("args", "kwargs", "named"),
    [((1, threading.Lock()), {}, "args[1]"), ((1,), {"b": threading.Lock()}, "kwargs['b']")],
)
def test_an_argument_that_can_not_be_pickled_is_named(
    args: tuple[Any, ...], kwargs: dict[str, Any], named: str
) -> None:
    with pytest.raises(TypeError) as raised:
        FunctionPreparer(programs.add).prepare(args, kwargs)
    assert named in str(raised.value)
    assert "args[0]" not in str(raised.value)


def test_a_captured_variable_that_can_not_be_pickled_is_named() -> None:
    guard = threading.Lock()
    with pytest.raises(TypeError, match="guard"):
        FunctionPreparer(lambda: (guard, 1))


def test_previews_name_the_parameters_and_stand_any_repr() -> None:
    class Angry:
        def __repr__(self) -> str:
            raise RuntimeError

    prepared = FunctionPreparer(programs.add).prepare(("x" * 1000,), {"b": Angry()})
    (first, text), (second, angry) = prepared.previews
    assert (first, second) == ("a", "b")
    assert len(text) <= 200
    assert "repr raises RuntimeError" in angry


def test_the_previews_do_not_count_the_client() -> None:
    prepared = FunctionPreparer(programs.named_client).prepare((5,), {})
    assert prepared.previews == (("x", "5"),)


def test_a_client_that_a_function_captures_travels_without_its_key(client: op.OuterProductClient) -> None:
    prepared = FunctionPreparer(lambda: client.run_id).prepare((), {})
    assert b"op_test_key" not in prepared.pickled_function
    assert prepared.by_value


def in_archive(prepared: PreparedCall) -> set[str]:
    if not prepared.source:
        return set()
    with tarfile.open(fileobj=io.BytesIO(prepared.source)) as tar:
        return {name.partition("/")[0] for name in tar.getnames()}


def imports_in_its_body() -> int:
    from tests.unit.sdk import programs as imported

    return imported.add(1)


# By value, as if they were functions of a script.
imports_in_its_body.__module__ = "__main__"


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (programs.add, (1,)),
        (lambda model: model, (programs.Model(),)),
        (lambda model: model, ([{"model": programs.Model}],)),
        (lambda: programs.add(1), ()),
        (imports_in_its_body, ()),
    ],
    ids=["function by name", "instance among arguments", "class among arguments", "used global", "import in its body"],
)
def test_local_modules_that_are_needed_are_sent_along(fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    assert "tests" in in_archive(FunctionPreparer(fn).prepare(args, {}))


def test_no_source_is_sent_when_none_is_needed() -> None:
    assert FunctionPreparer(len).prepare(([1, "tests"],), {}).source == b""
