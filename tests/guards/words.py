"""Words that docstrings, comments and messages do without, counted by folder. The standard library alone.

    python -m tests.guards.words            # prints the counts by folder
    python -m tests.guards.words --where    # and where each word stands
    python -m tests.guards.words --write    # notes them as the most that is allowed

The counts are a thermometer. They find sentences that a reader has to read twice; another odd word in the place of one
is no cure.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.guards.source import PACKAGE, Source, Sources, read

MOST = Path(__file__).with_name("words.json")

ODD_FIRST = re.compile(r"(What|Whether|Who|Where|Which|Of|By)\b")
"""How a first line of a docstring does not begin: a clause for a noun, a possessive for a sentence."""

ODD = re.compile(
    r"\b(tells?|told|telling|says?|said|saying|behind|beside|anew|alike|of (?:which|whose|whom)|begins?|began|begun)\b",
    re.IGNORECASE,
)
"""Verbs of talking for programs, places for times, and words of another century."""


def first_lines(source: Source) -> Iterator[tuple[int, str]]:
    """Line and text of the first line of each docstring."""
    for node in source.nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text.splitlines()[0]


def prose(source: Source) -> Iterator[tuple[int, str]]:
    """Line and text of what is written for people: comments, and strings that have a space."""
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        is_text = token.type == tokenize.COMMENT or (token.type == tokenize.STRING and " " in token.string)
        if is_text or tokenize.tok_name[token.type] == "FSTRING_MIDDLE":
            yield token.start[0], token.string


def odd_words(source: Source) -> Iterator[tuple[int, str]]:
    """Line and word of all that is counted in a file."""
    for line, text in first_lines(source):
        if found := ODD_FIRST.match(text):
            yield line, f"{found[1]} ..."
    for line, text in prose(source):
        for found in ODD.finditer(text):
            yield line + text[: found.start()].count("\n"), found[1].lower()


def folder_of(source: Source) -> str:
    """The part of the core, or the extension, that a file belongs to."""
    parts = source.path.parts[1:]
    depth = 2 if parts[0] in ("extensions", "engines") and len(parts) > 2 else 1
    return "/".join(parts[:depth]) if len(parts) > 1 else "."


def counted(sources: Sources) -> dict[str, int]:
    """The number of odd words by folder."""
    sums: Counter[str] = Counter()
    for source in sources.values():
        sums[folder_of(source)] += sum(1 for _ in odd_words(source))
    return dict(sorted(sums.items()))


def odd_first_lines(sources: Sources) -> tuple[int, int]:
    """How many first lines begin oddly, and how many there are."""
    lines = [text for source in sources.values() for _, text in first_lines(source)]
    return sum(bool(ODD_FIRST.match(text)) for text in lines), len(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--where", action="store_true", help="print where each word stands")
    parser.add_argument("--write", action="store_true", help="note the counts as the most that is allowed")
    options = parser.parse_args()
    sources = read(PACKAGE)
    found = counted(sources)
    if options.write:
        MOST.write_text(json.dumps(found, indent=1) + "\n")
    for source in sources.values() if options.where else ():
        for line, word in sorted(odd_words(source)):
            print(f"{source.path}:{line}: {word}")
    for folder, count in found.items():
        print(f"{folder:34}{count:7,}")
    odd, lines = odd_first_lines(sources)
    print(f"{'sum':34}{sum(found.values()):7,}\nfirst lines that begin with a clause: {odd} of {lines}")


if __name__ == "__main__":
    main()
