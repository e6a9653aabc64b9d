"""A whole encode run: sources, folder, engine, progress, manifest. The same above every engine."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Callable, Protocol

from .folder import RunFolder
from .progress import ProgressBar, summary, total
from .settings import Settings
from .sources import Shard, digest, list_items, shards


class Engine(Protocol):
    """Where workers run."""

    fingerprint: dict[str, Any]

    @property
    def workers(self) -> int: ...

    def run(self, shards: Sequence[Shard], folder: Path, run: str) -> Iterator[dict[str, Any] | None]: ...

    def figures(self) -> list[dict[str, Any]]: ...

    def close(self) -> None: ...


def encode(
    sources: Sequence[str],
    out: Path,
    settings: Settings,
    engine: Callable[[], Engine],
    *,
    shard_items: int = 64,
    retry_broken: bool = False,
    quiet: bool = False,
) -> dict[str, Any]:
    """Encodes what is not complete yet. Answers the figures of this invocation; `skipped` items were complete."""
    items = list_items(sources)
    parts = shards(items, shard_items)
    identity: dict[str, Any] = {"command": "encode", "settings": settings.identity(), "shard_items": shard_items}
    with RunFolder(out) as folder:
        workers = engine()
        try:
            identity["sources"] = {"count": len(items), "sha256": digest(items)}
            run = folder.begin({**identity, "fingerprint": workers.fingerprint}, items)
            complete = folder.records(parts)
            if retry_broken:
                complete = {index: record for index, record in complete.items() if not _has_broken(record)}
            left = [shard for shard in parts if shard.index not in complete]
            skipped = len(items) - sum(len(shard.items) for shard in left)
            figures = _run(workers, left, folder, run, None if quiet else ProgressBar(len(items), skipped))
            folder.finish(parts)
            figures["skipped"] = skipped
            folder.summarize(figures)
            return figures
        finally:
            workers.close()


def _run(
    workers: Engine, left: Sequence[Shard], folder: RunFolder, run: str, bar: ProgressBar | None
) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        for _ in workers.run(left, folder.path, run):
            if bar is not None:
                bar.show(total(workers.figures()))
    finally:
        if bar is not None:
            bar.close()
    return summary(total(workers.figures()), time.perf_counter() - start, workers.workers)


def _has_broken(record: dict[str, Any]) -> bool:
    return any("error" in about for about in record["items"])
