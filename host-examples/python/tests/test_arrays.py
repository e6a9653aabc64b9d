"""Arrays of every kind and layout, where they are."""

import ctypes
import tracemalloc

import numpy as np
import pytest
from conftest import random_latent, random_video

from video_vae import ArgumentError, TensorError, _abi
from video_vae._tensors import LATENT_LAYOUTS, VIDEO_LAYOUTS, View


def view(array, layout=None, defaults=VIDEO_LAYOUTS):
    return View.of(array, "video", layout, defaults)


class Spy:
    """A producer of DLPack that is of no known library."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, stream=None):
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_nothing_is_copied_on_the_way_in():
    video = random_video(5, 16, 24, 3)
    for array in (video, video[::-1], video[:, ::2, 4:], video[..., ::-1], np.asfortranarray(video)):
        found = view(array)
        assert found.struct.data == array.__array_interface__["data"][0]
        assert found.shape == (1, 3, *array.shape[:3])
        assert list(found.struct.strides[1:5]) == [array.strides[axis] // 4 for axis in (3, 0, 1, 2)]
    assert view(Spy(video)).struct.data == video.__array_interface__["data"][0]


def test_nothing_is_copied_on_the_way_through(vae):
    video = random_video(5, 128, 128, 3)
    latent, out = vae.encode(video), np.empty_like(video)
    tracemalloc.start()
    assert vae.decode(latent, out=out) is out
    vae.encode(video, out=latent)
    grown = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert grown < video.nbytes / 16, f"{grown} bytes"
    # And by the library's own ledger: what it holds is what it planned, which has no room for copies.
    vae.trim(weights=True)
    vae.decode(latent, out=out)
    assert vae.memory_info().now == vae.plan_decode(latent.shape).device_bytes


def test_layouts_are_views_of_the_same_numbers(vae):
    video = random_video(1, 3, 5, 16, 24)
    latent = vae.encode(video)
    frames = np.ascontiguousarray(video[0].transpose(1, 2, 3, 0))
    assert np.array_equal(vae.encode(frames), latent)
    assert np.array_equal(vae.encode(frames[None], layout="BTHWC"), latent)
    assert np.array_equal(vae.encode(video[0].transpose(1, 0, 2, 3), layout="TCHW"), latent)
    flipped = np.ascontiguousarray(frames[::-1, :, ::-1])
    assert np.array_equal(vae.encode(flipped[::-1, :, ::-1]), latent)
    assert np.array_equal(vae.encode(frames[0]), vae.encode(frames[:1]))
    whole = vae.decode(latent)
    assert np.array_equal(vae.decode(latent, layout="THWC"), whole[0].transpose(1, 2, 3, 0))
    assert np.array_equal(vae.decode(latent[0], layout="BTHWC"), whole.transpose(0, 2, 3, 4, 1))
    out = np.zeros((5, 16, 48, 4), "f4")
    vae.decode(latent, out=out[:, :, ::2, :3])
    assert np.array_equal(out[:, :, ::2, :3], whole[0].transpose(1, 2, 3, 0))
    assert not out[:, :, 1::2].any() and not out[..., 3].any()


def test_latents_of_single_frames(vae):
    latent = random_latent(3, 16, 2, 4)
    whole = vae.decode(latent)
    assert whole.shape == (3, 3, 1, 16, 32) and np.array_equal(whole, vae.decode(latent[:, :, None]))
    assert vae.plan_decode(latent.shape).input_shape == (3, 16, 1, 2, 4)
    clip = random_latent(16, 2, 3, 4)
    assert np.array_equal(vae.decode(clip), vae.decode(clip[None]))


def test_types(vae):
    video = random_video(1, 16, 16, 3)
    bytes_ = np.round((video + 1) * 127.5).astype("u1")
    latent = vae.encode(bytes_)
    assert latent.dtype == np.float32
    assert np.allclose(latent, vae.encode(bytes_ / np.float32(127.5) - 1), atol=1e-5)
    assert vae.encode(video.astype("f2")).dtype == np.float16
    assert vae.encode(bytes_, dtype=np.float16).dtype == np.float16
    shown = vae.decode(latent, layout="THWC", dtype="uint8")
    exact = np.clip((vae.decode(latent, layout="THWC") + 1) * 127.5, 0, 255)
    assert shown.dtype == np.uint8 and np.abs(shown - exact).max() <= 0.5001
    assert vae.decode(latent, dtype=np.dtype("u2")).dtype == np.uint16
    read_only = video.copy()
    read_only.flags.writeable = False
    assert np.array_equal(vae.encode(read_only), vae.encode(video))
    vae.pixel_range = "0..1"
    assert np.allclose(vae.encode((video + 1) / 2), vae.encode(bytes_ / np.float32(255)), atol=0.1)


def test_sizes(vae):
    video = random_video(6, 19, 29, 3)
    latent, logvar = np.empty((1, 16, 3, 3, 4), "f4"), np.empty((1, 16, 3, 3, 4), "f4")
    assert vae.encode(video, out=latent, logvar=logvar)[1] is logvar
    assert vae.decode(latent, layout="THWC", size=(6, 19, 29)).shape == video.shape
    assert vae.decode(latent).shape == (1, 3, 9, 24, 32)
    assert vae.decode(latent, size=(None, 19, None)).shape == (1, 3, 9, 19, 32)
    with pytest.raises(TensorError):
        vae.decode(latent, size=(2, 19, 29))
    with pytest.raises(ArgumentError, match="size"):
        vae.decode(latent, size=(19, 29))


def test_mistakes_are_named(vae):
    video = random_video(5, 16, 16, 3)
    with pytest.raises(TypeError, match="video is a list"):
        vae.encode([[1.0]])
    with pytest.raises(TensorError, match=r"video: dtype float64 is not accepted.*pass a float32 copy"):
        vae.encode(video.astype("f8"))
    with pytest.raises(TensorError, match="out: dtype int64"):
        vae.decode(random_latent(1, 16, 1, 2, 2), out=np.empty((1, 3, 1, 16, 16), "i8"))
    with pytest.raises(TensorError, match="uint8.* in this machine's byte order"):
        vae.encode(video.astype(">f4"))
    with pytest.raises(TensorError, match="video: dtype object is not accepted"):
        vae.encode(video.astype(object))
    with pytest.raises(ArgumentError, match="out has float32, but dtype is uint8; leave one out"):
        vae.decode(random_latent(1, 16, 1, 2, 2), out=np.empty((1, 3, 1, 16, 16), "f4"), dtype="uint8")
    with pytest.raises(ArgumentError, match="size"):
        vae.decode(random_latent(1, 16, 1, 2, 2), size=(-1, 16, 16))
    with pytest.raises(TensorError, match="2 axes"):
        vae.encode(video[0, 0])
    with pytest.raises(ArgumentError, match="layout"):
        vae.encode(video, layout="TXYC")
    with pytest.raises(TensorError, match="layout HWC has 3"):
        vae.encode(video, layout="HWC")
    with pytest.raises(ArgumentError, match="no B"):
        vae.decode(random_latent(2, 16, 1, 2, 2), layout="THWC")
    with pytest.raises(ArgumentError, match="dtype is float64"):
        vae.decode(random_latent(1, 16, 1, 2, 2), dtype="float64")
    out = np.empty((1, 3, 1, 16, 16), "f4")
    out.flags.writeable = False
    with pytest.raises(TensorError, match="out is read-only"):
        vae.decode(random_latent(1, 16, 1, 2, 2), out=out)


def test_cuda_array_interface_is_passed_on():
    class OnDevice:
        __cuda_array_interface__ = {
            "shape": (4, 8, 8, 3),
            "typestr": "|u1",
            "data": (0x7F0000001000, False),
            "strides": (1024, 64, 4, 1),
            "stream": 2,
            "version": 3,
        }

    found = view(OnDevice())
    assert (found.struct.device_type, found.struct.device_id) == (_abi.VVAE_DEVICE_CUDA, 0)
    assert found.struct.data == 0x7F0000001000 and found.struct.dtype == _abi.VVAE_DTYPE_U8
    assert list(found.struct.strides[1:5]) == [1, 1024, 64, 4]
    assert found.memory.stream == 2


def test_cuda_arrays_are_ordered_on_their_stream(vae):
    from video_vae._run import Run

    class OnDevice:
        __cuda_array_interface__ = {"shape": (1, 3, 1, 8, 8), "typestr": "<f4", "data": (4096, False), "stream": 7}

    on_device = view(OnDevice())
    info = Run(1, [on_device, on_device], None)._info
    assert (info.flags, info.cuda_stream) == (_abi.VVAE_RUN_HAS_STREAM, 7)
    mixed = Run(1, [view(random_video(1, 3, 1, 8, 8)), view(random_video(1, 3, 1, 8, 8))], None)._info
    assert (mixed.flags, mixed.cuda_stream) == (0, None)
    # A handle on the CPU refuses memory of a GPU, with words and without touching it.
    with pytest.raises((TensorError, ArgumentError)):
        vae.encode(OnDevice(), out=OnDevice())


def test_dropped_frames_move_the_address():
    array = random_latent(1, 16, 4, 2, 2)
    found = view(array, None, LATENT_LAYOUTS)
    found.drop_frames(3)
    assert found.struct.data == array[:, :, 3:].__array_interface__["data"][0] and found.frames == 1
    backwards = view(array[:, :, ::-1], None, LATENT_LAYOUTS)
    backwards.drop_frames(3)
    assert backwards.struct.data == array.__array_interface__["data"][0]


def test_dlpack_capsules_are_given_back(vae):
    import gc
    import weakref

    video = random_video(1, 16, 16, 3)
    expected = vae.encode(video)
    spied = video.view(type("Traced", (np.ndarray,), {}))
    assert np.array_equal(vae.encode(Spy(spied)), expected)
    alive = weakref.ref(spied)
    del spied
    gc.collect()
    assert alive() is None
    assert ctypes.sizeof(_abi.vvae_tensor) == 48
