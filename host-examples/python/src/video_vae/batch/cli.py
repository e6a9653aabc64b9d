"""`python -m video_vae.batch`."""

from __future__ import annotations

import argparse
import sys
from fractions import Fraction
from pathlib import Path

from .. import VideoVaeError
from .buckets import Size, parse_buckets
from .errors import BatchError

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
    return parser


def _add_encode(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_encode, prog=parser.prog)
    add = parser.add_argument
    add("sources", nargs="+", metavar="SOURCE", help="a file, a folder, or @LIST with a path in each line")
    add("--shard-items", type=_positive, default=64, metavar="N", help="inputs of one shard (64)")
    add("--buckets", type=_buckets, default=(), metavar="WxH,...", help="resize and crop to the nearest of these")
    add("--max-frames", type=_positive, metavar="N", help="take the first N frames only")
    add("--rate", type=_rate, metavar="FPS", help="drop or repeat frames to this rate, such as 24 or 30000/1001")
    add("--dtype", choices=["float16", "float32"], default="float16", help="of the stored latents (float16)")
    add("--no-logvar", action="store_true", help="store the mean without the log-variance")
    add("--sample", action="store_true", help="store a sample of each distribution; --set seed=N")
    add("--retry-broken", action="store_true", help="encode shards with broken inputs anew")
    _add_common(parser)


def _add_common(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", required=True, type=Path, metavar="DIR", help="the folder to write; a run that was stopped goes on")
    add("--weights", required=True, help="the checkpoint")
    add("--set", action="append", default=[], type=_setting, metavar="KEY=VALUE", help="a parameter, repeatable")
    add("--engine", choices=["local", "ray"], default="local", help="this process, or a Ray cluster (local)")
    add("--device", default="all", help="all, cpu, or a list such as cuda:0,cuda:1 (all)")
    add("--readers", type=_positive, metavar="N", help="processes that read inputs, for each device")
    add("--workers", type=_positive, metavar="N", help="with ray: workers (one for each GPU of the cluster)")
    add(
        "--ray-address",
        metavar="ADDRESS",
        help="with ray: the cluster (RAY_ADDRESS, or a new one here)",
    )
    add("--quiet", action="store_true", help="no progress")


def _encode(options: argparse.Namespace) -> int:
    from .encode import Engine, encode
    from .frames import FrameRule
    from .progress import words
    from .settings import Resources, Settings

    parameters = dict(options.set)
    if options.sample:
        parameters["posterior"] = "sample"
    settings = Settings(
        weights=str(Path(options.weights).absolute()),
        rule=FrameRule(options.buckets, options.max_frames, options.rate),
        dtype=options.dtype,
        logvar=not options.no_logvar and parameters.get("posterior") != "sample",
        parameters=parameters,
    )
    resources = Resources(options.readers) if options.readers else None

    def engine() -> Engine:
        if options.engine == "ray":
            from .engine_ray import RayEngine

            return RayEngine(
                settings,
                options.device,
                resources or Resources(1 if options.device == "cpu" else 4),
                address=options.ray_address,
                workers=options.workers,
                retry=options.retry_broken,
            )
        from .engine_local import LocalEngine, chosen_devices

        return LocalEngine(settings, chosen_devices(options.device), resources)

    figures = encode(
        options.sources,
        options.out,
        settings,
        engine,
        shard_items=options.shard_items,
        retry_broken=options.retry_broken,
        quiet=options.quiet,
    )
    print(words(figures, figures["skipped"]))
    return 0


def _need_modules(options: argparse.Namespace) -> None:
    """Says what to install, before any work."""
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
        rate = Fraction(text)
    except (ValueError, ZeroDivisionError):
        rate = Fraction(0)
    if rate <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate such as 24 or 30000/1001")
    return str(rate)


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
