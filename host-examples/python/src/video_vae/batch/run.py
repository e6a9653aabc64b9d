"""A whole run: inputs, folder, engine, progress, manifest. The same for every command and above every engine."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Protocol

from .folder import RunFolder
from .progress import ProgressBar, summary, total
from .settings import Resources
from .sources import Item, Shard, digest


class ShardWorker(Protocol):
    """A device at work on shards."""

    fingerprint: dict[str, Any]
    device: str

    def open_folder(self, folder: Path) -> None: ...

    def submit(self, shard: Shard) -> Future[dict[str, Any]]: ...

    def figures(self) -> dict[str, Any]: ...

    def close(self) -> None: ...


# Makes the worker of a device, also in another process.
WorkerMaker = Callable[[str, Resources], ShardWorker]


class Engine(Protocol):
    """Where workers run."""

    fingerprint: dict[str, Any]

    @property
    def workers(self) -> int: ...

    def run(self, shards: Sequence[Shard], folder: Path, run: str) -> Iterator[dict[str, Any] | None]: ...

    def figures(self) -> list[dict[str, Any]]: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Job:
    """What a run does: `identity` is everything that its files depend on beside the inputs and the workers."""

    identity: dict[str, Any]
    items: Sequence[Item]
    shards: Sequence[Shard]


def run(
    job: Job,
    out: Path,
    engine: Callable[[], Engine],
    *,
    retry_broken: bool = False,
    quiet: bool = False,
    unit: str = "clip",
) -> dict[str, Any]:
    """Does what is not complete yet. `unit` names an item to people. Answers the figures of this invocation; `skipped`
    items were complete."""
    with RunFolder(out) as folder:
        workers = engine()
        try:
            sources = {"count": len(job.items), "sha256": digest(job.items)}
            identity = {**job.identity, "sources": sources, "fingerprint": workers.fingerprint}
            name = folder.begin(identity, job.items)
            complete = folder.records(job.shards)
            if retry_broken:
                complete = {index: record for index, record in complete.items() if not _has_broken(record)}
            left = [shard for shard in job.shards if shard.index not in complete]
            skipped = len(job.items) - sum(len(shard.items) for shard in left)
            bar = None if quiet else ProgressBar(len(job.items), skipped, unit=unit)
            figures = _work(workers, left, folder, name, bar)
            folder.finish(job.shards)
            figures["skipped"] = skipped
            folder.summarize(figures)
            return figures
        finally:
            workers.close()


def _work(
    workers: Engine, left: Sequence[Shard], folder: RunFolder, name: str, bar: ProgressBar | None
) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        for _ in workers.run(left, folder.path, name):
            if bar is not None:
                bar.show(total(workers.figures()))
    finally:
        if bar is not None:
            bar.close()
    return summary(total(workers.figures()), time.perf_counter() - start, workers.workers)


def _has_broken(record: dict[str, Any]) -> bool:
    return any("error" in about for about in record["items"])
