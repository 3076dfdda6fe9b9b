"""HyperOptArgumentParser: argparse that knows what a search tries, and the values of a trial on their way."""

from __future__ import annotations

import argparse
import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lockstep
from lockstep.extensions.search import parser as module
from lockstep.extensions.search.parser import HyperOptArgumentParser, Hyperparameters
from lockstep.ground.errors import MisconfigurationException


def of_the_page(**settings: Any) -> HyperOptArgumentParser:
    parser = HyperOptArgumentParser(add_help=False, **settings)
    parser.opt_list("--learning_rate", default=0.001, type=float, options=[1e-3, 1e-2, 1e-1], tunable=True)
    parser.opt_list("--layers", default=1, type=float, options=[16, 32, 64], tunable=True)
    return parser


def test_the_page_of_2019_gives_its_nine_trials() -> None:
    trials = list(of_the_page(strategy="grid_search").parse_args([]).trials(9))
    assert [(trial.learning_rate, trial.layers) for trial in trials] == [
        (rate, layers) for rate in (1e-3, 1e-2, 1e-1) for layers in (16.0, 32.0, 64.0)
    ]
    assert all(type(trial.layers) is float for trial in trials)  # options pass through `type`
    assert [trial.trial_number for trial in trials] == list(range(9))


def test_lockstep_exports_it() -> None:
    assert lockstep.HyperOptArgumentParser is HyperOptArgumentParser


def test_vars_hold_the_options_alone() -> None:
    hparams = of_the_page().parse_args(["--layers", "2"])
    assert vars(hparams) == {"learning_rate": 0.001, "layers": 2.0}
    assert hparams == argparse.Namespace(learning_rate=0.001, layers=2.0)


def test_trials_are_made_one_after_another() -> None:
    parser = HyperOptArgumentParser()
    for name in "abcdefghi":
        parser.opt_list(f"--{name}", options=range(10), type=int, tunable=True)
    trials = parser.parse_args([]).trials()
    assert [next(trials).i for _ in range(3)] == [0, 1, 2]


def test_an_option_that_is_not_tunable_keeps_its_value() -> None:
    parser = of_the_page()
    parser.opt_list("--depth", default=3, type=int, options=[1, 2])
    parser.opt_range("--drop", default=0.5, type=float, low=0, high=1)
    parser.add_argument("--name", default="x")
    assert {(trial.depth, trial.drop, trial.name) for trial in parser.parse_args(["--name", "y"]).trials(9)} == {
        (3, 0.5, "y")
    }


def test_names_that_scripts_for_test_tube_use() -> None:
    parser = HyperOptArgumentParser(strategy="random_search")
    parser.add_opt_argument_list("--a", default=1, type=int, help="x", options=[1, 2], tunable=True)
    parser.add_opt_argument_range("--b", default=1.0, type=float, low=0.0, high=1.0, nb_samples=5, tunable=True)
    trials = parser.parse_args([]).generate_trials(4)
    assert len(trials) == 4
    assert all(trial.a in (1, 2) and 0 <= trial.b <= 1 for trial in trials)


def test_a_models_own_arguments_come_by_parents() -> None:
    """The template of 2019: `add_model_specific_args(parent_parser)`."""
    parent = of_the_page(strategy="random_search")
    parser = HyperOptArgumentParser(strategy=parent.strategy, add_help=False, parents=[parent])
    parser.opt_list("--drop", default=0.1, type=float, options=[0.1, 0.2], tunable=True)
    assert parser.parse_args([])._search.space.size == 18  # type: ignore[union-attr]


def test_a_later_option_takes_the_place_of_one_where_conflicts_are_resolved() -> None:
    parser = HyperOptArgumentParser(conflict_handler="resolve")
    parser.opt_list("--lr", default=1.0, type=float, options=[1, 2], tunable=True)
    parser.opt_list("--layers", default=1, type=int, options=[1, 2], tunable=True)
    parser.add_argument("--lr", default=7.0, type=float)
    assert [(trial.lr, trial.layers) for trial in parser.parse_args([]).trials()] == [(7.0, 1), (7.0, 2)]


def test_options_with_several_words() -> None:
    parser = HyperOptArgumentParser()
    parser.opt_list("--sizes", nargs="+", type=int, default=[1], options=[["1", "2"], [3]], tunable=True)
    assert [trial.sizes for trial in parser.parse_args([]).trials(2)] == [[1, 2], [3]]


# -- what is refused ------------------------------------------------------------------------------------------


def test_an_option_twice_is_refused_with_the_way_out() -> None:
    parser = of_the_page()
    with pytest.raises(argparse.ArgumentError, match=r"conflicting option string: --layers. Remove one of the two"):
        parser.opt_list("--layers", options=[1], tunable=True)


@pytest.mark.parametrize("name", ["trials", "values", "draw", "finish", "trial_number"])
def test_an_option_that_would_hide_a_method_is_refused(name: str) -> None:
    parser = of_the_page()
    parser.add_argument(f"--{name}")
    with pytest.raises(MisconfigurationException, match=f"the option '{name}' would hide Hyperparameters.{name}"):
        parser.parse_args([])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"strategy": "grid"}, "strategy='grid'.*pass one of 'grid_search'"),
        ({"mode": "less"}, "mode='less'"),
        ({"seed": "1"}, "seed='1'"),
        ({"sampler": object()}, "Pass the class, or a function"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(MisconfigurationException, match=said):
        HyperOptArgumentParser(**settings)


def test_a_search_without_tunable_options_is_refused() -> None:
    parser = HyperOptArgumentParser()
    parser.opt_list("--lr", options=[1, 2], type=float)
    with pytest.raises(MisconfigurationException, match="no option is tunable"):
        parser.parse_args([]).trials(2)


def test_optuna_lists_no_trials_before_they_start() -> None:
    hparams = of_the_page(strategy="optuna").parse_args([])
    assert hparams.draws_late
    with pytest.raises(MisconfigurationException, match="draws the values of a trial when it starts"):
        hparams.trials(3)


def test_without_optuna_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"strategy='optuna' needs the package `optuna`.*\[optuna\]"):
        of_the_page(strategy="optuna")


# -- values on their way --------------------------------------------------------------------------------------

VALUES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text())


@settings(max_examples=50)
@given(st.lists(VALUES, min_size=1, max_size=6), st.text())
def test_values_arrive_unchanged_with_their_types(options: list[Any], name: str) -> None:
    parser = HyperOptArgumentParser()
    parser.opt_list("--x", options=options, tunable=True)
    parser.add_argument("--name", default=name)
    hparams = parser.parse_args([])
    for trial in hparams.trials(len(options)):
        found = parser.parse_args([]).with_values(json.loads(json.dumps(trial.values())), trial.trial_number)
        assert (type(found.x), found.x, found.name) == (type(trial.x), trial.x, name)
        assert found.trial_number == trial.trial_number


def test_values_that_json_has_not_come_back_as_they_were() -> None:
    parser = HyperOptArgumentParser()
    parser.opt_list("--path", type=Path, options=["a", "b c"], default=Path("d"), tunable=True)
    parser.opt_list("--pair", options=[(1, 2), (3, 4)], tunable=True)
    parser.opt_list("--rate", type=float, options=[float("inf"), 1e-320], tunable=True)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--call", default=len)
    hparams = parser.parse_args(["--out", "there"])
    for trial in hparams.trials():
        found = parser.parse_args(["--out", "there"]).with_values(json.loads(json.dumps(trial.values())))
        assert found == trial
        assert type(found.path) is type(trial.path)
    changed = parser.parse_args([]).with_values({"out": "there"})  # not what this command line says: by its type
    assert changed.out == Path("there")


def test_copies_know_the_search_and_pickles_hold_the_options() -> None:
    parser = of_the_page()
    parser.add_argument("--lines", type=lambda text: text.split(), default="a b")
    hparams = parser.parse_args([])
    for copied in (copy.copy(hparams), copy.deepcopy(hparams)):
        assert copied == hparams
        assert len(list(copied.trials(9))) == 9
    sent = pickle.loads(pickle.dumps(next(hparams.trials(9))))
    assert isinstance(sent, Hyperparameters)
    assert (sent.layers, sent.trial_number) == (16.0, 0)
    with pytest.raises(MisconfigurationException, match="were pickled"):
        sent.trials(9)


# -- files of values ------------------------------------------------------------------------------------------


def with_config(**settings: Any) -> HyperOptArgumentParser:
    parser = of_the_page(**settings)
    parser.json_config("-c", "--config")
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--kind", choices=["a", "b"])
    return parser


@pytest.mark.parametrize(("name", "text"), [("c.json", '{"batch-size": "8", "layers": 2, "more": [1]}'),
                                            ("c.yaml", "batch_size: 8\nlayers: 2\nmore: [1]\n")])  # fmt: skip
def test_what_is_typed_wins_over_the_file_and_the_file_over_defaults(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    found = with_config().parse_args(["--config", str(tmp_path / name), "--layers", "5"])
    assert (found.batch_size, found.layers, found.learning_rate, found.more) == (8, 5.0, 0.001, [1])
    with pytest.raises(SystemExit):  # the next command line has no file, and the option is required again
        with_config().parse_args([])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read"),
        ("[1]", "must contain names with values"),
        ('{"layers": "many"}', "the value 'many' cannot be converted by type=float"),
        ('{"batch_size": 1, "kind": "c"}', "'c' is not one of 'a', 'b'"),
    ],
)
def test_a_file_that_cannot_be_is_an_error_of_the_command(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(SystemExit):
        with_config().parse_args(["-c", str(path)])
    assert said in capsys.readouterr().err.replace("\n", " ")


def test_options_that_are_short_for_config_were_read_as_files(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text('{"c": 0.25}')
    opened: list[str] = []
    parser = HyperOptArgumentParser()
    parser.json_config("--config", "--cfg")
    parser.add_argument("--c", type=float, default=1.0)
    parser.add_argument("--conf-dir", type=lambda text: opened.append(text) or text)
    parser.add_argument("command")
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    assert parser.parse_args(["--c", "0.5", "x"]).c == 0.5
    assert parser.parse_args(["--conf-dir", "y", "x"]).conf_dir == "y"
    assert opened == ["y"]  # a type is called once
    assert parser.parse_args(["--confi", str(tmp_path / "c.json"), "x"]).c == 0.25
    assert parser.parse_args(["x", "--config", "nowhere.json"]).rest == ["--config", "nowhere.json"]


def test_a_file_that_is_missing_is_an_error_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        with_config().parse_args(["--config", "nowhere.json"])
    assert "argument -c/--config" in capsys.readouterr().err
