"""JAX in, JAX out."""

import numpy as np
import pytest
from conftest import random_video

from video_vae import TensorError

jax = pytest.importorskip("jax")


def test_results_are_jax_arrays(vae):
    video = random_video(1, 3, 5, 16, 16)
    latent = vae.encode(jax.numpy.asarray(video))
    assert isinstance(latent, jax.Array)
    assert np.array_equal(np.asarray(latent), vae.encode(video))
    assert isinstance(vae.decode(latent), jax.Array)
    with pytest.raises(TensorError, match="read-only"):
        vae.encode(video, out=latent)
