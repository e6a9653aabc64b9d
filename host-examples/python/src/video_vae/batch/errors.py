"""What can go wrong in a run: errors that end it, and inputs that cannot be read."""

from __future__ import annotations

import errno


class BatchError(Exception):
    """Ends a run. The text says what to do; everything committed so far stays."""


class BrokenInput(Exception):
    """One input cannot be read. The reason is recorded and the run goes on."""


def storage_error(error: OSError, path: object) -> BatchError:
    """What a failed write means to the user."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        reason = "the disk is full" if error.errno == errno.ENOSPC else "the disk quota is used up"
        return BatchError(f"{path}: {reason}. Nothing half-written was left; free some space and run the same command")
    return BatchError(f"{path}: {error.strerror or error}")
