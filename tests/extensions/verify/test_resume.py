"""`lockstep verify --resume`: a run that is stopped behind an epoch and started again goes on as if it had not been."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.extensions.verify.certificate import ALIKE, DIFFERENT, UNKNOWN, Certificate
from lockstep.extensions.verify.processes import Patience, Server
from lockstep.extensions.verify.resume import ResumeCheck
from lockstep.extensions.verify.runs import Request
from lockstep.extensions.verify.verification import verify

SCRIPT = (Path(__file__).parent / "scripts/bugs/resume_first_order.py").read_text()
RIGHT = SCRIPT.replace("for epoch in range(args.epochs - done):", "for epoch in range(done, args.epochs):").replace(
    "done + epoch", "epoch"
)
SAVES_AT_SIGTERM = (
    ("import os", "import os, signal, sys"),
    (
        "    done = 0\n",
        "    done, at, stops = 0, 0, []\n    signal.signal(signal.SIGTERM, lambda *given: stops.append(1))\n",
    ),
    ('done = state["epochs"]', 'done, at = state["epochs"], state.get("at", 0)'),
    (
        "for x, y in loader:\n",
        "for i, (x, y) in enumerate(loader):\n            if epoch == done and i < at: continue\n",
    ),
    ("            optimizer.step()\n", "            optimizer.step()\n            if stops: break\n"),
    (
        "        save(args",
        "        if stops: save(args.checkpoint, model, optimizer, epoch, i + 1); sys.exit(0)\n        save(args",
    ),
    ("optimizer, done):", "optimizer, done, at=0):"),
    ('"epochs": done}', '"epochs": done, "at": at}'),
)
WITHIN = functools.reduce(lambda text, change: text.replace(*change), SAVES_AT_SIGTERM, RIGHT)
Check = Callable[[str], Certificate]


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server) -> Check:
    monkeypatch.chdir(tmp_path)

    def certified(text: str) -> Certificate:
        Path("train.py").write_text(text)
        request = Request(("train.py",), patience=Patience(60.0, 300.0))
        return verify(request, ResumeCheck, server)

    return certified


@pytest.mark.slow
def test_a_script_that_resumes_is_alike(check: Check) -> None:
    certificate = check(RIGHT)
    assert certificate.verdict == ALIKE, str(certificate)
    assert "leaves no checkpoint of that place" in certificate.nature[0]
    assert not Path("checkpoint.pt").exists()


@pytest.mark.slow
def test_the_order_of_epoch_0_again_is_named(check: Check) -> None:
    certificate = check(SCRIPT)
    assert certificate.verdict == DIFFERENT
    assert "the order of epoch 0 comes again" in certificate.cause
    assert "train.py:" in certificate.cause


@pytest.mark.slow
def test_a_loader_that_is_made_anew_for_each_epoch_is_the_same_one(check: Check) -> None:
    """Each counted as another one: the first stop came too late, and gradients were said to differ."""
    certificate = check(SCRIPT.replace("in loader:", "in DataLoader(dataset, 8, sampler=sampler):"))
    assert certificate.verdict == DIFFERENT
    assert certificate.first.startswith("step 3 (0 behind the stop) on rank 0 trains on sample ")
    assert "the order of epoch 0 comes again" in certificate.cause


@pytest.mark.slow
def test_an_optimizer_that_begins_anew_is_named(check: Check) -> None:
    certificate = check(RIGHT.replace('optimizer.load_state_dict(state["optimizer"])', "pass"))
    assert certificate.verdict == DIFFERENT
    assert certificate.first.startswith("step 3 (0 behind the stop): parameters of ")
    assert "the optimizer begins anew" in certificate.cause


NORMED = RIGHT.replace("nn.Tanh()", "nn.BatchNorm1d(24), nn.Tanh()")


@pytest.mark.slow
def test_statistics_of_batchnorm_that_are_not_restored_are_named(check: Check) -> None:
    """Nothing was said: no gradient follows from them."""
    assert check(NORMED).verdict == ALIKE
    lost = NORMED.replace("model.module.state_dict()", "dict(model.module.named_parameters())")
    certificate = check(lost.replace('(state["model"])', '(state["model"], strict=False)'))
    assert certificate.verdict == DIFFERENT, str(certificate)
    assert certificate.first.startswith("step 3 (0 behind the stop): buffers of 1.")
    assert certificate.cause.startswith("buffers (BatchNorm's running statistics, say) are not those of the stop")


@pytest.mark.slow
def test_other_random_numbers_are_named(check: Check) -> None:
    """The weights were said not to be restored."""
    certificate = check(RIGHT.replace("model(x)", "model(x + 0.1 * torch.randn_like(x))"))
    assert certificate.verdict == DIFFERENT, str(certificate)
    assert certificate.cause.startswith("the random numbers of a step are others")
    assert "(train.py:" in certificate.cause


@pytest.mark.slow
def test_a_script_that_begins_anew_is_refused(check: Check) -> None:
    certificate = check(RIGHT.replace("if os.path.exists(args.checkpoint):", "if False:"))
    assert certificate.verdict == UNKNOWN
    assert "the script begins anew" in certificate.reasons[0]


@pytest.mark.slow
def test_a_script_that_saves_at_sigterm_goes_on_within_an_epoch(check: Check) -> None:
    certificate = check(WITHIN)
    assert certificate.verdict == ALIKE, str(certificate)
    assert "samples within an epoch" in [row.what for row in certificate.rows]
    assert not certificate.nature


@pytest.mark.slow
def test_an_epoch_that_begins_anew_within_it_is_named(check: Check) -> None:
    certificate = check(WITHIN.replace("i < at", "i < 0"))
    assert certificate.verdict == DIFFERENT, str(certificate)
    assert certificate.first.startswith("step 1 (0 behind a stop within the epoch)")
    assert certificate.cause.startswith("the place within the epoch is not restored")
    assert "(train.py:" in certificate.cause
