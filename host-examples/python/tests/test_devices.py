"""Several devices in one handle."""

import numpy as np
import pytest
from conftest import SMALL, random_latent

from video_vae import ArgumentError, DeviceError, VideoVae


def test_several_devices_give_the_bits_of_one(vae):
    latent = random_latent(1, 16, 33, 2, 2)
    expected = vae.decode(latent)
    (one,) = vae.device_shares()
    assert (one.id, one.used, one.frames, one.first_frame) == ("cpu", True, 129, 0)
    with VideoVae(SMALL, device="cpu,cpu") as several:
        plan = several.plan_decode(latent.shape)
        assert "2 devices, efficiency" in str(plan)
        assert np.array_equal(several.decode(latent), expected)
        shares = several.device_shares()
        assert [share.id for share in shares] == ["cpu", "cpu"]
        assert sum(share.frames for share in shares) == 129
        assert shares[1].first_frame == shares[0].frames
        assert sum(share.peak for share in shares) == several.memory_info().peak
        frames = np.concatenate(list(several.stream_decode(latent)), axis=2)
        assert np.array_equal(frames, expected)
        with pytest.raises(ArgumentError, match="3 values"):
            several.configure(memory_limit="1GiB,1GiB,1GiB")


def test_bad_lists_are_refused():
    for devices in ["cpu,", "auto,cpu", "cpu;cpu"]:
        with pytest.raises(DeviceError, match="device"):
            VideoVae(SMALL, device=devices)
