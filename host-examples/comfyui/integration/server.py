"""ComfyUI's server as users start it."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from conftest import FOLDER

COMFYUI = Path(os.environ["COMFYUI"]).resolve()


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def request(method, url, body=None):
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, method=method), timeout=120) as answer:
        return json.loads(answer.read())


def until(check, seconds=600):
    """What `check` answers, when it does."""
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            if found := check():
                return found
        assert time.monotonic() < end, "nothing answered in time"
        time.sleep(0.5)


@contextlib.contextmanager
def running(*words, **options):
    process = subprocess.Popen(words, **options)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def with_nodes(base):
    """A folder of a user's own, with our nodes."""
    (base / "custom_nodes").mkdir()
    (base / "custom_nodes" / FOLDER.name).symlink_to(FOLDER)
    return base


def main(base, *words):
    return [sys.executable, "main.py", "--cpu", "--disable-auto-launch", "--base-directory", str(base), *words]
