"""Files of a run: they appear whole or not at all, and no link or pipe that somebody put in their place is opened."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import stat
from pathlib import Path
from typing import Any, BinaryIO

from .errors import BatchError, storage_error

PARTIAL = ".partial"


def own_folder(path: Path) -> None:
    """Makes a folder inside the output. A link there would have files written elsewhere."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise storage_error(error, path) from error
    if path.is_symlink():
        raise BatchError(f"{path} is a link; remove it, or name another folder")


def open_own(path: Path, flags: int) -> int:
    """A descriptor of a file inside the output that is written in place. What a link names is left alone."""
    try:
        descriptor = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        # A link; a pipe without a reader.
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise _not_ours(path) from error
        raise storage_error(error, path) from error
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
        os.close(descriptor)
        raise _not_ours(path)
    return descriptor


def _not_ours(path: Path) -> BatchError:
    return BatchError(f"{path} is a link or no regular file; remove it, or name another folder")


def open_regular(path: Path) -> BinaryIO:
    """Opens a file to read. A pipe would be waited for: it is an OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb", 1 << 20)


class AtomicFile:
    """A file that appears under its name when `commit` is called, with everything on the disk, or not at all."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._partial = path.parent / f".{path.name}.{secrets.token_hex(8)}{PARTIAL}"
        self._digest = hashlib.sha256()
        self.bytes = 0
        try:
            self._file: BinaryIO = self._partial.open("xb")  # noqa: SIM115
        except OSError as error:
            raise storage_error(error, path) from error

    def write(self, data: Any) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            self.abort()
            raise storage_error(error, self.path) from error
        self._digest.update(data)
        self.bytes += len(data)

    def write_at(self, offset: int, data: Any) -> None:
        """Anywhere in the file; not a part of the SHA-256."""
        try:
            self._file.seek(offset)
            self._file.write(data)
        except OSError as error:
            self.abort()
            raise storage_error(error, self.path) from error

    def commit(self) -> str:
        """Syncs and renames; answers the SHA-256 of what `write` wrote."""
        try:
            with self._file:
                self._file.flush()
                os.fsync(self._file.fileno())
            self._partial.replace(self.path)
            sync_folder(self.path.parent)
        except OSError as error:
            self.abort()
            raise storage_error(error, self.path) from error
        return self._digest.hexdigest()

    def abort(self) -> None:
        """Leaves nothing behind. Does nothing after `commit`."""
        # Closing writes what is buffered, which fails again on a full disk.
        with contextlib.suppress(OSError):
            self._file.close()
        self._partial.unlink(missing_ok=True)

    def __enter__(self) -> AtomicFile:
        return self

    def __exit__(self, *error: Any) -> None:
        self.abort()


def write_atomic(path: Path, text: str) -> None:
    with AtomicFile(path) as file:
        file.write(text.encode())
        file.commit()


def remove_partials(folder: Path) -> None:
    """What killed runs left. Only under the lock of the folder."""
    for path in folder.rglob(f".*{PARTIAL}"):
        path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Makes a rename last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
