"""Shards: WebDataset tar files of safetensors. Their bytes depend on the contents alone."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from .errors import BatchError
from .files import AtomicFile, open_regular

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


def parse_safetensors(data: Any) -> dict[str, numpy.ndarray]:
    """The arrays of a safetensors file, without a copy."""
    return parse_with_metadata(data)[0]


def parse_with_metadata(data: Any) -> tuple[dict[str, numpy.ndarray], dict[str, str]]:
    try:
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(bytes(data[8:start]))
        metadata = header.pop("__metadata__", {})
        arrays = {}
        for name, entry in header.items():
            first, end = entry["data_offsets"]
            dtype = _DTYPES[entry["dtype"]]
            if not 0 <= first <= end <= len(data) - start or end - first != dtype.itemsize * _count(entry["shape"]):
                raise ValueError(f"{name} lies outside the file")
            flat = numpy.frombuffer(data, dtype, _count(entry["shape"]), start + first)
            arrays[name] = flat.reshape(entry["shape"])
        return arrays, metadata
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BatchError(f"no safetensors with known types: {error}") from error


@dataclass(frozen=True)
class Sample:
    """One sample of a shard."""

    key: str
    about: dict[str, Any]
    tensors: dict[str, numpy.ndarray]


def read_shard(path: Path) -> Iterator[Sample]:
    """The samples of a shard in order."""
    try:
        with open_regular(path) as file, tarfile.open(fileobj=file, mode="r|") as tar:
            about: dict[str, dict[str, Any]] = {}
            for entry in tar:
                key, _, extension = entry.name.partition(".")
                member = tar.extractfile(entry)
                data = member.read() if member is not None else b""
                if extension == "json":
                    about = {key: json.loads(data)}
                elif extension == "safetensors":
                    yield Sample(key, about.get(key, {}), parse_safetensors(data))
    except (OSError, tarfile.TarError, ValueError, BatchError) as error:
        raise BatchError(f"{path}: {error}") from error


def _count(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
