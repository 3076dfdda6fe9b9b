"""Comparison of a script with the same script at an earlier revision of its git repository, on the same ranks."""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, zip_longest
from pathlib import Path

from lockstep.extensions.verify import compare, refusals
from lockstep.extensions.verify.calls import TRACE, first_new_line
from lockstep.extensions.verify.certificate import Certificate
from lockstep.extensions.verify.compare import Comparison, Difference, Numbers, Reason
from lockstep.extensions.verify.recordings import Event, RankRecording, Recording
from lockstep.extensions.verify.runs import Request, Runs, working_copy
from lockstep.extensions.verify.verification import CERTAIN, Verification
from lockstep.ground.errors import MisconfigurationException


class RevisionCheck(Verification):
    """Check that a script trains the same as at an earlier revision, with the same seeds, rank by rank.

    The revision is checked out into a temporary folder. Files that git does not track, such as data, are added to it
    from the working tree.

    Args:
        request: what to verify, and the revision.
        runs: runs the script of the working tree.

    Raises:
        MisconfigurationException: the revision, or the script in it, does not exist.
    """

    def __init__(self, request: Request, runs: Runs) -> None:
        super().__init__(request, runs)
        self.there = f"at {request.against}"
        self.earlier = self._check_out()

    def certify(self) -> Certificate:
        """Run the script of both versions and return the certificate."""
        compared = f"rank{'s' * (self.request.devices > 1)}, now and {self.there}"
        return replace(self._certify(), compared=compared)

    def _certify(self) -> Certificate:
        now, earlier = self._run_both()
        if refusals.is_type_error(now) or refusals.is_type_error(earlier):
            self.runs.float64 = self.earlier.float64 = False
            now, earlier = self._run_both()
        if reason := self._refuse(now, earlier):
            return self._certify_unknown(reason)
        self.comparison = self._compare(now, earlier)
        self.comparison.samples = "equal"
        self.samples.compared = len(now.first.find("batch", grad=True))
        if now.has("dropout") or earlier.has("dropout"):
            self.notes.append("dropout was disabled: its probability was not compared")
        first = self.comparison.first
        return self._certify_alike(now) if first is None else self._explain(first, now, earlier)

    def _explain(self, first: Difference, now: Recording, earlier: Recording) -> Certificate:
        """Run both versions again, and find the cause of a difference. A script that varies has no verdict."""
        again, earlier_again = self._run_both(f"{TRACE} {first.update}")
        for name, pair in (("now", (now, again)), (self.there, (earlier, earlier_again))):
            other = self._compare(*pair).first
            if other is not None:
                return self._certify_unknown(f"two runs {name} differ ({other}): set the seeds of all random numbers")
        cause = self._cause(first, again, earlier_again)
        is_small = first.size < (CERTAIN if self.runs.float64 else math.inf)
        if is_small and (cause is None or not self.runs.float64):
            return self._certify_unknown(f"the difference may be rounding: {first}")
        return self._certify_different(now, first, cause)

    def _run_both(self, *overrides: str) -> tuple[Recording, Recording]:
        return self.runs.on_ranks(*overrides), self.earlier.on_ranks(*overrides)

    def _refuse(self, now: Recording, earlier: Recording) -> str:
        """Explain why the runs cannot be compared, and suggest a remedy. Return "" if they can."""
        reason = refusals.check_ranks(earlier)
        file = earlier.first.line_of("not moved")
        if file:
            reason = f"{file} is imported from the working tree: uninstall it, and set PYTHONPATH to its folder"
        return refusals.check_ranks(now) or (f"{self.there}: {reason}" if reason else "")

    # -- the revision

    def _check_out(self) -> Runs:
        """Write the revision into a folder, and return what runs the script there."""
        here, words, script = Path.cwd(), self.request.words, ""
        root = self._git(f"{here} is not in a git repository", "rev-parse", "--show-toplevel").strip()
        unknown = "there is no such revision; in a shallow clone, fetch it first"
        commit = self._git(unknown, "rev-parse", "--verify", "--quiet", f"{self.request.against}^{{commit}}").strip()
        if words[0] != "-m":
            # an absolute path would be that of the working tree
            script = os.path.relpath(os.path.realpath(words[0]), here)
            words = (script, *words[1:])
        self._git(f"{script or here} does not exist at this revision", "cat-file", "-e", f"{commit}:./{script}")
        folder = self.runs.folder
        copy, in_root = folder / "revision", ("the revision cannot be checked out", "-C", root)
        copy.mkdir(parents=True)
        self._git(*in_root, "read-tree", commit)
        self._git(*in_root, "checkout-index", "--all", f"--prefix={copy}/")
        untracked = self._git(*in_root, "ls-files", "-z", "--others", "--directory", "--exclude=__pycache__/", own=True)
        working_copy(Path(root), copy, [".git", *untracked.split("\0")[:-1]])
        earlier = Runs(replace(self.request, words=words), folder / "runs", self.runs.server)
        earlier.home, earlier.moved = copy / here.relative_to(root), (root, str(copy))
        return earlier

    def _git(self, problem: str, *words: str, own: bool = False) -> str:
        """Run git and return its output. It has an index of its own, unless ``own`` requests the repository's.

        Raises:
            MisconfigurationException: git failed. The message is ``problem`` and git's own.
        """
        environ = dict(os.environ) if own else {**os.environ, "GIT_INDEX_FILE": str(self.runs.folder / "index")}
        run = subprocess.run(["git", *words], env=environ, capture_output=True, text=True, check=False)
        if run.returncode:
            raise MisconfigurationException(f"--against {self.request.against}: {problem}. {run.stderr}".strip())
        return run.stdout

    # -- comparing

    def _compare(self, now: Recording, earlier: Recording) -> Comparison:
        """Compare two runs, each rank with itself."""
        found = Comparison()
        for rank, (own, other) in reversed([*enumerate(zip(now.ranks, earlier.ranks, strict=True))]):
            numbers = Numbers(Recording((own,)), Recording((other,)), compare.exact)
            numbers.names = ("now", self.there)
            result = numbers.compare()
            every = [*result.differences, *self._other_inputs(own, other)]
            # in the end rank 0's result, with the differences of all ranks
            result.differences = [replace(each, ranks=(rank,)) for each in every] + found.differences
            found = result
        return found

    def _other_inputs(self, own: RankRecording, other: RankRecording) -> Iterator[Difference]:
        """Yield the first difference in the optimizers, and in the samples, of each step of a rank."""
        for event, before in zip(own.steps, other.steps, strict=False):
            earlier = _inputs(other, before)
            for kind, values in _inputs(own, event).items():
                for (key, name), (old_key, old_name) in zip_longest(values, earlier[kind], fillvalue=("", "none")):
                    if key != old_key:
                        contents = " with other contents" * (name == old_name)
                        text = f"{kind} differ: {name} now, {old_name} {self.there}{contents}"
                        yield Difference(kind, event["number"], event["update"], "", text=text)
                        break

    def _cause(self, first: Difference, now: Recording, earlier: Recording) -> Reason | None:
        """Find the cause of the first difference in two runs that have traced its update."""
        own, other = (run.ranks[first.ranks[0]] for run in (now, earlier))
        if first.kind == compare.SAMPLES:
            return Reason("the data, their order or the loader has changed", own.line_of("iteration"))
        if first.kind == compare.CLIPPED:
            return Reason("another clipping, or another change of gradients before the step", own.line_of("clipped"))
        if first.kind == compare.GRADIENTS:
            line = first_new_line(own.find("call"), other.find("call"))
            return Reason("a changed computation", line) if line else None
        if first.kind not in (compare.RATES, compare.PARAMETERS):
            return None
        step, before = (run.find("step", update=first.update)[0] for run in (own, other))
        for group, old in zip(step["options"], before["options"], strict=False):
            names = [name for name in group if name in old and group[name] != old[name]]
            if names:
                changed = ", ".join(f"{name}={group[name]} (was {old[name]})" for name in names)
                return Reason(f"other options of the optimizer: {changed}", step["where"])
        return None


def _inputs(rank: RankRecording, step: Event) -> dict[str, list[tuple[str, object]]]:
    """Return a step's optimizer, and its samples, as tuples of what is compared and a name."""
    optimizer = f"optimizer {step['optimizer']} with {len(step['names'])} parameters"
    batches = rank.find("batch", grad=True, step=step["number"])
    pairs = (zip(each["prints"], each["indices"] or each["prints"], strict=False) for each in batches)
    return {compare.FIRST: [(optimizer, optimizer)], compare.SAMPLES: [*chain(*pairs)]}
