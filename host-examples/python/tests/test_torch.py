"""PyTorch in, PyTorch out."""

import numpy as np
import pytest
from conftest import GOLDEN, golden, random_video, relative_error

from video_vae import VideoVae
from video_vae._tensors import VIDEO_LAYOUTS, View

torch = pytest.importorskip("torch")


def test_goldens():
    right = {name: torch.from_numpy(values.copy()) for name, values in golden("small-clip5").items()}
    with VideoVae(GOLDEN / "small.safetensors", "cpu") as vae:
        latent = vae.encode(right["encode_video"])
        assert isinstance(latent, torch.Tensor) and relative_error(latent, right["encode_mean"]) <= 1e-5
        video = vae.decode(right["decode_latent"].requires_grad_())
        assert isinstance(video, torch.Tensor) and relative_error(video, right["decode_video"]) <= 1e-5
        pieces = right["decode_latent"].detach().split(1, dim=2)
        assert torch.equal(torch.cat(list(vae.stream_decode(pieces)), dim=2), video)


def test_no_copy_and_any_strides(vae):
    video = torch.from_numpy(random_video(5, 16, 24, 3))
    for tensor in (video, video[1:, ::2, 4:], video.permute(0, 2, 1, 3)):
        found = View.of(tensor, "video", None, VIDEO_LAYOUTS)
        assert found.struct.data == tensor.data_ptr()
        assert torch.equal(vae.encode(tensor), torch.from_numpy(vae.encode(tensor.numpy())))
    out = torch.empty(5, 16, 24, 3)
    latent = vae.encode(video)
    assert vae.decode(latent, out=out) is out
    assert torch.equal(out, vae.decode(latent, layout="THWC"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_types(vae, dtype):
    video = torch.from_numpy(random_video(1, 3, 1, 16, 16)).to(dtype)
    latent = vae.encode(video)
    assert latent.dtype == dtype and vae.decode(latent).dtype == dtype
    assert vae.decode(latent, dtype=torch.uint8).dtype == torch.uint8
    assert vae.encode(video, dtype="float32").dtype == torch.float32
    exact = vae.encode(video.float())
    assert relative_error(latent.float(), exact) < 1e-2


def test_mixed_kinds(vae):
    video = torch.from_numpy(random_video(1, 3, 1, 16, 16))
    out = np.empty((1, 16, 1, 2, 2), "f4")
    assert vae.encode(video, out=out) is out
    assert np.array_equal(out, vae.encode(video).numpy())
