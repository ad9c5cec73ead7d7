"""GLM-5.3's names and ratios all the way through, with 64 file handles; and killed anywhere, it ends the same."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small import digest, recipe_file
from tiny import CUT_IN_FOUR, begun, tiny_recipe, tiny_source

KILLS, WORKERS = 20, 2


def command(source: Path, root: Path) -> list[str]:
    recipe = recipe_file(root / "tiny.toml", tiny_recipe())
    return [sys.executable, "-m", "keys35.cli", "run", str(source), "--recipe", str(recipe), "--work",
            str(root / "work"), "--out", str(root / "out"), "--tp", "1", "--workers", str(WORKERS)]


@pytest.mark.slow
def test_more_shards_than_handles(tmp_path: Path) -> None:
    source = tiny_source(tmp_path / "source", shards=90, **CUT_IN_FOUR)
    line = ["bash", "-c", 'ulimit -n 64 && exec "$@"', "bash", *command(source, tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True, env=os.environ | {"NO_COLOR": "1"})
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out/KEYS35_QUALITY.json").read_text())["metrics"]["kl"] > 0
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == tiny_recipe().output.shards


def kill_at_random(line: list[str], chance: random.Random, longest: float, kills: int) -> int:
    """Start the command and kill all of it after a random time, again and again; how often, when it has ended well."""
    for killed in range(kills):
        process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            assert process.wait(chance.uniform(0, longest)) == 0
            return killed
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert subprocess.run(line, stdout=subprocess.DEVNULL).returncode == 0
    return kills


@pytest.mark.slow
def test_killed_at_twenty_random_moments(tmp_path: Path) -> None:
    """kill -9 of the driver with its workers; every resume goes on, and repeats less than a unit per process."""
    source, chance = tiny_source(tmp_path / "source", **CUT_IN_FOUR), random.Random(35)
    (tmp_path / "whole").mkdir()
    started = time.monotonic()
    assert subprocess.run(command(source, tmp_path / "whole"), stdout=subprocess.DEVNULL).returncode == 0
    whole = time.monotonic() - started
    kills = runs = repeated = 0
    while kills < KILLS:
        root = tmp_path / f"killed-{runs}"
        root.mkdir()
        here = kill_at_random(command(source, root), chance, 0.6 * whole, KILLS - kills)
        assert digest(root / "out") == digest(tmp_path / "whole/out")
        units = begun(root / "work")
        again = len(units) - len(set(units))
        assert again <= here * (WORKERS + 1), "at most what each worker and the driver were doing"
        kills, runs, repeated = kills + here, runs + 1, repeated + again
    print(f"{kills} kills in {runs} runs of {len(set(units))} units with {WORKERS} workers: {repeated} begun again")
