"""Names that are another address on this host than on others, as 127.0.1.1 in /etc/hosts."""

from __future__ import annotations

import logging
import os
import socket
from datetime import timedelta
from typing import Any

import pytest
import torch

from lockstep.cluster import local
from lockstep.cluster.local import INTERFACE, choose_gloo_interface, is_own
from lockstep.cluster.rendezvous import connect_ranks
from lockstep.cluster.world import World
from lockstep.launch.environment import free_port
from lockstep.supervise.hub import Hub

ELSEWHERE = World(0, 2, 0, 1, 0, 2, "node0", 29500)


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """This host's name, node0, is 127.0.1.1 here; node9 is an address of this host that others know."""
    ask = socket.getaddrinfo

    def answer(name: Any, *args: Any, **kwargs: Any) -> Any:
        return ask("127.0.1.1" if name == "node0" else name, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    monkeypatch.setattr(socket, "gethostname", lambda: "node0")
    monkeypatch.setenv(INTERFACE, "")  # so that it is put back, whatever a test does
    monkeypatch.delenv(INTERFACE)


@pytest.mark.parametrize(
    ("address", "own"), [("127.0.0.1", True), ("::1", True), ("localhost", True), ("node0", False)]
)
def test_what_means_the_host_itself_everywhere(named: None, address: str, own: bool) -> None:
    assert is_own(address) is own


def test_node_0_listens_to_others_where_its_name_is_its_own_alone_here(named: None) -> None:
    """It listened on 127.0.1.1, and the other nodes waited for five minutes."""
    hub = Hub(0, "node0", lambda *what: None)
    port, _ = hub.open("node0")
    assert hub._server is not None
    assert not hub._server.getsockname()[0].startswith("127.")
    hub.close()
    assert port


@pytest.mark.parametrize(("address", "alone"), [("node0", False), ("127.0.0.1", True)])
def test_so_does_the_store(named: None, monkeypatch: pytest.MonkeyPatch, address: str, alone: bool) -> None:
    made: list[Any] = []

    def refuse(*args: Any, master_listen_fd: int | None, **kwargs: Any) -> None:
        made.append(master_listen_fd)  # None: torch listens everywhere
        if master_listen_fd is not None:
            os.close(master_listen_fd)
        raise torch.distributed.DistStoreError("made up")

    monkeypatch.setattr(torch.distributed, "TCPStore", refuse)
    with pytest.raises(RuntimeError, match="made up"):
        connect_ranks(World(0, 2, 0, 1, 0, 2, address, free_port()), timedelta(seconds=5))
    assert [each is not None for each in made] == [alone]


def test_gloo_is_told_an_interface_by_which_others_can_call(
    named: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ranks of other nodes called themselves, and the run ended with "Connection refused"."""
    monkeypatch.setattr(local, "_interface_towards", lambda address, port: "eth7")
    with caplog.at_level(logging.INFO, "lockstep"):
        choose_gloo_interface(ELSEWHERE)
    assert os.environ[INTERFACE] == "eth7"
    assert "by its name node0, which is 127.0.1.1 here (/etc/hosts): GLOO_SOCKET_IFNAME=eth7 is set" in caplog.text
    monkeypatch.setenv(INTERFACE, "mine")
    choose_gloo_interface(ELSEWHERE)
    assert os.environ[INTERFACE] == "mine"


@pytest.mark.parametrize("world", [World(0, 2, 0, 2, 0, 1, "node0", 1), World(0, 2, 0, 1, 0, 2, "127.0.0.1", 1)])
def test_on_one_host_nothing_is_set(named: None, world: World) -> None:
    choose_gloo_interface(world)
    assert INTERFACE not in os.environ
