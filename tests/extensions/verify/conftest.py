"""One server of `lockstep verify` for all its tests: its import of torch is most of what a run costs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.extensions.verify.certificate import Certificate
from lockstep.extensions.verify.processes import Patience, Server
from lockstep.extensions.verify.runs import Request
from lockstep.extensions.verify.verification import verify
from tests.extensions.verify.small_script import Certify


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with Server() as started:
        yield started


@pytest.fixture
def certify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server) -> Certify:
    """Verify a file, or a text as train.py, in an empty current folder."""
    monkeypatch.chdir(tmp_path)

    def certified(script: str | Path, check: object = None, used: Server = server, **request: object) -> Certificate:
        if isinstance(script, str):
            Path("train.py").write_text(script)
            script = Path("train.py")
        flags: dict[str, object] = {"patience": Patience(silence=60.0, total=300.0), **request}
        return verify(Request((str(script),), **flags), check, used)  # type: ignore[arg-type]

    return certified
