"""The engine on a Ray cluster: Ray Data with an actor for each device, which runs the same worker as the local engine.

Rows are shards going out and records coming back. Frames and latents never pass through Ray's object store.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .errors import BatchError
from .fingerprint import differences
from .folder import begin_count, check_run, complete_record, end_count
from .run import ShardWorker, WorkerMaker
from .settings import Resources
from .sources import Shard

# Shards that an actor has at a time, so that it begins the next while the last one is written.
IN_FLIGHT = 2
# Workers that may be lost with one shard. Ray would try for ever.
ATTEMPTS = 8


class ShardActor:
    """The actor. Its errors travel as rows: a run ends by them, while Ray would try again."""

    def __init__(self, make: WorkerMaker, device: str, resources: Resources, folder: str, run: str, bits: Any) -> None:
        self._folder, self._id = Path(folder), f"{socket.gethostname()} {os.getpid()}"
        self._worker: ShardWorker | None = None
        self._error = ""
        try:
            check_run(self._folder, run)
            self._worker = make(device, resources)
            self._worker.open_folder(self._folder)
            found = differences(bits, self._worker.fingerprint)
            if found:
                raise BatchError(f"would give other bits than this run has: {'; '.join(found)}")
        except Exception as error:
            self._error = self._words(error)

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        shard, answer = pickle.loads(row["shard"]), {"worker": self._id, "record": "", "figures": "{}"}
        if self._error or self._worker is None:
            return {**answer, "error": self._error}
        try:
            # It may have been completed by a worker that was lost before it could say so.
            record = complete_record(self._folder, shard) if row["resume"] else None
            record = record or self._encode(shard, self._worker)
        except Exception as error:
            return {**answer, "error": self._words(error)}
        figures = json.dumps(self._worker.figures())
        return {**answer, "record": json.dumps(record), "figures": figures, "error": ""}

    def _encode(self, shard: Shard, worker: ShardWorker) -> dict[str, Any]:
        """Counts beginnings in a file, because a shard that takes its worker down leaves nothing else."""
        count = begin_count(self._folder, shard)
        if count > ATTEMPTS:
            raise BatchError(f"{count - 1} workers died with shard {shard.index}; its first is {shard.items[0].path}")
        record = worker.submit(shard).result()
        end_count(self._folder, shard)
        return record

    def _words(self, error: Exception) -> str:
        text = str(error) if isinstance(error, BatchError) else f"{type(error).__name__}: {error}"
        return f"the worker on {socket.gethostname()}: {text}"


class RayEngine:
    """The cluster that `address` or RAY_ADDRESS names, otherwise one of its own on this machine."""

    def __init__(
        self,
        make: WorkerMaker,
        device: str,
        resources: Resources,
        *,
        address: str | None = None,
        workers: int | None = None,
        retry: bool = False,
    ) -> None:
        import ray

        self._ray, self._make, self._resources, self._retry = ray, make, resources, retry
        self._figures: dict[str, dict[str, Any]] = {}
        self._owned = not ray.is_initialized()
        if self._owned:
            _connect(ray, address)
        try:
            self._device, self._needs = self._choose(device)
            self._count = workers or self._room()
            self.fingerprint = self._fingerprint()
        except BaseException:
            self.close()
            raise

    @property
    def workers(self) -> int:
        return self._count

    def run(self, shards: Sequence[Shard], folder: Path, run: str) -> Iterator[dict[str, Any] | None]:
        """Records as shards are complete."""
        if not shards:
            return
        rows = iter(self._dataset(shards, str(folder.absolute()), run).iter_rows())
        while True:
            try:
                row = next(rows, None)
            except self._ray.exceptions.RayError as error:
                raise BatchError(f"Ray gave up: {error}") from error
            if row is None:
                return
            if row["error"]:
                raise BatchError(row["error"])
            self._note(row["worker"], json.loads(row["figures"]))
            yield json.loads(row["record"])

    def _note(self, worker: str, figures: dict[str, Any]) -> None:
        """Figures of a worker rise, and those of two shards at a time may come in either order."""
        before = self._figures.get(worker, figures)
        self._figures[worker] = {key: max(value, before[key]) for key, value in figures.items()}

    def figures(self) -> list[dict[str, Any]]:
        return list(self._figures.values())

    def processes(self) -> list[str]:
        """Host and process id of the workers that have answered."""
        return list(self._figures)

    def close(self) -> None:
        if self._owned:
            self._ray.shutdown()

    def _dataset(self, shards: Sequence[Shard], folder: str, run: str) -> Any:
        from ray import data

        # Its own lines about the plan; failures come as exceptions.
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        context = data.DataContext.get_current()
        context.enable_progress_bars = False
        context.execution_options.preserve_order = False
        rows = [{"shard": pickle.dumps(shard), "resume": not self._retry} for shard in shards]
        return data.from_items(rows, override_num_blocks=len(rows)).map(
            ShardActor,
            fn_constructor_args=(self._make, self._device, self._resources, folder, run, self.fingerprint),
            compute=data.ActorPoolStrategy(
                size=min(self._count, len(shards)),
                max_tasks_in_flight_per_actor=IN_FLIGHT,
                max_concurrent_calls_per_actor=IN_FLIGHT,
                enable_true_multi_threading=True,
            ),
            **self._needs,
        )

    def _choose(self, device: str) -> tuple[str, dict[str, float]]:
        """The device of a worker, and what Ray is to reserve for it."""
        processors = float(self._resources.readers)
        gpus = self._ray.cluster_resources().get("GPU", 0)
        if device == "cpu" or (device == "all" and not gpus):
            return "cpu", {"num_cpus": processors}
        if device not in ("all", "cuda"):
            raise BatchError(f"--device {device}: on Ray it is all, cuda or cpu; Ray chooses which GPU")
        if not gpus:
            raise BatchError("--device cuda: the Ray cluster has no GPU")
        return "cuda:0", {"num_cpus": processors, "num_gpus": 1.0}

    def _room(self) -> int:
        """How many workers the nodes have room for."""
        names = {"num_cpus": "CPU", "num_gpus": "GPU"}
        count = 0
        for node in self._ray.nodes():
            if node["Alive"]:
                count += min(int(node["Resources"].get(names[name], 0) // need) for name, need in self._needs.items())
        if count == 0:
            wish = ", ".join(f"{need:g} {names[name]}" for name, need in self._needs.items())
            raise BatchError(f"no node of the Ray cluster has {wish} for a worker; --readers sets the CPUs")
        return count

    def _fingerprint(self) -> dict[str, Any]:
        """Of some worker. The others compare theirs."""
        # The process must end, because it holds memory of the GPU.
        task = self._ray.remote(max_calls=1, **self._needs)(_worker_fingerprint)
        try:
            return self._ray.get(task.remote(self._make, self._device))
        except self._ray.exceptions.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            raise BatchError(f"no worker could start: {cause}") from error


def _worker_fingerprint(make: WorkerMaker, device: str) -> dict[str, Any]:
    worker = make(device, Resources(1))
    try:
        return worker.fingerprint
    finally:
        worker.close()


def _connect(ray: Any, address: str | None) -> None:
    try:
        # Without a name Ray would look for a cluster of this machine, and wait minutes for one that is gone.
        address = address or os.environ.get("RAY_ADDRESS") or "local"
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (ConnectionError, RuntimeError, ValueError) as error:
        mode = os.environ.get("RAY_AUTH_MODE", "not set")
        remedy = f"RAY_AUTH_MODE is {mode}; it and the token must be as where the cluster was started (docs/scale.md)"
        raise BatchError(f"no Ray cluster: {error}. {remedy}") from error
