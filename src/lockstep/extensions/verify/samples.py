"""Checks that ranks get each sample once, in a new order each epoch, and evaluate each sample once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from lockstep.extensions.verify.compare import SAMPLES, Difference, Reason, by_rank, uneven
from lockstep.extensions.verify.loaders import ORDER
from lockstep.extensions.verify.recordings import Event, Recording

_FEW = 8
"""Number of samples below which equal orders in two epochs may be a coincidence."""


@dataclass(frozen=True)
class Padding:
    """Record of a sample that several ranks get in the same evaluation.

    Attributes:
        loader: number of the loader.
        where: line that iterates the loader.
        sample: index of the sample.
    """

    loader: int
    where: str
    sample: int

    def __str__(self) -> str:
        return f"in evaluation several ranks get sample {self.sample}"


@dataclass
class SampleFindings:
    """Result of checking how loaders distribute samples over the ranks.

    Attributes:
        differences: differences with their causes.
        notes: expected differences: samples that fill up an epoch, or that are drawn with replacement.
        vacuous: reasons why agreement would prove nothing.
        compared: number of batches.
        trains: numbers of the loaders of training.
        shares_inputs: True if all ranks computed with the same inputs.
        padded: for each loader of an evaluation a sample that several ranks get.
    """

    differences: list[tuple[Difference, Reason]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    vacuous: list[str] = field(default_factory=list)
    compared: int = 0
    trains: set[int] = field(default_factory=set)
    shares_inputs: bool = False
    padded: list[Padding] = field(default_factory=list)


class Samples:
    """Checker of how each loader distributes its samples over the ranks.

    Args:
        ranks: the run on ranks.
        splits_model: True if ranks hold parts of a model, so that they have to compute with the same samples.
    """

    def __init__(self, ranks: Recording, splits_model: bool) -> None:
        self.ranks = ranks
        self.splits_model = splits_model
        self.found = SampleFindings()

    def check(self) -> SampleFindings:
        """Compare the ranks' samples from every loader, and return the findings."""
        found = self.found
        found.trains = _training_loaders(self.ranks)
        inputs = [[event["inputs"] for event in rank.find("forward")] for rank in self.ranks.ranks]
        common = min(len(each) for each in inputs)
        inputs = [each[:common] for each in inputs]
        found.shares_inputs = all(each == inputs[0] for each in inputs) and any(inputs[0])
        loaders = {event["loader"] for _, event in self.ranks.find("iteration")}
        for number in sorted(loaders):
            batches, described = self._events(number, "batch"), self._events(number, "iteration", "order")
            if all(batches) and number in found.trains:
                self._check_training(number, batches, described[0][0])
            elif all(described):
                self._check_evaluation(number, described)
        if not found.trains and found.shares_inputs and not self.splits_model:
            found.vacuous.append(
                "all ranks gave their models the same inputs, which do not come from a DataLoader: seed each rank with "
                "a different number if the script draws its batches, or read the data with a DataLoader that has a "
                "DistributedSampler"
            )
        return found

    def _events(self, number: int, *kinds: str) -> list[list[Event]]:
        """Return a list of each rank's events of the given kinds for one loader."""
        return [rank.find(*kinds, loader=number) for rank in self.ranks.ranks]

    def _epochs(self, number: int, iteration: int) -> list[list[int]]:
        """Return each rank's sample indices in an epoch, including those not read before an early end of the epoch."""
        return [
            [
                index
                for event in rank.find("batch", "rest", "order", loader=number, iteration=iteration)
                for index in event["indices"] or ()
            ]
            for rank in self.ranks.ranks
        ]

    def _add(self, difference: Difference, cause: str, first: Event) -> None:
        """Add a difference and its cause to the findings, with the line that creates the loader ``first``."""
        self.found.differences.append((difference, Reason(cause, first["created"])))

    def _check_training(self, number: int, batches: Sequence[Sequence[Event]], first: Event) -> None:
        found, count = self.found, len(self.ranks.ranks)
        found.compared += sum(len(each) for each in batches)
        if first["size"] is not None and first["size"] < 2 * count:
            found.vacuous.append(
                f"the data set has {first['size']} samples, too few for {count} ranks: let the script train on at "
                f"least {2 * count}"
            )
        common = min(len(each) for each in batches)
        prints = [[event["prints"] for event in each[:common]] for each in batches]
        if self.splits_model:
            found.notes.append("ranks hold parts of a model, and compute with the same samples")
        elif all(each == prints[0] for each in prints) and any(prints[0][0]):
            if found.shares_inputs:
                sample = str(batches[0][0]["indices"][0]) if batches[0][0]["indices"] else prints[0][0][0]
                text = f"every rank gets sample {sample} and all others"
                difference = Difference(SAMPLES, 0, 0, sample, tuple(range(count)), text=text)
                self._add(difference, f"all ranks read the same data: {self._why_shared(first)}", first)
            else:
                found.notes.append("every rank reads the full batch, and computes with its part")
        else:
            for iteration in (0, 1):
                self._check_overlap(number, iteration)
        self._check_order(number, first)
        self._check_lengths(number, first)

    # -- samples of several ranks, or of none

    def _why_shared(self, first: Event, overlaps: bool = False) -> str:
        """Explain why ranks get the same samples from a loader, and suggest a fix.

        Args:
            first: description of the loader.
            overlaps: True if ranks share some samples, but not all.
        """
        if first["size"] is None:
            return (
                f"the IterableDataset {first['dataset']} yields the same samples on each of {len(self.ranks.ranks)} "
                "ranks: let each rank read its share: itertools.islice(samples, rank, None, world_size)"
            )
        if first["shared_out"]:
            return f"{first['sampler']} {self._fault_of_sampler(first)}"
        if first["cut"] and overlaps:
            return (
                "their Subsets of the data overlap: split the same order of indices on all ranks, for example with "
                "indices[rank::world_size], or use a DistributedSampler"
            )
        return f"{first['sampler']} does not split the data among the ranks: pass a DistributedSampler to the loader"

    def _fault_of_sampler(self, first: Event) -> str:
        """Explain what is wrong with the DistributedSamplers of ranks that get the same samples."""
        own = [events[-1] for events in self._events(first["loader"], "iteration")]
        numbers, replicas, seeds = zip(*(event["share"] for event in own), strict=True)
        epochs = [event["epoch"] for event in own]
        if len(set(numbers)) < len(own):
            return f"is created with rank={_format(numbers)} on the ranks: pass rank=dist.get_rank()"
        if len(set(seeds)) > 1:
            return f"is created with seed={_format(seeds)} on the ranks: pass the same seed on all ranks"
        if len(set(epochs)) > 1:
            return f"has the epochs {_format(epochs)} on the ranks: call set_epoch() with the same epoch on all ranks"
        if first["cut"] and set(replicas) == {len(own)}:
            return (
                "splits a Subset that differs between ranks: create the Subset with the same random numbers on all "
                "ranks, for example random_split(..., generator=torch.Generator().manual_seed(0))"
            )
        return f"splits the data among {replicas[0]} replicas: pass num_replicas=dist.get_world_size()"

    def _check_overlap(self, number: int, iteration: int) -> None:
        batches, described = self._events(number, "batch"), self._events(number, "iteration")
        first, epochs = described[0][0], self._epochs(number, iteration)
        # a rank may not have started the second epoch, or another loader that the same lines create has its number
        has_second = first["shared_out"] and len({each["size"] for own in described for each in own}) == 1
        if self.found.differences or (iteration and not (has_second and all(epochs))):
            return
        repeats = not first["shared_out"] and any(len(set(each)) < len(each) for each in epochs)
        if first["replacement"] or repeats:
            self.found.notes.append(
                f"{first['sampler']} draws with replacement, so several ranks may get the same sample"
            )
            return
        probes = {each[0]["probe"] for each in described}
        # an index is the same sample only in the same data
        if first["size"] is None or len(probes) > 1 or batches[0][0]["indices"] is None:
            self._check_contents(batches, first)
            return
        ranks = len(epochs)
        owners: dict[int, set[int]] = defaultdict(set)
        for rank, indices in enumerate(epochs):
            for index in indices:
                owners[index].add(rank)
        shared = [index for index, own in owners.items() if len(own) > 1]
        # DistributedSampler repeats a few samples to fill up an epoch; a script that splits the data repeats none
        most = 1
        if first["shared_out"] or not first["cut"]:
            filling = ranks * (first["batch_size"] or 1)
            most = max(1, min(filling, min(len(each) for each in epochs) // 2 + 1))
        if len(shared) >= max(ranks, most):
            index = shared[0]  # the first one in the order of rank 0
            which = tuple(sorted(owners[index]))
            missing = first["size"] - len(owners)
            text = f"ranks {', '.join(map(str, which))} get sample {index} in epoch {iteration} ({len(shared)} shared"
            text += f", {missing} of {first['size']} are on no rank)" if missing > 0 else ")"
            is_whole = len({frozenset(each) for each in epochs}) == 1
            what = "every rank reads the whole data set" if is_whole else "ranks share samples"
            # -1: the step with which the second epoch starts is unknown
            difference = Difference(SAMPLES, -iteration, 0, str(index), which, text=text)
            self._add(difference, f"{what}: {self._why_shared(first, overlaps=not is_whole)}", first)
            return
        if shared:
            self.found.notes.append(
                f"{first['sampler']} repeats {len(shared)} sample(s) at the end of an epoch to give all ranks the same "
                "number"
            )
        if first["shared_out"]:
            self._check_missing(owners, first, ranks)

    def _check_missing(self, owners: dict[int, set[int]], first: Event, ranks: int) -> None:
        size = first["size"]
        missing = size - len(owners)
        # more than drop_last skips
        if missing > ranks * (first["batch_size"] or 1) and missing > 0.05 * size:
            cause = (
                "the sampler splits the data among more ranks than there are: pass num_replicas=dist.get_world_size()"
            )
            text = f"no rank gets {missing} of {size} samples"
            self._add(Difference(SAMPLES, 0, 0, "", text=text), cause, first)
        elif missing > 0:
            self.found.notes.append(f"{missing} sample(s) of {size} are skipped at the end of an epoch")

    def _check_contents(self, batches: Sequence[Sequence[Event]], first: Event) -> None:
        """In data without indices, compare the contents of samples to find ranks that get the same samples."""
        counts = [Counter(text for event in each for text in event["prints"] if text) for each in batches]
        drawn = min(sum(each.values()) for each in counts)
        # data that repeat samples on one rank (labels, small integers) repeat them between ranks as well
        are_unique = all(len(each) > 0.9 * sum(each.values()) for each in counts)
        for rank, each in enumerate(counts[1:], 1):
            shared = set(counts[0]) & set(each)
            if are_unique and drawn >= _FEW and len(shared) > drawn / 2:
                text = f"ranks 0 and {rank} share {len(shared)} of {drawn} samples"
                cause = f"ranks share samples: {self._why_shared(first)}"
                self._add(Difference(SAMPLES, 0, 0, "", (0, rank), text=text), cause, first)
                return

    # -- epochs

    def _check_lengths(self, number: int, first: Event) -> None:
        if self.ranks.has("join"):
            return
        ends: dict[int, dict[int, int]] = defaultdict(dict)
        for rank, event in self.ranks.find("iterated", loader=number):
            ends[event["iteration"]][rank] = event["batches"]
        for iteration, counts in sorted(ends.items()):
            # an epoch that only some ranks have ended shows nothing
            if len(counts) == len(self.ranks.ranks) and len(set(counts.values())) > 1:
                text = (
                    f"ranks have different numbers of batches in epoch {iteration} ({by_rank(sorted(counts.items()))})"
                )
                at = min(counts.values())
                difference = Difference(SAMPLES, at, at, "", tuple(counts), text=text)
                self.found.differences.append((difference, uneven(first["where"])))
                return

    def _check_order(self, number: int, first: Event) -> None:
        epochs = [self._epochs(number, iteration)[0] for iteration in (0, 1)]
        length = min(len(each) for each in epochs)
        if not first["shuffles"] or length < _FEW or epochs[0][:length] != epochs[1][:length]:
            return
        at = len(self.ranks.first.find("batch", loader=number, iteration=0))
        cause = f"{first['sampler']} does not get the epoch: call sampler.set_epoch(epoch) before each epoch"
        if not first["shared_out"]:
            cause = f"{first['sampler']} draws each epoch's order from the same seed"
        step = self.ranks.first.find("batch")[-1]["step"]
        text = "epoch 1 has the same order as epoch 0"
        difference = Difference(SAMPLES, step, max(at, step), "", text=text)
        self.found.differences.append((difference, Reason(cause, first["where"])))

    # -- evaluation

    def _check_evaluation(self, number: int, described: Sequence[Sequence[Event]]) -> None:
        first, epochs = described[0][0], self._epochs(number, 0)
        # a script may let each rank evaluate all samples, or data of its own
        has_same = not first["shared_out"] and len(set(map(frozenset, epochs))) == 1
        if has_same or len({each[0]["probe"] for each in described}) > 1:
            return
        counts = Counter(index for indices in epochs for index in indices)
        repeated = [index for index, count in counts.items() if count > 1]
        if repeated:
            self.found.padded.append(Padding(number, first["where"], repeated[0]))


def split_twice(ranks: Recording, single: Recording) -> tuple[Difference, Reason] | None:
    """Find a data set that the script splits by rank, although its sampler splits what it gets among the ranks."""
    count = len(ranks.ranks)
    for event in single.first.find("size"):
        own = [rank.find("iteration", loader=event["loader"]) for rank in ranks.ranks]
        sizes = [each[0]["size"] for each in own if each]
        # other samplers may visit a part of the data in each epoch
        splits = any(each["shared_out"] or each["sampler"] == "BatchSamplerShard" for each in own[0][:1])
        if not splits or event["size"] is None or None in sizes or len(sizes) < count or max(sizes) > ORDER:
            continue
        read = [len(set(each)) for each in Samples(ranks, False)._epochs(event["loader"], 0)]
        slack = len(ranks.first.find("batch", loader=event["loader"])[0]["prints"])
        is_cut = abs(sum(sizes) - event["size"]) < count < event["size"]
        if is_cut and all(abs(a - b / count) <= slack < b / 4 for a, b in zip(read, sizes, strict=True)):
            text = f"no rank gets {sum(sizes) - sum(read)} of {event['size']} samples"
            cause = "the script splits the data set by rank, and the sampler splits it again: pass the whole data set"
            return Difference(SAMPLES, 0, 0, "", text=text), Reason(cause, own[0][0]["created"])
    return None


def _training_loaders(ranks: Recording) -> set[int]:
    """Return the set of numbers that identify training loaders: loaders between whose batches a backward runs."""
    found: set[int] = set()
    for rank in ranks.ranks:
        newest: int | None = None
        iterating: set[int] = set()
        for event in rank.events:
            if event["kind"] == "batch" and event["grad"]:
                newest = event["loader"]
                iterating.add(newest)
            elif event["kind"] == "iterated":
                iterating.discard(event["loader"])
            elif event["kind"] == "backward" and newest is not None:
                # several loaders may be iterated together
                found |= iterating
                found.add(newest)
    return found


def _format(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))
