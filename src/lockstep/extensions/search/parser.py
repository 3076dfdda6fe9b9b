"""HyperOptArgumentParser: argparse with options that a search tries values of."""

from __future__ import annotations

import argparse
import copy
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from lockstep.extensions.search.grid import (
    STRATEGIES,
    Dimension,
    Range,
    SearchSettings,
    Space,
    numbers,
    options_of,
    range_of,
    through,
)
from lockstep.extensions.search.local import TrialOutcome, Trials, dealt, run
from lockstep.extensions.search.trials import End
from lockstep.ground import plain_yaml
from lockstep.ground.errors import MisconfigurationException, missing_extra
from lockstep.launch.environment import visible_devices

if TYPE_CHECKING:
    from lockstep.extensions.search.study import StudyTrial

_running: StudyTrial | None = None
"""The trial of a study that this process plays."""


def running_trial() -> StudyTrial | None:
    """The trial of a study that this process has begun, and not ended; None: there is none."""
    return _running


# -- the values of a trial ------------------------------------------------------------------------------------


class Hyperparameters(argparse.Namespace):
    """The options of a command line, and of a trial: what `HyperOptArgumentParser.parse_args` returns.

    ``vars()`` holds the options and nothing else. Copies know the search, too; a pickled one holds the options alone.

    Attributes:
        trial_number: the number of the trial whose values these are; None before there is a trial.

    Example:
        >>> parser = HyperOptArgumentParser()
        >>> _ = parser.opt_list("--lr", default=0.1, type=float, options=[0.1, 0.2], tunable=True)
        >>> [trial.lr for trial in parser.parse_args([]).trials(2)]
        [0.1, 0.2]
    """

    __slots__ = ("_number", "_search")
    _search: SearchSettings | None
    _number: int | None

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self._search = self._number = None

    @property
    def trial_number(self) -> int | None:
        return self._number

    @property
    def drawn_late(self) -> bool:
        """Whether a trial's values are drawn when it starts, by :meth:`draw`: so with "optuna"."""
        return self._search is not None and self._search.strategy == "optuna"

    def trials(self, nb_trials: int | None = None) -> Iterator[Hyperparameters]:
        """The trials in order, each made when it is asked for; the same in every process with the same options.

        Args:
            nb_trials: at most so many; None: the whole grid.

        Raises:
            MisconfigurationException: the grid has more combinations, nothing is tunable, or the values are drawn
                late: those come from :meth:`draw`.
        """
        search = self._known_search("trials")
        if self.drawn_late:
            raise MisconfigurationException(
                "strategy='optuna' draws the values of a trial when it starts, from the results so far, and trials() "
                "lists them before: use optimize_parallel(fn, nb_trials) or SlurmCluster, or draw(number, folder)"
            )
        wanted = numbers(search.space, search.strategy, nb_trials)
        return (self._of(number, search) for number in wanted)

    def generate_trials(self, nb_trials: int | None = None) -> list[Hyperparameters]:
        """The same as a list, by test-tube's name."""
        return list(self.trials(nb_trials))

    def _of(self, number: int, search: SearchSettings) -> Hyperparameters:
        grid = search.strategy == "grid_search"
        values = search.space.at(number) if grid else search.space.drawn(search.seed, number)
        return self._with(values, number)

    def _with(self, values: Mapping[str, Any], number: int | None) -> Hyperparameters:
        found = Hyperparameters(**{**vars(self), **values})
        found._search, found._number = self._search, number
        return found

    def _known_search(self, asked: str) -> SearchSettings:
        if self._search is None:
            raise MisconfigurationException(
                f"{asked}: these hyperparameters were pickled, and know no search any more: ask what parse_args() gave"
            )
        if not self._search.space.dimensions:
            raise MisconfigurationException(
                f"{asked}: no option is tunable, so there is one trial only: add options by opt_list(..., options=[...]"
                ", tunable=True) or opt_range(..., tunable=True)"
            )
        return self._search

    # -- values as they travel -------------------------------------------------------------------------------

    def values(self) -> dict[str, Any]:
        """All options by name, as JSON holds them: what is no number, text, list or dict of such is its text."""
        return {name: _plain(value) for name, value in vars(self).items()}

    def with_values(self, values: Mapping[str, Any], number: int | None = None) -> Hyperparameters:
        """The same options with the values of a trial, as :meth:`values` gave them.

        Each value has the type that it had: it is the option of the list, or the value of this command line, that
        reads like it; or else it goes through the option's type.

        Args:
            values: of a trial.
            number: of the trial.
        """
        return self._with({name: self._restored(name, value) for name, value in values.items()}, number)

    def _restored(self, name: str, value: Any) -> Any:
        search = self._search
        dimension = None if search is None else search.space.dimensions.get(name)
        known: Iterable[Any] = () if dimension is None or isinstance(dimension, Range) else dimension.values
        text = json.dumps(value)
        for candidate in (*known, *([vars(self)[name]] if name in self else [])):
            if json.dumps(_plain(candidate)) == text:
                return candidate
        if search is not None and isinstance(value, str):
            return through(name, value, search.types.get(name))
        return value

    # -- a study ---------------------------------------------------------------------------------------------

    def draw(self, number: int, folder: Path) -> Hyperparameters:
        """The trial's hyperparameters, drawn by Optuna; asked again, the same number has the same ones.

        All ranks of a trial may call it: rank 0 draws, the others wait for it. From now on rank 0 tells every few
        seconds that the trial lives, until :meth:`finish` or the end of the process.

        Args:
            number: of the trial, which it keeps when it is started again.
            folder: of the whole search, which all nodes see; the journal is made in it.

        Raises:
            ModuleNotFoundError: Optuna is not installed.
        """
        from lockstep.extensions.search.study import start

        global _running
        search = self._known_search("draw")
        trial, values = start(search, number, Path(folder))
        if _running is not None:
            _running.rest()
        _running = trial
        return self._with(values, number)

    def finish(self, number: int, state: End, value: float | None = None) -> End:
        """Tell the study how a trial that :meth:`draw` has begun in this process ended; without a study, nothing.

        Args:
            number: of the trial.
            state: "completed", "pruned", or "failed".
            value: what the search minimizes or maximizes; None: the last value that `PruneTrial` has reported.

        Returns:
            how it is kept: "pruned", where `PruneTrial` has stopped it; "failed", where there is no value.
        """
        global _running
        if _running is None:
            return state
        ended, _running = _running.finish(number, state, value), None
        return ended

    # -- trials on this machine ------------------------------------------------------------------------------

    def optimize_parallel(
        self,
        train_function: Callable[..., object],
        nb_trials: int | None = None,
        nb_workers: int = 4,
        log_path: str | os.PathLike[str] | None = None,
    ) -> list[TrialOutcome]:
        """Run the trials on this machine, each in a process of its own; GPUs, if there are any, are shared out.

        The function travels by cloudpickle, so that the script is not run again. A trial that fails does not stop the
        others.

        Args:
            train_function: called with a trial's hyperparameters; what it returns, a number or a dict of numbers, is
                the trial's result. One with a second argument gets the trial's GPUs there, as text.
            nb_trials: at most so many; None: the whole grid.
            nb_workers: trials at a time.
            log_path: a folder for this search. What trials print and log is kept in it, and those that have completed
                there are not run again. None: nothing is kept, and trials print to this screen.

        Returns:
            how each trial ended, by number.

        Raises:
            MisconfigurationException: a number that cannot be, a function that cannot travel, or a folder with another
                search: other options, lists or ranges, another strategy or mode; or one that runs now.
            RuntimeError: all trials failed.
        """
        return self._play(train_function, nb_trials, dealt(visible_devices(), _workers(nb_workers)), log_path)

    def optimize_parallel_cpu(
        self,
        train_function: Callable[..., object],
        nb_trials: int | None = None,
        nb_workers: int = 4,
        log_path: str | os.PathLike[str] | None = None,
    ) -> list[TrialOutcome]:
        """The same without GPUs, which trials do not see."""
        return self._play(train_function, nb_trials, [""] * _workers(nb_workers), log_path)

    def optimize_parallel_gpu(
        self,
        train_function: Callable[..., object],
        gpu_ids: Sequence[str | int] | None = None,
        max_nb_trials: int | None = None,
        nb_trials: int | None = None,
        nb_workers: int | None = None,
        log_path: str | os.PathLike[str] | None = None,
    ) -> list[TrialOutcome]:
        """The same on GPUs: a trial at a time on each entry of ``gpu_ids``.

        Args:
            train_function: as for :meth:`optimize_parallel`.
            gpu_ids: of the trials that run at a time: ``["0", "1"]``, or ``["0,1", "2,3"]`` for two GPUs each; None:
                each GPU alone.
            max_nb_trials: at most so many; test-tube's name for `nb_trials`.
            nb_trials: the same.
            nb_workers: trials at a time, if fewer than entries.
            log_path: as for :meth:`optimize_parallel`.
        """
        found = visible_devices() if gpu_ids is None else [str(entry).replace(" ", "") for entry in gpu_ids]
        if not found or not all(found):
            raise MisconfigurationException(
                f"optimize_parallel_gpu(gpu_ids={gpu_ids!r}): there is no GPU to run a trial on; give gpu_ids=['0'], "
                "say, or use optimize_parallel_cpu"
            )
        wanted = max_nb_trials if nb_trials is None else nb_trials
        devices = found if nb_workers is None else found[: _workers(nb_workers)]
        return self._play(train_function, wanted, list(devices), log_path)

    def _play(
        self,
        function: Callable[..., object],
        nb_trials: int | None,
        devices: list[str | None] | list[str],
        log_path: str | os.PathLike[str] | None,
    ) -> list[TrialOutcome]:
        search = self._known_search("optimize_parallel")
        values: Iterable[tuple[int, dict[str, Any] | None]]
        if self.drawn_late:
            values = ((number, None) for number in numbers(search.space, search.strategy, nb_trials))
        else:
            values = ((trial._number or 0, trial.values()) for trial in self.trials(nb_trials))
        with ExitStack() as stack:
            if log_path is None:
                folder = Path(stack.enter_context(TemporaryDirectory(prefix="lockstep-search-")), "search")
            else:
                folder = Path(log_path).expanduser().absolute()

            def lost(number: int) -> None:
                if self.drawn_late:
                    from lockstep.extensions.search.study import StudyTrial

                    StudyTrial(search, number, folder).lose()

            keeps = log_path is not None
            trials = Trials(folder, described(self), values, keeps, list(devices), self.with_values, lost)
            return run((function, dict(vars(self)), search), trials)

    @classmethod
    def of(cls, options: Mapping[str, Any], settings: SearchSettings) -> Hyperparameters:
        """Hyperparameters with these options, of a search."""
        found = cls(**options)
        found._search = settings
        return found

    # -- copies ----------------------------------------------------------------------------------------------

    def __copy__(self) -> Hyperparameters:
        return self._with({}, self._number)

    def __deepcopy__(self, memo: dict[int, Any]) -> Hyperparameters:
        return self._with(copy.deepcopy(vars(self), memo), self._number)

    def __reduce__(self) -> tuple[Callable[..., Hyperparameters], tuple[dict[str, Any], int | None]]:
        return _unpickled, (dict(vars(self)), self._number)


def described(options: Hyperparameters) -> dict[str, Any]:
    """What a search is, by name, as JSON holds it: strategy, mode, and each option with what it may be."""
    search = options._known_search("described")
    dimensions = search.space.dimensions
    found: dict[str, Any] = {"strategy": search.strategy, "mode": search.mode, "tunable": [*dimensions]}
    for name, value in options.values().items():
        dimension = dimensions.get(name)
        found[f"option {name!r}"] = value if dimension is None else _tried(dimension, search.strategy)
    return found


def _tried(dimension: Dimension, strategy: str) -> dict[str, Any]:
    """What a tunable option may be, as JSON holds it."""
    if not isinstance(dimension, Range):
        return {"options": _plain(dimension.values)}
    points = {"nb_samples": dimension.samples} if strategy == "grid_search" else {}
    return {"low": dimension.low, "high": dimension.high, "whole": dimension.whole, "log": dimension.log, **points}


def _workers(number: int) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise MisconfigurationException(f"nb_workers={number!r}: give a number of trials at a time, from 1")
    return number


def _unpickled(options: dict[str, Any], number: int | None) -> Hyperparameters:
    found = Hyperparameters(**options)
    found._number = number
    return found


RESERVED = frozenset(name for name in dir(Hyperparameters) if not name.startswith("__"))
"""Names that no option may have: it would hide what the hyperparameters do."""


def _plain(value: Any) -> Any:
    """A value as JSON holds it."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    return str(value)


# -- the parser -----------------------------------------------------------------------------------------------


class HyperOptArgumentParser(argparse.ArgumentParser):
    """An `argparse.ArgumentParser` with options that a search tries values of, as test-tube's.

    Args:
        strategy: "grid_search": every combination, the first option the slowest; "random_search": drawn by ``seed``;
            "optuna": drawn by Optuna from the results so far (the extra ``optuna``).
        seed: of random draws. The same seed gives the same trials, in every process.
        mode: for "optuna", whether the value of a trial is better when it is smaller ("min") or larger ("max").
        sampler: for "optuna", what makes a sampler, called with ``seed=`` in each trial; None: ``TPESampler``.
        pruner: for "optuna", an Optuna pruner; None: ``MedianPruner()``.
        kwargs: of `argparse.ArgumentParser`. Tunable options of ``parents`` are tunable here, too.

    Raises:
        MisconfigurationException: an argument has no such value.

    Example::

        parser = HyperOptArgumentParser(strategy="grid_search")
        parser.opt_list("--layers", default=1, type=int, options=[16, 32, 64], tunable=True)
        parser.opt_range("--lr", default=0.1, type=float, low=1e-4, high=1e-1, nb_samples=4, log_base=10, tunable=True)
        hparams = parser.parse_args()
        for trial in hparams.trials(12):
            train(trial.layers, trial.lr)
    """

    def __init__(
        self,
        strategy: str = "grid_search",
        seed: int = 0,
        mode: str = "min",
        sampler: Callable[..., Any] | None = None,
        pruner: object = None,
        **kwargs: Any,
    ) -> None:
        if strategy not in STRATEGIES:
            raise MisconfigurationException(
                f"HyperOptArgumentParser(strategy={strategy!r}): give one of {', '.join(map(repr, STRATEGIES))}"
            )
        if strategy == "optuna" and find_spec("optuna") is None:
            raise missing_extra("optuna", "optuna", "strategy='optuna'")
        if mode not in ("min", "max"):
            raise MisconfigurationException(f"HyperOptArgumentParser(mode={mode!r}): give 'min' or 'max'")
        if not isinstance(seed, int):
            raise MisconfigurationException(f"HyperOptArgumentParser(seed={seed!r}): give an int")
        if sampler is not None and not callable(sampler):
            raise MisconfigurationException(
                f"HyperOptArgumentParser(sampler={sampler!r}): each trial makes its own, with a seed that follows from "
                "its number: give the class, or a function of `seed`: sampler=lambda seed: TPESampler(seed=seed)"
            )
        super().__init__(**kwargs)
        self.strategy = strategy
        self.seed = seed
        self.mode = mode
        self.sampler = sampler
        self.pruner = pruner
        self._tunable: dict[str, tuple[argparse.Action, Dimension]] = {}
        self._configs: list[argparse.Action] = []
        for parent in kwargs.get("parents", ()):
            if isinstance(parent, HyperOptArgumentParser):
                self._tunable.update(parent._tunable)
                self._configs += parent._configs

    # -- options ---------------------------------------------------------------------------------------------

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        """As argparse's; an option that is there already is refused with the way out."""
        try:
            return super().add_argument(*args, **kwargs)
        except argparse.ArgumentError as error:
            raise argparse.ArgumentError(
                None, f"{error}: leave one of the two out, or give {type(self).__name__}(conflict_handler='resolve'), "
                "and the later one counts"
            ) from None  # fmt: skip

    def opt_list(
        self, *args: str, options: Iterable[Any] | None = None, tunable: bool = False, **kwargs: Any
    ) -> argparse.Action:
        """Add an option with a list of values to try.

        Args:
            args: names of the option.
            options: the values, each of which goes through ``type``.
            tunable: whether the search tries them; otherwise this is a plain option.
            kwargs: of ``add_argument``: ``default``, ``type``, ``help`` and others.

        Raises:
            MisconfigurationException: no values to try, or one that ``type`` refuses.
            argparse.ArgumentError: there is such an option already.
        """
        action = self.add_argument(*args, **kwargs)
        if tunable or options is not None:
            values = options_of(args[0] if args else "", options, self._type_of(action))
            if tunable:
                self._tunable[action.dest] = (action, values)
        return action

    def opt_range(
        self,
        *args: str,
        low: float | None = None,
        high: float | None = None,
        nb_samples: int = 10,
        log_base: float | None = None,
        tunable: bool = False,
        **kwargs: Any,
    ) -> argparse.Action:
        """Add an option with a range of numbers to try: ``nb_samples`` evenly spaced ones in a grid, any otherwise.

        Args:
            args: names of the option.
            low: the smallest.
            high: the largest, included.
            nb_samples: points of the grid. Integers that fall together count once.
            log_base: a base, to space and draw them on a logarithmic scale; None: on a linear one.
            tunable: whether the search tries them; otherwise this is a plain option.
            kwargs: of ``add_argument``; ``type=int`` makes them integers.

        Raises:
            MisconfigurationException: a number is missing or out of its range.
            argparse.ArgumentError: there is such an option already.
        """
        action = self.add_argument(*args, **kwargs)
        if tunable or low is not None or high is not None:
            name = args[0] if args else ""
            points = range_of(name, low, high, nb_samples, log_base, self._type_of(action))
            if tunable:
                self._tunable[action.dest] = (action, points)
        return action

    add_opt_argument_list = opt_list
    add_opt_argument_range = opt_range

    def json_config(self, *args: str, **kwargs: Any) -> argparse.Action:
        """Add an option that names a JSON file, or a YAML file (``.yaml``, ``.yml``), with values of other options.

        What is typed wins over the file, and the file over defaults. Names that are no option are kept, too.

        Args:
            args: names of the option, with leading dashes.
            kwargs: of ``add_argument``; ``default`` is a path.
        """
        if not args or not all(name.startswith(tuple(self.prefix_chars)) for name in args):
            raise MisconfigurationException(f"json_config{args}: its name begins with dashes, as --config")
        action = self.add_argument(*args, **kwargs)
        self._configs.append(action)
        return action

    def add_subparsers(self, **kwargs: Any) -> Any:
        """As argparse's. Commands have plain options; tunable ones belong to the whole."""
        return super().add_subparsers(**{"parser_class": argparse.ArgumentParser, **kwargs})

    # -- parsing ---------------------------------------------------------------------------------------------

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> Hyperparameters:
        """The options of a command line.

        Args:
            args: its words; None: those of this process.
            namespace: whose options count where nothing is typed.
        """
        found = super().parse_args(args, namespace)
        assert isinstance(found, Hyperparameters)
        return found

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[Hyperparameters, list[str]]:
        """The same, and the words that are none of this parser's."""
        hidden = [action.dest for action in self._actions if action.dest in RESERVED]
        if hidden:
            raise MisconfigurationException(
                f"the option {hidden[0]!r} would hide Hyperparameters.{hidden[0]}: give it another name, by dest="
            )
        options = Hyperparameters(**self._from_files(args))
        vars(options).update(vars(namespace or argparse.Namespace()))
        required = [action for action in self._actions if action.required and action.dest in options]
        for action in required:
            action.required = False
        try:
            _, rest = super().parse_known_args(args, options)
        finally:
            for action in required:
                action.required = True
        options._search = self._search()
        return options, rest

    def _search(self) -> SearchSettings:
        there = {
            name: dimension for name, (action, dimension) in self._tunable.items() if action in self._actions
        }  # a later option may have taken the place of one
        types = {action.dest: self._type_of(action) for action in self._actions}
        return SearchSettings(self.strategy, self.seed, self.mode, self.sampler, self.pruner, Space(there), types)

    def _type_of(self, action: argparse.Action) -> Callable[[Any], Any] | None:
        """What a value of an option goes through; for options with several words, each of the words."""
        kind = None if action.type is None else self._registry_get("type", action.type, action.type)
        if kind is None or action.nargs in (None, "?"):
            return kind
        return lambda words: [kind(word) for word in words]

    def _from_files(self, args: Sequence[str] | None) -> dict[str, Any]:
        """The values in the files that `json_config` options name."""
        found: dict[str, Any] = {}
        configs = [config for config in self._configs if config in self._actions]
        typed = vars(self._words(args)) if configs else {}
        for config in configs:
            named = typed.get(config.dest)
            for path in named if isinstance(named, list) else [named]:
                if path is not None:
                    found.update(self._from_file(config, Path(path)))
        return found

    def _from_file(self, config: argparse.Action, path: Path) -> dict[str, Any]:
        found: dict[str, Any] = {}
        by_name = {action.dest: action for action in self._actions}
        try:
            for name, value in _read_config(path).items():
                action = by_name.get(name.replace("-", "_"))
                if action is None:
                    found[name] = value
                else:
                    found[action.dest] = self._checked(action, value)
        except (MisconfigurationException, OSError) as error:
            self.error(f"argument {'/'.join(config.option_strings)}: {error}")
        return found

    def _words(self, args: Sequence[str] | None) -> argparse.Namespace:
        """The words that each option of a command line gets; no type and no action of the user's is called."""
        probe = argparse.ArgumentParser(
            add_help=False,
            prefix_chars=self.prefix_chars,
            fromfile_prefix_chars=self.fromfile_prefix_chars,
            allow_abbrev=self.allow_abbrev,
        )
        probe.error = self.error  # type: ignore[method-assign]
        for action in self._actions:  # all of them: a word may be one option's name, and short for another's
            probe._add_action(_Words(action.option_strings, action.dest, action.nargs, action.const, action.default))
        return probe.parse_known_args(args)[0]

    def _checked(self, action: argparse.Action, value: Any) -> Any:
        value = through("/".join(action.option_strings) or action.dest, value, self._type_of(action))
        if action.choices is not None and value not in action.choices:
            there = ", ".join(map(repr, action.choices))
            raise MisconfigurationException(f"{action.dest}: {value!r} is not one of {there}")
        return value


class _Words(argparse.Action):
    """Keeps the words of an option."""

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: object, option_string: object = None
    ) -> None:
        setattr(namespace, self.dest, values)


def _read_config(path: Path) -> dict[str, Any]:
    """The names and values of a JSON or YAML file.

    Raises:
        MisconfigurationException: it holds something else.
        ModuleNotFoundError: it is a YAML file, and PyYAML is not installed.
        OSError: it cannot be read.
    """
    try:
        found = plain_yaml.read(path) if path.suffix in (".yaml", ".yml") else json.loads(path.read_text())
    except ModuleNotFoundError:
        raise missing_extra("yaml", "yaml", "a hyperparameter file in YAML") from None
    except (ValueError, RecursionError) as error:
        raise MisconfigurationException(f"{str(path)!r} cannot be read ({error})") from error
    if not isinstance(found, dict):
        raise MisconfigurationException(f'{str(path)!r} holds no names with values: write {{"lr": 0.1}}, say')
    return {str(name): value for name, value in found.items()}
