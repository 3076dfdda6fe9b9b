"""HyperOptArgumentParser: an `argparse.ArgumentParser` whose options can be varied by a search."""

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
    convert,
    make_options,
    make_range,
    numbers,
)
from lockstep.extensions.search.local import TrialOutcome, Trials, run, share_devices
from lockstep.extensions.search.trials import End
from lockstep.ground import plain_yaml
from lockstep.ground.errors import MisconfigurationException, missing_extra
from lockstep.ground.rank import rank_zero_only
from lockstep.launch.environment import visible_devices

if TYPE_CHECKING:
    from lockstep.extensions.search.study import StudyTrial

_running: StudyTrial | None = None
"""Study trial that is running in this process."""


def running_trial() -> StudyTrial | None:
    """Return the trial of an Optuna study that is running in this process, or None."""
    return _running


# -- the values of a trial ------------------------------------------------------------------------------------


class Hyperparameters(argparse.Namespace):
    """The options of a command line or of one trial, as `HyperOptArgumentParser.parse_args` returns them.

    ``vars()`` contains the options only. Copies also have the search; pickled objects have the options only.

    Attributes:
        trial_number: number of the trial with these values; None without a trial.

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
        """Number of the trial in its search; None if the hyperparameters do not belong to a trial."""
        return self._number

    @property
    def draws_late(self) -> bool:
        """True if a trial's values are drawn by :meth:`draw` when the trial starts, as for strategy "optuna"."""
        return self._search is not None and self._search.strategy == "optuna"

    def trials(self, nb_trials: int | None = None) -> Iterator[Hyperparameters]:
        """Return an iterator over the hyperparameters of each trial.

        Every process with the same options gets the same trials.

        Args:
            nb_trials: largest number of trials; None for the whole grid.

        Raises:
            MisconfigurationException: the grid has more combinations, no option is tunable, or the values are drawn
                when a trial starts (:meth:`draw`).
        """
        search = self._known_search("trials")
        if self.draws_late:
            raise MisconfigurationException(
                "trials() cannot list the trials of strategy='optuna', which draws the values of a trial when it "
                "starts. Use optimize_parallel(fn, nb_trials), SlurmCluster, or draw(number, folder)"
            )
        wanted = numbers(search.space, search.strategy, nb_trials)
        return (self._trial(number, search) for number in wanted)

    def generate_trials(self, nb_trials: int | None = None) -> list[Hyperparameters]:
        """Return the hyperparameters of all trials as a list. The name of this method is from the package test-tube.

        Args:
            nb_trials: as for :meth:`trials`.

        Raises:
            MisconfigurationException: as for :meth:`trials`.
        """
        return list(self.trials(nb_trials))

    def _trial(self, number: int, search: SearchSettings) -> Hyperparameters:
        grid = search.strategy == "grid_search"
        values = search.space.at(number) if grid else search.space.draw(search.seed, number)
        return self._with(values, number)

    def _with(self, values: Mapping[str, Any], number: int | None) -> Hyperparameters:
        found = Hyperparameters(**{**vars(self), **values})
        found._search, found._number = self._search, number
        return found

    def _known_search(self, method: str) -> SearchSettings:
        if self._search is None:
            raise MisconfigurationException(
                f"{method}: these hyperparameters were pickled, which drops the search settings. Use the result of "
                "parse_args()"
            )
        if not self._search.space.dimensions:
            raise MisconfigurationException(
                f"{method}: no option is tunable. Add options with opt_list(..., options=[...], tunable=True) or "
                "opt_range(..., tunable=True)"
            )
        return self._search

    # -- values in files -------------------------------------------------------------------------------------

    def values(self) -> dict[str, Any]:
        """Return all options by name, as values that JSON supports. Objects of other types become text."""
        return {name: _plain(value) for name, value in vars(self).items()}

    def with_values(self, values: Mapping[str, Any], number: int | None = None) -> Hyperparameters:
        """Return a copy whose options have the ``values`` of a trial, given in the form that :meth:`values` returns.

        Each value regains its type: it becomes the entry of the option's list, or the value of this command line, with
        the same JSON form. Other text is converted by the option's type.

        Args:
            values: values of the trial.
            number: number of the trial.

        Raises:
            MisconfigurationException: an option's type rejects a value.
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
            return convert(name, value, search.types.get(name))
        return value

    # -- a study ---------------------------------------------------------------------------------------------

    def draw(self, number: int, folder: Path) -> Hyperparameters:
        """Return a trial's hyperparameters, drawn by Optuna. Calls with the same ``number`` return the same values.

        All ranks of a trial may call it: rank 0 draws, the others wait for the values. Rank 0 then updates the trial's
        heartbeat until :meth:`finish` or the end of the process.

        Args:
            number: number of the trial; a restarted trial keeps it.
            folder: folder of the whole search, visible to all nodes. The journal is created in it.

        Raises:
            ModuleNotFoundError: Optuna is not installed.
            MisconfigurationException: no option is tunable, or these hyperparameters were pickled.
        """
        from lockstep.extensions.search.study import StudyTrial

        global _running
        trial = StudyTrial(self._known_search("draw"), number, Path(folder))
        values = trial.draw() if rank_zero_only.rank == 0 else trial.wait()
        if _running is not None:
            _running.stop_heartbeat()
        _running = trial
        return self._with(values, number)

    def finish(self, number: int, state: End, value: float | None = None) -> End:
        """Report to the Optuna study how this process's trial, started by :meth:`draw`, has ended.

        If no trial was started here, do nothing.

        Args:
            number: number of the trial.
            state: "completed", "pruned", or "failed".
            value: value that the search minimizes or maximizes; None: the last value reported by `PruneTrial`.

        Returns:
            The recorded state: "pruned" if `PruneTrial` stopped the trial, "failed" if it has no value.
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
        """Run the trials on this machine, each in its own process. The processes share the available GPUs.

        The function is pickled with cloudpickle; the script does not run again. Failed trials do not stop the others.

        Args:
            train_function: called with the hyperparameters of a trial. Its return value, a number or a dict of numbers,
                is the result of the trial. A second parameter receives the trial's GPUs as text.
            nb_trials: largest number of trials; None for the whole grid.
            nb_workers: number of trials that run at a time.
            log_path: folder of this search. It keeps the output and logs of trials, and trials that have completed
                there are not run again. None: nothing is kept, and trials print to the screen.

        Returns:
            The outcome of each trial, sorted by number.

        Raises:
            MisconfigurationException: a number is invalid, the function cannot be pickled, or the folder contains a
                running search or another one (other options, lists, ranges, strategy or mode).
            RuntimeError: all trials failed.
        """
        return self._run_trials(
            train_function, nb_trials, share_devices(visible_devices(), _workers(nb_workers)), log_path
        )

    def optimize_parallel_cpu(
        self,
        train_function: Callable[..., object],
        nb_trials: int | None = None,
        nb_workers: int = 4,
        log_path: str | os.PathLike[str] | None = None,
    ) -> list[TrialOutcome]:
        """Run the trials on this machine, with all GPUs hidden from them.

        Arguments as for :meth:`optimize_parallel`.

        Returns:
            The outcome of each trial, sorted by number.

        Raises:
            MisconfigurationException: as for :meth:`optimize_parallel`.
            RuntimeError: all trials failed.
        """
        return self._run_trials(train_function, nb_trials, [""] * _workers(nb_workers), log_path)

    def optimize_parallel_gpu(
        self,
        train_function: Callable[..., object],
        gpu_ids: Sequence[str | int] | None = None,
        max_nb_trials: int | None = None,
        nb_trials: int | None = None,
        nb_workers: int | None = None,
        log_path: str | os.PathLike[str] | None = None,
    ) -> list[TrialOutcome]:
        """Run the trials on GPUs, one trial at a time on each entry of ``gpu_ids``.

        Args:
            train_function: as for :meth:`optimize_parallel`.
            gpu_ids: GPUs of the trials that run at a time: ``["0", "1"]``, or ``["0,1", "2,3"]`` for two GPUs each;
                None: one entry for each GPU.
            max_nb_trials: test-tube's name for `nb_trials`.
            nb_trials: largest number of trials; None for the whole grid.
            nb_workers: number of trials that run at a time, if smaller than the number of entries.
            log_path: as for :meth:`optimize_parallel`.

        Returns:
            The outcome of each trial, sorted by number.

        Raises:
            MisconfigurationException: there is no GPU, or as for :meth:`optimize_parallel`.
            RuntimeError: all trials failed.
        """
        found = visible_devices() if gpu_ids is None else [str(entry).replace(" ", "") for entry in gpu_ids]
        if not found or not all(found):
            raise MisconfigurationException(
                f"optimize_parallel_gpu(gpu_ids={gpu_ids!r}): there is no GPU to run a trial on. Use gpu_ids such as "
                "['0'], or optimize_parallel_cpu"
            )
        wanted = max_nb_trials if nb_trials is None else nb_trials
        devices = found if nb_workers is None else found[: _workers(nb_workers)]
        return self._run_trials(train_function, wanted, list(devices), log_path)

    def _run_trials(
        self,
        function: Callable[..., object],
        nb_trials: int | None,
        devices: list[str | None] | list[str],
        log_path: str | os.PathLike[str] | None,
    ) -> list[TrialOutcome]:
        search = self._known_search("optimize_parallel")
        values: Iterable[tuple[int, dict[str, Any] | None]]
        if self.draws_late:
            values = ((number, None) for number in numbers(search.space, search.strategy, nb_trials))
        else:
            values = ((trial._number or 0, trial.values()) for trial in self.trials(nb_trials))
        with ExitStack() as stack:
            if log_path is None:
                folder = Path(stack.enter_context(TemporaryDirectory(prefix="lockstep-search-")), "search")
            else:
                folder = Path(log_path).expanduser().absolute()

            def on_lost(number: int) -> None:
                if self.draws_late:
                    from lockstep.extensions.search.study import StudyTrial

                    StudyTrial(search, number, folder).mark_failed()

            keeps = log_path is not None
            trials = Trials(folder, describe(self), values, keeps, list(devices), self.with_values, on_lost)
            return run((function, dict(vars(self)), search), trials)

    @classmethod
    def of(cls, options: Mapping[str, Any], settings: SearchSettings) -> Hyperparameters:
        """Create hyperparameters from options and the settings of a search.

        Args:
            options: values of all options, by name.
            settings: settings of the search.

        Returns:
            the hyperparameters, which belong to no trial.
        """
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


def describe(options: Hyperparameters) -> dict[str, Any]:
    """Return a JSON-compatible dict with a search's strategy, its mode, and each option's possible values.

    Two searches with equal descriptions are the same search.
    """
    search = options._known_search("search")
    dimensions = search.space.dimensions
    found: dict[str, Any] = {"strategy": search.strategy, "mode": search.mode, "tunable": [*dimensions]}
    for name, value in options.values().items():
        dimension = dimensions.get(name)
        described_value = value
        if isinstance(dimension, Range):
            described_value = {name: getattr(dimension, name) for name in ("low", "high", "whole", "log")}
            # Other strategies draw any number of the range.
            if search.strategy == "grid_search":
                described_value["nb_samples"] = dimension.samples
        elif dimension is not None:
            described_value = {"options": _plain(dimension.values)}
        found[f"option {name!r}"] = described_value
    return found


def _workers(number: int) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise MisconfigurationException(f"nb_workers={number!r}: pass an integer of at least 1")
    return number


def _unpickled(options: dict[str, Any], number: int | None) -> Hyperparameters:
    found = Hyperparameters(**options)
    found._number = number
    return found


RESERVED = frozenset(name for name in dir(Hyperparameters) if not name.startswith("__"))
"""Names that options must not have, because they would hide attributes of the hyperparameters."""


def _plain(value: Any) -> Any:
    """Convert a value to one that JSON supports; objects of other types become text."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    return str(value)


# -- the parser -----------------------------------------------------------------------------------------------


class HyperOptArgumentParser(argparse.ArgumentParser):
    """An `argparse.ArgumentParser` whose options can be varied by a search.

    Its methods are named as in the library test-tube.

    Args:
        strategy: "grid_search": all combinations, the first option varies slowest; "random_search": drawn from
            ``seed``; "optuna": drawn by Optuna from the results so far (extra ``optuna``).
        seed: seed of random draws. The same seed gives the same trials in every process.
        mode: for "optuna", whether the value of a trial is minimized ("min") or maximized ("max").
        sampler: for "optuna", called with ``seed=`` in each trial to create a sampler; None: ``TPESampler``.
        pruner: for "optuna", an Optuna pruner; None: ``MedianPruner()``.
        kwargs: arguments of `argparse.ArgumentParser`. Tunable options of ``parents`` stay tunable.

    Raises:
        MisconfigurationException: an argument has an invalid value.
        ModuleNotFoundError: the strategy is "optuna", and Optuna is not installed.

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
                f"HyperOptArgumentParser(strategy={strategy!r}): pass one of {', '.join(map(repr, STRATEGIES))}"
            )
        if strategy == "optuna" and find_spec("optuna") is None:
            raise missing_extra("optuna", "optuna", "strategy='optuna'")
        if mode not in ("min", "max"):
            raise MisconfigurationException(f"HyperOptArgumentParser(mode={mode!r}): pass 'min' or 'max'")
        if not isinstance(seed, int):
            raise MisconfigurationException(f"HyperOptArgumentParser(seed={seed!r}): pass an int")
        if sampler is not None and not callable(sampler):
            raise MisconfigurationException(
                f"HyperOptArgumentParser(sampler={sampler!r}): each trial creates its own sampler with a seed. Pass "
                "the class, or a function such as sampler=lambda seed: TPESampler(seed=seed)"
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
        """Add an option that no search varies, as in argparse.

        The error for an option that exists already also suggests a remedy.

        Returns:
            the action, as in argparse.

        Raises:
            argparse.ArgumentError: the option exists already.
        """
        try:
            return super().add_argument(*args, **kwargs)
        except argparse.ArgumentError as error:
            raise argparse.ArgumentError(
                None, f"{error}. Remove one of the two, or use {type(self).__name__}(conflict_handler='resolve') to "
                "keep the later one"
            ) from None  # fmt: skip

    def opt_list(
        self, *args: str, options: Iterable[Any] | None = None, tunable: bool = False, **kwargs: Any
    ) -> argparse.Action:
        """Add an option for which a search tries the values of a list.

        Args:
            args: names of the option.
            options: the values; each is converted by ``type``.
            tunable: True if the search varies the option; otherwise it is a plain option.
            kwargs: arguments of ``add_argument``: ``default``, ``type``, ``help`` and others.

        Raises:
            MisconfigurationException: the list is missing or empty, or ``type`` rejects a value.
            argparse.ArgumentError: the option exists already.
        """
        action = self.add_argument(*args, **kwargs)
        if tunable or options is not None:
            values = make_options(args[0] if args else "", options, self._type_of(action))
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
        """Add an option for which a search tries numbers in a range. A grid tries ``nb_samples`` evenly spaced numbers.

        Args:
            args: names of the option.
            low: the smallest number.
            high: the largest number, included.
            nb_samples: number of points in a grid. Equal integers count once.
            log_base: base of a logarithmic scale; None for a linear scale.
            tunable: True if the search varies the option; otherwise it is a plain option.
            kwargs: arguments of ``add_argument``. ``type=int`` selects integers.

        Raises:
            MisconfigurationException: a number is missing or out of its range.
            argparse.ArgumentError: the option exists already.
        """
        action = self.add_argument(*args, **kwargs)
        if tunable or low is not None or high is not None:
            name = args[0] if args else ""
            points = make_range(name, low, high, nb_samples, log_base, self._type_of(action))
            if tunable:
                self._tunable[action.dest] = (action, points)
        return action

    add_opt_argument_list = opt_list
    add_opt_argument_range = opt_range

    def json_config(self, *args: str, **kwargs: Any) -> argparse.Action:
        """Add an option whose value is the path of a JSON or YAML file with values for other options.

        A YAML file has the extension ``.yaml`` or ``.yml``.

        The command line overrides the file, and the file overrides defaults. Unknown names are kept.

        Args:
            args: names of the option, with leading dashes.
            kwargs: arguments of ``add_argument``; ``default`` is a path.

        Raises:
            MisconfigurationException: a name does not start with dashes.
            argparse.ArgumentError: the option exists already.
        """
        if not args or not all(name.startswith(tuple(self.prefix_chars)) for name in args):
            raise MisconfigurationException(f"json_config{args}: the name must start with dashes, such as --config")
        action = self.add_argument(*args, **kwargs)
        self._configs.append(action)
        return action

    def add_subparsers(self, **kwargs: Any) -> Any:
        """Add subcommands, as in argparse; a search cannot vary options of subcommands.

        Args:
            kwargs: arguments of ``argparse.ArgumentParser.add_subparsers``.

        Returns:
            the object whose ``add_parser`` adds a subcommand.
        """
        return super().add_subparsers(**{"parser_class": argparse.ArgumentParser, **kwargs})

    # -- parsing ---------------------------------------------------------------------------------------------

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> Hyperparameters:
        """Parse a command line, and return the options.

        Args:
            args: words of the command line; None for the arguments of this process.
            namespace: values of options that are not on the command line.

        Returns:
            the values of all options; its methods run a search.

        Raises:
            MisconfigurationException: the name of an option is that of a method of `Hyperparameters`.
            SystemExit: the command line is invalid, as in argparse.
        """
        found = super().parse_args(args, namespace)
        assert isinstance(found, Hyperparameters)
        return found

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[Hyperparameters, list[str]]:
        """Parse a command line; return the options, and the words that this parser does not recognize.

        Args:
            args: words of the command line; None for the arguments of this process.
            namespace: values of options that are not on the command line.

        Raises:
            MisconfigurationException: the name of an option is that of a method of `Hyperparameters`.
            ModuleNotFoundError: a `json_config` file is YAML, and PyYAML is not installed.
        """
        hidden = [action.dest for action in self._actions if action.dest in RESERVED]
        if hidden:
            raise MisconfigurationException(
                f"the option {hidden[0]!r} would hide Hyperparameters.{hidden[0]}. Use another name, with dest="
            )
        options = Hyperparameters(**self._from_files(args))
        vars(options).update(vars(namespace or argparse.Namespace()))
        # argparse reports required options as missing even if the namespace has their values.
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
        }  # with conflict_handler="resolve" a later option may have replaced one
        types = {action.dest: self._type_of(action) for action in self._actions}
        return SearchSettings(self.strategy, self.seed, self.mode, self.sampler, self.pruner, Space(there), types)

    def _type_of(self, action: argparse.Action) -> Callable[[Any], Any] | None:
        """Return the function that converts an option's value, word by word if the option takes several words."""
        kind = None if action.type is None else self._registry_get("type", action.type, action.type)
        if kind is None or action.nargs in (None, "?"):
            return kind
        return lambda words: [kind(word) for word in words]

    def _from_files(self, args: Sequence[str] | None) -> dict[str, Any]:
        """Return a dict of option values, read from the files that are given by `json_config` options."""
        found: dict[str, Any] = {}
        configs = [config for config in self._configs if config in self._actions]
        typed = vars(self._words(args)) if configs else {}
        by_name = {action.dest: action for action in self._actions}
        for config in configs:
            paths = typed.get(config.dest)
            try:
                for path in paths if isinstance(paths, list) else [paths]:
                    for name, value in _read_config(Path(path)).items() if path is not None else ():
                        action = by_name.get(name.replace("-", "_"))
                        if action is None:
                            found[name] = value
                        else:
                            found[action.dest] = self._checked(action, value)
            except (MisconfigurationException, OSError) as error:
                self.error(f"argument {'/'.join(config.option_strings)}: {error}")
        return found

    def _words(self, args: Sequence[str] | None) -> argparse.Namespace:
        """Parse a command line without the user's types and actions: return the words of each option as text."""
        probe = argparse.ArgumentParser(
            add_help=False,
            prefix_chars=self.prefix_chars,
            fromfile_prefix_chars=self.fromfile_prefix_chars,
            allow_abbrev=self.allow_abbrev,
        )
        # Errors must show this parser's usage.
        probe.error = self.error  # type: ignore[method-assign]
        # All options are needed to resolve abbreviations: a word may be one option's name and another's prefix.
        for action in self._actions:
            probe._add_action(_Words(action.option_strings, action.dest, action.nargs, action.const, action.default))
        return probe.parse_known_args(args)[0]

    def _checked(self, action: argparse.Action, value: Any) -> Any:
        value = convert("/".join(action.option_strings) or action.dest, value, self._type_of(action))
        if action.choices is not None and value not in action.choices:
            there = ", ".join(map(repr, action.choices))
            raise MisconfigurationException(f"{action.dest}: {value!r} is not one of {there}")
        return value


class _Words(argparse.Action):
    """An argparse action that stores the words of an option as text."""

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: object, option_string: object = None
    ) -> None:
        setattr(namespace, self.dest, values)


def _read_config(path: Path) -> dict[str, Any]:
    """Read option values by name from a JSON or YAML file.

    Raises:
        MisconfigurationException: the file is invalid or does not contain a mapping.
        ModuleNotFoundError: the file is YAML, and PyYAML is not installed.
        OSError: the file cannot be read.
    """
    try:
        found = plain_yaml.read(path) if path.suffix in (".yaml", ".yml") else json.loads(path.read_text())
    except ModuleNotFoundError:
        raise missing_extra("yaml", "yaml", "a hyperparameter file in YAML") from None
    except (ValueError, RecursionError) as error:
        raise MisconfigurationException(f"{str(path)!r} cannot be read ({error})") from error
    if not isinstance(found, dict):
        raise MisconfigurationException(f'{str(path)!r} must contain names with values, such as {{"lr": 0.1}}')
    return {str(name): value for name, value in found.items()}
