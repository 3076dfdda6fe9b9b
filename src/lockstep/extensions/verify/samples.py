"""Compares which samples the ranks saw: each once, none on two ranks, no epoch in the order of the one before."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from lockstep.extensions.verify.compare import SAMPLES, Difference, Reason, told_by_rank, uneven
from lockstep.extensions.verify.recordings import Event, Recording

_FEW = 8
"""Samples from which on two equal orders are no chance."""


@dataclass(frozen=True)
class Padding:
    """A sample that comes on several ranks in an evaluation.

    Attributes:
        loader: its number.
        where: the line that iterates over it.
        sample: the index.
    """

    loader: int
    where: str
    sample: int

    def __str__(self) -> str:
        return f"in evaluation sample {self.sample} comes on several ranks"


@dataclass
class SampleFindings:
    """What was found about samples.

    Attributes:
        differences: with the cause of each.
        notes: what is so by nature: repeated samples that fill up an epoch, samples drawn with replacement.
        vacuous: why a comparison says nothing.
        compared: how many batches were looked at.
        trains: numbers of the loaders whose samples were trained on.
        shares_inputs: whether all ranks calculated with the same inputs.
        padded: of each loader of an evaluation a sample that comes on several ranks.
    """

    differences: list[tuple[Difference, Reason]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    vacuous: list[str] = field(default_factory=list)
    compared: int = 0
    trains: set[int] = field(default_factory=set)
    shares_inputs: bool = False
    padded: list[Padding] = field(default_factory=list)


class Samples:
    """Looks at the samples of a run on several ranks.

    Args:
        ranks: the run.
        splits_model: whether ranks hold parts of a model, and mean to calculate with the same samples.
    """

    def __init__(self, ranks: Recording, splits_model: bool) -> None:
        self.ranks = ranks
        self.splits_model = splits_model
        self.found = SampleFindings()

    def look(self) -> SampleFindings:
        """Look at every loader."""
        self.found.trains = _training_loaders(self.ranks)
        self.found.shares_inputs = self._shares_inputs()
        loaders = {event["loader"] for _, event in self.ranks.of("iteration")}
        for number in sorted(loaders):
            self._look_at(number)
        if not loaders and self.found.shares_inputs and not self.splits_model:
            self.found.vacuous.append(
                "all ranks gave their models the same inputs, which come from no DataLoader: put the data behind one, "
                "with a DistributedSampler"
            )
        return self.found

    def _events(self, number: int, *kinds: str) -> list[list[Event]]:
        """What each rank has noted of a loader."""
        return [rank.of(*kinds, loader=number) for rank in self.ranks.ranks]

    def _add(self, difference: Difference, cause: str, first: Event) -> None:
        """Add a difference.

        Args:
            difference: what is to be added.
            cause: why.
            first: what is known of the loader.
        """
        self.found.differences.append((difference, Reason(cause, first["where"])))

    def _look_at(self, number: int) -> None:
        batches, described = self._events(number, "batch"), self._events(number, "iteration", "order")
        if not all(batches) or number not in self.found.trains:
            self._look_at_evaluation(number, described)
            return
        self.found.compared += sum(len(each) for each in batches)
        first = described[0][0]
        seen = {text for each in batches[0] for text in each["prints"] if text}
        size = first["size"]
        if size is not None and size < 2 * len(self.ranks.ranks):
            count = len(self.ranks.ranks)
            self.found.vacuous.append(
                f"the data set has {size} samples, too few for {count} ranks: let the script train on {2 * count} or "
                "more"
            )
        elif len(seen) == 1 and len(batches[0]) > 1:
            self.found.vacuous.append("all samples are the same: let the script train on others")
        if self.splits_model:
            self.found.notes.append("ranks hold parts of a model, and calculate with the same samples")
        elif self._same_everywhere(batches):
            self._all_the_same(batches, first)
        else:
            self._overlap(number, batches, described)
        self._order(number, described)
        self._lengths(number, first)

    # -- ranks that read the same

    def _same_everywhere(self, batches: Sequence[Sequence[Event]]) -> bool:
        common = min(len(each) for each in batches)
        prints = [[event["prints"] for event in each[:common]] for each in batches]
        return all(each == prints[0] for each in prints) and bool(prints[0]) and any(prints[0][0])

    def _all_the_same(self, batches: Sequence[Sequence[Event]], first: Event) -> None:
        if not self.found.shares_inputs:
            self.found.notes.append("every rank reads each batch whole, and calculates with its part")
            return
        sample = _sample(batches[0][0], 0)
        text = f"sample {sample} and all others are given to every rank"
        difference = Difference(SAMPLES, 0, 0, sample, tuple(range(len(batches))), text=text)
        self._add(difference, f"all ranks read the same data: {self._sharing(first)}", first)

    def _sharing(self, first: Event, overlaps: bool = False) -> str:
        """Why ranks get the same samples from a loader, and what helps.

        Args:
            first: what is known of the loader.
            overlaps: whether ranks get some of the same samples, and not all.
        """
        if first["size"] is None:
            return (
                f"the IterableDataset {first['dataset']} gives each of {len(self.ranks.ranks)} ranks the same samples: "
                "let each take its share, by itertools.islice(samples, rank, None, world_size)"
            )
        if first["shared_out"]:
            return f"{first['sampler']} {self._sampler_fault(first)}"
        if first["cut"] and overlaps:
            return (
                "their Subsets of the data overlap: cut the same order of indices on all ranks, as "
                "indices[rank::world_size], or use a DistributedSampler"
            )
        return f"{first['sampler']} does not share it out over the ranks: give the loader a DistributedSampler"

    def _sampler_fault(self, first: Event) -> str:
        """What is wrong with the DistributedSamplers of ranks that get the same samples."""
        own = [events[0] for events in self._events(first["loader"], "iteration", "order")]
        numbers, replicas, seeds = zip(*(event["share"] for event in own), strict=True)
        epochs = [event["epoch"] for event in own]
        if len(set(numbers)) < len(own):
            return f"is made with rank={_listed(numbers)} on the ranks: give it rank=dist.get_rank()"
        if len(set(seeds)) > 1:
            return f"is made with seed={_listed(seeds)} on the ranks: give all ranks the same"
        if len(set(epochs)) > 1:
            return f"is told the epochs {_listed(epochs)} on the ranks: give all ranks the same to set_epoch()"
        if first["cut"] and set(replicas) == {len(own)}:
            return (
                "shares out a Subset that is another one on each rank: cut the data by the same random numbers "
                "everywhere, as by random_split(..., generator=torch.Generator().manual_seed(0))"
            )
        return f"shares the data out over {replicas[0]} replicas: give it num_replicas=dist.get_world_size()"

    def _shares_inputs(self) -> bool:
        """Whether the models of all ranks got the same inputs, as far as they are known."""
        by_rank = [[event["inputs"] for event in rank.of("forward")] for rank in self.ranks.ranks]
        common = min(len(each) for each in by_rank)
        known = [each[:common] for each in by_rank]
        return all(each == known[0] for each in known) and any(known[0])

    def _overlap(self, number: int, batches: Sequence[Sequence[Event]], described: Sequence[Sequence[Event]]) -> None:
        first = described[0][0]
        if first["replacement"]:
            self.found.notes.append(f"{first['sampler']} draws with replacement: a sample may come on several ranks")
            return
        own = {each[0]["probe"] for each in described}
        if first["size"] is None or len(own) > 1 or batches[0][0]["indices"] is None:
            self._overlap_of_prints(batches, first)
            return
        epochs = [self._epoch(number, 0, rank) for rank in range(len(batches))]
        self._overlap_of_indices(epochs, first)

    def _epoch(self, number: int, iteration: int, rank: int) -> list[int]:
        """The indices of an epoch on a rank, those that were not reached included."""
        events = self.ranks.ranks[rank].of("batch", "rest", "order", loader=number, iteration=iteration)
        return [index for event in events for index in event["indices"] or ()]

    def _overlap_of_indices(self, epochs: Sequence[list[int]], first: Event) -> None:
        ranks = len(epochs)
        owners: dict[int, set[int]] = defaultdict(set)
        for rank, indices in enumerate(epochs):
            for index in indices:
                owners[index].add(rank)
        shared = [index for index, own in owners.items() if len(own) > 1]
        if len(shared) >= max(ranks, _most_that_fill(epochs, first)):
            whole = len({frozenset(each) for each in epochs}) == 1
            self._shared(shared[0], len(shared), owners, first, whole)  # the first one in the order of rank 0
            return
        if shared:
            self.found.notes.append(
                f"{first['sampler']} repeats {len(shared)} sample(s) at the end of an epoch to give all ranks as many"
            )
        self._lost(owners, first, ranks)

    def _shared(self, index: int, number: int, owners: dict[int, set[int]], first: Event, whole: bool) -> None:
        """Name a sample that several ranks get in an epoch.

        Args:
            index: of the sample.
            number: how many there are.
            owners: of each sample that comes.
            first: what is known of the loader.
            whole: whether all ranks get the same ones.
        """
        which = tuple(sorted(owners[index]))
        never = first["size"] - len(owners)
        text = f"sample {index} comes on ranks {', '.join(map(str, which))} in one epoch ({number} do"
        text += f", {never} of {first['size']} come on none)" if never > 0 else ")"
        what = "every rank goes through the whole data set" if whole else "ranks share samples"
        difference = Difference(SAMPLES, 0, 0, str(index), which, text=text)
        self._add(difference, f"{what}: {self._sharing(first, overlaps=not whole)}", first)

    def _lost(self, owners: dict[int, set[int]], first: Event, ranks: int) -> None:
        if not first["shared_out"] or first["size"] is None:
            return
        lost = first["size"] - len(owners)
        if lost > ranks * (first["batch_size"] or 1) and lost > 0.05 * first["size"]:
            missing = next(index for index in range(first["size"]) if index not in owners)
            text = f"sample {missing} comes on no rank ({lost} of {first['size']} do not)"
            text = f"{lost} of {first['size']} samples come on no rank" if first["cut"] else text
            cause = (
                "the sampler shares the data out over more ranks than there are: give it "
                "num_replicas=dist.get_world_size()"
            )
            self._add(Difference(SAMPLES, 0, 0, str(missing), text=text), cause, first)
        elif lost > 0:
            self.found.notes.append(f"{lost} sample(s) of {first['size']} are left out at the end of an epoch")

    def _overlap_of_prints(self, batches: Sequence[Sequence[Event]], first: Event) -> None:
        """Samples that are known by their content alone."""
        counts = [Counter(text for event in each for text in event["prints"] if text) for each in batches]
        drawn = min(sum(each.values()) for each in counts)
        own = all(len(each) > 0.9 * sum(each.values()) for each in counts)
        for rank, each in enumerate(counts[1:], 1):
            shared = set(counts[0]) & set(each)
            if own and drawn >= _FEW and len(shared) > drawn / 2:
                text = f"{len(shared)} of {drawn} samples come on ranks 0 and {rank}"
                cause = (
                    f"the data set {first['dataset']} gives every rank the same samples: let each rank take every "
                    "N-th, from its own on"
                )
                self._add(Difference(SAMPLES, 0, 0, "", (0, rank), text=text), cause, first)
                return

    def _lengths(self, number: int, first: Event) -> None:
        """Epochs that have other lengths on other ranks."""
        if self.ranks.has("join"):
            return
        ends: dict[int, dict[int, int]] = defaultdict(dict)
        for rank, event in self.ranks.of("iterated", loader=number):
            ends[event["iteration"]][rank] = event["batches"]
        for iteration, counts in sorted(ends.items()):
            if len(counts) == len(self.ranks.ranks) and len(set(counts.values())) > 1:
                told = told_by_rank(sorted(counts.items()))
                text = f"epoch {iteration} has other numbers of batches on other ranks ({told})"
                at = min(counts.values())
                difference = Difference(SAMPLES, at, at, "", tuple(counts), text=text)
                self.found.differences.append((difference, uneven(first["where"])))
                return

    # -- the order of epochs

    def _order(self, number: int, described: Sequence[Sequence[Event]]) -> None:
        first = described[0][0]
        epochs = [self._epoch(number, iteration, 0) for iteration in (0, 1)]
        length = min(len(each) for each in epochs)
        if not first["shuffles"] or length < _FEW or epochs[0][:length] != epochs[1][:length]:
            return
        at = len(self.ranks.first.of("batch", loader=number, iteration=0))
        text = "epoch 1 comes in the same order as epoch 0"
        cause = f"{first['sampler']} is not told the epoch: call sampler.set_epoch(epoch) before each"
        if not first["shared_out"]:
            cause = f"{first['sampler']} draws each epoch's order from the same seed"
        step = self.ranks.first.of("batch")[-1]["step"]
        self._add(Difference(SAMPLES, step, max(at, step), "", text=text), cause, first)

    # -- evaluation

    def _look_at_evaluation(self, number: int, described: Sequence[Sequence[Event]]) -> None:
        if not all(described):
            return
        first = described[0][0]
        if not first["shared_out"]:
            return
        epochs = [self._epoch(number, 0, rank) for rank in range(len(described))]
        counts = Counter(index for indices in epochs for index in indices)
        again = [index for index, count in counts.items() if count > 1]
        if again:
            self.found.padded.append(Padding(number, first["where"], again[0]))


def _training_loaders(ranks: Recording) -> set[int]:
    """Numbers of the loaders between whose batches a backward ran."""
    found: set[int] = set()
    for rank in ranks.ranks:
        newest: int | None = None
        open_ones: set[int] = set()
        for event in rank.events:
            if event["kind"] == "batch":
                newest = event["loader"]
                open_ones.add(newest)
            elif event["kind"] == "iterated":
                open_ones.discard(event["loader"])
            elif event["kind"] == "backward" and newest is not None:
                found |= open_ones
                found.add(newest)
    return found


def _sample(event: Event, position: int) -> str:
    indices = event["indices"]
    return str(indices[position]) if indices else event["prints"][position]


def _most_that_fill(epochs: Sequence[Sequence[int]], first: Event) -> int:
    """The number of samples on several ranks from which on they are no repeated ones that fill up an epoch."""
    if first["cut"] and not first["shared_out"]:
        return 1  # the script has cut the data itself
    filling = len(epochs) * (first["batch_size"] or 1)
    return max(1, min(filling, min(len(each) for each in epochs) // 2 + 1))


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))
