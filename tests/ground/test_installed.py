"""What lockstep puts into the process: it is on the list, and a fit leaves nothing but what the list says stays."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from lockstep.ground.installed import INSTALLED, Installation
from tests.guards.source import PACKAGE, house
from tests.tools.absent import is_absent
from tests.tools.fresh import python

CALLS = ("register_at_fork", "set_wakeup_fd", "_registration_hook", "optimizer_step_pre_hook", "faulthandler.register")
CALLED = ("signal.signal", "atexit.register")
ASSIGNED = ("sys.excepthook", "sys.stdout", "sys.stderr", "sys.meta_path", "threading.excepthook", "sys.unraisablehook")

IN_EXTENSIONS = (
    "extensions/balancing/plan_command.py",
    "extensions/deepspeed/package.py",
    "extensions/deepspeed/partition.py",
    "extensions/lightning/unchanged.py",
    "extensions/parallel/backward_watcher.py",
    "extensions/parallel/hooks/hook_transport.py",
)
"""Files of extensions that install something of their own."""

OTHER_PROCESSES = (
    "launch/elastic_run.py",
    "launch/parent_death.py",
    "launch/spawn.py",
    "supervise/supervisor.py",
    "extensions/replay/operations.py",
    "extensions/verify/",
)
"""Files whose handlers and hooks are for processes that are lockstep's own."""

GLOBALS = {
    "ground/seed.py": {"_current": "the seed"},
    "ground/rank.py": {"_warned": "what was warned of once", "rank_zero_only": "this process' rank"},
    "supervise/stack_request.py": {
        "_file": "where answers lie",
        "_wake_pipe": "how a stack is requested",
        "_where": "what answers say first",
    },
    "supervise/status.py": {"_rank": "this process as a rank"},
    "supervise/trace_memory.py": {"_own": "this process' trace"},
    "supervise/collective_trace.py": {"_trace": "the same", "_replaced": "what stood in torch's place"},
    "launch/script.py": {"_sides": "this process' side of its supervisor"},
    "launch/attempts.py": {"_entered": "the attempt that this process belongs to"},
    "extensions/parallel/backward_watcher.py": {"waiting_for_steps": "containers, as long as they live"},
    "engines/ddp/late_parameters.py": {"_watching": "models, as long as they are trained"},
    "extensions/deepspeed/package.py": {"_known_group": "whose process group DeepSpeed has joined"},
    "extensions/parallel/hooks/hook_transport.py": {"_queues": "threads of process groups, as long as these live"},
    "loop/spawn_results.py": {"_parents": "the Trainer that this process was copied from"},
    "extensions/search/parser.py": {"_running": "the trial of a study that this process is"},
    "callbacks/progress/tqdm.py": {"_class": "tqdm, once it is imported"},
}
"""What modules remember, file by file, that a process has once. Caches of functions and classes are not listed."""

LAST = tuple(name.rpartition(".")[2] for name in (*CALLS, *CALLED))


def _may_install(function: ast.expr) -> bool:
    """Whether the name of a called function is worth spelling out, which takes most of the time."""
    if isinstance(function, ast.Name):
        return function.id.endswith((*LAST, "setattr", "_set"))
    return isinstance(function, ast.Attribute) and (
        function.attr.endswith(LAST)
        or (isinstance(function.value, ast.Attribute) and function.value.attr == "meta_path")
    )


def _installs(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """The lines of a file that change the process around it."""
    for node in nodes:
        if isinstance(node, ast.Call) and _may_install(node.func):
            name = ast.unparse(node.func)
            if (
                name.endswith(CALLS)
                or name in ("signal.signal", "atexit.register")
                or name.startswith("sys.meta_path.")
            ):
                yield f"{node.lineno}: {name}"
            elif name in ("setattr", "_set") and node.args:
                first = ast.unparse(node.args[0])
                if first in ("sys", "dist.Work"):
                    yield f"{node.lineno}: {name}({first}, ...)"
        elif isinstance(node, ast.Assign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            attributes = (ast.unparse(target) for target in targets if isinstance(target, ast.Attribute))
            yield from (f"{node.lineno}: {target}" for target in attributes if target in ASSIGNED)


@pytest.fixture(scope="module")
def files() -> dict[str, tuple[ast.AST, ...]]:
    return {"/".join(source.path.parts[1:]): source.nodes for source in house().values()}


def test_whatever_changes_the_process_is_on_the_list(files: dict[str, tuple[ast.AST, ...]]) -> None:
    homes = {home for each in INSTALLED for home in each.homes} | {"ground/installed.py"}
    found = {name: list(_installs(nodes)) for name, nodes in files.items() if not name.startswith(OTHER_PROCESSES)}
    strangers = {name: lines for name, lines in found.items() if lines and name not in (*homes, *IN_EXTENSIONS)}
    assert not strangers
    assert all((PACKAGE / home).exists() for home in homes)


def test_what_would_change_the_process_elsewhere_is_found() -> None:
    text = "import signal, sys\nsignal.signal(2, print)\nsys.excepthook = print\nos.register_at_fork(before=print)"
    assert sorted(_installs(ast.walk(ast.parse(text)))) == [
        "2: signal.signal",
        "3: sys.excepthook",
        "4: os.register_at_fork",
    ]


def test_what_modules_remember_is_on_the_list(files: dict[str, tuple[ast.AST, ...]]) -> None:
    found = {}
    for name, nodes in files.items():
        names = {each for node in nodes if isinstance(node, ast.Global) for each in node.names}
        if names:
            found[name] = names
    assert {name: names - set(GLOBALS.get(name, ())) for name, names in found.items()} == {
        name: set() for name in found
    }
    for name, listed in GLOBALS.items():
        if is_absent(name):
            continue
        text = (PACKAGE / name).read_text()
        assert all(f"\n{each}" in text for each in listed), name


def test_an_entry_is_put_once_and_can_be_taken_away() -> None:
    done: list[str] = []
    entry = Installation("it", (), "")
    for _ in range(2):
        entry.install(lambda: (done.append("put"), lambda: done.append("gone"))[1])
    assert entry.is_installed
    entry.remove()
    entry.remove()
    assert done == ["put", "gone"]
    assert not entry.is_installed


def test_the_leave_of_the_supervisor_is_registered_when_the_trainer_is_imported(tmp_path: Path) -> None:
    """Registered by the first fit, it ran before a script's exit functions; after a failure those never ran."""
    text = "from lockstep import Trainer\nfrom lockstep.ground.installed import EXIT_SUPERVISOR\n"
    script = tmp_path / "script.py"
    script.write_text(f"{text}print(EXIT_SUPERVISOR.is_installed)")
    assert python(script, folder=tmp_path).stdout == "True\n"


SCRIPT = """
import atexit, faulthandler, json, os, signal, sys, threading
exits, forks = [], []
real_exit, real_fork = atexit.register, os.register_at_fork
def register(do, *args, **kwargs):
    if "lockstep" in (getattr(do, "__module__", "") or ""):
        exits.append(do.__qualname__)
    return real_exit(do, *args, **kwargs)
def at_fork(**functions):
    forks.extend(name for name in functions if "lockstep" in sys._getframe(1).f_globals["__name__"])
    real_fork(**functions)
atexit.register, os.register_at_fork = register, at_fork
import torch
import torch.distributed as dist
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.utils.data import DataLoader
import torch.distributed.nn.functional

def process():
    hooks = ("parameter", "buffer", "module")
    registered = [len(getattr(modules, f"_global_{name}_registration_hooks")) for name in hooks]
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    hook = sys.excepthook
    while getattr(hook, "__name__", "") == "_distributed_excepthook" or getattr(hook, "is_removed", False):
        inner = hook.before if hasattr(hook, "before") else None
        hook = inner or next(c.cell_contents for c in hook.__closure__ if callable(c.cell_contents))
    return {
        "sys.meta_path": [type(each).__name__ for each in sys.meta_path],
        "sys.excepthook": type(hook).__module__,
        "torch's hook before each optimizer step": len(optimizers._global_optimizer_pre_hooks),
        "torch's hooks on parameters, buffers and submodules that are registered": registered,
        "torch's collectives": [f.__code__.co_filename for f in (dist.all_reduce, dist.barrier, dist.Work.wait)
                                if hasattr(f, "__code__")],
        "handlers of signals": [str(signal.getsignal(n)) for n in signal.valid_signals()
                                if n < signal.SIGRTMIN and n != signal.SIGCHLD],
        "the handler of the signal SIGRTMIN+10": str(signal.getsignal(signal.SIGRTMIN + 10)),
        "faulthandler, and the thread lockstep-sample": sorted(t.name for t in threading.enumerate()
                                                               if t.name == "lockstep-sample"),
        "signal.set_wakeup_fd": wakeup,
        "sys.stdout and sys.stderr": [type(sys.stdout).__name__, type(sys.stderr).__name__],
        "atexit": sorted(set(exits)),
        "os.register_at_fork": len(forks),
    }

at_first = process()
import lockstep
from lockstep.ground.installed import INSTALLED

class Module(lockstep.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def training_step(self, batch, batch_idx):
        return self.layer(batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

seen = []
for _ in range(2):
    lockstep.Trainer(accelerator="cpu", devices=int(sys.argv[1]), strategy="ddp", max_steps=2, logger=False,
                     enable_checkpointing=False, enable_model_summary=False,
                     ).fit(Module(), DataLoader(torch.zeros(16, 1), batch_size=2, num_workers=1))
    seen.append(process())
there = [each.name for each in INSTALLED if each.is_installed]
for each in INSTALLED:
    each.remove()
print("\\n" + json.dumps([at_first, *seen, process(), there]), flush=True)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="has the signals")
@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_fit_leaves_nothing_but_what_the_list_says_stays(tmp_path: Path, devices: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    ended = python(script, str(devices), folder=tmp_path, seconds=120)
    assert ended.returncode == 0, ended.stderr
    told = [line for line in ended.stdout.splitlines() if line.startswith("[{")]
    assert len(told) == devices
    for line in told:
        before, first, second, removed, there = json.loads(line)
        stays = {each.name for each in INSTALLED if each.stays}
        assert first == second  # a second fit adds nothing
        assert set(there) <= stays
        for name, value in first.items():
            named = name in there or any(each.startswith(name) for each in there)
            assert named or value == before[name], f"{name}: {before[name]} -> {value}"
        for name in removed:
            if not name.startswith(("os.", "atexit", "faulthandler")):
                assert removed[name] == before[name], name
