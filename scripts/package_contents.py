"""Checks what is in the distributions of a folder: what users need is there, and the wheel has nothing else.

python scripts/package_contents.py dist
"""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path

OF_SDIST = {
    *("README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "pyproject.toml", "constraints.txt"),
    *("first.py", "mkdocs.yml", "sbom.cdx.json", ".ci/run", "scripts/test", "scripts/demo", "scripts/docs"),
    *("src/lockstep/__init__.py", "tests/conftest.py", "docs/first-steps.md", "examples/digits.py"),
}
"""Files without which the README's commands, the tests or the pages of a source distribution do not work."""


def wheel_faults(wheel: Path) -> list[str]:
    """Return what is wrong with the files of a wheel."""
    names = zipfile.ZipFile(wheel).namelist()
    (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
    needed = {"lockstep/__init__.py", "lockstep/py.typed", "pytest_lockstep.py"}
    needed |= {f"{info}/licenses/LICENSE", f"{info}/sboms/sbom.cdx.json"}
    faults = [f"{wheel.name}: {name} is missing" for name in sorted(needed - set(names))]
    return faults + [
        f"{wheel.name}: {name} does not belong in it"
        for name in names
        if not name.startswith(("lockstep/", "pytest_lockstep.py", info))
    ]


def sdist_faults(sdist: Path) -> list[str]:
    """Return what is wrong with the files of a source distribution."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    faults = [f"{sdist.name}: {name} is missing" for name in sorted(OF_SDIST - names)]
    return faults + [f"{sdist.name}: {name} does not belong in it" for name in names if "__pycache__" in name]


def main() -> None:
    folder = Path(sys.argv[1])
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    faults = wheel_faults(wheel) + sdist_faults(sdist)
    if faults:
        raise SystemExit("\n".join(faults))
    print(f"{wheel.name}, {sdist.name}: the contents are right")


if __name__ == "__main__":
    main()
