"""The calibration pass where states are gone: they are made again from the last ones that are left."""

import weakref

from tiny import tiny_recipe

from keys35.progress import Progress
from keys35.stages import capture as passes
from keys35.stages.capture import calibration_windows, capture, has_states, hessian_file
from keys35.stages.job import open_job
from keys35.stages.measure import measure


def test_a_pass_made_again_from_the_first_layer_on_holds_one_layer_at_a_time(tiny, tmp_path, monkeypatch):
    """A GPU holds a layer's weights whole: those of all the layers before it would not fit."""
    with open_job(tiny.source, tiny_recipe(), tmp_path / "work") as job:
        measure(job, Progress())
        assert [layer for layer in range(3) if has_states(job, layer)] == [2]
        before = hessian_file(job, 2).read_bytes()
        hessian_file(job, 2).unlink()
        loaded, most = weakref.WeakSet(), []
        load = passes.layer_weights

        def watched(*arguments):
            weights = load(*arguments)
            loaded.add(weights)
            most.append(len(loaded))
            return weights

        monkeypatch.setattr(passes, "layer_weights", watched)
        capture(job, job.store, 2, calibration_windows(job))()
        assert hessian_file(job, 2).read_bytes() == before
        assert len(most) == 3 and max(most) == 2, "the layer of the pass, and one of those before it"


def test_a_driver_that_goes_on_reads_no_states_back(tiny, tmp_path, monkeypatch):
    """One that was killed between two layers does, and makes the same of them."""
    read, files = passes.read_states, []

    def watched(tensors, names):
        files.append(len(tensors))
        return read(tensors, names)

    monkeypatch.setattr(passes, "read_states", watched)
    with open_job(tiny.source, tiny_recipe(), tmp_path / "goes-on") as job:
        measure(job, Progress())
        wanted = [hessian_file(job, layer).read_bytes() for layer in (1, 2)]
    assert not files
    with open_job(tiny.source, tiny_recipe(), tmp_path / "killed") as job:
        for layer in (0, 1, 2):
            capture(job, job.store, layer, calibration_windows(job))()
        assert [hessian_file(job, layer).read_bytes() for layer in (1, 2)] == wanted
    assert len(files) == 2


def test_no_states_are_kept_for_a_pass_that_does_not_come(tiny, tmp_path):
    """Those of the last layers were, beside all the copies of the model that weigh layers."""
    handed, kept = {}, []
    with open_job(tiny.source, tiny_recipe(), tmp_path / "work") as job:
        windows = calibration_windows(job)
        capture(job, job.store, 1, windows)()
        for layer in (0, 2, 3):  # as where layer 1 was found finished
            capture(job, job.store, layer, windows, handed=handed)()
            kept.append(list(handed))
    assert kept == [[0], [2], []]
