"""Finds the cause of a first difference: by of what gradients are made, by what was seen, and by switching it off."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from lockstep.extensions.verify.calls import first_other_line
from lockstep.extensions.verify.compare import (
    BUFFERS,
    CLIPPED,
    FIRST,
    GRADIENTS,
    PARAMETERS,
    RATES,
    STEPS,
    Difference,
    Reason,
    aligned,
    clips_first,
    own_gradients,
    told_by_rank,
    uneven,
)
from lockstep.extensions.verify.diagnose import Parts, Shares
from lockstep.extensions.verify.recordings import Event, Recording, Value, place_of

_SHOWN = 3
_SCALED = 1e-5
"""A gradient that differs from the mean by a larger factor is scaled."""
_NUMBERS: tuple[list[int], list[int]] = ([], [1])
"""Shapes of what is a number."""


Retry = Callable[[str], bool]
"""Runs both again with something switched off: "clipping" or "rank in modules"; are they alike then?"""


class Causes:
    """Looks for the cause of a difference.

    Args:
        difference: which.
        ranks: the run on ranks.
        whole: the run of one process.
        retry: runs again.
        splits_model: whether ranks hold parts of a model.
        late_calls: runs the ranks again, and notes what they call in an update once gradients are there.
    """

    def __init__(
        self,
        difference: Difference,
        ranks: Recording,
        whole: Recording,
        retry: Retry,
        splits_model: bool,
        late_calls: Callable[[int], Recording],
    ) -> None:
        self.difference = difference
        self.ranks = ranks
        self.whole = whole
        self.retry = retry
        self.splits_model = splits_model
        self.late_calls = late_calls
        self.size = len(ranks.ranks)
        self.update = difference.update
        self.backwards = ranks.first.of("backward", update=self.update)
        self.last_backward = str(self.backwards[-1]["where"]) if self.backwards else ""
        self.clipping = ranks.first.where("clipped")

    @property
    def step(self) -> Event:
        """The step at which it differs, as rank 0 has noted it."""
        return self.ranks.first.of("step", update=self.update)[0]

    def find(self) -> Reason | None:
        """The cause; None where none was found."""
        finders: dict[str, Callable[[], Reason | None]] = {
            FIRST: self._of_first,
            RATES: self._of_rates,
            GRADIENTS: self._of_gradients,
            CLIPPED: self._of_clipped,
            PARAMETERS: self._of_parameters,
            BUFFERS: self._of_buffers,
            STEPS: self._of_steps,
        }
        return finders[self.difference.what]()

    # -- what comes before a gradient

    def _of_first(self) -> Reason | None:
        read = self._rank_in_module()
        if read is not None:
            return read
        if self.difference.ranks and len(self.difference.ranks) < self.size:
            return Reason(
                "ranks start from several first weights, and nothing gives them rank 0's: seed all ranks alike before "
                "the model is made, or wrap it in DistributedDataParallel"
            )
        return None

    def _of_rates(self) -> Reason | None:
        scheduled, alone = self._scheduled(self.ranks), self._scheduled(self.whole)
        if self.difference.ranks and scheduled:
            text = "a scheduler follows a value of each rank's own, such as a loss that is not averaged over the ranks"
            return Reason(text, _called(scheduled[-1]))
        if self.difference.ranks:
            return Reason(
                "ranks compute the learning rate from their rank, or step at it differently", self.step["where"]
            )
        if scheduled and len(scheduled) != len(alone):
            text = (
                f"the scheduler is stepped {len(scheduled)} times on each rank where one process steps it {len(alone)} "
                "times: the learning rate runs ahead by the number of ranks"
            )
            return Reason(text, _called(scheduled[-1]))
        return Reason("the learning rate depends on the number of ranks", self.step["where"])

    def _scheduled(self, run: Recording) -> list[Event]:
        """The steps of schedulers before a difference."""
        return [event for event in run.first.of("scheduled") if event["update"] <= self.update]

    # -- gradients

    def _of_gradients(self) -> Reason | None:
        if self.splits_model:
            return self._of_split()
        parts = Parts(self.ranks, self.update)
        if not parts.are_known:
            return self._of_sharded()
        if self.whole.has("clipped") and clips_first(self.ranks, self.update):
            text = "clipping before the gradients are averaged: each rank clips its own by another norm"
            return Reason(text, self.clipping, "gradients differ between ranks when they are clipped")
        gradients = own_gradients(self.ranks, self.update)
        astray = parts.not_averaged(gradients)
        if astray:
            return self._of_synchronization(parts, gradients, astray)
        return self._of_ranks_own(parts)

    def _of_synchronization(
        self, parts: Parts, gradients: Sequence[Mapping[str, Value]], astray: list[str]
    ) -> Reason | None:
        """The ranks' own gradients are not averaged as they should be."""
        shares = [parts.shares(gradient, astray) for gradient in gradients]
        names = self._named(astray) if len(astray) < len(parts.keys) else ""
        right = self._whole_shares(parts).equal(1 / self.size)
        proof = "the mean of the ranks' own gradients is what one process has" if right else ""
        if all(parts.is_own(gradient, rank, astray) for rank, gradient in enumerate(gradients)):
            return self._of_missing(names, set(astray), proof)
        factors = [weight * self.size for weight in (each.constant() for each in shares) if weight is not None]
        if len(factors) < len(shares):
            return self._of_window(shares, names)
        if all(abs(factor - factors[0]) < _SCALED * self.size for factor in factors):
            return self._of_factor(parts, factors[0])
        return self._of_scaled(names, factors)

    def _of_missing(self, names: str, keys: set[str], proof: str) -> Reason:
        """Every rank keeps its own gradient."""
        what = f"gradients of {names} are" if names else "gradients are"
        bypassed = self.ranks.first.of("bypassed")
        uncovered = keys - set(self.step["covered"])
        late = self._late_average()
        if late is not None:
            text = f"{what} not averaged before the step: what is averaged behind it comes too late"
            return Reason(text, _called(late), proof)
        if not self.ranks.has("wrapped"):
            return Reason(f"{what} never averaged over the ranks: the model is in no wrapper that does", "", proof)
        if bypassed:
            text = f"{what} not averaged: {bypassed[0]['name']} is called past its wrapper (DistributedDataParallel)"
            return Reason(text, _called(bypassed[0]), proof)
        if uncovered and names:
            text = (
                f"{what} not averaged: DistributedDataParallel does not know them (of a module that it does not hold, "
                "added or made trainable behind it, or ignored)"
            )
            return Reason(text, self.ranks.first.where("wrapped"), proof)
        where = self.last_backward
        if self.backwards and not self.backwards[-1]["synchronizes"]:
            last = "the last backward of a window" if len(self.backwards) > 1 else "the backward"
            no_sync = self.ranks.first.where("no_sync")
            if no_sync:
                return Reason(f"{what} not averaged: no_sync() covers {last}", no_sync, proof)
            return Reason(f"{what} not averaged: require_backward_grad_sync is False in {last}", where, proof)
        return Reason(f"{what} not averaged over the ranks", where, proof)

    def _of_factor(self, parts: Parts, factor: float) -> Reason | None:
        """The gradient is the mean over ranks, times something."""
        own = self._whole_shares(parts).constant()
        if own is None:
            return self._of_penalty() if _near(factor, self.size) else None
        ratio = factor / (own * self.size) if own else math.inf
        reduced = self._reduced()
        proof = f"they are {ratio:.4g} times what one process has, in all parameters alike"
        if _near(ratio, self.size):
            where = reduced or self.step["where"]
            return Reason("gradients are summed over the ranks, and not divided by their number", where, proof)
        if _near(ratio, 1 / self.size):
            where = reduced or self.last_backward
            return Reason("gradients are divided by the number of ranks twice", where, proof)
        return self._of_scale(ratio, proof)

    def _of_penalty(self) -> Reason:
        """Gradients are summed, and neither their sum nor their mean is what one process has."""
        return Reason(
            "gradients are summed over the ranks, so that a part of the loss that each rank adds whole (a penalty on "
            "the weights, perhaps) counts once for each rank",
            self._reduced() or self.step["where"],
        )

    def _of_scale(self, ratio: float, proof: str) -> Reason | None:
        """The gradient of one process, times something that is neither the number of ranks nor one over it."""
        if math.isfinite(ratio) and self.ranks.is_sharded:
            root = ", the square root of the number of ranks" if _near(1 / ratio, math.sqrt(self.size)) else ""
            size = f"{1 / ratio:.4g} times that of the whole gradient{root}"
            text = f"gradients are clipped (scaled) by a norm that is {size}: it is not made of all shards once"
            return Reason(text, self._norm_of(), proof)
        for value in (math.sqrt(self.size), 1 / math.sqrt(self.size)):
            if _near(ratio, value):
                word = "large" if ratio < 1 else "small"
                text = f"gradients are clipped (scaled) by a norm that is too {word} by the square root of the ranks"
                return Reason(text, self._norm_of(), proof)
        if self.whole.has("clipped") and self.retry("clipping"):
            return Reason(
                "clipping: the norm is not that of the whole gradient",
                self.clipping,
                "alike without it",
            )
        text = "gradients are scaled (clipped?) by another number than on one process, before the step"
        return Reason(text, self.step["where"], proof)

    def _of_scaled(self, names: str, factors: Sequence[float]) -> Reason:
        """Each rank has the mean of the ranks' gradients, times a number of its own."""
        odd = [rank for rank, factor in enumerate(factors) if abs(factor - 1) > _SCALED]
        times = told_by_rank((rank, f"{factors[rank]:.4g}") for rank in odd) + " times the mean over the ranks"
        text = f"gradients{f' of {names}' * bool(names)} are scaled on some ranks after they are averaged: {times}"
        where = ""
        if self.ranks.has("wrapped"):  # else ranks may still differ when a script reads what it averages by hand
            calls = [rank.of("call") for rank in self.late_calls(self.update).ranks]
            where = first_other_line(calls[odd[0]], calls[odd[0] - 1])
        return Reason(text, where or self.step["where"])

    def _of_window(self, shares: Sequence[Shares], names: str) -> Reason | None:
        """The micro-batches of a window are in the gradient in several ways."""
        if not all(each.fits for each in shares):
            return self._of_scale(math.nan, "it is not made of the ranks' own gradients")
        what = f" of {names}" if names else ""
        weights = "; ".join(f"rank {rank}: {each.rounded()}" for rank, each in enumerate(shares))
        proof = f"micro-batches are in the gradient by {weights}; each should be by {1 / self.size:.3g}"
        reduced = self._reduced()
        if reduced and len(self.backwards) > 1:
            text = (
                f"gradients{what} are reduced behind each micro-batch: accumulated ones, reduced already, are so again"
            )
            return Reason(text, reduced, proof)
        text = f"micro-batches of a window{what} are synchronized only in part"
        no_sync = self.ranks.first.where("no_sync")
        if no_sync:
            return Reason(f"{text}: no_sync() is left too late or early", no_sync, proof)
        return Reason(text, self.step["where"], proof)

    def _of_ranks_own(self, parts: Parts) -> Reason | None:
        """Ranks average as they should; what they average is not what one process has."""
        shares = self._whole_shares(parts)
        constant = shares.constant()
        if constant is not None:
            return self._of_loss(constant * self.size)
        if not shares.fits or not shares.sum_to_one:
            return self._rank_in_module()  # a rank's gradient on its samples is no part of one process' gradient
        mean = "; ".join(f"rank {rank}: {weight:.3g}" for rank, weight in enumerate(shares.by_rank()))
        proof = f"one process weighs the ranks' gradients by {mean}; the mean over ranks by {1 / self.size:.3g}"
        text = "a mean of means: each rank divides its loss by its own count, and the counts differ"
        return Reason(text, self.last_backward, proof)

    def _of_loss(self, factor: float) -> Reason:
        """One process has the mean of the ranks' gradients, times something: the loss is another one."""
        where = self.last_backward
        proof = f"one process has {factor:.4g} times the mean of the ranks' gradients, in all parameters alike"
        if not _near(factor, self.size):
            return Reason("the loss is scaled by another number than on one process", where, proof)
        divided, alone = self._divisor(self.ranks), self._divisor(self.whole)
        again = f"{self._averaged_by()} once more"
        if divided is not None and _near(divided / (alone or 1.0), self.size):
            return Reason(f"the loss is divided by the number of ranks, and {again}", where, proof)
        if divided is not None and self._sums_before_backward():
            text = f"the loss is divided by a number that counts all ranks' samples, and {again}"
            return Reason(f"{text}: multiply it by the number of ranks", where, proof)
        gathers = self.ranks.first.of("collective", name="all_gather", update=self.update, backwards=0, training=True)
        if gathers:
            text = (
                "the loss is made of what all ranks gather, and all_gather gives no gradient back to the others: take "
                "torch.distributed.nn.functional.all_gather"
            )
            return Reason(text, _called(gathers[0]), proof)
        text = "the loss is a sum over samples: a mean over ranks makes it smaller by their number"
        return Reason(text, where, proof)

    def _sums_before_backward(self) -> bool:
        """Whether ranks add up a number before a backward of this update."""
        events = self.ranks.first.of("collective", name="all_reduce", update=self.update, backwards=0)
        return any(event["shape"] in _NUMBERS for event in events)

    def _late_average(self) -> Event | None:
        """The first collective of gradients' size behind a step, where there is none before it."""
        if self._reduced() or self.ranks.has("wrapped"):
            return None
        events = self.ranks.first.of("collective", name="all_reduce", update=self.update + 1, backwards=0)
        return next((event for event in events if event["shape"] not in _NUMBERS), None)

    def _divisor(self, recording: Recording) -> float | None:
        """By what the last loss of an update was divided."""
        events = recording.first.of("backward", update=self.update)
        return events[-1]["divisor"] if events else None

    def _averaged_by(self) -> str:
        """What divides gradients by the number of ranks, in words."""
        if self.ranks.has("wrapped"):
            return "DistributedDataParallel divides"
        reduced = self._reduced()
        at = f" ({reduced})" if reduced else ""
        return f"the average of gradients over the ranks{at} divides"

    def _rank_in_module(self) -> Reason | None:
        """A rank that a module reads, if runs are alike where every rank reads 0."""
        read = next(self.ranks.of("rank read"), None)
        if read is None or not self.retry("rank in modules"):
            return None
        text = f"rank-dependent code: {read[1]['within']} reads the rank (get_rank), and differs on each"
        return Reason(text, read[1]["where"], "alike where every rank reads 0")

    def _whole_shares(self, parts: Parts) -> Shares:
        return parts.shares(self.whole.first.of_step(self.update))

    def _of_split(self) -> Reason | None:
        """Ranks hold parts of a model: is what they hold whole counted by each of them?"""
        reference = self.whole.whole("first", self.step["optimizer"])[0]
        own = self.ranks.first.load("first", self.step["optimizer"])
        split = {key for key, value in own.items() if _is_part(value, reference.get(key))}
        modules = {self.step["names"][key].rpartition(".")[0] for key in split}
        for key in own.keys() - split:
            name = self.step["names"].get(key, key)
            if name.rpartition(".")[0] not in modules or not self.retry(f"once {key}"):
                continue
            events = self.ranks.first.of("collective", in_module=True)
            return Reason(
                f"{name}, which every rank holds whole, is counted once for each rank: it is added before the sum over "
                "ranks, and not behind it",
                _called(events[0]) if events else "",
                "the gradients are alike where each rank adds its share of it",
            )
        return self._of_sharded() if self.ranks.is_sharded else None

    # -- sharded parameters, clipping, updates

    def _of_sharded(self) -> Reason | None:
        read = self._rank_in_module()
        if read is not None:
            return read
        ratio = self._ratio()
        if ratio is None:
            where = self.ranks.first.where("backward", update=self.update, synchronizes=False)
            if where:
                return Reason("gradients are not reduced: synchronization is off", where)
            return self._of_shard_factors()
        where = self.last_backward
        proof = f"they are {ratio:.4g} times what one process has, in all parameters alike"
        if _near(ratio, self.size):
            return Reason("gradients are summed over the ranks, and not averaged", where, proof)
        if _near(ratio, 1 / self.size):
            text = "the loss is a sum, or divided by the number of ranks, and a mean over ranks divides again"
            return Reason(text, where, proof)
        return self._of_scale(ratio, proof)

    def _of_shard_factors(self) -> Reason | None:
        """Each rank has scaled its shards by a number of its own."""
        expected = self.whole.whole("gradients", self.update)[0]
        factors = []
        for rank in self.ranks.ranks:
            pairs = []
            for key, value in rank.load("gradients", self.update).items():
                reference = expected.get(key)
                if isinstance(value, dict) and reference is not None:
                    pairs.append((value["part"], reference[place_of(value)]))
            factors.append(gradient_factor(pairs))
        if any(factor is None for factor in factors):
            return None
        told = ", ".join(f"{factor:.4g}" for factor in factors)
        text = "each rank clips (scales) its shards by a norm of its own, which is not that of the whole gradient"
        where = self.clipping or self.step["where"]
        return Reason(text, where, f"by rank they are {told} times what one process has")

    def _ratio(self) -> float | None:
        """By which factor all gradients differ; None where it is not one factor."""
        found = self.ranks.whole("gradients", self.update)
        expected = self.whole.whole("gradients", self.update)[0]
        pairs: list[tuple[Tensor, Tensor]] = []
        for key, reference in expected.items():
            for part in aligned([values.get(key) for values in found], reference)[:1]:
                if part is not None and reference is not None and part.shape == reference.shape:
                    pairs.append((part, reference))
        return gradient_factor(pairs)

    def _of_clipped(self) -> Reason | None:
        where = self.clipping
        runs = [*self.ranks.ranks, self.whole.first]
        calls = [rank.of("clipped", update=self.update)[:1] for rank in runs]
        if not all(calls):
            return Reason("clipping: the norm is not that of the whole gradient", where)
        *bounds, own = [call["bound"] for (call,) in calls]
        if any(not _near(bound, own) for bound in bounds):
            text = "clipping: max_norm follows the number of ranks, which the norm does not"
            if len(set(bounds)) > 1:
                text = "clipping: ranks clip by several values of max_norm"
            return Reason(text, where, f"max_norm by rank: {_listed(bounds)}; on one process: {own:.4g}")
        *norms, own = [call["norm"] for (call,) in calls]
        proof = f"total norm by rank: {_listed(norms)}; of one process: {own:.4g}"
        return Reason("clipping: the norm is not that of the whole gradient", where, proof)

    def _norm_of(self) -> str:
        """The line where a norm is computed: torch's clipping, or a number that ranks sum up behind the backward."""
        events = self.ranks.first.of("collective", update=self.update)
        sums = [event for event in events if event["backwards"] and event["shape"] in _NUMBERS]
        return _called(sums[0]) if sums else self.clipping or str(self.step["where"])

    def _of_parameters(self) -> Reason | None:
        proof = "the gradients before the step are alike"
        if self.ranks.is_sharded or len(self.difference.ranks) == self.size:
            text = (
                f"{self.step['name']} makes another update of alike gradients: on a rank it works on a part (a shard) "
                "of what it needs whole"
            )
            return Reason(text, self.step["where"], proof)
        text = f"{self.step['name']} updates parameters in another way on rank {self.difference.ranks[0]}"
        return Reason(text, self.step["where"], proof)

    def _of_buffers(self) -> Reason | None:
        return Reason(
            f"the buffer {self.difference.name} is made of a rank's own samples, and is not averaged over the ranks"
        )

    def _of_steps(self) -> Reason | None:
        batches = {len(rank.of("batch")) for rank in self.ranks.ranks}
        return uneven(self.ranks.first.where("iteration")) if len(batches) > 1 else None

    # -- what was seen

    def _named(self, keys: Sequence[str]) -> str:
        """The names of the first parameters among these."""
        return ", ".join(self.step["names"][key] for key in keys[:_SHOWN]) + (", ..." if len(keys) > _SHOWN else "")

    def _reduced(self) -> str:
        """The line of the script's own collective that came behind a backward of this update; "" for none."""
        events = [event for event in self.ranks.first.of("collective", update=self.update) if event["backwards"]]
        return next((_called(event) for event in events if event["name"] in ("all_reduce", "reduce")), "")


def _listed(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:.4g}" for number in numbers)


def _is_part(value: Value, whole: Tensor | None) -> bool:
    return isinstance(value, Tensor) and whole is not None and value.shape != whole.shape


def gradient_factor(pairs: Sequence[tuple[Tensor, Tensor]]) -> float | None:
    """The number by which each first tensor is its second one times; None where it is not one number."""
    top = sum((a.double() * b.double()).sum().item() for a, b in pairs)
    bottom = sum(b.double().square().sum().item() for _, b in pairs)
    if not bottom:
        return None
    ratio = top / bottom
    rest = sum((a.double() - ratio * b.double()).square().sum().item() for a, b in pairs)
    return ratio if rest <= 1e-10 * bottom * ratio**2 else None


def _called(event: Event) -> str:
    """The line of a call, and that from which the function around it was called."""
    lines = list(dict.fromkeys(event["stack"][:2]))
    return ", called at ".join(lines) if len(lines) > 1 else str(event["where"])


def _near(value: float, wanted: float) -> bool:
    return abs(value - wanted) < 1e-4 * abs(wanted)
