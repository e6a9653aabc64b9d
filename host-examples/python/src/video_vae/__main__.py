"""`python -m video_vae`: what there is. `python -m video_vae roundtrip IN.npy OUT.npy --weights FILE`."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from . import VideoVae, VideoVaeError, devices, nodes, version
from .discovery import Parameter

if TYPE_CHECKING:
    import numpy


# As a shell reports a process that SIGPIPE ended.
_UNHEARD = 141


def show() -> None:
    print(f"video-vae {version()}\n\ndevices")
    for device in devices():
        free, total = device.memory_free / 2**30, device.memory_total / 2**30
        gpu = ", compute capability {}.{}, {}".format(*device.compute_capability, device.uuid) if device.uuid else ""
        print(f"  {device.id:8} {device.name}{gpu}, {free:.1f} of {total:.1f} GiB free")
    for node in nodes():
        print(f"\n{node.id}: {node.label}. {node.help}")
        for port in node.ports:
            optional = ", optional" if port.optional else ""
            print(f"  {port.direction:6} {port.name} ({port.kind}{optional}): {', '.join(port.dtypes)}")
        for parameter in node.parameters:
            default = parameter.format(parameter.default)
            print(f"  {parameter.key} = {default} ({_takes(parameter)})\n    {parameter.help}")


def _takes(parameter: Parameter) -> str:
    if parameter.choices:
        return " | ".join(parameter.choices)
    unit = f" {parameter.unit}" if parameter.unit else ""
    span = f" {parameter.minimum:g} to {parameter.maximum:g}" if parameter.minimum is not None else ""
    return parameter.kind + span + unit


def roundtrip(options: argparse.Namespace) -> None:
    import numpy

    video = numpy.load(options.video, mmap_mode="r")
    settings = dict(setting.split("=", 1) for setting in options.set)
    with VideoVae(options.weights, options.device, **settings) as vae:
        print(vae.plan_encode(video.shape))
        latent = vae.encode(video, progress=True)
        print(vae.plan_decode(latent.shape))
        out = numpy.empty(video.shape, video.dtype)
        _save(options.out, vae.decode(latent, out=out, progress=True))


def _save(name: str, array: numpy.ndarray) -> None:
    """Writes a new file beside the named one and renames it. A regular file alone is replaced, no pipe or device."""
    import numpy

    path = Path(name if name.endswith(".npy") else name + ".npy").resolve()
    if path.exists() and not path.is_file():
        raise OSError(f"{path} exists and is not a regular file")
    temporary = path.with_name(f"vvae-{secrets.token_hex(8)}.partial")
    try:
        with temporary.open("xb") as file:
            numpy.save(file, array)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m video_vae", description="Devices, nodes and parameters.")
    commands = parser.add_subparsers(dest="command")
    command = commands.add_parser("roundtrip", help="encode and decode an array of NumPy's")
    command.add_argument("video", help="a .npy file: [T, H, W, 3] or [B, 3, T, H, W]")
    command.add_argument("out", help="the .npy file to write")
    command.add_argument("--weights", required=True, help="the checkpoint: a file, a name of `vvae get`, or demo")
    command.add_argument("--device", default="auto")
    command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a parameter, repeatable")
    options = parser.parse_args()
    try:
        roundtrip(options) if options.command else show()
        sys.stdout.flush()
    except VideoVaeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # Who reads may leave early, as `head` does. Nothing is left to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _UNHEARD
    return 0


if __name__ == "__main__":
    sys.exit(main())
