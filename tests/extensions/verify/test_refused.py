"""Scripts that cannot be verified end with one sentence and code 2 in the stated time, and leave nothing.

A fixture of all tests fails those that leave a process, a port or shared memory behind.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.extensions.verify.certificate import ALIKE, UNKNOWN
from lockstep.extensions.verify.processes import Patience
from tests.extensions.verify.small_script import SCRIPT, STEP, Certify, changed

LOOP_START = "for epoch in range(3):\n"
SLEEPING = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(900)'], start_new_session=True)"
SHARED = """\
import time
from multiprocessing.shared_memory import SharedMemory
shared = SharedMemory(create=True, size=64)
time.sleep(900)
"""
REFUSED = {
    "a GPU": (
        "import torch\ntorch.nn.Linear(2, 2).to('cuda')\n",
        "the script needs a GPU at train.py:2",
    ),
    "a download": (
        "import urllib.request\nurllib.request.urlopen('https://data.invalid/data.tar')\n",
        "rank 0 failed at train.py:2: URLError: ",
    ),
    "an account": (
        "raise OSError('401 Client Error: Unauthorized for url: https://models.invalid')\n",
        "rank 0 failed at train.py:1: OSError: 401 Client Error",
    ),
    "a token that is typed in": ("input('token: ')\n", "rank 0 failed at train.py:1: EOFError"),
    "no step": (changed((STEP, "")), "the script ended without a step of a torch.optim.Optimizer"),
    "an early os._exit": (
        changed((LOOP_START, f"os._exit(0)\n{LOOP_START}")),
        "the script ended without a step of a torch.optim.Optimizer",
    ),
    "an os._exit with a code": (
        changed((LOOP_START, f"os._exit(3)\n{LOOP_START}")),
        "rank 0 ended at train.py:26 with exit code 3",
    ),
    "a launcher": (
        "import subprocess, sys\nsubprocess.run([sys.executable, '-m', 'torch.distributed.run', 'no.py'], check=True)",
        "the script trains in processes that it starts (train.py:2): verify the script that these run",
    ),
    "no end": (
        changed((LOOP_START, f"import signal, time\nsignal.signal(15, signal.SIG_IGN)\ntime.sleep(900)\n{LOOP_START}")),
        "rank 0 did not end after 0 optimizer step(s)",
    ),
    "no end of its processes": (
        f"import subprocess, sys, time\n{SLEEPING}\ntime.sleep(900)\n",
        "rank 0 did not end after 0 optimizer step(s)",
    ),
    "no end with shared memory": (SHARED, "rank 0 did not end after 0 optimizer step(s)"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_in_a_sentence_and_leaves_nothing(
    name: str, certify: Certify, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text, sentence = REFUSED[name]
    temporary = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    certificate = certify(text, patience=Patience(silence=20.0, total=200.0))
    assert certificate.verdict == UNKNOWN, str(certificate)
    assert certificate.exit_code == 2
    (reason,) = certificate.reasons
    assert sentence in reason
    assert not list(temporary.iterdir())


@pytest.mark.slow
def test_a_script_that_ends_by_os_exit_after_its_steps_is_alike(certify: Certify) -> None:
    """It had failed with exit code 0."""
    certificate = certify(changed(("dist.destroy_process_group()", "os._exit(0)")))
    assert certificate.verdict == ALIKE, str(certificate)


SPAWNED = f"""\
{SCRIPT[: SCRIPT.index("dist.init")]}

def main(rank):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
{"".join(f"    {line}" for line in SCRIPT[SCRIPT.index("dist.init") :].splitlines(keepends=True))}

if __name__ == "__main__":
    torch.multiprocessing.spawn(main, nprocs=2)
"""
TWO_MODELS = changed(
    (
        "optimizer = ",
        "second = DistributedDataParallel(nn.Linear(1, 1))\n"
        "slow = torch.optim.SGD(second.parameters(), lr=0.1)\noptimizer = ",
    ),
    (
        STEP,
        f"{STEP}        slow.zero_grad()\n        F.mse_loss(second(model(x).detach()), y).backward()\n"
        "        slow.step()\n",
    ),
)


@pytest.mark.slow
@pytest.mark.parametrize("text", [SPAWNED, TWO_MODELS], ids=["ranks that it spawns", "two models"])
def test_it_is_alike(text: str, certify: Certify) -> None:
    certificate = certify(text)
    assert certificate.verdict == ALIKE, str(certificate)


@pytest.mark.slow
def test_a_module_that_torch_imports_is_not_taken_from_the_current_folder(certify: Certify) -> None:
    """The process that starts ranks had ended with exit code 1."""
    Path("queue.py").write_text("raise RuntimeError('a module of the user')\n")
    Path("scripts").mkdir()
    Path("scripts/train.py").write_text(SCRIPT)
    assert certify(Path("scripts/train.py"), used=None).verdict == ALIKE
