"""The engine without a cluster: this process, one worker a device."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from .. import DeviceError, devices
from .errors import BatchError
from .fingerprint import differences
from .run import ShardWorker, WorkerMaker
from .settings import Resources
from .sources import Shard

# Shards that a worker has at a time, so that it begins the next while the last one is written.
IN_FLIGHT = 2


def chosen_devices(text: str) -> list[str]:
    """`all` is every GPU, or the CPU if there is none; otherwise a list such as `cuda:0,cuda:1`."""
    there = [device.id for device in devices()]
    if text == "all":
        return [device for device in there if device != "cpu"] or ["cpu"]
    chosen = [part.strip() for part in text.split(",")]
    for device in chosen:
        if device not in there:
            raise BatchError(f"--device {text}: {device!r} is not there; devices are {', '.join(there)}")
    return chosen


class LocalEngine:
    """All devices of this machine."""

    def __init__(self, make: WorkerMaker, device_list: Sequence[str], resources: Resources | None = None) -> None:
        self._workers: list[ShardWorker] = []
        readers = max((os.cpu_count() or 1) // len(device_list), 1)
        resources = resources or Resources(min(readers, 8))
        try:
            self._start(make, device_list, resources)
            self.fingerprint = self._workers[0].fingerprint
            for worker in self._workers[1:]:
                found = differences(self.fingerprint, worker.fingerprint)
                if found:
                    pair = f"{self._workers[0].device} and {worker.device}"
                    raise BatchError(f"{pair} would give different bits: {'; '.join(found)}. Name devices of one kind")
        except BaseException:
            self.close()
            raise

    def _start(self, make: WorkerMaker, device_list: Sequence[str], resources: Resources) -> None:
        """All at once, and in threads: the main thread is where Ctrl-C arrives, and must not be in a callback then."""
        with ThreadPoolExecutor(len(device_list)) as pool:
            starting = [pool.submit(make, device, resources) for device in device_list]
            try:
                wait(starting)
            finally:
                failures = [future.exception() for future in starting]
                self._workers += [future.result() for future, error in zip(starting, failures) if error is None]
        for error in failures:
            if error is not None:
                raise error

    @property
    def workers(self) -> int:
        return len(self._workers)

    def run(self, shards: Sequence[Shard], folder: Path, run: str) -> Iterator[dict[str, Any] | None]:
        """Records as shards are complete, and None from time to time. Shards of a device that is lost go to others."""
        for worker in self._workers:
            worker.open_folder(folder)
        left, usable = deque(shards), list(self._workers)
        at_work: dict[Future[dict[str, Any]], tuple[ShardWorker, Shard]] = {}
        while left or at_work:
            for worker in usable * IN_FLIGHT:
                if left and sum(one is worker for one, _ in at_work.values()) < IN_FLIGHT:
                    shard = left.popleft()
                    at_work[worker.submit(shard)] = (worker, shard)
            done, _ = wait(at_work, timeout=0.5, return_when=FIRST_COMPLETED)
            for future in done:
                worker, shard = at_work.pop(future)
                error = future.exception()
                if isinstance(error, DeviceError) and [worker] != usable:
                    left.appendleft(shard)
                    self._drop(worker, usable, error)
                else:
                    yield future.result()
            yield None

    def figures(self) -> list[dict[str, Any]]:
        return [worker.figures() for worker in self._workers]

    def close(self) -> None:
        for worker in self._workers:
            worker.close()

    @staticmethod
    def _drop(worker: ShardWorker, usable: list[ShardWorker], error: DeviceError) -> None:
        if worker in usable:
            usable.remove(worker)
            print(f"{worker.device} is lost, its shards go to the other devices: {error}", file=sys.stderr)
