"""Prints a CycloneDX 1.5 list of the crates that are linked into the library and the command: sbom.py REPOSITORY"""

import json
import subprocess
import sys
import uuid

from notices import linked


def component(package: dict, checksums: dict) -> dict:
    name, version = package["name"], package["version"]
    reference = f"pkg:cargo/{name}@{version}"
    found = {"type": "library", "bom-ref": reference, "name": name, "version": version, "purl": reference}
    if package["license"]:
        found["licenses"] = [{"expression": package["license"].replace("/", " OR ")}]
    checksum = checksums.get((name, version))
    if checksum:
        found["hashes"] = [{"alg": "SHA-256", "content": checksum}]
    if package["repository"]:
        found["externalReferences"] = [{"type": "vcs", "url": package["repository"]}]
    return found


def locked_checksums(lock: str) -> dict:
    """SHA-256 of each crate's archive, by name and version, from Cargo.lock."""
    found = {}
    for block in lock.split("[[package]]")[1:]:
        fields = dict(line.split(" = ", 1) for line in block.splitlines() if " = " in line)
        if "checksum" in fields:
            found[tuple(fields[key].strip('"') for key in ("name", "version"))] = fields["checksum"].strip('"')
    return found


def main() -> None:
    root = sys.argv[1]
    command = ["cargo", "metadata", "--format-version=1", "--locked", "--manifest-path", f"{root}/Cargo.toml"]
    metadata = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    with open(f"{root}/Cargo.lock", encoding="utf-8") as file:
        lock = file.read()
    checksums, wanted = locked_checksums(lock), linked(metadata)
    packages = sorted((p for p in metadata["packages"] if p["id"] in wanted), key=lambda p: (p["name"], p["version"]))
    reference = {p["id"]: f"pkg:cargo/{p['name']}@{p['version']}" for p in metadata["packages"]}
    own = next(p for p in metadata["packages"] if p["id"] == metadata["resolve"]["root"])
    subject = {**component(own, checksums), "type": "library"}
    nodes = [node for node in metadata["resolve"]["nodes"] if node["id"] in wanted or node["id"] == own["id"]]
    depends = [
        {
            "ref": reference[node["id"]],
            "dependsOn": sorted({reference[d["pkg"]] for d in node["deps"] if d["pkg"] in wanted}),
        }
        for node in sorted(nodes, key=lambda node: reference[node["id"]])
    ]
    # The same lock file gives the same bytes.
    serial = uuid.uuid5(uuid.NAMESPACE_URL, f"{reference[own['id']]} {lock}")
    bom = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        "metadata": {"component": subject},
        "components": [component(package, checksums) for package in packages],
        "dependencies": depends,
    }
    json.dump(bom, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
