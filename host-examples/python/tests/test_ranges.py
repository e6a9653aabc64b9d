"""Ranges: some frames of a clip, the same to the bit as those of the whole clip."""

import numpy as np
import pytest
from conftest import SMALL, random_latent, random_video

from video_vae import ArgumentError, TensorError, VideoVae


@pytest.mark.parametrize("frames", [slice(40, 47), slice(None, 3), slice(125, None), slice(-5, -2), range(121, 122)])
def test_decode(vae, frames):
    latent = random_latent(1, 16, 33, 2, 3)
    whole = vae.decode(latent)
    expected = whole[:, :, frames.start : frames.stop]
    assert np.array_equal(vae.decode(latent, frames=frames), expected)
    part = vae.range_inputs("decode", frames, 33)
    assert np.array_equal(vae.decode_range(latent[:, :, part], frames, 33), expected)
    shown = vae.decode(latent, frames=frames, layout="THWC", dtype="uint8", size=(None, 14, 20))
    assert shown.shape == (expected.shape[2], 14, 20, 3) and shown.dtype == np.uint8


@pytest.mark.parametrize("frames", [slice(12, 14), slice(0, 2), slice(29, None), slice(-1, None)])
def test_encode(vae, frames):
    video = random_video(1, 3, 126, 16, 24)
    latent, logvar = vae.encode(video, logvar=True)
    expected = latent[:, :, frames], logvar[:, :, frames]
    found = vae.encode(video, frames=frames, logvar=True)
    part = vae.range_inputs("encode", frames, 126)
    alone = vae.encode_range(video[:, :, part], frames, 126, logvar=True)
    out = np.empty_like(expected[0])
    vae.encode(video, frames=frames, out=out)
    for made in (*found, *alone):
        assert np.array_equal(made, expected[0]) or np.array_equal(made, expected[1])
    assert np.array_equal(found[0], expected[0]) and np.array_equal(alone[1], expected[1])
    assert np.array_equal(out, expected[0])


def test_other_layouts_and_strides(vae):
    video = np.random.default_rng(3).integers(0, 256, (41, 16, 16, 3), np.uint8)
    assert np.array_equal(vae.encode(video, frames=slice(9, 11)), vae.encode(video)[:, :, 9:11])
    turned = random_latent(2, 16, 16, 2, 3).transpose(0, 1, 2, 4, 3)
    assert np.array_equal(vae.decode(turned, frames=slice(50, 52)), vae.decode(turned)[:, :, 50:52])


def test_a_stream_from_the_middle(vae):
    latent = random_latent(1, 16, 33, 2, 2)
    whole = vae.decode(latent)
    start = vae.range_inputs("decode", slice(125, None), 33).start
    assert 0 < start < 10
    found, out = [], np.empty((1, 3, 4, 16, 16), "f4")
    with vae.open_stream("decode", latent.shape, 125) as stream:
        for frame in range(start, 33):
            assert stream.push(latent[:, :, frame : frame + 1]) == 1
            while written := stream.pull(out):
                found.append(out[:, :, :written].copy())
        stream.finish()
        while (written := stream.pull(out)) is not None:
            found.append(out[:, :, :written].copy())
    assert np.array_equal(np.concatenate(found, 2), whole[:, :, 125:])


def test_plans():
    with VideoVae(SMALL, "cpu") as vae:
        shape = (1, 16, 501, 4, 4)
        whole, part = vae.plan_decode(shape), vae.plan_decode(shape, frames=slice(1000, 1040))
        assert part.output_shape[2] == 40 and part.input_shape[2] < 100
        assert 0 < part.seconds < whole.seconds / 4 and "frames 1000 to 1039" in str(part)
        video = (2001, 32, 32, 3)
        assert vae.plan_encode(video, frames=slice(100, 110)).output_shape[2] == 10


def test_mistakes_are_named(vae):
    latent = random_latent(1, 16, 5, 2, 2)
    for frames, says in [
        (slice(17, 18), "17 video frames, 0 to 16"),
        (slice(3, 3), "no frame"),
        (slice(5, 2), "no frame"),
        (slice(0, 8, 2), "step must be 1"),
        (7, "must be a slice"),
        (slice(-40, 3), "no frame"),
    ]:
        with pytest.raises(ArgumentError, match=says):
            vae.decode(latent, frames=frames)
    with pytest.raises(TensorError, match="the range needs frames 0 to 3 of the clip"):
        vae.decode_range(latent[:, :, :2], slice(9, 12), 5)
