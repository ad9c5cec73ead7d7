"""Ablations: variants change what they name and nothing else, share encodings, and resume."""

import json
from dataclasses import replace
from threading import Thread

import pytest
from small import small_recipe, small_source
from tiny import tiny_recipe

from keys35.errors import BudgetError, RecipeError, ResumeError
from keys35.files.ledger import held
from keys35.progress import Progress
from keys35.recipe import load_recipe
from keys35.stages.ablate import ablate
from keys35.stages.ablation_table import table
from keys35.stages.variants import Variant, load_variants, vary

DEFAULT = Variant("A", "default", {}, ())


def test_every_shipped_variant_is_a_legal_recipe():
    for name in ("demo", "glm-5.3-2.75bpw"):
        recipes = {v.name: v.of(load_recipe(name)) for v in load_variants(None)}
        assert len(recipes) == len(load_variants(None)) > 20
        behind = {name for name, recipe in recipes.items() if recipe.encoder.prefix == "quantized"}
        assert behind == {"quantized, every linear corrected (default)", *(f"seed {seed}" for seed in range(35, 40))}, (
            "others compare sets as they are measured")


def test_a_variant_changes_what_it_names():
    base = load_recipe("demo")
    changed = vary(base, {"calibration.shrink": 0.5, "seed": 7})
    assert (changed.calibration.shrink, changed.seed) == (0.5, 7)
    assert vary(changed, {"calibration.shrink": base.calibration.shrink, "seed": base.seed}) == base


def test_dotted_keys_without_quotes_change_no_others(tmp_path):
    """TOML reads them as tables; the section's other keys stayed behind, at their defaults."""
    (tmp_path / "v.toml").write_text("[[variant]]\ngroup = 'a'\nname = 'b'\nset = { experts.bits = 2.5, seed = 7 }\n")
    [variant] = load_variants(tmp_path / "v.toml")
    base = small_recipe()
    changed = vary(base, variant.changes)
    assert changed == vary(base, {"experts.bits": 2.5, "seed": 7}) and changed.experts.group == base.experts.group


def test_unknown_keys_and_names_are_refused(tmp_path):
    with pytest.raises(RecipeError, match="seed"):
        vary(load_recipe("demo"), {"seed.of": 0.5})
    with pytest.raises(RecipeError, match="shrinks"):
        vary(load_recipe("demo"), {"calibration.shrinks": 0.5})
    with pytest.raises(RecipeError, match="has no variant nobody: it has .*half all tokens; routed, a quarter"):
        load_variants(None, ["nobody"])  # names have commas in them
    (tmp_path / "v.toml").write_text("[[variant]]\nname = 'x'\n")
    with pytest.raises(RecipeError, match="v.toml"):
        load_variants(tmp_path / "v.toml")


@pytest.mark.parametrize("text", [
    b"[[variant]]\ngroup = 'a'\nname = 'b'\nset = 5",
    b"[[variant]]\ngroup = 'a'\nname = 'b'\nsets = 'allocation'",  # a list of letters, none of which is a set
    b"[[variant]]\ngroup = 'a'\nname = 3",
    b"[[variant]]\ngroup = 'a'\nname = 'b'\n[[variant]]\ngroup = 'a'\nname = 'b'\nset = { seed = 1 }",
    b"[[variant]]\ngroup = 'a'\nname = 'b'\nchanges = { seed = 3 }",  # it would be the recipe as it is
    b"[[variant]]\ngroup = 'a'\nname = 'b'\nsets = ['allocation', 'randm']",
    b"[[variant]]\ngroup = 'a'\nname = 'b'\nsets = ['random']",  # no row without the allocation's KL
    b"[variant]\ngroup = 'a'\nname = 'b'", b"variant = 3", b"variant = ['a']", b"# caf\xe9",
])  # fmt: skip
def test_lists_of_another_form_are_refused(tmp_path, text):
    (tmp_path / "v.toml").write_bytes(text)
    with pytest.raises(RecipeError, match=r"v\.toml: not a list of"):
        load_variants(tmp_path / "v.toml")


@pytest.mark.parametrize(("changes", "refusal", "message"), [
    ({"calibration.shrinks": 1}, RecipeError, "shrinks"),
    ({"experts.bits": 2.7}, BudgetError, "variant 'bad': 4 experts cannot have a mean of exactly 27/10"),
    ({"calibration.domains": ["nobody"]}, RecipeError, "nobody"),
    ({"panel.windows": 2}, RecipeError, "variant 'bad': all are judged on the recipe's own panel"),
])  # fmt: skip
def test_a_bad_variant_is_refused_before_the_first_is_measured(source, tmp_path, changes, refusal, message):
    work = tmp_path / "work"
    with pytest.raises(refusal, match=message):
        ablate(source, small_recipe(), [DEFAULT, Variant("A", "bad", changes, ())], work, Progress())
    assert not work.exists()


def test_a_list_that_is_no_text_is_not_shown_whole(tmp_path):
    """Its bytes were, all of them, where the refusal should say what is wrong."""
    (tmp_path / "v.toml").write_bytes(b"\x7fELF\xd0" * 9999)
    with pytest.raises(RecipeError) as caught:
        load_variants(tmp_path / "v.toml")
    assert "UnicodeDecodeError" in str(caught.value) and len(str(caught.value)) < 400 + len(str(tmp_path))


def test_shipped_variants_that_a_recipe_cannot_have_are_left_out(source, tmp_path):
    """One of them refused the whole list: widths 2 and 3 for a mean above 3, or text that the recipe's set lacks."""
    experts = {"widths": [2, 3, 4], "bits": 3.25, "group": 2}
    text = small_recipe().calibration.model_dump() | {"set": "standard"}
    found = ablate(source, small_recipe(experts=experts, calibration=text), load_variants(None), tmp_path, Progress(),
                   finished=True)
    words = table(found)
    assert "Left out: variant '2, 3': " in words and "bits = 3.25 lies outside the candidate widths [2, 3]." in words
    assert "Left out: variant 'prose only': " in words and "no domain prose" in words
    assert len(found["left_out"]) + len(found["missing"]) == len(load_variants(None)) > len(found["left_out"]) + 20
    with pytest.raises(RecipeError, match="variant '2, 3'.*lies outside"):  # asked for, there is nothing else
        ablate(source, small_recipe(experts=experts), load_variants(None, ["2, 3"]), tmp_path, Progress())
    with pytest.raises(RecipeError, match="variant 'mine'.*lies outside"):
        mine = Variant("A", "mine", {"experts.bits": 9}, ())
        ablate(source, small_recipe(experts=experts), [*load_variants(None), mine], tmp_path, Progress(), finished=True)


def test_layers_of_one_width_have_the_mean_of_their_own(tmp_path):
    """The base's, 2.75, is none that one layer can have; encodings were made under it."""
    changes = {"output.profile": "uniform-layer", "experts.bits": 3}
    found = ablate(small_source(tmp_path / "s"), small_recipe(), [Variant("A", "u", changes, ())], tmp_path / "w",
                   Progress(), finished=True)
    assert found["missing"] == ["u"] and not (tmp_path / "w").exists()


def test_a_row_of_something_else_is_none(source, tmp_path, monkeypatch):
    """Another source, text or recipe in the same place: figures of the first were shown as the second's."""
    scored = {"group": "A", "name": "default", "recipe_sha256": small_recipe().digest(), "kl": 1}
    monkeypatch.setattr("keys35.stages.ablate._score", lambda *_: scored)

    def rows(where, recipe, variant=DEFAULT, finished=True):
        result = ablate(where, recipe, [variant], tmp_path / "work", Progress(), finished)
        return len(result["variants"]), result["missing"]

    assert rows(source, small_recipe()) == (0, ["default"])
    assert rows(source, small_recipe(), finished=False) == rows(source, small_recipe()) == (1, [])
    other = small_source(tmp_path / "other", mtp=False)
    assert rows(other, small_recipe()) == (0, ["default"])
    assert rows(source, small_recipe(seed=3)) == (0, ["default"])
    assert rows(source, small_recipe(), replace(DEFAULT, sets=("allocation",))) == (0, ["default"])
    [kept] = (tmp_path / "work/rows").iterdir()
    kept.write_text("[1]")
    with pytest.raises(ResumeError, match=f"{kept.name}: it is no object; delete it and run the same command again"):
        rows(source, small_recipe())
    kept.unlink()
    text = ablate(source, small_recipe(seed=3), [DEFAULT], tmp_path / "work", Progress(), finished=True)
    assert table(text) == "No row yet of: default.\n"


def test_one_process_at_a_time_makes_the_reference(source, tmp_path, monkeypatch):
    """Of two that began together one removed the other's windows, which was told to delete them when it scored."""
    made = []

    def make(store, panel, root):
        with pytest.raises(ResumeError, match="is in use"), held(root):
            pass
        made.append(root)
        raise RuntimeError("made")

    def begin():
        with pytest.raises(RuntimeError, match="made"):
            ablate(source, small_recipe(), [DEFAULT], tmp_path, Progress())

    monkeypatch.setattr("keys35.stages.ablate.make_reference", make)
    with held(tmp_path / "reference"):
        other = Thread(target=begin)
        other.start()
        other.join(1)
        assert other.is_alive() and not made, "it waits"
    other.join(60)
    assert made == [tmp_path / "reference"]


def test_a_byte_order_mark_is_no_part_of_a_list(tmp_path):
    (tmp_path / "v.toml").write_bytes(b"\xef\xbb\xbf[[variant]]\ngroup = 'a'\nname = 'b'\n")
    assert load_variants(tmp_path / "v.toml") == [Variant("a", "b", {}, ())]


def test_a_group_is_chosen_by_its_name():
    assert {variant.group for variant in load_variants(None, ["Budget"])} == {"Budget"}


@pytest.mark.parametrize("mixes", [0, 2])
def test_seeds_without_a_random_mix_have_a_table(mixes):
    """Of widths 2 and 4 at 2.75 bits there is none: no mean over no mixes."""
    kl = {"kl": 0.1, "top1": 0.9, "ppl": 3.0, "domains": {"prose": 0.1}}
    sets = {"allocation": kl} | {f"random-{seed}": kl | {"kl": 0.2} for seed in range(mixes)}
    rows = [{"group": "Seed", "name": str(seed), "set": {"seed": seed}, "sets": sets, "panel_tokens": 9, "bytes": 9,
             "noise_floor": {"kl": 0.0}, "choice": {"basis": "experts", "correlation": 1.0}, "proxy_error": {"2": 0.1},
             "seconds": {"measure": 1.0}} for seed in range(3)]
    text = table({"variants": rows})
    assert "| 2 | 0.1000 |" in text and ("Over these 3 seeds" in text) == (mixes > 0)


@pytest.mark.slow
def test_variants_that_only_allocate_share_their_encodings_and_rows_are_kept(tmp_path):
    source, work = small_source(tmp_path / "source"), tmp_path / "work"
    variants = [DEFAULT, Variant("B", "2.5", {"experts.bits": 2.5}, ("allocation", "random"))]
    result = ablate(source, small_recipe(), variants, work, Progress())
    assert len(list(work.glob("encode-*"))) == 1
    rows = {row["name"]: row for row in result["variants"]}
    assert set(rows["2.5"]["sets"]) == {"allocation", "random-0", "random-1"}
    assert rows["2.5"]["sets"]["allocation"]["mean"] == "5/2"
    assert rows["default"]["sets"]["uniform-3"]["kl"] < rows["default"]["sets"]["allocation"]["kl"]
    before = {path: path.stat().st_mtime_ns for path in work.rglob("*.safetensors")}
    again = ablate(source, small_recipe(), variants, work, Progress(), finished=True)
    assert json.dumps(again["variants"]) == json.dumps(result["variants"])
    assert before == {path: path.stat().st_mtime_ns for path in work.rglob("*.safetensors")}
    assert "| 2.5 |" in table(again)


def test_predicted_costs_are_scored_with_what_is_encoded(tiny, tmp_path):
    """The base's widths were encoded, the variant's own then missing or damaged; so were any random mix's."""
    experts = {"widths": [3, 4], "bits": 3.25, "group": 4, "fallback": False}
    changes = {"experts.measure": "predicted", "experts.bits": 3.5}
    result = ablate(tiny.source, tiny_recipe(experts=experts), [Variant("A", "p", changes, ())], tmp_path, Progress())
    [row] = result["variants"]
    assert row["sets"]["allocation"]["mean"] == "7/2" and row["unseen"] == {}
    assert not any(name.startswith("uniform") for name in row["sets"])
    assert "| p |" in table(result)
