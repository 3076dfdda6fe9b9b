"""LightningDataModule, which bundles the data of a project, with its hooks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from typing_extensions import Self

from lockstep.checkpoint.arguments import init_arguments, restricted_classmethod, where_there_is_a_device
from lockstep.data.combined import flatten
from lockstep.data.source import length_of
from lockstep.ground.device import is_there
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.hyperparameters import HyperparametersMixin
from lockstep.ground.transfer import move_data_to_device
from lockstep.ground.types import EVAL_DATALOADERS, TRAIN_DATALOADERS

if TYPE_CHECKING:
    from os import PathLike

    from torch.serialization import MAP_LOCATION

    from lockstep.trainer import Trainer


class LightningDataModule(HyperparametersMixin):
    """Data of a project, separate from the model: download, split, transforms and loaders.

    The Trainer calls ``prepare_data`` in one process of each node; then in every process ``setup(stage)``, the loader
    hooks that the stage needs, and at the end ``teardown(stage)``. ``stage`` is "fit", "validate", "test" or
    "predict". Loaders need no DistributedSampler: lockstep distributes their samples over the ranks.

    Example::

        class Digits(LightningDataModule):
            def __init__(self, batch_size: int = 32):
                super().__init__()
                self.save_hyperparameters()

            def setup(self, stage):
                self.train, self.val = make_datasets()

            def train_dataloader(self):
                return DataLoader(self.train, self.hparams.batch_size, shuffle=True)

            def val_dataloader(self):
                return DataLoader(self.val, self.hparams.batch_size)
    """

    #: name under which loggers record the hyperparameters of this data module
    name: str | None = None
    CHECKPOINT_HYPER_PARAMS_KEY = "datamodule_hyper_parameters"
    CHECKPOINT_HYPER_PARAMS_NAME = "datamodule_hparams_name"
    CHECKPOINT_HYPER_PARAMS_TYPE = "datamodule_hparams_type"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        #: Trainer that this data module is attached to
        self.trainer: Trainer | None = None
        #: ``prepare_data`` runs once per node (True) or once in total (False)
        self.prepare_data_per_node: bool = True
        #: a loader without samples is not an error on several devices
        self.allow_zero_length_dataloader_with_multiple_devices: bool = False

    # -- in the order in which the Trainer calls them

    def prepare_data(self) -> None:
        """Download and unpack data, in one process per node, or in one process with ``prepare_data_per_node=False``.

        The other processes do not get attributes set here.
        """

    def setup(self, stage: str) -> None:
        """Build data sets and splits, in every process.

        ``stage`` is "fit", "validate", "test" or "predict".
        """

    def train_dataloader(self) -> TRAIN_DATALOADERS:
        """Return the training loader, or a dict, list or `CombinedLoader` of loaders.

        Raises:
            MisconfigurationException: the hook is not overridden. The other loader hooks raise the same error.
        """
        raise self._missing("train_dataloader", "fit")

    def val_dataloader(self) -> EVAL_DATALOADERS:
        """Return the validation loader, or a list of loaders.

        Raises:
            MisconfigurationException: the hook is not overridden.
        """
        raise self._missing("val_dataloader", "validate")

    def test_dataloader(self) -> EVAL_DATALOADERS:
        """Return the test loader, or a list of loaders.

        Raises:
            MisconfigurationException: the hook is not overridden.
        """
        raise self._missing("test_dataloader", "test")

    def predict_dataloader(self) -> EVAL_DATALOADERS:
        """Return the prediction loader, or a list of loaders.

        Raises:
            MisconfigurationException: the hook is not overridden.
        """
        raise self._missing("predict_dataloader", "predict")

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch before its transfer to the device, and return it. By default, the batch does not change.

        Args:
            batch: batch that the loader yielded.
            dataloader_idx: number of its loader, from 0.
        """
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch to ``device``, and return it.

        Override it for batches with tensors in other objects than dicts, lists, tuples, dataclasses and objects with
        a method ``to``.

        Args:
            batch: result of :meth:`on_before_batch_transfer`.
            device: device of this rank.
            dataloader_idx: number of the batch's loader, from 0.
        """
        return move_data_to_device(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch after its transfer to the device, and return it. By default, the batch does not change.

        Args:
            batch: result of :meth:`transfer_batch_to_device`.
            dataloader_idx: number of its loader, from 0.
        """
        return batch

    def on_exception(self, exception: BaseException) -> None:
        """Clean up after a run that failed."""

    def teardown(self, stage: str) -> None:
        """Clean up after a stage, in every process."""

    def __str__(self) -> str:
        """Return the lengths of the data sets as text. Calls the loader hooks."""
        hooks = [("Train", "train"), ("Validation", "val"), ("Test", "test"), ("Predict", "predict")]
        return "\n".join(
            f"{{{kind} dataloader: {_sizes(getattr(self, f'{name}_dataloader'))}}}" for kind, name in hooks
        )

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in a checkpoint."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned."""

    @restricted_classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | PathLike[str],
        map_location: MAP_LOCATION = None,
        hparams_file: str | PathLike[str] | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Create a data module from the hyperparameters and state in a checkpoint.

        Args:
            checkpoint_path: checkpoint of a fit with this data module: a file or a folder.
            map_location: device of the checkpoint's tensors, as in `torch.load`.
            hparams_file: YAML file of hyperparameters, in place of the checkpoint's.
            weights_only: False: unpickle any object in the file, which may run code; only for files you trust.
            kwargs: arguments of ``__init__``, which override those of the checkpoint.

        Raises:
            MisconfigurationException: the file has more than tensors and plain values, and `weights_only` is not
                False.
        """
        from lockstep.checkpoint.sharded import load  # as in LightningModule

        checkpoint = load(checkpoint_path, map_location or where_there_is_a_device, weights_only)
        datamodule: Self = cls(**init_arguments(cls, checkpoint, hparams_file, kwargs))
        state = checkpoint.get(cls.__qualname__)
        if state:
            datamodule.load_state_dict(state)
        return datamodule

    # -- without a class of one's own

    @classmethod
    def from_datasets(
        cls,
        train_dataset: Dataset[Any] | Iterable[Dataset[Any]] | None = None,
        val_dataset: Dataset[Any] | Iterable[Dataset[Any]] | None = None,
        test_dataset: Dataset[Any] | Iterable[Dataset[Any]] | None = None,
        predict_dataset: Dataset[Any] | Iterable[Dataset[Any]] | None = None,
        batch_size: int = 1,
        num_workers: int = 0,
        **datamodule_kwargs: Any,
    ) -> Self:
        """Create a data module from data sets. A dict or list of data sets becomes a dict or list of loaders.

        Args:
            train_dataset: data for training; shuffled, unless it is an IterableDataset.
            val_dataset: data for validation, in order.
            test_dataset: data for tests, in order.
            predict_dataset: data for predictions, in order.
            batch_size: batch size of every loader, on each rank; also passed to ``__init__`` if it has such an
                argument.
            num_workers: worker processes of every loader; also passed to ``__init__``, as `batch_size`.
            datamodule_kwargs: further arguments of ``__init__``.

        Example::

            data = LightningDataModule.from_datasets(train_set, val_set, batch_size=32, num_workers=4)
            trainer.fit(model, datamodule=data)
        """
        parameters = inspect.signature(cls.__init__).parameters
        takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
        sizes = {"batch_size": batch_size, "num_workers": num_workers}
        taken = {name: value for name, value in sizes.items() if takes_any or name in parameters}
        datamodule = cls(**datamodule_kwargs, **taken)

        def loaders_of(datasets: Dataset[Any] | Iterable[Dataset[Any]], shuffle: bool) -> Callable[[], object]:
            def make(dataset: Dataset[Any]) -> DataLoader[Any]:
                mixed = shuffle and not isinstance(dataset, IterableDataset)
                pinned = is_there("cuda") or is_there("xpu")
                return DataLoader(dataset, batch_size, shuffle=mixed, num_workers=num_workers, pin_memory=pinned)

            def hook() -> object:
                if isinstance(datasets, Mapping):
                    return {name: make(dataset) for name, dataset in datasets.items()}
                if isinstance(datasets, list | tuple):
                    return [make(dataset) for dataset in datasets]
                return make(cast("Dataset[Any]", datasets))

            return hook

        given = {"train": train_dataset, "val": val_dataset, "test": test_dataset, "predict": predict_dataset}
        for stage, datasets in given.items():
            if datasets is not None:
                setattr(datamodule, f"{stage}_dataloader", loaders_of(datasets, stage == "train"))
        return datamodule

    # -- inside

    def _missing(self, hook: str, stage: str) -> MisconfigurationException:
        return MisconfigurationException(
            f"{type(self).__name__} has no {hook}(): define it to return a DataLoader, or pass loaders to "
            f"trainer.{stage}() directly."
        )


def _sizes(hook: Callable[[], object]) -> str:
    """Return, as text, the lengths of the data sets in the loaders from ``hook``. Return "None" if ``hook`` raises."""
    try:
        loaders, _ = flatten(hook())
    except Exception:  # the hook of another stage: its data is not set up, or there is none
        return "None"
    lengths = [length_of(getattr(loader, "dataset", loader)) for loader in loaders]
    sizes = [f"size={'NA' if length is None else length}" for length in lengths]
    return sizes[0] if len(sizes) == 1 else " ; ".join(f"{number}. {size}" for number, size in enumerate(sizes, 1))
