"""Frames are taken as they are stored, each with its time; a file that lacks some is damaged."""

import contextlib
import json
import shutil

import pytest
from conftest import SMALL, np

av = pytest.importorskip("av")

from batch_clips import (  # noqa: E402
    frames_of,
    milliseconds,
    pattern,
    run,
    write_lossless,
    write_timed,
    write_video,
)

from video_vae.batch import matroska  # noqa: E402
from video_vae.batch.clips import encode_clip_job  # noqa: E402
from video_vae.batch.errors import BatchError, BrokenInput  # noqa: E402
from video_vae.batch.frames import FrameReader, FrameRule  # noqa: E402
from video_vae.batch.settings import Settings  # noqa: E402
from video_vae.batch.shards import parse_safetensors  # noqa: E402

# 24 frames in 1.9 s, as a phone or a screen recorder stores them.
UNEVEN = [
    0,
    33,
    66,
    100,
    133,
    400,
    433,
    466,
    500,
    900,
    1000,
    1033,
    1066,
    1100,
    1133,
    1166,
    1200,
    1233,
    1500,
    1533,
    1566,
]
UNEVEN += [1600, 1800, 1866]
KEEP = FrameRule(keep_damaged=True)


def info_of(path, rule=None):
    with FrameReader(str(path), rule or FrameRule()) as frames:
        assert sum(1 for _ in frames)
        return frames.info


def manifest(out):
    return [json.loads(line) for line in (out / "manifest.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kind", ["mp4", "mkv", "mov"])
def test_times_are_read_as_they_are_stored(kind, tmp_path):
    write_timed(tmp_path / f"a.{kind}", pattern(1, 24, 24, 32), UNEVEN)
    info = info_of(tmp_path / f"a.{kind}")
    upper, lower = map(int, info["time_base"].split("/"))
    assert [round(time * upper * 1000 / lower) for time in info["times"]] == UNEVEN
    assert len(frames_of(tmp_path / f"a.{kind}")) == 24


def test_times_that_the_rate_says_are_not_repeated(tmp_path):
    """Matroska rounds them to milliseconds."""
    for name, rate in (("a.mp4", 24), ("a.mkv", 24), ("b.mkv", 30)):
        write_video(tmp_path / name, pattern(1, 48, 16, 16), rate)
        info = info_of(tmp_path / name)
        assert info["rate"] == str(rate) and "times" not in info


@pytest.mark.parametrize("late", [0, 500])
def test_a_collection_keeps_its_times(late, tmp_path):
    """There and back: a video of uneven times, that begins with the sound or after it."""
    clips = tmp_path / "clips"
    clips.mkdir()
    times = [time + late for time in UNEVEN]
    write_timed(clips / "a.mp4", pattern(1, 24, 24, 32), times, sound=2.4)
    assert milliseconds(clips / "a.mp4") == times
    done = run("encode", clips, "--out", tmp_path / "latents")
    assert done.returncode == 0, done.stderr
    for codec, kind in (("h264", "mp4"), ("ffv1", "mkv")):
        done = run("decode", tmp_path / "latents", "--out", tmp_path / codec, "--codec", codec)
        assert done.returncode == 0, done.stderr
        with av.open(str(tmp_path / codec / "latents-000000" / f"a.{kind}")) as container:
            assert [round(frame.time * 1000) for frame in container.decode(video=0)] == times


def test_a_clip_in_parts_keeps_its_times(tmp_path):
    times = [n * 40 + (n % 7) * 5 + (2000 if n > 60 else 0) for n in range(100)]
    write_timed(tmp_path / "film.mp4", pattern(1, 100, 24, 32), times)
    latent, video = tmp_path / "film.safetensors", tmp_path / "back.mp4"
    done = run("encode-clip", tmp_path / "film.mp4", "--out", latent, "--part-frames", 7)
    assert done.returncode == 0, done.stderr
    about = json.loads(parse_safetensors(latent.read_bytes())[1]["about"])
    assert len(about["times"]) == about["frames"] == 100
    done = run("decode-clip", latent, "--out", video, "--part-frames", 23)
    assert done.returncode == 0, done.stderr
    assert milliseconds(video) == times


def test_a_rate_says_how_many_frames_it_was_made_of(tmp_path):
    write_timed(tmp_path / "a.mp4", pattern(1, 24, 24, 32), UNEVEN)
    info = info_of(tmp_path / "a.mp4", FrameRule(rate="10"))
    assert info["source_frames"] == 24 and info["rate"] == "10" and "times" not in info
    assert len(frames_of(tmp_path / "a.mp4", FrameRule(rate="10"))) == 19


# ---- What is missing ----


def cut(path, share, name="cut"):
    made = path.with_name(f"{name}{path.suffix}")
    data = path.read_bytes()
    made.write_bytes(data[: int(len(data) * share)])
    return made


def make(folder, kind, frames=48):
    path = folder / f"whole.{kind}"
    options = {"movflags": "faststart"} if kind in ("mp4", "mov") else None
    write_timed(path, pattern(1, frames, 64, 96), [n * 40 for n in range(frames)], options, sound=2.0)
    return path


@pytest.mark.parametrize("kind", ["mkv", "mp4", "mov"])
def test_a_file_that_was_cut_is_damaged(kind, tmp_path):
    whole = make(tmp_path, kind)
    assert len(frames_of(whole)) == 48
    for share in (0.95, 0.6):
        with pytest.raises(BrokenInput, match=r"frame \d+ (is missing|cannot be decoded)"):
            frames_of(cut(whole, share))
    info = info_of(cut(whole, 0.6), KEEP)
    assert "frame" in info["damaged"]
    assert 5 < len(frames_of(cut(whole, 0.6), KEEP)) < 48
    with pytest.raises(BatchError, match=r"frame \d+ (is missing|cannot be)"):
        encode_clip_job(str(cut(whole, 0.6)), Settings(str(SMALL)), 4)


def test_the_first_frames_of_a_cut_file_are_whole(tmp_path):
    cut_file = cut(make(tmp_path, "mkv"), 0.6)
    assert len(frames_of(cut_file, FrameRule(max_frames=9))) == 9


def test_a_matroska_file_cut_behind_its_frames_is_whole(tmp_path):
    """Its index comes last."""
    whole = make(tmp_path, "mkv")
    data = whole.read_bytes()
    index = data.rindex(bytes.fromhex("1c53bb6b"))
    (tmp_path / "cut.mkv").write_bytes(data[: index + 3])
    assert len(frames_of(tmp_path / "cut.mkv")) == 48


@pytest.mark.parametrize("kind", ["mkv", "webm"])
def test_blocks_that_a_damaged_matroska_file_loses(kind, tmp_path):
    """ffmpeg passes over them without a word, and nothing depends on a lost frame if each is coded alone."""
    path, made = tmp_path / f"a.{kind}", tmp_path / f"b.{kind}"
    if kind == "mkv":
        write_video(path, pattern(1, 60, 24, 32), options={"g": "1"})
    else:
        write_video(path, pattern(1, 60, 24, 32), codec="libvpx", options={"g": "1", "auto-alt-ref": "0"})
    frames, data, fewer = frames_of(path), path.read_bytes(), 0
    for at in range(700, len(data) - 500, len(data) // 60):
        made.write_bytes(data[:at] + bytes(40) + data[at + 40 :])
        with contextlib.suppress(BrokenInput):
            assert len(frames_of(made)) == len(frames), at
        fewer += len(frames_of(made, KEEP)) < len(frames)
    assert fewer, "some of these files lose frames"


def test_the_elements_of_a_matroska_file(tmp_path):
    path = tmp_path / "a.mkv"
    write_lossless(path, pattern(1, 3, 16, 16))
    data = path.read_bytes()
    matroska.check(str(path))
    # A live recording does not know its size; anything else is no Matroska file.
    segment = data.index(bytes.fromhex("18538067")) + 4
    live = data[:segment] + b"\x01" + b"\xff" * 7 + data[segment + 8 :]
    for other in (live, b"", b"\x1a", bytes(40), data[:20], b"\xff" * 40):
        path.write_bytes(other)
        matroska.check(str(path))
    for length, frames in ((len(data) - 100, 2), (len(data) // 2, 0)):
        path.write_bytes(data[:length])
        with pytest.raises(matroska.Damaged) as damage:
            matroska.check(str(path))
        assert (damage.value.cut, damage.value.at, damage.value.frames) == (True, length, frames)


def test_frames_that_an_edit_list_hides_are_not_missing(tmp_path):
    """As of a clip that was trimmed without being compressed again."""
    write_video(tmp_path / "a.mp4", pattern(1, 48, 64, 96), options={"g": "12"})
    with av.open(str(tmp_path / "a.mp4")) as source, av.open(str(tmp_path / "b.mp4"), "w") as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        shift = round(20 / 24 / source.streams.video[0].time_base)
        for packet in source.demux(video=0):
            if packet.size:
                packet.pts -= shift
                packet.dts -= shift
                packet.stream = stream
                target.mux(packet)
    with av.open(str(tmp_path / "b.mp4")) as container:
        assert container.streams.video[0].frames == 48
    assert len(frames_of(tmp_path / "b.mp4")) == 28


def damaged_in_the_middle(path, made, count=400):
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + count] = bytes(count)
    made.write_bytes(data)


def test_a_frame_that_cannot_be_decoded_is_named(tmp_path):
    write_video(tmp_path / "a.mkv", pattern(1, 40, 64, 64), options={"g": "1"})
    damaged_in_the_middle(tmp_path / "a.mkv", tmp_path / "b.mkv")
    with pytest.raises(BrokenInput, match=r"frame \d+ (is damaged|cannot be decoded)"):
        frames_of(tmp_path / "b.mkv")
    info = info_of(tmp_path / "b.mkv", KEEP)
    assert "frame" in info["damaged"] and 30 <= len(frames_of(tmp_path / "b.mkv", KEEP)) <= 40


def test_damaged_inputs_are_broken_unless_they_are_kept(tmp_path):
    clips, whole = tmp_path / "clips", make(tmp_path, "mkv")
    clips.mkdir()
    shutil.copy(whole, clips / "good.mkv")
    shutil.copy(cut(whole, 0.6), clips / "cut.mkv")
    done = run("encode", clips, "--out", tmp_path / "strict")
    assert done.returncode == 0 and "1 are broken" in done.stdout, done
    lines = {line["source"].rpartition("/")[2]: line for line in manifest(tmp_path / "strict")}
    assert "is missing" in lines["cut.mkv"]["error"] and "error" not in lines["good.mkv"]
    done = run("encode", clips, "--out", tmp_path / "kept", "--keep-damaged")
    assert done.returncode == 0 and "warning: 1 are damaged and were kept" in done.stdout, done
    lines = {line["source"].rpartition("/")[2]: line for line in manifest(tmp_path / "kept")}
    assert "is missing" in lines["cut.mkv"]["damaged"] and lines["cut.mkv"]["frames"] > 5
    assert "damaged" not in lines["good.mkv"]
    done = run("encode", clips, "--out", tmp_path / "strict", "--keep-damaged")
    assert done.returncode == 1 and "keep_damaged" in done.stderr


def test_a_damaged_clip_in_parts(tmp_path, vae):
    write_video(tmp_path / "a.mkv", pattern(1, 60, 24, 32), options={"g": "1"})
    damaged_in_the_middle(tmp_path / "a.mkv", tmp_path / "b.mkv", 100)
    latent = tmp_path / "b.safetensors"
    arguments = ("encode-clip", tmp_path / "b.mkv", "--out", latent, "--part-frames", 6)
    done = run(*arguments)
    assert done.returncode == 1 and "frame" in done.stderr and "Traceback" not in done.stderr, done.stderr
    shutil.rmtree(tmp_path / "b.safetensors.parts", ignore_errors=True)
    done = run(*arguments, "--keep-damaged")
    assert done.returncode == 0 and "warning" in done.stdout, done
    tensors, metadata = parse_safetensors(latent.read_bytes())
    assert "frame" in json.loads(metadata["about"])["damaged"]
    assert np.array_equal(tensors["mean"], vae.encode(frames_of(tmp_path / "b.mkv", KEEP), dtype="float16")[0])
