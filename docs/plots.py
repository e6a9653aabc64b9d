#!/usr/bin/env python3
"""Draws the plots of the README from measured figures: docs/measurements/*.json to docs/pictures/*.svg.

`python3 docs/plots.py` writes them, `--check` compares. Needs the standard library alone. Figures are changed in the
JSON, by whoever measured them, and in the tables of README.md. Both must have the same rows, and a picture shows all.
"""

import json
import re
import sys
from html import escape
from pathlib import Path

DOCS = Path(__file__).resolve().parent
COLOURS = ["#2f77b4", "#62a5d9", "#e8912d", "#9a8c98"]
STYLE = (
    "<style>text{font:13px system-ui,'DejaVu Sans',sans-serif;fill:#222}.b{fill:#fff}.h{font-size:18px;font-weight:600}"
    ".s{fill:#666}.g{stroke:#8885;fill:none}.n{font-weight:600}@media(prefers-color-scheme:dark){text{fill:#ddd}"
    ".b{fill:#14171c}.s{fill:#9aa}}</style>"
)


def number(value: float) -> str:
    """As the tables have it: three digits or so."""
    return f"{value:.4f}".rstrip("0") if value < 0.1 else f"{value:.3g}" if value < 10 else f"{value:g}"


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'


def picture(width: int, height: float, label: str, body: list[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:g}" role="img" '
        f'aria-label="{escape(label)}">{STYLE}<rect class="b" width="{width}" height="{height:g}"/>'
        + "".join(body)
        + "</svg>\n"
    )


def peers(data: dict) -> str:
    """Bars of seconds and of GiB; each row has a scale of its own."""
    body = [text(20, 30, data["title"], "h"), text(20, 52, data["machine"], "s")]
    for i, (name, note) in enumerate(data["series"].items()):
        x, y = 20 + 430 * (i % 2), 78 + 22 * (i // 2)
        body.append(f'<rect x="{x}" y="{y - 12}" width="14" height="14" rx="2" fill="{COLOURS[i]}"/>')
        body.append(text(x + 20, y, f"{name} ({note})"))
    y = 150.0
    columns = [("seconds", 200, 330, " s"), ("gib", 640, 200, " GiB")]
    for key, left, _, _ in columns:
        words = {"seconds": "time, shorter is better", "gib": "peak memory"}[key]
        body.append(text(left, y - 12, words, "s"))
    for work in data["work"]:
        bars = [i for i in range(len(data["series"])) if work["seconds"][i] is not None]
        body.append(text(188, y + 9 * len(bars) + 4, work["name"], "n", "end"))
        for key, left, width, unit in columns:
            most = max(value for value in work[key] if value is not None)
            for row, i in enumerate(bars):
                value = work[key][i]
                if value is None:
                    continue
                length = max(2.0, width * value / most)
                top = y + 18 * row
                body.append(f'<rect x="{left}" y="{top:g}" width="{length:.1f}" height="15" fill="{COLOURS[i]}"/>')
                body.append(text(round(left + length + 6, 1), top + 12, number(value) + unit, "s"))
        y += 18 * len(bars) + 16
    return picture(960, y, "Seconds and GiB of video-vae, ComfyUI core and PyTorch", body)


def limits(data: dict) -> str:
    """Bars of seconds: without a limit, and with each limit. Each row has a scale of its own."""
    body = [text(20, 30, data["title"], "h"), text(20, 52, data["machine"], "s")]
    for i, (name, note) in enumerate(data["series"].items()):
        body.append(f'<rect x="{20 + 310 * i}" y="66" width="14" height="14" rx="2" fill="{COLOURS[i]}"/>')
        body.append(text(40 + 310 * i, 78, f"{name} ({note})"))
    y, left, width = 104.0, 340, 480
    for work in data["work"]:
        groups = ([work["none"]] if work["none"] else [], work["limits"], work["u8"])
        bars = [(kind, point) for kind, group in enumerate(groups) for point in group]
        body.append(text(188, y + 9 * len(bars) + 4, work["name"], "n", "end"))
        most = max(seconds for _, (_, seconds) in bars)
        for row, (kind, (gib, seconds)) in enumerate(bars):
            top, length = y + 18 * row, max(2.0, width * seconds / most)
            said = f"{gib:g} GiB" if kind else f"takes {gib:g} GiB"
            body.append(text(left - 8, top + 12, said, "s", "end"))
            body.append(f'<rect x="{left}" y="{top:g}" width="{length:.1f}" height="15" fill="{COLOURS[kind]}"/>')
            body.append(text(round(left + length + 6, 1), top + 12, number(seconds) + " s", "s"))
        y += 18 * len(bars) + 16
    return picture(960, y, "Seconds of decode and encode without a limit and within several", body)


def tables(markdown: str) -> dict[str, list[list[str]]]:
    """The rows of each table, by the first cell of its header."""
    found: dict[str, list[list[str]]] = {}
    rows: list[list[str]] = []
    for line in markdown.splitlines():
        if not line.startswith("|"):
            rows = []
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not rows:
            rows = found[f"{cells[0]} | {cells[1]}"] = []
            rows.append(cells)
        elif set(line) - set("|-"):
            rows.append(cells)
    return {name: rows[1:] for name, rows in found.items()}


def points(cell: str, form: str) -> list[list[float]]:
    return [[float(n) for n in numbers] for numbers in re.findall(form, cell)]


def peers_table(readme: dict[str, list[list[str]]]) -> list[dict]:
    """The rows beside ComfyUI core, with what the first table has of PyTorch."""
    torch = {}
    for name, _, _, seconds, _, memory in readme["work, tensors on the GPU | video-vae, fp16"]:
        gib = re.search(r"; ([\d.]+) GiB", memory)
        torch[name] = (float(seconds) if seconds else None, float(gib[1]) if gib else None)
    found = []
    for name, *cells in readme["work | video-vae"]:
        pairs = [points(cell, r"^([\d.]+), ([\d.]+) GiB")[0] for cell in cells]
        seconds, gib = ([*column, more] for column, more in zip(zip(*pairs), torch[name]))
        found.append({"name": name, "seconds": seconds, "gib": gib})
    return found


def limits_table(readme: dict[str, list[list[str]]]) -> list[dict]:
    found = []
    for name, none, within, rounded in readme["work, tensors in host memory on PCIe 5 | no limit"]:
        alone = [[gib, seconds] for seconds, gib in points(none, r"([\d.]+) \(takes ([\d.]+) GiB\)")]
        form = r"([\d.]+) GiB: ([\d.]+)"
        work = {"name": name, "none": alone[0] if alone else None}
        found.append({**work, "limits": points(within, form), "u8": points(rounded, form)})
    return found


# What draws a picture, and what reads the table that it shows.
PLOTS = {"peers": (peers, peers_table), "limits": (limits, limits_table)}


def main() -> int:
    check, wrong = "--check" in sys.argv[1:], []
    papers = [DOCS / "measurements.md", DOCS.parent / "README.md"]
    shown = {name: rows for paper in papers for name, rows in tables(paper.read_text(encoding="utf-8")).items()}
    for name, (draw, of_table) in PLOTS.items():
        data = json.loads((DOCS / "measurements" / f"{name}.json").read_text(encoding="utf-8"))
        svg, path = draw(data), DOCS / "pictures" / f"{name}.svg"
        rows = of_table(shown)
        for row in [row for row in [*rows, *data["work"]] if row not in rows or row not in data["work"]]:
            place = "the table lacks" if row not in rows else f"{name}.json lacks"
            wrong.append(f"{place} {json.dumps(row)}")
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(svg, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != svg:
            wrong.append(f"docs/pictures/{name}.svg is not what its figures say; run: python3 docs/plots.py")
    print("\n".join(wrong), end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
