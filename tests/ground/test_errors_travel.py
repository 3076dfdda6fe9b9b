"""Errors of the package keep their class on the way from another process."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from lockstep.ground import errors


@pytest.mark.parametrize("kind", [errors.MisconfigurationException, errors.NonFiniteError])
def test_an_error_of_a_process_that_has_not_imported_the_public_names_has_its_class_here(kind: type[Exception]) -> None:
    """cloudpickle takes a class by value where the module that it names was not imported."""
    code = (
        "import sys, cloudpickle; from lockstep.ground import errors; "
        f"sys.stdout.buffer.write(cloudpickle.dumps(errors.{kind.__name__}('x')))"
    )
    sent = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=100).stdout
    assert type(pickle.loads(sent)) is kind
