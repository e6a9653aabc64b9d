"""What there is: devices, nodes, their ports and parameters, as the library describes them."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass, replace
from typing import Any

from . import _abi
from ._library import library
from .errors import check

DTYPES = {
    _abi.VVAE_DTYPE_U8: "uint8",
    _abi.VVAE_DTYPE_U16: "uint16",
    _abi.VVAE_DTYPE_F16: "float16",
    _abi.VVAE_DTYPE_BF16: "bfloat16",
    _abi.VVAE_DTYPE_F32: "float32",
}
KINDS = {
    _abi.VVAE_PARAM_INT: "int",
    _abi.VVAE_PARAM_FLOAT: "float",
    _abi.VVAE_PARAM_BOOL: "bool",
    _abi.VVAE_PARAM_CHOICE: "choice",
    _abi.VVAE_PARAM_BYTES: "bytes",
    _abi.VVAE_PARAM_TEXT: "text",
}


@dataclass(frozen=True)
class Device:
    """A device of this machine. `id` is what `VideoVae(device=...)` takes."""

    id: str
    name: str
    memory_total: int
    memory_free: int
    uuid: str
    """What the driver knows a GPU by, as nvidia-smi prints it; empty for the CPU."""
    compute_capability: tuple[int, int]
    """Of a GPU, (8, 6) for 8.6; (0, 0) for the CPU."""


@dataclass(frozen=True)
class Port:
    """A tensor that goes into a node ("input") or comes out of it ("output"). Ports of one kind can be connected."""

    name: str
    direction: str
    kind: str
    optional: bool
    dtypes: tuple[str, ...]
    help: str


@dataclass(frozen=True)
class Parameter:
    """A setting: a keyword of `VideoVae`, and an attribute of its objects."""

    key: str
    kind: str
    default: Any
    auto: bool
    minimum: float | None
    maximum: float | None
    step: float | None
    choices: tuple[str, ...]
    unit: str
    help: str

    def parse(self, text: str) -> Any:
        """The library's text as a value of Python's."""
        if self.auto and text == "auto":
            return text
        if self.kind == "bool":
            return text in ("true", "1")
        if self.kind == "int":
            return int(text)
        return float(text) if self.kind == "float" else text

    def format(self, value: Any) -> str:
        """A value as the text that the library takes. None is "auto" where there is one."""
        if value is None and self.auto:
            return "auto"
        if isinstance(value, bool):
            return "true" if value else "false"
        return str(value)


@dataclass(frozen=True)
class Node:
    """Something that can be run: "encode" or "decode"."""

    id: str
    label: str
    help: str
    ports: tuple[Port, ...]
    parameters: tuple[Parameter, ...]


def version() -> str:
    """The version of the library."""
    return _text(library().vvae_version())


def devices() -> list[Device]:
    """The devices of this machine; the CPU is one of them."""
    found = []
    for index in range(library().vvae_device_count()):
        desc = _abi.sized(_abi.vvae_device_desc)
        check(library().vvae_device_info(index, ctypes.byref(desc)))
        capability = (desc.compute_major, desc.compute_minor)
        memory = (desc.memory_total, desc.memory_free)
        found.append(Device(_text(desc.id), _text(desc.name), *memory, _text(desc.uuid), capability))
    return found


def default_device() -> str:
    """The id of the device for tensors that go with "auto": the first CUDA device, or the CPU without one."""
    return next((device.id for device in devices() if device.id.startswith("cuda:")), "cpu")


@functools.cache
def nodes() -> tuple[Node, ...]:
    """The nodes of the library."""
    return tuple(_node(index) for index in range(library().vvae_node_count()))


@functools.cache
def parameters() -> dict[str, Parameter]:
    """The parameters of all nodes by their keys. A key that two nodes have is one setting."""
    return {parameter.key: parameter for node in nodes() for parameter in node.parameters}


def _node(index: int) -> Node:
    desc = _abi.sized(_abi.vvae_node_desc)
    check(library().vvae_node_info(index, ctypes.byref(desc)))
    ports = tuple(_port(index, port) for port in range(library().vvae_port_count(index)))
    params = tuple(_parameter(index, param) for param in range(library().vvae_param_count(index)))
    return Node(_text(desc.id), _text(desc.label), _text(desc.help), ports, params)


def _port(node: int, index: int) -> Port:
    desc = _abi.sized(_abi.vvae_port_desc)
    check(library().vvae_port_info(node, index, ctypes.byref(desc)))
    direction = "input" if desc.direction == _abi.VVAE_PORT_INPUT else "output"
    dtypes = tuple(DTYPES.get(code, hex(code)) for code in desc.dtypes[: desc.dtype_count])
    return Port(_text(desc.name), direction, _text(desc.kind), bool(desc.optional), dtypes, _text(desc.help))


def _parameter(node: int, index: int) -> Parameter:
    desc = _abi.sized(_abi.vvae_param_desc)
    check(library().vvae_param_info(node, index, ctypes.byref(desc)))
    ranged = bool(desc.flags & _abi.VVAE_PARAM_HAS_RANGE)
    words = [_text(library().vvae_choice(node, index, choice)) for choice in range(desc.choice_count)]
    parameter = Parameter(
        key=_text(desc.key),
        kind=KINDS.get(desc.kind, "text"),
        default=_text(desc.default_value),
        auto=bool(desc.flags & _abi.VVAE_PARAM_HAS_AUTO),
        minimum=desc.min if ranged else None,
        maximum=desc.max if ranged else None,
        step=desc.step if ranged else None,
        choices=tuple(words),
        unit=_text(desc.unit),
        help=_text(desc.help),
    )
    # The default is a text like any other value, and its meaning depends on the rest.
    return replace(parameter, default=parameter.parse(parameter.default))


def _text(value: bytes | None) -> str:
    return (value or b"").decode("utf-8", "replace")
