"""The two stories of docs/replay.md: runs with a fault, and what `lockstep replay` and `lockstep bisect` print.

python -m benchmarks.replay.stories            # about five minutes; prints both
python -m benchmarks.replay.stories --write    # and writes them to docs/replay.md
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

PROJECT = Path(__file__).parents[2]
PAGE = PROJECT / "docs" / "replay.md"
SPIKE = Path(__file__).with_name("spike.py")

LAYERS = '''\
import torch
from torch import nn


class RMSNorm(nn.Module):
    """Root mean square normalization (Zhang and Sennrich, 2019)."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        mean = x.pow(2).mean(dim=-1, keepdim=True)
        return x * torch.rsqrt(mean + 1e-5) * self.weight
'''
UPGRADE = ("torch.rsqrt(mean + 1e-5)", "torch.rsqrt(mean + 1e-6)")
TRAIN = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from layers import RMSNorm
from lockstep import LightningModule, Trainer, seed_everything


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), RMSNorm(64), nn.GELU(), nn.Linear(64, 4))

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        return nn.functional.cross_entropy(self.net(inputs), labels)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


seed_everything(1)
data = TensorDataset(torch.randn(512, 16), torch.randint(4, (512,)))
trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False)
trainer.fit(Classifier(), DataLoader(data, batch_size=32, shuffle=True))
"""


def output(*words: str, folder: Path, shown: bool = True) -> str:
    """What a command prints on stdout, below the command, as on a terminal."""
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    command = " ".join(words).replace(sys.executable, "python").replace(str(SPIKE), "spike.py")
    text = re.sub(r"/\S*/(?=run/)", "", done.stdout)
    if shown and not text:
        sys.exit(done.stderr)
    return f"$ {command.replace('python -m lockstep', 'lockstep')}\n{text}".rstrip()


def spike(folder: Path) -> str:
    """The run with three bad samples: killed, resumed, replayed."""
    output(sys.executable, str(SPIKE), "--die-at", "12", folder=folder, shown=False)
    losses = output(sys.executable, str(SPIKE), folder=folder).splitlines()
    steps = {int(line.split()[1][:-1]): line for line in losses if line.startswith("step")}
    worst = max(steps, key=lambda step: float(steps[step].split()[-1]) if step > min(steps) + 4 else 0.0)
    curve = [losses[0], "...", *(steps[step] for step in range(worst - 1, worst + 2)), "..."]
    places = "707,708,711"
    words = ["replay", "run", "--step", str(worst), "--without", places, "--picture", str(folder / "spike.png")]
    replayed = output(sys.executable, "-m", "lockstep", *words, folder=folder)
    return "\n".join([*curve, replayed.replace(f" --picture {folder / 'spike.png'}", "")])


def upgrade(folder: Path) -> str:
    """The script whose layers were upgraded."""
    (folder / "layers.py").write_text(LAYERS)
    (folder / "train.py").write_text(TRAIN)
    git = ["git", "-c", "user.name=lockstep", "-c", "user.email=lockstep@example.org"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "before"]):
        subprocess.run([*git, *words], cwd=folder, check=True)
    (folder / "layers.py").write_text(LAYERS.replace(*UPGRADE))
    return output(sys.executable, "-m", "lockstep", "bisect", "--commit", "HEAD", "--", "train.py", folder=folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the stories to docs/replay.md")
    parser.add_argument("--picture", help="where the picture of the spike goes")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    page = PAGE.read_text()
    for name, story in (("spike", spike), ("upgrade", upgrade)):
        with tempfile.TemporaryDirectory() as folder:
            text = story(Path(folder))
            picture = Path(folder, "spike.png")
            if options.picture and picture.exists():
                Path(options.picture).write_bytes(picture.read_bytes())
        print(text, end="\n\n", flush=True)
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}\n\n```text\n{text}\n```\n\n{end}{rest.partition(end)[2]}"
    if options.write:
        PAGE.write_text(page)


if __name__ == "__main__":
    main()
