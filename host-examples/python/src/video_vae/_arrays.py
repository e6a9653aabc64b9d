"""Arrays of the caller's: where their memory is, and how to make another of the same kind.

Nothing here copies, and no array library is imported that the caller has not imported.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from dataclasses import dataclass
from typing import Any

from . import _abi
from .discovery import DTYPES
from .errors import ArgumentError, TensorError

CODES = {name: code for code, name in DTYPES.items()}

# NumPy's letters as DLPack's numbers. The library knows which of them it takes, and says so.
KIND_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}

# CUDA's names for its default stream, where 0 would be ambiguous.
LEGACY_STREAM = 1

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


@dataclass
class Memory:
    """Where an array is: address, shape and strides in elements. `owner` keeps it there."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: int
    device_type: int
    device_id: int
    writable: bool
    stream: int | None
    owner: Any

    @property
    def on_cuda(self) -> bool:
        return self.device_type == _abi.VVAE_DEVICE_CUDA


def kind_of(array: Any) -> str:
    """The name of the library an array comes from."""
    kind: Any = type(array)
    return _kind_of_type(kind)


@functools.lru_cache(maxsize=64)
def _kind_of_type(kind: type) -> str:
    for base in kind.__mro__:
        root = base.__module__.partition(".")[0]
        if root in ("numpy", "torch", "cupy"):
            return root
        if root in ("jax", "jaxlib"):
            return "jax"
    return "other"


def is_array(value: Any) -> bool:
    return any(hasattr(value, name) for name in ("__dlpack__", "__array_interface__", "__cuda_array_interface__"))


def device_name(device: Any) -> str:
    """The library's name of a device that is given as a text or a torch.device."""
    name = str(device)
    if name != "cuda":
        return name
    torch = sys.modules.get("torch")
    return f"cuda:{torch.cuda.current_device()}" if torch and torch.cuda.is_available() else "cuda:0"


def memory_of(array: Any, argument: str) -> Memory:
    """Looks at an array without copying it. `argument` is its name in messages."""
    memory = _memory_of(array, argument)
    if memory.dtype not in DTYPES:
        named = str(getattr(array, "dtype", "")).rpartition(".")[2] or hex(memory.dtype)
        raise TensorError(
            f"{argument}: dtype {named} is not accepted; it must be one of {', '.join(CODES)}. Nothing is converted, "
            "as arrays are read where they are; for numbers such as float64, pass a float32 copy"
        )
    return memory


def _memory_of(array: Any, argument: str) -> Memory:
    if kind_of(array) == "numpy":
        # Before DLPack, which refuses arrays that are read-only.
        return _from_interface(array, array.__array_interface__, argument, _abi.VVAE_DEVICE_CPU, 0, None)
    if hasattr(array, "__dlpack__"):
        return _from_dlpack(array, argument)
    if hasattr(array, "__cuda_array_interface__"):
        interface = array.__cuda_array_interface__
        return _from_interface(array, interface, argument, _abi.VVAE_DEVICE_CUDA, None, interface.get("stream"))
    if hasattr(array, "__array_interface__"):
        return _from_interface(array, array.__array_interface__, argument, _abi.VVAE_DEVICE_CPU, 0, None)
    raise TypeError(
        f"{argument} is a {type(array).__name__}; it must be an array: NumPy's, or one with __dlpack__ or "
        "__cuda_array_interface__, as those of PyTorch, CuPy and JAX"
    )


def _from_interface(
    array: Any, interface: dict, argument: str, device_type: int, device_id: int | None, stream: int | None
) -> Memory:
    address, read_only = interface["data"]
    shape, kind = tuple(interface["shape"]), interface["typestr"]
    code = KIND_CODES.get(kind[1])
    if kind == "<V2" and str(array.dtype) == "bfloat16":  # of the package ml_dtypes, for which NumPy has no letter
        code = 4
    if code is None or (kind[0] == ">" and kind[2:] != "1"):
        accepted = ", ".join(CODES)
        named = getattr(array, "dtype", kind)
        order = " in this machine's byte order" if kind[0] == ">" else ""
        raise TensorError(f"{argument}: dtype {named} is not accepted; it must be one of {accepted}{order}")
    size = int(kind[2:])
    steps = interface.get("strides")
    if steps is None:
        strides = _compact(shape)
    elif any(step % size for step in steps):
        raise TensorError(f"{argument}: strides {tuple(steps)} in bytes are no multiples of the {size} of an element")
    else:
        strides = tuple(step // size for step in steps)
    if device_id is None:
        device = getattr(array, "device", None)
        device_id = getattr(device, "id", device if isinstance(device, int) else 0)
    dtype = code | size * 8 << 8 | 1 << 16
    return Memory(address, shape, strides, dtype, device_type, device_id, not read_only, stream, array)


def _from_dlpack(array: Any, argument: str) -> Memory:
    kind = kind_of(array)
    if kind == "torch" and array.requires_grad:
        array = array.detach()
    device_type, device_id = (int(number) for number in array.__dlpack_device__())
    if device_type == _abi.VVAE_DEVICE_CUDA:
        stream = _current_stream(array, kind)
        # The producer makes `stream` wait for what it still has to do. -1: it has nothing to do any more.
        capsule = array.__dlpack__(stream=-1 if stream is None else stream or LEGACY_STREAM)
    else:
        stream, capsule = None, array.__dlpack__()
    # The capsule is not consumed but kept: it gives the memory back when it goes.
    tensor = _abi.vvae_tensor.from_address(_capsule_pointer(capsule, b"dltensor"))
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else _compact(shape)
    address = (tensor.data or 0) + tensor.byte_offset
    # Arrays of JAX are never changed; those made here are written to before anyone sees them.
    writable = kind != "jax" or argument == "result"
    return Memory(
        address, shape, strides, tensor.dtype, tensor.device_type, device_id, writable, stream, (array, capsule)
    )


def _current_stream(array: Any, kind: str) -> int | None:
    """The CUDA stream that the caller's library is working on; None: nothing is under way."""
    if kind == "torch":
        return sys.modules["torch"].cuda.current_stream(array.device).cuda_stream
    if kind == "cupy":
        return sys.modules["cupy"].cuda.get_current_stream().ptr
    if kind == "jax":
        array.block_until_ready()
        return None
    return LEGACY_STREAM


def synchronize(memory: Memory) -> None:
    """Waits for the producer of an array, for calls that are not ordered on its stream."""
    if not memory.on_cuda or memory.stream is None:
        return
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        torch.cuda.ExternalStream(memory.stream, device=memory.device_id).synchronize()
    elif "cupy" in sys.modules:
        sys.modules["cupy"].cuda.ExternalStream(memory.stream, memory.device_id).synchronize()


def _compact(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def dtype_name(dtype: Any) -> str:
    """The name of an element type, given as a name or as the object of an array library."""
    named = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    name = named.rpartition(".")[2]
    if name not in CODES:
        raise ArgumentError(f"dtype is {dtype}; it must be one of {', '.join(CODES)}")
    return name


def empty_like(array: Any, memory: Memory, shape: tuple[int, ...], dtype: str) -> Any:
    """An array of the same kind on the same device, to be written to. `finished` makes it the caller's."""
    kind = kind_of(array)
    if kind == "torch":
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=getattr(torch, dtype), device=array.device)
    if kind == "cupy":
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(memory.device_id):
            return cupy.empty(shape, dtype=dtype)
    if kind == "jax" and memory.on_cuda:
        jax = sys.modules["jax"]
        return jax.device_put(jax.numpy.empty(shape, dtype=dtype), next(iter(array.devices()))).block_until_ready()
    if memory.on_cuda:
        raise ArgumentError(f"out is missing: cannot make a {type(array).__name__} for the result on the GPU")
    return _numpy_empty(shape, dtype)


def finished(array: Any, like: Any) -> Any:
    """What `empty_like` made, as the kind of array that `like` is."""
    if kind_of(like) == "jax" and kind_of(array) == "numpy":
        return sys.modules["jax"].numpy.from_dlpack(array)
    return array


def _numpy_empty(shape: tuple[int, ...], dtype: str) -> Any:
    import numpy

    if dtype == "bfloat16":
        try:
            import ml_dtypes
        except ImportError:
            raise ArgumentError("dtype is bfloat16, which NumPy has only with the package ml_dtypes") from None
        return numpy.empty(shape, dtype=ml_dtypes.bfloat16)
    return numpy.empty(shape, dtype=dtype)
