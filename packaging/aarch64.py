"""Runs the demo's checkpoint in every precision of the CPU. For aarch64.sh, inside the emulated Python."""

import platform

import numpy
import video_vae

assert platform.machine() == "aarch64", platform.machine()
video = numpy.linspace(-1, 1, 3 * 5 * 64 * 64, dtype="f4").reshape(1, 3, 5, 64, 64)
backs = {}
for precision, instructions in (("fp32", "Neon"), ("bf16", "NeonBf16")):
    with video_vae.VideoVae("demo", "cpu", precision=precision) as vae:
        plan = str(vae.plan_encode(video.shape))
        assert f"CPU with {instructions} in {precision}" in plan, plan
        backs[precision] = vae.decode(vae.encode(video))
error = abs(backs["fp32"] - video).mean()
apart = abs(backs["bf16"] - backs["fp32"]).mean()
print(f"video-vae {video_vae.__version__}: mean error {error:.4f}, bf16 apart by {apart:.4f}")
# The gradient is easy for the demo's model; a wrong kernel is far off.
assert backs["fp32"].shape == video.shape and error < 0.05 and 0 < apart < 0.02
