"""Search for the cause of the first difference: in gradients, in recorded events, and in runs with overrides."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from lockstep.extensions.verify.calls import BEFORE_TRAINING, TRACE, first_other_line
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
    align,
    are_equal,
    by_rank,
    clips_first,
    own_gradients,
    shorten,
    uneven,
)
from lockstep.extensions.verify.diagnose import Parts, Shares
from lockstep.extensions.verify.own_batches import JOINED
from lockstep.extensions.verify.recordings import SCALARS, Event, Recording, place_of
from lockstep.extensions.verify.runs import Runs
from lockstep.extensions.verify.settings import call_lines

_SCALED = 1e-5
"""Smallest deviation of a factor from 1 at which a gradient counts as scaled."""


@dataclass
class Causes:
    """Finder of the cause of the first difference between the run on ranks and the run of one process.

    Attributes:
        difference: the first difference.
        ranks: the run on ranks.
        single: the run of one process.
        runs: makes more runs.
        splits_model: True if ranks have parts of a model.
        unknown: after `find`, why the difference may be a property of the check, or "".
    """

    difference: Difference
    ranks: Recording
    single: Recording
    runs: Runs
    splits_model: bool
    unknown: str = ""

    def __post_init__(self) -> None:
        self.size = len(self.ranks.ranks)
        self.update = self.difference.update
        self.backwards = self.ranks.first.find("backward", update=self.update)
        last = self.backwards[-1] if self.backwards else {"where": "", "made": "", "scaled": ""}
        self.last_backward, self.loss_line, self.scale_line = last["where"], last["made"], last["scaled"]
        self.clipping = self.ranks.first.line_of("clipped")

    @property
    def ranks_disagree(self) -> bool:
        """True if the ranks differ from each other, whatever samples one process had."""
        # weights that are averaged after a step differ before; then only the samples show if the steps are right
        if self.difference.kind == RATES or (not self.update and self.ranks.reduced_after_step):
            return self.difference.kind == RATES and bool(self.difference.ranks)
        is_first = self.difference.kind == FIRST
        file = ("first", self.step["optimizer"]) if is_first else ("parameters", self.update)
        # only parameters that each rank has in full: others have parts of them
        whole, *found = (rank.load(*file) for rank in (self.single.first, *self.ranks.ranks))
        shapes = [{key: getattr(value, "shape", None) for key, value in each.items()} for each in (whole, *found)]
        return all(each == shapes[0] for each in shapes) and not are_equal(found)

    @property
    def is_joined(self) -> bool:
        """True if one process had the samples of all ranks, although no loader guarantees it.

        That is so if its gradient consists of the gradients of all ranks. A constant factor may be that of a batch
        size, if the script makes smaller batches in one process.
        """
        joined = self.single.first.find(JOINED)
        if not joined or self.difference.kind not in (GRADIENTS, CLIPPED, PARAMETERS):
            return False
        grows = any(event["grows"] for event in joined)
        parts = Parts(self.ranks, self.update)
        if not parts.are_known:
            return not grows
        shares = self._shares_of_single(parts)
        if not shares.fits or shares.weights.min() < _SCALED:
            return False
        factor = shares.constant()
        if not grows or shares.sum_to_one or factor is None:
            return shares.sum_to_one or shares.is_unique
        divisor, in_single = self._divisors()
        rows = [event["rows"] for event in self.single.first.find("forward", update=self.update)]
        is_of_ranks = divisor is not None and _near(divisor / (in_single or 1.0), factor * self.size)
        return is_of_ranks or (divisor == in_single and any(divisor in each for each in rows))

    @property
    def step(self) -> Event:
        """Rank 0's recorded event of the optimizer step in which the runs differ."""
        return self.ranks.first.find("step", update=self.update)[0]

    def find(self) -> Reason | None:
        """Return the cause of the difference, or None if it was not found."""
        finders: dict[str, Callable[[], Reason | None]] = {
            FIRST: self._explain_first_parameters,
            RATES: self._explain_rates,
            GRADIENTS: self._explain_gradients,
            CLIPPED: self._explain_clipping,
            PARAMETERS: self._explain_update,
            BUFFERS: self._explain_buffers,
            STEPS: self._explain_steps,
        }
        return finders[self.difference.kind]()

    # -- before a gradient

    def _explain_first_parameters(self) -> Reason | None:
        where = other_seeds(self.ranks)
        # shards of different weights make a whole that no rank has
        if not self.difference.ranks or (len(self.difference.ranks) == self.size and not where):
            return None
        # such as a checkpoint that rank 0 alone loads
        whole = self.single.first.load("first", self.step["optimizer"])
        shapes = [list(value.shape) for value in whole.values() if isinstance(value, Tensor)]
        if found := changed_by_some(self.runs.on_ranks(f"{TRACE} {self.update or BEFORE_TRAINING}"), shapes):
            return found
        return Reason(
            "ranks start with different weights, and nothing broadcasts rank 0's: set the same seed on all ranks "
            "before the model is created, or wrap the model in DistributedDataParallel",
            where,
        )

    def _explain_rates(self) -> Reason:
        scheduled, in_single = (
            [event for event in run.first.find("scheduled") if event["update"] <= self.update]
            for run in (self.ranks, self.single)
        )
        # the line that set the rate last, or else that created the optimizer
        events = [event for _, event in self.ranks.find("rate", "added") if event["update"] <= self.update]
        where = max(reversed(events), key=lambda event: event["update"])["where"]
        if self.difference.ranks:
            return Reason("ranks use different learning rates: compute them from values that all ranks share", where)
        if scheduled and len(scheduled) != len(in_single):
            text = (
                f"the scheduler is stepped {len(scheduled)} times on each rank, but {len(in_single)} times in one "
                "process: the learning rate runs ahead by the number of ranks"
            )
            return Reason(text, call_lines(scheduled[-1]["stack"]))
        return Reason("the learning rate depends on the number of ranks", where)

    # -- gradients

    def _explain_gradients(self) -> Reason | None:
        if self.splits_model:
            return self._explain_sharded() if self.ranks.is_sharded else None
        parts = Parts(self.ranks, self.update)
        if not any(each is not None for each in self.ranks.first.unclipped_gradients(self.update).values()):
            text = "no parameter of the optimizer gets a gradient: create it after calls such as fully_shard"
            return Reason(text, self.ranks.first.line_of("added"))
        if not parts.are_known:
            return self._explain_sharded()
        if self.single.has("clipped") and clips_first(self.ranks, self.update):
            text = "gradients are clipped before they are averaged: each rank clips its own by a different norm"
            return Reason(text, self.clipping, "gradients differ between ranks when they are clipped")
        gradients = own_gradients(self.ranks, self.update)
        deviating = parts.not_averaged(gradients)
        if not deviating:
            return self._explain_own_gradients(parts)
        shares = [parts.shares(gradient, deviating) for gradient in gradients]
        names = ""
        if len(deviating) < len(parts.keys):
            names = shorten([self.step["names"][key] for key in deviating])
        if all(parts.is_own(gradient, rank, deviating) for rank, gradient in enumerate(gradients)):
            is_mean = self._shares_of_single(parts).all_are(1 / self.size)
            proof = "the mean of the ranks' own gradients is the gradient of one process" if is_mean else ""
            return self._explain_missing_average(names, set(deviating), proof)
        factors = [weight * self.size for weight in (each.constant() for each in shares) if weight is not None]
        if len(factors) < len(shares):
            return self._explain_window(shares, names)
        if all(abs(factor - factors[0]) < _SCALED * self.size for factor in factors):
            return self._explain_factor(parts, factors[0])
        return self._explain_scaling(names, factors)

    def _explain_missing_average(self, names: str, keys: set[str], proof: str) -> Reason:
        """Explain why gradients are not averaged over the ranks."""
        what = f"gradients of {names} are" if names else "gradients are"
        bypassed = self.ranks.first.find("bypassed")
        uncovered = keys - set(self.step["covered"])
        is_wrapped, reducing = self.ranks.has("wrapped"), self._reducing_line()
        if not is_wrapped and reducing:
            why = "it leaves them out, or uses a group without all ranks, or a copy"
            return Reason(f"{what} not averaged by the collective that reduces gradients: {why}", reducing, proof)
        if not is_wrapped and self.ranks.reduced_after_step:
            text = f"{what} not averaged before the step: the script averages them after it, which is too late"
            return Reason(text, call_lines(self.ranks.reduced_after_step[0]["stack"]), proof)
        if not is_wrapped:
            text = f"{what} never averaged over the ranks: no wrapper around the model does that"
            return Reason(text, self.last_backward, proof)
        if bypassed:
            name = bypassed[0]["name"]
            text = f"{what} not averaged: {name} is called directly, not by its wrapper (DistributedDataParallel)"
            return Reason(text, call_lines(bypassed[0]["stack"]), proof)
        if uncovered:
            text = (
                f"{what} not averaged: the optimizer has them, but DistributedDataParallel does not cover them (they "
                "belong to a module outside it, were added or made trainable after it was created at "
                f"{self.ranks.first.line_of('wrapped')}, or are ignored)"
            )
            added = [event["where"] for event in self.ranks.first.find("added") if uncovered & set(event["keys"])]
            return Reason(text, added[-1] if added else "", proof)
        where = self.last_backward
        if self.backwards and not self.backwards[-1]["synchronizes"]:
            last = "the last backward of a window" if len(self.backwards) > 1 else "the backward"
            no_sync = self.ranks.first.line_of("no_sync")
            why = "no_sync() covers" if no_sync else "require_backward_grad_sync is False in"
            return Reason(f"{what} not averaged: {why} {last}", no_sync or where, proof)
        return Reason(f"{what} not averaged over the ranks", where, proof)

    def _explain_factor(self, parts: Parts, factor: float) -> Reason | None:
        """Explain gradients that are the mean over ranks times ``factor``, which is the same on all ranks."""
        own = self._shares_of_single(parts).constant()
        where = self._reducing_line()
        summed = Reason("gradients are summed over the ranks, but not averaged", where or self.step["where"])
        # neither the sum nor the mean is what one process has
        if own is None:
            part = "all of the loss, or a part of it such as a penalty on the weights, counts once for each rank"
            return replace(summed, proof=part) if _near(factor, self.size) else None
        ratio = factor / (own * self.size) if own else math.inf
        proof = f"they are {ratio:.4g} times those of one process, in all parameters"
        if _near(ratio, self.size):
            return replace(summed, proof=proof)
        if _near(ratio, 1 / self.size):
            return Reason("gradients are divided by the number of ranks twice", where or self.last_backward, proof)
        return self._explain_norm(ratio, proof)

    def _explain_norm(self, ratio: float, proof: str) -> Reason:
        """Explain gradients that are ``ratio`` times those of one process, often due to a wrong clipping norm."""
        if math.isfinite(ratio) and self.ranks.is_sharded:
            text = f"gradients are clipped (scaled) by a norm that is {1 / ratio:.4g} times that of the full gradient"
            return Reason(f"{text}: it does not count each shard once", self._norm_line(), proof)
        text = "gradients are scaled (perhaps clipped) before the step, but not by the same factor as in one process"
        return Reason(text, self.clipping or self.step["where"], proof)

    def _explain_scaling(self, names: str, factors: Sequence[float]) -> Reason:
        """Explain gradients that are the mean over ranks times a factor that differs between ranks."""
        scaled = [rank for rank, factor in enumerate(factors) if abs(factor - 1) > _SCALED]
        times = by_rank((rank, f"{factors[rank]:.4g}") for rank in scaled) + " times the mean over the ranks"
        text = f"gradients{f' of {names}' * bool(names)} are scaled on some ranks after they are averaged: {times}"
        where = ""
        # without a wrapper ranks may differ where a script reads the gradients that it averages by hand
        if self.ranks.has("wrapped"):
            calls = [rank.find("call", late=True) for rank in self.runs.on_ranks(f"{TRACE} {self.update}").ranks]
            where = first_other_line(calls[scaled[0]], calls[scaled[0] - 1])
        return Reason(text, where or self.step["where"])

    def _explain_window(self, shares: Sequence[Shares], names: str) -> Reason:
        """Explain gradients in which the micro-batches of an accumulation window wrongly have different weights."""
        reducing = self._reducing_line()
        if not all(each.fits for each in shares):
            proof = "they are not made of the ranks' own gradients"
            if reducing and not are_equal(own_gradients(self.ranks, self.update)):
                text = "not all ranks get the mean of the gradients: use all_reduce (reduce gives it to one rank only)"
                return Reason(text, reducing, proof)
            return self._explain_norm(math.nan, proof)
        what = f" of {names}" if names else ""
        weights = "; ".join(f"rank {rank}: {each.rounded()}" for rank, each in enumerate(shares))
        proof = f"weights of the micro-batches in the gradient: {weights}; each should be {1 / self.size:.3g}"
        if reducing and len(self.backwards) > 1:
            text = (
                f"gradients{what} are reduced after each micro-batch, so accumulated gradients that have been reduced "
                "are reduced again"
            )
            return Reason(text, reducing, proof)
        no_sync = self.ranks.first.line_of("no_sync")
        why = ": no_sync() ends too late or too early" if no_sync else ""
        text = f"only some micro-batches of a window{what} are synchronized{why}"
        return Reason(text, no_sync or self.step["where"], proof)

    def _explain_own_gradients(self, parts: Parts) -> Reason | None:
        """Explain why the ranks' correctly averaged gradients differ from the gradients of one process."""
        shares = self._shares_of_single(parts)
        constant = shares.constant()
        if constant is not None:
            return self._explain_loss(constant * self.size)
        if not shares.fits or not shares.sum_to_one or shares.weights[:, 0].min() < 1e-6:
            # a rank's gradient is then not the gradient of its samples, or one process did not use all samples
            return None
        weights = "; ".join(f"rank {rank}: {weight:.3g}" for rank, weight in enumerate(shares.most_uneven()))
        proof = f"weights of the ranks' gradients in one process: {weights}; in the mean over ranks {1 / self.size:.3g}"
        text = "a mean of means: each rank divides its loss by its own count, and the counts differ"
        return Reason(text, self.loss_line, proof)

    def _divisors(self) -> list[float | None]:
        """Return the number by which the last loss of the update is divided on ranks, and in one process."""
        losses = [run.first.find("backward", update=self.update) for run in (self.ranks, self.single)]
        return [each[-1]["divisor"] if each else None for each in losses]

    def _divides_by_own_samples(self) -> bool:
        """Return True, with the reason `unknown`, if one process divides the loss by the size of a rank's batch."""
        divisor = self._divisors()[1]
        first = self.ranks.first
        rows = [len(event["prints"]) for event in first.find("batch", step=self.step["number"])]
        for event in first.find("forward", update=self.update):
            rows += event["rows"]
        if divisor is None or divisor == 1 or divisor not in rows:
            return False
        self.unknown = (
            f"one process divides the loss by {divisor:g}, the number of samples of a rank's batch "
            f"({self.last_backward}), but has those of all ranks in a batch: divide by the length of the batch"
        )
        return True

    def _explain_loss(self, factor: float) -> Reason | None:
        """Explain why the single-process run's gradient is ``factor`` times the mean of the ranks' gradients."""
        where, first = self.scale_line, self.ranks.first
        proof = f"one process has {factor:.4g} times the mean of the ranks' gradients, in all parameters"
        if not _near(factor, self.size):
            return Reason("the loss is not scaled by the same factor as in one process", where, proof)
        if self._divides_by_own_samples():
            return None
        divisor, in_single = self._divisors()
        again = "DistributedDataParallel divides once more"
        if not self.ranks.has("wrapped"):
            reducing = self._reducing_line()
            at = f" ({reducing})" if reducing else ""
            again = f"the average of gradients over the ranks{at} divides once more"
        if divisor is not None and _near(divisor / (in_single or 1.0), self.size):
            return Reason(f"the loss is divided by the number of ranks, and {again}", where, proof)
        sums = first.find("collective", name="all_reduce", update=self.update, backwards=0)
        if divisor is not None and any(event["shape"] in SCALARS for event in sums):
            text = f"the loss is divided by a number that counts all ranks' samples, and {again}"
            return Reason(f"{text}: multiply it by the number of ranks", where, proof)
        text = "the loss is a sum over samples: a mean over ranks divides it by their number"
        return gathered_without_gradient(self.ranks, self.update, proof) or Reason(text, where, proof)

    def _shares_of_single(self, parts: Parts) -> Shares:
        return parts.shares(self.single.first.unclipped_gradients(self.update))

    # -- parts of models, and sharded parameters

    def _explain_sharded(self) -> Reason | None:
        expected = self.single.assembled("gradients", self.update)[0]
        found = self.ranks.assembled("gradients", self.update)
        pairs: list[tuple[Tensor, Tensor]] = []
        for key, reference in expected.items():
            for part in align([values.get(key) for values in found], reference)[:1]:
                if part is not None and reference is not None and part.shape == reference.shape:
                    pairs.append((part, reference))
        ratio = gradient_factor(pairs)
        if ratio is None:
            return self._explain_shard_factors(expected)
        proof = f"they are {ratio:.4g} times those of one process, in all parameters"
        if _near(ratio, self.size):
            return Reason("gradients are summed over the ranks, but not averaged", self.last_backward, proof)
        if _near(ratio, 1 / self.size):
            text = "the loss is a sum, or divided by the number of ranks, and the mean over ranks divides again"
            return None if self._divides_by_own_samples() else Reason(text, self.scale_line, proof)
        return self._explain_norm(ratio, proof)

    def _explain_shard_factors(self, expected: Mapping[str, Tensor | None]) -> Reason | None:
        """Explain gradients whose shards are scaled by a factor that differs between ranks."""
        factors: list[float] = []
        for rank in self.ranks.ranks:
            pairs, plain = [], []
            for key, value in rank.load("gradients", self.update).items():
                reference = expected.get(key)
                if isinstance(value, dict) and reference is not None:
                    pairs.append((value["part"], reference[place_of(value)]))
                elif isinstance(value, Tensor):
                    plain.append(self.step["names"][key])
            factor = gradient_factor(pairs)
            if factor is None:
                return None
            factors.append(factor)
        if all(abs(factor - 1) < _SCALED for factor in factors):
            text = f"gradients are not averaged: no shard contains {shorten(plain)}, which fully_shard does not cover"
            where = self.ranks.first.find("sharded data parallel")[-1]["where"]
            return Reason(f"{text}: call it on the whole model too", where) if plain else None
        text = "each rank clips (scales) its shards by their own norm, not by that of the full gradient"
        scaled = self.runs.on_ranks(f"{TRACE} {self.update}").first.find("call", changes=True)
        where = self.clipping or (call_lines(scaled[-1]["stack"]) if scaled else self.step["where"])
        return Reason(text, where, f"the gradients are {_format(factors)} times those of one process, by rank")

    # -- clipping and updates

    def _explain_clipping(self) -> Reason:
        where, text = self.clipping, "clipping: the norm is not that of the full gradient"
        runs = [*self.ranks.ranks, self.single.first]
        calls = [rank.find("clipped", update=self.update)[:1] for rank in runs]
        if not all(calls):
            return Reason(text, where)
        *bounds, own = [call["bound"] for (call,) in calls]
        if any(not _near(bound, own) for bound in bounds):
            text = "clipping: ranks and one process clip by different values of max_norm"
            return Reason(text, where, f"max_norm by rank: {_format(bounds)}; in one process: {own:.4g}")
        *norms, own = [call["norm"] for (call,) in calls]
        return Reason(text, where, f"total norm by rank: {_format(norms)}; in one process: {own:.4g}")

    def _explain_update(self) -> Reason:
        proof = "the gradients before the step agree"
        name, where = self.step["name"], self.step["where"]
        if self.ranks.reduced_in_step:
            why = "it takes a sum in place of a mean, or every rank adds a term, such as a weight decay"
            text = f"{name} reduces gradients in its step, but its update is not that of one process: {why}"
            return Reason(text, call_lines(self.ranks.reduced_in_step[0]["stack"]))
        if self.ranks.is_sharded or len(self.difference.ranks) == self.size:
            text = (
                f"{name} computes a different update from the same gradients: on each rank it uses only a shard of a "
                "value that it needs in full"
            )
            return Reason(text, where, proof)
        return Reason(f"{name} updates parameters differently on rank {self.difference.ranks[0]}", where, proof)

    def _explain_buffers(self) -> Reason:
        text = f"the buffer {self.difference.name} depends on a rank's own samples, and is not averaged over the ranks"
        changes = [rank.find("call", changes=True) for rank in self.runs.on_ranks(f"{TRACE} {self.update}").ranks[:2]]
        return Reason(text, first_other_line(*changes))

    def _explain_steps(self) -> Reason | None:
        batches = {len(rank.find("batch")) for rank in self.ranks.ranks}
        return uneven(self.ranks.first.line_of("iteration")) if len(batches) > 1 else None

    # -- lines

    def _norm_line(self) -> str:
        """Return the source line that all-reduces a norm after the backward, or else the line that clips or steps."""
        events = self.ranks.first.find("collective", update=self.update)
        sums = [event for event in events if event["backwards"] and event["shape"] in SCALARS]
        return call_lines(sums[0]["stack"]) if sums else self.clipping or str(self.step["where"])

    def _reducing_line(self) -> str:
        """Return the script's line that reduces gradients after a backward of this update, or "" if there is none."""
        events = self.ranks.first.find("collective", update=self.update)
        # torch reduces in a backward as well, such as SyncBatchNorm
        own = {event["where"] for event in self.backwards}
        events = [event for event in events if event["backwards"] and event["where"] not in own]
        return next((call_lines(event["stack"]) for event in events if event["name"] in ("all_reduce", "reduce")), "")


def other_seeds(ranks: Recording) -> str:
    """Return the line that seeds the ranks with different numbers, or "" if there is none."""
    seeded = zip(*(rank.find("seeded") for rank in ranks.ranks), strict=False)
    return next((str(calls[0]["where"]) for calls in seeded if len({call["seed"] for call in calls}) > 1), "")


def changed_by_some(ranks: Recording, shapes: Collection[list[int]] = ()) -> Reason | None:
    """Find a call by which only some ranks change a tensor in place, in a run that has traced the calls of an update.

    If there are ``shapes``, the tensor has one of them.
    """
    calls = [rank.find("call", changes=True) for rank in ranks.ranks]
    calls = [[each for each in own if not shapes or each["shape"] in shapes] for own in calls]
    changes = [{(call_lines(each["stack"]), each["name"]) for each in own} for own in calls]
    for where, name in sorted(changes[0].union(*changes) - changes[0].intersection(*changes)):
        return Reason(f"only some ranks change a tensor by {name}(), and the step depends on it", where)
    return None


def gathered_without_gradient(ranks: Recording, update: int, proof: str) -> Reason | None:
    """Return the cause that a loss uses features gathered without their gradient, or None if there are none."""
    calls = ranks.first.find("collective", name="all_gather", update=update, backwards=0, training=True)
    features = [event for event in calls if len(event["shape"] or ()) > 1]
    text = (
        "the loss uses values gathered from all ranks, but all_gather passes no gradient to the other ranks: use "
        "torch.distributed.nn.functional.all_gather"
    )
    return Reason(text, call_lines(features[0]["stack"]), proof) if features else None


def own_metric(ranks: Recording) -> tuple[Difference, Reason] | None:
    """Find a number that ranks pass to ReduceLROnPlateau, and that is not the same on all ranks."""
    for calls in zip(*(rank.find("scheduled") for rank in ranks.ranks), strict=False):
        values = [call["metric"] for call in calls]
        if None in values or all(math.isclose(each, values[0], rel_tol=_SCALED) for each in values):
            continue
        text = f"ReduceLROnPlateau decides by {by_rank((rank, f'{each:.6g}') for rank, each in enumerate(values))}"
        update = calls[0]["update"]
        difference = Difference(RATES, update, update, "", tuple(range(len(values))), text=text)
        cause = "a scheduler uses a value that differs between ranks, such as a loss that is not averaged over them"
        return difference, Reason(cause, call_lines(calls[0]["stack"]), "the ranks pass different numbers")
    return None


def _format(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:.4g}" for number in numbers)


def gradient_factor(pairs: Sequence[tuple[Tensor, Tensor]]) -> float | None:
    """Return the f for which a = f * b holds for all ``pairs`` (a, b) of tensors. Return None if there is none."""
    top = sum((a.double() * b.double()).sum().item() for a, b in pairs)
    bottom = sum(b.double().square().sum().item() for _, b in pairs)
    if not bottom:
        return None
    ratio = top / bottom
    rest = sum((a.double() - ratio * b.double()).square().sum().item() for a, b in pairs)
    return ratio if rest <= 1e-10 * bottom * ratio**2 else None


def _near(value: float, wanted: float) -> bool:
    return abs(value - wanted) < 1e-4 * abs(wanted)
