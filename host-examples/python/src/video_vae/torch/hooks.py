"""What PyTorch and accelerate put around a call of a module."""

from __future__ import annotations

import functools
import sys
from typing import Any, Callable

import torch


class NoBackward(torch.autograd.Function):
    """A call whose results know that they depend on the inputs, so that backward() fails with words."""

    @staticmethod
    def forward(ctx: Any, run: Any, *inputs: torch.Tensor) -> Any:
        return run()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(
            "video-vae computes no gradients: it cannot be trained or differentiated through. Call encode and decode "
            "under torch.no_grad(), or detach() what comes out"
        )


def entry(call: Callable[..., Any]) -> Callable[..., Any]:
    """A method that is called in place of `forward`: torch.compile leaves it as it is, with a graph before it and one
    after it, and accelerate's hooks move the module as they do around `forward`."""

    def hooked(self: Any, *arguments: Any, **keywords: Any) -> Any:
        hook = getattr(self, "_hf_hook", None)
        if hook is None:
            return call(self, *arguments, **keywords)
        arguments, keywords = hook.pre_forward(self, *arguments, **keywords)
        place = self._place
        try:
            return hook.post_forward(self, call(self, *arguments, **keywords))
        finally:
            self._left(place)

    @functools.wraps(call)
    def calling(*arguments: Any, **keywords: Any) -> Any:
        # Importing the compiler takes seconds. Who compiles has imported it.
        compiled = "torch._dynamo" in sys.modules
        return (torch.compiler.disable(hooked) if compiled else hooked)(*arguments, **keywords)

    return calling
