"""Training sets: latents as the diffusion model reads them, images in batches, alpha."""

import json
import time

import pytest
from conftest import GOLDEN, np

av = pytest.importorskip("av")

from batch_clips import frames_of, pattern, run, write_image, write_lossless  # noqa: E402

from video_vae import VideoVae  # noqa: E402
from video_vae.batch.encode import encode_job, encode_worker  # noqa: E402
from video_vae.batch.encoder import Encoder  # noqa: E402
from video_vae.batch.engine_local import LocalEngine  # noqa: E402
from video_vae.batch.run import run as run_job  # noqa: E402
from video_vae.batch.settings import Resources, Settings  # noqa: E402
from video_vae.batch.shards import ShardWriter, parse_safetensors, read_shard, safetensors  # noqa: E402
from video_vae.batch.worker import Worker  # noqa: E402

FAMILIES = GOLDEN / "families"
WAN, WAN22, FLUX, FLUX2 = (FAMILIES / f"{name}.safetensors" for name in ("wan21", "wan22", "flux", "flux2"))


def samples_of(out):
    return {sample.key: sample for shard in sorted(out.glob("*.tar")) for sample in read_shard(shard)}


def manifest_of(out):
    return [json.loads(line) for line in (out / "manifest.jsonl").read_text().splitlines()]


def pictures(folder, shape, count):
    """PNG files of one shape."""
    folder.mkdir()
    found = [np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8) for seed in range(count)]
    for number, pixels in enumerate(found):
        write_image(folder / f"{number}.png", pixels)
    return found


@pytest.mark.parametrize("weights", [WAN, WAN22])
def test_a_training_set_has_what_the_diffusion_model_reads(tmp_path, weights):
    clips, out = tmp_path / "clips", tmp_path / "latents"
    clips.mkdir()
    frames = pattern(4, 9, 32, 48)
    write_lossless(clips / "a.mkv", frames)
    done = run("encode", clips, "--out", out, weights=weights)
    assert done.returncode == 0, done.stderr
    (sample,) = samples_of(out).values()
    with VideoVae(weights, "cpu", latents="model") as vae:
        latent = vae.encode(frames, dtype="float16")[0]
        assert set(sample.tensors) == {"mean"} and np.array_equal(sample.tensors["mean"], latent)
        right = vae.decode(latent[None], layout="THWC", dtype="uint8")
    said = {"latents": "model", "latent_format": "auto", "scaling_factor": 1.0}
    assert said.items() <= sample.about.items() and said.items() <= manifest_of(out)[0].items()
    # What the JSON says is what is decoded.
    done = run("decode", out, "--out", tmp_path / "videos", "--codec", "ffv1", weights=weights)
    assert done.returncode == 0, done.stderr
    assert np.array_equal(frames_of(tmp_path / "videos" / "latents-000000" / "a.mkv"), right)


def test_a_checkpoint_of_several_models_has_to_be_told_which(tmp_path):
    pictures(tmp_path / "images", (24, 40, 3), 1)
    arguments = ("encode", tmp_path / "images", "--out", tmp_path / "out")
    done = run(*arguments, weights=FLUX)
    assert done.returncode == 1 and "latent_format" in done.stderr and "flux" in done.stderr
    assert run(*arguments, "--set", "latent_format=flux", weights=FLUX).returncode == 0
    (sample,) = samples_of(tmp_path / "out").values()
    assert (sample.about["latents"], sample.about["latent_format"]) == ("model", "flux")
    done = run("decode", tmp_path / "out", "--out", tmp_path / "videos", weights=FLUX)
    assert done.returncode == 0 and (tmp_path / "videos" / "latents-000000" / "0.png").is_file(), done.stderr


def test_packed_latents_come_back(tmp_path):
    (pixels,) = pictures(tmp_path / "images", (48, 64, 3), 1)
    assert run("encode", tmp_path / "images", "--out", tmp_path / "out", weights=FLUX2).returncode == 0
    (sample,) = samples_of(tmp_path / "out").values()
    assert sample.tensors["mean"].shape == (128, 1, 3, 4)
    done = run("decode", tmp_path / "out", "--out", tmp_path / "videos", weights=FLUX2)
    assert done.returncode == 0, done.stderr
    with VideoVae(FLUX2, "cpu") as vae:
        right = vae.decode(vae.encode(pixels), layout="HWC", dtype="uint8")
    found = frames_of(tmp_path / "videos" / "latents-000000" / "0.png")[0].astype(int)
    # Latents in float16 change a few values by a step.
    assert np.abs(found - right).max() <= 2


def test_latents_that_the_json_says_wrongly_are_broken(tmp_path):
    shards = tmp_path / "shards"
    shards.mkdir()
    latent = {"mean": np.zeros((16, 1, 2, 2), np.float32)}
    wrong = [{"latents": "cooked"}, {"latents": ["raw"]}, {"latents": "model", "scaling_factor": 2}]
    with ShardWriter(shards / "a.tar") as writer:
        for number, about in enumerate([*wrong, {"latents": "raw"}, {}]):
            writer.add(str(number), latent, about)
        writer.commit()
    done = run("decode", shards, "--out", tmp_path / "out", weights=WAN)
    assert done.returncode == 0, done.stderr
    reasons = [line.get("error", "") for line in manifest_of(tmp_path / "out")]
    assert "latents" in reasons[0] and "list" in reasons[1] and "scaling_factor" in reasons[2]
    assert reasons[3:] == ["", ""]


@pytest.mark.parametrize("weights", [FLUX, WAN, WAN22])
def test_images_of_one_size_are_encoded_together(tmp_path, monkeypatch, weights):
    """With the bits of each alone."""
    images = pictures(tmp_path / "images", (24, 40, 3), 7)
    write_image(tmp_path / "images" / "other.png", pattern(1, 1, 32, 32)[0])
    counts, together = [], Encoder.encode_images

    def counted(self, clips):
        counts.append(len(clips))
        return together(self, clips)

    encoded = Worker._encoded

    def patient(self, clips):
        # Every reader has two slots, so all eight inputs get ready before the first is encoded.
        monkeypatch.setattr(Worker, "_encoded", encoded)
        while len(clips) + len(self._ready) < 8:
            time.sleep(0.01)
        return encoded(self, clips)

    monkeypatch.setattr(Encoder, "encode_images", counted)
    monkeypatch.setattr(Worker, "_encoded", patient)
    settings = Settings(str(weights), dtype="float32")
    job = encode_job([str(tmp_path / "images")], settings, 64)
    run_job(job, tmp_path / "out", lambda: LocalEngine(encode_worker(settings), ["cpu"], Resources(4)), quiet=True)
    assert counts and max(counts) > 1
    samples = list(samples_of(tmp_path / "out").values())
    assert len(samples) == 8
    with VideoVae(weights, "cpu") as vae:
        for pixels, sample in zip(images, samples):
            mean, logvar = vae.encode(pixels, logvar=True)
            assert np.array_equal(sample.tensors["mean"], mean[0])
            assert np.array_equal(sample.tensors["logvar"], logvar[0])


def with_alpha(path):
    """Wan's checkpoint with a fourth channel of pixels."""
    tensors = {}
    for name, array in parse_safetensors(WAN.read_bytes())[0].items():
        if name == "encoder.conv1.weight":
            array = np.concatenate([array, array[:, :1]], 1)
        if name in ("decoder.head.2.weight", "decoder.head.2.bias"):
            array = np.concatenate([array, array[:1]])
        tensors[name] = array
    path.write_bytes(b"".join(bytes(part) for part in safetensors(tensors)))
    return path


def test_alpha(tmp_path):
    weights = with_alpha(tmp_path / "alpha.safetensors")
    (pixels,) = pictures(tmp_path / "images", (32, 48, 4), 1)
    write_image(tmp_path / "images" / "solid.png", pixels[..., :3])
    write_lossless(tmp_path / "images" / "video.mkv", np.stack([pixels[..., :3]] * 5))
    out = tmp_path / "out"
    done = run("encode", tmp_path / "images", "--out", out, weights=weights)
    assert done.returncode == 0, done.stderr
    found = [sample.tensors["mean"] for sample in samples_of(out).values()]
    solid = np.dstack([pixels[..., :3], np.full((32, 48), 255, np.uint8)])
    with VideoVae(weights, "cpu", latents="model") as vae:
        for latent, frames in zip(found, (pixels, solid, np.stack([solid] * 5))):
            assert np.array_equal(latent, vae.encode(frames, dtype="float16")[0])
        shown = vae.decode(found[0][None], layout="HWC", dtype="uint8")
    done = run("decode", out, "--out", tmp_path / "back", "--codec", "ffv1", weights=weights)
    assert done.returncode == 0, done.stderr
    back = tmp_path / "back" / "latents-000000"
    with av.open(str(back / "0.png")) as container:
        assert np.array_equal(next(container.decode(video=0)).to_ndarray(format="rgba"), shown)
    assert (back / "video.mkv").is_file()
