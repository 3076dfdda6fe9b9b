"""``lockstep migrate``: what makes a script for Lightning one for lockstep, as a diff; and what differs for it."""

from __future__ import annotations

import argparse
import ast
import difflib
import functools
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lockstep.cli.script import AUTO_MOVE, DATA_LOADER, ROOT, Item, Note, Script, lines_of, refusal
from lockstep.config.old_flags import ROWS, TOGETHER, together
from lockstep.ground.errors import MisconfigurationException
from lockstep.loop.hooks import FORGOTTEN, OF_CALLBACKS
from lockstep.trainer import FLAGS, Trainer

ABOUT = """\
Print what has to change in a script that was written for Lightning, of 2019 or of today, so that it is one for
lockstep, as a diff (to stdout); and what behaves otherwise for this script (to stderr). Nothing is imported or run of
the script. Formatting and comments stay as they are.
"""


def migrate(words: Sequence[str]) -> int:
    """The command; gives its exit code.

    Args:
        words: behind ``lockstep migrate``.

    Raises:
        MisconfigurationException: a file that is not there, or is no Python.
    """
    parser = argparse.ArgumentParser("lockstep migrate", description=ABOUT, allow_abbrev=False)
    parser.add_argument("files", nargs="+", metavar="script.py", help="a script, or a folder of scripts")
    parser.add_argument("--write", action="store_true", help="make the changes in the files")
    try:
        given = parser.parse_args(list(words))
    except SystemExit as ended:
        return int(ended.code or 0)
    files = [file for path in given.files for file in _files(Path(path))]
    read = [(file, *_read(file)) for file in files]  # all, before the first is written
    for file, text, encoding in read:
        moved, notes = migrated(text, str(file))
        if given.write and moved != text:
            with open(file, "w", encoding=encoding, newline="") as out:
                out.write(moved)
        sys.stdout.write(_diff(text, moved, str(file)))
        sys.stdout.flush()
        for line in _told(str(file), moved != text, notes, given.write):
            print(line, file=sys.stderr)
    return 0


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        found = [file for file in sorted(path.rglob("*.py")) if not re.search(r"/(\.|site-packages/)", f"/{file}")]
        if not found:
            raise MisconfigurationException(f"lockstep migrate: there is no script in the folder {path}")
        return found
    if not path.is_file():
        raise MisconfigurationException(f"lockstep migrate: {path} is not there (this is {Path.cwd()})")
    if path.suffix == ".ipynb":
        raise MisconfigurationException(
            f"lockstep migrate: {path} is a notebook: write it as a script first, by `jupyter nbconvert --to script`"
        )
    return [path]


def _read(file: Path) -> tuple[str, str]:
    """Text, its line ends as they are, and encoding.

    Raises:
        MisconfigurationException: the file is no Python.
    """
    data = file.read_bytes()
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = data.decode(encoding)
        ast.parse(text)
    except (SyntaxError, ValueError) as error:
        at = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        said = error.msg if isinstance(error, SyntaxError) else str(error)
        raise MisconfigurationException(f"lockstep migrate: {file}{at} is no Python of today: {said}") from None
    return text, encoding


def _diff(before: str, after: str, name: str) -> str:
    lines = difflib.unified_diff(lines_of(before), lines_of(after), f"a/{name.lstrip('/')}", f"b/{name.lstrip('/')}")
    return "".join(line if line.endswith(("\n", "\r")) else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _told(name: str, changed: bool, notes: Sequence[Note], written: bool) -> Iterator[str]:
    if not changed and not notes:
        yield f"{name}: nothing is to be done: it imports nothing of Lightning"
        return
    if not changed:
        yield f"{name}: no line has to change"
    elif written:
        yield f"{name}: written"
    for by_hand, title in ((True, "to be done by hand"), (False, "what differs for this script")):
        told = sorted({(note.line, note.text) for note in notes if note.by_hand is by_hand})
        if told:
            yield f"{name}: {title}:"
            yield from (f"  line {line}: {text}" for line, text in told)


def migrated(text: str, name: str = "script.py") -> tuple[str, list[Note]]:
    """A script for Lightning as one for lockstep, and what is to be told of it.

    Args:
        text: of the script.
        name: of its file, for errors.

    Raises:
        SyntaxError: it is no Python.

    Example:
        >>> migrated("from lightning.pytorch import Trainer\\nTrainer(max_epochs=1)\\n")[0]
        'from lockstep import Trainer\\nTrainer(max_epochs=1)\\n'
    """
    script = Script(text, name)
    if not script.move_imports():
        return text, [note for note in script.notes if note.text.startswith("test_tube")]
    for call in script.calls():
        _move_call(script, call)
    for kind, node in script.classes():
        _Class(script, kind, node).move()
    script.notes += differences(script)
    return script.edited(), script.notes


# -- calls -------------------------------------------------------------------------------------------------


def _move_call(script: Script, call: ast.Call) -> None:
    """A Trainer's flags, the arguments of its methods, and classes whose arguments have changed."""
    meant = script.meant(call.func) or ""
    if meant == f"{ROOT}.Trainer" or re.fullmatch(rf"{ROOT}\.\w+(\.\w+)*\.Trainer", meant):
        _Flags(script, call).move()
    elif isinstance(call.func, ast.Attribute):
        method = call.func.attr
        of_class = (script.meant(call.func.value) or "").endswith(".Trainer")
        if of_class and method in ("from_argparse_args", "add_argparse_args", "parse_argparser"):
            script.note(call, _why_gone(method))
        elif ast.unparse(call.func.value) in script.trainers:
            for keyword in call.keywords:
                new = OLD_ARGUMENTS.get(method, {}).get(keyword.arg or "")
                if new is not None:
                    start = script.start(keyword)
                    script.replace(start, start + len(str(keyword.arg)), new)
    if meant.endswith(".ModelCheckpoint"):
        for keyword in call.keywords:
            if keyword.arg == "period":
                script.replace(script.start(keyword), script.start(keyword) + len("period"), "every_n_epochs")
            elif keyword.arg in ("filepath", "prefix"):
                script.note(keyword, f"ModelCheckpoint({keyword.arg}=...): today dirpath= (a folder) and filename=.")


def _why_gone(method: str) -> str:
    try:
        getattr(Trainer, method)
    except AttributeError as error:
        return str(error)
    return ""


OLD_ARGUMENTS = {
    "fit": {"train_dataloader": "train_dataloaders", "val_dataloader": "val_dataloaders"},
    "validate": {"val_dataloaders": "dataloaders"},
    "test": {"test_dataloaders": "dataloaders"},
    "predict": {"predict_dataloaders": "dataloaders"},
}
"""Arguments of the Trainer's methods that have another name today."""


# -- flags of the Trainer ------------------------------------------------------------------------------------


UNKNOWN = object()
WHERE = ("accelerator", "devices", "num_nodes", "strategy")


def _value(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return UNKNOWN


def _written(value: object) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


class _Flags:
    """The old flags of one call of Trainer."""

    def __init__(self, script: Script, call: ast.Call) -> None:
        self._script, self._call = script, call
        self._given = {keyword.arg: keyword for keyword in call.keywords if keyword.arg is not None}
        self._today: dict[str, str] = {}  #: by old flag what stands in its place; "": nothing
        self._callbacks: list[str] = []

    def move(self) -> None:
        """Put today's flags in the place of the old ones; what cannot be known here is told."""
        for keyword in self._call.keywords:
            if keyword.arg is None:
                self._script.note(keyword, "Trainer(**...): flags of 2019 among them are translated when it runs.")
        self._together()
        for name in [name for name in self._given if name in ROWS]:
            self._flag(name, self._given[name])
        self._add_callbacks()
        arguments = [*self._call.args, *self._call.keywords]
        items = [Item(self._script.start(node), self._script.end(node)) for node in arguments]
        gone = []
        for name, text in self._today.items():
            at = arguments.index(self._given[name])
            if text:
                self._script.replace(items[at].start, items[at].end, text)
            else:
                gone.append(at)
        self._script.remove(items, gone)

    def _together(self) -> None:
        """Devices, strategy and precision, which mean something only together."""
        old = {name: self._given[name] for name in self._given if name in TOGETHER}
        accelerator = self._given.get("accelerator")
        if accelerator is not None and str(_value(accelerator.value)).startswith(("dp", "ddp", "horovod")):
            old["accelerator"] = accelerator  # it named the strategy in 1.0 to 1.4
        if not old:
            return
        values = {name: _value(keyword.value) for name, keyword in old.items()}
        where = {name: _value(self._given[name].value) for name in WHERE if name in self._given}
        if UNKNOWN in [*values.values(), *where.values()]:
            unknown = [name for name in (*old, *where) if UNKNOWN in (values.get(name), where.get(name))]
            said = ", ".join(f"{name}={self._script.of(self._given[name].value)}" for name in unknown)
            self._script.note(
                old[next(iter(old))],
                f"Trainer({said}): what it means today depends on the value, and is told when it runs: write "
                "accelerator=, devices=, strategy=, precision= instead.",
            )
            return
        if "accelerator" in values:
            values["distributed_backend"] = values.pop("accelerator")
            where.pop("accelerator", None)
        try:
            today = together(values, {**{name: FLAGS[name] for name in WHERE}, **where}, here=False)
        except MisconfigurationException as error:
            self._script.note(old[next(iter(old))], str(error))
            return
        pieces = {flag: f"{flag}={_written(value)}" for flag, value in today.flags.items()}
        if any(flag in where and where[flag] not in (value, FLAGS[flag]) for flag, value in today.flags.items()):
            self._script.note(
                old[next(iter(old))], f"{', '.join(pieces.values())} is meant, and another was given, too."
            )
            return
        for note in today.notes:
            self._script.notes.append(Note(old[next(iter(old))].lineno, f"{note}.", by_hand=False))
        first = next(iter(old))
        self._today.update(dict.fromkeys(old, ""))
        self._today[first] = ", ".join(
            text
            for flag, text in pieces.items()
            if (flag not in where or flag in old) and today.flags[flag] != FLAGS[flag]
        )

    def _flag(self, name: str, keyword: ast.keyword) -> None:
        """An old flag that stands by itself."""
        value, text, row = _value(keyword.value), self._script.of(keyword.value), ROWS[name]
        again = self._script.again(keyword.value)
        if any(value is off or (value is not UNKNOWN and value == off) for off in row.idle):
            self._today[name] = ""
        elif name == "resume_from_checkpoint":
            self._resume(keyword, text)
        elif name in CALLBACK_FLAGS and not (name == "checkpoint_callback" and isinstance(value, bool)):
            self._callback(name, value, again)
        elif row.today is None:
            self._script.note(keyword, f"Trainer({name}={text:.60}): this flag of old is gone; {row.why}.")
        elif value is not UNKNOWN:
            try:
                today = row.today(value)
            except (TypeError, ValueError, MisconfigurationException) as error:
                self._script.note(keyword, f"Trainer({name}={text:.60}): {error}")
                return
            kept = {flag: type(new) is type(value) and new == value for flag, new in today.items()}
            self._set(name, {flag: again if kept[flag] else _written(new) for flag, new in today.items()})
            if not today and row.why:
                self._script.notes.append(Note(keyword.lineno, f"{name} has no effect: {row.why}.", by_hand=False))
        else:
            ((flag, new),) = row.today(1).items() if row.today(1) else (("", None),)
            if new == 1 and flag:  # it has another name, or counts parts
                self._set(name, {flag: f"float({again})" if isinstance(new, float) else again})
            elif not flag:
                self._today[name] = ""
            else:
                self._script.note(
                    keyword, f"Trainer({name}={text:.60}): today {flag}=; a warning tells it when it runs."
                )

    def _set(self, name: str, today: dict[str, str]) -> None:
        if any(flag in self._given for flag in today):
            self._script.note(
                self._given[name], f"Trainer: {name} and {', '.join(today)} mean the same; keep the second."
            )
            return
        self._today[name] = ", ".join(f"{flag}={text}" for flag, text in today.items())

    def _callback(self, name: str, value: Any, text: str) -> None:
        """A flag that is a callback today."""
        known = self._script.spelled
        beside = ast.unparse(self._call.func).partition(".")[0]
        if name == "progress_bar_refresh_rate" and value in (0, None):
            self._set(name, {"enable_progress_bar": "False"} if value == 0 else {})
            return
        if name == "weights_summary" and value in (None, "top"):
            self._set(name, {"enable_model_summary": "False"} if value is None else {})
            return
        if name == "early_stop_callback" and value is False:
            self._today[name] = ""
            return
        made = {
            "progress_bar_refresh_rate": lambda: f"{known('callbacks.TQDMProgressBar', beside)}(refresh_rate={text})",
            "weights_summary": lambda: f"{known('callbacks.ModelSummary', beside)}(max_depth=-1)",
            "early_stop_callback": lambda: (
                text if value is UNKNOWN else f'{known("callbacks.EarlyStopping", beside)}("val_loss", patience=3)'
            ),
            "checkpoint_callback": lambda: text,
        }
        given = self._given.get("callbacks")
        if given is not None and not isinstance(given.value, ast.List):
            shown = self._script.of(self._given[name])
            self._script.note(self._given[name], f"Trainer({shown:.90}): put it into callbacks=.")
            return
        self._callbacks.append(made[name]())
        self._today[name] = ""

    def _add_callbacks(self) -> None:
        if not self._callbacks:
            return
        given = self._given.get("callbacks")
        if given is None:
            first = next(name for name in self._given if name in CALLBACK_FLAGS and self._today.get(name) == "")
            self._today[first] = f"callbacks=[{', '.join(self._callbacks)}]"
            return
        assert isinstance(given.value, ast.List)
        at = self._script.start(given.value) + 1
        self._script.replace(at, at, ", ".join(self._callbacks) + (", " if given.value.elts else ""))

    def _resume(self, keyword: ast.keyword, text: str) -> None:
        """``resume_from_checkpoint`` goes to the one call of fit, where there is one."""
        owners = [
            ast.unparse(node.targets[0])
            for node in ast.walk(self._script.tree)
            if isinstance(node, ast.Assign) and node.value is self._call
        ]
        fits = [
            call
            for call in self._script.calls()
            if isinstance(call.func, ast.Attribute)
            and call.func.attr == "fit"
            and ast.unparse(call.func.value) in owners
        ]
        if len(fits) == 1 and not any(given.arg == "ckpt_path" for given in fits[0].keywords):
            last = [*fits[0].args, *fits[0].keywords]
            at = self._script.end(last[-1]) if last else self._script.end(fits[0]) - 1
            self._script.replace(at, at, f"{', ' if last else ''}ckpt_path={self._script.again(keyword.value)}")
            self._today["resume_from_checkpoint"] = ""
        else:
            self._script.note(keyword, f"Trainer(resume_from_checkpoint={text:.60}): give it to fit, as ckpt_path=.")


CALLBACK_FLAGS = ("checkpoint_callback", "early_stop_callback", "weights_summary", "progress_bar_refresh_rate")


# -- hooks of modules and callbacks --------------------------------------------------------------------------


STAGES = {"training": "train", "validation": "validation", "test": "test"}
COLLECTS = """\
{i}def on_{stage}_epoch_start(self):
{i}    self.{stage}_outputs = []

{i}def on_{stage}_batch_end(self, outputs, batch, batch_idx{loader}):
{i}    self.{stage}_outputs.append(outputs)

"""
RENAMED = {
    ("LightningModule", "tng_dataloader"): ("train_dataloader", ""),
    ("LightningModule", "on_epoch_start"): ("on_train_epoch_start", ""),
    ("LightningModule", "on_epoch_end"): ("on_train_epoch_end", ""),
    ("LightningModule", "on_batch_end"): ("on_train_batch_end", "outputs, batch, batch_idx"),
    ("LightningModule", "configure_sharded_model"): ("configure_model", ""),
    ("Callback", "on_epoch_start"): ("on_train_epoch_start", ""),
    ("Callback", "on_epoch_end"): ("on_train_epoch_end", ""),
    ("Callback", "on_batch_start"): ("on_train_batch_start", "batch, batch_idx"),
    ("Callback", "on_batch_end"): ("on_train_batch_end", "outputs, batch, batch_idx"),
    ("Callback", "on_pretrain_routine_start"): ("on_fit_start", ""),
    ("Callback", "on_keyboard_interrupt"): ("on_exception", "exception"),
}
"""Hooks of old: their names of today, and the arguments that have come; each had none but those of all hooks."""
ARGUMENTS = {"LightningModule": 1, "Callback": 3}


class _Class:
    """The hooks of one class."""

    def __init__(self, script: Script, kind: str, node: ast.ClassDef) -> None:
        self._script, self._kind, self._node = script, kind, node
        self._methods = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}

    def move(self) -> None:
        """Bring every method up to date."""
        for method in self._methods.values():
            self._decorators(method)
            self._arguments(method)
            if self._kind == "Callback":
                self._renamed(method, OF_CALLBACKS)
                continue
            found = re.fullmatch(r"(training|validation|test)(_epoch_end|_end|_step)", method.name)
            if found is None or method.name == "training_end":
                self._renamed(method, FORGOTTEN)
            else:
                self._returned(method, in_step=found[2] == "_step")
            if found is not None and found[2] != "_step" and method.name != "training_end":
                self._collected(method, STAGES[found[1]])
            if self._kind == "LightningModule":
                self._hparams(method)

    def _decorators(self, method: ast.FunctionDef) -> None:
        script = self._script
        whys = {each: refusal(script.meant(each) or "") for each in method.decorator_list if script.meant(each)}
        for each in method.decorator_list:
            why = whys.get(each)
            is_loader = DATA_LOADER in whys.values() and ast.unparse(each) == "property"
            if why in (DATA_LOADER, AUTO_MOVE) or is_loader:
                start = script.line_start(script.start(each))
                script.replace(start, script.rest_of_line(script.end(each)).end(), "")
            if why == AUTO_MOVE:
                script.note(method, f"{method.name}: {AUTO_MOVE}")

    def _rename(self, method: ast.FunctionDef, new: str) -> None:
        found = re.compile(r"def\s+(\w+)").search(self._script.text, self._script.start(method))
        assert found is not None
        self._script.replace(found.start(1), found.end(1), new)

    def _renamed(self, method: ast.FunctionDef, old: dict[str, str]) -> None:
        """A hook that has another name today."""
        name = method.name
        new, come = RENAMED.get((self._kind, name), ("", ""))
        arguments = method.args.args
        if new and new not in self._methods and len(arguments) == ARGUMENTS.get(self._kind, 1):
            self._rename(method, new)
            if come:
                end = self._script.end(arguments[-1])
                self._script.replace(end, end, f", {come}")
        elif name in old:
            self._script.note(method, f"{self._node.name}.{name}: nobody calls it today; instead: {old[name]}.")

    def _collected(self, method: ast.FunctionDef, stage: str) -> None:
        """An epoch's end that takes the outputs of all steps: they are collected by the module itself."""
        script, arguments, new = self._script, method.args.args, f"on_{stage}_epoch_end"
        needed = {new, f"on_{stage}_epoch_start", f"on_{stage}_batch_end"}
        body = [each for each in method.body if not _is_text(each)]
        if len(arguments) != 2 or needed & self._methods.keys() or not body or body[0].lineno == method.lineno:
            script.note(method, f"{self._node.name}.{method.name}: nobody calls it today: define {new}(self), and "
                "collect the outputs of the steps in an attribute.")  # fmt: skip
            return
        self._rename(method, new)
        script.replace(script.end(arguments[0]), script.end(arguments[1]), "")
        loader = "" if stage == "train" else ", dataloader_idx=0"
        before = method.decorator_list[0] if method.decorator_list else method
        script.insert_before(before, COLLECTS.format(i=script.indent(script.start(method)), stage=stage, loader=loader))
        script.insert_before(
            body[0],
            f"{script.indent(script.start(body[0]))}{arguments[1].arg}, self.{stage}_outputs = "
            f"self.{stage}_outputs, []\n",
        )

    def _returned(self, method: ast.FunctionDef, in_step: bool) -> None:
        """``return {"log": ..., "progress_bar": ...}``: what was logged by returning it."""
        for node in (node for node in ast.walk(method) if isinstance(node, ast.Return) and node.value is not None):
            found = _dict_of(method, node.value)
            keys = [] if found is None else [_value(key) if key is not None else UNKNOWN for key in found.keys]
            if found is None or not all(isinstance(key, str) for key in keys):
                if not in_step:
                    self._script.note(node, f"what {method.name} returns is not logged: call self.log(name, value).")
                continue
            parts = {key: (at, self._script.of(found.values[at])) for at, key in enumerate(keys)}
            shown = [_dict_of(method, found.values[at]) for key, (at, _) in parts.items() if key in SHOWN]
            logged = {_value(key) for each in shown if each for key in each.keys if key is not None}
            again = {text: self._script.again(found.values[at]) for at, text in parts.values()}
            texts = {text: key for key, (_, text) in parts.items() if key == "log"}
            texts.update({text: key for key, (_, text) in parts.items() if key == "progress_bar"})
            bar = {"log": "", "progress_bar": ", prog_bar=True"}
            lines = [f"self.log_dict({again[text]}{bar[key]})" for text, key in texts.items()]
            if not in_step:
                others = [(key, text) for key, (_, text) in parts.items() if key not in (*SHOWN, *logged)]
                lines += [f"self.log({json.dumps(key)}, {again[text]})" for key, text in others]
            if lines:
                indent = self._script.indent(self._script.start(node))
                self._script.insert_before(node, "".join(f"{indent}{line}\n" for line in lines))
            items = [
                Item(self._script.start(key), self._script.end(value))
                for key, value in zip(found.keys, found.values, strict=True)
            ]
            self._script.remove(items, [at for key, (at, _) in parts.items() if key in SHOWN])

    def _arguments(self, method: ast.FunctionDef) -> None:
        """Arguments that hooks do not get any more."""
        for argument in method.args.args[: len(method.args.args) - len(method.args.defaults)]:
            if argument.arg in ("dataloader_idx", "unused") and method.name.startswith("on_train_batch_"):
                end = self._script.end(argument)
                self._script.replace(end, end, " = 0" if argument.annotation else "=0")
            if argument.arg == "optimizer_idx":
                self._script.note(
                    method,
                    f"{method.name}(optimizer_idx): with several optimizers, set self.automatic_optimization = False "
                    "and step each in training_step (optimizer_step gets no optimizer_idx).",
                )

    def _hparams(self, method: ast.FunctionDef) -> None:
        for node in ast.walk(method):
            if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["self.hparams"]:
                start, value = self._script.start(node), node.value
                self._script.replace(start, self._script.start(value), "self.save_hyperparameters(")
                self._script.replace(self._script.end(value), self._script.end(value), ")")


SHOWN = ("log", "progress_bar")


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _dict_of(method: ast.FunctionDef, node: ast.expr | None) -> ast.Dict | None:
    """The dict that an expression is: written out, or assigned to the name above it, ``OrderedDict({...})`` too."""
    if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("dict", "OrderedDict"):
        return _dict_of(method, node.args[0]) if len(node.args) == 1 and not node.keywords else None
    if isinstance(node, ast.Name):
        made = [
            each
            for each in ast.walk(method)
            if isinstance(each, ast.Assign)
            and [ast.unparse(target) for target in each.targets] == [node.id]
            and each.lineno < node.lineno
        ]
        last = max(made, key=lambda each: each.lineno, default=None)
        return None if last is None else _dict_of(method, last.value)
    return node if isinstance(node, ast.Dict) else None


# -- what differs --------------------------------------------------------------------------------------------


@functools.cache
def table() -> dict[str, list[str]]:
    """What behaves otherwise than in Lightning, by what a script has of it; tests/surface/table.py writes the file."""
    found: dict[str, list[str]] = json.loads(Path(__file__).with_name("differences.json").read_text())
    return found


def differences(script: Script) -> list[Note]:
    """The rows of the table that apply to what the script uses, each at the line where it is used first."""
    said: dict[str, int] = {}
    for line, used in sorted(_used(script)):
        for text in table().get(used, ()):
            said.setdefault(text, line)
    return [Note(line, text, by_hand=False) for text, line in said.items()]


def _used(script: Script) -> Iterator[tuple[int, str]]:
    """What a script uses, as the keys of the table: ``flag accumulate_grad_batches``, ``self log``, ``name LBFGS``."""
    for node in ast.walk(script.tree):
        if isinstance(node, ast.Call):
            meant = (script.meant(node.func) or ast.unparse(node.func)).rpartition(".")[2]
            for keyword in node.keywords:
                value = keyword.value.value if isinstance(keyword.value, ast.Constant) else UNKNOWN
                if value in (1, None, "auto") and value is not True:  # one process is what there is without it
                    yield node.lineno, f"flag {meant}({keyword.arg}={value!s})"
                elif keyword.arg is not None:
                    yield node.lineno, f"flag {meant}({keyword.arg})"
                    yield node.lineno, f"flag {meant}({keyword.arg}={value!s})"
                    if isinstance(keyword.value, ast.Dict):
                        yield node.lineno, f"flag {meant}({keyword.arg}=dict)"
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            yield node.lineno, f"name {node.attr}"
            if owner in script.trainers:
                yield node.lineno, f"name trainer.{node.attr}"
            elif owner == "self":
                yield node.lineno, f"name self.{node.attr}"
        elif isinstance(node, ast.Name):
            yield node.lineno, f"name {(script.names.get(node.id) or node.id).rpartition('.')[2]}"
    for kind, class_ in script.classes():
        for method in (each for each in class_.body if isinstance(each, ast.FunctionDef)):
            yield method.lineno, f"name {kind}.{method.name}"
