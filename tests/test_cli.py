"""The command line as a user meets it: exit codes, one message on stderr, no traceback."""

import json
import os
import signal
import subprocess
import sys

import pytest
from small import recipe_file

from keys35 import __version__, errors
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
        (["check", MODEL, "--sample", "3"], 2, "give --reference"),
        (["validate", MODEL, "--reference", MODEL], errors.ContractError.exit_code, "KEYS35_ASSEMBLY_REPORT"),
        (["plan", MODEL, "--recip", "demo"], 2, "--recip"),
        (["plan", MODEL], 2, "--recipe"),
        (["demo", "--work", "/no/such/work", "--table", MODEL / "config.json"], 5, "lacks the marks"),
        (["demo", "--work", "/no/such/work", "--table", MODEL / "model-00001-of-00002.safetensors"], 5, "is not UTF-8"),
        (["ablate", MODEL, "--recipe", "demo", "--work", "/no/such/work", "--table", "t.json"], 2, "give a .md file"),
        (["ablate", MODEL, "--recipe", "demo", "--work", "/no/such/work", "--table", "/"], 2, "/ is a folder"),
        (["generate", MODEL, "Once", "--device", "gpu"], 2, "--device"),
        (["bench", MODEL, "--dtype", "fp16"], 2, "--dtype"),
        (["validate", MODEL, "--reference", MODEL, "--device", "cpu"], 2, "--panel"),
        (["plan", MODEL, "--recipe", "demo", "--tp", "3"], errors.PlanError.exit_code, "can have 1, 2, 4 ranks"),
    ],
)
def test_refusals(arguments, code, words):
    done = keys35(*arguments)
    assert done.returncode == code, done
    assert words in done.stderr and "Traceback" not in done.stderr + done.stdout


@pytest.mark.parametrize("allocate", [
    "torch.empty(1 << 60)",
    "(_ for _ in ()).throw(torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB'))",
])
def test_too_little_memory_is_a_refusal(allocate):
    code = (
        "import torch\n"
        "from keys35.cli import frame\n"
        f"frame.app = lambda **_: {allocate}\n"
        "frame.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == errors.WorkerError.exit_code
    assert "out of memory (" in done.stderr and "keys35 plan" in done.stderr and "Traceback" not in done.stderr


def test_plan_prints_coverage():
    done = keys35("plan", MODEL, "--recipe", "demo")
    assert done.returncode == 0
    for words in ("routed experts", "MTP experts", "dense EXL3 linears", "carried", "7 shards"):
        assert words in done.stdout


def test_plan_says_what_run_would_refuse(tmp_path):
    """A source without its tokenizer can be planned, but not measured."""
    for file in MODEL.iterdir():
        if "tokenizer" not in file.name:
            (tmp_path / file.name).symlink_to(file)
    done = keys35("plan", tmp_path, "--recipe", "demo")
    assert done.returncode == 0 and "`run` would refuse now" in done.stdout and "tokenizer.json" in done.stdout


def test_quiet_says_nothing_but_refusals(finished):
    for arguments in (("status", "--work", finished.work), ("check", finished.out, "--deep")):
        done = keys35("--quiet", *arguments)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), arguments
    refused = keys35("--quiet", "check", MODEL)
    assert refused.stdout == "" and "quant-file" in refused.stderr and refused.returncode == 9


def test_json_is_one_document_and_events_are_lines(finished):
    done = keys35("--json", "check", finished.out, "--deep")
    report = json.loads(done.stdout)
    assert report["findings"] == [] and report["ok"] and report["routed_mean"] == "11/4"
    ticks = [json.loads(line)["progress"] for line in done.stderr.splitlines()]
    assert {tick["stage"] for tick in ticks} == {"hash", "check"} and ticks[-1]["done"] == ticks[-1]["total"] > 5
    refused = keys35("--json", "status", "--work", "/no/such/dir")
    event = json.loads(refused.stderr)
    assert refused.stdout == "" and (event["error"], event["exit_code"]) == ("ResumeError", refused.returncode)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan"], "source"),
        (["plan", MODEL], "--recipe"),
        (["plan", MODEL, "--recip", "demo"], "--recip"),
        (["no-such-command"], "no-such-command"),
        (["--no-such-option", "plan"], "--no-such-option"),
        (["bench", MODEL, "--dtype", "fp16"], "--dtype"),
    ],
)
def test_in_json_a_bad_command_line_is_a_json_line_too(arguments, words):
    done = keys35("--json", *arguments)
    event = json.loads(done.stderr)
    assert (done.stdout, done.returncode, event["exit_code"], event["error"]) == ("", 2, 2, "UsageError")
    assert words in event["message"] and "--help`" in event["message"]


@pytest.mark.parametrize("command", [["status", "--work", "w"], ["--quiet", "check", "out"],
                                     ["compare", "a", "b", "--reference", "c", "--panel", "d"]])
def test_json_asked_for_behind_a_command_is_refused_in_json(command):
    """It was refused in plain text: a program that asked for JSON could not read why it had none."""
    done = keys35(*command, "--json")
    event = json.loads(done.stderr)
    assert (done.stdout, done.returncode, event["exit_code"], event["error"]) == ("", 2, 2, "UsageError")
    name = next(word for word in command if not word.startswith("-"))
    assert event["message"] == f"--json goes before the command: keys35 --json {name}"


@pytest.mark.parametrize("mode", ["--json", "--quiet"])
def test_what_is_logged_or_warned_of_is_an_event_too(mode):
    """stderr is JSON lines in one mode, and refusals only in the other."""
    code = (
        "import logging, warnings\n"
        "import keys35.recipe\n"
        "from keys35.cli import main\n"
        "from keys35.errors import RecipeError\n"
        "def load(name):\n"
        "    logging.getLogger('keys35.engine.pool').warning('worker %s is gone', 'a:1')\n"
        "    warnings.warn('divided by zero')\n"
        "    raise RecipeError('no')\n"
        "keys35.recipe.load_recipe = load\n"
        "main()\n"
    )
    command = [sys.executable, "-c", code, mode, "plan", str(MODEL), "--recipe", "demo"]
    lines = subprocess.run(command, capture_output=True, text=True).stderr.splitlines()
    if mode == "--quiet":
        assert lines == ["keys35: no"]
        return
    first, second, last = map(json.loads, lines)
    assert first == {"warning": "worker a:1 is gone"} and "divided by zero" in second["warning"]
    assert last["error"] == "RecipeError"


def test_the_version_is_said_in_both_ways():
    assert keys35("--version").stdout == f"keys35 {__version__}\n"
    assert json.loads(keys35("--json", "--version").stdout) == {"version": __version__}


def test_an_interrupt_says_how_to_go_on(source, small, tmp_path):
    recipe = recipe_file(tmp_path / "r.toml", small)
    command = [sys.executable, "-m", "keys35.cli", "--json", "measure", source, "--recipe", recipe]
    pipes = {"stderr": subprocess.PIPE, "text": True}
    pipes["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it
    with subprocess.Popen([*command, "--work", tmp_path / "work"], **pipes) as running:
        for line in running.stderr:
            if json.loads(line).get("progress", {}).get("done"):
                running.send_signal(signal.SIGINT)
                break
        last = json.loads(running.stderr.read().splitlines()[-1])
        assert running.wait(30) == 130 == last["exit_code"] and "goes on from there" in last["message"]
        assert last["error"] == "KeyboardInterrupt"


@pytest.mark.parametrize("mode", ["--json", "--quiet"])
def test_an_interrupt_outside_of_progress_is_answered_too(mode):
    """A recipe is read before anything shows itself; for people it was a silent exit."""
    code = (
        "import os, signal, time\n"
        "import keys35.recipe\n"
        "from keys35.cli import main\n"
        "keys35.recipe.load_recipe = lambda name: (os.kill(os.getpid(), signal.SIGINT), time.sleep(9))\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "main()\n"
    )
    command = [sys.executable, "-c", code, mode, "plan", str(MODEL), "--recipe", "demo"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.stdout, done.returncode, done.stderr.count("\n")) == ("", 130, 1)
    words = done.stderr.removeprefix("keys35: ").strip()
    if mode == "--json":
        event = json.loads(words)
        assert (event["exit_code"], event["error"]) == (130, "KeyboardInterrupt")
        words = event["message"]
    assert words == "interrupted; what is finished is kept, the same command goes on from there"


@pytest.mark.parametrize("swallowed", [False, True])
@pytest.mark.parametrize("module", ["rich.console", "keys35.stages.plan"])
@pytest.mark.parametrize("json_mode", [False, True])
def test_an_interrupt_of_an_import_is_answered_too(module, swallowed, json_mode):
    """Before a command is known it was a traceback; behind that torch swallowed it where it imports numpy itself."""
    code = (
        "import os, signal, sys, time\n"
        "class Slow:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        "            try:\n"
        "                os.kill(os.getpid(), signal.SIGINT)\n"
        "                time.sleep(0.1)\n"
        "            except KeyboardInterrupt:\n"
        f"                if not {swallowed}:\n"
        "                    raise\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.meta_path.insert(0, Slow())\n"
        "from keys35.cli import main\n"
        "main()\n"
    )
    if swallowed and module == "rich.console":
        pytest.skip("nothing that is imported there swallows it")
    command = [sys.executable, "-c", code, *["--json"][:json_mode], "plan", str(MODEL), "--recipe", "demo"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.stdout, done.returncode, done.stderr.count("\n")) == ("", 130, 1), done.stderr
    words = json.loads(done.stderr)["message"] if json_mode else done.stderr.removeprefix("keys35: ").strip()
    assert words == "interrupted; what is finished is kept, the same command goes on from there"


def test_text_that_the_terminal_cannot_show_is_spelled():
    """A traceback in the place of the reply, where a locale's encoding lacks a letter."""
    command = [sys.executable, "-m", "keys35.cli", "generate", str(MODEL), "caf\u00e9", "--tokens", "2"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0 and "caf\\xe9" in done.stdout, done.stderr


def test_a_closed_stdout_is_no_fault():
    """As a service may have it."""
    command = f"{sys.executable} -m keys35.cli plan {MODEL} --recipe demo >&-"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_shell_completes_commands_and_recipes():
    def complete(words):
        environment = os.environ | {"_KEYS35_COMPLETE": "complete_bash", "COMP_WORDS": words,
                                    "COMP_CWORD": str(len(words.split()) - 1)}
        call = "import sys; sys.argv[0] = 'keys35'; from keys35.cli import main; main()"
        return subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, env=environment).stdout

    assert complete("keys35 pl").split() == ["plan"]
    assert "glm-5.3-2.75bpw" in complete("keys35 plan SOURCE --recipe gl").split()


def test_every_command_has_help_with_an_example():
    commands = "plan measure allocate quantize assemble check validate run demo status report upload fetch"
    for command in commands.split():
        done = keys35(command, "--help")
        assert done.returncode == 0 and f"Example: keys35 {command} " in done.stdout + " ", command


def test_status_of_a_finished_job(finished):
    done = keys35("status", "--work", finished.work)
    assert done.returncode == 0 and "assemble" in done.stdout and "finished" in done.stdout
    assert "layers calibrated: 3 of 3; experts measured: 4 of 4" in done.stdout


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
