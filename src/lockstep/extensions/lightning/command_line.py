"""LightningCLI: a command line for fit, validate, test and predict, built from the signatures of your classes."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable
from functools import partial, update_wrapper
from importlib import import_module
from os.path import isfile
from types import MethodType
from typing import Any, Union

from torch.optim import Optimizer

from lockstep.callbacks.base import Callback
from lockstep.checkpoint.sharded import load as load_checkpoint
from lockstep.checkpoint.storage import exists, inside, make_folder
from lockstep.config.objects import several
from lockstep.datamodule import LightningDataModule
from lockstep.extensions.lightning.parser import (
    ArgsType,
    LightningArgumentParser,
    LRSchedulerTypeTuple,
    LRSchedulerTypeUnion,
    ReduceLROnPlateau,
    first_line,
    jsonargparse,
    yaml,
)
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.hyperparameters import given_hyperparameters
from lockstep.ground.rank import rank_zero_info, rank_zero_warn
from lockstep.ground.seed import current_seed, seed_everything
from lockstep.launch.topology import directly
from lockstep.loop.hooks import is_overridden
from lockstep.module import LightningModule
from lockstep.names.class_paths import to_lockstep_paths
from lockstep.trainer import Trainer

# -- objects from parsed arguments ---------------------------------------------------------------------------


INSTANTIATOR = "lockstep.cli.instantiate_module"
"""Value of ``_instantiator`` in saved hyperparameters: the function that creates a module from them."""


def instantiate_class(args: object, init: dict[str, Any]) -> Any:
    """Create an object from a dict ``{"class_path": ..., "init_args": ...}``.

    Args:
        args: the first positional argument, or a tuple of several.
        init: the class and its keyword arguments.

    Returns:
        the object.

    Raises:
        ImportError, AttributeError: there is no such class.

    Example::

        instantiate_class(model.parameters(), {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}})
    """
    module, _, name = init["class_path"].rpartition(".")
    positional = args if isinstance(args, tuple) else (args,)
    return getattr(import_module(module), name)(*positional, **init.get("init_args", {}))


def instantiate_module(class_type: type, config: dict[str, Any]) -> Any:
    """Create a module or data module from the hyperparameters that LightningCLI has saved in a checkpoint.

    ``MyModel.load_from_checkpoint`` does the same, but refuses classes that are not imported. This function imports
    them.

    Args:
        class_type: the class, or a base of the class in ``_class_path``.
        config: the ``hparams`` of a checkpoint.

    Returns:
        the module or data module.
    """
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    values = {key: value for key, value in config.items() if key not in ("_class_path", "_instantiator")}
    if "_class_path" in config:
        parser.add_subclass_arguments(class_type, "module", fail_untyped=False)
        values = {"class_path": config["_class_path"], "dict_kwargs": values}
    else:
        parser.add_class_arguments(class_type, "module", fail_untyped=False)
    return parser.instantiate(parser.parse_object({"module": values})).module


def class_of(builder: Callable[..., Any]) -> Any:
    """Return a class unchanged. For a function, return the class in the function's return annotation."""
    if isinstance(builder, type):
        return builder
    return inspect.signature(builder, eval_str=True).return_annotation


def hyperparameters(dumped: dict[str, Any], links: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the values that ``save_hyperparameters`` should save for the model or the data module of a config.

    Args:
        dumped: the config as plain values.
        links: values that links passed when classes were created, by dotted key.
        key: "model" or "data".
    """
    found = dict(dumped.get(key) or {})
    if "class_path" in found:
        whole = {**(found.get("init_args") or {}), **(found.get("dict_kwargs") or {})}
        found = {"_class_path": found["class_path"], **whole}
    for name, value in links.items():
        if name.startswith(f"{key}."):
            *parents, last = name.removeprefix(f"{key}.").removeprefix("init_args.").split(".")
            inner = found
            for parent in parents:
                inner = inner[parent]
            inner[last] = value
    return {**found, "_instantiator": INSTANTIATOR}


class RecordsHyperparameters:
    """Instantiator for jsonargparse that lets ``save_hyperparameters`` save the arguments as they were parsed.

    Args:
        cli: the LightningCLI, whose config is dumped when the first object is created.
        key: "model" or "data".
    """

    def __init__(self, cli: LightningCLI, key: str) -> None:
        self.cli = cli
        self.key = key

    def __call__(
        self, class_type: type, *args: object, applied_instantiation_links: dict[str, Any], **kwargs: object
    ) -> Any:
        recorded = hyperparameters(self.cli.config_dump, applied_instantiation_links, self.key)
        # `save_hyperparameters` in the class's __init__ saves these instead of its arguments.
        token = given_hyperparameters.set(recorded)
        try:
            return class_type(*args, **kwargs)
        finally:
            given_hyperparameters.reset(token)


# -- the config in the folder of the logs --------------------------------------------------------------------


class SaveConfigCallback(Callback):
    """Callback that writes the config to the loggers' folder when a run is set up.

    Args:
        parser: parser of the config.
        config: the parsed config.
        config_filename: name of the file.
        overwrite: replace an existing file.
        multifile: write several files if the config was given in several.
        save_to_log_dir: False if a subclass saves the config elsewhere, in ``save_config``.

    Raises:
        ValueError: nothing would be saved.
        RuntimeError: (in a run) the file exists already.

    Example::

        LightningCLI(Net, Data, save_config_kwargs={"config_filename": "run.yaml", "overwrite": True})
    """

    def __init__(
        self,
        parser: LightningArgumentParser,
        config: jsonargparse.Namespace,
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
                "SaveConfigCallback(save_to_log_dir=False) saves nothing. Define `save_config` in a subclass, or use "
                "LightningCLI(save_config_callback=None)."
            )

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.already_saved:
            return
        folder = trainer.log_dir or trainer.default_root_dir if self.save_to_log_dir else None
        problem: BaseException | None = None
        if trainer.is_global_zero:
            try:
                if folder is not None:
                    self._write(folder)
                self.save_config(trainer, pl_module, stage)
            except Exception as error:  # the other ranks wait in the broadcast below
                problem = error
        error_text = None if problem is None else f"rank 0: {type(problem).__name__}: {problem}"
        error_text = trainer.strategy.broadcast(error_text)
        if problem is not None:
            raise problem
        if error_text is not None:
            raise RuntimeError(error_text)
        self.already_saved = True

    def _write(self, folder: str) -> None:
        path = inside(folder, self.config_filename)
        if not self.overwrite and exists(path):
            raise RuntimeError(
                f"{type(self).__name__}: {path} exists already, from an earlier run. Move it, or use "
                'LightningCLI(save_config_kwargs={"overwrite": True}) to replace it, or '
                "LightningCLI(save_config_callback=None) to save no config."
            )
        make_folder(folder)
        self.parser.save(self.config, path, skip_unset=False, overwrite=self.overwrite, multifile=self.multifile)

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Do nothing; a subclass may define this method to save the config in another place as well.

        It is called on rank 0 only, so it must not use collectives.

        Example::

            def save_config(self, trainer, pl_module, stage):
                trainer.logger.log_hyperparams({"config": self.parser.dump(self.config, skip_unset=False)})
        """


# -- arguments from a checkpoint -----------------------------------------------------------------------------


def merge_given(saved: dict[str, Any], given: jsonargparse.Namespace) -> dict[str, Any]:
    """Return the saved arguments, overridden by the arguments on the command line.

    Arguments of a nested class are replaced one by one, unless another class is given.

    Example:
        >>> merge_given({"lr": 0.1, "width": 4}, jsonargparse.Namespace(lr=0.5))
        {'lr': 0.5, 'width': 4}
    """
    plain: dict[str, Any] = given.as_dict()
    if given.get("class_path", saved.get("class_path")) != saved.get("class_path"):
        return plain
    merged = {**copy.deepcopy(saved), **plain}
    for name, value in vars(given).items():
        if isinstance(value, jsonargparse.Namespace) and isinstance(saved.get(name), dict):
            merged[name] = merge_given(saved[name], value)
    return merged


# -- the command line ----------------------------------------------------------------------------------------


class LightningCLI:
    """A command line: parses arguments, creates the model, data module and Trainer, and runs a subcommand.

    Command lines look like ``python train.py fit --model.lr 0.1 --trainer.max_epochs 3``. There are also
    ``--config file.yaml`` (of several files, later ones override earlier ones), ``--print_config`` and ``fit --help``.
    With ``parser_kwargs={"default_env": True}``, environment variables are read: an argument from
    ``PL_FIT__TRAINER__MAX_EPOCHS``, a config from ``PL_CONFIG``.

    Subclass it to add arguments (:meth:`add_arguments_to_parser`), to create the Trainer, or to run code between the
    steps: :meth:`before_instantiate_classes`, :meth:`after_instantiate_classes`, and ``before_fit``, ``fit`` and
    ``after_fit``, likewise for the other subcommands.

    Args:
        model_class: a LightningModule class, or a function that returns one; None: any, given by ``--model NAME``.
        datamodule_class: the same for the data module; None: any, given by ``--data NAME``, or none.
        save_config_callback: writes the config to the folder of the logs; None writes nothing.
        save_config_kwargs: arguments of this callback.
        trainer_class: Trainer, a subclass, or a function that returns one.
        trainer_defaults: defaults of the Trainer's arguments. Its ``callbacks`` are always added.
        seed_everything_default: default seed. True: the seed set before, else 0; False: no seeding.
        parser_kwargs: arguments of the parser; under the name of a subcommand, those of its parser.
        parser_class: a subclass of LightningArgumentParser.
        subclass_mode_model: accept any subclass of ``model_class``, by ``class_path`` and ``init_args``.
        subclass_mode_data: the same for ``datamodule_class``.
        args: words of a command line, or a config, instead of ``sys.argv``.
        run: False creates the objects only, without subcommands.
        auto_configure_optimizers: add the arguments ``--optimizer`` and ``--lr_scheduler``.
        load_from_checkpoint_support: let ``save_hyperparameters`` save the parsed arguments, so that nested classes
            can be rebuilt.

    Attributes:
        parser: the parser.
        config: the parsed config; with ``run``, under the name of the subcommand.
        config_init: the config with the objects created from it.
        trainer: the Trainer.
        model: the module.
        datamodule: the data module, or None.
        subcommand: the subcommand, such as "fit"; None without ``run``.

    Raises:
        MisconfigurationException: the command line has several optimizers or schedulers that the CLI should create.
        SystemExit: the command line is invalid, or ``--help`` or ``--print_config`` was given.

    Example::

        if __name__ == "__main__":
            LightningCLI(MyModel, MyDataModule)
    """

    def __init__(
        self,
        model_class: type[LightningModule] | Callable[..., LightningModule] | None = None,
        datamodule_class: type[LightningDataModule] | Callable[..., LightningDataModule] | None = None,
        save_config_callback: type[SaveConfigCallback] | None = SaveConfigCallback,
        save_config_kwargs: dict[str, Any] | None = None,
        trainer_class: type[Trainer] | Callable[..., Trainer] = Trainer,
        trainer_defaults: dict[str, Any] | None = None,
        seed_everything_default: bool | int = True,
        parser_kwargs: dict[str, Any] | None = None,
        parser_class: type[LightningArgumentParser] = LightningArgumentParser,
        subclass_mode_model: bool = False,
        subclass_mode_data: bool = False,
        args: ArgsType = None,
        run: bool = True,
        auto_configure_optimizers: bool = True,
        load_from_checkpoint_support: bool = True,
    ) -> None:
        self.save_config_callback = save_config_callback
        self.save_config_kwargs = save_config_kwargs or {}
        self.trainer_class = trainer_class
        self.trainer_defaults = trainer_defaults or {}
        self.seed_everything_default = seed_everything_default
        self.parser_kwargs = parser_kwargs or {}
        self.parser_class = parser_class
        self.auto_configure_optimizers = auto_configure_optimizers
        self.model_class = model_class
        self.datamodule_class = datamodule_class
        self.subclass_mode_model = model_class is None or subclass_mode_model
        self.subclass_mode_data = datamodule_class is None or subclass_mode_data
        self._model_class = model_class or LightningModule
        self._datamodule_class = datamodule_class or LightningDataModule
        self._subcommand_parsers: dict[str, LightningArgumentParser] = {}
        self._subcommand_method_arguments: dict[str, list[str]] = {}
        self._instantiators: list[tuple[Any, type, bool]] = []
        self._dumped: dict[str, Any] | None = None

        names = self.subcommands()
        main = {key: value for key, value in self.parser_kwargs.items() if key not in names}
        self.setup_parser(run, main, {key: value for key, value in self.parser_kwargs.items() if key in names})
        self.parse_arguments(self.parser, args)
        self._take_from_checkpoint(args)
        self.subcommand: str | None = self.config["subcommand"] if run else None
        seed = self._get(self.config, "seed_everything")
        if seed is not False:
            chosen = seed_everything((current_seed() or 0) if seed is True else seed, workers=True)
            # The saved config contains the seed that was used, not True.
            (self.config[self.subcommand] if self.subcommand else self.config)["seed_everything"] = chosen
        if load_from_checkpoint_support:
            for key, builder, subclasses in (
                ("model", self._model_class, self.subclass_mode_model),
                ("data", self._datamodule_class, self.subclass_mode_data),
            ):
                self._instantiators.append((RecordsHyperparameters(self, key), class_of(builder), subclasses))
        self.before_instantiate_classes()
        # Errors of the user's classes pass through the parser; `directly` has its frames left out of the traceback.
        directly(self.instantiate_classes)
        self.after_instantiate_classes()
        if self.subcommand is not None:
            self._run_subcommand(self.subcommand)

    # -- the parser ----------------------------------------------------------------------------------------

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return the names of the subcommands, which are methods of the Trainer.

        The value of each is a set of the method's arguments that the command line does not offer.
        """
        evaluation = {"model", "dataloaders", "datamodule"}
        return {
            "fit": {"model", "train_dataloaders", "val_dataloaders", "datamodule"},
            "validate": set(evaluation),
            "test": set(evaluation),
            "predict": set(evaluation),
        }

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Create a parser; called for the main parser and for the parser of each subcommand.

        Args:
            kwargs: arguments of ``parser_class``.

        Returns:
            the parser, with the option ``--config``.
        """
        kwargs.setdefault("dump_header", [f"lockstep=={sys.modules['lockstep'].__version__}"])
        parser = self.parser_class(**kwargs)
        parser.add_argument(
            "-c", "--config", action=jsonargparse.ActionConfigFile, help="A configuration file (yaml or json)."
        )
        return parser

    def setup_parser(
        self, add_subcommands: bool, main_kwargs: dict[str, Any], subparser_kwargs: dict[str, Any]
    ) -> None:
        """Create :attr:`parser` with all arguments; if ``add_subcommands``, with a parser for each subcommand.

        Args:
            add_subcommands: True for a parser of subcommands.
            main_kwargs: arguments of the main parser.
            subparser_kwargs: arguments of the subcommands' parsers, by name of the subcommand.
        """
        self.parser = self.init_parser(**main_kwargs)
        if add_subcommands:
            self._add_subcommands(self.parser, **subparser_kwargs)
        else:
            self._add_arguments(self.parser)

    def _add_subcommands(self, parser: LightningArgumentParser, **kwargs: Any) -> None:
        group = parser.add_subcommands()
        builder = self.trainer_class
        trainer_class = builder if isinstance(builder, type) else jsonargparse.class_from_function(builder)
        for name in self.subcommands():
            description = first_line(getattr(trainer_class, name))
            own = {"description": description, **kwargs.get(name, {})}
            self._subcommand_parsers[name] = self._prepare_subcommand_parser(trainer_class, name, **own)
            group.add_subcommand(name, self._subcommand_parsers[name], help=description)

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        parser = self.init_parser(**kwargs)
        self._add_arguments(parser)
        added = parser.add_method_arguments(klass, subcommand, skip=set(self.subcommands()[subcommand]))
        self._subcommand_method_arguments[subcommand] = added
        return parser

    def _add_arguments(self, parser: LightningArgumentParser) -> None:
        self.add_default_arguments_to_parser(parser)
        self.add_core_arguments_to_parser(parser)
        self.add_arguments_to_parser(parser)
        if self.auto_configure_optimizers:
            if not parser._optimizers:
                parser.add_optimizer_args((Optimizer,))
            if not parser._lr_schedulers:
                parser.add_lr_scheduler_args(LRSchedulerTypeTuple)
        self.link_optimizers_and_lr_schedulers(parser)

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add ``--seed_everything``.

        Args:
            parser: parser of a subcommand, or the main parser without subcommands.
        """
        parser.add_argument(
            "--seed_everything",
            type=Union[bool, int],  # noqa: UP007
            default=self.seed_everything_default,
            help="Seed of all random numbers; true: the seed set before, else 0; false: no seeding.",
        )

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add ``--trainer``, ``--model`` and ``--data``.

        Args:
            parser: parser of a subcommand, or the main parser without subcommands.
        """
        parser.add_lightning_class_args(self.trainer_class, "trainer")
        parser.set_defaults({f"trainer.{k}": v for k, v in self.trainer_defaults.items() if k != "callbacks"})
        parser.add_lightning_class_args(self._model_class, "model", subclass_mode=self.subclass_mode_model)
        parser.add_lightning_class_args(
            self._datamodule_class,
            "data",
            subclass_mode=self.subclass_mode_data,
            required=self.datamodule_class is not None,  # the model may define the loaders
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Do nothing; a subclass may define this method to add arguments or links to the parser.

        Example::

            def add_arguments_to_parser(self, parser):
                parser.link_arguments("data.batch_size", "model.batch_size")
                parser.add_lightning_class_args(EarlyStopping, "stopping")
                parser.set_defaults({"stopping.monitor": "val_loss"})
        """

    @staticmethod
    def link_optimizers_and_lr_schedulers(parser: LightningArgumentParser) -> None:
        """Link each optimizer or scheduler added with ``link_to`` to the model argument that ``link_to`` names.

        Args:
            parser: parser of a subcommand, or the main parser without subcommands.
        """
        parser.link_registered()

    # -- the config ----------------------------------------------------------------------------------------

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the command line into :attr:`config`.

        Args:
            parser: the main parser.
            args: as in the class.

        Raises:
            SystemExit: the command line is invalid.
        """
        if args is not None and len(sys.argv) > 1:
            rank_zero_warn(f"LightningCLI(args={args!r:.100}) is used, so the command line {sys.argv[1:]} is ignored.")
        self.config = self._parsed(parser, args)

    @staticmethod
    def _parsed(parser: LightningArgumentParser, args: ArgsType, **options: bool) -> jsonargparse.Namespace:
        if not isinstance(args, (dict, jsonargparse.Namespace)):
            return parser.parse_args(args, **options)
        given = args if isinstance(args, dict) else args.as_dict()
        try:
            given = to_lockstep_paths(given)
        except TypeError as error:
            parser.error(str(error), error)
        return parser.parse_object(given, **options)

    def _take_from_checkpoint(self, args: ArgsType) -> None:
        """Set model arguments that are missing on the command line to the hyperparameters in ``ckpt_path``."""
        subcommand = self.config.get("subcommand")
        path = self.config[subcommand].get("ckpt_path") if subcommand else None
        if not path or not isfile(path):
            return
        saved = dict(load_checkpoint(path, map_location="cpu").get(LightningModule.CHECKPOINT_HYPER_PARAMS_KEY) or {})
        saved.pop("_instantiator", None)
        if not saved:
            return
        given = self._parsed(self.parser, args, defaults=False)[subcommand].get("model") or jsonargparse.Namespace()
        if "_class_path" in saved:
            saved = {"class_path": saved.pop("_class_path"), "dict_kwargs": saved}
            own = [given.pop(key, None) or jsonargparse.Namespace() for key in ("init_args", "dict_kwargs")]
            given["dict_kwargs"] = jsonargparse.Namespace({**vars(own[0]), **dict(vars(own[1]))})
        # Parsed on top of the config, so that its other values are kept.
        merged = {subcommand: {"model": merge_given(saved, given)}}
        try:
            self.config = self.parser.parse_object(merged, self.config)
        except SystemExit:
            sys.stderr.write(f"--ckpt_path {path}: its hyperparameters do not fit the model's arguments (see above).\n")
            raise
        rank_zero_info(
            f"LightningCLI: hyperparameters in --ckpt_path {path} are used for model arguments that are not given here."
        )

    @property
    def config_dump(self) -> dict[str, Any]:
        """The subcommand's config as plain values, as it was before the first object was created."""
        if self._dumped is None:
            text = self.parser.dump(self.config, skip_link_targets=False, skip_unset=False, format="yaml")
            dumped = yaml.safe_load(text)
            self._dumped = dumped[self.subcommand] if self.subcommand else dumped
        return self._dumped or {}

    def _get(self, config: jsonargparse.Namespace, key: str, default: object = None) -> Any:
        """Return the value of a key in the config; if there is a subcommand, in the subcommand's part."""
        return config.get(str(self.subcommand), config).get(key, default)

    def _parser(self, subcommand: str | None) -> LightningArgumentParser:
        return self.parser if subcommand is None else self._subcommand_parsers[subcommand]

    # -- the objects ---------------------------------------------------------------------------------------

    def before_instantiate_classes(self) -> None:
        """Do nothing; a subclass may define code to run before the objects are created."""

    def instantiate_classes(self) -> None:
        """Create data module, model and Trainer.

        Raises:
            MisconfigurationException: the command line has several optimizers or schedulers that the CLI should create.
        """
        self.config_init = self.parser.instantiate(self.config, instantiators=self._instantiators)
        self.datamodule = self._get(self.config_init, "data")
        self.model = self._get(self.config_init, "model")
        self._add_configure_optimizers_method_to_model(self.subcommand)
        self.trainer = self.instantiate_trainer()

    def after_instantiate_classes(self) -> None:
        """Do nothing; a subclass may define code to run after the objects are created."""

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Create the Trainer from the parsed arguments, which ``kwargs`` override.

        Args:
            kwargs: arguments of the Trainer.

        Returns:
            the Trainer, with the callbacks of the command line.
        """
        callbacks = [self._get(self.config_init, key) for key in self._parser(self.subcommand).callback_keys]
        return self._instantiate_trainer({**self._get(self.config_init, "trainer", default={}), **kwargs}, callbacks)

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Any]) -> Trainer:
        if "callbacks" not in config:
            rank_zero_warn(
                f"{self.trainer_class.__qualname__} has no argument `callbacks`, so the callbacks of the command line, "
                "including the one that saves the config, are ignored."
            )
            return self.trainer_class(**config)
        own = [*several(config["callbacks"]), *callbacks, *several(self.trainer_defaults.get("callbacks"))]
        if self.save_config_callback and not config.get("fast_dev_run", False):
            parsed = self.config.get(str(self.subcommand), self.config)
            own.append(self.save_config_callback(self._parser(self.subcommand), parsed, **self.save_config_kwargs))
        return self.trainer_class(**{**config, "callbacks": own})

    # -- optimizers ----------------------------------------------------------------------------------------

    @staticmethod
    def configure_optimizers(
        lightning_module: LightningModule, optimizer: Optimizer, lr_scheduler: LRSchedulerTypeUnion | None = None
    ) -> Any:
        """Combine the command line's optimizer and scheduler into a result for the model's ``configure_optimizers``.

        Args:
            lightning_module: the model.
            optimizer: optimizer of the model's parameters.
            lr_scheduler: scheduler of the optimizer, or None.
        """
        if lr_scheduler is None:
            return optimizer
        if isinstance(lr_scheduler, ReduceLROnPlateau):
            plateau = {"scheduler": lr_scheduler, "monitor": lr_scheduler.monitor}
            return {"optimizer": optimizer, "lr_scheduler": plateau}
        return [optimizer], [lr_scheduler]

    def _add_configure_optimizers_method_to_model(self, subcommand: str | None) -> None:
        """Replace the model's ``configure_optimizers`` if the command line describes an optimizer."""
        parser = self._parser(subcommand)
        optimizers, schedulers = parser.automatic()
        if not self.auto_configure_optimizers or not optimizers:
            return
        if len(optimizers) > 1 or len(schedulers) > 1:
            raise MisconfigurationException(
                f"{type(self).__name__}: `configure_optimizers` takes one optimizer and one scheduler, but the command "
                f"line has {optimizers + schedulers}. Link them to arguments of the model with `link_to=`, and create "
                "them in the model's `configure_optimizers`."
            )
        given = parser.class_and_arguments(optimizers[0], self._get(self.config_init, optimizers[0]))
        if not given:
            return
        if is_overridden("configure_optimizers", self.model, LightningModule):
            rank_zero_warn(
                f"`{type(self.model).__name__}.configure_optimizers` is replaced by "
                f"`{type(self).__name__}.configure_optimizers`, because the command line selects the optimizer."
            )
        optimizer, scheduler = instantiate_class(self.model.parameters(), given), None
        if schedulers:
            scheduler_arguments = parser.class_and_arguments(schedulers[0], self._get(self.config_init, schedulers[0]))
            scheduler = instantiate_class(optimizer, scheduler_arguments) if scheduler_arguments else None
        factory = partial(self.configure_optimizers, optimizer=optimizer, lr_scheduler=scheduler)
        update_wrapper(factory, self.configure_optimizers)
        self.model.configure_optimizers = MethodType(factory, self.model)

    # -- the call ------------------------------------------------------------------------------------------

    def _run_subcommand(self, subcommand: str) -> None:
        """Run a subcommand, such as ``fit``, between ``before_fit`` and ``after_fit`` if these are defined.

        The method ``fit`` is this class's if it has one, else the Trainer's.
        """
        before, after = (getattr(self, f"{when}_{subcommand}", None) for when in ("before", "after"))
        if callable(before):
            before()
        run = getattr(self, subcommand, None) or getattr(self.trainer, subcommand)
        run(**self._prepare_subcommand_kwargs(subcommand))
        if callable(after):
            after()

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        names = self._subcommand_method_arguments[subcommand]
        given = {key: value for key, value in self.config_init[subcommand].items() if key in names}
        given["model"] = self.model
        if self.datamodule is not None:
            given["datamodule"] = self.datamodule
        return given
