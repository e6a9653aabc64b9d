"""One long clip in parts: the bits of the whole."""

import json
import signal

import pytest
from conftest import SMALL, np

av = pytest.importorskip("av")

from batch_clips import frames_of, killed_after, pattern, run, write_video  # noqa: E402

from video_vae.batch.clips import encode_clip_job  # noqa: E402
from video_vae.batch.errors import BatchError  # noqa: E402
from video_vae.batch.frames import FrameIndex, FrameReader, FrameRule  # noqa: E402
from video_vae.batch.settings import Settings  # noqa: E402
from video_vae.batch.shards import parse_safetensors, safetensors_header  # noqa: E402

FRAMES = 150


def make_film(folder, kind):
    """With B frames and a keyframe every 40."""
    path = folder / f"film.{kind}"
    write_video(
        path, pattern(8, FRAMES, 24, 40), options={"g": "40", "bf": "3", "x264-params": "open-gop=1:scenecut=0"}
    )
    return path


@pytest.mark.parametrize("kind", ["mp4", "mkv", "h264"])
def test_frames_are_found_by_seeking(kind, tmp_path):
    """A bare stream has no times to seek by."""
    film = make_film(tmp_path, kind)
    whole, index = frames_of(film), FrameIndex(str(film))
    assert index.count == len(whole) == FRAMES and index.seekable == (film.suffix != ".h264")
    for first, count in [(0, 150), (0, 1), (39, 3), (40, 40), (77, 5), (81, 1), (149, 1), (120, 30)]:
        span = index.span(first, count)
        with FrameReader(str(film), FrameRule(), span) as frames:
            found = np.stack([frame.to_ndarray() for frame in frames])
        assert np.array_equal(found, whole[first : first + count]), (first, count)


def test_a_clip_there_and_back(tmp_path, vae):
    film = make_film(tmp_path, "mp4")
    latent, video = tmp_path / "film.safetensors", tmp_path / "film.mkv"
    arguments = ("encode-clip", film, "--out", latent, "--part-frames", 9)
    killed_after(tmp_path / "film.safetensors.parts", 2, signal.SIGKILL, *arguments)
    assert not latent.exists()
    done = run(*arguments)
    assert done.returncode == 0 and "complete before" in done.stdout, done
    tensors, metadata = parse_safetensors(latent.read_bytes())
    mean, logvar = vae.encode(frames_of(film), logvar=True, dtype="float16")
    assert np.array_equal(tensors["mean"], mean[0]) and np.array_equal(tensors["logvar"], logvar[0])
    assert json.loads(metadata["about"])["frames"] == FRAMES
    done = run("decode-clip", latent, "--out", video, "--part-frames", 40, "--codec", "ffv1")
    assert done.returncode == 0, done.stderr
    right = vae.decode(mean, size=(FRAMES, 24, 40), layout="THWC", dtype="uint8")
    assert np.array_equal(frames_of(video), right)
    with av.open(str(video)) as container:
        times = [frame.time for frame in container.decode(video=0)]
        rate = container.streams.video[0].average_rate
    assert np.allclose(times, np.arange(FRAMES) / float(rate), atol=0.002)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["film.mkv", "film.mp4", "film.safetensors"]


def test_parts_in_h264_are_joined(tmp_path):
    """Each part begins with a keyframe and has frames out of order."""
    write_video(tmp_path / "film.mp4", pattern(8, 61, 32, 48))
    assert run("encode-clip", tmp_path / "film.mp4", "--out", tmp_path / "film.safetensors").returncode == 0
    arguments = ("decode-clip", tmp_path / "film.safetensors", "--part-frames", 20, "--crf", 1, "--out")
    done = run(*arguments, tmp_path / "back.mp4")
    assert done.returncode == 0, done.stderr
    done = run("decode-clip", tmp_path / "film.safetensors", "--crf", 1, "--out", tmp_path / "one.mp4")
    assert done.returncode == 0, done.stderr
    found, right = frames_of(tmp_path / "back.mp4"), frames_of(tmp_path / "one.mp4")
    # The same frames, compressed with other keyframes.
    assert found.shape == right.shape == (61, 32, 48, 3)
    assert np.abs(found.astype(int) - right).mean((1, 2, 3)).max() < 3
    with av.open(str(tmp_path / "back.mp4")) as container:
        times = [frame.time for frame in container.decode(video=0)]
    assert np.allclose(times, np.arange(61) / 24)
    assert "ends with .mp4" in run(*arguments, tmp_path / "back.avi").stderr


def test_wrong_clips(tmp_path):
    (tmp_path / "none.mp4").write_bytes(b"nothing")
    with pytest.raises(BatchError, match="none.mp4: Invalid data"):
        encode_clip_job(str(tmp_path / "none.mp4"), Settings(str(SMALL)), 4)
    done = run("decode-clip", tmp_path / "none.mp4", "--out", tmp_path / "out.mp4")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    latent = np.zeros((16, 2, 2, 2), np.float32)
    for about, word in [
        ("[1]", "its JSON is a list"),
        ("[" * 100_000, "nested too deep"),
        ('{"rate": "1/0"}', "is not a rate"),
        ('{"rate": "1e999999999"}', "is not a rate"),
        ('{"frames": "all"}', "'frames': 'all'"),
        ('{"frames": 6}', "'frames': 6"),
        ('{"times": [0, 1]}', "times must be 5 integers"),
    ]:
        head = safetensors_header({"mean": (latent.dtype, latent.shape)}, {"about": about})
        (tmp_path / "bad.safetensors").write_bytes(head + latent.tobytes())
        done = run("decode-clip", tmp_path / "bad.safetensors", "--out", tmp_path / "out.mp4")
        assert done.returncode == 1 and word in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not (tmp_path / "out.mp4").exists()
