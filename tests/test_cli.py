"""The command line as a user meets it: exit codes, one message on stderr, no traceback."""

import os
import subprocess
import sys

import pytest
from small import recipe_file

from keys35 import errors
from keys35.demo import MODEL


def keys35(*arguments):
    environment = os.environ | {"NO_COLOR": "1", "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-m", "keys35.cli", *map(str, arguments)], capture_output=True, text=True, env=environment
    )


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["plan", MODEL, "--recipe", "no-such"], errors.RecipeError.exit_code, "no recipe at 'no-such'"),
        (["plan", "/no/such/dir", "--recipe", "demo"], errors.SourceError.exit_code, "/no/such/dir"),
        (["allocate", "--work", "/no/such/dir"], errors.ResumeError.exit_code, "holds no keys35 job"),
        (["status", "--work", "/no/such/dir"], errors.ResumeError.exit_code, "/no/such/dir"),
        (["check", MODEL], errors.ContractError.exit_code, "breaks"),
        (["validate", MODEL, "--reference", MODEL], errors.ContractError.exit_code, "KEYS35_ASSEMBLY_REPORT"),
        (["plan", MODEL, "--recip", "demo"], 2, "--recip"),
        (["plan", MODEL], 2, "--recipe"),
    ],
)
def test_refusals(arguments, code, words):
    done = keys35(*arguments)
    assert done.returncode == code, done
    assert words in done.stderr and "Traceback" not in done.stderr + done.stdout


def test_plan_prints_coverage():
    done = keys35("plan", MODEL, "--recipe", "demo")
    assert done.returncode == 0
    for words in ("routed experts", "MTP experts", "dense EXL3 linears", "carried", "7 shards"):
        assert words in done.stdout


def test_every_command_has_help_with_an_example():
    commands = "plan measure allocate quantize assemble check validate run demo status report"
    for command in commands.split():
        done = keys35(command, "--help")
        assert done.returncode == 0 and f"Example: keys35 {command} " in done.stdout + " ", command


def test_status_of_a_finished_job(finished):
    done = keys35("status", "--work", finished.work)
    assert done.returncode == 0 and "assemble" in done.stdout and "finished" in done.stdout


def test_a_second_driver_is_refused(finished, tmp_path):
    from keys35.stages.job import resume_job

    with resume_job(finished.work):
        done = keys35("allocate", "--work", finished.work)
    assert done.returncode == errors.ResumeError.exit_code and str(os.getpid()) in done.stderr


def test_stages_out_of_order_are_refused(source, small, tmp_path):
    from keys35.stages.job import open_job

    with open_job(source, small, tmp_path / "work"):
        pass
    for command, words in (("allocate", "not measured yet"), ("quantize", "nothing is allocated yet")):
        done = keys35(command, "--work", tmp_path / "work")
        assert done.returncode == errors.ResumeError.exit_code and words in done.stderr


def test_recipe_survives_toml(small, tmp_path):
    from keys35.recipe import load_recipe

    assert load_recipe(recipe_file(tmp_path / "r.toml", small)) == small


def test_nothing_on_the_cpu_path_imports_the_peer():
    code = (
        "import sys, pkgutil, importlib, keys35\n"
        "for module in pkgutil.walk_packages(keys35.__path__, 'keys35.'):\n"
        "    if not {'peer', 'cuda', 'gpu', 'bench', 'cli', 'read_shapes'} & set(module.name.split('.')):\n"
        "        importlib.import_module(module.name)\n"
        "assert 'exllamav3' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
