"""What ranks hand to the agent of `lockstep run`, and what is said of flags that do not fit what it started."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lockstep.cluster.detect import detect
from lockstep.cluster.torchelastic import hand_cause, promise_cause
from lockstep.config.devices import device_of
from lockstep.ground.errors import MisconfigurationException
from tests.tools.pool import launcher_environment


def test_the_first_word_on_what_ended_the_ranks_counts(tmp_path: Path) -> None:
    environ = {"LOCKSTEP_CAUSE": str(tmp_path / "cause")}
    promise_cause(environ)
    assert hand_cause("rank 1 was first", environ)
    assert hand_cause("rank 0 lost the others", environ)
    assert (tmp_path / "cause").read_text() == "rank 1 was first"
    assert {path.name for path in tmp_path.iterdir()} == {"cause", "cause.promised"}


def test_where_there_is_no_agent_of_ours_the_caller_has_to_say_it(tmp_path: Path) -> None:
    promise_cause({})
    assert not hand_cause("rank 1 was first", {})
    assert not hand_cause("rank 1 was first", {"LOCKSTEP_CAUSE": str(tmp_path / "gone" / "cause")})


def test_more_ranks_than_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster may show each rank one device of its own; `lockstep run` shows all ranks the same one."""
    one = [torch.device("cuda", 0)]
    assert [device_of(one, rank, 2) for rank in range(2)] == one * 2
    with pytest.raises(MisconfigurationException, match=r"4 ranks were started .*, but only 2 cuda.*gres=gpu:4"):
        device_of([torch.device("cuda", index) for index in range(2)], 0, 4)
    monkeypatch.setenv("LOCKSTEP_STARTED", "--devices 2")
    assert device_of(one, 0, 1) == one[0]
    with pytest.raises(MisconfigurationException, match="2 ranks were started on this node, but only 1 cuda device"):
        device_of(one, 1, 2)
    assert device_of([torch.device("cpu")], 1, 2).type == "cpu"


def test_flags_that_do_not_fit_name_the_command() -> None:
    environ = {**launcher_environment(0, 2, 29500, "x"), "LOCKSTEP_STARTED": "--devices 2"}
    start = r"make 4 rank\(s\), but `lockstep run --devices 2` started 2 .*: use devices=2"
    with pytest.raises(MisconfigurationException, match=start):
        detect(environ, 4, 1)
