"""Latents as the diffusion model reads them, of the authors' goldens, for models whose sizes and scalings differ."""

import pytest
from conftest import GOLDEN, np, read_safetensors, relative_error

from video_vae import ArgumentError, VideoVae

FAMILIES = GOLDEN / "families"


def opened(family, **parameters):
    return VideoVae(FAMILIES / f"{family}.safetensors", "cpu", **parameters)


def five(array):
    """Of one frame, where the golden has no axis for frames."""
    return array if array.ndim == 5 else array[:, :, None]


# Of each: the golden, and which of the models that its tensors fit.
CASES = {"flux": "flux-a", "flux2": "flux2-a", "sdxl": "sdxl-batch2", "wan21": "wan21-clip9", "wan22": "wan22-clip9"}
CASES["qwen21"] = "qwen21-a"
FORMATS = {"flux": {"latent_format": "flux"}, "sdxl": {"latent_format": "sdxl"}}


@pytest.mark.parametrize("family", CASES)
def test_latents_of_the_diffusion_model(family):
    golden = {key: five(array) for key, array in read_safetensors(FAMILIES / f"{CASES[family]}.safetensors").items()}
    with opened(family, latents="model", **FORMATS.get(family, {})) as vae:
        mean, logvar = vae.encode(golden["encode_video"], logvar=True)
        assert vae.model.latent_shape(golden["encode_video"].shape) == mean.shape
        assert relative_error(mean, golden["encode_model_latent"]) < 1e-5
        # Packed as the mean is, and never scaled.
        right = golden["encode_logvar"]
        assert np.isclose(np.square(logvar).sum(), np.square(right).sum(), rtol=1e-4) and logvar.shape == mean.shape
        # There and back, whole and in a stream.
        video = vae.decode(mean)
        with vae.configured(latents="raw"):
            assert relative_error(vae.encode(golden["encode_video"]), golden["encode_mean"]) < 1e-5
            assert relative_error(video, vae.decode(golden["encode_mean"])) < 1e-4
        assert vae.latents == "model"
        pieces = list(vae.stream_decode(mean[:, :, at : at + 1] for at in range(mean.shape[2])))
        assert np.array_equal(np.concatenate(pieces, 2), video)


def test_the_order_of_the_settings_of_latents_does_not_matter():
    with opened("flux") as vae:
        with pytest.raises(ArgumentError, match="latent_format"):
            vae.latents = "model"
        with vae.configured(latents="model", latent_format="flux"):
            assert (vae.latents, vae.latent_format) == ("model", "flux")
        assert (vae.latents, vae.latent_format) == ("raw", "auto")
        vae.scaling_factor = 2.0
        with vae.configured(latents="model", scaling_factor=1.0, latent_format="sd3"):
            pass
        assert vae.scaling_factor == 2.0


@pytest.mark.parametrize("family", CASES)
def test_the_numbers_of_the_latents_of_the_diffusion_model(family):
    golden = {key: five(array) for key, array in read_safetensors(FAMILIES / f"{CASES[family]}.safetensors").items()}
    with opened(family, **FORMATS.get(family, {})) as vae:
        model, latents = vae.model, vae.model.latents
        assert latents.format == family and family in model.latent_formats
        # Pixels of a square become channels.
        mean, side = golden["encode_mean"].astype(np.float64), latents.packing
        b, c, t, h, w = mean.shape
        mean = mean.reshape(b, c, t, h // side, side, w // side, side).transpose(0, 1, 4, 6, 2, 3, 5)
        mean = mean.reshape(b, latents.channels, t, h // side, w // side)
        statistics = (np.reshape(values, (-1, 1, 1, 1)) for values in (latents.means, latents.deviations))
        means, deviations = statistics
        scaled = (mean - means) / deviations if latents.means else (mean - latents.shift) * latents.scale
        assert relative_error(scaled, golden["encode_model_latent"]) < 1e-5


def test_latents_that_may_be_of_two_models():
    with opened("sdxl") as vae:
        assert (vae.model.family, vae.model.latent_formats, vae.model.latents) == ("kl2d", ("sd", "sdxl"), None)
        vae.latent_format = "sd"
        assert (vae.model.latents.format, vae.model.latents.scale) == ("sd", 0.18215)
