"""Search spaces: hyperparameters with lists or ranges of values.

The combinations of values are numbered, and are computed when they are needed.
"""

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
"""Largest space whose combinations are permuted. In a larger one each trial draws its own; repeats are unlikely."""


@dataclass(frozen=True)
class Options:
    """Hyperparameter with a list of possible values.

    Attributes:
        values: the values, at least one, of any type.
    """

    values: tuple[Any, ...]

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, at: int) -> Any:
        value = self.values[at]
        # A trial may modify its value; the other trials must not see that.
        return copy.deepcopy(value) if isinstance(value, (list, dict, set)) else value

    def draw(self, random: Random) -> Any:
        """Draw one of the possible values."""
        return self[random.randrange(len(self))]


@dataclass(frozen=True)
class Range:
    """Hyperparameter with a range of possible numbers from ``low`` to ``high``, both included.

    Attributes:
        low: the smallest number.
        high: the largest number.
        whole: True if the range contains integers only.
        log: True for a logarithmic scale.
        samples: number of points in a grid.
        type: converts a number to the value of the trial; None leaves it as it is.
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
        """Return the grid point with index ``at``; the points are evenly spaced from ``low`` to ``high``."""
        return self.convert(self._spaced(at) if self._whole is None else self._whole[at])

    def draw(self, random: Random) -> Any:
        """Draw a number from the range, uniformly on its linear or logarithmic scale."""
        if self.whole and not self.log:
            return self.convert(random.randint(int(self.low), int(self.high)))
        return self.convert(self._between(random.random()))

    def convert(self, number: float) -> Any:
        """Convert a number in the range to the value that a trial receives."""
        return number if self.type is None else self.type(number)

    @cached_property
    def _whole(self) -> tuple[float, ...] | None:
        """The distinct points of the grid if the range contains only integers; None for other ranges."""
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
        # Rounding in the power may exceed the range by the last bit.
        found = min(max(found, self.low), self.high)
        return math.floor(found + 0.5) if self.whole else found


Dimension = Options | Range


class Space:
    """All combinations of hyperparameter values, numbered from 0; the first hyperparameter varies slowest.

    Combinations are computed on demand: memory and time do not depend on their number.

    Args:
        dimensions: hyperparameters by name, in the order in which they were added.

    Example:
        >>> space = Space({"lr": Options((0.1, 0.2)), "layers": Options((1, 2, 3))})
        >>> space.size, space.at(0), space.at(1), space.at(5)
        (6, {'lr': 0.1, 'layers': 1}, {'lr': 0.1, 'layers': 2}, {'lr': 0.2, 'layers': 3})
    """

    def __init__(self, dimensions: Mapping[str, Dimension]) -> None:
        self.dimensions = dict(dimensions)

    @property
    def size(self) -> int:
        """Number of combinations in the grid; 1 if there are no hyperparameters."""
        return math.prod(map(len, self.dimensions.values()))

    @property
    def is_listed(self) -> bool:
        """True if all hyperparameters are lists of values."""
        return all(isinstance(dimension, Options) for dimension in self.dimensions.values())

    def at(self, number: int) -> dict[str, Any]:
        """Return the hyperparameter values, by name, of the combination with index ``number``, from 0 to `size` - 1."""
        found: list[tuple[str, Any]] = []
        for name, dimension in reversed(self.dimensions.items()):
            number, at = divmod(number, len(dimension))
            found.append((name, dimension[at]))
        return dict(reversed(found))

    def draw(self, seed: int, number: int) -> dict[str, Any]:
        """Draw the values for trial `number` of a random search. The values depend on `seed` and `number` only.

        If all hyperparameters are lists, no combination is repeated in the first `size` trials.

        Args:
            seed: seed of the search.
            number: number of the trial, from 0.
        """
        # Importing torch takes 2 s, and a grid does not need it.
        import torch

        from lockstep.data.order import Shuffled, make_key

        # A permutation of the grid does not repeat combinations, and needs no memory.
        if self.is_listed and self.size < LARGEST_PERMUTED:
            return self.at(int(Shuffled(self.size, make_key("search", seed))(torch.tensor([number]))))
        # A key for each name: adding an option does not change the values of the others.
        return {
            name: dimension.draw(Random(make_key("search", seed, number, name)))
            for name, dimension in self.dimensions.items()
        }


STRATEGIES = ("grid_search", "random_search", "optuna")


@dataclass(frozen=True)
class SearchSettings:
    """Space, strategy and sampling settings of a search.

    Attributes:
        strategy: one of `STRATEGIES`.
        seed: seed of random draws.
        mode: "min" or "max": whether Optuna minimizes or maximizes the value of a trial.
        sampler: creates Optuna's sampler, called with ``seed=``; None: ``TPESampler``.
        pruner: an Optuna pruner; None: ``MedianPruner()``.
        space: the tunable options.
        types: conversion of each option's text, by the option's name.
    """

    strategy: str
    seed: int = 0
    mode: str = "min"
    sampler: Callable[..., Any] | None = None
    pruner: object = None
    space: Space = field(default_factory=lambda: Space({}))
    types: Mapping[str, Callable[[Any], Any] | None] = field(default_factory=dict)


def make_options(option: str, values: Iterable[Any] | None, type: Callable[[Any], Any] | None) -> Options:
    """Create the list of values to try for an option; each value is converted by the option's type.

    Args:
        option: name of the option, for errors.
        values: the values. None stays None, as for an option that is not given.
        type: the option's type; None keeps values as they are. A type that accepts text only receives text.

    Raises:
        MisconfigurationException: the list is empty, or the type rejects a value.
    """
    # Text and mappings are iterable, but iterating over them is never meant.
    if values is None or isinstance(values, (str, bytes, Mapping)):
        raise MisconfigurationException(
            f"opt_list({option!r}, options={values!r}): options must be a list of the values to try"
        )
    found = tuple(convert(option, value, type) for value in values)
    if not found:
        raise MisconfigurationException(
            f"opt_list({option!r}, options=[]): there is no value to try. Add one, or declare the option with "
            "add_argument"
        )
    return Options(found)


def convert(option: str, value: Any, type: Callable[[Any], Any] | None) -> Any:
    """Convert a value with an option's type, as argparse converts the text on a command line.

    Raises:
        MisconfigurationException: the type rejects the value.
    """
    if type is None or value is None:
        return value
    try:
        try:
            return type(value)
        except (TypeError, AttributeError):  # a type that accepts text only
            return type(str(value))
    except Exception as error:  # the user's own type may raise anything
        kind = getattr(type, "__name__", repr(type))
        raise MisconfigurationException(
            f"{option}: the value {value!r:.200} cannot be converted by type={kind} ({error}). Change the value or "
            "type="
        ) from error


def make_range(
    option: str,
    low: float | None,
    high: float | None,
    nb_samples: int = 10,
    log_base: float | None = None,
    type: Callable[[Any], Any] | None = None,
) -> Range:
    """Check the arguments of an option's range of numbers, and create the range.

    Args:
        option: name of the option, for errors.
        low: the smallest number.
        high: the largest number, included.
        nb_samples: number of points in a grid.
        log_base: any base selects a logarithmic scale; None a linear one.
        type: ``int`` for integers; ``float`` or None; or a function that converts a number to the value of the trial.

    Raises:
        MisconfigurationException: an argument is missing or out of its range.
    """
    log, whole = log_base is not None, type is int
    where = f"opt_range({option!r}, low={low!r}, high={high!r}"

    def check(condition: bool, arguments: str, message: str) -> None:
        if not condition:
            raise MisconfigurationException(f"{where}{arguments}): {message}")

    check(_is_finite(low), "", "low must be a finite number")
    check(_is_finite(high), "", "high must be a finite number")
    assert low is not None
    assert high is not None
    check(low <= high, "", "low must not be larger than high")
    check(isinstance(nb_samples, int) and nb_samples > 0, f", {nb_samples=}", "pass an integer of at least 1")
    if log_base is not None:
        check(log_base > 0 and log_base != 1, f", {log_base=}", "the base must be above 0 and not 1, for example 10")
        check(low > 0, f", {log_base=}", "low must be above 0 on a logarithmic scale")
    if whole:
        check(low == int(low) and high == int(high), ", type=int", "low and high must be integers")
        return Range(int(low), int(high), whole, log, nb_samples)
    made = Range(float(low), float(high), whole, log, nb_samples, None if type is float else type)
    convert(option, made.low, made.type)
    return made


def _is_finite(number: object) -> bool:
    return isinstance(number, (int, float)) and not isinstance(number, bool) and math.isfinite(number)


def numbers(space: Space, strategy: str, nb_trials: int | None) -> Sequence[int]:
    """Return the numbers of a search's trials, as a range that starts at 0.

    A grid, and a random search of lists, end after the last combination. Optuna may repeat combinations.

    Args:
        space: the space of the search.
        strategy: one of `STRATEGIES`.
        nb_trials: number of trials; None for a whole grid.

    Raises:
        MisconfigurationException: ``nb_trials`` is missing or invalid, or smaller than the grid.
    """
    in_grid = strategy == "grid_search"
    if nb_trials is None and in_grid:
        nb_trials = space.size
    if nb_trials is None:
        raise MisconfigurationException(f"strategy={strategy!r} needs nb_trials, the number of trials")
    if not isinstance(nb_trials, int) or isinstance(nb_trials, bool) or nb_trials < 1:
        raise MisconfigurationException(f"nb_trials={nb_trials!r}: pass an integer of at least 1")
    if in_grid and space.size > nb_trials:
        counts = " x ".join(f"{name} {len(dimension)}" for name, dimension in space.dimensions.items())
        raise MisconfigurationException(
            f"nb_trials={nb_trials}, but the grid has {space.size} combinations ({counts}). Use "
            f"nb_trials={space.size} to run all of them, fewer options, or strategy='random_search' for some of them"
        )
    if strategy == "random_search" and space.is_listed and space.size < nb_trials:
        warn_once(
            f"nb_trials={nb_trials}, but the lists have {space.size} combinations. A random search does not repeat a "
            f"combination, so it has {space.size} trials"
        )
        nb_trials = space.size
    return range(space.size if in_grid else nb_trials)
