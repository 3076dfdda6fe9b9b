"""Arrange the site of main and those of all releases in one folder, with the file that their menus read.

    python -m scripts.site_versions build/public build/site build/sites

The arguments are the folder to write, the built site of main, and a folder with one site for each release, named by
its version. The first page redirects to the newest release, or to main while there is none. The menu of versions
reads versions.json, which has the format of mike.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

FIRST_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>lockstep</title>
<meta http-equiv="refresh" content="0; url={version}/index.html">
<a href="{version}/index.html">lockstep {version}</a>
</html>
"""


def arrange(target: Path, main_site: Path, releases: Path) -> None:
    """Copy all sites into ``target``, which is replaced, and write the list of versions, newest first."""
    shutil.rmtree(target, ignore_errors=True)
    versions = sorted((folder.name for folder in releases.glob("*")), key=numbers, reverse=True)
    sites = {version: releases / version for version in versions} | {"main": main_site}
    for version, site in sites.items():
        shutil.copytree(site, target / version)
    newest = next(iter(sites))
    listed = [{"version": version, "title": version, "aliases": ["latest"] * (version == newest)} for version in sites]
    (target / "versions.json").write_text(json.dumps(listed, indent=1) + "\n")
    (target / "index.html").write_text(FIRST_PAGE.format(version=newest))


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, (0, 10, 0) for "0.10.0", as a sort key."""
    return tuple(int(part) for part in version.split("."))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("target", type=Path, help="folder to write; replaced if it exists")
    parser.add_argument("main_site", type=Path, help="built site of main")
    parser.add_argument("releases", type=Path, help="folder with one built site for each release")
    options = parser.parse_args()
    arrange(options.target, options.main_site, options.releases)


if __name__ == "__main__":
    main()
