"""A picture of rates: one bar for each engine, as an SVG file that any browser shows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from harness.case import is_ours

#: Sizes in the picture, in units of SVG.
WIDTH, ROW, LABELS, NUMBERS, TOP = 760, 34, 190, 110, 64
STYLE = """
  text { font: 14px system-ui, sans-serif; fill: #1f2328; }
  .title { font-size: 16px; font-weight: 600; }
  .note { font-size: 12px; fill: #59636e; }
  .ours { fill: #d62728; }
  .other { fill: #8c959f; }
  .ground { fill: #ffffff; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    .note { fill: #9198a1; }
    .other { fill: #6e7681; }
    .ground { fill: #0d1117; }
  }
"""


def draw(path: Path, title: str, note: str, rates: Sequence[tuple[str, float]]) -> None:
    """Write the picture; rates are in GB/s, and this package stands out."""
    height = TOP + ROW * len(rates) + 16
    fastest = max(rate for _, rate in rates)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="ground" width="{WIDTH}" height="{height}"/>',
        f'<text class="title" x="16" y="28">{escape(title)}</text>',
        f'<text class="note" x="16" y="48">{escape(note)}</text>',
    ]
    for number, (name, rate) in enumerate(rates):
        top, middle = TOP + ROW * number, TOP + ROW * number + 20
        length = (WIDTH - LABELS - NUMBERS) * rate / fastest if fastest else 0
        kind = "ours" if is_ours(name) else "other"
        lines += [
            f'<text x="{LABELS - 10}" y="{middle}" text-anchor="end">{escape(name)}</text>',
            f'<rect class="{kind}" x="{LABELS}" y="{top + 4}" width="{length:.1f}" '
            f'height="{ROW - 10}" rx="3"/>',
            f'<text x="{LABELS + length + 8:.1f}" y="{middle}">{rate:.2f} GB/s</text>',
        ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*lines, "</svg>", ""]))
