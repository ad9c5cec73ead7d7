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
