"""What is told about the last run."""

import pytest
from conftest import random_latent

from video_vae import Cancelled, StateError


def test_the_last_run_that_finished_is_told(vae):
    with pytest.raises(StateError, match="no run"):
        vae.last_run()
    latent = random_latent(1, 16, 2, 3, 4)
    vae.decode(latent)
    report, plan = vae.last_run(), vae.plan_decode(latent.shape)
    assert (report.node, report.exact, report.tiles) == ("decode", True, (1, 1))
    assert (report.device_bytes, report.host_bytes) == (plan.device_bytes, plan.host_bytes)
    assert (report.slice_frames, report.estimated_seconds) == (plan.slice_frames, plan.seconds)
    assert report.seconds > 0 and str(report) == str(plan)
    with pytest.raises(Cancelled):
        vae.decode(random_latent(1, 16, 1, 2, 2), progress=lambda *_: True)
    assert vae.last_run() == report, "what was cancelled does not count"


def test_a_stream_and_tiles_are_told(vae):
    with vae.configured(decode_tile_size=64, decode_tile_overlap=16, decode_tiled=True):
        list(vae.stream_decode(random_latent(1, 16, 2, 10, 11)))
    report = vae.last_run()
    assert not report.exact and report.tiles != (1, 1) and "tiled" in report.text
    assert report.estimated_seconds == 0
