"""The documents against the code: commands parse, small ones run, tables are the model's, links lead somewhere."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from pydantic_core import PydanticUndefined

from keys35.bench.standin import GLM_5_3
from keys35.cli import app
from keys35.glm.config import GlmConfig
from keys35.glm.names import census
from keys35.recipe import Recipe, load_recipe
from keys35.stages.contract import RULES
from keys35.stages.engines import PROOF
from keys35.stages.needs import (
    device_bytes,
    host_bytes,
    largest_rows,
    prefix_bytes,
    rows_bytes,
    states_bytes,
    work_parts,
)
from keys35.stages.profile import profile_costs
from keys35.stages.projection import projected
from keys35.stages.sizes import class_sizes
from keys35.stages.variants import vary

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
CHEAP = {"plan", "status", "check", "report"}  # run as written where the paths they name exist


def blocks(page: Path, language: str) -> Iterator[str]:
    yield from re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


def keys35_lines() -> list[tuple[str, list[str]]]:
    """Every keys35 command line of every sh block, as (page, arguments)."""
    found = []
    for page in PAGES:
        for block in blocks(page, "sh"):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words and words[0].rpartition("/")[2] == "keys35":
                    found.append((page.relative_to(ROOT).as_posix(), words[1:]))
    return found


LINES = keys35_lines()


@pytest.mark.parametrize(("page", "words"), LINES, ids=[f"{page}: {' '.join(words)}" for page, words in LINES])
def test_commands_parse(page: str, words: list[str]) -> None:
    """Sub-command, every flag and every value, by the real parser, without running the command."""
    command = typer.main.get_command(app).commands[words[0]]
    with command.make_context(words[0], list(words[1:])) as context:
        assert all(context.params[p.name] is not None for p in command.params if p.required)


def inline_commands() -> set[tuple[str, str]]:
    """`keys35 word ...` in running text: page and the whole command."""
    return {(page.relative_to(ROOT).as_posix(), text) for page in PAGES
            for text in re.findall(r"`(keys35 [a-z][^`]*)`", page.read_text())}


def test_commands_in_running_text_exist() -> None:
    commands = typer.main.get_command(app).commands
    for page, text in sorted(inline_commands()):
        words = text.split()
        assert words[1] in commands, f"{page}: {text}"
        legal = {option for parameter in commands[words[1]].params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= legal, f"{page}: {text}"


def test_cheap_commands_run(finished, tmp_path: Path) -> None:
    """The same words, with the demo's directories replaced by a small finished job's."""
    here = {"build/demo/out": finished.out, "try/out": finished.out, "build/demo/work": finished.work,
            "try/work": finished.work}
    ran = set()
    for _, words in LINES:
        if words[0] not in CHEAP or any(word.startswith(("/models", "/scratch")) for word in words):
            continue
        given = [str(here.get(word, word)) for word in words]
        if finished.out.as_posix() in given:
            given = [str(finished.source) if word == "keys35/demo/model" else word for word in given]
        environment = os.environ | {"NO_COLOR": "1"}
        command = [sys.executable, "-m", "keys35.cli", *given]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
        expected = 9 if "exllamav3" in given or "vllm-exl3" in given else 0
        assert done.returncode == expected, f"{given}: {done.stdout}{done.stderr}"
        ran.add(words[0])
    assert {"plan", "status", "check"} <= ran


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        there = (page.parent / file).resolve() if file else page
        assert there.exists(), f"{page.name}: {target}"
        if anchor:
            titles = re.findall(r"^#+ (.+)$", there.read_text(), re.M)
            assert anchor in {re.sub(r"[^a-z0-9 -]", "", t.lower()).replace(" ", "-") for t in titles}, target


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_files_and_modules_that_are_named_exist(page: Path) -> None:
    text = page.read_text()
    for path in re.findall(r"`((?:recipes|calibration|reports|keys35|docs|tests)/[\w./-]*\w)`", text):
        assert (ROOT / path).exists() or (ROOT / "keys35" / path).exists(), f"{page.name}: {path}"
    for module in re.findall(r"python -m (keys35[\w.]*)", text):
        assert (ROOT / (module.replace(".", "/") + ".py")).exists(), f"{page.name}: {module}"


def test_recipes_in_the_documents_are_legal(tmp_path: Path) -> None:
    for page in PAGES:
        for block in blocks(page, "toml"):
            path = tmp_path / "r.toml"
            path.write_text(block)
            load_recipe(path)


def reported(name: str) -> dict:
    return json.loads((ROOT / f"reports/benchmarks/{name}.json").read_text())


def test_figures_in_running_text_are_the_benchmarks() -> None:
    demo, encoder, assembly = reported("demo-h200")["seconds"], reported("encoder-h200"), reported("assembly-cpu")
    runtime, hours = reported("runtime-h200"), encoder["projection"]
    rate = max(runtime["reconstruct"]["variants"].values(), key=lambda one: one["gbs"])
    peak = max(case["ours_peak_bytes"] for case in encoder["end_to_end"].values())
    decode = [case["decode_gws"] for case in encoder["decoding"].values()]
    for page, words in (
        ("README.md", f"took {demo['again']:.0f} s, {demo['first']:.0f} the first time"),
        ("docs/glm-5.3.md", f"One H200 does {hours['layer_mws']:.1f} Mweights/s"),
        ("docs/glm-5.3.md", f"{hours['one_width_gpu_hours']:.1f} hours for one width"),
        ("docs/glm-5.3.md", f"({encoder['compile_on_a_bare_machine']['seconds']:.0f} s on a bare machine;"),
        ("docs/glm-5.3.md", f"at most {peak / 2**30:.1f} GiB of the GPU"),
        ("docs/glm-5.3.md", f"at {min(decode):.0f} to {max(decode):.0f} Gweights/s"),
        ("docs/glm-5.3.md", f"{assembly['all']['seconds']:.0f} s, {assembly['all']['mb_s']:.0f} MB/s"),
        ("docs/glm-5.3.md", f"with {assembly['peak_rss_bytes'] / 2**30:.1f} GiB of memory"),
        ("docs/runtime.md", f"{rate['gbs']:,.0f} | {100 * rate['of_copy']:.0f} % |"),
        ("docs/runtime.md", f"A copy moves {runtime['copy_gbs']:,.0f} GB/s"),
    ):
        assert words in " ".join((ROOT / page).read_text().split()), f"{page}: {words}"


def test_the_hours_of_glm_5_3_are_the_projections() -> None:
    """Of the shipped recipe, and of the other ways to make the same checkpoint."""
    config, recipe = GlmConfig.from_dict(GLM_5_3), load_recipe("glm-5.3-2.75bpw")
    page, readme = (" ".join((ROOT / name).read_text().split()) for name in ("docs/glm-5.3.md", "README.md"))
    for measure in ("predicted", "encoded"):
        for prefix in ("quantized", "source"):
            changes = {"experts.measure": measure, "encoder.prefix": prefix}
            found = projected(config, vary(recipe, changes))
            hours = found.gpu_hours, found.wall_hours[8]
            assert f'| `"{measure}"` | `"{prefix}"` | {hours[0]:.1f} h | {hours[1]:.1f} h |' in page
            if vary(recipe, changes) == recipe:
                assert f"takes {hours[0]:.1f} GPU-hours" in page
                assert f"{hours[0]:.1f} GPU-hours for GLM-5.3, {hours[1]:.1f} hours on eight" in readme
    layer = reported("prefix-layer-h200")
    assert f"takes {layer['layer_seconds']:.0f} s, {layer['stages']['measure']:.0f} of them" in readme


FOREIGN = {"destination K-words 64 vs checkpoint K-words 48", "no split rule"}  # what other tools say


def test_messages_in_troubleshooting_are_keys35s() -> None:
    """Every quoted heading is text of an error message, but for numbers and names that it fills in."""
    code = "".join(path.read_text() for path in (ROOT / "keys35").rglob("*.py"))
    code = re.sub(r'"\s*\n\s*f?"', "", re.sub(r"\{[^{}]*\}", "#", code))
    headings = re.findall(r'^\*\*((?:"[^"]+"(?:, )?)+)', (ROOT / "docs/troubleshooting.md").read_text(), re.M)
    quoted = {text for heading in headings for text in re.findall(r'"([^"]+)"', heading)} - FOREIGN
    assert len(quoted) > 8
    for text in quoted:
        assert re.sub(r"\b\d+\b", "#", text) in code, text


def recipe_keys() -> list[list[str]]:
    """Key, default and meaning of everything a recipe may hold, from the model itself."""
    rows = []
    for name, field in Recipe.model_fields.items():
        inner = getattr(field.annotation, "model_fields", None)
        for key, leaf in (inner or {"": field}).items():
            default = "required" if leaf.default is PydanticUndefined else f"`{toml(leaf.default)}`"
            assert leaf.description, f"{name}.{key} has no description"
            rows.append([f"`{name}.{key}`" if inner else f"`{name}`", default, leaf.description])
    return rows


def toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)) if isinstance(value, tuple) else f'"{value}"' if isinstance(value, str) else str(value)


def rule_rows() -> list[list[str]]:
    return [[f"`{name}`", rule.says, ", ".join(rule.engines).replace(PROOF, "the reports") + " *" * (not rule.contract)]
            for name, rule in RULES.items()]


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


TABLES = {
    ("recipe.md", "keys"): (["key", "default", "meaning"], recipe_keys),
    ("format.md", "rules"): (["rule", "what must hold", "who refuses or misreads it (* only a wish)"], rule_rows),
}


@pytest.mark.parametrize(("page", "name"), TABLES)
def test_tables_are_the_codes(page: str, name: str) -> None:
    """KEYS35_WRITE_DOCS=1 writes them anew."""
    path = ROOT / "docs" / page
    head, rows = TABLES[page, name]
    fence = rf"(<!-- {name}: [^\n]*-->\n)(.*?)(\n<!-- /{name} -->)"
    start, body, end = re.search(fence, path.read_text(), re.S).groups()
    wanted = table(head, rows())
    if os.environ.get("KEYS35_WRITE_DOCS"):
        path.write_text(path.read_text().replace(start + body + end, start + wanted + end))
        body = wanted
    assert body == wanted


def test_the_numbers_of_glm_5_3_are_the_plans() -> None:
    config, recipe = GlmConfig.from_dict(GLM_5_3), load_recipe("glm-5.3-2.75bpw")
    rules = census(config)
    nbytes = {rule.source: rule.nbytes for rule in rules.values()}
    page = (ROOT / "docs/glm-5.3.md").read_text()
    body = re.search(r"<!-- plan -->(.*?)<!-- /plan -->", page, re.S).group(1)
    costs = {cost.name: cost for cost in profile_costs(rules, config, recipe, nbytes, 4)}
    sizes = {tp: class_sizes(rules.values(), recipe, nbytes, tp) for tp in (4, 8)}
    wanted = [sum(s.source_bytes for s in sizes[4]), *(cost.output_bytes for cost in costs.values())]
    wanted += [sum(s.rank_bytes for s in sizes[tp]) for tp in (4, 8)]
    listed = list(rules.values())
    wanted += [sum(work_parts(listed, config, recipe, keep).values()) for keep in ("all", "errors")]
    host, device = host_bytes(max(nbytes.values()), config, recipe), device_bytes(config, recipe)
    rows = largest_rows(config, recipe)
    wanted += [host, device, rows, host + device + rows, sum(prefix_bytes(config, recipe))]
    wanted += [2 * (states_bytes(config, recipe) + rows_bytes(config, recipe))]
    for number in wanted:
        assert f"{number:,}" in body
    for name, gigabytes in re.findall(r"^\| `(per-expert|uniform-layer|bf16-rest)` .*?([\d.]+) GB",
                                      (ROOT / "docs/recipe.md").read_text(), re.M):
        assert float(gigabytes) == round(costs[name].output_bytes / 1e9, 1)
