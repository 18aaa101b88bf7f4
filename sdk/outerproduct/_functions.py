"""How a function reaches the container: by name or by value, with or without its client, with which sources."""

from __future__ import annotations

import functools
import inspect
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from outerproduct import _serialization, _source

MAX_SOURCE_TEXT = 16 * 1024
MAX_PREVIEW_CHARACTERS = 200
MAX_PREVIEWS = 32
CLIENT_NAMES = frozenset({"client", "runtime"})
PYTHON_VERSION = ".".join(platform.python_version_tuple()[:2])


@dataclass(frozen=True)
class PreparedCall:
    """A function and its arguments, ready to be sent."""

    qualified_name: str
    by_value: bool
    wants_client: bool
    pickled_function: bytes
    pickled_arguments: bytes
    source: bytes
    """tar.gz archive; empty when no local code is needed."""
    source_text: str
    previews: tuple[tuple[str, str], ...]


class FunctionPreparer:
    """One function, prepared for any number of Calls: it is pickled once, and its sources are archived once.

    Raises TypeError for what is not callable and what can not be pickled.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        if not callable(fn):
            raise TypeError(f"fn={fn!r} must be a function, not {type(fn).__name__}")
        self._fn = fn
        self.by_value = not is_importable(fn)
        self.name = qualified_name(fn)
        self._pickled = b""
        self._modules = frozenset({str(fn.__module__)})
        if self.by_value:
            pickled = _serialization.dumps(fn, f"fn={self.name}", _captured(fn))
            self._pickled = pickled.data
            self._modules = pickled.modules | _serialization.mentioned_modules(pickled.data)
        self._source_text = _source_text(fn)
        self._archives: dict[frozenset[str], bytes] = {}

    def prepare(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PreparedCall:
        """One Call. Raises TypeError for arguments that do not fit or can not be pickled."""
        wants = wants_client(self._fn, args, kwargs)
        parts = {f"args[{index}]": arg for index, arg in enumerate(args)}
        parts |= {f"kwargs[{name!r}]": value for name, value in kwargs.items()}
        arguments = _serialization.dumps((tuple(args), dict(kwargs)), f"the arguments of {self.name}", parts)
        return PreparedCall(
            qualified_name=self.name,
            by_value=self.by_value,
            wants_client=wants,
            pickled_function=self._pickled,
            pickled_arguments=arguments.data,
            source=self._archive(self._modules | arguments.modules),
            source_text=self._source_text,
            previews=_previews(self._fn, args, kwargs, wants),
        )

    def _archive(self, modules: frozenset[str]) -> bytes:
        tops = frozenset(name.partition(".")[0] for name in modules)
        if tops not in self._archives:
            roots = _source.local_roots(tops)
            self._archives[tops] = _source.source_archive(roots) if roots else b""
        return self._archives[tops]


def qualified_name(fn: Callable[..., Any]) -> str:
    """ "module:qualname", for people and for import."""
    inner: Any = fn
    while isinstance(inner, functools.partial):
        inner = inner.func
    if not hasattr(inner, "__qualname__"):
        inner = type(inner)
    return f"{inner.__module__ or 'builtins'}:{inner.__qualname__}"


def is_importable(fn: Callable[..., Any]) -> bool:
    """Whether importing "module:qualname" gives this very object."""
    module_name = getattr(fn, "__module__", None)
    path = getattr(fn, "__qualname__", None)
    if not module_name or not path or module_name == "__main__" or "<" in path:
        return False
    bound_to = getattr(fn, "__self__", None)
    # Builtin functions are bound to their module, and importable all the same.
    if bound_to is not None and not inspect.ismodule(bound_to):
        return False
    found: Any = sys.modules.get(str(module_name))
    if found is None or (getattr(found, "__file__", None) is None and not inspect.isbuiltin(fn)):
        return False  # A module without a file (made by hand, in a notebook) can not be sent.
    for name in str(path).split("."):
        found = getattr(found, name, None)
    return found is fn


def wants_client(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the function gets the Attempt's client in front of its arguments.

    It does when its first positional parameter is annotated OuterProductClient or named `client` or `runtime`; else
    when the arguments fit only so. Raises TypeError when they do not fit either way.
    """
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return False  # Some builtins have no signature: Python checks the arguments when it calls them.
    first = next(iter(signature.parameters.values()), None)
    if first is not None and first.kind in {first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD}:
        annotation = first.annotation
        text = annotation if isinstance(annotation, str) else getattr(annotation, "__qualname__", "")
        names_client = text.strip("'\"").rpartition(".")[2] == "OuterProductClient" or first.name in CLIENT_NAMES
        if names_client and first.name not in kwargs:
            _check_fit(signature, fn, (None, *args), kwargs)
            return True
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        try:
            signature.bind(None, *args, **kwargs)
        except TypeError:
            raise TypeError(f"The arguments do not fit {qualified_name(fn)}{signature}: {error}") from None
        return True
    return False


def _check_fit(
    signature: inspect.Signature, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"The arguments do not fit {qualified_name(fn)}{signature}, which gets its client first: {error}"
        ) from None


def _captured(fn: Callable[..., Any]) -> dict[str, object]:
    """Variables that a function brings along, by name."""
    try:
        found = inspect.getclosurevars(fn)
    except TypeError:
        return {}
    return {**found.globals, **found.nonlocals}


def _source_text(fn: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(fn)[:MAX_SOURCE_TEXT]
    except (OSError, TypeError):
        return ""


def _previews(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], wants: bool
) -> tuple[tuple[str, str], ...]:
    try:
        names = list(inspect.signature(fn).parameters)[1 if wants else 0 :]
    except (TypeError, ValueError):
        names = []
    named = [(names[index] if index < len(names) else "", value) for index, value in enumerate(args[:MAX_PREVIEWS])]
    named += list(kwargs.items())
    return tuple((name, _preview(value)) for name, value in named[:MAX_PREVIEWS])


def _preview(value: object) -> str:
    if isinstance(value, (bytes, bytearray, str, list, tuple, dict, set)) and len(value) > 10_000:
        return f"<{type(value).__name__} of length {len(value):,}>"
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001 - a user's __repr__ may raise anything
        text = f"<{type(value).__qualname__}, whose repr raises {type(error).__qualname__}>"
    return text if len(text) <= MAX_PREVIEW_CHARACTERS else text[: MAX_PREVIEW_CHARACTERS - 1] + "…"
