"""The command ``lockstep`` and its subcommand ``run``, which starts a script on all devices and restarts it."""

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
from lockstep.ground.foreign import replaced_by_it

if TYPE_CHECKING:
    from lockstep.launch.elastic_run import LaunchPlan

USAGE = "lockstep run [options] script.py [options] [arguments of the script]"
ABOUT = """\
Start a script once for each device, on one node or on several, by torch's elastic agent.

The script needs no change: its Trainer finds the ranks, as under torchrun. Omit its devices and num_nodes, or
set them to the same values. Options go before the script or directly after it. The first word that is not an option,
or --, starts the arguments of the script.
"""
EXAMPLES = """\
examples:
  lockstep run train.py --devices 4 --lr 0.1
  lockstep run --devices 4 --max-restarts 3 -m project.train
  lockstep run --lightning train.py                          a script that imports lightning, unchanged
  lockstep run --resume --max-restarts 3 train.py            continues a killed run of this command
  on each of two nodes, with --node-rank 0 and 1:
  lockstep run train.py --devices 8 --nodes 2 --node-rank 0 --master-addr node1 --max-restarts 3
"""
COMMANDS = {
    "run": "start a script on all devices of one node or several",
    "checkpoint": "show the content of a checkpoint, convert it, or compare two",
    "env": "show versions, devices, the detected cluster, and lockstep's variables",
}
"""Commands of the core, each with a line of help. ``run`` is in this file; each other one is a function in a file of
its name. Extensions add theirs (`lockstep.ground.extensions`)."""
MASTER_PORT = 29400


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command ``lockstep`` and return its exit code.

    Args:
        argv: arguments that follow ``lockstep``; None: the arguments of this process.
    """
    try:
        code = _run_command(argv)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output, such as `head`, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at exit
        return 128 + signal.SIGPIPE
    return code


def _run_command(argv: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    first = words[0] if words else ""
    replaced = replaced_by_it()
    if replaced:
        print(f"lockstep: {replaced}", file=sys.stderr)
        return 2
    if first == "--version":
        print(f"lockstep {sys.modules['lockstep'].__version__}")
        return 0
    if first not in COMMANDS and not is_known("commands", first):
        # the core's names come first, and no extension can replace them
        every = COMMANDS | {name: line for name, line in commands().items() if name not in COMMANDS}
        if first not in ("-h", "--help"):
            wrong = f"{first!r} is not a command" if words else "no command is given"
            print(f"lockstep: {wrong}; choose one of: {', '.join(every)}", file=sys.stderr)
            return 2
        rows = every | {"--version": "show the version"}
        width = max(map(len, rows))
        print("usage: lockstep COMMAND ...\n")
        print(*(f"  {name:<{width}} {line}" for name, line in rows.items()), sep="\n")
        print("\n`lockstep COMMAND --help` lists its options.")
        return 0
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


def run(words: Sequence[str]) -> int:
    """Run ``lockstep run``: start the ranks, wait until they end, and return the exit code.

    Raises:
        MisconfigurationException: an option is wrong, this process is a rank itself, or the port is in use.
    """
    plan = planned(words)
    from lockstep.launch.elastic_run import start, start_script  # torch's agent costs 0.3 s, and --help needs none

    return start_script(plan) if plan.by_script else start(plan)


def planned(words: Sequence[str]) -> LaunchPlan:
    """Parse the arguments of ``lockstep run`` into a LaunchPlan, which describes the ranks to start.

    Raises:
        MisconfigurationException: an option is wrong.
    """
    parser = _parser()
    options, script = split(list(words), parser)
    few, most = _nodes(options.nodes)
    devices = _devices(options.devices)
    address, port = _rendezvous(options, few, most)
    command = words_of(options.module, script)
    check_script("lockstep run", options.module, script)
    if options.lightning:
        load("services", "Lightning's names")  # raises here, and not once in each rank, if the extension is missing
    # Without an option for torch's agent the script's own Trainer starts the ranks, as many as its `devices`.
    defaults = {name: parser.get_default(name) for name in vars(options)}
    needs_agent = any(
        value != defaults[name] for name, value in vars(options).items() if name not in ("lightning", "module")
    )
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
        by_script=options.lightning and not needs_agent,
    )


def name_of(command: Sequence[str]) -> str:
    """Return a name for a run, from the script's name and a hash of its arguments.

    The same command has the same name, so that ``--resume`` finds its earlier run.

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
    """Parser of a command's options that raises a MisconfigurationException if an option is wrong.

    Args:
        prog: name of the command, as it is typed.
        usage: line of usage; None: derived from the options.
        about: description, above the options.
        examples: text below the options.
        kwargs: further arguments of `argparse.ArgumentParser`.
    """

    def __init__(
        self, prog: str, usage: str | None = None, about: str | None = None, examples: str = "", **kwargs: Any
    ) -> None:
        layout = argparse.RawDescriptionHelpFormatter
        # an abbreviation may be meant for the script, whose arguments follow ours
        super().__init__(prog, usage, about, examples, formatter_class=layout, allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise MisconfigurationException(f"{message}. `{self.prog} --help` lists the options")


def number_from(least: int) -> Callable[[str], int]:
    """Return an argparse type for whole numbers of at least ``least``."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return read


def _parser() -> CommandParser:
    parser = CommandParser("lockstep run", USAGE, ABOUT, EXAMPLES)
    add = parser.add_argument
    add("-m", dest="module", metavar="MODULE", help="run a module in place of a script, as `python -m` does")
    add("--devices", default="auto", metavar="N", help="ranks on this node; auto: one for each GPU, else one; with "
        "--lightning and no other option the script's Trainer starts its own ranks")  # fmt: skip
    add("--lightning", action="store_true", help="run a script written for Lightning unchanged: its imports of "
        "`lightning` and `pytorch_lightning` load lockstep")  # fmt: skip
    many = parser.add_argument_group("restarts")
    add = many.add_argument
    add("--max-restarts", type=number_from(0), default=0, metavar="N", help="how often all ranks are restarted after "
        "one has failed; each fit then resumes from the newest checkpoint of the run (default: 0)")  # fmt: skip
    add("--resume", action="store_true", help="continue an earlier run of the same command, started with --resume or "
        "--max-restarts, if there is one")  # fmt: skip
    add("--shutdown-timeout", type=number_from(0), default=30, metavar="S", help="seconds that ranks get to end "
        "(default: 30)")  # fmt: skip
    many = parser.add_argument_group("several nodes (start the same command on each)")
    add = many.add_argument
    add("--nodes", default="1", metavar="N", help="how many nodes, or MIN:MAX; default: 1")
    add("--node-rank", type=int, metavar="I", help="number of this node, from 0; node 0 hosts the rendezvous and has "
        "rank 0")  # fmt: skip
    add("--master-addr", metavar="HOST", help="address of node 0 that all nodes can reach")
    add("--master-port", type=int, metavar="PORT", help=f"port on node 0 (default: {MASTER_PORT})")
    add("--local-addr", metavar="HOST", help="address of this node that the others can reach (default: its host name)")
    add("--rdzv-endpoint", metavar="HOST:PORT", help="--master-addr and --master-port in one")
    add("--rdzv-id", default="lockstep", metavar="ID", help="name of the run, the same on all nodes; separates runs "
        "that use one endpoint")  # fmt: skip
    add("--patience", type=number_from(0), default=600, metavar="S", help="seconds to wait for other nodes (default: "
        "600)")  # fmt: skip
    return parser


def split(words: list[str], parser: CommandParser) -> tuple[argparse.Namespace, list[str]]:
    """Split a command line into lockstep's options and the script's arguments.

    lockstep's options are before the script or directly after it.

    Returns:
        the parsed options; and the script with its arguments, or under ``-m`` the arguments alone.

    Raises:
        MisconfigurationException: an unknown option, or an option that is given both before and after the script.
    """
    takes = {word: action.nargs != 0 for action in parser._actions for word in action.option_strings}
    front, rest = _split_options(words, takes)
    dashes = rest[:1] == ["--"]
    rest = rest[dashes:]
    script = [] if "-m" in front else rest[:1]
    if script and script[0].startswith("-"):
        raise MisconfigurationException(f"{script[0]} is not an option. `{parser.prog} --help` lists the options")
    own = "-m" in front and dashes  # what follows -m MODULE -- is the module's
    after, arguments = ([], rest) if own else _split_options(rest[len(script) :], takes)
    # argparse would let the second win, which may have been meant for the script
    twice = {word.partition("=")[0] for word in front} & {word.partition("=")[0] for word in after} & takes.keys()
    if twice:
        name, what = min(twice), script[0] if script else "the module"
        raise MisconfigurationException(
            f"{name} is given both before and after {what}, and lockstep would read both. If the second is meant for "
            f"the script, put -- in front of it: {what} -- {name} ..."
        )
    return parser.parse_args([*front, *after]), [*script, *arguments[arguments[:1] == ["--"] :]]


def _split_options(words: list[str], takes: dict[str, bool]) -> tuple[list[str], list[str]]:
    """Split a command line, and return (the leading options with their values, the remaining words)."""
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
        raise MisconfigurationException(
            f"--nodes {text} is not a number of nodes. Pass a number of at least 1, or MIN:MAX such as 1:4"
        )
    return few, most


def _devices(text: str) -> int:
    import torch  # late: its import takes 2 s, which help and errors do without

    there = torch.accelerator.device_count()
    if text == "auto":
        return there or 1
    if not text.isdigit() or int(text) == 0:
        raise MisconfigurationException(
            f"--devices {text} is not a number of ranks. Pass a number of at least 1, or auto"
        )
    return int(text)


def _rendezvous(options: argparse.Namespace, few: int, most: int) -> tuple[str | None, int]:
    """Return (host, port) of the nodes' rendezvous; (None, 0) for a single node."""
    given = [
        f"--{name.replace('_', '-')} {getattr(options, name)}"
        for name in ("node_rank", "master_addr", "master_port", "local_addr", "rdzv_endpoint")
        if getattr(options, name) is not None
    ]
    if (few, most) == (1, 1):
        if options.node_rank in (None, 0):
            return None, 0
        raise MisconfigurationException(
            f"{', '.join(given)} is only for several nodes. Pass the number of nodes with --nodes"
        )
    address, port = options.master_addr, options.master_port
    if options.rdzv_endpoint is not None:
        if address is not None or port is not None:
            raise MisconfigurationException(
                f"{', '.join(given)} contradict each other. Pass --rdzv-endpoint, or --master-addr and --master-port"
            )
        host, _, number = options.rdzv_endpoint.rpartition(":")
        if not host:  # without a colon rpartition leaves the host in the last part
            host, number = number, str(MASTER_PORT)
        if not number.isdigit():
            raise MisconfigurationException(f"--rdzv-endpoint {options.rdzv_endpoint} is not of the form HOST:PORT")
        address, port = host, int(number)
    if address is None:
        raise MisconfigurationException(
            f"--nodes {options.nodes} needs --master-addr. Pass an address of node 0 that all nodes can reach, and "
            "--node-rank 0, 1, ... on each node"
        )
    if options.node_rank is not None and not 0 <= options.node_rank < most:
        raise MisconfigurationException(
            f"--node-rank {options.node_rank} is out of range for --nodes {options.nodes}. Pass 0 to {most - 1}"
        )
    port = MASTER_PORT if port is None else port
    if not 0 < port < 65536:
        raise MisconfigurationException(f"--master-port {port} is not a port. Pass a number from 1 to 65535")
    return address, port


def words_of(module: str | None, script: Sequence[str]) -> tuple[str, ...]:
    """Return a run's command line for Python: ``script arguments`` or ``-m module arguments``.

    Example:
        >>> words_of("project.train", ["--lr", "0.1"])
        ('-m', 'project.train', '--lr', '0.1')
    """
    return ("-m", module, *script) if module else tuple(script)


def check_script(command: str, module: str | None, script: list[str]) -> None:
    """Raise a MisconfigurationException if the script or module does not exist."""
    here = os.getcwd()
    if module is not None:
        if not _is_module(module, here):
            raise MisconfigurationException(
                f"-m {module}: the module does not exist in {here} or among installed packages"
            )
        return
    if not script:
        raise MisconfigurationException(
            f"no script is given. Example: {command} train.py --devices 2; -m runs a module"
        )
    if os.path.isfile(script[0]) or os.path.isfile(os.path.join(script[0], "__main__.py")):
        return
    what = "is a folder without a __main__.py" if os.path.isdir(script[0]) else "does not exist"
    raise MisconfigurationException(f"{script[0]} {what} (working directory: {here})")


def _is_module(name: str, folder: str) -> bool:
    """Return True if ``python -m name``, started in ``folder``, finds a module."""
    # `python -m` puts its working directory first; the console script `lockstep` does not
    before = list(sys.path)
    sys.path.insert(0, folder)
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
    finally:
        sys.path[:] = before
