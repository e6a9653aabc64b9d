"""What a checkpoint's file says beside its weights: names and shapes of tensors, as adapters to other programs need."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from .errors import CheckpointError


@dataclass(frozen=True)
class RawTensor:
    """A tensor as a safetensors file has it. `dtype` is a word of that format, such as "BF16"."""

    dtype: str
    shape: tuple[int, ...]
    data: bytearray


class Header:
    """The tensors of a safetensors file, of an autoencoder or of a whole diffusion model that has one. A name is told
    by its end. For files that the library has opened: it checks them, this does not."""

    def __init__(self, file: str | os.PathLike) -> None:
        self._file = Path(file)
        with self._file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            self._tensors = json.loads(opened.read(length))
        self._start = 8 + length

    def matching(self, pattern: str) -> dict[tuple[str, ...], list[int]]:
        """The shapes of the tensors whose names end as the expression says, by the groups of the expression."""
        ending = re.compile(f"(?:.*\\.)?{pattern}")
        found = ((ending.fullmatch(name), entry) for name, entry in self._tensors.items())
        return {match.groups(): entry["shape"] for match, entry in found if match}

    def has(self, ending: str) -> bool:
        return bool(self.matching(re.escape(ending)))

    def read(self, ending: str) -> RawTensor:
        name = next((name for name in self._tensors if f".{name}".endswith(f".{ending}")), None)
        if name is None:
            raise CheckpointError(f"{self._file}: it has no tensor {ending}")
        entry = self._tensors[name]
        start, end = entry["data_offsets"]
        with self._file.open("rb") as opened:
            opened.seek(self._start + start)
            data = bytearray(opened.read(end - start))
        return RawTensor(entry["dtype"], tuple(entry["shape"]), data)
