"""Rules about config.json, quantization_config.json, the files beside them, the report and the recipe."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from keys35.errors import SourceError
from keys35.exl3.codebook import MARKERS
from keys35.files.atomic import sha256_file
from keys35.files.headers import TORCH_DTYPE
from keys35.glm.names import Role, exl3_parts, match_source
from keys35.recipe import PLAIN_BITS, recipe_digest
from keys35.report.facts import CONFIGS, QUANT, REPORT
from keys35.report.schema import load_schema, misfit
from keys35.stages.contract import Checkpoint, Finding, broken, unread_keys

FACTS = {"format": "keys35-v1", "head_bits": 16, "codebook": "mul1"}
TOKENIZER = "tokenizer.json"
ONLY_IN_FILE = {"tensor_storage", "expert_bits"}


def check_config(point: Checkpoint) -> Iterator[Finding]:
    """config.json as engines read it, and against the source's."""
    config = point.config
    yield from broken("config-engine", ((key, f"is {config.get(key)!r}") for key in unread_keys(config)))
    if "tied_word_embeddings" in config or config.get("tie_word_embeddings") is not False:
        found = {key: config[key] for key in config if key.startswith(("tie_", "tied_"))}
        yield from broken("config-tie", [("config.json", f"has {found}")])
    if point.reference is not None:
        source = point.reference.config
        changed = [key for key in source if key not in ("quantization_config", "tie_word_embeddings")
                   and (key not in config or config[key] != source[key])]
        yield from broken("config-source", ((k, f"is {config.get(k)!r}, was {source[k]!r}") for k in changed))
        original = source.get("quantization_config")
        if original is not None and point.quantization.get("original_quantization_config") != original:
            yield from broken("quant-original", [("config.json", "lacks it")])


def check_quantization(point: Checkpoint) -> Iterator[Finding]:
    """The quantization config in both places, against the trellis shapes."""
    inside, outside = point.config.get("quantization_config"), point.quantization
    inside = inside if isinstance(inside, dict) else {}
    differing = [key for key in inside.keys() | outside.keys() if inside.get(key) != outside.get(key)
                 and not (key in ONLY_IN_FILE and key not in inside)]
    yield from broken("quant-copies", (
        (key, f"is {_short(inside.get(key))} in config.json, {_short(outside.get(key))} in {QUANT}")
        for key in sorted(differing)))
    methods = [(place, f"says {block.get('quant_method')!r}") for place, block in
               (("config.json", inside), (QUANT, outside)) if block.get("quant_method") != "exl3"]
    yield from broken("quant-method", methods)
    wrong = [(key, f"is {outside.get(key)!r}") for key, value in FACTS.items() if outside.get(key) != value]
    if not (isinstance(outside.get("version"), str) and outside["version"]):
        wrong.append(("version", f"is {outside.get('version')!r}"))
    yield from broken("quant-facts", wrong)
    bits, mean = outside.get("bits"), point.mean(_routed(point))
    if type(bits) is not float or (mean is not None and bits != float(mean)):
        yield from broken("quant-bits", [("bits", f"is {bits!r}, the shapes give {mean}")])
    yield from broken("expert-bits", _expert_bits_faults(point, outside.get("expert_bits")))
    yield from broken("tensor-storage", _storage_faults(point, outside.get("tensor_storage")))


def _routed(point: Checkpoint) -> list[str]:
    return [rule.name for rule in point.rules.values() if rule.role is Role.EXPERT]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _expert_bits_faults(point: Checkpoint, declared: Any) -> Iterator[tuple[str, str]]:
    layers = sorted({rule.layer for rule in point.rules.values() if rule.expert is not None})
    if not isinstance(declared, dict) or set(declared) != {str(layer) for layer in layers}:
        yield "expert_bits", f"does not name layers {layers}"
        return
    for layer in layers:
        actual, listed = point.experts(layer), declared[str(layer)]
        if not isinstance(listed, list) or len(listed) != point.glm.n_routed_experts:
            yield f"layer {layer}", f"lists {_short(listed)}"
        else:
            wrong = [expert for expert, bits in actual.items() if listed[expert] != bits]
            for expert in wrong[:1]:
                what = f"declares {listed[expert]!r} for expert {expert}, it has {actual[expert]}"
                yield f"layer {layer}", what


def _storage_faults(point: Checkpoint, storage: Any) -> Iterator[tuple[str, str]]:
    modules = storage.values() if isinstance(storage, dict) else [None]
    if not all(isinstance(module, dict) and isinstance(module.get("stored_tensors"), dict) for module in modules):
        yield "tensor_storage", "is missing or malformed"
        return
    listed: dict[str, Any] = {}
    for module, block in storage.items():
        listed |= block["stored_tensors"]
        yield from ((name, f"is listed under {module}") for name in block["stored_tensors"]
                    if name.rpartition(".")[0] != module)
    yield from ((module, f"is listed as {block['quant_format']}, but is not encoded")
                for module, block in storage.items()
                if "quant_format" in block and exl3_parts(module)["trellis"] not in point.stored.tensors)
    actual = {name: {"shape": list(tensor.entry.shape), "n_bytes": tensor.entry.nbytes,
                     "dtype": str(TORCH_DTYPE[tensor.entry.dtype])}
              for name, tensor in point.stored.tensors.items() if tensor.entry.dtype in TORCH_DTYPE}
    for name in sorted(listed.keys() | actual.keys()):
        if listed.get(name) != actual.get(name):
            yield name, f"is listed as {listed.get(name)}, stored as {actual.get(name)}"
    for name, bits in point.widths.items():
        module = point.rules[name].module
        facts = {"quant_format": "exl3", "bits_per_weight": bits, "mul1_multiplier": MARKERS["mul1"]}
        block = storage.get(module, {})
        found = {key: block.get(key) for key in facts}
        if found != facts:
            yield module, f"is listed as {found}, not {facts}"


def check_side_files(point: Checkpoint) -> Iterator[Finding]:
    """Every other file of the source must be there, and unchanged unless the report says so.

    Without the source nobody knows them, but for the tokenizer, without which no job can be begun.
    """
    if point.reference is None:
        missing = [TOKENIZER] if not (point.root / TOKENIZER).is_file() else []
        yield from broken("side-files", ((name, "is missing") for name in missing))
        return
    declared = _names(point.report.get("changed_files"))
    root = point.reference.root
    pairs = {path.relative_to(root).as_posix(): path for path in point.reference.side_files()}
    missing = [name for name in pairs if not (point.root / name).is_file()]
    yield from broken("side-files", ((name, "is missing") for name in missing))
    yield from broken("side-bytes", ((name, "differs") for name, path in pairs.items()
                                     if name not in missing and name not in declared
                                     and sha256_file(point.root / name) != sha256_file(path)))


def check_source_names(point: Checkpoint) -> Iterator[Finding]:
    """The table of names decides which tensors of the source may be absent; the report declares them."""
    if point.reference is None or point.glm is None:
        return
    found = {name: (t.entry.dtype, t.entry.shape) for name, t in point.reference.tensors.items()}
    try:
        dropped = set(match_source(point.glm, found))
    except SourceError as error:
        yield from broken("source-names", [("the reference", f"does not fit ({error})")])
        return
    kept = {rule.source for rule in point.rules.values() if (
        exl3_parts(rule.module)["trellis"] if rule.quantized else rule.name) in point.stored.tensors}
    lost = sorted(found.keys() - kept - dropped)
    yield from broken("source-names", ((name, "is lost") for name in lost))
    if point.report:
        undeclared = sorted(dropped ^ set(_names(point.report.get("dropped"))))
        yield from broken("report-names", ((name, "is wrongly declared or not") for name in undeclared))


def _names(value: Any) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def check_report(point: Checkpoint) -> Iterator[Finding]:
    """The assembly report against the shapes and the files; with `deep`, also every shard's SHA-256."""
    report = point.report
    if fault := misfit(report, load_schema(REPORT)):
        yield from broken("report-file", [(REPORT, f"does not fit its schema: {fault}")])
        return
    mean = point.mean(_routed(point))
    total = {str(bits): count for bits, count in sorted(width_histogram(point).items())}
    claims = {"routed_mean_bits": None if mean is None else float(mean), "routed_mean_bits_exact": str(mean),
              "widths_total": total, "widths_by_layer": _by_layer(point)} | _fixed_widths(point)
    yield from broken("report-widths", ((key, f"is {_short(report[key])}, the shapes give {_short(value)}")
                                        for key, value in claims.items() if report[key] != value))
    yield from broken("report-shards", _shard_faults(point, report))
    digest = recipe_digest(report["recipe"])
    if report["recipe_sha256"] != digest:
        yield from broken("report-recipe", [("recipe", f"has {digest}, recorded is {report['recipe_sha256']}")])
    yield from broken("report-configs", _config_faults(point, report))
    carried = {rule.name for rule in point.rules.values() if not rule.quantized}
    odd = sorted(carried ^ set(_names(report["carried_identical"])))
    yield from broken("report-names", ((name, "is wrongly declared carried or not") for name in odd))


def _fixed_widths(point: Checkpoint) -> dict[str, int]:
    """The width of MTP experts and of dense linears, where all have the same: mixed ones have rules of their own."""
    found = {"mtp_bits": set(), "dense_bits": {PLAIN_BITS} if point.profile == "bf16-rest" else set()}
    for name, bits in point.widths.items():
        if key := {Role.MTP_EXPERT: "mtp_bits", Role.DENSE: "dense_bits"}.get(point.rules[name].role):
            found[key].add(bits)
    return {key: widths.pop() for key, widths in found.items() if len(widths) == 1}


def width_histogram(point: Checkpoint) -> Counter[int]:
    """Number of routed experts by width, judged by their down projections."""
    return sum(_histograms(point).values(), Counter())


def _by_layer(point: Checkpoint) -> dict[str, dict[str, int]]:
    """The histogram of each layer, as reports have it."""
    return {str(layer): {str(bits): count for bits, count in found.items()}
            for layer, found in _histograms(point).items()}


def _histograms(point: Checkpoint) -> dict[int, Counter[int]]:
    found: dict[int, Counter[int]] = {}
    for name, bits in point.widths.items():
        rule = point.rules[name]
        if rule.role is Role.EXPERT and rule.projection == "down_proj":
            found.setdefault(rule.layer, Counter())[bits] += 1
    return found


def _shard_faults(point: Checkpoint, report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    claims = {shard["file"]: shard for shard in report["shards"]}
    actual = {shard.path.name: shard for shard in point.stored.shards}
    for file in sorted(claims.keys() ^ actual.keys()):
        yield file, "is only in the report" if file in claims else "is only on disk"
    common = sorted(claims.keys() & actual.keys())
    odd = [file for file in common if claims[file]["bytes"] != actual[file].size]
    for file in odd:
        yield file, f"has {actual[file].size} bytes, reported are {claims[file]['bytes']}"
    for file in common:
        if claims[file]["tensors"] != len(actual[file].entries):
            yield file, f"has {len(actual[file].entries)} tensors, reported are {claims[file]['tensors']}"
    total = sum(shard.size for shard in actual.values())
    if report["total_bytes"] != total:
        yield "total_bytes", f"is {report['total_bytes']}, the shards have {total}"
    for step in point.progress.walk("hash", [file for file in common if point.deep and file not in odd]):
        if sha256_file(actual[step.unit].path) != claims[step.unit]["sha256"]:
            yield step.unit, "has another SHA-256"


def _config_faults(point: Checkpoint, report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Without the source nothing else tells of a changed rope_theta; older reports record no configs."""
    for file in sorted(set(CONFIGS) - set(_names(report.get("changed_files")))):
        recorded, path = report.get("configs", {}).get(file), point.root / file
        if recorded and path.is_file() and sha256_file(path) != recorded:
            yield file, "has another"


def check_recipe(point: Checkpoint) -> Iterator[Finding]:
    """What was asked for, when the caller knows it."""
    if point.recipe is None:
        return
    recipe = point.recipe
    odd = sorted(set(width_histogram(point)) - set(recipe.experts.widths))
    mean = point.mean(_routed(point))
    facts = {"expert widths outside the recipe": (odd, []), "mean bits": (mean, recipe.experts.budget),
             "profile": (point.profile, recipe.output.profile),
             "dense_bits": (point.quantization.get("dense_bits"), recipe.dense_bits),
             "mtp_bits": (point.quantization.get("mtp_bits"), recipe.mtp.bits),
             "shards": (len(set(point.weight_map.values())), recipe.output.shards)}
    wrong = {key: pair for key, pair in facts.items() if pair[0] != pair[1]}
    yield from broken("recipe", ((key, f"is {pair[0]}, asked was {pair[1]}") for key, pair in wrong.items()))
