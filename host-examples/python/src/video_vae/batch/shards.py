"""Shards: WebDataset tar files of safetensors. Their bytes depend on the contents alone."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy

from .errors import BrokenInput
from .files import AtomicFile, open_regular

# Of the header of a tensor file, and of the JSON beside one: as much as the safetensors library takes.
_HEADER_BYTES = 100_000_000
# Of the headers of a tar that hold a name of more than 100 letters, and other facts beside it.
_LONG_NAME = 1 << 20
# Levels of that JSON. Its deepest, a list of times in an object, is the second.
_LEVELS = 32
_NAMES = {"float16": "F16", "float32": "F32", "uint8": "U8"}
_DTYPES = {name: numpy.dtype(dtype).newbyteorder("<") for dtype, name in _NAMES.items()}


class ShardWriter:
    """Appends samples to a tar file in the order they come."""

    def __init__(self, path: Path) -> None:
        self._file = AtomicFile(path)

    def add(self, key: str, tensors: Mapping[str, numpy.ndarray], about: Mapping[str, Any]) -> None:
        self._member(f"{key}.json", [json.dumps(about, sort_keys=True).encode()])
        self._member(f"{key}.safetensors", safetensors(tensors))

    def commit(self) -> tuple[int, str]:
        """Bytes and SHA-256 of the file, which is now there."""
        # Two empty blocks are the end; records of 20 blocks are what tar itself writes.
        self._file.write(bytes(-(self._file.bytes + 1024) % tarfile.RECORDSIZE + 1024))
        return self._file.bytes, self._file.commit()

    def abort(self) -> None:
        self._file.abort()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *error: Any) -> None:
        self.abort()

    def _member(self, name: str, parts: list[Any]) -> None:
        entry = tarfile.TarInfo(name)
        entry.size = sum(len(part) for part in parts)
        # From 8 GiB on only GNU's and POSIX's formats have room for the size.
        self._file.write(entry.tobuf(tarfile.GNU_FORMAT))
        for part in parts:
            self._file.write(part)
        self._file.write(bytes(-entry.size % tarfile.BLOCKSIZE))


def safetensors(tensors: Mapping[str, numpy.ndarray]) -> list[Any]:
    """The bytes of a safetensors file, in parts, without a copy of the tensors."""
    arrays = {name: numpy.ascontiguousarray(tensors[name]) for name in sorted(tensors)}
    header = safetensors_header({name: (array.dtype, array.shape) for name, array in arrays.items()})
    return [header, *(memoryview(array).cast("B") for array in arrays.values())]


def safetensors_header(
    tensors: Mapping[str, tuple[numpy.dtype, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """What comes before the bytes of the tensors, which follow in this order."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        end = offset + dtype.itemsize * _count(shape)
        header[name] = {"dtype": _NAMES[dtype.name], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def parse_safetensors(data: Any) -> tuple[dict[str, numpy.ndarray], dict[str, str]]:
    """The arrays of a safetensors file, without a copy, and its metadata. Raises BrokenInput."""
    try:
        start = 8 + int.from_bytes(data[:8], "little")
        if not 8 < start <= min(len(data), _HEADER_BYTES):
            raise ValueError(f"a header of {start - 8} bytes in {len(data)}")
        header = json.loads(bytes(data[8:start]))
        metadata = header.pop("__metadata__", {})
        if not all(isinstance(text, str) for text in metadata.values()):
            raise ValueError("metadata that is not text")
        return {name: _array(data, start, name, entry) for name, entry in header.items()}, metadata
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, MemoryError) as error:
        raise BrokenInput(f"no safetensors with known types: {_words(error)}") from error


def _array(data: Any, start: int, name: str, entry: Mapping[str, Any]) -> numpy.ndarray:
    first, end = entry["data_offsets"]
    dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
    if not 0 <= first <= end <= len(data) - start or end - first != dtype.itemsize * _count(shape):
        raise ValueError(f"{name} lies outside the file")
    return numpy.frombuffer(data, dtype, _count(shape), start + first).reshape(shape)


def parse_about(data: bytes) -> dict[str, Any]:
    """The JSON beside a tensor: an object of a few levels. Raises BrokenInput."""
    if len(data) > _HEADER_BYTES:
        raise BrokenInput(f"its JSON has {len(data)} bytes; {_HEADER_BYTES} are the most")
    try:
        about = json.loads(data)
    except (ValueError, RecursionError, MemoryError) as error:
        raise BrokenInput(f"its JSON cannot be read: {_words(error)}") from error
    if not isinstance(about, dict):
        raise BrokenInput(f"its JSON is a {type(about).__name__}; it must be an object")
    level: list[Any] = [about]
    for _ in range(_LEVELS):
        inner = (part.values() if isinstance(part, dict) else part for part in level)
        level = [part for parts in inner for part in parts if isinstance(part, (dict, list))]
        if not level:
            return about
    raise BrokenInput(f"its JSON is nested more than {_LEVELS} levels deep")


def _words(error: Exception) -> str:
    return "nested too deep" if isinstance(error, RecursionError) else str(error) or type(error).__name__


@dataclass(frozen=True)
class Sample:
    """One sample of a shard. With `error` it cannot be read; without a key it is a damaged place of the shard."""

    key: str | None
    about: dict[str, Any]
    tensors: dict[str, numpy.ndarray]
    error: str | None = None


@dataclass(frozen=True)
class _Member:
    """A file in a tar, or with `error` a place that holds none."""

    name: str
    data: bytes = b""
    error: str | None = None


def read_shard(path: Path) -> Iterator[Sample]:
    """The samples of a shard in order. One that cannot be read has an error, and the next ones follow."""
    key: str | None = None
    parts: dict[str, _Member] = {}
    for member in _members(path):
        # As WebDataset has it: the key ends with the first dot of the file's name.
        folder, slash, name = member.name.rpartition("/")
        name, _, extension = name.partition(".")
        if member.name and extension not in ("json", "safetensors"):
            continue
        if parts and (folder + slash + name != key or extension in parts or not member.name):
            yield _sample(key, parts)
            parts = {}
        if not member.name:
            yield Sample(None, {}, {}, member.error)
            continue
        key, parts[extension] = folder + slash + name, member
    if parts:
        yield _sample(key, parts)


def _sample(key: str | None, parts: dict[str, _Member]) -> Sample:
    about: dict[str, Any] = {}
    try:
        for member in parts.values():
            if member.error is not None:
                raise BrokenInput(member.error)
        if "json" in parts:
            about = parse_about(parts["json"].data)
        if "safetensors" not in parts:
            raise BrokenInput("no .safetensors beside its .json")
        return Sample(key, about, parse_safetensors(parts["safetensors"].data)[0])
    except BrokenInput as error:
        return Sample(key, about, {}, str(error))


def _members(path: Path) -> Iterator[_Member]:
    """The files of a tar. What is damaged is passed over, to the next header that is whole."""
    end = 0
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            for entry, after in _entries(file, size):
                yield from _gap(file, end, entry.offset)
                end = after
                if not entry.isdir():
                    yield _member(file, size, entry)
            yield from _gap(file, end, size)
            if size < end + tarfile.BLOCKSIZE:
                yield _Member("", error=f"it ends at byte {size} without the mark of a tar's end: samples are lost")
    except OSError as error:
        yield _Member("", error=error.strerror or str(error))


def _gap(file: BinaryIO, start: int, end: int) -> Iterator[_Member]:
    """Nothing, if there are only zeros, as at the end of a tar."""
    file.seek(start)
    for at in range(start, end, 1 << 20):
        data = file.read(min(end - at, 1 << 20))
        if data.count(0) != len(data):
            yield _Member("", error=f"bytes {start} to {end} are damaged: they are no member of a tar file")
            return


def _member(file: BinaryIO, size: int, entry: tarfile.TarInfo) -> _Member:
    name = entry.name[2:] if entry.name.startswith("./") else entry.name
    if entry.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
        return _Member(name, error="not a regular file")
    if entry.offset_data + entry.size > size:
        return _Member(name, error=f"the shard ends at byte {size}, inside of {name}")
    file.seek(entry.offset_data)
    try:
        return _Member(name, file.read(entry.size))
    except MemoryError:
        return _Member(name, error=f"not enough host memory for its {entry.size} bytes")


def _entries(file: BinaryIO, size: int) -> Iterator[tuple[tarfile.TarInfo, int]]:
    """The headers of a tar, each with the place of the next one. Blocks that are no header are passed over."""
    at = 0
    while at < size:
        try:
            entry, after = _entry(file, at)
        except OSError:
            raise
        except Exception:  # of any kind: tarfile parses what it has not checked
            after = at
        if after > at:
            yield entry, after
        at = after if after > at else at + tarfile.BLOCKSIZE


def _entry(file: BinaryIO, at: int) -> tuple[tarfile.TarInfo, int]:
    file.seek(at)
    entry = tarfile.TarInfo.frombuf(file.read(tarfile.BLOCKSIZE), "utf-8", "surrogateescape")
    if entry.type in (tarfile.REGTYPE, tarfile.AREGTYPE):
        entry.offset, entry.offset_data = at, at + tarfile.BLOCKSIZE
        return entry, entry.offset_data + -(-entry.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
    if entry.size > _LONG_NAME:
        raise ValueError("a name of too many bytes")
    # Long names and the like take several headers.
    file.seek(at)
    with tarfile.TarFile(fileobj=file, mode="r") as tar:
        return tar.firstmember, tar.offset


def _count(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
