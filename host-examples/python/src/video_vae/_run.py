"""What goes with a call that takes long: progress, Ctrl-C, the CUDA stream, and errors from callbacks."""

from __future__ import annotations

import ctypes
import itertools
import signal
import threading
from collections.abc import Sequence
from typing import Any

from . import _abi, _arrays
from ._calls import calling
from ._library import library
from ._progress import Progress, reporter
from ._tensors import View
from .errors import check

_ids = itertools.count(1)
_active: dict[int, Run] = {}


class Run:
    """One call under way. Use `info` in the call, within `with`; errors of callbacks come out at the end of it."""

    def __init__(self, handle: int, views: Sequence[View], progress: Progress, logvar: View | None = None) -> None:
        self._handle, self.status = handle, _abi.VVAE_OK
        self._id = next(_ids)
        self._report = reporter(progress)
        self._raised: BaseException | None = None
        self._previous: Any = None
        info = _abi.sized(_abi.vvae_run_info)
        if logvar is not None:
            info.logvar = ctypes.pointer(logvar.struct)
        _order(info, [view.memory for view in views])
        self._info = info

    @property
    def info(self) -> Any:
        return ctypes.byref(self._info)

    def __enter__(self) -> Run:
        _active[self._id] = self
        self._watch_interrupts()
        # In the main thread also without anything to report: callbacks are where Python gets to see signals.
        if self._report is not None or self._previous is not None:
            self._info.progress, self._info.progress_user = _on_progress, self._id
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
        del _active[self._id]
        if self._report is not None:
            self._report.close()
        raised, self._raised = self._raised, None
        if raised is not None:
            raise raised
        if error is None:
            check(self.status, self._handle)

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function of the library. A failure is raised at the end of the `with`, unless a callback raised."""
        with calling(self._handle):
            self.status = getattr(library(), name)(*arguments)

    def _watch_interrupts(self) -> None:
        """Python runs signal handlers wherever the main thread executes its code, which during a call is at the very
        beginning of the callback, where nothing can catch what they raise: ctypes would print it and go on. So our own
        handler keeps it for the end of the call, and the callback then stops the call."""
        if threading.current_thread() is not threading.main_thread():
            return
        previous = signal.getsignal(signal.SIGINT)
        if not callable(previous):
            return
        self._previous = previous
        try:
            signal.signal(signal.SIGINT, self._interrupted)
        except ValueError:  # a second interpreter has no signals
            self._previous = None

    def _interrupted(self, number: int, frame: Any) -> None:
        try:
            self._previous(number, frame)
        except BaseException as error:
            self._raised = error

    def tell(self, done: int, total: int, stage: bytes) -> int:
        """Progress of the library's; not 0 stops the call."""
        if self._raised is None and self._report is not None:
            try:
                if self._report(done, total, stage.decode()):
                    return 1
            except BaseException as error:
                self._raised = error
        return 0 if self._raised is None else 1


@_abi.vvae_progress_fn
def _on_progress(user: int, done: int, total: int, stage: bytes) -> int:
    # One callback for all runs: a callback of each run's own would be a cycle for the garbage collector.
    return _active[user].tell(done, total, stage)


def _order(info: Any, memories: Sequence[_arrays.Memory]) -> None:
    """Orders the call on the stream of the arrays, if all are on a GPU; waits for the stream otherwise."""
    streams = [memory.stream for memory in memories if memory.on_cuda and memory.stream is not None]
    if not streams:
        return
    if all(memory.on_cuda and memory.stream == streams[0] for memory in memories):
        info.flags, info.cuda_stream = _abi.VVAE_RUN_HAS_STREAM, streams[0]
    else:
        for memory in memories:
            _arrays.synchronize(memory)
