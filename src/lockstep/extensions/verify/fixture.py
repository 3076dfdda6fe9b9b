"""Implementation of pytest's fixture ``verified``, which runs `lockstep verify` in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pytest

from lockstep.extensions.verify.certificate import DIFFERENT, Certificate, read

_COMMAND = "import sys; del sys.path[0]; from lockstep.cli.run import main; sys.exit(main())"
"""The command lockstep. As the script of that name, it imports nothing from the current folder."""


class Verified:
    """Function that verifies a script in a test.

    Args:
        folder: working directory of the command, to which the paths of scripts are relative.
        ranks: numbers of ranks, such as "2,4", in place of those that a test passes; None: those of the test.
    """

    def __init__(self, folder: Path, ranks: str | None) -> None:
        self.folder = folder
        self.ranks = ranks

    def __call__(
        self,
        script: str,
        *arguments: str,
        devices: Sequence[int] = (),
        steps: int = 5,
        strategy: str = "",
        patience: float = 90.0,
        against: str = "",
        unknown: Literal["fail", "skip"] = "fail",
    ) -> list[Certificate]:
        """Verify a script. Fail the test, with the certificate as the message, unless the verdict is "alike".

        Args:
            script: path of the script, relative to pytest's rootdir.
            arguments: arguments of the script.
            devices: numbers of ranks; empty: the default of the command.
            steps: optimizer steps that are compared.
            strategy: strategy that Trainers use on several ranks; "" for their own.
            patience: seconds without progress after which a run is stopped.
            against: git revision with which the script is compared, in place of one process; "" for none.
            unknown: "skip" to skip the test, and not to fail it, if the verdict is "could not tell".

        Returns:
            A certificate for each number of ranks.
        """
        options = {
            "--devices": self.ranks or ",".join(map(str, devices)),
            "--steps": str(steps),
            "--strategy": strategy,
            "--patience": str(patience),
            "--against": against,
        }
        with tempfile.TemporaryDirectory(prefix="lockstep-verify-") as output:
            words = [f"{name}={value}" for name, value in {**options, "--output": output}.items() if value]
            command = [sys.executable, "-c", _COMMAND, "verify", *words, script, "--", *arguments]
            run = subprocess.run(command, cwd=self.folder, stdin=subprocess.DEVNULL, capture_output=True, text=True)
            path = Path(output) / "certificate.json"
            certificates = read(path) if path.exists() else []
        if not certificates:
            pytest.fail(run.stderr.strip(), pytrace=False)
        text = "\n\n".join(str(each) for each in certificates if not each)
        if text and unknown == "skip" and all(each.verdict != DIFFERENT for each in certificates):
            pytest.skip(text)
        if text:
            pytest.fail(text, pytrace=False)
        return certificates
