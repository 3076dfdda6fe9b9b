"""The space of a search: options and ranges, and its points by number, computed when they are asked for."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from random import Random
from typing import Any

from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import warn_once

LARGEST_PERMUTED = 1 << 62
"""Up to this many combinations are shuffled; of more, each trial draws its own, and two hardly ever meet."""


@dataclass(frozen=True)
class Options:
    """A hyperparameter that takes one of some values.

    Attributes:
        values: at least one, of any type.
    """

    values: tuple[Any, ...]

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, at: int) -> Any:
        value = self.values[at]
        return copy.deepcopy(value) if isinstance(value, (list, dict, set)) else value  # a trial may change its own

    def draw(self, random: Random) -> Any:
        """One of the values."""
        return self[random.randrange(len(self))]


@dataclass(frozen=True)
class Range:
    """A hyperparameter that takes numbers from ``low`` to ``high``, both included.

    Attributes:
        low: the smallest.
        high: the largest.
        whole: integers only.
        log: equal steps are equal factors.
        samples: points of a grid.
        type: what a number goes through before the trial gets it; None: nothing.
    """

    low: float
    high: float
    whole: bool = False
    log: bool = False
    samples: int = 10
    type: Callable[[Any], Any] | None = None

    def __len__(self) -> int:
        return self.samples if self._whole is None else len(self._whole)

    def __getitem__(self, at: int) -> Any:
        """A point of the grid: evenly spaced, the first is ``low`` and the last ``high``."""
        return self.given(self._spaced(at) if self._whole is None else self._whole[at])

    def draw(self, random: Random) -> Any:
        """A number of the range, each as likely as the others."""
        if self.whole and not self.log:
            return self.given(random.randint(int(self.low), int(self.high)))
        return self.given(self._between(random.random()))

    def given(self, number: float) -> Any:
        """A number as the trial gets it."""
        return number if self.type is None else self.type(number)

    @cached_property
    def _whole(self) -> tuple[float, ...] | None:
        """The points of whole numbers, of which several may coincide; None otherwise."""
        return tuple(sorted(set(map(self._spaced, range(self.samples))))) if self.whole else None

    def _spaced(self, at: int) -> float:
        if at == 0:
            return self.low
        return self.high if at == self.samples - 1 else self._between(at / (self.samples - 1))

    def _between(self, share: float) -> float:
        if self.log:
            found = self.low * (self.high / self.low) ** share
        else:
            found = self.low + (self.high - self.low) * share
        found = min(max(found, self.low), self.high)  # the last bit of a power may lie outside
        return math.floor(found + 0.5) if self.whole else found


Dimension = Options | Range


class Space:
    """All combinations of some hyperparameters, numbered from 0; the first hyperparameter is the slowest.

    Nothing is listed: memory and time do not depend on the number of combinations.

    Args:
        dimensions: by name, in the order in which they were added.

    Example:
        >>> space = Space({"lr": Options((0.1, 0.2)), "layers": Options((1, 2, 3))})
        >>> space.size, space.at(0), space.at(1), space.at(5)
        (6, {'lr': 0.1, 'layers': 1}, {'lr': 0.1, 'layers': 2}, {'lr': 0.2, 'layers': 3})
    """

    def __init__(self, dimensions: Mapping[str, Dimension]) -> None:
        self.dimensions = dict(dimensions)

    @property
    def size(self) -> int:
        """Combinations of the grid; 1 without hyperparameters."""
        return math.prod(map(len, self.dimensions.values()))

    @property
    def is_listed(self) -> bool:
        """Whether all hyperparameters are lists of values."""
        return all(isinstance(dimension, Options) for dimension in self.dimensions.values())

    def at(self, number: int) -> dict[str, Any]:
        """The combination of a number below `size`."""
        found: list[tuple[str, Any]] = []
        for name, dimension in reversed(self.dimensions.items()):
            number, at = divmod(number, len(dimension))
            found.append((name, dimension[at]))
        return dict(reversed(found))

    def drawn(self, seed: int, number: int) -> dict[str, Any]:
        """The combination that trial `number` of a random search takes: a function of seed and number.

        Where all hyperparameters are lists, no combination comes twice in the first `size` trials.

        Args:
            seed: another one gives other trials.
            number: of the trial, from 0.
        """
        import torch  # 2 s that a grid does without

        from lockstep.data.order import Shuffled, make_key

        if self.is_listed and self.size < LARGEST_PERMUTED:
            return self.at(int(Shuffled(self.size, make_key("search", seed))(torch.tensor([number]))))
        return {
            name: dimension.draw(Random(make_key("search", seed, number, name)))
            for name, dimension in self.dimensions.items()
        }


STRATEGIES = ("grid_search", "random_search", "optuna")


@dataclass(frozen=True)
class SearchSettings:
    """What is searched, and how.

    Attributes:
        strategy: one of `STRATEGIES`.
        seed: of random draws.
        mode: "min" or "max": which values of a trial Optuna looks for.
        sampler: makes Optuna's sampler, called with ``seed=``; None: TPE.
        pruner: of Optuna's; None: the median pruner.
        space: the tunable options.
        types: what the text of an option goes through, by the option's name.
    """

    strategy: str
    seed: int = 0
    mode: str = "min"
    sampler: Callable[..., Any] | None = None
    pruner: object = None
    space: Space = field(default_factory=lambda: Space({}))
    types: Mapping[str, Callable[[Any], Any] | None] = field(default_factory=dict)


def options_of(option: str, values: Iterable[Any] | None, type: Callable[[Any], Any] | None) -> Options:
    """The values of a list, each through the option's type.

    Args:
        option: its name, for errors.
        values: as they were given. None stays None, as an option that is left out does.
        type: None: values stay as they are. One that takes text only gets the value as text.

    Raises:
        MisconfigurationException: there are none, or the type refuses one.
    """
    if values is None or isinstance(values, (str, bytes, Mapping)):
        raise MisconfigurationException(
            f"opt_list({option!r}, options={values!r}): give the values to try as a list: options=[...]"
        )
    found = tuple(through(option, value, type) for value in values)
    if not found:
        raise MisconfigurationException(
            f"opt_list({option!r}, options=[]): there is no value to try; give at least one, or leave the option to "
            "add_argument"
        )
    return Options(found)


def through(option: str, value: Any, type: Callable[[Any], Any] | None) -> Any:
    """A value as argparse would give it, had it been typed.

    Raises:
        MisconfigurationException: the type refuses it.
    """
    if type is None or value is None:
        return value
    try:
        try:
            return type(value)
        except (TypeError, AttributeError):  # of a type that takes text only
            return type(str(value))
    except Exception as error:  # of the user's own type, whatever it raises
        kind = getattr(type, "__name__", repr(type))
        raise MisconfigurationException(
            f"{option}: its type {kind} refuses the value {value!r:.200} ({error}); give a value that it takes, or "
            "another type="
        ) from error


def range_of(
    option: str,
    low: float | None,
    high: float | None,
    nb_samples: int = 10,
    log_base: float | None = None,
    type: Callable[[Any], Any] | None = None,
) -> Range:
    """A range, checked.

    Args:
        option: its name, for errors.
        low: the smallest number.
        high: the largest, included.
        nb_samples: points of a grid.
        log_base: any base makes the steps equal factors; None: equal differences.
        type: ``int`` for whole numbers; ``float`` or None; or what makes the trial's value of a number.

    Raises:
        MisconfigurationException: an argument is missing or out of its range.
    """
    log, whole = log_base is not None, type is int
    where = f"opt_range({option!r}, low={low!r}, high={high!r}"

    def check(holds: bool, arguments: str, said: str) -> None:
        if not holds:
            raise MisconfigurationException(f"{where}{arguments}): {said}")

    check(_is_finite(low), "", "low is a finite number")
    check(_is_finite(high), "", "high is a finite number")
    assert low is not None
    assert high is not None
    check(low <= high, "", "low is the smaller of the two")
    check(isinstance(nb_samples, int) and nb_samples > 0, f", {nb_samples=}", "give a number of points from 1")
    if log_base is not None:
        check(log_base > 0 and log_base != 1, f", {log_base=}", "a base is above 0, and not 1; 10, say")
        check(low > 0, f", {log_base=}", "on a logarithmic scale low is above 0")
    if whole:
        check(low == int(low) and high == int(high), ", type=int", "give whole numbers")
        return Range(int(low), int(high), whole, log, nb_samples)
    made = Range(float(low), float(high), whole, log, nb_samples, None if type is float else type)
    through(option, made.low, made.type)
    return made


def _is_finite(number: object) -> bool:
    return isinstance(number, (int, float)) and not isinstance(number, bool) and math.isfinite(number)


def numbers(space: Space, strategy: str, nb_trials: int | None) -> Sequence[int]:
    """The numbers of a search's trials.

    A grid, and a random search of lists, end with the last combination. Optuna may ask for one again.

    Args:
        space: what is searched.
        strategy: one of `STRATEGIES`.
        nb_trials: so many, or all combinations if these are fewer; None: all of a grid.

    Raises:
        MisconfigurationException: a number of trials that is none, or that a grid has more combinations than.
    """
    in_grid = strategy == "grid_search"
    if nb_trials is None and in_grid:
        nb_trials = space.size
    if nb_trials is None:
        raise MisconfigurationException(f"strategy={strategy!r} needs nb_trials: how many trials to draw")
    if not isinstance(nb_trials, int) or isinstance(nb_trials, bool) or nb_trials < 1:
        raise MisconfigurationException(f"nb_trials={nb_trials!r}: give a number of trials from 1")
    if in_grid and space.size > nb_trials:
        raise MisconfigurationException(
            f"nb_trials={nb_trials}, and the grid has {space.size} combinations ({_counts(space)}): give "
            f"nb_trials={space.size} to run all of them, fewer options, or strategy='random_search' for a part of them"
        )
    if strategy == "random_search" and space.is_listed and space.size < nb_trials:
        warn_once(
            f"nb_trials={nb_trials}, and the lists have {space.size} combinations: a random search draws none twice, "
            f"so it has {space.size} trials"
        )
        nb_trials = space.size
    return range(space.size if in_grid else nb_trials)


def _counts(space: Space) -> str:
    return " x ".join(f"{name} {len(dimension)}" for name, dimension in space.dimensions.items())
