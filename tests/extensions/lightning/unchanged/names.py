"""What a script sees of Lightning's names: a line for each finding."""

import importlib.metadata
import importlib.util
import os
import pickle
import sys

import lightning
import lightning.pytorch as pl
import pytorch_lightning as ptl
import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities.cloud_io import _load, get_filesystem
from lightning.fabric.utilities.seed import seed_everything
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.callbacks import *  # noqa: F403
from lightning.pytorch.strategies import DeepSpeedStrategy, XLAStrategy
from lightning.pytorch.utilities.enums import GradClipAlgorithmType
from lightning.pytorch.utilities.parsing import get_init_args
from lightning.pytorch.utilities.rank_zero import WarningCache, _get_rank
from lightning.pytorch.utilities.warnings import PossibleUserWarning
from lightning_fabric.utilities.apply_func import move_data_to_device
from pytorch_lightning.callbacks.early_stopping import EarlyStopping

import lockstep


def error(statement):
    try:
        exec(statement, {"pl": pl, "XLAStrategy": XLAStrategy})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


class Net(ptl.LightningModule):
    def __init__(self, lr, **others):
        super().__init__()
        self.seen = get_init_args(sys._getframe())


found = {
    "roots": [
        lightning.Trainer is pl.Trainer is ptl.Trainer is lockstep.Trainer,
        pl.callbacks is not lockstep.callbacks,
    ],
    "across": isinstance(Net(1), pl.LightningModule) and isinstance(Net(1), lockstep.LightningModule),
    "module": [
        pl.LightningModule.__module__,
        EarlyStopping.__module__,
        EarlyStopping is lockstep.callbacks.EarlyStopping,
    ],
    "star": ModelCheckpoint is lockstep.callbacks.ModelCheckpoint,  # noqa: F405
    "versions": [lightning.__version__, pl.__version__, ptl.__version__, lightning.fabric.__version__],
    "metadata": [importlib.metadata.version(name) for name in ("lightning", "pytorch-lightning", "lightning-fabric")],
    "files": [os.path.basename(module.__file__) for module in (lightning, pl, ptl.callbacks, lightning.fabric)],
    "folder": os.path.dirname(ptl.__file__) == os.path.dirname(lockstep.__file__),
    "requirement": importlib.metadata.metadata("pytorch_lightning")["Name"],
    "spec": importlib.util.find_spec("lightning.pytorch.callbacks").name,
    "arguments": Net(1, depth=2).seen,
    "seed": seed_everything(3, verbose=False),
    "filesystem": type(get_filesystem("/tmp")).__name__,
    "load": _load.__name__ and _PATH is not None,
    "moved": move_data_to_device([torch.ones(1)], "cpu")[0].item(),
    "environment": SLURMEnvironment.detect(),
    "rank": _get_rank(),
    "enum": GradClipAlgorithmType.NORM == "norm",
    "warnings": [issubclass(PossibleUserWarning, Warning), WarningCache() == set()],
    "refused": [
        issubclass(XLAStrategy, object),
        isinstance(pl.Trainer(logger=False).strategy, DeepSpeedStrategy),
    ],
    "made": error("XLAStrategy()"),
    "derived": error("type('Mine', (XLAStrategy,), {})()"),
    "fabric": error("import lightning; lightning.Fabric()"),
    "fabric file": error("from lightning.fabric.strategies.launchers import launcher"),
    "loops": error("pl.loops._FitLoop()"),
    "mps": error("assert not pl.accelerators.MPSAccelerator.is_available()"),
    "function": error("from lightning.pytorch.utilities.model_helpers import get_torchvision_model"),
    "unknown": error("from lightning.pytorch.callbacks import Nothing"),
    "unknown file": error("import pytorch_lightning.callbacks.nothing"),
    "attribute": [hasattr(pl, "nothing"), hasattr(pl.utilities.model_helpers, "get_torchvision_model")],
    "pickle": pickle.loads(pickle.dumps(EarlyStopping)) is EarlyStopping,
    "old pickle": pickle.loads(b"clightning.pytorch.callbacks.early_stopping\nEarlyStopping\n.") is EarlyStopping,
    "old hparams": pickle.loads(b"clightning.fabric.utilities.data\nAttributeDict\n.").__name__,
    "lockstep's version": lockstep.__version__ != pl.__version__,
    "itself": [__name__, __file__, __spec__, sys.argv],
}
for name, value in found.items():
    print(f"{name} = {value!r}")
