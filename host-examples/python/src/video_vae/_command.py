"""`vvae`: starts the command that the wheel brought."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def main() -> int:
    name = "vvae.exe" if sys.platform == "win32" else "vvae"
    command = Path(__file__).resolve().parent / name
    if not command.is_file():
        remedy = "Install a wheel, or run: cargo run --release --example vvae"
        print(f"vvae: {command} is not there. {remedy}", file=sys.stderr)
        return 1
    words = [str(command), *sys.argv[1:]]
    if sys.platform == "win32":
        return subprocess.call(words)
    os.execv(words[0], words)
    raise AssertionError("exec returns by an exception only")
