"""Cache files of a trainer, from shards."""

import pytest
from conftest import np

pytest.importorskip("av")

from video_vae.batch.cli import main  # noqa: E402
from video_vae.batch.errors import BatchError  # noqa: E402
from video_vae.batch.export import export  # noqa: E402
from video_vae.batch.shards import ShardWriter, parse_safetensors  # noqa: E402


def shard(folder, *samples):
    """A shard of samples: what the JSON says, and the latent."""
    folder.mkdir(exist_ok=True)
    with ShardWriter(folder / "latents-000000.tar") as writer:
        for number, (about, latent) in enumerate(samples):
            writer.add(f"{number:09d}", {"mean": latent}, about)
        writer.commit()
    return str(folder)


def clip(source, frames=9, dtype=np.float16, **about):
    latent = np.random.default_rng(frames).normal(size=(16, 1 + (frames - 1) // 4, 4, 6)).astype(dtype)
    return {"source": source, "frames": frames, "height": 32, "width": 48, "latents": "model", **about}, latent


def test_names_keys_and_metadata_are_those_that_the_trainer_reads(tmp_path):
    about, latent = clip("/videos/a_b.c.mp4")
    assert export([shard(tmp_path / "in", (about, latent))], "musubi-wan", tmp_path / "out") == 1
    (file,) = (tmp_path / "out").iterdir()
    assert file.name == "a_b.c_00000-009_0048x0032_wan.safetensors"
    # As the trainer takes a name apart.
    tokens = file.name.split("_")
    assert ("_".join(tokens[:-3]), tokens[-3].split("-")[:2]) == ("a_b.c", ["00000", "009"])
    assert [int(number) for number in tokens[-2].split("x")] == [48, 32]
    tensors, metadata = parse_safetensors(file.read_bytes())
    assert list(tensors) == ["latents_3x4x6_float16"] and np.array_equal(tensors["latents_3x4x6_float16"], latent)
    sizes = {"width": "48", "height": "32", "frame_count": "9"}
    assert metadata == {"architecture": "wan", "format_version": "1.0.1", **sizes}


def test_images_have_no_frames_in_their_names(tmp_path):
    folder = shard(tmp_path / "in", clip("a.png", 1, np.float32), clip("b.png", 1, np.float32))
    assert main(["export", folder, "--layout", "musubi-qwen-image", "--out", str(tmp_path / "out")]) == 0
    names = sorted(file.name for file in (tmp_path / "out").iterdir())
    assert names == ["a_0048x0032_qi.safetensors", "b_0048x0032_qi.safetensors"]
    tensors, metadata = parse_safetensors((tmp_path / "out" / names[0]).read_bytes())
    assert list(tensors) == ["latents_1x4x6_float32"] and "frame_count" not in metadata
    assert metadata["architecture"] == "qwen_image"


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([clip("a.mp4", latents="raw")], "latents=model"),
        ([clip("a.mp4", 8)], "4n \\+ 1"),
        ([clip("a.mp4", height=30)], "--buckets"),
        ([clip("x/a.mp4"), clip("y/a.mov")], "rename"),
        ([clip("a.mp4"), clip("b.png", 1)], "a folder of each"),
        ([clip(7)], "source is 7"),
        ([(clip("a.mp4")[0], np.zeros((48, 3, 4, 6), np.float16))], "16 channels"),
    ],
)
def test_what_the_trainer_would_not_take_is_refused(tmp_path, samples, words):
    with pytest.raises(BatchError, match=words):
        export([shard(tmp_path / "in", *samples)], "musubi-wan", tmp_path / "out")


def test_a_failing_export_changes_nothing(tmp_path):
    out = tmp_path / "out"
    export([shard(tmp_path / "before", clip("a.mp4"))], "musubi-wan", out)
    kept = {file.name: file.read_bytes() for file in out.iterdir()}
    about, latent = clip("a.mp4")
    folder = shard(tmp_path / "in", (about, latent + 1), clip("b.mp4"), clip("c.mp4", 8))
    with pytest.raises(BatchError, match="000000002.*4n"):
        export([folder], "musubi-wan", out)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == kept
    # Without what cannot be cached it replaces the earlier file.
    assert export([shard(tmp_path / "in", (about, latent + 1), clip("b.mp4"))], "musubi-wan", out) == 2
    (name,) = kept
    assert len(list(out.iterdir())) == 2 and (out / name).read_bytes() != kept[name]


def test_a_missing_shard_is_named(tmp_path):
    with pytest.raises(BatchError, match="no shard"):
        export([str(tmp_path / "absent")], "musubi-wan", tmp_path / "out")
