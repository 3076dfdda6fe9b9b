"""The examples of the pages for users run as they are printed, on one process, and on two where ranks matter."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.scripts.in_rank import run_script
from tests.tools.fresh import python
from tests.tools.pool import RankPool

ROOT = Path(__file__).resolve().parents[2]


def blocks(page: str) -> dict[str, list[str]]:
    """The Python blocks of a page, by the heading that they stand under."""
    found: dict[str, list[str]] = {}
    for part in re.split(r"^(?=## )", (ROOT / "docs" / page).read_text(), flags=re.MULTILINE):
        title = part.partition("\n")[0].lstrip("# ")
        found[title] = re.findall(r"^```python\n(.*?)^```", part, re.DOTALL | re.MULTILINE)
    return found


EXTENDING = blocks("extending.md")
MODEL = EXTENDING["Your own strategy, logger, plugin"][0]
EXAMPLES = [
    pytest.param(title, code, id=f"{title} {number}")
    for title, codes in EXTENDING.items()
    for number, code in enumerate(codes)
    if code != MODEL
]


@pytest.mark.everyday
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("title", "code"), EXAMPLES)
def test_extensions_run(title: str, code: str, world: int, ranks: RankPool, tmp_path: Path) -> None:
    if title == "The ranks of a cluster" and world == 2:
        pytest.skip("the variables of a grid are no launcher's: started by hand below")
    (tmp_path / "train.py").write_text(MODEL + code)
    done = run_script(ranks, tmp_path / "train.py", folder=tmp_path, world=world, launched=world > 1)
    assert [each.returncode for each in done] == [0] * world, done[0].stderr
    if title == "A logger":
        lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        steps = [line["step"] for line in lines if "loss_step" in line]
        assert steps == ([3, 7, 11, 15] if world == 1 else [3, 7])  # by rank 0 alone
    elif title == "Checkpoint files":
        last = (tmp_path / "checkpoints.txt").read_text().splitlines()[-1]
        assert last == f"{8 // world} by-hand.ckpt"
    elif "updates took" in code:
        assert re.search(r"updates took 0\.\d+ s", done[0].stdout)


def test_a_strategy_of_ones_own_gives_the_numbers_of_one_process(ranks: RankPool, tmp_path: Path) -> None:
    """Two ranks with half the batch train what one process trains with the whole."""
    code = MODEL.replace("import torch\n", "import torch\ntorch.manual_seed(0)\n", 1) + EXTENDING["A strategy"][1]
    weights = []
    for world in (1, 2):
        (tmp_path / "train.py").write_text(code.replace("batch_size=8", f"batch_size={8 // world}"))
        done = run_script(ranks, tmp_path / "train.py", folder=tmp_path, world=world, launched=world > 1)
        assert done[0].returncode == 0, done[0].stderr
        weights.append(float(re.findall(r"weight (\S+)", done[0].stdout)[0]))
    assert weights[0] == pytest.approx(weights[1], abs=1e-6)
    assert weights[0] != 0


def test_a_package_brings_a_strategy_and_a_command(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "extending.md").read_text().partition("## A package of its own")[2]
    (project,) = re.findall(r"^```toml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "pyproject.toml").write_text(project)
    (tmp_path / "package" / "lockstep_timed.py").write_text(EXTENDING["A package of its own"][0])
    pip = ("-m", "pip", "install", "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check")
    done = python(*pip, "--target", tmp_path / "site", tmp_path / "package", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    installed = os.pathsep.join(filter(None, [str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")]))
    fit = 'Trainer(accelerator="cpu", devices=2, strategy="ddp_timed", max_steps=4, logger=False).fit(Line(), loader)\n'
    (tmp_path / "train.py").write_text(MODEL + fit)
    done = python("train.py", folder=tmp_path, PYTHONPATH=installed)
    assert done.returncode == 0, done.stderr
    done = python("-m", "lockstep", "timed", folder=tmp_path, PYTHONPATH=installed)
    assert re.fullmatch(r"4 updates, \d\.\d+ s each\n", done.stdout), done.stderr
    done = python("-m", "lockstep", "--help", folder=tmp_path, PYTHONPATH=installed)
    assert re.search(r"^  timed +a command of lockstep-timed 1\.0$", done.stdout, re.MULTILINE)


def test_ranks_of_a_grid(ranks: RankPool, tmp_path: Path) -> None:
    from lockstep.launch.environment import free_port

    (tmp_path / "train.py").write_text(MODEL + EXTENDING["The ranks of a cluster"][0])
    port = str(free_port())
    environ = [{"GRID_TASKS": "2", "GRID_TASK": str(rank), "GRID_PORT": port} for rank in range(2)]
    done = run_script(ranks, tmp_path / "train.py", folder=tmp_path, world=2, environ=environ)
    assert [each.returncode for each in done] == [0, 0], done[0].stderr + done[1].stderr
    assert "rank 0 of 2" in done[0].stdout


def test_results_lie_where_the_page_says(ranks: RankPool, tmp_path: Path) -> None:
    code = "".join(code for codes in blocks("results.md").values() for code in codes)
    (tmp_path / "train.py").write_text(code)
    (done,) = run_script(ranks, tmp_path / "train.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "logs/line/version_0" in lines
    assert lines[-1] == "24"
    folder = tmp_path / "logs" / "line" / "version_0"
    there = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    assert there == {"metrics.csv", "hparams.yaml", "checkpoints/epoch=1-step=16.ckpt", "checkpoints/last.ckpt"}


def test_default_places_are_those_of_the_table(ranks: RankPool, tmp_path: Path) -> None:
    code = blocks("results.md")["Where a fit writes its files"][0]
    (tmp_path / "train.py").write_text(re.sub(r"    (logger|callbacks)=.*,\n", "", code))
    (done,) = run_script(ranks, tmp_path / "train.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "lightning_logs" / "version_0"
    assert (folder / "checkpoints" / "epoch=1-step=16.ckpt").is_file()
    assert (folder / "hparams.yaml").is_file()
    assert [*folder.glob("events.out.tfevents*")] or (folder / "metrics.csv").is_file()


def test_the_readme_lists_every_page() -> None:
    readme = (ROOT / "README.md").read_text().partition("## Documentation")[2]
    listed = set(re.findall(r"\]\(docs/([\w-]+\.md)\)", readme))
    assert listed == {page.name for page in (ROOT / "docs").glob("*.md")}


IMPORTS = "import torch\nfrom torch import nn\nfrom torch.utils.data import DataLoader\n"


def test_layers_are_split_as_the_page_says(ranks: RankPool, tmp_path: Path) -> None:
    (code,) = blocks("tensor-parallel.md")["Tensor parallel and 2-D parallel"]
    told = "print(trainer.global_step, type(trainer.lightning_module.up.weight).__name__)\n"
    (tmp_path / "train.py").write_text(IMPORTS + code + told)
    for done in run_script(ranks, tmp_path / "train.py", folder=tmp_path, world=4, launched=True):
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip().endswith("4 DTensor")
