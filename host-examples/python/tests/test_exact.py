"""The numbers of the authors' implementation, through every way in."""

import numpy as np
import pytest
from conftest import GOLDEN, golden, random_latent, random_video, relative_error

from video_vae import VideoVae

CASES = ["small-image", "small-clip5", "small-clip17", "small-batch2", "medium-image", "medium-clip9"]
MOST_ERROR = 1e-5


@pytest.mark.parametrize("case", CASES)
def test_goldens(case):
    right = golden(case)
    with VideoVae(GOLDEN / f"{case.partition('-')[0]}.safetensors", device="cpu") as vae:
        mean, logvar = vae.encode(right["encode_video"], logvar=True)
        assert relative_error(mean, right["encode_mean"]) <= MOST_ERROR
        assert relative_error(logvar, right["encode_logvar"]) <= MOST_ERROR
        assert relative_error(vae.decode(right["decode_latent"]), right["decode_video"]) <= MOST_ERROR


def test_goldens_with_tiles():
    right = golden("small-tiled")
    settings = {"tiled": True, "tile_size": 64, "tile_overlap": 16}
    tiles = {f"{node}_{key}": value for node in ("encode", "decode") for key, value in settings.items()}
    with VideoVae(GOLDEN / "small.safetensors", "cpu", **tiles) as vae:
        assert not vae.plan_decode(right["decode_latent"].shape).exact
        assert relative_error(vae.encode(right["encode_video"]), right["encode_mean"]) <= MOST_ERROR
        assert relative_error(vae.decode(right["decode_latent"]), right["decode_video"]) <= MOST_ERROR


def test_pieces_are_the_same_to_the_bit_as_the_whole(vae):
    video = random_video(1, 3, 17, 24, 40)
    latent = vae.encode(video)
    for cuts in ([17], [1, 4, 12], [3, 3, 3, 8], [1] * 17):
        ends = np.cumsum(cuts)
        pieces = [video[:, :, end - cut : end] for cut, end in zip(cuts, ends)]
        assert np.array_equal(np.concatenate(list(vae.stream_encode(pieces)), axis=2), latent)
    whole = vae.decode(latent, layout="THWC", dtype="uint8")
    for cuts in ([5], [1, 4], [2, 2, 1]):
        ends = np.cumsum(cuts)
        pieces = (latent[:, :, end - cut : end] for cut, end in zip(cuts, ends))
        frames = list(vae.stream_decode(pieces, layout="THWC", dtype="uint8"))
        assert np.array_equal(np.concatenate(frames), whole)
    cut = vae.stream_decode(latent, size=(15, 20, 33), layout="THWC", dtype="uint8")
    assert np.array_equal(np.concatenate(list(cut)), whole[:15, :20, :33])
    assert vae.memory_info().streams == 0


def test_a_stream_left_early_is_closed(vae):
    frames = vae.stream_decode(random_latent(1, 16, 4, 3, 3))
    next(frames)
    assert vae.memory_info().streams == 1
    frames.close()
    assert vae.memory_info().streams == 0
    assert list(vae.stream_decode([])) == []


def test_a_stream_by_hand(vae):
    latent = random_latent(1, 16, 3, 2, 2)
    whole = vae.decode(latent)
    with vae.open_stream("decode", latent.shape) as stream:
        room, found, pushed = np.empty((1, 3, 2, 16, 16), "f4"), [], 0
        while pushed < 3:
            pushed += stream.push(latent[:, :, pushed:])
            while written := stream.pull(room):
                found.append(room[:, :, :written].copy())
        stream.finish()
        while (written := stream.pull(room)) is not None:
            found.append(room[:, :, :written].copy())
    assert np.array_equal(np.concatenate(found, axis=2), whole)


def test_a_resumed_stream_has_the_bits_of_an_uninterrupted_one(vae):
    latent = random_latent(1, 16, 40, 2, 3)
    expected = np.concatenate(list(vae.stream_decode(latent, layout="BCTHW")), axis=2)
    room = np.empty((1, 3, 1, 16, 24), np.float32)

    def advance(stream, start, end):
        frames = []
        while start < end:
            start += stream.push(latent[:, :, start:end])
            while stream.pull(room):
                frames.append(room.copy())
        return frames

    with vae.open_stream("decode", latent.shape) as stream:
        before = advance(stream, 0, 38)
    first = len(before)
    needed = vae.range_inputs("decode", slice(first, None), 40)
    assert needed.start > 0
    with vae.open_stream("decode", latent.shape, first) as stream:
        after = advance(stream, needed.start, 40)
        stream.finish()
        while stream.pull(room):
            after.append(room.copy())
    assert np.array_equal(np.concatenate(before + after, axis=2), expected)
