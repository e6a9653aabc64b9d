"""The process that reads inputs: `python -m video_vae.batch.reader CONTROL SLOT...`, all file descriptors.

A decoder that crashes takes this process down and no other. Frames go through shared memory, messages through CONTROL.
It ends when the other side closes CONTROL.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
from collections import deque
from multiprocessing.connection import Connection
from typing import Any

import numpy

from .errors import BrokenInput
from .frames import FrameReader, FrameRule, FrameSpan

# Slots grow in steps of this many bytes if the number of frames is not known.
_STEP = 32 << 20


class Slot:
    """Shared memory for frames [T, H, W, C]. It grows and never shrinks."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._map: mmap.mmap | None = None
        self.size = 0

    def reserve(self, size: int) -> None:
        if size <= self.size:
            return
        if self._map is not None:
            self._map.close()
        os.ftruncate(self._descriptor, size)
        self._map, self.size = mmap.mmap(self._descriptor, size), size

    def put(self, offset: int, frame: Any, channels: int) -> None:
        """Copies a frame without the padding of its rows."""
        assert self._map is not None
        plane, row = frame.planes[0], channels * frame.width
        pixels = numpy.frombuffer(plane, numpy.uint8).reshape(frame.height, plane.line_size)
        room = numpy.frombuffer(self._map, numpy.uint8, frame.height * row, offset)
        room.reshape(frame.height, row)[:] = pixels[:, :row]


class Reader:
    def __init__(self, control: Connection, slots: list[Slot]) -> None:
        self._control, self._slots = control, slots
        self._free = deque(range(len(slots)))
        self._items: deque[tuple[int, str, FrameSpan | None]] = deque()
        rule, self._slot_bytes, self._threads = control.recv()
        self._rule: FrameRule = rule
        control.send(("ready", 0))

    def run(self) -> None:
        while True:
            while not self._items:
                self._receive()
            ticket, path, span = self._items.popleft()
            try:
                self._read(ticket, path, span)
            except BrokenInput as error:
                self._control.send(("broken", ticket, str(error)))
            except MemoryError:
                self._control.send(("broken", ticket, "not enough host memory for its frames"))

    def _receive(self) -> None:
        kind, *rest = self._control.recv()
        if kind == "item":
            self._items.append(tuple(rest))
        else:
            self._free.append(rest[0])

    def _read(self, ticket: int, path: str, span: FrameSpan | None) -> None:
        """Sends the clip in pieces that each fill a slot; most clips are one piece."""
        slot, count, room, size = None, 0, 0, (0, 0)
        with FrameReader(path, self._rule, span, self._threads) as frames:
            for frame in frames:
                if slot is not None and count == room:
                    self._send(ticket, slot, count, size, False, frames.info)
                    slot, count = None, 0
                if slot is None:
                    slot = self._take()
                    size = (frame.height, frame.width)
                    room = max(self._slot_bytes // self._bytes(size), 1)
                self._slots[slot].reserve(self._wanted(slot, size, count, room, span or frames.frames_hint))
                self._slots[slot].put(count * self._bytes(size), frame, self._rule.channels)
                count += 1
            assert slot is not None
            self._send(ticket, slot, count, size, True, frames.info)

    def _bytes(self, size: tuple[int, int]) -> int:
        """Of a frame."""
        return self._rule.channels * size[0] * size[1]

    def _take(self) -> int:
        while not self._free:
            self._receive()
        return self._free.popleft()

    def _wanted(self, slot: int, size: tuple[int, int], count: int, room: int, hint: int | FrameSpan) -> int:
        """How large the slot has to be for one more frame."""
        frame = self._bytes(size)
        if (count + 1) * frame <= self._slots[slot].size:
            return 0
        known = hint.count if isinstance(hint, FrameSpan) else hint
        if self._rule.max_frames is not None:
            known = min(known, self._rule.max_frames)
        step = max(known - count, 1) * frame if count == 0 and known else max(_STEP, frame)
        return min(count * frame + step, room * frame)

    def _send(
        self, ticket: int, slot: int, count: int, size: tuple[int, int], last: bool, info: dict[str, Any]
    ) -> None:
        self._control.send(("piece", ticket, slot, (count, *size, self._rule.channels), last, info))


def main() -> None:
    # Ctrl-C is for the process that started this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control, *slots = (int(word) for word in sys.argv[1:])
    try:
        Reader(Connection(control), [Slot(descriptor) for descriptor in slots]).run()
    except (EOFError, ConnectionError):
        return


if __name__ == "__main__":
    main()
