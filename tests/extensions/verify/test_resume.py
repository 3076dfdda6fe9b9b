"""`lockstep verify --resume`: a run that is stopped and started again continues as if it had not been stopped."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from lockstep.extensions.verify.certificate import ALIKE, DIFFERENT, UNKNOWN
from lockstep.extensions.verify.resume import ResumeCheck
from tests.extensions.verify.bugs import BUGS
from tests.extensions.verify.small_script import Certify

SCRIPT = BUGS["resume_first_order"].text
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
        "for i, (x, y) in enumerate(loader):\n",
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
NORMED = RIGHT.replace("nn.Tanh()", "nn.BatchNorm1d(32), nn.Tanh()")
WITHOUT_BUFFERS = NORMED.replace("model.module.state_dict()", "dict(model.module.named_parameters())").replace(
    '(state["model"])', '(state["model"], strict=False)'
)
FIRST = "step 3 (0 after the stop)"
LOST = {
    "the order of epoch 0": (SCRIPT, FIRST, "the order of epoch 0 is repeated", True),
    # each loader had a number of its own: the first stop came too late, and gradients seemed to differ
    "the order of a loader for each epoch": (
        SCRIPT.replace("in enumerate(loader):", "in enumerate(DataLoader(dataset, 8, sampler=sampler)):"),
        f"{FIRST} on rank 0 trains on sample ",
        "the order of epoch 0 is repeated",
        True,
    ),
    "the optimizer's state": (
        RIGHT.replace('optimizer.load_state_dict(state["optimizer"])', "pass"),
        f"{FIRST}: parameters of ",
        "the optimizer starts without its state",
        False,
    ),
    # no gradient depends on them
    "BatchNorm's statistics": (
        WITHOUT_BUFFERS,
        f"{FIRST}: buffers of 1.",
        "buffers (such as BatchNorm's running statistics) are not those at the stop",
        False,
    ),
    # the weights seemed to be lost
    "random numbers": (
        RIGHT.replace("model(x)", "model(x + 0.1 * torch.randn_like(x))"),
        FIRST,
        "the random numbers of a step differ",
        True,
    ),
    "the place within an epoch": (
        WITHIN.replace("i < at", "i < 0"),
        "step 1 (0 after a stop within the epoch)",
        "the position within the epoch is not restored",
        True,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("text", [RIGHT, NORMED])
def test_a_script_that_resumes_is_alike(text: str, certify: Certify) -> None:
    certificate = certify(text, ResumeCheck)
    assert certificate.verdict == ALIKE, str(certificate)
    assert "leaves no checkpoint at that step" in certificate.notes[0]
    assert not Path("checkpoint.pt").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", LOST)
def test_what_is_not_restored_is_named(name: str, certify: Certify) -> None:
    text, first, cause, has_line = LOST[name]
    certificate = certify(text, ResumeCheck)
    assert certificate.verdict == DIFFERENT, str(certificate)
    assert certificate.first_difference.startswith(first)
    assert certificate.cause.startswith(cause)
    assert ("(train.py:" in certificate.cause) is has_line


@pytest.mark.slow
def test_a_script_that_starts_from_the_beginning_is_refused(certify: Certify) -> None:
    certificate = certify(RIGHT.replace("if os.path.exists(args.checkpoint):", "if False:"), ResumeCheck)
    assert certificate.verdict == UNKNOWN
    assert "the script trains from the start" in certificate.reasons[0]


@pytest.mark.slow
def test_a_script_that_saves_at_sigterm_continues_within_an_epoch(certify: Certify) -> None:
    certificate = certify(WITHIN, ResumeCheck)
    assert certificate.verdict == ALIKE, str(certificate)
    assert "samples within an epoch" in [row.what for row in certificate.rows]
    assert not certificate.notes
