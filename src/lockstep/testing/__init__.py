"""Tools for testing training code: small models, and a comparison of strategies with a single process."""

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
    from lockstep.testing.shared_card import SharedCard as SharedCard

# The file of each name; imported on first access, since equivalence.py imports the Trainer.
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
    "SharedCard": "shared_card",
    "check_equivalence": "equivalence",
}


def __getattr__(name: str) -> Any:
    return late(__name__, _WHERE, name)


def __dir__() -> list[str]:
    return sorted(_WHERE)
