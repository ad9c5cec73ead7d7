"""Rules about profiles, and the wishes of single engines that a profile may leave unmet."""

from collections.abc import Iterator

from keys35.glm.names import Role
from keys35.recipe import PLAIN_BITS
from keys35.stages.contract import Checkpoint, Finding, broken
from keys35.stages.profile import PROFILES, one_width_keys


def check_engines(point: Checkpoint) -> Iterator[Finding]:
    """The declared profile against the widths, then what engines want beyond the contract."""
    widths: dict[int | None, set[int]] = {}
    for name, bits in point.widths.items():
        if point.rules[name].role is Role.EXPERT:
            widths.setdefault(point.rules[name].layer, set()).add(bits)
    mixed = [(f"layer {layer}", f"has widths {sorted(found)}") for layer, found in widths.items() if len(found) > 1]
    if point.profile not in PROFILES:
        yield from broken("profile", [("profile", f"is {point.profile!r}, known are {', '.join(PROFILES)}")])
    elif point.profile == "uniform-layer":
        yield from broken("profile", mixed)
    yield from broken("layer-width", mixed)
    yield from _declared(point)
    plain = [rule.name for rule in point.rules.values() if rule.role is Role.CARRIED and rule.projection]
    yield from broken("dense-encoded", ((name, f"has {PLAIN_BITS} bits") for name in plain))


def _declared(point: Checkpoint) -> Iterator[Finding]:
    """What vllm-exl3 takes from the config instead of from the trellis shapes."""
    first = [rule for rule in point.rules.values() if rule.expert == 0]
    bits = {str(rule.layer): [point.widths.get(rule.name, 0)] for rule in first}
    dense = any(rule.role is Role.DENSE for rule in point.rules.values())
    wanted = one_width_keys(point.rules.values(), bits, point.quantization.get("dense_bits"))
    declared = point.quantization.get("layer_bits")
    declared = declared if isinstance(declared, dict) else {}
    wrong = [(f"layer {layer}", f"is declared {declared.get(layer)!r}, expert 0 has {width}")
             for layer, width in wanted["layer_bits"].items() if declared.get(layer) != width]
    yield from broken("layer-bits", wrong)
    if dense and point.quantization.get("non_routed_exl3") != wanted["non_routed_exl3"]:
        found = point.quantization.get("non_routed_exl3")
        yield from broken("dense-declared", [("non_routed_exl3", f"is {found!r}")])
