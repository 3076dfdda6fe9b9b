"""Construction of models that do not fit in one rank's memory: each rank stores a slice of each large tensor."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from lockstep.engines.ddp.consistency import checksum
from lockstep.ground import comm
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.seed import random_states_of, set_random_states_of
from lockstep.ground.torch_support import INIT, refuse_without

BUDGET = 256 * 2**20
"""Default limit in bytes for tensors that are unsharded at the same time."""
SMALL = 2**12
"""Size in bytes up to which a tensor is never sliced."""

FILLS = frozenset(
    f"aten::{name}_"
    for name in [
        "uniform",
        "normal",
        "log_normal",
        "exponential",
        "geometric",
        "cauchy",
        "random",
        "bernoulli",
        "zero",
        "fill",
        "copy",
    ]
)
"""Operations that overwrite all values of their first argument."""

TOUCHES = frozenset(
    [
        "numpy",
        "__array__",
        "data_ptr",
        "untyped_storage",
        "storage",
        "tolist",
        "share_memory_",
        "__reduce_ex__",
        "__dlpack__",
    ]
)
"""Methods that access memory without torch's dispatcher."""


@dataclass
class _Storage:
    """Record of a tensor's storage while a model is constructed, with this rank's slice if the storage is sliced.

    Attributes:
        weak: reference to the storage, which may be gone.
        nbytes: full size in bytes.
        number: serial number, the same on all ranks.
        part: this rank's slice; None if the memory is not sliced.
        checksum: checksum of the full memory.
    """

    weak: StorageWeakRef
    nbytes: int
    number: int
    part: Tensor | None = None
    checksum: int = 0

    def found(self) -> torch.UntypedStorage | None:
        """Return the storage; None if it was released."""
        if self.weak.expired():
            return None
        made: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self.weak.cdata)
        return made


class ShardedInit(TorchDispatchMode):
    """Dispatch mode that frees tensors not used recently, except for this rank's slices. A use gathers the slices.

    All ranks must run the same operations with the same values. Slices are gathered when a tensor is used again, unless
    the operation overwrites all of it. Afterwards `gather` gathers tensors in full.

    Args:
        budget: bytes of tensors that may be unsharded at the same time, in addition to those in use.
        group: process group of the ranks.

    Attributes:
        peak: the largest number of bytes that were unsharded at the same time.

    Example::

        with ShardedInit() as building:
            module.configure_model()
        for block in blocks:
            building.gather(block.parameters())
    """

    def __init__(self, budget: int = BUDGET, group: comm.Group = None) -> None:
        refuse_without(INIT, "drawing weights that no rank has completely", "make the layers in `__init__`")
        super().__init__()
        self._budget, self._group = budget, group
        self._world, self._rank = comm.world_size(group), comm.rank(group)
        self._known: dict[int, _Storage] = {}  # by address
        self._whole: OrderedDict[int, _Storage] = OrderedDict()  # by number; the least recently used is first
        self._count = self._bytes = self.peak = 0
        self._memory_access = _MemoryAccess(self)

    def __enter__(self) -> ShardedInit:
        """Enter the mode."""
        super().__enter__()
        self._memory_access.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        """Exit the mode, after which no further memory is released."""
        self._memory_access.__exit__(*error)
        super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Gather the arguments of ``func``, run it, and release other tensors if memory is over the budget."""
        with torch._C.DisableTorchFunction():
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            # the values of a tensor that the operation overwrites need not be gathered
            first = args[0] if args and func._schema.name in FILLS else None
            if isinstance(first, Tensor):
                covers = first.is_contiguous() and first.storage_offset() == 0
                first = first if covers and not any(arg is first for arg in args[1:]) else None
            for tensor in tensors:
                self._use(tensor, overwritten=tensor is first)
            result = func(*args, **(kwargs or {}))
            made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            for tensor in made:
                self._use(tensor)
            self._shrink({_address(tensor) for tensor in (*tensors, *made)})
        return result

    def _use(self, tensor: Tensor, overwritten: bool = False) -> None:
        """Record a use of a tensor, and gather it (collective) if it is sliced and not overwritten completely."""
        if tensor.device.type == "meta" or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        address = storage._cdata
        known = self._known.get(address)
        if known is None or known.weak.expired():
            nbytes = storage.nbytes()
            # a message for a small tensor takes longer than its memory is worth
            if nbytes <= SMALL:
                return
            known = self._known[address] = _Storage(StorageWeakRef(storage), nbytes, self._count)
            self._count += 1
        if known.part is not None:
            # if only a part of the storage is overwritten, the rest is still needed
            covers = tensor.numel() * tensor.element_size() == known.nbytes
            self._make_whole(known, storage, values=not (overwritten and covers))
        self._note(known)

    def _note(self, known: _Storage) -> None:
        if known.number in self._whole:
            self._whole.move_to_end(known.number)
        else:
            self._whole[known.number] = known
            self._bytes += known.nbytes
            self.peak = max(self.peak, self._bytes)

    def _shrink(self, in_use: set[int]) -> None:
        """Slice the least recently used tensors, the same on all ranks, until memory is within the budget."""
        for number in list(self._whole):
            if self._bytes <= self._budget:
                return
            known = self._whole[number]
            storage = known.found()
            # the operation that runs now reads or returns it
            if storage is not None and storage._cdata in in_use:
                continue
            del self._whole[number]
            self._bytes -= known.nbytes
            if storage is None or not storage.resizable():  # numpy has a view of it
                continue
            whole = _flat(storage)
            size = -(-known.nbytes // self._world)
            known.checksum = _checksum(whole)  # shows at the next gather whether all ranks had the same values
            known.part = torch.zeros(size, dtype=torch.uint8, device=whole.device)
            mine = whole[size * self._rank : size * (self._rank + 1)]
            known.part[: mine.numel()] = mine
            storage.resize_(0)

    def _make_whole(self, known: _Storage, storage: torch.UntypedStorage, values: bool = True) -> None:
        part, known.part = known.part, None
        assert part is not None
        storage.resize_(known.nbytes)
        if not values:
            return
        whole = comm.all_gather_tensor(part, self._group).flatten()[: known.nbytes]
        if _checksum(whole) != known.checksum:
            raise MisconfigurationException(
                f"rank {self._rank}: `configure_model` creates different values on this rank than on other ranks, but "
                "each rank stores only a part of the module. The values must not depend on the rank, or on a generator "
                "with a different seed on each rank"
            )
        _flat(storage).copy_(whole)

    def slices(self) -> list[Tensor]:
        """Return this rank's slices of all sliced tensors."""
        return [known.part for known in self._known.values() if known.part is not None]

    def gather(self, tensors: Iterable[Tensor]) -> None:
        """Gather tensors in full. Collective if any of them is sliced."""
        with _disable_current_modes():
            for tensor in tensors:
                if tensor.layout is not torch.strided or tensor.device.type == "meta":
                    continue
                storage = tensor.untyped_storage()
                known = self._known.get(storage._cdata)
                if known is not None and known.part is not None and not known.weak.expired():
                    self._make_whole(known, storage)


class _MemoryAccess(TorchFunctionMode):
    """Mode that gathers tensors before methods that access their memory directly."""

    def __init__(self, building: ShardedInit) -> None:
        super().__init__()
        self._building = building

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Gather arguments that are sliced, and call the function."""
        if getattr(func, "__name__", "") in TOUCHES:
            self._building.gather(arg for arg in args if isinstance(arg, Tensor))
        return func(*args, **(kwargs or {}))


@contextmanager
def rank_0_draws(devices: Sequence[torch.device], group: comm.Group = None) -> Iterator[None]:
    """Use rank 0's random numbers on all ranks inside the block. Collective.

    Args:
        devices: this rank's devices, the same number on each rank.
        group: process group of the ranks.
    """
    own = random_states_of(devices)
    of_zero = comm.broadcast_object(own, 0, group)
    are_same = all(comm.all_gather_object(_same(own, of_zero), group))
    set_random_states_of(of_zero, devices)
    try:
        yield
    finally:
        if not are_same:  # ranks that drew the same numbers before continue with the next ones
            set_random_states_of(own, devices)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return bool(torch.equal(one, other))
    if isinstance(one, dict):
        return all(_same(value, other[name]) for name, value in one.items())
    if isinstance(one, (list, tuple)):
        return all(map(_same, one, other))
    same = one == other
    return same if isinstance(same, bool) else bool(same.all())


def _address(tensor: Tensor) -> int:
    return 0 if tensor.layout is not torch.strided else int(tensor.untyped_storage()._cdata)


def _checksum(whole: Tensor) -> int:
    words = whole.numel() // 8 * 8
    return checksum(whole[:words].view(torch.int64)) + checksum(whole[words:])


def _flat(storage: torch.UntypedStorage) -> Tensor:
    made = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return made.set_(storage, 0, (storage.nbytes(),), (1,))
