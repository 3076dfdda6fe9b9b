"""Comparison of a script with the same script at an earlier revision of its git repository, on the same ranks."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from lockstep.extensions.verify import refusals
from lockstep.extensions.verify.calls import TRACE, first_new_line
from lockstep.extensions.verify.certificate import Certificate
from lockstep.extensions.verify.compare import (
    CLIPPED,
    FIRST,
    GRADIENTS,
    PARAMETERS,
    RATES,
    SAMPLES,
    STEPS,
    Comparison,
    Difference,
    Numbers,
    Reason,
    exact,
    shorten,
)
from lockstep.extensions.verify.recordings import RankRecording, Recording
from lockstep.extensions.verify.runs import Request, Runs, copy_entries
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
        self.revision = request.against
        self.compared = f"rank{'s' * (request.devices > 1)}, now and at {self.revision}"
        self.earlier = self._check_out()

    def certify(self) -> Certificate:
        """Run the script of both versions and return the certificate."""
        now, earlier = self._run_both()
        if any(map(refusals.is_type_error, (now, earlier))):
            self.runs.float64 = self.earlier.float64 = False
            now, earlier = self._run_both()
        reason = self._refuse(now, earlier)
        if reason:
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
        for name, pair in (("now", (now, again)), (f"at {self.revision}", (earlier, earlier_again))):
            other = self._compare(*pair).first
            if other is not None:
                return self._certify_unknown(
                    f"the script trains differently when it runs twice {name} ({other}): set the seeds of all random "
                    "numbers, and do not use the time"
                )
        cause = self._cause(first, again, earlier_again)
        is_number = first.kind not in (SAMPLES, RATES, STEPS)
        if is_number and cause is None and (first.size < CERTAIN or not self.runs.float64):
            return self._certify_unknown(f"the difference may be rounding, and no cause was found: {first}")
        return self._certify_different(now, first, cause)

    def _run_both(self, *overrides: str) -> tuple[Recording, Recording]:
        return self.runs.on_ranks(*overrides), self.earlier.on_ranks(*overrides)

    def _refuse(self, now: Recording, earlier: Recording) -> str:
        """Explain why the runs cannot be compared, and suggest a remedy. Return "" if they can."""
        file = earlier.first.line_of("not moved")
        if file:
            return (
                f"also at {self.revision} the script imports {file} from the working tree: do not install the "
                "repository in editable mode, and set PYTHONPATH to the folder in it that holds the packages"
            )
        reason = refusals.check_ranks(now, 1)
        if reason:
            return reason
        reason = refusals.check_ranks(earlier, 1)
        return f"at {self.revision}: {reason}" if reason else ""

    # -- the revision

    def _check_out(self) -> Runs:
        """Write the revision into a folder, and return what runs the script there."""
        request, option = self.request, f"--against {self.revision}"
        if shutil.which("git") is None:
            raise MisconfigurationException(f"{option}: git is not installed, or not on PATH")
        here = Path.cwd()
        root = Path(_git(f"{option}: {here} is not in a git repository", "rev-parse", "--show-toplevel").strip())
        unknown = f"{option}: there is no such revision. In a shallow clone, fetch it first"
        commit = _git(unknown, "rev-parse", "--verify", "--quiet", f"{self.revision}^{{commit}}").strip()
        words, script = request.words, ""
        if words[0] != "-m":
            script = os.path.relpath(os.path.realpath(words[0]), here)
            words = (script, *words[1:])  # an absolute path would be that of the working tree
        missing = f"{option}: {script or here} does not exist at this revision"
        _git(missing, "cat-file", "-e", f"{commit}:./{script}")
        copy = self.runs.folder / "revision"
        copy.mkdir(parents=True)
        problem = f"{option}: the revision cannot be checked out"
        index = str(self.runs.folder / "index")  # the repository's own index stays as it is
        in_root = ("-C", str(root))
        _git(problem, *in_root, "read-tree", commit, index=index)
        _git(problem, *in_root, "checkout-index", "--all", f"--prefix={copy}/", index=index)
        untracked = _git(problem, *in_root, "ls-files", "-z", "--others", "--directory", "--exclude=__pycache__/")
        copy_entries(root, [".git", *untracked.split("\0")[:-1]], copy)
        moved = (str(root), str(copy))
        home = copy / here.relative_to(root)
        return Runs(replace(request, words=words), self.runs.folder / "runs", self.runs.server, home, moved)

    # -- comparing

    def _compare(self, now: Recording, earlier: Recording) -> Comparison:
        """Compare two runs, each rank with itself."""
        found = Comparison()
        for rank, (own, other) in reversed([*enumerate(zip(now.ranks, earlier.ranks, strict=True))]):
            where = f"at {self.revision}"
            numbers = Numbers(Recording((own,)), Recording((other,)), exact, names=("now", where)).compare()
            own_differences = [*_other_samples(own, other, where), *_other_optimizers(own, other, where)]
            numbers.differences += own_differences
            numbers.differences = [replace(each, ranks=(rank,)) for each in numbers.differences] + found.differences
            found = numbers  # in the end rank 0's, with the differences of all ranks
        return found

    def _cause(self, first: Difference, now: Recording, earlier: Recording) -> Reason | None:
        """Find the cause of the first difference in two runs that have traced its update."""
        own, other = (run.ranks[first.ranks[0]] for run in (now, earlier))
        if first.kind == SAMPLES:
            return Reason("the data, their order or the loader has changed", own.line_of("iteration"))
        if first.kind == CLIPPED:
            return Reason("another clipping, or another change of gradients before the step", own.line_of("clipped"))
        if first.kind == GRADIENTS:
            line = first_new_line(own.find("call"), other.find("call"))
            return (
                Reason("a changed computation", line, "no earlier call of torch has the same result") if line else None
            )
        if first.kind not in (RATES, PARAMETERS):
            return None
        step, before = (run.find("step", update=first.update)[0] for run in (own, other))
        for group, old in zip(step["options"], before["options"], strict=False):
            changed = [name for name in group if name in old and group[name] != old[name]]
            if changed:
                listed = ", ".join(f"{name}={group[name]} (was {old[name]})" for name in changed)
                return Reason(f"other options of {step['name']}: {listed}", step["where"])
        return Reason(f"the optimizer is {step['name']}, and was {before['name']}", step["where"])


def _git(problem: str, *words: str, index: str = "") -> str:
    """Run git and return its output.

    Raises:
        MisconfigurationException: git failed. The message is ``problem`` and git's own.
    """
    environ = {**os.environ, "GIT_INDEX_FILE": index} if index else None
    run = subprocess.run(["git", *words], env=environ, capture_output=True, text=True, check=False)
    if run.returncode:
        said = run.stderr.strip().splitlines()
        raise MisconfigurationException(f"{problem} (git: {said[-1]})" if said else problem)
    return run.stdout


def _other_samples(own: RankRecording, other: RankRecording, where: str) -> Iterator[Difference]:
    """Yield the differences between the samples that a rank trains on in each step of two runs."""
    for event in own.steps:
        runs = [rank.find("batch", grad=True, step=event["number"]) for rank in (own, other)]
        prints = [[text for batch in batches for text in batch["prints"]] for batches in runs]
        if prints[0] != prints[1]:
            now, earlier = (
                shorten([each for batch in batches for each in batch["indices"] or batch["prints"]]) or "none"
                for batches in runs
            )
            text = f"samples differ: {now}; {where}: {earlier}"
            if now == earlier:
                text = f"samples differ: the contents of {now}"
            yield Difference(SAMPLES, event["number"], event["update"], "", text=text)


def _other_optimizers(own: RankRecording, other: RankRecording, where: str) -> Iterator[Difference]:
    """Yield a difference for each step that another optimizer makes, or one with another number of parameters."""
    for event, before in zip(own.steps, other.steps, strict=False):
        now, earlier = (
            f"optimizer {step['optimizer']} with {len(step['names'])} parameters" for step in (event, before)
        )
        if now != earlier:
            text = f"the step of {now}; {where}: of {earlier}"
            yield Difference(FIRST, event["number"], event["update"], "", text=text)
