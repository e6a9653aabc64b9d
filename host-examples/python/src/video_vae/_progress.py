"""Who is told how far a call has come."""

from __future__ import annotations

import sys
from typing import Any, Callable, Union

# True: a bar of tqdm, or a plain line without it. An object of tqdm: that one. A callable: called with how much is
# done, of how much (0: not known), and the stage ("plan", "load", "encode", "decode"); answering True cancels the call,
# raising cancels it and comes out of it.
Progress = Union[None, bool, Callable[[int, int, str], Any], Any]


class Reporter:
    def __init__(self, tell: Callable[[int, int, str], Any], close: Callable[[], None] = lambda: None) -> None:
        self._tell, self.close = tell, close

    def __call__(self, done: int, total: int, stage: str) -> Any:
        return self._tell(done, total, stage)


def reporter(progress: Progress) -> Reporter | None:
    if progress is None or progress is False:
        return None
    if progress is True:
        try:
            from tqdm.auto import tqdm
        except ImportError:
            return Reporter(_line, lambda: print(file=sys.stderr))
        # The numbers are shares of the work, which mean nothing to people.
        bar = tqdm(bar_format="{desc}: {percentage:3.0f} %|{bar}| {elapsed}, {remaining} left", leave=False)
        return Reporter(_bar(bar), bar.close)
    if hasattr(progress, "update") and hasattr(progress, "total"):
        return Reporter(_bar(progress))
    if callable(progress):
        return Reporter(progress)
    raise TypeError(f"progress is {progress!r}; it must be True, a callable of (done, total, stage), or a tqdm bar")


def _bar(bar: Any) -> Callable[[int, int, str], None]:
    shown = [""]

    def tell(done: int, total: int, stage: str) -> None:
        if stage != shown[0]:
            shown[0] = stage
            bar.reset(total or None)
            bar.set_description(stage)
        bar.total = total or None
        bar.update(done - bar.n)

    return tell


def _line(done: int, total: int, stage: str) -> None:
    share = f"{100 * done // total} %" if total else str(done)
    print(f"\r{stage} {share} ", end="", file=sys.stderr, flush=True)
