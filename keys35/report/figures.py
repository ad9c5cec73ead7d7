"""The page's figures from the facts: which numbers go on which axis."""

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from keys35.report.facts import RANDOM, Facts
from keys35.report.pictures import Axis, Plot, heat_map, legend, width_class
from keys35.report.words import set_name

MANY = 60  # from this many layers or points on, marks are drawn thinner
ROW_LABELS = 20


def _figure(html: str, kind: str = "") -> str:
    return f'<figure class="{kind}">{html}</figure>' if html else ""


def _layer_ticks(layers: list[int]) -> list[float]:
    step = max(1, -(-len(layers) // 8))
    return layers[::step]


def _layer_axis(layers: list[int]) -> Axis:
    return Axis(min(layers) - 0.6, max(layers) + 0.6)


def map_figure(facts: Facts) -> str:
    """Layer by expert, coloured by width; rows keep a readable height whatever their number."""
    layers = list(facts.widths)
    rows = [facts.widths[layer] for layer in layers]
    height = min(34.0, max(7.0, 560 / len(rows))) * len(rows)
    step = -(-len(layers) // ROW_LABELS)
    names = "".join(f'<span style="top:{(index + 0.5) / len(layers) * 100:.2f}%">{layer}</span>'
                    for index, layer in enumerate(layers) if index % step == 0)
    experts = max(map(len, rows))
    every = max(1, experts // 8)
    below = "".join(f'<span style="left:{(e + 0.5) / experts * 100:.2f}%">{e}</span>' for e in range(0, experts, every))
    drawing = heat_map(rows, f"widths of {sum(map(len, rows))} experts, layer by expert")
    return _figure(f'<p class="yname">layer</p><div class="map" style="grid-template-rows:{height:.0f}px auto">'
                   f'<div class="rows">{names}</div><div>{drawing}</div><div class="xaxis">{below}</div></div>'
                   f'<p class="xname">expert</p>')


def layer_figure(facts: Facts) -> str:
    """What part of each layer's experts has which width, from the bottom up."""
    layers = list(facts.widths)
    plot = Plot(_layer_axis(layers), Axis(0, 100))
    floors = dict.fromkeys(layers, 0.0)
    drawn = []
    for width in facts.counts:
        bars = []
        for layer, row in facts.widths.items():
            top = floors[layer] + 100 * row.count(width) / len(row)
            bars.append((layer, floors[layer], top))
            floors[layer] = top
        drawn.append(plot.columns(bars, 1.0, width_class(width)))
    return _figure(plot.html(drawn, "widths by layer", "layer", "% of a layer's experts, widest at the top",
                             x_ticks=_layer_ticks(layers)), "low")


def cost_figures(facts: Facts) -> list[str]:
    """The frontier of predicted KL over mean bits, and what one more bit saves each expert."""
    layers = _costed(facts)
    if not layers:
        return []
    return [_frontier_figure(facts, layers), _saving_figure(layers)]


def _costed(facts: Facts) -> dict[int, dict[str, Any]]:
    layers = (facts.measured or {}).get("layers", {})
    return {int(layer): entry for layer, entry in layers.items() if "cost" in entry and len(entry["widths"]) > 1}


def frontier(layers: dict[int, dict[str, Any]]) -> list[tuple[float, float]]:
    """(mean bits, predicted KL) from all experts at the least width to all at the largest, best steps first.

    Steps along each expert's lower convex hull: every point is the least cost that its bits can buy.
    """
    steps, bits, total, count = [], 0.0, 0.0, 0
    for entry in layers.values():
        for cost in entry["cost"]:
            bits, total, count = bits + entry["widths"][0], total + cost[0], count + 1
            steps += _hull_steps(entry["widths"], cost)
    points = [(bits / count, total)]
    for saving, width in sorted(steps, key=lambda step: (-step[0], step[1])):
        bits, total = bits + width, total - saving * width
        points.append((bits / count, total))
    stride = max(1, len(points) // 200)
    return points[::stride] + ([points[-1]] if (len(points) - 1) % stride else [])


def _hull_steps(widths: list[int], cost: list[float]) -> Iterator[tuple[float, int]]:
    """(saving per bit, bits) of each step along one expert's convex hull, largest saving first."""
    at = 0
    while at + 1 < len(widths):
        rates = [((cost[at] - cost[to]) / (widths[to] - widths[at]), to) for to in range(at + 1, len(widths))]
        rate, to = max(rates)
        if rate <= 0:
            return
        yield rate, widths[to] - widths[at]
        at = to


def _frontier_figure(facts: Facts, layers: dict[int, dict[str, Any]]) -> str:
    line = frontier(layers)
    sets = (facts.measured or {}).get("sets", {})
    points = {name: (float(Fraction(entry["mean"])), entry["predicted_kl"]) for name, entry in sets.items()}
    x = Axis(line[0][0] - 0.1, max(line[-1][0], *(p[0] for p in points.values()), line[0][0] + 1) + 0.1)
    plot = Plot(x, Axis.over([value for _, value in [*line, *points.values()]]))
    ours = [points["allocation"]] if "allocation" in points else []
    mixes = [point for name, point in points.items() if name.startswith(RANDOM)]
    others = [point for name, point in points.items() if name != "allocation" and not name.startswith(RANDOM)]
    notes = [plot.note(*points[name], set_name(name)) for name in points if name.startswith("uniform-")]
    notes += [plot.note(*point, set_name("allocation"), "left") for point in ours]
    shapes = [plot.line(line, "soft"), plot.dots(mixes, "plain"), plot.dots(others, "prose"), plot.dots(ours, "accent")]
    keys = {"soft": "least KL that these bits can buy", "accent": "this checkpoint", "prose": "other rules",
            "plain": "random mixes"}
    words = legend({colour: text for colour, text in keys.items() if colour != "plain" or mixes})
    return _figure(words + plot.html(shapes, "predicted KL over mean bits", "mean bits per routed weight",
                                     "predicted KL of the routed experts, nats", notes))


def _saving_figure(layers: dict[int, dict[str, Any]]) -> str:
    """Dots: what the second candidate width saves over the first, per expert, coloured by the width chosen."""
    coloured: dict[float, list[tuple[float, float]]] = {}
    for layer, entry in layers.items():
        chosen = entry.get("chosen", [entry["widths"][0]] * len(entry["cost"]))
        for expert, (cost, width) in enumerate(zip(entry["cost"], chosen, strict=True)):
            across = layer + (expert / len(chosen) - 0.5) * 0.8
            coloured.setdefault(width, []).append((across, cost[0] - cost[1]))
    values = [y for points in coloured.values() for _, y in points]
    plot = Plot(_layer_axis(list(layers)), Axis.over(values, log=True))
    drawn = [plot.dots([p for p in points if p[1] > 0], width_class(width))
             for width, points in sorted(coloured.items())]
    low, high = next(iter(layers.values()))["widths"][:2]
    words = legend({width_class(width): f"chosen: {width} bits" for width in sorted(coloured)})
    title = f"predicted KL that {high} instead of {low} bits save, per expert, nats (logarithmic)"
    return _figure(words + plot.html(drawn, title, "layer", title, x_ticks=_layer_ticks(list(layers))),
                   "many" if len(values) > MANY * 8 else "")


def proxy_figure(facts: Facts) -> str:
    """Mean proxy error of each layer at each width, and of its dense linears."""
    measured = facts.measured or {}
    lines: dict[str, list[tuple[float, float]]] = {}
    words: dict[str, str] = {}
    for layer, entry in measured.get("layers", {}).items():
        for column, width in enumerate(entry["widths"]):
            errors = [row[column] for row in entry["proxy_error"]]
            if errors:  # of a layer that is only simulated so far there are none
                lines.setdefault(width_class(width), []).append((int(layer), sum(errors) / len(errors)))
                words[width_class(width)] = f"experts at {width} bits"
    for layer, entry in measured.get("dense", {}).items():
        lines.setdefault("prose", []).append((int(layer), entry["mean"]))
        words["prose"] = "dense linears"
    if not lines:
        return ""
    layers = sorted({int(x) for points in lines.values() for x, _ in points})
    plot = Plot(_layer_axis(layers), Axis.over([y for points in lines.values() for _, y in points], log=True))
    drawn = [draw(points, colour) for colour, points in lines.items() for draw in (plot.line, plot.dots)]
    keys = legend({colour: words[colour] for colour in sorted(words)})
    return _figure(keys + plot.html(drawn, "proxy error by layer", "layer", "mean proxy error (logarithmic)",
                                    x_ticks=_layer_ticks(layers)), "many" if len(layers) > MANY else "")


def calibration_figure(facts: Facts) -> str:
    """Least to most rows of each layer's experts, with the median; experts without any are at the bottom edge."""
    layers = {int(layer): sorted(entry["fit_rows"]) for layer, entry in (facts.measured or {})["layers"].items()}
    plot = Plot(_layer_axis(list(layers)), Axis.over([max(1, c) for rows in layers.values() for c in rows], log=True))
    whole = plot.spans([(layer, max(1, rows[0]), max(1, rows[-1])) for layer, rows in layers.items()], "plain")
    middle = plot.dots([(layer, max(1, rows[len(rows) // 2])) for layer, rows in layers.items()], "accent")
    words = legend({"plain": "least to most rows of a layer's experts", "accent": "median"})
    return _figure(words + plot.html([whole, middle], "calibration rows per expert", "layer (the last is MTP)"
                                     if set(layers) - set(facts.widths) and facts.widths else "layer",
                                     "rows per expert (logarithmic)", x_ticks=_layer_ticks(list(layers))),
                   "many" if len(layers) > MANY else "")
