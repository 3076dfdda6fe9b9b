"""`lockstep verify --resume`: a run that is stopped behind an epoch and started again goes on as if it had not been."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.verify.certificate import ALIKE, DIFFERENT, UNKNOWN, Certificate
from lockstep.verify.processes import Patience, Server
from lockstep.verify.resume import ResumeCheck
from lockstep.verify.verification import Request, verify

SCRIPT = (Path(__file__).parent / "scripts/bugs/resume_first_order.py").read_text()
RIGHT = SCRIPT.replace("for epoch in range(args.epochs - done):", "for epoch in range(done, args.epochs):").replace(
    "done + epoch", "epoch"
)
Check = Callable[[str], Certificate]


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server) -> Check:
    monkeypatch.chdir(tmp_path)

    def certified(text: str) -> Certificate:
        Path("train.py").write_text(text)
        request = Request(("train.py",), patience=Patience(60.0, 300.0))
        return verify(request, lambda verification: ResumeCheck(request, verification).certify(), server)

    return certified


@pytest.mark.slow
def test_a_script_that_resumes_is_alike(check: Check) -> None:
    certificate = check(RIGHT)
    assert certificate.verdict == ALIKE, str(certificate)
    assert not Path("checkpoint.pt").exists()


@pytest.mark.slow
def test_the_order_of_epoch_0_again_is_named(check: Check) -> None:
    certificate = check(SCRIPT)
    assert certificate.verdict == DIFFERENT
    assert "the order of epoch 0 comes again" in certificate.cause
    assert "train.py:" in certificate.cause


@pytest.mark.slow
def test_an_optimizer_that_begins_anew_is_named(check: Check) -> None:
    certificate = check(RIGHT.replace('optimizer.load_state_dict(state["optimizer"])', "pass"))
    assert certificate.verdict == DIFFERENT
    assert certificate.first.startswith("step 3 (0 behind the stop): parameters of ")
    assert "the optimizer begins anew" in certificate.cause


@pytest.mark.slow
def test_a_script_that_begins_anew_is_refused(check: Check) -> None:
    certificate = check(RIGHT.replace("if os.path.exists(args.checkpoint):", "if False:"))
    assert certificate.verdict == UNKNOWN
    assert "the script begins anew" in certificate.reasons[0]
