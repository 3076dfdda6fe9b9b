"""Ranks that are all on one host listen to nobody else, however they were started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from lockstep.cluster.local import INTERFACE
from lockstep.supervise.hub import Hub
from tests.tools.fresh import PYTHONPATH

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/net")

AGENT = ["-m", "lockstep", "run", "--devices", "2"]
LISTENING = """
import json, os, sys
from pathlib import Path

def listening():
    inodes = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.environ["OF_THIS_TEST"] in (process / "environ").read_text():
                inodes |= {os.readlink(each) for each in (process / "fd").iterdir()}
        except OSError:
            continue
    lines = [each.split() for name in ("tcp", "tcp6") for each in Path("/proc/net", name).read_text().splitlines()[1:]]
    return sorted({each[1].split(":")[0] for each in lines if each[3] == "0A" and f"socket:[{each[9]}]" in inodes})

def say():
    print(json.dumps([listening(), os.environ.get("GLOO_SOCKET_IFNAME")]), flush=True)
"""
SCRIPT = f"""{LISTENING}
from tests.loop.pieces import Slope, numbers, quiet

class Module(Slope):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and self.global_rank == 0:
            say()
        return super().training_step(batch, batch_idx)

quiet(devices=2, strategy=sys.argv[1], max_steps=4).fit(Module(), numbers(16, 2))
"""


@pytest.mark.parametrize(
    ("command", "strategy", "text"),
    [
        # the agent's store alone; a fit has its own and the groups' sockets, too
        pytest.param(AGENT, "none", f"{LISTENING}if os.environ['RANK'] == '0': say()", id="agent"),
        pytest.param(AGENT, "ddp", SCRIPT, id="lockstep run", marks=pytest.mark.slow),
        pytest.param([], "ddp", SCRIPT, id="ddp", marks=pytest.mark.slow),
        pytest.param([], "ddp_fork", SCRIPT, id="ddp_fork", marks=pytest.mark.slow),
        pytest.param([], "ddp_notebook", SCRIPT, id="ddp_notebook", marks=pytest.mark.slow),
        pytest.param([], "ddp_spawn", SCRIPT, id="ddp_spawn", marks=pytest.mark.slow),
    ],
)
def test_no_socket_of_a_local_run_listens_on_another_address_than_loopback(
    tmp_path: Path, command: list[str], strategy: str, text: str
) -> None:
    """The store of the agent of `lockstep run` listened on all interfaces."""
    script = tmp_path / "train.py"
    script.write_text(text)
    environ = {name: value for name, value in os.environ.items() if name != INTERFACE} | {
        "OMP_NUM_THREADS": "1",
        "OF_THIS_TEST": uuid.uuid4().hex,
        "PYTHONPATH": PYTHONPATH,
    }
    ended = subprocess.run(
        [sys.executable, *command, str(script), strategy], capture_output=True, timeout=120, env=environ, cwd=tmp_path
    )
    assert ended.returncode == 0, ended.stderr.decode()
    addresses, interface = json.loads(ended.stdout.decode().splitlines()[0])
    assert addresses == ["0100007F"]  # 127.0.0.1, as the system writes it
    assert interface == "lo"


@pytest.mark.parametrize(("address", "host"), [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("", "::")])
def test_the_hub_of_nodes_that_are_one_host_listens_there_alone(address: str, host: str) -> None:
    hub = Hub(0, "alpha", lambda *lost: None)
    hub.open(address)
    try:
        assert hub._server is not None
        assert hub._server.getsockname()[0] in (host, "0.0.0.0" if host == "::" else host)
    finally:
        hub.close()
