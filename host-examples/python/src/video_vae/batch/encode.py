"""The encode command: videos and images to shards of latents."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from .run import Job, WorkerMaker
from .settings import Settings
from .sources import list_items, shards
from .worker import Worker


def encode_job(sources: Sequence[str], settings: Settings, shard_items: int) -> Job:
    """Every input in its shard."""
    items = list_items(sources)
    identity = {"command": "encode", "settings": settings.identity(), "shard_items": shard_items}
    return Job(identity, items, shards(items, shard_items))


def encode_worker(settings: Settings) -> WorkerMaker:
    return functools.partial(Worker, settings)
