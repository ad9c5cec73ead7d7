"""Pictures as inline SVG: geometry only, stretched to the page's width; every word is HTML, so it never shrinks.

Colours are classes (w2 is the colour of two bits, w2-5 of two and a half), so that the page's style sheet can follow
light, dark and print.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from math import ceil, floor, isfinite, log10

WIDE, HIGH = 1000, 400  # drawing units of a plot; the browser stretches them
SEPARATE = 64  # up to this many columns every cell of a heat map is drawn alone, with a gap


@dataclass(frozen=True)
class Axis:
    """Maps values between `low` and `high` to 0..1; logarithmic if `log`."""

    low: float
    high: float
    log: bool = False

    @classmethod
    def over(cls, values: Sequence[float], log: bool = False) -> "Axis":
        """An axis that holds all finite values: from 0, or for a logarithmic one between round numbers."""
        values = [value for value in values if isfinite(value)]
        if not log:
            return cls(0.0, max(values, default=0.0) * 1.08 or 1.0)
        positive = [value for value in values if value > 0] or [1.0]
        return cls(_round_down(min(positive)), _round_up(max(positive)), True)

    def at(self, value: float) -> float:
        """Where a value lies, 0 at `low` and 1 at `high`; what lies outside is moved to the edge."""
        value = min(max(value, self.low), self.high)
        if self.log:
            return (log10(value) - log10(self.low)) / (log10(self.high) - log10(self.low))
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Three to six round values."""
        if not self.log:
            step = _step((self.high - self.low) / 4)
            first = ceil(self.low / step - 1e-9)
            return [index * step for index in range(first, floor(self.high / step + 1e-9) + 1)]
        decades = range(floor(log10(self.low) + 1e-9), ceil(log10(self.high) - 1e-9) + 1)
        factors = (1, 2, 5) if len(decades) <= 2 else (1,) if len(decades) > 4 else (1, 3)
        found = [factor * 10.0**decade for decade in decades for factor in factors]
        return [value for value in found if self.low * 0.999 <= value <= self.high * 1.001]


def _step(rough: float) -> float:
    scale = 10.0 ** floor(log10(rough))
    return next(factor * scale for factor in (1, 2, 5, 10) if factor * scale >= rough * 0.999)


def _round_down(value: float) -> float:
    scale = 10.0 ** floor(log10(value))
    return max(factor for factor in (1, 2, 3, 5) if factor * scale <= value * 1.0001) * scale


def _round_up(value: float) -> float:
    scale = 10.0 ** floor(log10(value))
    return min(factor for factor in (1, 2, 3, 5, 10) if factor * scale > value * 1.0001) * scale


def compact(value: float) -> str:
    """A tick's text: 0.05, 20,000, 1e-05."""
    if value and not 1e-4 <= abs(value) < 1e6:
        return f"{value:.0e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def width_class(width: float) -> str:
    """The colour class of a number of bits."""
    return f"w{width:g}".replace(".", "-")


def bar(parts: Sequence[tuple[float, str]], label: str) -> str:
    """One stacked bar over the whole width: (share of it, colour class) from the left."""
    shapes, start = [], 0.0
    for share, colour in parts:
        shapes.append(f'<rect class="{colour}" x="{start * WIDE:.2f}" width="{share * WIDE:.2f}" height="10"/>')
        start += share
    return f'<svg class="bar" viewBox="0 0 {WIDE} 10" preserveAspectRatio="none" role="img" ' \
           f'aria-label="{escape(label, quote=True)}">{"".join(shapes)}</svg>'


def heat_map(rows: Sequence[Sequence[float]], label: str) -> str:
    """One cell per number, coloured by it: a path per colour, runs of equal cells joined where cells are many."""
    columns = max(map(len, rows))
    paths: dict[float, list[str]] = {}
    for y, row in enumerate(rows):
        for value, x, length in _runs(row, columns > SEPARATE):
            paths.setdefault(value, []).append(f"M{x} {y}h{length}v1h-{length}z")
    gap = " apart" if columns <= SEPARATE else ""
    drawn = "".join(f'<path class="{width_class(value)}" d="{"".join(paths[value])}"/>' for value in sorted(paths))
    return f'<svg class="heat{gap}" viewBox="0 0 {columns} {len(rows)}" preserveAspectRatio="none" role="img" ' \
           f'aria-label="{escape(label, quote=True)}">{drawn}</svg>'


def _runs(row: Sequence[float], joined: bool) -> Iterator[tuple[float, int, int]]:
    """(value, first column, columns) of equal neighbours, or of every cell."""
    start = 0
    for value, group in groupby(row):
        length = len(list(group))
        if joined:
            yield value, start, length
        else:
            yield from ((value, start + offset, 1) for offset in range(length))
        start += length


@dataclass(frozen=True)
class Plot:
    """A frame with two axes; the methods give shapes in its units, `html` puts them under axis labels."""

    x: Axis
    y: Axis

    def _point(self, x: float, y: float) -> tuple[str, str]:
        return f"{self.x.at(x) * WIDE:.1f}", f"{(1 - self.y.at(y)) * HIGH:.1f}"

    def line(self, points: Sequence[tuple[float, float]], colour: str) -> str:
        """A line through (x, y) points, drawn as a dot where there is one only."""
        if len(points) < 2:
            return self.dots(points, colour)
        path = "L".join(" ".join(self._point(*point)) for point in points)
        return f'<path class="line {colour}" d="M{path}"/>'

    def dots(self, points: Sequence[tuple[float, float]], colour: str) -> str:
        """Round dots of one colour, as one path of strokes without length."""
        path = "".join("M{} {}h0".format(*self._point(*point)) for point in points)
        return f'<path class="dots {colour}" d="{path}"/>' if path else ""

    def spans(self, spans: Sequence[tuple[float, float, float]], colour: str) -> str:
        """Vertical strokes from (x, low) to (x, high)."""
        path = ""
        for x, low, high in spans:
            path += "M{} {}V{}".format(*self._point(x, low), self._point(x, high)[1])
        return f'<path class="span {colour}" d="{path}"/>' if path else ""

    def columns(self, bars: Sequence[tuple[float, float, float]], step: float, colour: str) -> str:
        """Upright bars from (x, low) to (x, high), nearly `step` wide in x."""
        shapes = []
        width = (self.x.at(self.x.low + 0.86 * step) - self.x.at(self.x.low)) * WIDE
        for x, low, high in bars:
            if high > low:
                (left, bottom), (_, top) = self._point(x - 0.43 * step, low), self._point(x, high)
                shapes.append(f"M{left} {bottom}V{top}h{width:.1f}V{bottom}z")
        return f'<path class="{colour}" d="{"".join(shapes)}"/>'

    def note(self, x: float, y: float, text: str, side: str = "right") -> str:
        """A word beside a point."""
        left, top = self.x.at(x) * 100, (1 - self.y.at(y)) * 100
        return f'<span class="note {side}" style="left:{left:.1f}%;top:{top:.1f}%">{escape(text)}</span>'

    def html(self, shapes: Sequence[str], title: str, x_name: str, y_name: str,
             notes: Sequence[str] = (), x_ticks: Sequence[float] | None = None) -> str:
        """The finished figure: labels of the y axis, the picture, labels of the x axis."""
        across = self.x.ticks() if x_ticks is None else x_ticks
        grid = "".join(f"M0 {(1 - self.y.at(tick)) * HIGH:.1f}H{WIDE}" for tick in self.y.ticks())
        marks = "".join(f'<span style="top:{(1 - self.y.at(tick)) * 100:.2f}%">{compact(tick)}</span>'
                        for tick in self.y.ticks())
        below = "".join(f'<span style="left:{self.x.at(tick) * 100:.2f}%">{compact(tick)}</span>' for tick in across)
        drawing = f'<svg viewBox="0 0 {WIDE} {HIGH}" preserveAspectRatio="none" role="img" ' \
                  f'aria-label="{escape(title, quote=True)}"><path class="grid" d="{grid}"/>{"".join(shapes)}</svg>'
        return f'<div class="plot"><p class="yname">{escape(y_name)}</p><div class="yaxis">{marks}</div>' \
               f'<div class="area">{drawing}{"".join(notes)}</div><div class="xaxis">{below}</div>' \
               f'<p class="xname">{escape(x_name)}</p></div>'


def legend(entries: Mapping[str, str]) -> str:
    """Colour class -> words."""
    keys = "".join(f'<span><i class="key {colour}"></i>{escape(words)}</span>' for colour, words in entries.items())
    return f'<p class="legend">{keys}</p>'
