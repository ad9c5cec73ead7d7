"""The held-out gate: what it lets pass, and which loss it names."""

from keys35.stages.baselines import gate


def scored(kl, **domains):
    return {"kl": kl, "domains": {name: {"kl": value} for name, value in domains.items()}}


def mixes(*pairs):
    return {f"random-{i}": scored((a + b) / 2, prose=a, code=b) for i, (a, b) in enumerate(pairs)}


def test_better_everywhere_passes():
    assert gate({"allocation": scored(0.07, prose=0.09, code=0.05), **mixes((0.11, 0.06), (0.12, 0.07))}) is None


def test_no_better_on_the_whole_is_named():
    warning = gate({"allocation": scored(0.09, prose=0.11, code=0.06), **mixes((0.11, 0.06), (0.12, 0.07))})
    assert "is no better than the random mixes' mean 0.0900" in warning


def test_a_domain_that_loses_is_named_even_if_the_mean_gains():
    warning = gate({"allocation": scored(0.075, prose=0.07, code=0.08), **mixes((0.11, 0.06), (0.12, 0.07))})
    assert "in domain 'code' its KL 0.0800 is worse" in warning and "prose" not in warning


def test_a_loss_within_the_noise_of_the_mixes_passes():
    assert gate({"allocation": scored(0.07, prose=0.07, code=0.066), **mixes((0.11, 0.06), (0.12, 0.07))}) is None


def test_without_mixes_there_is_nothing_to_say():
    assert gate({"allocation": scored(1.0, prose=1.0)}) is None


def test_mixes_that_cannot_be_any_other_are_no_reproach():
    """At the least width every set of widths is one: no better than the mean, and more text would not help."""
    same = scored(0.176, prose=0.2, code=0.152)
    assert gate({"allocation": same, "random-0": same, "random-1": same}) is None
