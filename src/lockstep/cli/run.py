"""The command ``lockstep``; and of its commands ``run``: a script on all devices, started anew when a rank fails."""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

from lockstep.ground.errors import MisconfigurationException, MissingExtra
from lockstep.ground.extensions import commands, is_known, load

if TYPE_CHECKING:
    from lockstep.launch.elastic_run import LaunchPlan

USAGE = "lockstep run [options] script.py [options] [arguments of the script]"
ABOUT = """\
Start a script once for each device, on one node or on several, by torch's elastic agent.

The script needs no change: its Trainer finds the ranks there, as under torchrun. Leave its devices and num_nodes
out, or let them say the same. Options may stand before the script and directly behind it; what follows from the first
word that is none of them, or from --, is the script's own.
"""
EXAMPLES = """\
examples:
  lockstep run train.py --devices 4 --lr 0.1
  lockstep run --devices 4 --max-restarts 3 -m project.train
  lockstep run --lightning train.py                          a script that imports lightning, unchanged
  lockstep run --resume --max-restarts 3 train.py            goes on where a killed run of this command was
  on each of two nodes, with --node-rank 0 and 1:
  lockstep run train.py --devices 8 --nodes 2 --node-rank 0 --master-addr node1 --max-restarts 3
"""
COMMANDS = {
    "run": "start a script on all devices of one node or several",
    "checkpoint": "show what a checkpoint holds, convert it, or compare two",
    "env": "show versions, devices, the cluster that was found, and the variables in force",
}
"""The commands of the core, with a line of help. ``run`` is in this file; the others are functions in files of their
names. Extensions add theirs (`lockstep.ground.extensions`)."""
MASTER_PORT = 29400


def main(argv: Sequence[str] | None = None) -> int:
    """The command ``lockstep``; gives the exit code.

    Args:
        argv: the words behind it; None: those of this process.
    """
    try:
        code = _run_command(argv)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads the output, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at exit
        return 128 + signal.SIGPIPE
    return code


def _run_command(argv: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    first = words[0] if words else ""
    if first in ("-h", "--help"):
        print(_help(), end="")
        return 0
    if first == "--version":
        print(f"lockstep {sys.modules['lockstep'].__version__}")
        return 0
    if first not in COMMANDS and not is_known("commands", first):
        there = ", ".join(f"lockstep {name}" for name in _all_commands())
        print(
            f"lockstep: {repr(first) if words else 'nothing'} is no command of lockstep; there is: {there}",
            file=sys.stderr,
        )
        return 2
    try:
        if first == "run":
            return run(words[1:])
        command: Callable[[Sequence[str]], int]
        if first in COMMANDS:
            command = getattr(import_module(f"lockstep.cli.{first}"), first)
        else:
            command = load("commands", first)
        return command(words[1:])
    except (ValueError, MissingExtra) as error:  # a MisconfigurationException is a ValueError
        print(f"lockstep {first}: {str(error).removeprefix(f'lockstep {first}: ')}", file=sys.stderr)
        return 2


def _all_commands() -> dict[str, str]:
    """Every command with a line of help: those of the core first, whose names nobody can take."""
    return COMMANDS | {name: line for name, line in commands().items() if name not in COMMANDS}


def _help() -> str:
    rows = _all_commands() | {"--version": "show the version"}
    width = max(map(len, rows))
    lines = [f"  {name:<{width}} {line}" for name, line in rows.items()]
    return "\n".join(["usage: lockstep COMMAND ...", "", *lines, "", "`lockstep COMMAND --help` tells more.", ""])


def run(words: Sequence[str]) -> int:
    """Start what ``lockstep run`` is told by ``words``, wait for its end, and give its exit code.

    Raises:
        MisconfigurationException: with the option, its value, and the way out; this process is a rank itself, or a
            port is taken.
    """
    plan = planned(words)
    from lockstep.launch.elastic_run import start, start_script  # torch's agent costs 0.3 s, and --help needs none

    return start_script(plan) if plan.by_script else start(plan)


def planned(words: Sequence[str]) -> LaunchPlan:
    """The words of the command as a plan.

    Raises:
        MisconfigurationException: with the option, its value, and the way out.
    """
    parser = _parser()
    options, script = split(list(words), parser)
    few, most = _nodes(options.nodes)
    devices = _devices(options.devices)
    address, port = _meeting(options, few, most)
    command = words_of(options.module, script)
    check_script("lockstep run", options.module, script)
    if options.lightning:
        load("services", "Lightning's names")  # refused here where its extension is not there
    from lockstep.launch.elastic_run import LaunchPlan

    return LaunchPlan(
        words=command,
        name=name_of(command),
        devices=devices,
        nodes=(few, most),
        node_rank=options.node_rank,
        address=address,
        port=port,
        local_address=options.local_addr,
        run_id=options.rdzv_id,
        max_restarts=options.max_restarts,
        resume=options.resume,
        patience=options.patience,
        grace=options.shutdown_timeout,
        lightning=options.lightning,
        by_script=options.lightning and _leaves_ranks_to_the_script(options, parser),
    )


def _leaves_ranks_to_the_script(options: argparse.Namespace, parser: argparse.ArgumentParser) -> bool:
    """Return True if no option needs torch's agent: the script's own Trainer then starts its ranks."""
    return all(
        value == parser.get_default(name)
        for name, value in vars(options).items()
        if name not in ("lightning", "module")
    )


def name_of(command: Sequence[str]) -> str:
    """The name of a run: the script's, and six letters for its arguments, so that the same command has the same one.

    Example:
        >>> name_of(["train.py", "--lr", "0.1"]) == name_of(["/there/train.py", "--lr", "0.1"])
        True
    """
    at = 1 if command[0] == "-m" else 0
    script = os.path.basename(command[at])
    stem = re.sub(r"[^\w.]+", "_", script.removesuffix(".py"))[:60]
    text = "\0".join([script, *command[at + 1 :]])
    return f"{stem}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


class CommandParser(argparse.ArgumentParser):
    """The options of a command; what is wrong with them is told in one sentence.

    Args:
        prog: its name, as it is typed.
        usage: how it is called; None: as its options say.
        about: what it does.
        examples: what stands behind the options.
        kwargs: of `argparse.ArgumentParser`.
    """

    def __init__(
        self, prog: str, usage: str | None = None, about: str | None = None, examples: str = "", **kwargs: Any
    ) -> None:
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, usage, about, examples, formatter_class=layout, allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise MisconfigurationException(f"{message}; `{self.prog} --help` lists the options")


def number_from(least: int) -> Callable[[str], int]:
    """The type of an option that takes whole numbers from ``least`` on."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}: give a number from {least}")
        return int(text)

    return read


def _parser() -> CommandParser:
    parser = CommandParser("lockstep run", USAGE, ABOUT, EXAMPLES)
    add = parser.add_argument
    add("-m", dest="module", metavar="MODULE", help="run a module in place of a script, as `python -m` does")
    add("--devices", default="auto", metavar="N", help="ranks on this node; auto: one for each GPU, else one; with "
        "--lightning and no other option the script's Trainer starts as many as it is given")  # fmt: skip
    add("--lightning", action="store_true", help="for a script written for Lightning, unchanged: `lightning` and "
        "`pytorch_lightning` are lockstep there")  # fmt: skip
    many = parser.add_argument_group("restarts")
    add = many.add_argument
    add("--max-restarts", type=number_from(0), default=0, metavar="N", help="how often all ranks are started anew when "
        "one has failed; each fit then goes on from the newest checkpoint of the run (default: 0)")  # fmt: skip
    add("--resume", action="store_true", help="go on from what an earlier run of the same command, with --resume or "
        "--max-restarts, has left, if there is something")  # fmt: skip
    add("--shutdown-timeout", type=number_from(0), default=30, metavar="S", help="seconds that ranks get to end "
        "(default: 30)")  # fmt: skip
    many = parser.add_argument_group("several nodes (start the same command on each)")
    add = many.add_argument
    add("--nodes", default="1", metavar="N", help="how many nodes, or MIN:MAX; default: 1")
    add("--node-rank", type=int, metavar="I", help="number of this node, from 0; the nodes meet on node 0, which has "
        "rank 0")  # fmt: skip
    add("--master-addr", metavar="HOST", help="of node 0, as all nodes know it")
    add("--master-port", type=int, metavar="PORT", help=f"of node 0 (default: {MASTER_PORT})")
    add("--local-addr", metavar="HOST", help="of this node, as the others know it (default: its host name)")
    add("--rdzv-endpoint", metavar="HOST:PORT", help="--master-addr and --master-port in one")
    add("--rdzv-id", default="lockstep", metavar="ID", help="the same on all nodes; tells runs apart that meet at one "
        "place")  # fmt: skip
    add("--patience", type=number_from(0), default=600, metavar="S", help="seconds to wait for other nodes (default: "
        "600)")  # fmt: skip
    return parser


def split(words: list[str], parser: CommandParser) -> tuple[argparse.Namespace, list[str]]:
    """Our options, before the script and directly behind it; and the script with its arguments, of a module these.

    Raises:
        MisconfigurationException: a word that is no option, or one that stands in both places.
    """
    takes = {word: action.nargs != 0 for action in parser._actions for word in action.option_strings}
    front, rest = _ours(words, takes)
    dashes = rest[:1] == ["--"]
    rest = rest[dashes:]
    script = [] if "-m" in front else rest[:1]
    if script and script[0].startswith("-"):
        raise MisconfigurationException(f"{script[0]} is none of its options: `{parser.prog} --help` lists them")
    own = "-m" in front and dashes  # what follows -m MODULE -- is the module's
    behind, arguments = ([], rest) if own else _ours(rest[len(script) :], takes)
    twice = {word.partition("=")[0] for word in front} & {word.partition("=")[0] for word in behind} & takes.keys()
    if twice:
        name, what = min(twice), script[0] if script else "the module"
        raise MisconfigurationException(
            f"{name} stands before {what} and behind it, where it is lockstep's, too: if it is meant "
            f"for the script, put -- in front of it: {what} -- {name} ..."
        )
    return parser.parse_args([*front, *behind]), [*script, *arguments[arguments[:1] == ["--"] :]]


def _ours(words: list[str], takes: dict[str, bool]) -> tuple[list[str], list[str]]:
    """The options at the beginning, with their values, and what follows."""
    at = 0
    while at < len(words):
        name, equals, _ = words[at].partition("=")
        if name not in takes:
            break
        at += 1 + (takes[name] and not equals)
    return words[:at], words[at:]


def _nodes(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    few, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 0 < few <= most:
        raise MisconfigurationException(f"--nodes {text}: give a number from 1, or the fewest and the most, as 1:4")
    return few, most


def _devices(text: str) -> int:
    import torch

    there = torch.accelerator.device_count()
    if text == "auto":
        return there or 1
    if not text.isdigit() or int(text) == 0:
        raise MisconfigurationException(f"--devices {text}: give the number of ranks on this node, from 1, or auto")
    return int(text)


def _endpoint(given: str) -> tuple[str, int]:
    """Host and port of ``--rdzv-endpoint``."""
    address, _, text = given.rpartition(":")
    address, text = (address, text) if address else (text, str(MASTER_PORT))
    if not text.isdigit():
        raise MisconfigurationException(f"--rdzv-endpoint {given}: give HOST:PORT")
    return address, int(text)


def _meeting(options: argparse.Namespace, few: int, most: int) -> tuple[str | None, int]:
    """Where the nodes meet."""
    given = [
        f"--{name.replace('_', '-')} {getattr(options, name)}"
        for name in ("node_rank", "master_addr", "master_port", "local_addr", "rdzv_endpoint")
        if getattr(options, name) is not None
    ]
    if (few, most) == (1, 1):
        if options.node_rank in (None, 0):
            return None, 0
        raise MisconfigurationException(f"{', '.join(given)}, but --nodes 1: say how many nodes there are by --nodes")
    address, port = options.master_addr, options.master_port
    if options.rdzv_endpoint is not None:
        if address is not None or port is not None:
            raise MisconfigurationException(
                f"{', '.join(given)}: give either --rdzv-endpoint or --master-addr and its port"
            )
        address, port = _endpoint(options.rdzv_endpoint)
    if address is None:
        raise MisconfigurationException(
            f"--nodes {options.nodes} without --master-addr: give the host of node 0, as all nodes know "
            "it, and --node-rank 0, 1, ... on each"
        )
    if options.node_rank is not None and not 0 <= options.node_rank < most:
        raise MisconfigurationException(
            f"--node-rank {options.node_rank} of --nodes {options.nodes}: give 0 to {most - 1}"
        )
    port = MASTER_PORT if port is None else port
    if not 0 < port < 65536:
        raise MisconfigurationException(f"--master-port {port}: give a number from 1 to 65535")
    return address, port


def words_of(module: str | None, script: Sequence[str]) -> tuple[str, ...]:
    """The script with its arguments, or ``-m`` and a module with its.

    Example:
        >>> words_of("project.train", ["--lr", "0.1"])
        ('-m', 'project.train', '--lr', '0.1')
    """
    return ("-m", module, *script) if module else tuple(script)


def check_script(command: str, module: str | None, script: list[str]) -> None:
    """Refuse a script or a module that is not there.

    Raises:
        MisconfigurationException: with the folder that this is.
    """
    here = os.getcwd()
    if module is not None:
        if not _is_module(module, here):
            raise MisconfigurationException(f"-m {module}: there is no such module in {here} or where packages are")
        return
    if not script:
        raise MisconfigurationException(f"no script is given: {command} train.py --devices 2; -m for a module")
    if os.path.isfile(script[0]) or os.path.isfile(os.path.join(script[0], "__main__.py")):
        return
    what = "is a folder without a __main__.py" if os.path.isdir(script[0]) else "is not there"
    raise MisconfigurationException(f"{script[0]} {what} (this is {here})")


def _is_module(name: str, folder: str) -> bool:
    """Whether ``python -m name`` finds something when it is started in ``folder``."""
    before = list(sys.path)
    sys.path.insert(0, folder)
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
    finally:
        sys.path[:] = before
