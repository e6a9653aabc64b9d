"""Reads inputs ahead of the device in processes of their own, into shared memory that is used again and again.

Knows frames and processes; knows no device, shard or model.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Callable

import numpy

from .errors import BatchError
from .frames import FrameRule, FrameSpan

# A reader that dies may have been killed by accident. The input is to blame after this many.
ATTEMPTS = 3
# One slot is read into while the device reads the other.
SLOTS = 2
# Items that a reader has at a time: one that it reads and one so that it need not wait.
QUEUED = 2
# So many readers in succession that die before they can read mean that none can.
STARTS = 5


@dataclass(frozen=True)
class Piece:
    """Frames [T, H, W, C] of a clip in a slot. `release` gives the slot back to its reader."""

    frames: numpy.ndarray
    last: bool
    release: Callable[[], None]


@dataclass(frozen=True)
class Broken:
    """The clip ends here, for this reason."""

    reason: str


class Restart:
    """The reader died; the pieces of the clip come again from the first."""


@dataclass(eq=False)
class Clip:
    """An input of which frames have come. `pieces` has a Piece marked as the last one, or Broken, at its end."""

    ticket: int
    shape: tuple[int, ...]
    whole: bool
    info: dict[str, Any]
    pieces: queue.SimpleQueue[Piece | Broken | Restart] = field(default_factory=queue.SimpleQueue)


@dataclass
class _Order:
    ticket: int
    path: str
    span: FrameSpan | None
    deaths: int = 0
    clip: Clip | None = None


class _Slot:
    """The parent's view of a reader's slot."""

    def __init__(self) -> None:
        self.descriptor = _shared_file()
        self._map: mmap.mmap | None = None

    def frames(self, shape: Sequence[int]) -> numpy.ndarray:
        size = int(numpy.prod(shape))
        if self._map is None or len(self._map) < size:
            # The old mapping goes with its last array.
            self._map = mmap.mmap(self.descriptor, os.fstat(self.descriptor).st_size, prot=mmap.PROT_READ)
        return numpy.frombuffer(self._map, numpy.uint8, size).reshape(shape)

    def close(self) -> None:
        os.close(self.descriptor)


class _Reader:
    """A process that reads, and its slots."""

    def __init__(self, rule: FrameRule, slot_bytes: int, threads: int) -> None:
        self.slots = [_Slot() for _ in range(SLOTS)]
        self.orders: deque[_Order] = deque()
        self.started = False
        ours, theirs = socket.socketpair()
        with theirs:
            descriptors = [theirs.fileno(), *(slot.descriptor for slot in self.slots)]
            command = [sys.executable, "-m", "video_vae.batch.reader", *map(str, descriptors)]
            package = str(Path(__file__).resolve().parents[2])
            paths = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
            environment = {**os.environ, "PYTHONPATH": paths}
            self.process = subprocess.Popen(
                command, pass_fds=descriptors, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
            )
        self.control = Connection(ours.detach())
        self.send((rule, slot_bytes, threads))

    def send(self, message: Any) -> None:
        # A dead reader is seen where its answers are awaited.
        with contextlib.suppress(OSError):
            self.control.send(message)

    def close(self) -> int:
        self.control.close()
        self.process.kill()
        code = self.process.wait()
        for slot in self.slots:
            slot.close()
        return code


class ReadAhead:
    """Readers and the thread that serves them. `on_clip` gets clips as their first frames come, `on_broken` (ticket,
    reason) for inputs without any, `on_failure` an error after which nothing more comes. All are called there."""

    def __init__(
        self,
        readers: int,
        rule: FrameRule,
        slot_bytes: int,
        on_clip: Callable[[Clip], None],
        on_broken: Callable[[int, str], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        threads = max((os.cpu_count() or 1) // readers, 1)
        self._settings = (rule, slot_bytes, threads)
        self._on_clip, self._on_broken, self._on_failure = on_clip, on_broken, on_failure
        self._lock = threading.Lock()
        self._orders: deque[_Order] = deque()
        self._released: deque[tuple[_Reader, int]] = deque()
        self._closing = False
        self._failed_starts = 0
        self._wake_in, self._wake_out = os.pipe()
        os.set_blocking(self._wake_out, False)
        self._readers = [_Reader(*self._settings) for _ in range(readers)]
        self._thread = threading.Thread(target=self._serve, name="read-ahead", daemon=True)
        self._thread.start()

    def read(self, ticket: int, path: str, span: FrameSpan | None = None) -> None:
        """Asks for an input. Those asked for first are begun first."""
        with self._lock:
            self._orders.append(_Order(ticket, path, span))
        self._wake()

    def processes(self) -> list[int]:
        """The ids of the readers."""
        return [reader.process.pid for reader in self._readers]

    def close(self) -> None:
        """Ends the readers. Frames of pieces that were not released stay valid."""
        with self._lock:
            self._closing = True
        self._wake()
        self._thread.join()
        self._break_all("stopped")
        for reader in self._readers:
            reader.close()
        with self._lock:
            os.close(self._wake_in)
            os.close(self._wake_out)
            self._wake_out = -1

    def _wake(self) -> None:
        # A full pipe wakes as well, and a closed one has nobody to wake.
        with self._lock, contextlib.suppress(BlockingIOError):
            if self._wake_out >= 0:
                os.write(self._wake_out, b"w")

    def _serve(self) -> None:
        try:
            while True:
                with self._lock:
                    if self._closing:
                        return
                    released, self._released = self._released, deque()
                for reader, slot in released:
                    if reader in self._readers:
                        reader.send(("free", slot))
                self._hand_out()
                controls = {reader.control: reader for reader in self._readers}
                for ready in wait([self._wake_in, *controls]):
                    if ready == self._wake_in:
                        os.read(self._wake_in, 4096)
                    else:
                        self._receive(controls[ready])
        except BaseException as error:
            self._on_failure(error)
            self._break_all("stopped")

    def _hand_out(self) -> None:
        while True:
            reader = min(self._readers, key=lambda reader: len(reader.orders))
            with self._lock:
                if len(reader.orders) >= QUEUED or not self._orders:
                    return
                order = self._orders.popleft()
            reader.orders.append(order)
            reader.send(("item", order.ticket, order.path, order.span))

    def _receive(self, reader: _Reader) -> None:
        try:
            kind, ticket, *rest = reader.control.recv()
        except (EOFError, OSError):
            self._replace(reader)
            return
        if kind == "ready":
            reader.started, self._failed_starts = True, 0
            return
        order = reader.orders[0]
        assert order.ticket == ticket
        if kind == "broken":
            reader.orders.popleft()
            self._break(order, rest[0])
            return
        slot, shape, last, info = rest
        piece = Piece(reader.slots[slot].frames(shape), last, lambda: self._release(reader, slot))
        if last:
            reader.orders.popleft()
        self._deliver(order, piece, shape, info)

    def _deliver(self, order: _Order, piece: Piece, shape: tuple[int, ...], info: dict[str, Any]) -> None:
        if order.clip is None:
            order.clip = Clip(order.ticket, shape, piece.last, info)
            order.clip.pieces.put(piece)
            self._on_clip(order.clip)
        else:
            # What the file is, is complete with its last frame.
            order.clip.info = info
            order.clip.pieces.put(piece)

    def _break(self, order: _Order, reason: str) -> None:
        if order.clip is None:
            self._on_broken(order.ticket, reason)
        else:
            order.clip.pieces.put(Broken(reason))

    def _break_all(self, reason: str) -> None:
        """Ends clips of which only a part has come; somebody may wait for the rest."""
        for order in [*self._orders, *(order for reader in self._readers for order in reader.orders)]:
            if order.clip is not None:
                order.clip.pieces.put(Broken(reason))

    def _release(self, reader: _Reader, slot: int) -> None:
        with self._lock:
            self._released.append((reader, slot))
        self._wake()

    def _replace(self, reader: _Reader) -> None:
        """A new process for one that died. What it was reading is read again."""
        code = reader.close()
        if not reader.started:
            self._failed_starts += 1
            if self._failed_starts >= STARTS:
                raise BatchError(f"the processes that read inputs do not start: {_ending(code)}")
        self._readers[self._readers.index(reader)] = _Reader(*self._settings)
        orders = reader.orders
        if orders:
            blamed = orders[0]
            blamed.deaths += 1
            if blamed.deaths >= ATTEMPTS:
                orders.popleft()
                self._break(blamed, f"the process that reads it died {ATTEMPTS} times: {_ending(code)}")
            elif blamed.clip is not None:
                blamed.clip.pieces.put(Restart())
        with self._lock:
            self._orders.extendleft(reversed(orders))


def _ending(code: int) -> str:
    """How a process ended."""
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def _shared_file() -> int:
    """A file without a name, in memory where there is such a thing. /dev/shm is often too small in containers."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("video-vae-frames")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
