"""Each private part of torch that src/ uses is in the list of them, and each of the list is there and used."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module

import pytest

from lockstep.ground import torch_support
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.extensions import is_there as is_installed
from lockstep.ground.torch_support import PARTS, Part, is_there, missing, refuse_without
from lockstep.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from tests.guards.border import extension_of
from tests.guards.source import PACKAGE, house, names_made
from tests.guards.torch_parts import PARTS as WITH_CARE
from tests.tools.absent import is_absent

SOURCE = PACKAGE
OF_EXTENSIONS = [
    part
    for module in house()
    if module.endswith(".torch_parts") and extension_of(module) and is_installed(extension_of(module))
    for part in import_module(module).PARTS
]
ALL = [*PARTS, *OF_EXTENSIONS, *(part for part in WITH_CARE if not is_absent(part.files))]

OTHERS = {
    # Python's
    *("_exit", "_getframe", "_current_frames", "_active", "_args_from_interpreter_flags", "_run_exitfuncs", "_clear"),
    *("_exit_function", "_bootstrap", "_resource_tracker", "_forkserver", "_pid", "_forkserver_pid", "_cond", "_flag"),
    *("_actions", "_add_action", "_registry_get", "_mock_wraps", "_Environ"),
    "_time",  # tqdm's
    "_values",  # torch's of sparse tensors; the public method asks for a coalesced one
    # torchmetrics', Optuna's, DeepSpeed's, TensorBoard's, Dask's and Hugging Face's
    *("_copy_state_dict", "_defaults", "_trial_id", "_convert_to_deepspeed_param", "_register_deepspeed_module"),
    *("_param_slice_mappings", "_hp_mapping", "_lazy_init_hp_params_optimizer_state", "_get_file_writer"),
    *("_distributed", "_adjust_missing_and_unexpected_keys", "_init_weights", "_get_dtype_plan"),
    # within a part that is listed
    *("_pcontext", "_remaining_restarts", "_base", "_C", "_autograd", "_distributed_c10d", "_task_info"),
    *("_sampler_iter", "_in_backward_optimizers", "_wrapped_by_lr_sched", "_make_wrapper_subclass", "_schedulers"),
    *("_get_build_directory", "_saved_other", "_saved_self"),
    # the package of torch's own tests, whose fake process group stands for ranks
    "_internal",
}
"""Private names of others, and of torch where objects are asked whether they have them."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def imports(node: ast.AST) -> Iterator[str]:
    """The parts of torch that an import names, by their last private component."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
        for alias in node.names:
            path = f"{node.module}.{alias.name}".split(".")
            if any(map(is_private, path)):
                yield path[-1] if is_private(path[-1]) else next(filter(is_private, reversed(path)))


def asks(node: ast.AST) -> Iterator[str]:
    """The private attributes that a node reads."""
    if isinstance(node, ast.Attribute) and is_private(node.attr):
        yield node.attr
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
        name = node.args[1]
        if isinstance(name, ast.Constant) and isinstance(name.value, str) and is_private(name.value):
            yield name.value


def test_each_private_part_of_torch_is_in_the_list() -> None:
    # an extension that was deleted has not told its parts
    sources = [each for each in house().values() if not (own := extension_of(each.module)) or is_installed(own)]
    made = {name for source in sources for name in names_made(source.nodes)}
    listed = {component for part in ALL for name in part.name.split("|") for component in name.split(".")}
    known = listed | OTHERS
    unknown = {
        f"{source.path}:{getattr(node, 'lineno', 0)}: {name}"
        for source in sources
        for node in source.nodes
        for name in (*imports(node), *(found for found in asks(node) if found not in made))
        if name not in known
    }
    assert not unknown


@pytest.mark.parametrize("part", ALL, ids=lambda part: part.name.rpartition(".")[2])
def test_each_part_of_the_list_is_used_where_it_says(part: Part) -> None:
    last = {name.rpartition(".")[2] for name in part.name.split("|")}
    for named in part.files.split():
        place = SOURCE / named
        files = [place] if place.is_file() else list(place.rglob("*.py"))
        assert any(name in file.read_text() for file in files for name in last), named
    if part.since == "2.11" and not part.feature.startswith("nothing"):
        assert is_there(part.name)


def test_a_feature_whose_part_is_not_there_is_refused_by_name_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Part("torch.nn.Module._of_another_release", "engines/", "a test", torch_support.FSDP)
    monkeypatch.setattr(torch_support, "PARTS", (*PARTS, gone))
    missing.cache_clear()
    try:
        says = r"FSDPStrategy needs torch\.nn\.Module\._of_another_release \(a test\), which torch "
        with pytest.raises(MisconfigurationException, match=says + r"2.*or use DDPStrategy\(shard_optimizer=True\)"):
            FSDPStrategy()
        with pytest.raises(MisconfigurationException, match="ModelParallelStrategy needs"):
            ModelParallelStrategy()
        FSDPStrategy(sharding_strategy="NO_SHARD")
        DDPStrategy()
    finally:
        missing.cache_clear()


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("torch.nn.Linear.forward", True),
        ("torch.nn.Linear.in_features", True),  # an annotation
        ("torch.nn.Module._forward_pre_hooks", True),
        ("torch.nn.Linear._never", False),
        ("torch.never.named", False),
        ("never_a_package.named", False),
        ("torch.nn.Never|torch.nn.Linear", True),
    ],
)
def test_what_is_there_is_found(name: str, there: bool) -> None:
    assert is_there(name) is there


def test_nothing_is_refused_on_this_torch() -> None:
    for feature in torch_support.REFUSED_FEATURES:
        refuse_without(feature, feature, "never")
