#!/usr/bin/env python3
"""Two builds of the library in turns on one machine: the same bits, and seconds of the first and of later calls.

    python tests/bench_libraries.py --old before/libvideo_vae.so --new target/release/libvideo_vae.so \\
        --vvae target/release/examples/vvae --device cuda:0 --bits seedvr2:17x720x1280:2.6GiB \\
        flux:1x1024x1024 qwen-image:1x1328x1328 seedvr2:81x1080x1920:6GiB

A case is MODEL:FRAMESxHEIGHTxWIDTH, and a memory limit if it has one. Weights are random, of the real size, as
`vvae bench --random` makes them. Cases without a limit take tensors on the GPU, the others in host memory. Each round
runs every case with the old library and then with the new one; no round is begun after `--seconds`.
"""
import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def case(text):
    model, shape, *limit = text.split(":")
    frames, height, width = (int(part) for part in shape.split("x"))
    return {"model": model, "shape": shape, "sizes": (frames, height, width), "limit": limit[:1], "name": text}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", required=True, type=Path)
    parser.add_argument("--new", required=True, type=Path)
    parser.add_argument("--vvae", required=True, type=Path, help="the command, for both libraries")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--precision", default="fp16")
    parser.add_argument("--repeat", type=int, default=9, help="later calls of a case in a round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--bits", type=case, action="append", default=[], help="compare the bits of this case")
    parser.add_argument("cases", type=case, nargs="*")
    args = parser.parse_args()
    args.vvae = args.vvae.resolve()
    return args


class Runner:
    def __init__(self, args, folder):
        self.args, self.folder = args, folder

    def run(self, library, *words):
        environment = os.environ | {"VIDEO_VAE_LIBRARY": str(library.resolve())}
        command = [self.args.vvae, *map(str, words), "--device", self.args.device]
        done = subprocess.run(
            [*command, "--set", f"precision={self.args.precision}"], env=environment, capture_output=True, text=True
        )
        if done.returncode:
            sys.exit(f"{' '.join(map(str, words))} with {library}: {done.stderr}")

    def bench(self, library, of, operations="decode,encode", repeat=None):
        """The results of each operation."""
        out = self.folder / "bench.json"
        out.unlink(missing_ok=True)
        limit = ["--limit", *of["limit"]] if of["limit"] else []
        place = [] if limit or self.args.device == "cpu" else ["--device-tensors"]
        self.run(
            library, "bench", "--random", of["model"], "--shapes", of["shape"], "--ops", operations,
            "--repeat", repeat or self.args.repeat, "--json", out, *limit, *place,
        )
        return json.loads(out.read_text())["results"]

    def bits(self, library, of):
        """A checksum of the latents and the video that random pixels give."""
        frames, height, width = of["sizes"]
        self.bench(library, of | {"shape": "1x64x64", "limit": []}, "decode", 1)  # makes the weights
        weights = Path(tempfile.gettempdir()) / f"vvae-random-{of['model']}-f16.safetensors"
        clip, latents, video = (self.folder / name for name in ("in.raw", "l.safetensors", "v.safetensors"))
        clip.write_bytes(random.Random(1).randbytes(frames * height * width * 3))
        latents.unlink(missing_ok=True)
        video.unlink(missing_ok=True)
        limit = ["--limit", *of["limit"]] if of["limit"] else []
        self.run(library, "encode", clip, latents, "--size", f"{width}x{height}", "--weights", weights, *limit)
        self.run(library, "decode", latents, video, "--weights", weights, *limit)
        return hashlib.sha256(latents.read_bytes() + video.read_bytes()).hexdigest()[:16]


def main():
    args, began = arguments(), time.monotonic()
    libraries = {"old": args.old, "new": args.new}
    times = {}
    with tempfile.TemporaryDirectory() as folder:
        runner, differ = Runner(args, Path(folder)), []
        for of in args.bits:
            found = {name: runner.bits(library, of) for name, library in libraries.items()}
            print("bits", of["name"], found, flush=True)
            differ += [of["name"]] if found["old"] != found["new"] else []
        for _ in range(args.rounds):
            if time.monotonic() - began > args.seconds:
                break
            for of in args.cases:
                for name, library in libraries.items():
                    for result in runner.bench(library, of):
                        times.setdefault((of["name"], result["op"], name), []).append(result)
    for (name, operation, library), results in times.items():
        later = " ".join(f"{result['seconds']:.5f}" for result in results)
        first = " ".join(f"{result['first_seconds']:.3f}" for result in results)
        estimated = results[0]["estimated_seconds"] / results[0]["seconds"]
        print(f"{name} {operation} {library}: {later}; first {first}; estimate {estimated:.0%}")
    if differ:
        sys.exit(f"other bits: {', '.join(differ)}")


if __name__ == "__main__":
    main()
