"""`python -m video_vae.batch`."""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .. import VideoVaeError
from .._models import resolve
from .buckets import Size, parse_buckets
from .errors import BatchError
from .timing import parse_rate

if TYPE_CHECKING:
    from .decode import DecodeSettings
    from .run import Engine, Job, WorkerMaker
    from .settings import Settings

# As a shell reports a process that SIGINT ended.
_INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        _need_modules(options)
        return options.run(options)
    except (BatchError, VideoVaeError) as error:
        print(f"{options.prog}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{options.prog}: interrupted; the same command goes on from here", file=sys.stderr)
        return _INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m video_vae.batch", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_encode(commands.add_parser("encode", help="videos and images to shards of latents"))
    _add_decode(commands.add_parser("decode", help="shards of latents to videos and images"))
    _add_export(commands.add_parser("export", help="shards of latents to the cache files that a trainer reads"))
    _add_encode_clip(commands.add_parser("encode-clip", help="one long video to one latent file, in parts"))
    _add_decode_clip(commands.add_parser("decode-clip", help="one latent file to one video, in parts"))
    return parser


def _add_encode(parser: argparse.ArgumentParser) -> None:
    # Training sets have what the diffusion model reads.
    parser.set_defaults(run=_encode, prog=parser.prog, latents="model")
    add = parser.add_argument
    add("sources", nargs="+", metavar="SOURCE", help="a file, a folder, or @LIST with a path in each line")
    add("--shard-items", type=_positive, default=64, metavar="N", help="inputs of one shard (64)")
    add("--buckets", type=_buckets, default=(), metavar="WxH,...", help="resize and crop to the nearest of these")
    add("--max-frames", type=_positive, metavar="N", help="take the first N frames only")
    add("--rate", type=_rate, metavar="FPS", help="drop or repeat frames to this rate, such as 24 or 30000/1001")
    _add_latents(parser)
    _add_common(parser)


def _add_latents(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--dtype", choices=["float16", "float32"], default="float16", help="of the stored latents (float16)")
    add("--no-logvar", action="store_true", help="with latents=raw: the mean without the log-variance")
    add("--sample", action="store_true", help="store a sample of each distribution; --set seed=N")
    add("--keep-damaged", action="store_true", help="take what is left of damaged inputs, with a warning")


def _add_decode(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_decode, prog=parser.prog)
    add = parser.add_argument
    add("sources", nargs="+", metavar="SHARD", help="a shard, or a folder of them")
    _add_codec(parser)
    _add_common(parser)


def _add_codec(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--codec", choices=["h264", "ffv1"], default="h264", help="of the videos; ffv1 loses nothing (h264)")
    add("--crf", type=int, default=18, metavar="N", help="quality of h264, 0 to 51, smaller is better (18)")


def _add_export(parser: argparse.ArgumentParser) -> None:
    from .export import LAYOUTS

    parser.set_defaults(run=_export, prog=parser.prog, engine="local")
    add = parser.add_argument
    add("sources", nargs="+", metavar="SHARD", help="a shard, or a folder of them")
    add("--layout", required=True, choices=sorted(LAYOUTS), help="the trainer and its model")
    add("--out", required=True, type=Path, help="the folder to write; files of the same names are replaced")


def _add_encode_clip(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_encode_clip, prog=parser.prog, latents="raw", buckets=(), max_frames=None, rate=None)
    parser.add_argument("source", metavar="VIDEO", help="a video file")
    parser.add_argument("--part-frames", type=_positive, default=256, metavar="N", help="latent frames of a part (256)")
    _add_latents(parser)
    _add_common(parser, "the .safetensors file to write; a run that was stopped goes on")


def _add_decode_clip(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_decode_clip, prog=parser.prog)
    parser.add_argument("source", metavar="LATENT", help="a .safetensors file with a tensor mean or latent")
    parser.add_argument("--part-frames", type=_positive, default=256, metavar="N", help="video frames of a part (256)")
    _add_codec(parser)
    _add_common(parser, "the video to write, .mp4 for h264 and .mkv for ffv1; a run that was stopped goes on")


def _add_common(
    parser: argparse.ArgumentParser, out: str = "the folder to write; a run that was stopped goes on"
) -> None:
    add = parser.add_argument
    add("--out", required=True, type=Path, help=out)
    add("--weights", required=True, help="the checkpoint: a file, a name of `vvae get`, or demo")
    add("--retry-broken", action="store_true", help="make shards with broken inputs anew")
    add("--set", action="append", default=[], type=_setting, metavar="KEY=VALUE", help="a parameter, repeatable")
    add("--engine", choices=["local", "ray"], default="local", help="this process, or a Ray cluster (local)")
    add("--device", default="all", help="all, cpu, or a list such as cuda:0,cuda:1 (all)")
    add(
        "--readers",
        type=_positive,
        metavar="N",
        help="processes that read inputs, or threads that write videos, for each device",
    )
    add("--workers", type=_positive, metavar="N", help="with ray: workers (one for each GPU of the cluster)")
    add(
        "--ray-address",
        metavar="ADDRESS",
        help="with ray: the cluster (RAY_ADDRESS, or a new one here)",
    )
    add("--quiet", action="store_true", help="no progress")


def _encode(options: argparse.Namespace) -> int:
    from .encode import encode_job, encode_worker

    settings = _settings(options)
    return _run(options, encode_job(options.sources, settings, options.shard_items), encode_worker(settings))


def _export(options: argparse.Namespace) -> int:
    from .export import export

    print(f"{export(options.sources, options.layout, options.out)} files in {options.out}")
    return 0


def _encode_clip(options: argparse.Namespace) -> int:
    from .clips import encode_clip_job, join_latents, parts_folder, remove_parts
    from .encode import encode_worker

    settings = _settings(options)
    job, folder = encode_clip_job(options.source, settings, options.part_frames), parts_folder(options.out)
    status = _run(options, job, encode_worker(settings), folder, "part")
    join_latents(job, folder, options.out)
    remove_parts(folder)
    return status


def _decode_clip(options: argparse.Namespace) -> int:
    from .clips import decode_clip_job, decode_clip_worker, join_videos, parts_folder, remove_parts
    from .videos import CODECS

    if options.out.suffix != CODECS[options.codec][2]:
        raise BatchError(f"--out {options.out}: a video in {options.codec} ends with {CODECS[options.codec][2]}")
    settings = _decode_settings(options)
    job, folder = decode_clip_job(options.source, settings, options.part_frames), parts_folder(options.out)
    status = _run(options, job, decode_clip_worker(settings, options.part_frames), folder, "part")
    join_videos(job, folder, options.out)
    remove_parts(folder)
    return status


def _settings(options: argparse.Namespace) -> Settings:
    from .frames import FrameRule
    from .settings import Settings

    parameters = {"latents": options.latents, **dict(options.set)}
    if options.sample:
        parameters["posterior"] = "sample"
    return Settings(
        weights=_weights(options),
        rule=FrameRule(options.buckets, options.max_frames, options.rate, options.keep_damaged),
        dtype=options.dtype,
        logvar=not options.no_logvar and _has_logvar(parameters),
        parameters=parameters,
    )


def _has_logvar(parameters: dict[str, str]) -> bool:
    """Log-variances belong to the mean as the network gives it."""
    return parameters.get("posterior") != "sample" and parameters.get("latents") != "model"


def _weights(options: argparse.Namespace) -> str:
    return str(Path(resolve(options.weights)).absolute())


def _decode(options: argparse.Namespace) -> int:
    from .decode import decode_job, decode_worker

    settings = _decode_settings(options)
    return _run(options, decode_job(options.sources, settings), decode_worker(settings))


def _decode_settings(options: argparse.Namespace) -> DecodeSettings:
    from .decode import DecodeSettings

    return DecodeSettings(_weights(options), options.codec, options.crf, dict(options.set))


def _run(
    options: argparse.Namespace, job: Job, make: WorkerMaker, folder: Path | None = None, unit: str = "clip"
) -> int:
    """`unit`: what the job's items are."""
    from .progress import words
    from .run import run

    retry, quiet = options.retry_broken, options.quiet
    engine = functools.partial(_engine, options, make)
    figures = run(job, folder or options.out, engine, retry_broken=retry, quiet=quiet, unit=unit)
    print(words(figures, figures["skipped"], unit))
    return 0


def _engine(options: argparse.Namespace, make: WorkerMaker) -> Engine:
    from .settings import Resources

    resources = Resources(options.readers) if options.readers else None
    if options.engine == "local":
        from .engine_local import LocalEngine, chosen_devices

        return LocalEngine(make, chosen_devices(options.device), resources)
    from .engine_ray import RayEngine

    return RayEngine(
        make,
        options.device,
        resources or Resources(1 if options.device == "cpu" else 4),
        address=options.ray_address,
        workers=options.workers,
        retry=options.retry_broken,
    )


def _need_modules(options: argparse.Namespace) -> None:
    """Says what is missing, before any work."""
    if sys.platform == "win32":
        raise BatchError("this needs Linux or macOS")
    wanted = {"av": "batch", "numpy": "batch"}
    if options.engine == "ray":
        wanted["ray"] = "ray"
    for module, extra in wanted.items():
        try:
            __import__(module)
        except ImportError as error:
            raise BatchError(f"{module} is missing: pip install 'video-vae[{extra}]'") from error


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _rate(text: str) -> str:
    try:
        return str(parse_rate(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _setting(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key, value


def _buckets(text: str) -> tuple[Size, ...]:
    try:
        return parse_buckets(text)
    except BatchError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
