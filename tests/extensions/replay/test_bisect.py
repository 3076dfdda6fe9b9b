"""`lockstep bisect`: planted changes of code are found at their line, and repeats have none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lockstep.cli.run import main
from lockstep.extensions.replay.bisect_command import Version
from lockstep.extensions.replay.operations import Operation, Trace
from lockstep.extensions.replay.parting import first_change, first_operation, first_step
from lockstep.extensions.replay.recording import ROW, read
from lockstep.extensions.replay.request import ReplayRequest, Script

# each test starts several processes that import torch
pytestmark = pytest.mark.timeout(300)

SCRIPT = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import LightningModule, Trainer, seed_everything


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.transpose(1, 2) / 8**0.5
        mask = torch.ones(6, 6, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(mask, -torch.inf)
        weights = scores.softmax(dim=-1)
        return weights @ v


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(16, 8)
        self.norm = nn.LayerNorm(8, eps=1e-5)
        self.attention = Attention()
        self.head = nn.Linear(8, 16)

    def features(self, tokens):
        x = self.words(tokens)
        x = x + self.attention(self.norm(x))
        x = nn.functional.gelu(x)
        total = x.mean(dim=1)
        total = total * total.norm(dim=1, keepdim=True).clamp(max=2.0)
        return total

    def training_step(self, batch, batch_idx):
        logits = self.head(self.features(batch[0]))
        logits = logits - logits.logsumexp(dim=1, keepdim=True)
        loss = nn.functional.nll_loss(logits, batch[0][:, 0])
        penalty = self.head.weight.pow(2).sum() * 1e-4
        return loss + penalty

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01, betas=(0.9, 0.999), weight_decay=0.01)


if __name__ == "__main__":
    seed_everything(1)
    loader = DataLoader(TensorDataset(torch.randint(16, (64, 6))), batch_size=8, shuffle=True)
    Trainer(accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False).fit(Model(), loader)
"""

CHANGES = {
    "eps": ("eps=1e-5)", "eps=1e-6)"),
    "scale": ("/ 8**0.5", "/ 9**0.5"),
    "mask": ("triu(1)", "triu(2)"),
    "axis of a softmax": ("softmax(dim=-1)", "softmax(dim=-2)"),
    "last in place of a mean": ("x.mean(dim=1)", "x[:, -1]"),
    "axis of a sum": ("logsumexp(dim=1, keepdim=True)", "logsumexp(dim=0, keepdim=True)"),
    "order of sums": ("total = x.mean(dim=1)", "total = x.flip(1).sum(dim=1) / 6"),
    "cast": ("self.words(tokens)", "self.words(tokens).bfloat16().float()"),
    "cast of scores": ("scores.softmax(dim=-1)", "scores.double().softmax(dim=-1).float()"),
    "order of a product": ("q @ k.transpose(1, 2) / 8**0.5", "(q / 8**0.5) @ k.transpose(1, 2)"),
    "activation": ("gelu(x)", 'gelu(x, approximate="tanh")'),
    "clamp": ("clamp(max=2.0)", "clamp(max=0.4)"),
    "target": ("batch[0][:, 0]", "batch[0][:, 1]"),
    "reduction": ("nll_loss(logits, batch[0][:, 0])", 'nll_loss(logits, batch[0][:, 0], reduction="sum") / 7'),
    "penalty": ("* 1e-4", "* 2e-4"),
    "dropped residual": ("x = x + self.attention", "x = self.attention"),
    "keys and values": ("weights @ v", "weights @ k"),
    "transposed product": ("weights @ v", "weights.transpose(1, 2) @ v"),
    "betas": ("betas=(0.9, 0.999)", "betas=(0.9, 0.99)"),
    "weight decay": ("weight_decay=0.01", "weight_decay=0.1"),
}
STEP = 2


def version(folder: Path, text: str = SCRIPT) -> Version:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.py").write_text(text)
    return Version("A", Script(["train.py"], str(folder)))


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> tuple[np.ndarray, dict[int, Trace]]:
    """The recording of the unchanged script, and the traces of its first steps."""
    folder = tmp_path_factory.mktemp("healthy")
    script = version(folder / "code")
    script.run(ReplayRequest(str(folder / "hashes"), "", STEP, STEP, kind="hashes"))
    traces = {}
    for step in (0, 1):
        script.run(ReplayRequest(str(folder / f"{step}"), "", step, step, kind="operations"))
        traces[step] = Trace.read(str(folder / f"{step}"))
    return read(folder / "hashes"), traces


@pytest.mark.everyday(1)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_found_at_its_line(
    change: str, healthy: tuple[np.ndarray, dict[int, Trace]], tmp_path: Path
) -> None:
    old, new = CHANGES[change]
    text = SCRIPT.replace(old, new)
    assert text != SCRIPT
    line = SCRIPT[: SCRIPT.index(old)].count("\n") + 1
    changed = version(tmp_path / "code", text)
    changed.run(ReplayRequest(str(tmp_path / "hashes"), "", STEP, STEP, kind="hashes"))
    recording, traces = healthy
    parted = first_step(recording, read(tmp_path / "hashes"))
    assert parted is not None
    in_update = change in ("betas", "weight decay")
    assert parted == (0, "weights" if in_update else "gradients")
    changed.run(ReplayRequest(str(tmp_path / "trace"), "", 0, 0, kind="operations"))
    parting = first_operation(traces[0], Trace.read(str(tmp_path / "trace")))
    assert parting is not None
    found = parting.a or parting.b
    assert found is not None
    if in_update:
        assert found.phase == "update"
    else:
        lines = {each.line for each in (parting.a, parting.b) if each is not None}
        # an argument of a layer's constructor shows where the layer runs
        expected = SCRIPT[: SCRIPT.index("self.norm(x)")].count("\n") + 1 if change == "eps" else line
        assert f"train.py:{expected}" in lines, str(parting)


@pytest.mark.slow
@pytest.mark.parametrize("repeat", range(20))
def test_a_repeat_has_no_difference(repeat: int, tmp_path: Path) -> None:
    text = SCRIPT.replace("seed_everything(1)", f"seed_everything({repeat})")
    script = version(tmp_path / "code", text)
    recordings, traces = [], []
    for name in "ab":
        script.run(ReplayRequest(str(tmp_path / f"hashes-{name}"), "", STEP, STEP, kind="hashes"))
        recordings.append(read(tmp_path / f"hashes-{name}"))
        script.run(ReplayRequest(str(tmp_path / f"trace-{name}"), "", repeat % 5, repeat % 5, kind="operations"))
        traces.append(Trace.read(str(tmp_path / f"trace-{name}")))
    assert len(recordings[0]) == STEP + 1
    assert first_step(*recordings) is None
    assert first_operation(*traces) is None


@pytest.mark.slow
def test_a_commit_by_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    version(tmp_path)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.chdir(tmp_path)
    assert main(["bisect", "--commit", "HEAD", "--steps", "3", "--", "train.py"]) == 0
    assert "do not part" in capfd.readouterr().out
    old, new = CHANGES["mask"]
    version(tmp_path, SCRIPT.replace(old, new))
    assert main(["bisect", "--commit", "HEAD", "--steps", "3", "--", "train.py"]) == 1
    out = capfd.readouterr().out
    assert "part in step 0: its gradients differ" in out
    assert "triu in 'attention', train.py:16" in out


RECORDED = SCRIPT.replace(
    "import torch\n", "import sys\nimport torch\nfrom lockstep.callbacks import ModelCheckpoint\n", 1
)
RECORDED = RECORDED.replace(
    "enable_checkpointing=False",
    'record="hashes", callbacks=ModelCheckpoint(sys.argv[1], every_n_train_steps=3, save_top_k=-1)',
)


@pytest.mark.slow
@pytest.mark.parametrize("at", [1, 5])
def test_two_recorded_runs(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The runs part before their first checkpoint, or after it; the code of A is that of its commit."""
    monkeypatch.chdir(tmp_path)
    version(tmp_path, RECORDED)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "train.py"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *words], check=True)
    subprocess.run([sys.executable, "train.py", "a"], check=True, timeout=60)
    old = "        total = x.mean(dim=1)\n"
    version(tmp_path, RECORDED.replace(old, f"{old}        if self.trainer.global_step >= {at}: total = total * 1.5\n"))
    subprocess.run([sys.executable, "train.py", "b"], check=True, timeout=60)
    capfd.readouterr()
    assert main(["bisect", "a", "b"]) == 1
    out = capfd.readouterr().out
    line = RECORDED[: RECORDED.index(old)].count("\n") + 2
    assert f"part in step {at}: its gradients differ" in out
    assert f"only B runs mul, train.py:{line}" in out
    assert main(["bisect", "a", "a"]) == 0


def test_what_bisect_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    for words, text in [
        (["a"], "pass the folders of two runs"),
        (["a", "a", "--", "train.py"], "but not both"),
        (["--", "train.py"], "add --commit or --python"),
        (["a", "a"], 'record="hashes"'),
        (["--commit", "main", "--", "train.py"], "not a git repository"),
    ]:
        assert main(["bisect", *words]) == 2
        assert text in capsys.readouterr().err


# -- the comparison ------------------------------------------------------------------------------------------


def trace(*values: float, names: str = "abcdefgh", scale: float = 1.0) -> Trace:
    """A trace of operations whose results are vectors."""
    operations = [
        Operation(names[number], "forward", "net", f"net.py:{number}", (), (hash(value * scale),), is_view=False)
        for number, value in enumerate(values)
    ]
    return Trace(operations, [np.array([1.0, value * scale]) for value in values])


def test_rounding_is_told_from_a_change() -> None:
    a = trace(1.0, 2.0, 3.0)
    nudged = trace(1.0 + 1e-7, 2.0 + 2e-7, 3.0 + 4e-7)
    rounded = first_change(a, trace(1.0, 2.0 + 1e-7, 3.0 + 3e-7), nudged)
    assert rounded is not None
    assert rounded.is_rounding
    assert rounded.a is a.operations[1]
    changed = first_change(a, trace(1.0 + 1e-7, 2.0, 3.001), nudged)
    assert changed is not None
    assert not changed.is_rounding
    assert changed.a is a.operations[2]
    assert first_change(a, a, nudged) is None


def test_an_operation_that_only_one_has() -> None:
    a, b = trace(1.0, 2.0, 3.0), trace(1.0, 9.0, 2.0, 3.0, names="axbc")
    parting = first_operation(a, b)
    assert parting is not None
    assert str(parting) == "only B runs x in 'net', net.py:1"
    assert first_operation(b, a) is not None


def test_steps_that_are_not_recorded_are_not_compared() -> None:
    a = np.zeros(4, ROW)
    a["gradients"], a["weights"] = 1, 2
    b = a.copy()
    b[1] = (0, 0)
    assert first_step(a, b) is None
    b["weights"][3] = 7
    assert first_step(a, b) == (3, "weights")
    assert first_step(a, b[:3]) is None
