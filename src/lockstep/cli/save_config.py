"""SaveConfigCallback: the whole config of a run, written beside its logs."""

from __future__ import annotations

import os
from typing import Any

from lockstep.callbacks.base import Callback
from lockstep.cli.parser import LightningArgumentParser
from lockstep.loop.hooks import is_overridden


class SaveConfigCallback(Callback):
    """Writes the config into the folder of the logs when a run is set up.

    Args:
        parser: what parsed it.
        config: what was parsed.
        config_filename: the file's name.
        overwrite: replace a file that is there.
        multifile: several files, as it was given in several.
        save_to_log_dir: False where a subclass saves it elsewhere, by ``save_config``.

    Raises:
        ValueError: nothing would be saved.
        RuntimeError: (in a run) there is such a file already.
    """

    def __init__(
        self,
        parser: LightningArgumentParser,
        config: Any,
        config_filename: str = "config.yaml",
        overwrite: bool = False,
        multifile: bool = False,
        save_to_log_dir: bool = True,
    ) -> None:
        self.parser = parser
        self.config = config
        self.config_filename = config_filename
        self.overwrite = overwrite
        self.multifile = multifile
        self.save_to_log_dir = save_to_log_dir
        self.already_saved = False
        if not save_to_log_dir and not is_overridden("save_config", self, SaveConfigCallback):
            raise ValueError(
                "SaveConfigCallback(save_to_log_dir=False) saves nothing: define `save_config` in a subclass, or give "
                "LightningCLI(save_config_callback=None)."
            )

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self.already_saved:
            return
        folder = trainer.log_dir or trainer.default_root_dir if self.save_to_log_dir else None
        problem: BaseException | None = None
        if trainer.is_global_zero:
            try:
                if folder is not None:
                    self._write(folder)
                self.save_config(trainer, pl_module, stage)
            except Exception as error:  # the other ranks wait to hear of it
                problem = error
        said = trainer.strategy.broadcast(None if problem is None else f"rank 0: {type(problem).__name__}: {problem}")
        if problem is not None:
            raise problem
        if said is not None:
            raise RuntimeError(said)
        self.already_saved = True

    def _write(self, folder: str) -> None:
        path = os.path.join(folder, self.config_filename)
        if not self.overwrite and os.path.isfile(path):
            raise RuntimeError(
                f"{type(self).__name__}: {path} is there already, of an earlier run. Move it away, or give "
                'LightningCLI(save_config_kwargs={"overwrite": True}) to replace it, or '
                "LightningCLI(save_config_callback=None) to save none."
            )
        os.makedirs(folder, exist_ok=True)
        self.parser.save(self.config, path, skip_unset=False, overwrite=self.overwrite, multifile=self.multifile)

    def save_config(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Override it to save the config elsewhere too; called on rank 0 only, so no collectives in it.

        Example::

            def save_config(self, trainer, pl_module, stage):
                trainer.logger.log_hyperparams({"config": self.parser.dump(self.config, skip_unset=False)})
        """
