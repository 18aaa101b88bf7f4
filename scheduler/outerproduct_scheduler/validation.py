"""What a CallSpec may say. The SDK checks the same earlier; this holds for every client.

Each error names the field, the value and what would be right.
"""

from __future__ import annotations

import re

from outerproduct.v1 import call_pb2, payload_pb2
from outerproduct_scheduler.errors import InvalidArgument

MIB = 1024**2
MINIMUM_MEMORY_BYTES = 64 * MIB
"""Python with the runner needs about half of it before the function begins."""
MAX_CPUS = 4096
MAX_ACCELERATORS = 64
MAX_INLINE_BYTES = 256 * 1024
MAX_ENV_VARS = 1000
MAX_ENV_BYTES = 128 * 1024
MAX_LABELS = 64
MAX_LABEL_CHARACTERS = 256
MAX_LAYERS = 64
MAX_PACKAGES = 256
MAX_PACKAGE_CHARACTERS = 512
MAX_MOUNTS = 64
MAX_BASE_CHARACTERS = 1024
MAX_NAME_CHARACTERS = 256
MAX_FUNCTION_CHARACTERS = 1024
MAX_SOURCE_CHARACTERS = 16 * 1024
MAX_PREVIEWS = 32
MAX_PREVIEW_CHARACTERS = 256
MAX_ATTEMPTS = 1000

_BASE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_RESERVED_ENV = frozenset({"NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"})
_OURS = "OUTERPRODUCT_"
_SDK_VARIABLE = "OUTERPRODUCT_LOCAL_FILES"


def check_call_spec(spec: call_pb2.CallSpec) -> None:
    """Raises InvalidArgument."""
    _function(spec.function)
    _payload("arguments", spec.arguments)
    _image(spec.image)
    _compute(spec)
    _env_vars(spec)
    if not 0 <= spec.timeout_seconds < float("inf"):
        raise InvalidArgument(f"timeout_seconds={spec.timeout_seconds} must be 0 (none) or a number of seconds")
    if not -1000 <= spec.priority <= 1000:
        raise InvalidArgument(f"priority={spec.priority} must be from -1000 to 1000")
    if spec.retry_strategy.max_attempts > MAX_ATTEMPTS:
        raise InvalidArgument(f"max_attempts={spec.retry_strategy.max_attempts} must be at most {MAX_ATTEMPTS}")
    _length("display_name", spec.display_name, MAX_NAME_CHARACTERS)
    for field, labels in (("labels", spec.labels), ("node_labels", spec.node_labels)):
        if len(labels) > MAX_LABELS:
            raise InvalidArgument(f"{field}: {len(labels)} are more than {MAX_LABELS}")
        for name, value in labels.items():
            _length(f"{field}: a name", name, MAX_LABEL_CHARACTERS)
            _length(f"{field}: the value of {name!r}", value, MAX_LABEL_CHARACTERS)
    if len(spec.argument_previews) > MAX_PREVIEWS:
        raise InvalidArgument(f"argument_previews: {len(spec.argument_previews)} are more than {MAX_PREVIEWS}")
    for preview in spec.argument_previews:
        _length("argument_previews: a name", preview.name, MAX_PREVIEW_CHARACTERS)
        _length("argument_previews: a value", preview.value, MAX_PREVIEW_CHARACTERS)


def _function(function: call_pb2.Function) -> None:
    module, colon, path = function.qualified_name.partition(":")
    if not (module and colon and path):
        raise InvalidArgument(f'qualified_name={function.qualified_name[:200]!r} must be "module:qualname"')
    _length("qualified_name", function.qualified_name, MAX_FUNCTION_CHARACTERS)
    _length("source_text", function.source_text, MAX_SOURCE_CHARACTERS)
    if function.by_value:
        _payload("pickled", function.pickled)
        if not re.fullmatch(r"3\.\d{1,2}", function.python_version):
            raise InvalidArgument(
                f'python_version={function.python_version!r} must be "3.<minor>" for a function by value'
            )
    if function.HasField("source"):
        _blob("source", function.source)


def _payload(field: str, payload: payload_pb2.Payload) -> None:
    kind = payload.WhichOneof("content")
    if kind is None:
        raise InvalidArgument(f"{field} has no content: send it inline, or name a blob")
    if kind == "inline" and len(payload.inline) > MAX_INLINE_BYTES:
        raise InvalidArgument(
            f"{field} has {len(payload.inline)} bytes inline, more than {MAX_INLINE_BYTES}: upload it with BlobService"
        )
    if kind == "blob":
        _blob(field, payload.blob)


def _blob(field: str, ref: payload_pb2.BlobRef) -> None:
    if not _SHA256.fullmatch(ref.sha256):
        raise InvalidArgument(f"{field}: sha256={ref.sha256[:80]!r} must be 64 lower-case hex digits")


def _image(image: call_pb2.Image) -> None:
    base = image.base
    if len(base) > MAX_BASE_CHARACTERS or "://" in base or ".." in base or not _BASE.fullmatch(base):
        raise InvalidArgument(
            f"image: base={base[:100]!r} must be a registry reference of at most {MAX_BASE_CHARACTERS} characters "
            'without scheme or "..", such as "python:3.12-slim"'
        )
    if len(image.layers) > MAX_LAYERS or len(image.mounts) > MAX_MOUNTS:
        raise InvalidArgument(f"image: at most {MAX_LAYERS} layers and {MAX_MOUNTS} mounts")
    for layer in image.layers:
        if not 1 <= len(layer.packages) <= MAX_PACKAGES:
            raise InvalidArgument(f"image: a layer has 1 to {MAX_PACKAGES} packages, not {len(layer.packages)}")
        for package in layer.packages:
            if not package.strip() or package.startswith("-") or len(package.splitlines()) != 1:
                raise InvalidArgument(f"image: package {package[:100]!r} must be one requirement, not an option")
            _length("image: a package", package, MAX_PACKAGE_CHARACTERS)
    for mount in image.mounts:
        if not mount.remote_path.startswith("/") or ".." in mount.remote_path.split("/") or mount.remote_path == "/":
            raise InvalidArgument(f'image: remote_path={mount.remote_path[:200]!r} must be absolute, without ".."')
        _blob("image: content", mount.content)


def _compute(spec: call_pb2.CallSpec) -> None:
    compute = spec.compute
    if not 1 <= compute.cpus <= MAX_CPUS:
        raise InvalidArgument(f"cpus={compute.cpus} must be from 1 to {MAX_CPUS}")
    if compute.memory_bytes < MINIMUM_MEMORY_BYTES:
        raise InvalidArgument(
            f"memory_bytes={compute.memory_bytes} is below the floor of {MINIMUM_MEMORY_BYTES} bytes (64 MiB), which "
            "Python itself needs"
        )
    if compute.accelerator_count > MAX_ACCELERATORS:
        raise InvalidArgument(f"accelerator_count={compute.accelerator_count} must be at most {MAX_ACCELERATORS}")
    if compute.accelerator and not compute.accelerator_count:
        raise InvalidArgument(
            f"accelerator={compute.accelerator[:100]!r} with accelerator_count=0: ask for one or more"
        )
    _length("accelerator", compute.accelerator, 128)


def _env_vars(spec: call_pb2.CallSpec) -> None:
    if len(spec.env_vars) > MAX_ENV_VARS:
        raise InvalidArgument(f"env_vars: {len(spec.env_vars)} are more than {MAX_ENV_VARS}")
    total = 0
    for name, value in spec.env_vars.items():
        if not _ENV_NAME.fullmatch(name):
            raise InvalidArgument(f"env_vars: {name[:100]!r} is not a name: letters, digits and _, no digit first")
        if name in _RESERVED_ENV or (name.startswith(_OURS) and name != _SDK_VARIABLE):
            raise InvalidArgument(f"env_vars: {name[:100]} is set by the agent")
        if "\0" in value:
            raise InvalidArgument(f"env_vars: the value of {name[:100]} holds a NUL character")
        total += len(name) + len(value.encode())
    if total > MAX_ENV_BYTES:
        raise InvalidArgument(f"env_vars have {total} bytes, more than {MAX_ENV_BYTES}: pass data as arguments")


def _length(field: str, text: str, limit: int) -> None:
    if len(text) > limit:
        raise InvalidArgument(f"{field} has {len(text)} characters, more than {limit}")
