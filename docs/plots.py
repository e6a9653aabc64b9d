#!/usr/bin/env python3
"""Draws the plots of the README from measured figures: docs/measurements/*.json to docs/pictures/*.svg.

`python3 docs/plots.py` writes them, `--check` compares. Needs the standard library alone. Figures are changed in the
JSON, by whoever measured them, and in the tables of README.md or docs/measurements.md; `--check` compares these too.
"""

import json
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
    """Time as a multiple of that without a limit, over the limit."""
    left, right, top, bottom = 90, 900, 90, 350
    most_gib, least, most = 25, 0.95, 1.7
    body = [text(20, 30, data["title"], "h"), text(20, 52, data["machine"], "s")]

    def x(gib: float) -> float:
        return round(left + (right - left) * gib / most_gib, 1)

    def y(ratio: float) -> float:
        return round(bottom - (bottom - top) * (ratio - least) / (most - least), 1)

    for gib in range(0, most_gib + 1, 5):
        body.append(f'<path class="g" d="M{x(gib)} {bottom}v6"/>')
        body.append(text(x(gib), bottom + 22, f"{gib} GiB", "s", "middle"))
    for ratio in (1.0, 1.2, 1.4, 1.6):
        body.append(f'<path class="g" d="M{left} {y(ratio)}H{right}"/>')
        body.append(text(left - 8, y(ratio) + 4, f"{ratio:.1f}x", "s", "end"))
    body.append(text(right, bottom + 44, "memory_limit (the last point of a line: no limit, and what it takes)", "s", "end"))
    body.append(text(left, top - 16, "time, as a multiple of that without a limit", "s"))
    for work, colour in zip(data["work"], COLOURS[::2]):
        none = work["none_seconds"]
        points = sorted([*work["limits"], [work["none_gib"], none]])
        path = " ".join(f"{x(gib)},{y(seconds / none)}" for gib, seconds in points)
        body.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        for gib, seconds in points:
            at = x(gib), y(seconds / none)
            body.append(f'<circle cx="{at[0]}" cy="{at[1]}" r="5" fill="{colour}"/>')
            # Both lines fall to the right: one is labelled above, the other below.
            above = work["name"] == "decode"
            shift = (9, -8) if above else (0, 20)
            anchor = "start" if above else "middle"
            body.append(text(round(at[0] + shift[0], 1), round(at[1] + shift[1], 1), f"{seconds:.3g} s", "s", anchor))
        gib, seconds = points[0]
        body.append(text(x(gib) - 12, y(seconds / none) + 4, work["name"], "n", "end"))
    return picture(960, bottom + 60, "Time of decode and encode against the memory limit", body)


PLOTS = {"peers": peers, "limits": limits}


def figures(value: object) -> list[float]:
    """The measured seconds of a file."""
    if isinstance(value, dict):
        return [n for key, inner in value.items() for n in figures(inner if "gib" not in key else [])]
    if isinstance(value, list):
        is_point = len(value) == 2 and all(isinstance(n, (int, float)) for n in value)
        return [n for inner in (value[1:] if is_point else value) for n in figures(inner)]
    return [float(value)] if isinstance(value, (int, float)) else []


def main() -> int:
    check, wrong = "--check" in sys.argv[1:], []
    tables = (DOCS / "measurements.md").read_text() + (DOCS.parent / "README.md").read_text()
    for name, draw in PLOTS.items():
        data = json.loads((DOCS / "measurements" / f"{name}.json").read_text())
        svg, path = draw(data), DOCS / "pictures" / f"{name}.svg"
        told = [n for n in figures(data["work"]) if not any(form in tables for form in (f"{n:g}", f"{n:.2f}", f"{n:.3f}"))]
        wrong += [f"{name}.json: {n} s is in no table" for n in told]
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(svg)
        elif not path.exists() or path.read_text() != svg:
            wrong.append(f"docs/pictures/{name}.svg is not what its figures say; run: python3 docs/plots.py")
    print("\n".join(wrong), end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
