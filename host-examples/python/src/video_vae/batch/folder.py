"""The output folder: what run it belongs to, which shards are complete, who may write to it.

The files in it:
    run.json          settings, sources and fingerprint; a run that differs in any is refused
    sources.jsonl     the inputs, in order
    latents-*.tar     the shards (decode: folders with videos)
    records/*.json    one for each complete shard, written after it
    manifest.jsonl    every input with its file or its error, when all shards are complete
    summary.json      the last invocation in figures
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .errors import BatchError
from .files import PARTIAL, AtomicFile, open_own, open_regular, own_folder, remove_partials, write_atomic
from .sources import Item, Shard

FORMAT = 2
_BEGUN = ".begun"


def run_id(identity: dict[str, Any]) -> str:
    """A name for everything that the files depend on."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


class RunFolder:
    """An output folder, locked by this process while it is open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._check_contents()
        own_folder(path / "records")
        self._lock = open_own(path / ".lock", os.O_RDWR)
        try:
            self._take_lock()
        except BaseException:
            os.close(self._lock)
            raise

    def close(self) -> None:
        os.close(self._lock)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def begin(self, identity: dict[str, Any], items: Sequence[Item]) -> str:
        """Starts a run or goes on with the one that is here; answers its id."""
        identity = json.loads(json.dumps({"format": FORMAT, **identity}))
        before = _read_json(self.path / "run.json")
        if before is None:
            self._write_lines("sources.jsonl", ({"source": item.path, "bytes": item.bytes} for item in items))
            write_atomic(self.path / "run.json", json.dumps({"id": run_id(identity), **identity}, indent=1) + "\n")
        elif before.get("id") != run_id(identity):
            raise BatchError(self._difference(before, identity, items))
        self._clean()
        return run_id(identity)

    def records(self, shards: Sequence[Shard]) -> dict[int, dict[str, Any]]:
        """Records of shards that are complete. A shard whose file is gone or has another size is not."""
        records = ((shard.index, complete_record(self.path, shard)) for shard in shards)
        return {index: record for index, record in records if record is not None}

    def finish(self, shards: Sequence[Shard]) -> None:
        """Writes the manifest from the records. Every shard is complete."""
        self._clean()
        self._write_lines("manifest.jsonl", self._manifest(shards))

    def summarize(self, figures: dict[str, Any]) -> None:
        write_atomic(self.path / "summary.json", json.dumps(figures, indent=1) + "\n")

    def _clean(self) -> None:
        """Removes what workers left that were killed."""
        remove_partials(self.path)
        for path in (self.path / "records").glob(f".*{_BEGUN}"):
            path.unlink(missing_ok=True)

    def _manifest(self, shards: Sequence[Shard]) -> Iterator[dict[str, Any]]:
        for shard in shards:
            record = _read_json(record_path(self.path, shard))
            yield from record["items"] if record else []

    def _write_lines(self, name: str, lines: Iterator[dict[str, Any]]) -> None:
        with AtomicFile(self.path / name) as file:
            for line in lines:
                file.write(json.dumps(line, sort_keys=True).encode() + b"\n")
            file.commit()

    def _check_contents(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise BatchError(f"{self.path} is not a folder")
        known = {"records", ".lock", "sources.jsonl"}
        with contextlib.suppress(FileNotFoundError):
            names = {path.name for path in self.path.iterdir() if not path.name.endswith(PARTIAL)}
            if "run.json" not in names and names - known:
                raise BatchError(f"{self.path} has files in it and is no output of this command; name another folder")

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(self._lock, 200, 0).decode(errors="replace").strip()
            raise BatchError(f"{self.path} is being written to by another process ({owner})") from error
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{socket.gethostname()} {os.getpid()}\n".encode(), 0)

    def _difference(self, before: dict[str, Any], now: dict[str, Any], items: Sequence[Item]) -> str:
        lines = [f"{self.path} is the output of another run; name another folder, or repeat that run. They differ in"]
        if before.get("sources") != now.get("sources"):
            lines.append(f"  sources: {self._source_difference(items)}")
        old, new = _flat(before), _flat(now)
        for key in sorted(set(old) | set(new)):
            if key != "id" and not key.startswith("sources") and old.get(key) != new.get(key):
                lines.append(f"  {key}: {old.get(key)} there, {new.get(key)} here")
        return "\n".join(lines)

    def _source_difference(self, items: Sequence[Item]) -> str:
        try:
            lines = (self.path / "sources.jsonl").read_text(encoding="utf-8").splitlines()
            there = {entry["source"]: entry["bytes"] for entry in map(json.loads, lines)}
        except (OSError, ValueError, KeyError) as error:
            return f"their list cannot be read: {error}"
        here = {item.path: item.bytes for item in items}
        new, gone = sorted(set(here) - set(there)), sorted(set(there) - set(here))
        changed = sorted(path for path in set(here) & set(there) if here[path] != there[path])
        parts = [("new", new), ("gone", gone), ("changed", changed)]
        return "; ".join(f"{len(paths)} {word} (such as {paths[0]})" for word, paths in parts if paths)


def check_run(folder: Path, run: str) -> None:
    """That a worker sees the folder of its run: on another machine the path may be another disk."""
    found = _read_json(folder / "run.json")
    if found is None or found.get("id") != run:
        state = "is not there" if found is None else "belongs to another run"
        raise BatchError(
            f"{folder}/run.json {state} on {socket.gethostname()}; all workers need the same shared folder"
        )


def complete_record(folder: Path, shard: Shard) -> dict[str, Any] | None:
    """The record of a shard, if all of it is there."""
    record = _read_json(record_path(folder, shard))
    return record if record is not None and _is_complete(folder, record) else None


def begin_count(folder: Path, shard: Shard) -> int:
    """How often work on a shard has begun since the run was started, this time included."""
    with os.fdopen(open_own(_begun_path(folder, shard), os.O_WRONLY | os.O_APPEND), "ab") as file:
        file.write(b".")
        return file.tell()


def end_count(folder: Path, shard: Shard) -> None:
    """The shard is complete."""
    _begun_path(folder, shard).unlink(missing_ok=True)


def _begun_path(folder: Path, shard: Shard) -> Path:
    return folder / "records" / f".{shard.index:06d}{_BEGUN}"


def record_path(folder: Path, shard: Shard) -> Path:
    return folder / "records" / f"{shard.index:06d}.json"


def _is_complete(folder: Path, record: dict[str, Any]) -> bool:
    try:
        return all((folder / name).stat().st_size == file["bytes"] for name, file in record["files"].items())
    except FileNotFoundError:
        return False


def _read_json(path: Path) -> Any:
    try:
        with open_regular(path) as file:
            return json.loads(file.read())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise BatchError(f"{path}: {error}") from error


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, part in value.items():
        if isinstance(part, dict):
            flat.update(_flat(part, f"{prefix}{key}."))
        else:
            flat[prefix + key] = part
    return flat
