"""Compares Cargo.lock with RustSec's advisories: advisories.py REPOSITORY DATABASE

DATABASE is a git directory of github.com/RustSec/advisory-db. For machines where `cargo deny check advisories`
cannot fetch it. Ends with 1 if an advisory applies.
"""

import re
import subprocess
import sys
import tomllib


def numbers(version: str) -> tuple:
    """Of the release; a pre-release counts as its release."""
    parts = [int(part) for part in re.split(r"[-+]", version.strip())[0].split(".")]
    return tuple(parts + [0] * (3 - len(parts)))


def satisfies(version: str, requirement: str) -> bool:
    """Whether a version meets every part of a requirement such as ">= 0.5.2, < 0.6" or "^1.4"."""
    found = numbers(version)
    for part in requirement.split(","):
        operator, wanted = re.fullmatch(r"\s*(>=|<=|>|<|=|\^|~)?\s*(\S+)\s*", part).groups()
        given, bound = wanted.count(".") + 1, numbers(wanted)
        if operator in (None, "^"):
            fixed = next((i for i, n in enumerate(bound) if n), 2) + 1
            good = found >= bound and found[:fixed] == bound[:fixed]
        elif operator == "~":
            good = found >= bound and found[: min(given, 2)] == bound[: min(given, 2)]
        else:
            good = {">=": found >= bound, "<=": found <= bound, ">": found > bound, "<": found < bound, "=": found == bound}[
                operator
            ]
        if not good:
            return False
    return True


def main() -> None:
    repository, database = sys.argv[1:]
    with open(f"{repository}/Cargo.lock", "rb") as file:
        locked = tomllib.load(file)["package"]
    git = ["git", "-C", database]
    date = subprocess.run([*git, "log", "-1", "--format=%cs"], check=True, capture_output=True, text=True).stdout.strip()
    names = subprocess.run(
        [*git, "ls-tree", "-r", "--name-only", "HEAD", "crates"], check=True, capture_output=True, text=True
    ).stdout.split()
    compared = applied = 0
    for package in locked:
        for path in (name for name in names if name.startswith(f"crates/{package['name']}/")):
            text = subprocess.run([*git, "show", f"HEAD:{path}"], check=True, capture_output=True, text=True).stdout
            advisory = tomllib.loads(text.split("```toml", 1)[1].split("```", 1)[0])
            compared += 1
            versions = advisory.get("versions", {})
            safe = [*versions.get("patched", []), *versions.get("unaffected", [])]
            if "withdrawn" in advisory["advisory"] or any(satisfies(package["version"], rule) for rule in safe):
                continue
            applied += 1
            kind = advisory["advisory"].get("informational", "vulnerability")
            print(f"{package['name']} {package['version']}: {advisory['advisory']['id']} ({kind})")
    print(f"{len(locked)} crates, {compared} advisories of {date} compared, {applied} apply")
    sys.exit(applied > 0)


if __name__ == "__main__":
    main()
