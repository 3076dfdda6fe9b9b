"""`lockstep verify corpus.toml`: the page of several scripts, and the messages on a wrong list."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.cli.run import main
from tests.extensions.verify.small_script import SCRIPT

pytest.importorskip("tomllib")

CORPUS = """\
[[script]]
script = "train.py"
name = "healthy"

[[script]]
script = "train.py"
name = "without a sampler"
patch = [["loader = DataLoader(data, 8, sampler=sampler)", "loader = DataLoader(data, 8)"]]
expected = "different"
known = "Each rank reads all samples."
shows = "shows.py"

[[script]]
script = "train.py"
name = "other"
package = "no-such-distribution"
needs = ["no_such_module"]
"""


@pytest.mark.slow
def test_the_page_has_a_row_for_each_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/train.py").write_text(SCRIPT)
    (tmp_path / "scripts/shows.py").write_text("print('each rank reads all')\n")
    (tmp_path / "scripts/corpus.toml").write_text(CORPUS)
    monkeypatch.chdir(tmp_path)
    assert main(["verify", "scripts/corpus.toml", "--report", "page.md"]) == 0
    page = Path("page.md").read_text()
    assert "3 scripts: 1 alike, 1 different, 1 not installed." in page
    rows = [line for line in page.splitlines() if line.startswith("| torch |")]
    assert "| healthy | alike |" in rows[0]
    assert "| without a sampler | different | step 0: every rank gets sample" in rows[1]
    assert "Each rank reads all samples.\n\n```python\nprint('each rank reads all')\n```" in page
    assert "| no-such-distribution |  | other | not installed |" in page
    assert str(tmp_path) not in page
    # the list expects a difference that is not there
    (tmp_path / "scripts/corpus.toml").write_text('[[script]]\nscript = "train.py"\nexpected = "different"\n')
    assert main(["verify", "scripts/corpus.toml", "--report", "page.md"]) == 2
    assert (tmp_path / "scripts/train.py").read_text() == SCRIPT


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('[[script]]\nscirpt = "train.py"', "corpus.toml, script 1: unknown field 'scirpt': use one of script, name"),
        ('[[script]]\nscript = "other.py"', "script 'other.py' is not a file in the folder of the list"),
        ('[[script]]\nname = "x"', "script '' is not a file in the folder of the list"),
        ('[[script]]\nscript = "train.py"\nshows = "x.py"', "shows 'x.py' is not a file"),
        ('[[script]]\nscript = "train.py"\ndevices = "2"', "devices is '2': pass a value of type int"),
        (
            '[[script]]\nscript = "train.py"\npatch = [["a", "b"]]',
            "patch ('a', 'b'): pass pairs of a text in",
        ),
        ("[[script", "corpus.toml is not a valid TOML file"),
        ("", "corpus.toml lists no script"),
    ],
)
def test_a_wrong_list_is_refused_with_one_sentence(
    text: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    Path("corpus.toml").write_text(text)
    assert main(["verify", "corpus.toml"]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert "Traceback" not in error
    assert not Path("audit.md").exists()
