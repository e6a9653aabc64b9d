"""Checkpoints by name: `demo`, and those that `vvae get` has downloaded. Nothing is downloaded here."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path

from .errors import CheckpointError

_DEMO = "demo"


def resolve(weights: str | os.PathLike) -> str:
    """The file that a name stands for; a path is its own."""
    word = os.fspath(weights)
    if word == _DEMO:
        return str(_asset("demo.safetensors"))
    model = _table().get(word)
    if model is None:
        # Without a point and a folder it was meant as a name.
        if not set(word) & set("./\\") and not Path(word).exists():
            names = ", ".join((_DEMO, *_table()))
            raise CheckpointError(f'"{word}" is no file here and no model\'s name; names are {names}')
        return word
    found = _cached(model["repository"], model["path"])
    if found is None:
        remedy = f"get it with: vvae get {word} (or write ./{word} for a file)"
        raise CheckpointError(f"{word} is not on this machine; {remedy}")
    return str(found)


@functools.cache
def _table() -> dict[str, dict[str, str]]:
    models = json.loads(_asset("models.json").read_text(encoding="utf-8"))["models"]
    return {model["name"]: model for model in models}


def _asset(name: str) -> Path:
    """What the wheel brought, or lies in an uninstalled checkout."""
    package = Path(__file__).resolve().parent
    places = [package / name, *(folder / "host-examples" / "assets" / name for folder in package.parents)]
    found = next((path for path in places if path.is_file()), None)
    if found is None:
        raise CheckpointError(f"{name} is not in {package}; install the package again")
    return found


def _cached(repository: str, path: str) -> Path | None:
    """The file in the hub's cache, where `vvae get` puts it: of the last version asked for, else of any."""
    folder = _hub_cache() / ("models--" + repository.replace("/", "--"))
    last = folder / "refs" / "main"
    version = last.read_text(encoding="utf-8").strip() if last.is_file() else ""
    snapshots = sorted((folder / "snapshots").glob("*"), key=lambda found: (found.name != version, found.name))
    return next((found / path for found in snapshots if (found / path).is_file()), None)


def _hub_cache() -> Path:
    cache, home = os.environ.get("HF_HUB_CACHE"), os.environ.get("HF_HOME")
    if cache:
        return Path(cache)
    if home:
        return Path(home) / "hub"
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "huggingface" / "hub"
