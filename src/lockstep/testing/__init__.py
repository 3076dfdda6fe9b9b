"""What tests of distributed code lean on: rank pool, ranks as threads or on one card, leak checks, models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.names.finder import late

if TYPE_CHECKING:
    from lockstep.testing.equivalence import EquivalenceReport as EquivalenceReport
    from lockstep.testing.equivalence import check_equivalence as check_equivalence
    from lockstep.testing.models import BoringDataModule as BoringDataModule
    from lockstep.testing.models import BoringDataModuleNoLen as BoringDataModuleNoLen
    from lockstep.testing.models import BoringModel as BoringModel
    from lockstep.testing.models import ManualOptimBoringModel as ManualOptimBoringModel
    from lockstep.testing.models import RandomDataset as RandomDataset
    from lockstep.testing.models import RandomDictDataset as RandomDictDataset
    from lockstep.testing.models import RandomIterableDataset as RandomIterableDataset
    from lockstep.testing.models import RandomIterableDatasetWithLen as RandomIterableDatasetWithLen
    from lockstep.testing.pool import RankFailure as RankFailure
    from lockstep.testing.pool import RankPool as RankPool
    from lockstep.testing.pool import RankTimeout as RankTimeout
    from lockstep.testing.pool import run_threads as run_threads
    from lockstep.testing.shared_card import SharedCard as SharedCard

# Name -> the file that it lives in: imported when it is first asked for.
_WHERE = {
    "BoringDataModule": "models",
    "BoringDataModuleNoLen": "models",
    "BoringModel": "models",
    "EquivalenceReport": "equivalence",
    "ManualOptimBoringModel": "models",
    "RandomDataset": "models",
    "RandomDictDataset": "models",
    "RandomIterableDataset": "models",
    "RandomIterableDatasetWithLen": "models",
    "RankFailure": "pool",
    "RankPool": "pool",
    "RankTimeout": "pool",
    "SharedCard": "shared_card",
    "check_equivalence": "equivalence",
    "run_threads": "pool",
}


def __getattr__(name: str) -> Any:
    return late(__name__, _WHERE, name)


def __dir__() -> list[str]:
    return sorted(_WHERE)
