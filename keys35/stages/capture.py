"""The calibration pass: windows, states carried from layer to layer, Hessians, and the rows experts are encoded on."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from keys35.calibration.statistics import SHARED_INPUT, Capture, MoeRows
from keys35.calibration.windows import WindowMaker, Windows, load_windows, save_windows, shares
from keys35.errors import SourceError
from keys35.files.atomic import load_tensors, save_tensors
from keys35.glm.mtp import mtp_inputs
from keys35.glm.names import FINAL_NORM
from keys35.glm.weights import Keep, StoredLayer, WeightStore
from keys35.stages.background import saving
from keys35.stages.dropped import SPLITS, Dropped, drop, dropped_before, facts, left, remaining
from keys35.stages.expert_encoding import LayerRows, at_hand
from keys35.stages.experts import Shelf
from keys35.stages.job import Job
from keys35.stages.needs import captured_hessians, rows_windows
from keys35.stages.room import states_home
from keys35.stages.scan import broken_tensors
from keys35.stages.spans import Spans
from keys35.stages.states import States, read_states, save_states
from keys35.stages.units import (
    CALIBRATION,
    capture_unit,
    expert_units,
    layer_name,
    load_recorded,
    recorded_entry,
    recorded_sha256,
)

HandedStates = dict[int, dict[str, States]]
"""States behind a layer, of both splits, in the memory of a driver that goes on."""
READERS = 8
REACHED = "reached"  # among a layer's kept rows: how many of all fit rows, kept or not, each expert is chosen by


def calibration_windows(job: Job) -> dict[str, Windows]:
    """The sealed fit and selection windows, made on first use; raises PlanError when there is too little text."""
    choice, work = job.recipe.calibration, job.work
    end = job.config.eos_token_ids[0] if job.config.eos_token_ids else 0
    maker = WindowMaker(job.source.root / "tokenizer.json", end, choice.window, job.recipe.seed)
    folder = work.path("calibration")
    if work.receipt(CALIBRATION) is None:
        files: list[Path] = []
        for split, total in zip(SPLITS, (choice.fit_windows, choice.selection_windows), strict=True):
            made = maker.make(job.text, shares(job.text, total), split)
            files += save_windows(folder / split, made, maker.tokenizer_sha256)
        work.commit(CALIBRATION, files, {"set": job.text.name, "tokenizer_sha256": maker.tokenizer_sha256})
    windows = {}
    for split in SPLITS:
        expected = recorded_sha256(job, CALIBRATION, folder / f"{split}.safetensors")
        windows[split] = load_windows(folder / split, maker.tokenizer_sha256, expected)
        _check_vocabulary(job, windows[split])
    return windows


def _check_vocabulary(job: Job, windows: Windows) -> None:
    largest, size = int(windows.tokens.max()), job.config.vocab_size
    if largest >= size:
        raise SourceError(
            f"tokenizer.json gives token {largest}, the model's vocabulary ends at {size - 1}: "
            "it is another model's tokenizer"
        )


def capture(
    job: Job, store: WeightStore, layer: int, windows: dict[str, Windows], replay: bool = False,
    shelf: Shelf | None = None, handed: HandedStates | None = None,
) -> Callable[[], None]:
    """One layer's pass over all windows: states onward, Hessians of its linears, rows of its experts.

    The files are written in the background, and the unit is finished when they are: what is returned waits for that.
    In a replay, which makes rows again, the layer's states are kept for the next layer's replay. A shelf gets the
    rows for whoever encodes on them in this process; states that were handed are used up and replaced.
    """
    if shelf is not None:
        shelf.rows.clear()
    if layer == 0:
        _require_finite_ends(job)
    spent = Spans(job.device)
    with spent("reading"):
        weights = layer_weights(job, store, layer)
    if shelf is not None and layer in job.config.moe_layers:
        shelf.expect(job, expert_units(job, layer)[0])
    handed = {} if handed is None else handed
    captures, after, dropped = _passed(job, store, layer, weights, windows, spent, handed)
    handed.clear()  # nobody comes any more for those of a layer whose next one was found finished
    if not job.config.is_mtp(layer) and layer + 1 in job.config.layers:
        handed[layer] = after
    del weights
    with spent("writing"):
        hessians = captures["fit"].hessians()
        found = {split: rows for split in SPLITS if (rows := captures[split].moe_rows())}
        rows = _kept_rows(job, found, after["fit"].x.shape[1])
        if shelf is not None and rows:
            shelf.rows[layer] = _ready_rows(job, rows, hessians[SHARED_INPUT], windows, dropped)
    data = {"carrier": captures["fit"].carrier, "dropped": facts(dropped)}
    finish = partial(_finish, job, layer, hessians, rows, after, data, replay)
    job.work.log("captured", layer=layer, seconds=spent.facts())
    return saving(job, capture_unit(layer), "saved", finish)


def _kept_rows(job: Job, found: dict[str, MoeRows], length: int) -> dict[str, Tensor]:
    """What experts are measured on: rows of both splits, and what all fit rows reach; length: rows of a window."""
    if not found:
        return {}
    reached = found["fit"].counts(job.experts)
    if (few := rows_windows(job.recipe)) < len(found["fit"].x) // length:  # of those that were not dropped
        found["fit"] = found["fit"].spread(few, length)
    return {name: value for split, rows in found.items() for name, value in rows.tensors(split).items()} | {
        REACHED: reached}


def _passed(
    job: Job, store: WeightStore, layer: int, weights: StoredLayer, windows: dict[str, Windows], spent: Spans,
    handed: HandedStates,
) -> tuple[dict[str, Capture], dict[str, States], tuple[Dropped, ...]]:
    """The windows through a layer: what was captured, their states behind it, and which windows are left out.

    A window that the layer breaks is in the sums by then, so the others pass again without it.
    """
    dropped = dropped_before(job, layer)
    while True:
        with spent("reading"):
            before = _states_before(job, store, layer, weights, windows, dropped, handed)
            before = {split: states.to(states_home(job)) for split, states in before.items()}
        captures = {s: Capture(before[s].x.shape[0] * before[s].x.shape[1], job.states_dtype,
                               spent if s == "fit" else None, captured_hessians(job.recipe)) for s in SPLITS}
        with spent("forward"):
            after = {s: _advance(job, before.pop(s), layer, weights, captures[s], in_place=True) for s in SPLITS}
        broken = {s: after[s].broken for s in SPLITS}
        if not any(broken.values()):
            return captures, after, dropped
        dropped = drop(job, layer, windows, dropped, broken)


def _finish(
    job: Job, layer: int, hessians: dict[str, Tensor], rows: dict[str, Tensor], after: dict[str, States],
    data: dict[str, object], replay: bool,
) -> None:
    """Save what a pass leaves, declare it done, and drop the states that nothing needs any more."""
    files, rows_sha256 = _save(job, layer, hessians, rows, after)
    # The rows are not among the receipt's files: deleted once the experts are encoded.
    job.work.commit(capture_unit(layer), files, data | ({"rows_sha256": rows_sha256} if rows_sha256 else {}))
    for done in [layer - 1] if replay else [layer - 1, layer]:
        if not job.config.is_mtp(done + 1) and job.work.receipt(capture_unit(done + 1)) is not None:
            forget_states(job, done)


def layer_weights(job: Job, store: WeightStore, layer: int, experts: bool = True) -> StoredLayer:
    """A layer's weights: a GPU holds them as they are stored, a CPU reads experts when they are asked for.

    experts: whether routed ones will be, which are all but a fiftieth of a layer.
    """
    if job.device.type == "cpu":
        return store.layer(layer)
    weights = store.layer(layer, Keep.PACKED)
    weights.load(READERS, experts)
    return weights


def _advance(
    job: Job, states: States, layer: int, weights: StoredLayer, capture: Capture | None = None, in_place: bool = False
) -> States:
    return states.advance(job.config, layer, weights, job.device, job.tokens_at_once, capture, in_place)


def _save(
    job: Job, layer: int, hessians: dict[str, Tensor], rows: dict[str, Tensor], after: dict[str, States]
) -> tuple[dict[Path, str], str | None]:
    """Hessians, rows and states, side by side; the receipt's files, and the hash of the rows if there are any."""
    stored = {f"hessian.{name}": hessian for name, hessian in hessians.items()}
    with ThreadPoolExecutor(3) as pool:
        saving = {hessian_file(job, layer): pool.submit(save_tensors, hessian_file(job, layer), stored)}
        if not job.config.is_mtp(layer):
            path = _state_file(job, layer)
            saving[path] = pool.submit(save_states, path, after, next_shares(job, layer))
        saved_rows = pool.submit(save_tensors, rows_file(job, layer), rows) if rows else None
    files = {path: future.result() for path, future in saving.items()}
    return files, saved_rows.result() if saved_rows else None


def _require_finite_ends(job: Job) -> None:
    """Refuse a broken embedding, final norm or head at once: no layer's states would show the last two."""
    names = [rule.source for rule in job.rules.values() if rule.layer is None]
    broken = "\n  ".join(str(item) for item in broken_tensors(job.source, names))
    if broken:
        raise SourceError(f"{job.source.root} is damaged, fetch these tensors' shards again:\n  {broken}")


def forget_states(job: Job, layer: int) -> None:
    """Drop states that the next layer's replace; the receipt is renewed first so that it stays whole."""
    if has_states(job, layer):
        receipt = job.work.require(capture_unit(layer))
        keep = {hessian_file(job, layer): receipt["files"][0]["sha256"]}
        job.work.commit(capture_unit(layer), keep, receipt["data"])
    _state_file(job, layer).unlink(missing_ok=True)


def next_shares(job: Job, layer: int) -> bool:
    """Whether the next layer takes over this one's sparse selections."""
    return layer + 1 < job.config.num_hidden_layers and not job.config.has_indexer(layer + 1)


def _states_before(
    job: Job, store: WeightStore, layer: int, weights: StoredLayer | None, windows: dict[str, Windows],
    dropped: Sequence[Dropped], handed: HandedStates,
) -> dict[str, States]:
    """States that enter a layer: embeddings, the previous layer's output, or an MTP layer's joined input.

    weights: the layer's, which only an MTP layer's input needs.
    """
    kept = left(windows, dropped)
    if layer == 0:
        return {s: States.embedded(store, kept[s].tokens, job.states_dtype) for s in SPLITS}
    previous = _states_after(job, store, min(layer, job.config.num_hidden_layers) - 1, windows, dropped, handed)
    if not job.config.is_mtp(layer):
        return previous
    return {s: mtp_states(job, store, weights, previous[s], kept[s].tokens) for s in SPLITS}


def mtp_states(job: Job, store: WeightStore, weights: StoredLayer, trunk: States, tokens: Tensor) -> States:
    """What enters an MTP layer: the trunk's last states joined with the embeddings of the next of the tokens (N, W)."""
    norm, embedded = store.tensor(FINAL_NORM), States.embedded(store, tokens, job.states_dtype).x
    pairs = ([x[None].to(job.device).float() for x in pair] for pair in zip(trunk.x, embedded, strict=True))
    inputs = [mtp_inputs(job.config, weights, *pair, norm)[0].to("cpu", job.states_dtype) for pair in pairs]
    return States.start(torch.stack(inputs))


def _states_after(
    job: Job, store: WeightStore, layer: int, windows: dict[str, Windows], dropped: Sequence[Dropped],
    handed: HandedStates,
) -> dict[str, States]:
    """A layer's outgoing states without what is dropped: handed over, from disk, or made again from the last kept."""
    before = dropped_before(job, layer)
    if layer in handed:
        found = handed.pop(layer)  # a pass that begins again has them from disk
    elif has_states(job, layer):
        found = read_states(load_recorded(job, capture_unit(layer), _state_file(job, layer)), SPLITS)
    else:
        entering = _states_before(job, store, layer, None, windows, before, handed)
        weights = layer_weights(job, store, layer)  # not sooner: a GPU has room for few layers
        found = {split: _advance(job, entering[split], layer, weights) for split in SPLITS}
    gone = {(item.split, item.window) for item in dropped}
    return {s: found[s].only([place for place, window in enumerate(remaining(windows[s], s, before))
                              if (s, window) not in gone]) for s in SPLITS}


def has_states(job: Job, layer: int) -> bool:
    """Whether the states behind a layer are on disk; a file that no receipt names was about to be dropped."""
    path = _state_file(job, layer)
    return path.exists() and recorded_entry(job, job.work.receipt(capture_unit(layer)), path) is not None


def require_rows(job: Job, store: WeightStore, layer: int, windows: dict[str, Windows]) -> None:
    """Capture a layer again if the rows of its experts are gone."""
    if not rows_file(job, layer).exists():
        capture(job, store, layer, windows)()


def layer_rows(job: Job, layer: int, windows: dict[str, Windows]) -> LayerRows:
    """A captured layer's rows, ready to encode its experts on; raises ResumeError if they are gone or damaged."""
    receipt = job.work.receipt(capture_unit(layer))
    tensors = load_tensors(rows_file(job, layer), expect_sha256=receipt["data"]["rows_sha256"] if receipt else None)
    hessian = load_recorded(job, capture_unit(layer), hessian_file(job, layer))[f"hessian.{SHARED_INPUT}"]
    return _ready_rows(job, tensors, hessian, windows, dropped_before(job, layer))


def _ready_rows(
    job: Job, rows: dict[str, Tensor], hessian: Tensor, windows: dict[str, Windows], dropped: Sequence[Dropped]
) -> LayerRows:
    """What `_kept_rows` kept where the encoder will look for it; Hessian: of the input that all experts share."""
    fit, selection = (MoeRows.from_tensors(rows, split) for split in SPLITS)
    judged = windows["selection"]
    kept = remaining(judged, "selection", dropped)
    per_window = selection.x.shape[0] // len(kept)
    domain, half = (part[kept].repeat_interleave(per_window) for part in (judged.domain, judged.halves()))
    return at_hand(job, LayerRows(fit, rows[REACHED], selection, domain, half, len(job.text.domains), hessian))


def hessian_file(job: Job, layer: int) -> Path:
    """Mean x x^T of every distinct linear input of a layer."""
    return job.work.path("hessians", f"{layer_name(layer)}.safetensors")


def rows_file(job: Job, layer: int) -> Path:
    """Inputs and routing of a layer's experts, kept until they are encoded."""
    return job.work.path("rows", f"{layer_name(layer)}.safetensors")


def _state_file(job: Job, layer: int) -> Path:
    return job.work.path("states", f"{layer_name(layer)}.safetensors")
