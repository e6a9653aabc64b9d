"""What the tests share. They test the checkout, with the library of $VIDEO_VAE_LIBRARY or of target/release."""

import json
import signal
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
SOURCES = Path(__file__).resolve().parents[1] / "src"
sys.path.insert(0, str(SOURCES))

np = pytest.importorskip("numpy")

from video_vae import VideoVae  # noqa: E402

# A shell that runs tests in the background has them ignore Ctrl-C, which some of them press.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

GOLDEN = REPOSITORY / "tests" / "golden"
SMALL = GOLDEN / "small.safetensors"


def read_safetensors(path: Path) -> dict:
    """The f32 arrays of a file."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    return {
        name: np.frombuffer(data[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]], "<f4").reshape(
            entry["shape"]
        )
        for name, entry in header.items()
    }


def golden(name: str) -> dict:
    return read_safetensors(GOLDEN / f"{name}.safetensors")


def relative_error(found, right) -> float:
    """Root mean square of the difference, relative to that of what is right."""
    found, right = np.asarray(found, "f8"), np.asarray(right, "f8")
    assert found.shape == right.shape
    return float(np.sqrt(np.square(found - right).sum() / np.square(right).sum()))


def random_video(*shape: int, seed: int = 1):
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype("f4")


def random_latent(*shape: int, seed: int = 2):
    return np.random.default_rng(seed).standard_normal(shape).astype("f4")


@pytest.fixture
def vae():
    with VideoVae(SMALL, "cpu") as opened:
        yield opened
