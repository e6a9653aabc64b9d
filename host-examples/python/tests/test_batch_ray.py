"""Encoding on Ray clusters that lose workers and nodes: the files are those of an undisturbed local run."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import REPOSITORY, SMALL, np

pytest.importorskip("av")
ray = pytest.importorskip("ray")
pytest.importorskip("ray.data")

from batch_clips import ENVIRONMENT, RAW, collection, command, frames_of, pattern, result, run, write_video  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

from video_vae.batch.clips import (  # noqa: E402
    decode_clip_job,
    decode_clip_worker,
    encode_clip_job,
    join_latents,
    join_videos,
    parts_folder,
)
from video_vae.batch.decode import DecodeSettings  # noqa: E402
from video_vae.batch.encode import encode_job, encode_worker  # noqa: E402
from video_vae.batch.engine_local import LocalEngine  # noqa: E402
from video_vae.batch.engine_ray import RayEngine  # noqa: E402
from video_vae.batch.errors import BatchError  # noqa: E402
from video_vae.batch.run import run as run_job  # noqa: E402
from video_vae.batch.settings import Resources, Settings  # noqa: E402
from video_vae.batch.shards import parse_safetensors  # noqa: E402

SHARD = 3
SETTINGS = Settings(str(SMALL), parameters={"threads": "1"})
MAKE = encode_worker(SETTINGS)
# A lost node is noticed sooner than after half a minute; a busy machine is no lost node.
IMPATIENT = {"health_check_period_ms": 1000, "health_check_timeout_ms": 4000, "health_check_failure_threshold": 4}


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    return collection(tmp_path_factory.mktemp("clips"), 32)


@pytest.fixture(scope="module")
def undisturbed(clips, tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    encode_with(lambda: LocalEngine(MAKE, ["cpu"], Resources(1)), clips, out)
    return out


@pytest.fixture
def cluster(monkeypatch):
    """A head without room for workers, and two raylets with room for one each."""
    for key, value in ENVIRONMENT.items():
        monkeypatch.setenv(key, value)
    small = {"object_store_memory": 80 << 20}
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "_system_config": IMPATIENT, **small})
    made.nodes_for_workers = [made.add_node(num_cpus=1, **small) for _ in range(2)]
    ray.init(address=made.address, log_to_driver=False, logging_level="error")
    yield made
    ray.shutdown()
    made.shutdown()


def encode_with(engine, clips, out):
    return run_job(encode_job([str(clips)], SETTINGS, SHARD), out, engine, quiet=True)


class Disturbed(RayEngine):
    """Does something after some records."""

    def __init__(self, after, disturb):
        super().__init__(MAKE, "cpu", Resources(1))
        self._after, self._disturb = after, disturb

    def run(self, *arguments):
        for count, record in enumerate(super().run(*arguments), 1):
            yield record
            if count == self._after:
                self._disturb(self)


def test_two_raylets(cluster, clips, undisturbed, tmp_path):
    engines = []

    def engine():
        engines.append(RayEngine(MAKE, "cpu", Resources(1)))
        return engines[-1]

    figures = encode_with(engine, clips, tmp_path / "out")
    assert figures["workers"] == 2 and len(engines[0].processes()) == 2
    assert (figures["clips"], figures["broken"]) == (33, 3)
    assert result(tmp_path / "out") == result(undisturbed)
    assert encode_with(engine, clips, tmp_path / "out")["skipped"] == 36


def test_a_worker_that_is_killed(cluster, clips, undisturbed, tmp_path):
    killed = []

    def kill(engine):
        killed.append(int(engine.processes()[0].split()[1]))
        os.kill(killed[0], signal.SIGKILL)

    encode_with(lambda: Disturbed(2, kill), clips, tmp_path / "out")
    assert killed and result(tmp_path / "out") == result(undisturbed)


def test_a_node_that_is_removed(cluster, clips, undisturbed, tmp_path):
    removed = []

    def remove(engine):
        removed.append(cluster.nodes_for_workers[1])
        cluster.remove_node(removed[0], allow_graceful=False)

    encode_with(lambda: Disturbed(2, remove), clips, tmp_path / "out")
    assert removed and result(tmp_path / "out") == result(undisturbed)


def test_a_worker_with_other_bits_ends_the_run(cluster, clips, tmp_path):
    """As one on a processor without the others' instructions, or with another library."""

    class Other(RayEngine):
        def _fingerprint(self):
            return {**super()._fingerprint(), "architecture": "cpu portable", "library": "0.1.0"}

    with pytest.raises(BatchError, match="other bits .*: library 0.1.0 and .*; architecture cpu portable"):
        encode_with(lambda: Other(MAKE, "cpu", Resources(1)), clips, tmp_path / "out")
    assert not list(tmp_path.glob("out/*.tar"))


def test_workers_that_do_not_see_the_folder(cluster, clips, tmp_path):
    class Elsewhere(RayEngine):
        def run(self, shards, folder, run):
            return super().run(shards, tmp_path / "elsewhere", run)

    with pytest.raises(BatchError, match="run.json is not there on .*; all workers need the same shared folder"):
        encode_with(lambda: Elsewhere(MAKE, "cpu", Resources(1)), clips, tmp_path / "out")


def test_a_long_clip(cluster, tmp_path, vae):
    write_video(tmp_path / "film.mp4", pattern(8, 90, 24, 40), options={"g": "30"})
    job, out = encode_clip_job(str(tmp_path / "film.mp4"), SETTINGS, 6), tmp_path / "film.safetensors"
    figures = run_job(job, parts_folder(out), lambda: RayEngine(MAKE, "cpu", Resources(1)), quiet=True)
    assert figures["clips"] == 4 and figures["workers"] == 2
    join_latents(job, parts_folder(out), out)
    mean, logvar = vae.encode(frames_of(tmp_path / "film.mp4"), logvar=True, dtype="float16")
    found, _ = parse_safetensors(out.read_bytes())
    assert np.array_equal(found["mean"], mean[0]) and np.array_equal(found["logvar"], logvar[0])
    settings = DecodeSettings(str(SMALL), "ffv1", parameters={"threads": "1"})
    job, video = decode_clip_job(str(out), settings, 25), tmp_path / "back.mkv"
    make = decode_clip_worker(settings, 25)
    run_job(job, parts_folder(video), lambda: RayEngine(make, "cpu", Resources(1)), quiet=True)
    join_videos(job, parts_folder(video), video)
    assert np.array_equal(frames_of(video), vae.decode(mean, size=(90, 24, 40), layout="THWC", dtype="uint8"))


def test_wishes_that_the_cluster_cannot_meet(cluster, clips, tmp_path):
    for device, readers, word in [("cuda", 1, "no GPU"), ("cuda:3", 1, "Ray chooses"), ("cpu", 50, "no node")]:
        with pytest.raises(BatchError, match=word):
            RayEngine(MAKE, device, Resources(readers))
    with pytest.raises(BatchError, match="no worker could start: .*missing.safetensors"):
        RayEngine(encode_worker(Settings(str(tmp_path / "missing.safetensors"))), "cpu", Resources(1))


def descendants(process):
    """The process, its children, their children: Ray's daemons, workers and readers."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            parents.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    found, left = [], [process]
    while left:
        found.append(left.pop())
        left += parents.get(found[-1], [])
    return found


def documented(tmp_path, clips):
    """The lines of docs/scale.md that start a cluster and use it, for folders and a port of the test."""
    text = (REPOSITORY / "docs" / "scale.md").read_text(encoding="utf-8")
    block = [line.strip() for line in text.partition("## A Ray cluster")[2].splitlines() if line.startswith("    ")]
    lines = [line.partition("  #")[0] for line in block[:5]]
    words = {"/shared": str(tmp_path), "HEAD": "127.0.0.1", "6379": str(free_port()), "CLIPS": str(clips)}
    words.update({"LATENTS": str(tmp_path / "out"), "--weights W": f"--weights {SMALL} --device cpu --quiet"})
    for old, new in words.items():
        lines = [line.replace(old, new) for line in lines]
    export, token, head, node, encode = lines
    assert (export[:6], head[:9], encode[:6]) == ("export", "ray start", "python")
    return export, token, head, node, encode


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextlib.contextmanager
def shell(line, home, out):
    """A shell that runs a line which does not end; with its descendants it is killed."""
    environment = {**ENVIRONMENT, "HOME": str(home), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment.pop("RAY_AUTH_MODE", None)
    with out.open("w") as file:
        process = subprocess.Popen(["bash", "-c", line], env=environment, stdout=file, stderr=file)
    try:
        yield process
    finally:
        for one in descendants(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        process.wait()


def until_started(out):
    end = time.monotonic() + 120
    while "Ray runtime started" not in out.read_text():
        assert time.monotonic() < end, out.read_text()
        time.sleep(0.1)


def test_a_cluster_as_documented(clips, undisturbed, tmp_path):
    """From the command line, where an earlier cluster left a token: Ray then asks for one."""
    export, token, head, node, encode = documented(tmp_path, clips)
    home, logs = tmp_path / "home", [tmp_path / name for name in ("head.log", "node.log", "encode.log")]
    (home / ".ray").mkdir(parents=True)
    (home / ".ray" / "auth_token").write_text("0123456789abcdef" * 4)
    small = "--num-cpus=1 --object-store-memory=80000000 --include-dashboard=false --disable-usage-stats --block"
    with shell(f"{export}; {token}; {head} {small}", home, logs[0]):
        until_started(logs[0])
        with shell(f"{export}; {node} {small.replace('--include-dashboard=false', '')}", home, logs[1]):
            until_started(logs[1])
            more = f"--shard-items {SHARD} --set threads=1"
            with shell(f"{export}; {encode} {more}", home, logs[2]) as process:
                assert process.wait(timeout=240) == 0, logs[2].read_text()
            with shell(f"{encode} {more}", home, logs[2]) as process:
                assert process.wait(timeout=240) == 1
    assert "RAY_AUTH_MODE is not set" in logs[2].read_text() and "docs/scale.md" in logs[2].read_text()
    assert (tmp_path / "ray-token").stat().st_mode & 0o077 == 0
    assert result(tmp_path / "out") == result(undisturbed)


def test_figures_of_a_worker_rise():
    """Two shards of an actor are under way at a time, and the rows come in any order."""
    engine = RayEngine.__new__(RayEngine)
    engine._figures = {}
    for clips, seconds in ((2, 1.0), (5, 2.5), (4, 2.0)):
        engine._note("host 1", {"clips": clips, "device_seconds": seconds})
    assert engine.figures() == [{"clips": 5, "device_seconds": 2.5}]


def test_everything_is_killed(clips, undisturbed, tmp_path):
    """A cluster that the command starts, killed with the command; then once more, then to the end."""
    out = tmp_path / "out"
    arguments = ("encode", clips, "--out", out, "--shard-items", SHARD, "--engine", "ray", "--set", "threads=1", *RAW)
    for count in (1, 4):
        process = subprocess.Popen(command(*arguments), env=ENVIRONMENT)
        until = time.monotonic() + 120
        while len(list(out.glob("records/0*.json"))) < count and time.monotonic() < until:
            assert process.poll() is None
            time.sleep(0.01)
        for one in descendants(process.pid):
            try:
                os.kill(one, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.wait()
        assert count <= len(list(out.glob("records/0*.json"))) < 12
        for shard in out.glob("*.tar"):
            assert shard.read_bytes() == (undisturbed / shard.name).read_bytes()
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    assert "33 clips" not in done.stdout and "complete before" in done.stdout
    assert result(out) == result(undisturbed)
