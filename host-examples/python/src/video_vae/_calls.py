"""Calls of the library on a handle: what goes into them, and which of them this thread is in."""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from . import _abi
from ._library import library
from .errors import ArgumentError, check

_thread = threading.local()


def call(handle: int, name: str, *arguments: Any) -> int:
    """Calls a function of the library, and raises what it fails with. Any of them may call back, if only to log."""
    with calling(handle):
        status = getattr(library(), name)(*arguments)
    return check(status, handle)


@contextmanager
def calling(handle: int) -> Iterator[None]:
    """A call on the handle is under way in this thread."""
    _stack().append(handle)
    try:
        yield
    finally:
        _stack().pop()


def inside_call(handle: int) -> bool:
    """Whether this thread is in a call on the handle, which is so in callbacks and in signal handlers."""
    return handle in _stack()


def _stack() -> list[int]:
    if not hasattr(_thread, "handles"):
        _thread.handles = []
    return _thread.handles


def c_text(text: str | bytes, argument: str) -> bytes:
    """A text for C, where a NUL would end it."""
    try:
        data = text if isinstance(text, bytes) else text.encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(f"{argument} is {text!r}; it must be a text that UTF-8 can hold") from error
    if b"\0" in data:
        raise ArgumentError(f"{argument} is {text!r}; it must not have a NUL in it")
    return data


def c_int64(value: Any, argument: str) -> int:
    """An integer for C, where one of more bits would lose them."""
    number = operator.index(value)
    if not -(2**63) <= number < 2**63:
        raise ArgumentError(f"{argument} is {value}; it must fit into 64 bits")
    return number


def c_five(shape: Sequence[int], argument: str) -> Any:
    """A shape [B, C, T, H, W] for C."""
    if len(shape) != 5:
        raise ArgumentError(f"{argument} is {tuple(shape)}; it must have five numbers: B, C, T, H, W")
    return _abi.Five(*(c_int64(size, argument) for size in shape))
