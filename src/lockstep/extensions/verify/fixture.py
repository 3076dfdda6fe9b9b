"""Implementation of pytest's fixture ``verified``, which runs `lockstep verify` in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_COMMAND = "import sys; del sys.path[0]; from lockstep.cli.run import main; sys.exit(main())"
"""The command lockstep. As the script of that name, it imports nothing from the current folder."""


def verified(
    folder: Path,
    ranks: str | None,
    script: str,
    *arguments: str,
    devices: Sequence[int] = (),
    unknown: str = "fail",
    **options: object,
) -> list[dict[str, Any]]:
    """Verify a script. Fail the test, with the certificates as the message, unless the runs agree.

    Args:
        folder: working directory of the command, to which the path of the script is relative.
        ranks: numbers of ranks, such as "2,4", in place of ``devices``.
        script: path of the script.
        arguments: arguments of the script.
        devices: numbers of ranks; empty: the default of the command.
        unknown: "skip" to skip the test, in place of failing it, if there is no verdict.
        options: options of `lockstep verify`, such as ``steps=10``.

    Returns:
        A certificate for each number of ranks, as in ``certificate.json``.
    """
    import pytest  # not at the top: lockstep does not require it

    with tempfile.TemporaryDirectory(prefix="lockstep-verify-") as output:
        given = {"devices": ranks or ",".join(map(str, devices)), **options, "output": output}
        words = [f"--{name}={value}" for name, value in given.items() if value]
        command = [sys.executable, "-c", _COMMAND, "verify", *words, script, "--", *arguments]
        run = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        path = Path(output) / "certificate.json"
        certificates: list[dict[str, Any]] = json.loads(path.read_text())["certificates"] if path.exists() else []
    if certificates and run.returncode == 2 and unknown == "skip":
        pytest.skip(run.stdout.strip())
    if run.returncode:
        pytest.fail(run.stdout.strip() if certificates else run.stderr.strip(), pytrace=False)
    return certificates
