"""Small videos and images for the tests of video_vae.batch, and what a run makes of them."""

import os
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

from conftest import SMALL, SOURCES, np

COMMAND = [sys.executable, "-m", "video_vae.batch"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(SOURCES)}
# With mean and log-variance, as the network gives them.
RAW = ("--set", "latents=raw")


def pattern(seed, frames, height, width):
    """Moving blocks [T, H, W, 3]."""
    shape = (-(-height // 8), -(-width // 8), 3)
    blocks = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    still = blocks.repeat(8, 0).repeat(8, 1)[:height, :width]
    return np.stack([np.roll(still, 3 * frame, 1) for frame in range(frames)])


def write_video(path, frames, rate=24, codec="libx264", options=None):
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate, options=options or {})
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "bgr0" if codec == "ffv1" else "yuv420p"
        for frame in frames:
            for packet in stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)


def write_timed(path, frames, times, options=None, sound=0.0):
    """Frames at these milliseconds, with so many seconds of sound from 0 on."""
    import av

    with av.open(str(path), "w", options=options or {}) as container:
        # A second of keyframes and B frames: as they are stored is not as they are shown.
        stream = container.add_stream("libx264", rate=30, options={"g": "12", "bf": "2"})
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], "yuv420p"
        stream.time_base = stream.codec_context.time_base = Fraction(1, 1000)
        heard = container.add_stream("aac", rate=8000, layout="mono") if sound else None
        if heard is not None:
            silence = av.AudioFrame.from_ndarray(np.zeros((1, int(sound * 8000)), np.float32), "fltp", "mono")
            silence.sample_rate, silence.pts = 8000, 0
            container.mux([*heard.encode(silence), *heard.encode()])
        for frame, time in zip(frames, times):
            picture = av.VideoFrame.from_ndarray(frame, format="rgb24")
            picture.pts, picture.time_base = time, Fraction(1, 1000)
            container.mux(stream.encode(picture))
        container.mux(stream.encode())


def milliseconds(path):
    """When the frames of a video are shown, from the start of the file."""
    import av

    with av.open(str(path)) as container:
        start = (container.start_time or 0) / 1e6
        return [round((frame.time - start) * 1000) for frame in container.decode(video=0)]


def write_lossless(path, frames, rate=24):
    """FFV1 in RGB: what is read is what was written."""
    write_video(path, frames, rate, "ffv1")


def write_image(path, pixels):
    """RGB or RGBA."""
    import av

    colours = "rgba" if pixels.shape[-1] == 4 else "rgb24"
    frame = av.VideoFrame.from_ndarray(pixels, format=colours)
    with av.open(str(path), "w", format="image2", options={"update": "1"}) as container:
        stream = container.add_stream("png", rate=1)
        stream.height, stream.width, stream.pix_fmt = *pixels.shape[:2], colours
        for packet in [*stream.encode(frame), *stream.encode()]:
            container.mux(packet)


def collection(folder, count=12):
    """Clips of three shapes, an image, and three inputs that are broken in different ways."""
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(count):
        height, width = ((32, 48), (24, 24), (30, 34))[index % 3]
        write_video(folder / f"clip-{index:02}.mp4", pattern(index, 5 if index % 2 else 9, height, width))
    write_image(folder / "still.png", pattern(99, 1, 40, 24)[0])
    (folder / "nonsense.mp4").write_bytes(b"nonsense" * 200)
    (folder / "empty.mp4").write_bytes(b"")
    whole = (folder / "clip-00.mp4").read_bytes()
    (folder / "cut.mp4").write_bytes(whole[: len(whole) // 2])
    return folder


def command(*arguments, weights=SMALL):
    """`python -m video_vae.batch` with the small checkpoint on the CPU."""
    return [*COMMAND, *map(str, arguments), "--weights", str(weights), "--device", "cpu", "--quiet"]


def run(*arguments, **options):
    return subprocess.run(
        command(*arguments, **options), env=ENVIRONMENT, capture_output=True, text=True, timeout=240, check=False
    )


def killed_after(out, count, how, *arguments):
    """Runs the command until `count` shards are complete, then ends its process."""
    process = subprocess.Popen(command(*arguments), env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 240
    while process.poll() is None and time.monotonic() < until:
        # Its own lock: then it is at work, and handles signals.
        lock = out / ".lock"
        begun = lock.exists() and lock.read_text().endswith(f" {process.pid}\n")
        if begun and len(list(out.glob("records/0*.json"))) >= count:
            break
        time.sleep(0.005)
    process.send_signal(how)
    return process.wait(timeout=240), process.stderr.read()


def frames_of(path, rule=None):
    from video_vae.batch.frames import FrameReader, FrameRule

    with FrameReader(str(path), rule or FrameRule()) as frames:
        return np.stack([frame.to_ndarray() for frame in frames])


def result(folder):
    """The files of a run that do not depend on when it ran."""
    names = {path.relative_to(folder) for path in Path(folder).rglob("*") if path.is_file()}
    return {str(name): (folder / name).read_bytes() for name in names - {Path("summary.json"), Path(".lock")}}
