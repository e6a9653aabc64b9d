"""Files import each other in one direction, also in functions and for types alone."""

import ast
from pathlib import Path

import pytest
from conftest import REPOSITORY, SOURCES

PACKAGES = [SOURCES / "video_vae", REPOSITORY / "host-examples" / "comfyui" / "video_vae_nodes"]


def modules(folder: Path) -> dict:
    """Files of a package by the parts of their names."""
    found = {}
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        found[parts[:-1] if path.name == "__init__.py" else parts] = path
    return found


def imported(name: tuple, path: Path, known: dict) -> set:
    """Modules of the package that a file names in an import."""
    folder, found = name if path.name == "__init__.py" else name[:-1], set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = folder[: len(folder) - node.level + 1] if node.level else ()
            module = (*start, *(node.module.split(".") if node.module else ()))
            found.update(part if part in known else module for part in ((*module, alias.name) for alias in node.names))
    return found & set(known) - {name}


def cycle(edges: dict) -> list:
    """Modules that are left when those without imports are taken away, again and again."""
    left = dict(edges)
    while free := [name for name, to in left.items() if not to & set(left)]:
        for name in free:
            del left[name]
    return sorted(".".join(name) for name in left)


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda folder: folder.name)
def test_no_cycles(folder):
    known = modules(folder)
    edges = {name: imported(name, path, known) for name, path in known.items()}
    assert len(edges) > 5 and sum(map(len, edges.values())) > len(edges)
    assert cycle(edges) == []
