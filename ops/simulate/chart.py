"""A line chart as SVG, without a library."""

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 240, 56, 16, 34, 40
COLORS = ("#1f6feb", "#d1570a", "#2da44e", "#8250df")

Points = Sequence[tuple[float, float]]


def line_chart(title: str, x_label: str, lines: Mapping[str, Points]) -> str:
    """Draw steps through the points of each line, over axes that begin at zero."""
    max_x = max(x for points in lines.values() for x, _ in points) or 1.0
    max_y = max(y for points in lines.values() for _, y in points) or 1.0
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        ' font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(LEFT, 16, title, "start", "#000000"),
    ]
    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, y = _x(part), _y(part)
        parts += [
            f'<path d="M{LEFT} {y}H{WIDTH - RIGHT}" stroke="#e0e0e0"/>',
            _text(LEFT - 6, y + 4, f"{part * max_y:g}", "end"),
            _text(x, HEIGHT - BOTTOM + 16, f"{part * max_x:.0f}", "middle"),
        ]
    parts.append(_text(_x(0.5), HEIGHT - 8, x_label, "middle"))
    for index, (name, points) in enumerate(lines.items()):
        color = COLORS[index % len(COLORS)]
        path = _path([(_x(x / max_x), _y(y / max_y)) for x, y in points])
        parts += [
            f'<path d="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>',
            _text(WIDTH - RIGHT - 200 * index, 16, name, "end", color),
        ]
    return "\n".join([*parts, "</svg>", ""])


def _x(part: float) -> float:
    return round(LEFT + part * (WIDTH - LEFT - RIGHT), 1)


def _y(part: float) -> float:
    return round(HEIGHT - BOTTOM - part * (HEIGHT - TOP - BOTTOM), 1)


def _path(points: Points) -> str:
    """Draw steps, without the points at which nothing changes."""
    (x, y), *rest = points
    parts = [f"M{x} {y}"]
    for x, new_y in rest:
        if new_y != y:
            parts.append(f"H{x}V{new_y}")
            y = new_y
    return "".join([*parts, f"H{x}"])


def _text(x: float, y: float, text: str, anchor: str, color: str = "#555555") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{color}">{escape(text)}</text>'
