"""Encoding collections on this machine: the files, and what happens if things go wrong."""

import contextlib
import functools
import io
import itertools
import json
import os
import queue
import shutil
import signal
import subprocess
import tarfile
import time
from pathlib import Path

import pytest
from conftest import SMALL, SOURCES, np

av = pytest.importorskip("av")

from batch_clips import (  # noqa: E402
    ENVIRONMENT,
    RAW,
    collection,
    command,
    frames_of,
    killed_after,
    pattern,
    result,
    run,
    write_image,
    write_lossless,
    write_video,
)

from video_vae import DeviceError, VideoVae  # noqa: E402
from video_vae.batch.ahead import ATTEMPTS, Broken, Clip, Piece, ReadAhead, Restart  # noqa: E402
from video_vae.batch.buckets import choose, cover, parse_buckets  # noqa: E402
from video_vae.batch.decode import DecodeSettings, decode_job, decode_worker  # noqa: E402
from video_vae.batch.encode import encode_job, encode_worker  # noqa: E402
from video_vae.batch.encoder import Encoder, item_seed  # noqa: E402
from video_vae.batch.engine_local import LocalEngine  # noqa: E402
from video_vae.batch.errors import BatchError, BrokenInput  # noqa: E402
from video_vae.batch.files import AtomicFile  # noqa: E402
from video_vae.batch.folder import RunFolder, begin_count  # noqa: E402
from video_vae.batch.frames import FrameReader, FrameRule  # noqa: E402
from video_vae.batch.run import run as run_job  # noqa: E402
from video_vae.batch.settings import Resources, Settings  # noqa: E402
from video_vae.batch.shards import ShardWriter, read_shard, safetensors  # noqa: E402
from video_vae.batch.sources import Item, Shard, list_items  # noqa: E402
from video_vae.batch.worker import Worker  # noqa: E402

SHARD = 4


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    return collection(tmp_path_factory.mktemp("clips"))


@pytest.fixture(scope="module")
def undisturbed(clips, tmp_path_factory):
    """What every disturbed run has to end with."""
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    encode_here([clips], out)
    return out


def encode_here(sources, out, settings=None, resources=None, **options):
    settings = settings or Settings(str(SMALL))
    job = encode_job([str(source) for source in sources], settings, options.pop("shard_items", SHARD))
    make = encode_worker(settings)
    return run_job(job, out, lambda: LocalEngine(make, ["cpu"], resources or Resources(2)), quiet=True, **options)


def samples_of(out):
    return {sample.key: sample for shard in sorted(out.glob("*.tar")) for sample in read_shard(shard)}


def manifest_of(out):
    return [json.loads(line) for line in (out / "manifest.jsonl").read_text().splitlines()]


# ---- What is in the files ----


def test_latents_are_those_of_the_library(clips, undisturbed, vae):
    samples, manifest = samples_of(undisturbed), manifest_of(undisturbed)
    assert [line["source"] for line in manifest] == sorted(map(str, clips.iterdir()))
    assert len(samples) == 13
    for line in manifest:
        if "error" in line:
            assert line["key"] not in samples
            continue
        frames = frames_of(line["source"])
        assert frames.shape == (line["frames"], line["height"], line["width"], 3)
        mean, logvar = vae.encode(frames, logvar=True, dtype="float16")
        sample = samples[line["key"]]
        assert np.array_equal(sample.tensors["mean"], mean[0])
        assert np.array_equal(sample.tensors["logvar"], logvar[0])
        assert sample.about == {key: value for key, value in line.items() if key != "file"}
    rates = {line["rate"] for line in manifest if line["source"].endswith(".mp4") and "error" not in line}
    assert rates == {"24"}


def test_broken_inputs_are_recorded(clips, undisturbed):
    reasons = {Path(line["source"]).name: line["error"] for line in manifest_of(undisturbed) if "error" in line}
    assert set(reasons) == {"nonsense.mp4", "empty.mp4", "cut.mp4"}
    assert all("Invalid data" in reason for reason in reasons.values())


def test_others_can_read_the_shards(undisturbed):
    names = []
    for shard in sorted(undisturbed.glob("*.tar")):
        with tarfile.open(shard) as tar:
            names += tar.getnames()
    assert names == sorted(names) and len(names) == 26
    webdataset = pytest.importorskip("webdataset")
    safetensors = pytest.importorskip("safetensors.numpy")
    shards = [str(path) for path in sorted(undisturbed.glob("*.tar"))]
    ours = samples_of(undisturbed)
    theirs = list(webdataset.WebDataset(shards, shardshuffle=False))
    assert [sample["__key__"] for sample in theirs] == list(ours)
    for sample in theirs:
        arrays = safetensors.load(sample["safetensors"])
        assert set(arrays) == {"mean", "logvar"}
        assert all(np.array_equal(arrays[name], ours[sample["__key__"]].tensors[name]) for name in arrays)
        assert json.loads(sample["json"]) == ours[sample["__key__"]].about


def test_the_command_does_the_same(clips, undisturbed, tmp_path):
    done = run("encode", clips, "--out", tmp_path / "out", "--shard-items", SHARD, "--readers", 1, *RAW)
    assert done.returncode == 0, done.stderr
    assert "13 clips" in done.stdout and "3 are broken" in done.stdout
    assert result(tmp_path / "out") == result(undisturbed)
    again = run("encode", clips, "--out", tmp_path / "out", "--shard-items", SHARD, *RAW)
    assert again.returncode == 0 and "16 inputs were complete before" in again.stdout
    assert result(tmp_path / "out") == result(undisturbed)


def test_samples_have_seeds_of_their_own(tmp_path, vae):
    folder = tmp_path / "clips"
    folder.mkdir()
    for name in "ab":
        write_lossless(folder / f"{name}.mkv", pattern(1, 5, 16, 16))
    settings = Settings(str(SMALL), dtype="float32", logvar=False, parameters={"posterior": "sample", "seed": "7"})
    encode_here([folder], tmp_path / "out", settings)
    one, other = samples_of(tmp_path / "out").values()
    assert set(one.tensors) == {"latent"} and not np.array_equal(one.tensors["latent"], other.tensors["latent"])
    assert other.about["seed"] == item_seed(7, other.key)
    with vae.configured(posterior="sample", seed=other.about["seed"]):
        assert np.array_equal(vae.encode(pattern(1, 5, 16, 16))[0], other.tensors["latent"])


def test_long_clips_are_streamed(tmp_path, vae):
    """A slot of two frames makes every clip long."""
    folder, frames = tmp_path / "clips", pattern(3, 17, 24, 32)
    folder.mkdir()
    write_lossless(folder / "long.mkv", frames)
    write_lossless(folder / "short.mkv", frames[:1])
    encode_here([folder], tmp_path / "out", resources=Resources(1, slot_bytes=2 * frames[0].nbytes))
    for sample, count in zip(samples_of(tmp_path / "out").values(), (17, 1)):
        mean, logvar = vae.encode(frames[:count], logvar=True, dtype="float16")
        assert sample.about["frames"] == count
        assert np.array_equal(sample.tensors["mean"], mean[0]) and np.array_equal(sample.tensors["logvar"], logvar[0])


# ---- Frames ----


def test_buckets():
    sizes = parse_buckets("1280x720, 720x1280,256x256,512x512")
    assert choose(1920, 1080, sizes) == (1280, 720) and choose(1080, 1920, sizes) == (720, 1280)
    assert choose(500, 480, sizes) == (512, 512) and choose(300, 300, sizes) == (256, 256)
    assert cover(1920, 1080, (256, 256)) == (455, 256) and cover(100, 300, (64, 32)) == (64, 192)
    for text in ("", "12", "0x8", "8x", "8x8;8x8"):
        with pytest.raises(BatchError, match="WIDTHxHEIGHT"):
            parse_buckets(text)


def test_frames_are_resized_and_cropped(tmp_path):
    frames = np.full((4, 40, 80, 3), 128, np.uint8)
    frames[:, :, :20], frames[:, :, 60:] = 0, 255
    write_lossless(tmp_path / "wide.mkv", frames)
    found = frames_of(tmp_path / "wide.mkv", FrameRule(buckets=((20, 20), (20, 60))))
    # Halved, then the middle 20 of 40 columns: nothing but grey, apart from the blur at the edges.
    assert found.shape == (4, 20, 20, 3) and np.all(found[:, :, 2:-2] == 128)
    assert np.array_equal(frames_of(tmp_path / "wide.mkv"), frames)
    assert len(frames_of(tmp_path / "wide.mkv", FrameRule(max_frames=3))) == 3
    assert len(frames_of(tmp_path / "wide.mkv", FrameRule(rate="12"))) == 2


def test_a_turned_video_is_turned_back(tmp_path):
    """Phones store frames as the sensor has them, and in the track's header how to show them."""
    frames = pattern(5, 3, 32, 64)
    write_video(tmp_path / "flat.mp4", frames)
    data = bytearray((tmp_path / "flat.mp4").read_bytes())
    matrix = data.index(b"tkhd") + 4 + 40
    # x' = -y, y' = x: a quarter clockwise.
    turn = [0, 1 << 16, 0, -1 << 16, 0, 0, 0, 0, 1 << 30]
    data[matrix : matrix + 36] = b"".join(value.to_bytes(4, "big", signed=True) for value in turn)
    (tmp_path / "turned.mp4").write_bytes(data)
    flat, turned = frames_of(tmp_path / "flat.mp4"), frames_of(tmp_path / "turned.mp4")
    assert turned.shape == (3, 64, 32, 3)
    difference = np.abs(turned.astype(int) - np.rot90(flat, -1, (1, 2)).astype(int))
    # Chroma is interpolated after the turn.
    assert difference.mean() < 4


def test_no_frames_in_other_things(tmp_path):
    os.mkfifo(tmp_path / "pipe.mp4")
    with pytest.raises(BrokenInput, match="regular file"):
        FrameReader(str(tmp_path / "pipe.mp4"), FrameRule())
    with pytest.raises(BrokenInput, match="No such file"):
        FrameReader(str(tmp_path / "gone.mp4"), FrameRule())
    with av.open(str(tmp_path / "sound.mka"), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000, layout="mono")
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), "s16", "mono")
        sound.sample_rate = 8000
        container.mux(stream.encode(sound))
    with pytest.raises(BrokenInput, match="no video stream"):
        FrameReader(str(tmp_path / "sound.mka"), FrameRule())


def test_sources(tmp_path):
    (tmp_path / "b" / "deep").mkdir(parents=True)
    for name in ("a.mp4", "b/z.PNG", "b/deep/c.mkv", "b/notes.txt", "odd"):
        (tmp_path / name).write_bytes(b"12")
    (tmp_path / "list").write_text(f"# mine\n{tmp_path}/odd\n\n{tmp_path}/a.mp4\n{tmp_path}/gone.mp4\n")
    found = list_items([f"@{tmp_path}/list", str(tmp_path / "b")])
    names = ["a.mp4", "b/deep/c.mkv", "b/z.PNG", "gone.mp4", "odd"]
    assert [item.path for item in found] == [str(tmp_path / name) for name in names]
    assert [item.key for item in found][:2] == ["000000000", "000000001"] and found[3].bytes == 0
    (tmp_path / "none").mkdir()
    for sources in ([str(tmp_path / "none")], [f"@{tmp_path}/nowhere"]):
        with pytest.raises(BatchError):
            list_items(sources)
    with pytest.raises(BatchError, match=r"gone.mp4: there is no such file or folder"):
        list_items([str(tmp_path / "b"), str(tmp_path / "gone.mp4")])


# ---- Back to video ----


def decode_here(sources, out, settings=None, **options):
    settings = settings or DecodeSettings(str(SMALL), "ffv1")
    make = decode_worker(settings)
    job = decode_job([str(source) for source in sources], settings)
    return run_job(job, out, lambda: LocalEngine(make, ["cpu"], Resources(2)), quiet=True, **options)


def test_shards_become_videos(undisturbed, tmp_path, vae):
    figures = decode_here([undisturbed], tmp_path / "out")
    assert (figures["clips"], figures["broken"]) == (13, 0)
    samples = samples_of(undisturbed)
    lines = manifest_of(tmp_path / "out")
    assert {line["key"] for line in lines} == set(samples)
    for line in lines:
        sample = samples[line["key"]]
        size = tuple(sample.about[name] for name in ("frames", "height", "width"))
        right = vae.decode(sample.tensors["mean"][None], size=size, layout="THWC", dtype="uint8")
        assert line["file"].endswith(".png" if size[0] == 1 else ".mkv")
        assert np.array_equal(frames_of(tmp_path / "out" / line["file"]), right)
        # The source's name; the key, where another source of the shard has it.
        assert Path(line["file"]).stem in (Path(line["source"]).stem, line["key"])
    assert sum(Path(line["file"]).stem == Path(line["source"]).stem for line in lines) > len(lines) // 2
    assert decode_here([undisturbed], tmp_path / "out")["skipped"] == 4


def test_decoding_goes_on(undisturbed, tmp_path):
    right, out = tmp_path / "right", tmp_path / "out"
    arguments = ("decode", undisturbed, "--codec", "ffv1", "--readers", 2, "--out")
    assert run(*arguments, right).returncode == 0
    for count in (0, 1, 2):
        assert killed_after(out, count, signal.SIGKILL, *arguments, out)[0] == -signal.SIGKILL
    done = run(*arguments, out)
    assert done.returncode == 0, done.stderr
    assert result(out) == result(right) and not list(out.rglob("*.partial"))
    next((out / "latents-000001").glob("*.mkv")).unlink()
    assert "3 inputs were complete before" in run(*arguments, out).stdout
    assert result(out) == result(right)


def test_broken_shards_are_recorded(undisturbed, tmp_path):
    shards = tmp_path / "shards"
    shards.mkdir()
    for shard in undisturbed.glob("*.tar"):
        shutil.copy(shard, shards)
    data = (shards / "latents-000001.tar").read_bytes()
    (shards / "latents-000001.tar").write_bytes(data[: len(data) // 2])
    with ShardWriter(shards / "latents-000009.tar") as writer:
        writer.add("a", {"other": np.zeros(3, np.float32)}, {})
        writer.add("b", {"mean": np.zeros((16, 2, 1, 1), np.float32)}, {"frames": 90})
        writer.add("c", {"mean": np.zeros((3, 2, 1, 1), np.float32)}, {})
        writer.add("d", {"mean": np.zeros((16, 2, 1, 1), np.float32)}, {})
        writer.commit()
    decode_here([shards], tmp_path / "out")
    lines = [line for line in manifest_of(tmp_path / "out") if "error" in line]
    broken = {line.get("key", Path(line["shard"]).name): line["error"] for line in lines}
    assert set(broken) == {"000000006", "latents-000001.tar", "a", "b", "c"}
    assert "samples are lost" in broken["latents-000001.tar"] and "inside of 000000006" in broken["000000006"]
    assert "no tensor mean" in broken["a"] and "90" in broken["b"]
    assert (tmp_path / "out" / "latents-000009" / "d.mkv").is_file()
    with pytest.raises(BatchError, match="the same folder"):
        decode_here([shards, undisturbed], tmp_path / "both")
    with pytest.raises(BatchError, match="no shards"):
        decode_here([tmp_path], tmp_path / "none")


GOOD = np.zeros((16, 2, 1, 1), np.float32)
DEEP = b"[" * 100_000 + b"]" * 100_000


def raw_shard(path, members):
    """A tar of any bytes."""
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))


def sample(key, about=None, tensors=None):
    """The members of a sample; bytes stand for themselves."""
    about = about if isinstance(about, bytes) else json.dumps(about or {}).encode()
    tensors = tensors if isinstance(tensors, bytes) else b"".join(safetensors(tensors or {"mean": GOOD}))
    return [(f"{key}.json", about), (f"{key}.safetensors", tensors)]


def header(text):
    return len(text).to_bytes(8, "little") + text


BAD_RATES = ["1/0", "abc", "1e400", "1e999999999", -24, "-1", 0, "", {}, [], True, 1e400, 2**70]
BAD_SAMPLES = {
    "deep-json": (sample("deep-json", DEEP), "nested too deep"),
    "deep-value": (sample("deep-value", b'{"x":' + b"[" * 400 + b"]" * 400 + b"}"), "more than 32 levels"),
    "deep-header": (sample("deep-header", {}, header(DEEP)), "nested too deep"),
    "no-json": (sample("no-json", b"{"), "its JSON cannot be read"),
    "list": (sample("list", [1, 2]), "its JSON is a list"),
    "text": (sample("text", b'"24"'), "its JSON is a str"),
    "header": (sample("header", {}, header(b"{}}")), "no safetensors"),
    "header-list": (sample("header-list", {}, header(b"[]")), "no safetensors"),
    "header-size": (sample("header-size", {}, b"\xff" * 64), "no safetensors"),
    "header-shape": (
        sample("header-shape", {}, header(b'{"mean":{"dtype":"F32","shape":[1e99],"data_offsets":[0,4]}}') + bytes(4)),
        "no safetensors",
    ),
    "alone": (sample("alone")[:1], "no .safetensors"),
    "frames": (sample("frames", {"frames": "many"}), "'frames': 'many'"),
    "frames-true": (sample("frames-true", {"frames": True}), "'frames': True"),
    "times": (sample("times", {"frames": 3, "times": [0, 1], "time_base": "1/24"}), "times must be 3 integers"),
    "times-fall": (sample("times-fall", {"frames": 3, "times": [0, 2, 1], "time_base": "1/24"}), "times must rise"),
    "times-huge": (sample("times-huge", {"frames": 2, "times": [0, 2**80], "time_base": "1/24"}), "within 2^62"),
    "times-base": (sample("times-base", {"frames": 2, "times": [0, 1], "time_base": "0/0"}), "is not a rate"),
    "times-unit": (sample("times-unit", {"frames": 2, "times": [0, 1]}), "time_base is None"),
    "": (sample(""), "its key"),
    "k" * 300: (sample("k" * 300), "its key"),
    "up/../../key": (sample("up/../../key"), "its key"),
    "a\nb": (sample("a\nb"), "its key"),
    **{
        f"rate-{number}": (sample(f"rate-{number}", {"rate": rate}), "is not a rate")
        for number, rate in enumerate(BAD_RATES)
    },
}


def test_bad_samples_are_broken_and_the_rest_is_decoded(tmp_path):
    """Each in the manifest with its reason; none ends the run, hangs it, or takes others with it."""
    shards, out = tmp_path / "shards", tmp_path / "out"
    shards.mkdir()
    members = sample("first")
    for bad, _ in BAD_SAMPLES.values():
        members += bad
    raw_shard(shards / "bad.tar", [*members, *sample("last", {"rate": "30000/1001", "error": "mine", "file": "../x"})])
    done = run("decode", shards, "--out", out)
    assert done.returncode == 0, done.stderr
    lines = {line["key"]: line for line in manifest_of(out)}
    assert len(lines) == len(BAD_SAMPLES) + 2
    for key, (_, word) in BAD_SAMPLES.items():
        assert word in lines[key]["error"] and "file" not in lines[key], key
    assert [lines[key].get("file") for key in ("first", "last")] == ["bad/first.mp4", "bad/last.mp4"]
    assert not [key for key in ("first", "last") if "error" in lines[key]]
    assert sorted(path.name for path in out.glob("bad/*")) == ["first.mp4", "last.mp4"]
    again = run("decode", shards, "--out", out)
    assert again.returncode == 0 and "1 inputs were complete before" in again.stdout, again


def test_a_key_that_comes_twice(tmp_path):
    shards = tmp_path / "shards"
    shards.mkdir()
    raw_shard(shards / "twice.tar", [*sample("a"), *sample("a", {"frames": 1}), *sample("b")])
    figures = decode_here([shards], tmp_path / "out")
    assert (figures["clips"], figures["broken"]) == (2, 1)
    first, second, third = manifest_of(tmp_path / "out")
    assert (first["file"], third["file"]) == ("twice/a.mkv", "twice/b.mkv")
    assert second["key"] == "a" and "before it has the key 'a'" in second["error"]
    assert len(frames_of(tmp_path / "out" / "twice" / "a.mkv")) == 5


def test_a_damaged_tar_header_costs_its_sample_alone(tmp_path):
    shards = tmp_path / "shards"
    shards.mkdir()
    raw_shard(shards / "s.tar", [*sample("a"), *sample("b"), *sample("c"), *sample("d" * 120)])
    data = bytearray((shards / "s.tar").read_bytes())
    place = data.index(b"b.safetensors")
    data[place : place + 200] = b"\xaa" * 200
    (shards / "s.tar").write_bytes(data)
    decode_here([shards], tmp_path / "out")
    lines = manifest_of(tmp_path / "out")
    assert [line.get("file") for line in lines] == ["s/a.mkv", None, None, "s/c.mkv", f"s/{'d' * 120}.mkv"]
    assert lines[1]["key"] == "b" and "key" not in lines[2]
    assert f"bytes {place} to " in lines[2]["error"] and "are damaged" in lines[2]["error"]


def test_a_tar_that_is_none(tmp_path):
    shards = tmp_path / "shards"
    shards.mkdir()
    (shards / "nonsense.tar").write_bytes(b"nonsense" * 1000)
    (shards / "empty.tar").write_bytes(b"")
    raw_shard(shards / "whole.tar", sample("a"))
    with tarfile.open(shards / "whole.tar") as tar:
        last = tar.getmembers()[-1]
    end = last.offset_data + -(-last.size // 512) * 512
    (shards / "unended.tar").write_bytes((shards / "whole.tar").read_bytes()[:end])
    decode_here([shards], tmp_path / "out")
    errors = {Path(line["shard"]).name: line["error"] for line in manifest_of(tmp_path / "out") if "error" in line}
    assert set(errors) == {"nonsense.tar", "empty.tar", "unended.tar"}


def test_a_reader_that_dies_ends_the_run(undisturbed, tmp_path, monkeypatch):
    def dying(path):
        yield from itertools.islice(read_shard(path), 1)
        raise ZeroDivisionError("of the test")

    monkeypatch.setattr("video_vae.batch.decode.read_shard", dying)
    with pytest.raises(BatchError, match="reading it failed: ZeroDivisionError: of the test"):
        decode_here([undisturbed], tmp_path / "out")


def test_a_video_that_cannot_be_written_is_broken(tmp_path):
    """x264 has no frames of one row beside 2^15 columns."""
    shards = tmp_path / "shards"
    shards.mkdir()
    wide = np.zeros((16, 2, 1, 2100), np.float32)
    raw_shard(shards / "s.tar", [*sample("wide", {}, {"mean": wide}), *sample("a")])
    done = run("decode", shards, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    first, second = manifest_of(tmp_path / "out")
    assert "cannot be written as libx264" in first["error"] and second["file"] == "s/a.mp4"


# ---- Disturbances ----


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_is_stopped_goes_on(clips, undisturbed, tmp_path, how):
    out = tmp_path / "out"
    arguments = ("encode", clips, "--out", out, "--shard-items", SHARD, "--readers", 1, *RAW)
    for count in (0, 1, 2):
        code, text = killed_after(out, count, how, *arguments)
        assert code == (-signal.SIGKILL if how == signal.SIGKILL else 130), text
        assert how == signal.SIGKILL or "interrupted" in text
        for shard in out.glob("*.tar"):
            assert shard.read_bytes() == (undisturbed / shard.name).read_bytes()
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    assert result(out) == result(undisturbed)


def test_readers_that_die_are_replaced(clips, undisturbed, tmp_path):
    settings = Settings(str(SMALL))
    killed = []

    class Engine(LocalEngine):
        def run(self, *arguments):
            for record in super().run(*arguments):
                if record is not None and len(killed) < 3:
                    killed.append(self._workers[0].reader_processes()[0])
                    with contextlib.suppress(ProcessLookupError):  # one that is being replaced
                        os.kill(killed[-1], signal.SIGKILL)
                yield record

    make = encode_worker(settings)
    job = encode_job([str(clips)], settings, SHARD)
    run_job(job, tmp_path / "out", lambda: Engine(make, ["cpu"], Resources(2)), quiet=True)
    assert len(set(killed)) >= 2
    assert result(tmp_path / "out") == result(undisturbed)


def test_a_device_that_is_lost(clips, undisturbed, tmp_path, capsys):
    """The other one does its shards. Two devices are two workers on the CPU here."""
    settings, lost = Settings(str(SMALL)), []

    class Losing(Worker):
        def _run_device(self):
            if not lost:
                lost.append(self)
                # As a GPU that falls off the bus with its first clip.
                while not self._next_clips(None):
                    pass
                raise DeviceError("cuda:0 is gone")
            super()._run_device()

    def engine():
        return LocalEngine(functools.partial(Losing, settings), ["cpu", "cpu"], Resources(1))

    run_job(encode_job([str(clips)], settings, SHARD), tmp_path / "out", engine, quiet=True)
    assert lost and "cuda:0 is gone" in capsys.readouterr().err
    assert result(tmp_path / "out") == result(undisturbed)
    lost.clear()

    def alone():
        return LocalEngine(functools.partial(Losing, settings), ["cpu"], Resources(1))

    with pytest.raises(DeviceError, match="is gone"):
        run_job(encode_job([str(clips)], settings, SHARD), tmp_path / "none", alone, quiet=True)


def test_an_input_that_kills_its_readers_is_given_up(tmp_path):
    write_video(tmp_path / "slow.mp4", pattern(1, 300, 240, 320))
    events = []
    ahead = ReadAhead(1, FrameRule(), 1 << 30, events.append, lambda *broken: events.append(broken), events.append)
    try:
        ahead.read(5, str(tmp_path / "slow.mp4"))
        until, pids = time.monotonic() + 240, []
        while not events and time.monotonic() < until:
            pid = ahead.processes()[0]
            # It has the order as soon as its control is connected; starting takes longer than this.
            if pid not in pids:
                pids.append(pid)
                time.sleep(0.05)
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)
    finally:
        ahead.close()
    assert len(pids) >= ATTEMPTS
    assert events == [(5, f"the process that reads it died {ATTEMPTS} times: signal SIGKILL")]


def test_a_reader_that_dies_within_a_long_clip(tmp_path):
    """The pieces come again from the first."""
    frames = pattern(4, 61, 24, 32)
    write_lossless(tmp_path / "long.mkv", frames)
    clips = queue.SimpleQueue()
    ahead = ReadAhead(1, FrameRule(), 4 * frames[0].nbytes, clips.put, lambda *broken: None, clips.put)
    try:
        ahead.read(0, str(tmp_path / "long.mkv"))
        clip = clips.get(timeout=240)
        first = clip.pieces.get(timeout=240)
        assert np.array_equal(first.frames, frames[:4]) and not first.last
        os.kill(ahead.processes()[0], signal.SIGKILL)
        while not isinstance(clip.pieces.get(timeout=240), Restart):
            pass
        found, last = [], False
        while not last:
            piece = clip.pieces.get(timeout=240)
            found.append(piece.frames.copy())
            last = piece.last
            piece.release()
        assert np.array_equal(np.concatenate(found), frames)
    finally:
        ahead.close()


def test_a_clip_that_begins_anew(vae):
    frames = pattern(4, 21, 24, 32)
    encoder = Encoder(Settings(str(SMALL)), "cpu")
    released = []

    def piece(first, end):
        return Piece(frames[first:end], end == 21, lambda: released.append(end))

    clip = Clip(0, (8, 24, 32, 3), False, {})
    for one in (piece(0, 8), piece(8, 16), Restart(), piece(0, 8), piece(8, 16), piece(16, 21)):
        clip.pieces.put(one)
    tensors, about = encoder.encode(clip, Item(0, "clip", 0))
    assert about["frames"] == 21 and np.array_equal(tensors["mean"], vae.encode(frames, dtype="float16")[0])
    for one in (piece(0, 8), Broken("no more")):
        clip.pieces.put(one)
    with pytest.raises(BrokenInput, match="no more"):
        encoder.encode(clip, Item(0, "clip", 0))
    encoder.close()
    assert released == [8, 16, 8, 16, 21, 8]


def test_a_folder_of_another_run_is_refused(clips, undisturbed, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(undisturbed, out)
    before = result(out)
    for settings, word in [
        (Settings(str(SMALL), dtype="float32"), "settings.dtype: float16 there, float32 here"),
        (Settings(str(SMALL), FrameRule(max_frames=5)), "max_frames"),
        (Settings(str(SMALL), parameters={"scaling_factor": "0.9"}), "scaling_factor"),
        (Settings(str(SMALL), parameters={"instruction_set": "portable"}), "fingerprint.architecture"),
        (Settings(str(SMALL.with_name("medium.safetensors"))), "fingerprint.checkpoint"),
    ]:
        with pytest.raises(BatchError, match=word):
            encode_here([clips], out, settings)
    with pytest.raises(BatchError, match="shard_items: 4 there, 5 here"):
        encode_here([clips], out, shard_items=5)
    with pytest.raises(BatchError, match="1 gone .such as .*clip-03"):
        encode_here([path for path in clips.iterdir() if path.name != "clip-03.mp4"], out)
    assert result(out) == before
    # Time and memory are no part of a run.
    encode_here([clips], out, Settings(str(SMALL), parameters={"threads": "1", "memory_limit": "1GiB"}))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("...")
    with pytest.raises(BatchError, match="no output of this command"):
        encode_here([clips], tmp_path / "mine")
    with RunFolder(out), pytest.raises(BatchError, match=f"another process .*{os.getpid()}"):
        encode_here([clips], out)


def test_what_killed_workers_left_is_removed(clips, undisturbed, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(undisturbed, out)

    class Leaving(LocalEngine):
        def run(self, *arguments):
            yield from super().run(*arguments)
            (out / ".latents-000000.tar.0123456789abcdef.partial").write_bytes(b"half")
            (out / "records" / ".000000.begun").write_bytes(b".")

    settings = Settings(str(SMALL))
    job, make = encode_job([str(clips)], settings, SHARD), encode_worker(settings)
    (out / "latents-000000.tar").unlink()
    run_job(job, out, lambda: Leaving(make, ["cpu"], Resources(1)), quiet=True)
    assert result(out) == result(undisturbed)


def test_a_lost_shard_is_made_again(clips, undisturbed, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(undisturbed, out)
    (out / "latents-000001.tar").unlink()
    with (out / "latents-000002.tar").open("r+b") as file:
        file.truncate(1000)
    figures = encode_here([clips], out)
    assert figures["skipped"] == 8 and result(out) == result(undisturbed)


def test_broken_inputs_can_be_tried_again(clips, undisturbed, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(undisturbed, out)
    assert encode_here([clips], out)["skipped"] == 16
    figures = encode_here([clips], out, retry_broken=True)
    broken = {line["source"] for line in manifest_of(out) if "error" in line}
    assert figures["broken"] == len(broken) == 3 and figures["skipped"] < 16
    assert result(out) == result(undisturbed)


def test_an_input_that_does_not_fit_is_recorded(tmp_path):
    (tmp_path / "clips").mkdir()
    write_image(tmp_path / "clips" / "large.png", pattern(1, 1, 512, 512)[0])
    write_image(tmp_path / "clips" / "small.png", pattern(1, 1, 16, 16)[0])
    with VideoVae(SMALL, "cpu") as vae:
        limit = vae.plan_encode((5, 64, 96, 3)).device_bytes
    encode_here([tmp_path / "clips"], tmp_path / "out", Settings(str(SMALL), parameters={"memory_limit": str(limit)}))
    large, small = manifest_of(tmp_path / "out")
    assert "memory" in large["error"] and small["file"] == "latents-000000.tar"


def test_a_full_disk(clips, tmp_path):
    """A file system of 1 MiB, in a mount namespace of its own."""
    words = " ".join(command("encode", clips, "--out", f"{tmp_path}/disk/out", "--dtype", "float32"))
    filling = f"head -c 1000000 /dev/zero > {tmp_path}/disk/filler"
    script = f"mkdir {tmp_path}/disk && mount -t tmpfs -o size=1m none {tmp_path}/disk && {filling} && echo mounted"
    script += f" && {words}; echo status $?; find {tmp_path}/disk -name '*.tar' -o -name '*.partial'"
    script += f"; rm {tmp_path}/disk/filler; {words} > /dev/null; echo status $?; ls {tmp_path}/disk/out"
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if "mounted" not in done.stdout:
        pytest.skip(f"no mount namespaces here: {done.stderr.strip()}")
    lines = done.stdout.splitlines()
    assert lines[:3] == ["mounted", "status 1", "status 0"], done
    assert "the disk is full" in done.stderr and "latents-000000.tar" in lines


def test_a_disk_that_is_full_when_videos_are_written(tmp_path):
    """It ends the run. It is no fault of the sample, and no half of a video is left."""
    shards, disk = tmp_path / "shards", tmp_path / "disk"
    shards.mkdir()
    disk.mkdir()
    noise = np.random.default_rng(1).standard_normal((16, 5, 8, 8)).astype("f4") * 3
    raw_shard(shards / "s.tar", [member for key in "abcdefgh" for member in sample(key, {}, {"mean": noise})])
    words = " ".join(command("decode", shards, "--out", disk / "out", "--codec", "ffv1", "--readers", 1))
    script = f"mount -t tmpfs -o size=1m none {disk} && echo mounted && {words}; echo status $?"
    arguments = ["unshare", "-rm", "sh", "-c", f"{script}; cp -r {disk}/out {tmp_path}"]
    done = subprocess.run(arguments, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False)
    if "mounted" not in done.stdout:
        pytest.skip(f"no mount namespaces here: {done.stderr.strip()}")
    assert "status 1" in done.stdout and "the disk is full" in done.stderr, done
    videos = list((tmp_path / "out" / "s").iterdir())
    assert 0 < len(videos) < 8 and all(len(frames_of(path)) == 17 for path in videos), videos
    assert not list((tmp_path / "out").glob("records/0*"))


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    with pytest.raises(KeyError), AtomicFile(tmp_path / "file") as file:
        file.write(b"half")
        raise KeyError
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(BatchError, match="No such file"):
        AtomicFile(tmp_path / "no" / "file")


def plant(how, place, target):
    """What somebody may put in the place of a file of a run."""
    place.parent.mkdir(parents=True, exist_ok=True)
    if how == "symlink":
        place.symlink_to(target)
    elif how == "hardlink":
        os.link(target, place)
    else:
        os.mkfifo(place)


@pytest.mark.parametrize("how", ["symlink", "hardlink", "fifo"])
def test_planted_links_are_not_followed(how, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    plant(how, tmp_path / "out" / ".lock", precious)
    with pytest.raises(BatchError, match=r"\.lock is a link or no regular file; remove it"):
        RunFolder(tmp_path / "out")
    plant(how, tmp_path / "run" / "records" / ".000007.begun", precious)
    with pytest.raises(BatchError, match=r"\.000007\.begun is a link or no regular file"):
        begin_count(tmp_path / "run", Shard(7, ()))
    assert precious.read_text() == "mine"
    assert [begin_count(tmp_path / "run", Shard(8, ())) for _ in range(3)] == [1, 2, 3]


def test_planted_folders_are_not_followed(undisturbed, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "records").symlink_to(elsewhere)
    with pytest.raises(BatchError, match="records is a link"):
        RunFolder(tmp_path / "out")
    out = tmp_path / "videos"
    decode_here([undisturbed], out)
    shutil.rmtree(out / "latents-000000")
    (out / "latents-000000").symlink_to(elsewhere)
    with pytest.raises(BatchError, match="latents-000000 is a link"):
        decode_here([undisturbed], out)
    assert list(elsewhere.iterdir()) == []


def test_pipes_in_place_of_files_are_not_waited_for(clips, tmp_path):
    out = tmp_path / "out"
    plant("fifo", out / "run.json", None)
    with pytest.raises(BatchError, match=r"run\.json: .*not a regular file"):
        encode_here([clips], out)
    os.mkfifo(tmp_path / "latent.safetensors")
    done = run("decode-clip", tmp_path / "latent.safetensors", "--out", tmp_path / "out.mp4")
    assert done.returncode == 1 and "not a regular file" in done.stderr


def test_wrong_arguments(clips, tmp_path):
    out = tmp_path / "out"
    for arguments, word in [
        (["--buckets", "8by8"], "WIDTHxHEIGHT"),
        (["--shard-items", "0"], "at least 1"),
        (["--rate", "fast"], "is not a rate"),
        (["--rate", "1e999999999"], "is not a rate"),
        (["--set", "colour"], "KEY=VALUE"),
        (["--set", "colour=red"], "no parameter 'colour'"),
        (["--set", "seed=red"], "seed"),
    ]:
        done = run("encode", clips, "--out", out, *arguments)
        assert done.returncode in (1, 2) and word in done.stderr, done.stderr
        assert "Traceback" not in done.stderr
    done = run("encode", clips, "--out", out, weights=tmp_path / "none.safetensors")
    assert done.returncode == 1 and "none.safetensors" in done.stderr
    assert not list(tmp_path.glob("out/*.tar"))


def test_what_is_missing_is_named(tmp_path):
    """As where only NumPy is installed."""
    (tmp_path / "av.py").write_text("raise ImportError('none')")
    paths = f"{tmp_path}{os.pathsep}{SOURCES}"
    done = subprocess.run(
        [*command("encode", "x", "--out", tmp_path / "out")],
        env={**ENVIRONMENT, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and "pip install 'video-vae[batch]'" in done.stderr
