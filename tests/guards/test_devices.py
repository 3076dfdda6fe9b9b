"""A few files of lockstep/ground know kinds of devices: all others ask them, but for what is CUDA's alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tools.absent import is_absent

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "lockstep"

CUDAS_ALONE = {
    "ground/accelerators.py": "CUDA's row of the accelerators, and its driver",
    "ground/device.py": "what is known of CUDA, so that nothing is started in a process that only asks",
    "ground/transfer.py": "the same of pinned memory",
    "cli/env.py": "the CUDA that torch was built for",
    "cluster/nccl.py": "NCCL",
    "config/devices.py": "cuBLAS's workspaces",
    "extensions/extras/throughput.py": "the operations a second of NVIDIA's GPUs, by name",
    "launch/environment.py": "CUDA's environment variables",
    "module.py": "LightningModule.on_gpu, which says whether it is on CUDA, as Lightning's does",
    "engines/ddp/native_batch_norm.py": "torch's own kernels for batch norm over ranks",
    "precision/formats.py": "float8",
    "profilers/pytorch.py": "NVTX and the profiler's CUDA activity",
    "extensions/deepspeed/config.py": "DeepSpeed's overlap_comm",
    "extensions/parallel/hooks/hook_transport.py": "the devices that torch.futures knows",
    "engines/ranks.py": "NCCL",
    "extensions/verify/child.py": "a GPU that a verified script chooses, before it finds out that there is none",
}
"""File -> what is in it that only CUDA has."""


def about_cuda(text: str) -> Iterator[tuple[int, str]]:
    """Line and code of what is asked of CUDA: ``torch.cuda``, ``tensor.is_cuda``, and comparisons with ``"cuda"``."""
    for node in ast.walk(ast.parse(text)) if "cuda" in text else ():
        if isinstance(node, ast.Attribute) and (
            node.attr == "is_cuda"
            or (node.attr == "cuda" and isinstance(node.value, ast.Name) and node.value.id == "torch")
        ):
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Compare):
            compared = [leaf for side in (node.left, *node.comparators) for leaf in ast.walk(side)]
            if any(isinstance(leaf, ast.Constant) and leaf.value == "cuda" for leaf in compared):
                yield node.lineno, ast.unparse(node)


def test_only_what_is_cudas_alone_asks_cuda() -> None:
    found = [
        f"{name}:{line}: {code}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if (name := path.relative_to(PACKAGE).as_posix()) not in CUDAS_ALONE and not name.startswith("testing/")
        for line, code in about_cuda(path.read_text())
    ]
    assert not found, (
        "ask ground/device.py or a file beside it, or say in CUDAS_ALONE what only CUDA has:\n" + "\n".join(found)
    )


def test_files_of_the_list_are_there_and_need_it() -> None:
    there = [name for name in CUDAS_ALONE if not is_absent(name)]
    assert [name for name in there if not any(about_cuda((PACKAGE / name).read_text()))] == []


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("torch.cuda.synchronize()", 1),
        ("value.is_cuda", 1),
        ('device.type == "cuda"', 1),
        ('kind in ("cuda", "cpu")', 1),
        ('device.type != "cpu"', 0),
        ('"torch.cuda.synchronize()"', 0),
        ("synchronize(device)", 0),
    ],
)
def test_a_breach_is_found(text: str, count: int) -> None:
    assert len(list(about_cuda(text))) == count
