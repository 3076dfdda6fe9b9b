"""The text of batch scripts: golden files, quoting, and options that contradict it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.extensions.search.sbatch import (
    Batch,
    Option,
    ScriptTrials,
    module_command,
    option,
    quoted,
    text,
    to_minutes,
)
from lockstep.ground.errors import MisconfigurationException

GOLDEN = Path(__file__).parents[2] / "golden" / "sbatch"

PLAIN = Batch(name="plain", command=["/opt/python", "train.py"], folder="/home/me/project")
PAGE = Batch(
    name="name_for_squeue",
    command=["/opt/python", "/home/me/page.py"],
    folder="/home/me",
    output="/logs/name_for_squeue/trial_0007/stdout",
    error="/logs/name_for_squeue/trial_0007/stderr",
    nodes=12,
    tasks_per_node=8,
    gpus_per_node=8,
    options=[Option("ntasks-per-node", "8", "1 task per gpu")],
    commands=[
        "export NCCL_SOCKET_IFNAME=^docker0,lo",
        "export NCCL_DEBUG=INFO",
        "export MASTER_PORT=12910",
        module_command("NCCL/2.4.7-1-cuda.10.0"),
    ],
    trials=ScriptTrials("/logs/name_for_squeue", 7),
)
EVERYTHING = Batch(
    name="a job; $(touch x)",
    command=["python3", "-X", "dev", "a script.py", "--text", 'it\'s\n"so"', "--empty", ""],
    folder="/home/me/some; folder",
    output="/logs/100%% sure/trial_%4a/stdout",
    error="/dev/null",
    nodes=2,
    tasks_per_node=4,
    gpus_per_node=4,
    gpu_type="a100",
    cpus_per_task=6,
    memory_mb=64000,
    time="1-12:00:00",
    signal_minutes=10,
    email="me@example.org",
    on_fail=True,
    options=[Option("partition", "long"), Option("exclusive", None, "all\nof it"), Option("comment", 'a "b" \\ #c')],
    commands=["module purge"],
    variables={"PYTHONPATH": "/a b:/c"},
    trials=ScriptTrials("/logs/100% sure", None, 1000, 16),
)


@pytest.mark.parametrize(("name", "batch"), [("plain", PLAIN), ("everything", EVERYTHING)])
def test_scripts_are_the_golden_ones(name: str, batch: Batch) -> None:
    """LOCKSTEP_GOLDEN=write writes them anew; bash has to read them."""
    path = GOLDEN / f"{name}.sh"
    if os.environ.get("LOCKSTEP_GOLDEN") == "write":
        path.write_text(text(batch))
    assert text(batch) == path.read_text()
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True).stderr == b""


HOSTILE = [
    "a b",
    "'",
    '"',
    ";",
    "$(touch x)",
    "`touch x`",
    "two\nlines",
    "\r\n",
    "--dash",
    "",
    "\\",
    "a\x01\x7fb",
    "ä☃",
]


@pytest.mark.parametrize("word", HOSTILE)
def test_a_word_reaches_a_command_unchanged(word: str) -> None:
    said = subprocess.run(["bash", "-c", f"printf '%s' {quoted(word)}"], capture_output=True, check=True)
    assert said.stdout == word.encode()
    assert "\n" not in quoted(word)


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), min_size=20, max_size=20))
def test_any_words_reach_a_command_unchanged(words: list[str]) -> None:
    line = " ".join(map(quoted, words))
    said = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, check=True)
    assert said.stdout.decode().split("\0")[:-1] == words


def test_a_nul_in_a_word_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"'a\\x00b' contains a NUL"):
        quoted("a\0b")


def test_a_module_that_cannot_be_loaded_is_named() -> None:
    """Also where there is no command `module` at all."""
    done = subprocess.run(["bash", "-c", f"{module_command('cuda/12 beta')}\necho on"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1] == "lockstep: the module cuda/12 beta could not be loaded"


# -- options -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (Option("ntasks-per-node", "4"), r"contradicts --ntasks-per-node=8 of the script: set per_experiment_nb_gpus"),
        (Option("nodes", "2"), r"--nodes=2 of sbatch contradicts --nodes=12 .*: set per_experiment_nb_nodes"),
        (Option("ntasks", "95"), r"--ntasks=95 of sbatch, but 12 node\(s\) with 8 task\(s\) each make 96"),
        (Option("open-mode", "truncate"), r"contradicts --open-mode=append of the script: remove it"),
        (Option("no such"), r"--no such of sbatch is not a long name. Use the option.s long name"),
        (Option("comment", "two\nlines"), r"--comment='two\\nlines' cannot be written to a batch script"),
    ],
)
def test_an_option_that_cannot_be_is_refused(given: Option, said: str) -> None:
    with pytest.raises(MisconfigurationException, match=said):
        text(Batch(**{**vars(PAGE), "options": [given]}))


def test_an_option_that_says_the_same_stands_once() -> None:
    assert text(PAGE).count("--ntasks-per-node=8") == 1
    assert "# 1 task per gpu\n#SBATCH --ntasks-per-node=8\n" in text(PAGE)


def test_no_requeue_takes_the_place_of_requeue() -> None:
    made = text(Batch(**{**vars(PLAIN), "options": [Option("no-requeue")]}))
    assert "#SBATCH --no-requeue\n" in made
    assert "#SBATCH --requeue\n" not in made


def test_options_as_users_write_them() -> None:
    assert option("-p", "long") == option("--partition", "long") == Option("partition", "long")
    assert option("exclusive", True) == option("exclusive", "") == Option("exclusive")


def test_a_value_of_1_was_taken_for_true_and_lost() -> None:
    assert [option("nice", value).value for value in (1, 1.0, 0, "1")] == ["1", "1.0", "0", "1"]
    with pytest.raises(MisconfigurationException, match="exclusive=False: options of sbatch cannot be turned off"):
        option("exclusive", False)


@pytest.mark.parametrize(
    ("given", "minutes"),
    [("15", 15), (15, 15), ("15:30", 15.5), ("2:00:00", 120), ("1-12", 2160), ("1-12:30", 2190), ("x", None)],
)
def test_time_limits_in_minutes(given: str | int, minutes: float | None) -> None:
    assert to_minutes(given) == minutes
