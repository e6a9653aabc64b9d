"""The autoencoder."""

from __future__ import annotations

import ctypes
import difflib
import json
import logging
import os
import threading
import time
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Callable

from . import _abi, _arrays, discovery
from ._calls import c_five, c_text, call, calling, inside_call
from ._library import library
from ._models import resolve
from ._progress import Progress
from ._ranges import FrameRange
from ._run import Run
from ._tensors import LATENT_LAYOUTS, VIDEO_LAYOUTS, View, check_layout, latent_layout, layout_of, to_five
from .errors import ArgumentError, StateError, check
from .model import Model, Size
from .stream import Stream, drain

_LEVELS = {
    _abi.VVAE_LOG_DEBUG: logging.DEBUG,
    _abi.VVAE_LOG_INFO: logging.INFO,
    _abi.VVAE_LOG_WARNING: logging.WARNING,
    _abi.VVAE_LOG_ERROR: logging.ERROR,
}


@dataclass(frozen=True)
class Memory:
    """Bytes that a `VideoVae` holds, its streams included: on the device now and at most, the part of `now` that waits
    for the next call, and in host memory."""

    now: int
    peak: int
    reserved: int
    host: int
    streams: int


@dataclass(frozen=True)
class DeviceShare:
    """What one device of a `VideoVae` holds, and its part of the last plan or run: `frames` output frames from
    `first_frame` of clip `first_clip` on. `used`: False if it failed or has no room."""

    id: str
    used: bool
    now: int
    peak: int
    reserved: int
    host: int
    device_bytes: int
    host_bytes: int
    first_clip: int
    first_frame: int
    frames: int
    seconds: float
    measured_seconds: float


@dataclass(frozen=True)
class Plan:
    """What a job takes, known before it runs. `print` shows it in words."""

    exact: bool
    device_bytes: int
    host_bytes: int
    weight_bytes: int
    workspace_bytes: int
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    slice_frames: int
    chunk_frames: tuple[int, ...]
    tiles: tuple[int, int]
    tile_size: tuple[int, int]
    tile_overlap: int
    offloaded_frame_bytes: int
    offloaded_weight_bytes: int
    moved_bytes_per_frame: int
    seconds: float
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class RunReport:
    """About a run that has finished: an encode, a decode, or a pull of a stream. `print` shows its plan in words."""

    node: str
    exact: bool
    tiles: tuple[int, int]
    seconds: float
    estimated_seconds: float
    device_bytes: int
    host_bytes: int
    slice_frames: int
    text: str

    def __str__(self) -> str:
        return self.text


class VideoVae:
    """An autoencoder on a device.

        with VideoVae("ema_vae_fp16.safetensors", memory_limit="6GiB") as vae:
            latent = vae.encode(video)
            video = vae.decode(latent)

    Every parameter of the library is a keyword here and an attribute of the object (`vae.memory_limit = "4GiB"`);
    `video_vae.parameters()` and `python -m video_vae` list them.

    An object is for one thread at a time, and raises StateError in a second one; `cancel`, `close`, `memory_info` and
    `last_run` work in any thread. Objects of one checkpoint share its weights.
    """

    def __init__(
        self,
        weights: str | os.PathLike,
        device: Any = "auto",
        *,
        log: Callable[[int, str], Any] | None = None,
        **parameters: Any,
    ) -> None:
        """Opens a checkpoint: a file, `"demo"`, or a name such as `"seedvr2"` of one that `vvae get` has downloaded.
        `device` is "auto", "cpu", "cuda:0", ..., "cuda" (PyTorch's present GPU, or the first) or a torch.device. `log`
        gets levels of the module `logging` and lines; without it they go to the logger "video_vae"."""
        for key in parameters:
            if key not in discovery.parameters():
                raise TypeError(f"VideoVae() has no keyword {_unknown(key)}")
        callback = _logger(log)
        info = _abi.sized(_abi.vvae_create_info)
        info.abi_version = _abi.VVAE_ABI_VERSION
        weights = resolve(weights)
        self._weights, self._device = weights, _arrays.device_name(device)
        info.weights = c_text(os.fsencode(weights), "weights")
        info.device = c_text(self._device, "device")
        info.log = callback
        handle = ctypes.c_void_p()
        check(library().vvae_create(ctypes.byref(info), ctypes.byref(handle)))
        self._number: int = handle.value or 0
        self._closing = threading.Lock()
        # Holds the callback for as long as the library may call it.
        self._finalizer = weakref.finalize(self, _release, self._number, os.getpid(), callback)
        self._values: dict[str, Any] = {}
        self._model: Model | None = None
        try:
            self.configure(**parameters)
        except BaseException:
            self._finalizer()
            raise

    # ---- The five verbs ----

    def encode(
        self,
        video: Any,
        *,
        frames: slice | range | None = None,
        out: Any = None,
        logvar: Any = False,
        layout: str | None = None,
        dtype: Any = None,
        progress: Progress = None,
    ) -> Any:
        """Video to latent [B, C, T, H, W].

        `video` is [B, 3, T, H, W], [T, H, W, 3] or [H, W, 3], or what `layout` says ("BTHWC", "TCHW", ...). Floats are
        in the range of the parameter `pixel_range` (-1..1); uint8 and uint16 take their full range. Other numbers of
        frames than 4n + 1, and sizes that are no multiple of 8, are padded by repeating the last frame, row and column.

        The latent is the same kind of array on the same device, of the video's type if that is a float and float32
        otherwise, or of `dtype`; or it is written to `out`. `logvar=True` returns (latent, logvar); an array as
        `logvar` is written to. `progress` as in `video_vae.Progress`.

        `frames=slice(250, 275)` computes these latent frames only, the same to the bit.
        """
        source = View.of(video, "video", layout, VIDEO_LAYOUTS)
        shape = self.model.latent_shape(source.shape)
        part = self._range("encode", frames, source.shape[2], shape)
        if part is not None:
            source.keep_frames(part.inputs)
        return self._encode(video, source, shape, part, out, logvar, dtype, progress)

    def encode_range(
        self,
        video: Any,
        frames: slice | range,
        clip_frames: int,
        *,
        out: Any = None,
        logvar: Any = False,
        layout: str | None = None,
        dtype: Any = None,
        progress: Progress = None,
    ) -> Any:
        """As `encode` with `frames`, where `video` has only the frames that `range_inputs` says, of a clip of
        `clip_frames` frames."""
        source = View.of(video, "video", layout, VIDEO_LAYOUTS)
        shape = self.model.latent_shape((*source.shape[:2], clip_frames, *source.shape[3:]))
        part = self._range("encode", frames, clip_frames, shape)
        return self._encode(video, source, shape, part, out, logvar, dtype, progress)

    def _encode(
        self,
        video: Any,
        source: View,
        shape: tuple[int, ...],
        part: FrameRange | None,
        out: Any,
        logvar: Any,
        dtype: Any,
        progress: Progress,
    ) -> Any:
        if part is not None:
            shape = part.of_shape(shape)
        target = self._target(source, out, "out", shape, "BCTHW", dtype, LATENT_LAYOUTS)
        second = None
        if logvar is not None and logvar is not False:
            given, same = (None, dtype or target.dtype) if logvar is True else (logvar, dtype)
            second = self._target(source, given, "logvar", shape, "BCTHW", same, LATENT_LAYOUTS)
        self._run("encode", source, target, progress, second, part)
        latent = _arrays.finished(target.array, video)
        return latent if second is None else (latent, _arrays.finished(second.array, video))

    def decode(
        self,
        latent: Any,
        *,
        frames: slice | range | None = None,
        out: Any = None,
        size: Size | None = None,
        layout: str | None = None,
        dtype: Any = None,
        progress: Progress = None,
    ) -> Any:
        """Latent [B, C, T, H, W] to video; or [C, T, H, W] of a clip, or [B, C, H, W] of single frames.

        The video is the same kind of array on the same device, [B, 3, T, H, W] of the latent's type with values in
        `pixel_range`; `layout="THWC", dtype="uint8"` makes frames to show. `size=(frames, height, width)` drops what
        encode padded; None in it stands for all. Or it is written to `out`, whose size counts.

        `frames=slice(1000, 1100)` computes these video frames only, the same to the bit.
        """
        source = View.of_latent(latent, "latent", self.model.latent_channels)
        shape = self.model.video_shape(source.shape, size)
        part = self._range("decode", frames, source.shape[2], shape)
        if part is not None:
            source.keep_frames(part.inputs)
        return self._decode(latent, source, shape, part, out, layout, dtype, progress)

    def decode_range(
        self,
        latent: Any,
        frames: slice | range,
        clip_frames: int,
        *,
        out: Any = None,
        size: Size | None = None,
        layout: str | None = None,
        dtype: Any = None,
        progress: Progress = None,
    ) -> Any:
        """As `decode` with `frames`, where `latent` has only the frames that `range_inputs` says, of a clip of
        `clip_frames` latent frames."""
        source = View.of_latent(latent, "latent", self.model.latent_channels)
        shape = self.model.video_shape((*source.shape[:2], clip_frames, *source.shape[3:]), size)
        part = self._range("decode", frames, clip_frames, shape)
        return self._decode(latent, source, shape, part, out, layout, dtype, progress)

    def _decode(
        self,
        latent: Any,
        source: View,
        shape: tuple[int, ...],
        part: FrameRange | None,
        out: Any,
        layout: str | None,
        dtype: Any,
        progress: Progress,
    ) -> Any:
        if part is not None:
            shape = part.of_shape(shape)
        if out is None and layout is None:
            layout = "BCTHW"
        target = self._target(source, out, "out", shape, layout, dtype, VIDEO_LAYOUTS)
        self._run("decode", source, target, progress, None, part)
        return _arrays.finished(target.array, latent)

    def range_inputs(self, node: str, frames: slice | range, clip_frames: int) -> slice:
        """The input frames that a range of the output needs: video frames for "encode", latent frames for "decode".
        `clip_frames` is the number of all input frames of the clip.

            part = vae.range_inputs("decode", slice(1000, 1100), 251)
            video = vae.decode_range(latent[:, :, part], slice(1000, 1100), 251)
        """
        one = (1, 1, clip_frames, 1, 1)
        shape = self.model.latent_shape(one) if node == "encode" else self.model.video_shape(one)
        return FrameRange.of(self._handle, node, frames, clip_frames, shape[2]).inputs

    def cancel(self) -> None:
        """Stops the call that is running in another thread, which raises Cancelled. Does nothing if there is none."""
        call(self._handle, "vvae_cancel", self._handle)

    def close(self) -> None:
        """Gives back everything. A call that is running in another thread is cancelled; closing twice does nothing.
        In a process that was forked from the one that opened the object nothing is given back, with a warning."""
        if inside_call(self._number):
            raise StateError("close() came from a callback of a call on the same object; close it after the call")
        with self._closing:
            self._finalizer()

    @property
    def _handle(self) -> int:
        if self.closed:
            raise StateError("this VideoVae is closed; open another one")
        return self._number

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    def __enter__(self) -> VideoVae:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    # ---- Clips in pieces ----

    def stream_encode(
        self, videos: Any, *, layout: str | None = None, dtype: Any = None, progress: Progress = None
    ) -> Iterator[Any]:
        """Encodes a clip of any length at constant memory: takes pieces of it, yields latents as they get ready, the
        same to the bit as those of the whole clip. `videos` is an iterable of arrays, or one array."""
        pieces = _pieces(videos)
        return drain(self, "encode", pieces, layout, "BCTHW", None, dtype, progress)

    def stream_decode(
        self,
        latents: Any,
        *,
        size: Size | None = None,
        layout: str = "BCTHW",
        dtype: Any = None,
        progress: Progress = None,
    ) -> Iterator[Any]:
        """Decodes a clip of any length at constant memory: takes latents, yields frames as they get ready, the same to
        the bit as those of the whole clip. `latents` is an iterable of arrays, or one array."""
        check_layout(layout)
        return drain(self, "decode", _pieces(latents), None, layout, size, dtype, progress)

    def open_stream(self, node: str, shape: Sequence[int], first: int = 0) -> Stream:
        """A stream to push to and pull from by hand. `node` is "encode" or "decode", `shape` [B, C, T, H, W] of what
        goes in, of which T is ignored. With `first` the output begins with that frame of the clip, and the input with
        the frame that `range_inputs` says for `slice(first, None)`. So a clip is resumed, with the same bits: `first`
        is the number of frames that were pulled."""
        return Stream(self, node, shape, first)

    # ---- What it takes ----

    def plan_encode(
        self, shape: Sequence[int], *, layout: str | None = None, frames: slice | range | None = None
    ) -> Plan:
        """What encoding a video of this shape, or a range of it, would take under the present settings."""
        five = to_five(shape, layout_of(len(shape), layout, "shape", VIDEO_LAYOUTS))
        return self._plan("encode", five, self._range("encode", frames, five[2], self.model.latent_shape(five)))

    def plan_decode(self, shape: Sequence[int], *, frames: slice | range | None = None) -> Plan:
        """What decoding a latent of this shape, or a range of its video, would take under the present settings."""
        five = to_five(shape, latent_layout(shape, "shape", self.model.latent_channels))
        return self._plan("decode", five, self._range("decode", frames, five[2], self.model.video_shape(five)))

    def plan_timeline(self, node: str, shape: Sequence[int]) -> dict[str, Any]:
        """The plan of a job as steps, and what lies where in memory; the header says what is in it.

        ``shape`` is that of the input, five numbers; 0 frames stand for a stream.
        """
        length, five = ctypes.c_uint64(0), c_five(shape, "shape")
        name = c_text(node, "node")
        text = ctypes.create_string_buffer(1 << 20)
        while True:
            out = (text, len(text), ctypes.byref(length))
            call(self._handle, "vvae_plan_timeline", self._handle, name, five, *out)
            if length.value < len(text):
                return json.loads(text.value)
            text = ctypes.create_string_buffer(length.value + 1)

    def memory_info(self) -> Memory:
        """The memory held now, also while a call is running."""
        info = _abi.sized(_abi.vvae_memory_info)
        call(self._handle, "vvae_memory", self._handle, ctypes.byref(info))
        return Memory(info.now, info.peak, info.reserved, info.host, info.streams)

    def device_shares(self) -> list[DeviceShare]:
        """What each device holds, and its part of the last plan or run; in any thread."""
        shares: list[DeviceShare] = []
        count = 1
        while len(shares) < count:
            info = _abi.sized(_abi.vvae_handle_device_info)
            call(self._handle, "vvae_handle_device", self._handle, len(shares), ctypes.byref(info))
            count = info.device_count
            figures = {field.name: getattr(info, field.name) for field in fields(DeviceShare)[2:]}
            shares.append(DeviceShare(id=info.id.decode(), used=not info.unused, **figures))
        return shares

    def last_run(self) -> RunReport:
        """About the last run that finished; in any thread. StateError if there was none yet."""
        info, text = _abi.sized(_abi.vvae_run_report), ctypes.create_string_buffer(1 << 15)
        call(self._handle, "vvae_last_run", self._handle, ctypes.byref(info), text, len(text))
        return RunReport(
            node=info.node.decode(),
            exact=bool(info.exact),
            tiles=(info.tile_rows, info.tile_columns),
            seconds=info.seconds,
            estimated_seconds=info.estimated_seconds,
            device_bytes=info.device_bytes,
            host_bytes=info.host_bytes,
            slice_frames=info.slice_frames,
            text=text.value.decode("utf-8", "replace"),
        )

    def trim(self, weights: bool = False) -> None:
        """Gives back memory that waits for the next call; `weights` too, which the next call reads anew."""
        what = _abi.VVAE_TRIM_WORKSPACE | (_abi.VVAE_TRIM_WEIGHTS if weights else 0)
        call(self._handle, "vvae_trim", self._handle, what)

    @property
    def model(self) -> Model:
        """The sizes of the model, with latents as the parameter `latents` has them, and what is known of them."""
        if self._model is None:
            desc = _abi.sized(_abi.vvae_model_desc)
            call(self._handle, "vvae_model_info", self._handle, ctypes.byref(desc))
            raw = Model.of(desc)
            self._model = raw if self.latents == "raw" else raw.scaled()
        return self._model

    @property
    def device(self) -> str:
        """The id of the device, also where "auto" chose it."""
        if self._device == "auto":
            self._device = self.device_shares()[0].id
        return self._device

    # ---- Settings ----

    def configure(self, **parameters: Any) -> None:
        """Sets parameters; those before one that fails are set."""
        # latents=model is checked against the other parameters of latents at once.
        order = {"raw": -1, "model": 1}.get(str(parameters.get("latents")), 0)
        for key, value in sorted(parameters.items(), key=lambda item: order if item[0] == "latents" else 0):
            setattr(self, key, value)

    @contextmanager
    def configured(self, **parameters: Any) -> Iterator[VideoVae]:
        """Sets parameters for a `with` block."""
        before = {key: getattr(self, key) for key in parameters}
        try:
            self.configure(**parameters)
            yield self
        finally:
            self.configure(**before)

    def __getattr__(self, name: str) -> Any:
        # Only for what is no attribute otherwise.
        if name.startswith("_") or name not in discovery.parameters():
            raise AttributeError(f"VideoVae has no attribute {_unknown(name)}")
        return self._values.get(name, discovery.parameters()[name].default)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
            return
        parameter = discovery.parameters().get(name)
        if parameter is None:
            raise AttributeError(f"VideoVae has no parameter {_unknown(name)}")
        text = parameter.format(value)
        call(self._handle, "vvae_configure", self._handle, c_text(name, "key"), c_text(text, name))
        self._values[name] = parameter.parse(text)
        if name in ("latents", "latent_format"):
            self._model = None

    def __dir__(self) -> Iterable[str]:
        return [*super().__dir__(), *discovery.parameters()]

    def __repr__(self) -> str:
        file = Path(os.fsdecode(self._weights)).name
        if self.closed:
            return f"<VideoVae {file}, closed>"
        default = {key: parameter.default for key, parameter in discovery.parameters().items()}
        settings = "".join(f", {key}={value!r}" for key, value in self._values.items() if value != default[key])
        return f"<VideoVae {file} on {self.device}{settings}>"

    # ---- Inside ----

    def _target(
        self,
        source: View,
        out: Any,
        argument: str,
        shape: Sequence[int],
        layout: str | None,
        dtype: Any,
        defaults: dict[int, str],
    ) -> View:
        if out is not None:
            target = View.of_out(out, argument, layout if defaults is VIDEO_LAYOUTS else None, defaults)
            asked = target.dtype if dtype is None else _arrays.dtype_name(dtype)
            if asked != target.dtype:
                raise ArgumentError(f"{argument} has {target.dtype}, but dtype is {asked}; leave one out")
            return target
        check_layout(layout or "BCTHW")
        name = source.float_dtype if dtype is None else _arrays.dtype_name(dtype)
        return source.make(shape, layout or "BCTHW", name)

    def _range(
        self, node: str, frames: slice | range | None, clip_frames: int, output: Sequence[int]
    ) -> FrameRange | None:
        return None if frames is None else FrameRange.of(self._handle, node, frames, clip_frames, output[2])

    def _run(
        self,
        node: str,
        source: View,
        target: View,
        progress: Progress,
        logvar: View | None,
        part: FrameRange | None,
    ) -> None:
        views = [source, target] if logvar is None else [source, target, logvar]
        with Run(self._handle, views, progress, logvar) as run:
            if part is None:
                run.call(f"vvae_{node}", self._handle, source.reference, target.reference, run.info)
            else:
                place = (part.clip_frames, part.first)
                run.call(f"vvae_{node}_range", self._handle, source.reference, *place, target.reference, run.info)

    def _plan(self, node: str, shape: Sequence[int], part: FrameRange | None) -> Plan:
        info, five = _abi.sized(_abi.vvae_plan_info), c_five(shape, "shape")
        text = ctypes.create_string_buffer(1 << 15)
        out = (ctypes.byref(info), text, len(text))
        if part is None:
            call(self._handle, "vvae_plan", self._handle, node.encode(), five, *out)
        else:
            place = (part.first, part.count)
            call(self._handle, "vvae_plan_range", self._handle, node.encode(), five, *place, *out)
        return Plan(
            exact=bool(info.exact),
            device_bytes=info.device_bytes,
            host_bytes=info.host_bytes,
            weight_bytes=info.weight_bytes,
            workspace_bytes=info.workspace_bytes,
            input_shape=tuple(info.input_shape),
            output_shape=tuple(info.output_shape),
            slice_frames=info.slice_frames,
            chunk_frames=tuple(info.chunk_frames[: info.chunk_count]),
            tiles=(info.tile_rows, info.tile_columns),
            tile_size=(info.tile_height, info.tile_width),
            tile_overlap=info.tile_overlap,
            offloaded_frame_bytes=info.offloaded_frame_bytes,
            offloaded_weight_bytes=info.offloaded_weight_bytes,
            moved_bytes_per_frame=info.moved_bytes_per_frame,
            seconds=info.seconds,
            text=text.value.decode("utf-8", "replace"),
        )


def _release(handle: int, process: int, callback: Any) -> None:
    """Frees a handle; whatever runs on it in another thread is cancelled first."""
    if os.getpid() != process:
        text = f"a VideoVae opened by process {process} is not closed in process {os.getpid()}, forked from it"
        remedy = "fork before the first VideoVae, or start processes with the method spawn"
        warnings.warn(f"{text}; {remedy}", RuntimeWarning, stacklevel=2)
        return
    with calling(handle):
        while library().vvae_free(handle) == _abi.VVAE_ERROR_STATE:
            library().vvae_cancel(handle)
            time.sleep(0.002)


def _logger(log: Callable[[int, str], Any] | None) -> Any:
    receive = log or logging.getLogger("video_vae").log

    @_abi.vvae_log_fn
    def callback(user: int, level: int, message: bytes) -> None:
        try:
            receive(_LEVELS.get(level, logging.INFO), message.decode("utf-8", "replace"))
        except Exception:  # a logger that fails must not stop the work
            logging.getLogger("video_vae").exception("the log callback failed")

    return callback


def _pieces(arrays: Any) -> Iterable[Any]:
    return [arrays] if _arrays.is_array(arrays) else arrays


def _unknown(name: str) -> str:
    known = [*discovery.parameters(), *(name for name in dir(VideoVae) if not name.startswith("_"))]
    near = difflib.get_close_matches(name, known, 1, 0.5)
    return f"{name!r}" + (f"; did you mean {near[0]!r}?" if near else f"; parameters are {', '.join(known[:-1])}")
