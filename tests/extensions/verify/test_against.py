"""`lockstep verify --against`: a script trains the same as at an earlier revision, or the first change is named."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from lockstep.cli.run import main
from lockstep.extensions.verify.against import RevisionCheck
from lockstep.extensions.verify.certificate import ALIKE, DIFFERENT, UNKNOWN
from tests.extensions.verify.small_script import LOSS, SCRIPT, Certify, changed, line_of, replaced

ADAM = changed(("SGD(model.parameters(), lr=0.05)", "Adam(model.parameters(), lr=0.05)"))
REFACTORED = changed(
    (LOSS, "sum((model(x) - y)[i : i + 2].square().sum() for i in range(0, len(x), 2)) / len(x)"),
    ("nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))", "nn.Sequential(*layers())"),
    ("def make_model", "def layers():\n    return nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)\n\n\ndef make_model"),
)
"""The sums of the loss in another order, and the same model from a function of its own."""


def git(*words: str) -> None:
    identity = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.com")
    subprocess.run(["git", *identity, *words], check=True, capture_output=True)


def commit(**files: str) -> None:
    """Commit files into a repository in the current folder; their names are without .py."""
    for name, text in files.items():
        path = Path(f"{name.replace('__', '/')}.py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "a revision")


def test_a_refactored_script_is_alike_and_nothing_is_left(certify: Certify, tmp_path: Path) -> None:
    commit(train=SCRIPT)
    certificate = certify(REFACTORED, RevisionCheck, devices=1, against="HEAD")
    assert certificate.verdict == ALIKE, str(certificate)
    assert "1 rank, now and at HEAD, 5 steps" in str(certificate)
    assert [row.outcome for row in certificate.rows if row.what == "samples"] == ["equal"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".git", "train.py"]
    listed = subprocess.run(["git", "worktree", "list"], check=True, capture_output=True, text=True).stdout
    assert len(listed.splitlines()) == 1
    status = subprocess.run(["git", "status", "--short"], check=True, capture_output=True, text=True).stdout
    assert status.split() == ["M", "train.py"]


OTHERS = {
    "the learning rate": (
        SCRIPT,
        changed(("lr=0.05", "lr=0.04")),
        "step 0: learning rate [0.04] now, [0.05] at HEAD",
        "other options of the optimizer: lr=0.04 (was 0.05) (train.py:",
    ),
    "eps": (
        ADAM,
        replaced(ADAM, ("lr=0.05)", "lr=0.05, eps=1e-6)")),
        "step 0: parameter of ",
        "other options of the optimizer: eps=1e-06 (was 1e-08) (train.py:",
    ),
    "the optimizer": (SCRIPT, ADAM, "step 0: parameter of ", "other options of the optimizer: class=Adam (was SGD)"),
    "the order of samples": (
        SCRIPT,
        changed(("DistributedSampler(data)", "DistributedSampler(data, seed=1)")),
        "step 0: samples differ: ",
        "the data, their order or the loader has changed (train.py:",
    ),
    "the data": (
        SCRIPT,
        changed(("manual_seed(3)", "manual_seed(4)")),
        "step 0: samples differ: 44 now, 44 at HEAD with other contents",
        "the data, their order or the loader has changed (train.py:",
    ),
    "the initial weights": (
        SCRIPT,
        changed(("manual_seed(0)", "manual_seed(1)")),
        "step 0: first parameter of ",
        "",
    ),
    "another layer": (
        SCRIPT,
        changed(("nn.Linear(32, 1)", "nn.Linear(32, 1), nn.Linear(1, 1)")),
        "step 0: first parameters differ: optimizer 0 with 6 parameters now, optimizer 0 with 4 parameters at HEAD",
        "",
    ),
    "the loss": (
        SCRIPT,
        changed((LOSS, "F.l1_loss(model(x), y)")),
        "step 0: gradient of ",
        f"a changed computation (train.py:{line_of(SCRIPT, LOSS)})",
    ),
    "the clipping of gradients": (
        changed(("loss.backward()", "loss.backward(); nn.utils.clip_grad_norm_(model.parameters(), 0.1)")),
        changed(("loss.backward()", "loss.backward(); nn.utils.clip_grad_norm_(model.parameters(), 0.2)")),
        "step 0: gradients at the step of ",
        "another clipping, or another change of gradients before the step (train.py:",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_what_has_changed_is_named(name: str, certify: Certify) -> None:
    before, after, first, cause = OTHERS[name]
    commit(train=before)
    certificate = certify(after, RevisionCheck, devices=2 if name == "the loss" else 1, against="HEAD")
    assert certificate.verdict == DIFFERENT, str(certificate)
    assert certificate.first_difference.startswith(first)
    assert certificate.cause.startswith(cause)


RANDOM = changed(("torch.manual_seed(0)", "torch.seed()"))


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after", "when"), [(SCRIPT, RANDOM, "now"), (RANDOM, SCRIPT, "at HEAD")])
def test_a_script_that_trains_differently_each_time_has_no_verdict(
    before: str, after: str, when: str, certify: Certify
) -> None:
    commit(train=before)
    certificate = certify(after, RevisionCheck, devices=1, against="HEAD")
    assert certificate.verdict == UNKNOWN, str(certificate)
    assert f"two runs {when} differ (step 0: first parameter of " in certificate.reasons[0]


@pytest.mark.slow
def test_modules_come_from_the_revision_and_data_from_the_working_tree(certify: Certify, tmp_path: Path) -> None:
    text = f"import part\nopen('data/x.txt').read()\n{changed(('lr=0.05', 'lr=part.RATE'))}"
    commit(train=text, part="RATE = 0.05\n")
    Path("data").mkdir()
    Path("data/x.txt").touch()
    Path("part.py").write_text("RATE = 0.04\n")
    certificate = certify(Path("train.py"), RevisionCheck, devices=1, against="HEAD")
    assert certificate.first_difference == "step 0: learning rate [0.04] now, [0.05] at HEAD", str(certificate)
    again = certify(tmp_path / "train.py", RevisionCheck, devices=1, against="HEAD")
    assert again.first_difference == certificate.first_difference


@pytest.mark.slow
def test_a_module_of_the_working_tree_in_the_revision_is_refused(certify: Certify, tmp_path: Path) -> None:
    """As one that is installed in editable mode by a finder of its own."""
    text = f"import sys\nsys.path.insert(0, {str(tmp_path / 'src')!r})\nimport part\n{SCRIPT}"
    commit(train=text, src__part="RATE = 0.05\n")
    certificate = certify(Path("train.py"), RevisionCheck, devices=1, against="HEAD")
    assert certificate.verdict == UNKNOWN, str(certificate)
    assert f"{tmp_path / 'src/part.py'} is imported from the working tree" in certificate.reasons[0]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["train.py", "--against", "nothing"], "--against nothing: there is no such revision"),
        (["new.py", "--against", "HEAD"], "--against HEAD: new.py does not exist at this revision"),
        (["train.py", "--against", "HEAD", "--resume"], "--resume --against: run a separate command for each"),
        (["train.py", "--against", "HEAD", "--devices", "0"], "--devices 0: pass numbers of ranks, each at least 1"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    words: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    commit(train=SCRIPT)
    Path("new.py").touch()
    assert main(["verify", *words]) == 2
    assert sentence in capsys.readouterr().err


def test_a_folder_without_a_repository_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    Path("train.py").touch()
    assert main(["verify", "train.py", "--against", "HEAD"]) == 2
    assert f"--against HEAD: {tmp_path} is not in a git repository" in capsys.readouterr().err
