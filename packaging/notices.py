"""Prints the licences of the crates that are linked into the library and the command: notices.py REPOSITORY"""

import json
import subprocess
import sys
from pathlib import Path

LICENCE_FILES = ("LICENSE*", "LICENCE*", "COPYING*", "COPYRIGHT*", "NOTICE*")


def linked(metadata: dict) -> set:
    """Crates that the library and the command, the workspace's members, depend on; no build or dev-dependencies."""
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    packages = {package["id"]: package for package in metadata["packages"]}

    def procedural(package: str) -> bool:
        return any("proc-macro" in target["kind"] for target in packages[package]["targets"])

    found, waiting = set(), list(metadata["workspace_members"])
    while waiting:
        package = waiting.pop()
        if package in found or procedural(package):
            continue
        found.add(package)
        for dependency in nodes[package]["deps"]:
            if any(kind["kind"] is None for kind in dependency["dep_kinds"]):
                waiting.append(dependency["pkg"])
    return {package for package in found if packages[package]["source"]}


def main() -> None:
    command = ["cargo", "metadata", "--format-version=1", "--locked", "--manifest-path", f"{sys.argv[1]}/Cargo.toml"]
    metadata = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    wanted = linked(metadata)
    packages = sorted((p for p in metadata["packages"] if p["id"] in wanted), key=lambda p: (p["name"], p["version"]))
    print("# Third-party software\n\nThe library and the `vvae` command contain these crates.\n")
    print("| crate | version | licence |\n|---|---|---|")
    for package in packages:
        print(f"| {package['name']} | {package['version']} | {package['license'] or 'see below'} |")
    texts: dict[str, list] = {}
    for package in packages:
        folder = Path(package["manifest_path"]).parent
        files = sorted({file for pattern in LICENCE_FILES for file in folder.glob(pattern) if file.is_file()})
        for file in files:
            texts.setdefault(file.read_text(encoding="utf-8", errors="replace").strip(), []).append(package["name"])
    for text, names in sorted(texts.items(), key=lambda item: item[1]):
        print(f"\n## {', '.join(sorted(set(names)))}\n\n```text\n{text}\n```")


if __name__ == "__main__":
    main()
