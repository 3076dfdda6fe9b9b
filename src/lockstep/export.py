"""The exports of a LightningModule: to ONNX and TorchScript."""

from __future__ import annotations

from importlib.util import find_spec
from io import BytesIO
from os import PathLike, fspath
from typing import Any

import torch

from lockstep.ground.errors import MisconfigurationException, missing_extra
from lockstep.ground.rank import rank_zero_deprecation


class ModuleExports:
    """What a LightningModule can be written as, to be used without lockstep."""

    @torch.no_grad()
    def to_onnx(
        self, file_path: str | PathLike[str] | BytesIO | None = None, input_sample: Any = None, **kwargs: Any
    ) -> Any:
        """Export ``forward`` to ONNX.

        Args:
            file_path: a path, or a buffer to write to; None: nothing is written.
            input_sample: an input of ``forward``, a tuple for several; None: ``example_input_array``. It goes
                through the module's batch transfer hooks, to the module's device.
            **kwargs: of ``torch.onnx.export``.

        Returns:
            torch's ``ONNXProgram``; None from the exporter of old (``dynamo=False``).

        Raises:
            ModuleNotFoundError: `onnx` or `onnxscript` is not installed.
            MisconfigurationException: there is no input to export with.
        """
        needed = ("onnx", "onnxscript") if kwargs.get("dynamo", True) else ("onnx",)
        for package in needed:
            if find_spec(package) is None:
                raise missing_extra(package, "onnx", f"{type(self).__name__}.to_onnx()")
        sample = self._sample(input_sample, "to_onnx(path, input_sample)")
        training = self.training  # type: ignore[attr-defined]
        self.eval()  # type: ignore[attr-defined]
        try:
            if not isinstance(file_path, BytesIO):
                path = None if file_path is None else fspath(file_path)
                return torch.onnx.export(self, sample, path, **kwargs)  # type: ignore[arg-type]
            if not kwargs.get("dynamo", True):
                return torch.onnx.export(self, sample, file_path, **kwargs)  # type: ignore[arg-type]
            program: Any = torch.onnx.export(self, sample, None, **kwargs)  # type: ignore[arg-type]
            file_path.write(program.model_proto.SerializeToString())
            return program
        finally:
            self.train(training)  # type: ignore[attr-defined]

    @torch.no_grad()
    def to_torchscript(
        self,
        file_path: str | PathLike[str] | None = None,
        method: str | None = "script",
        example_inputs: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Export ``forward`` to TorchScript, in eval mode. Torch has deprecated it: see ``torch.export``.

        Args:
            file_path: where to write it; None: nothing is written.
            method: "script", or "trace" to record one call.
            example_inputs: the input of that call; None: ``example_input_array``.
            **kwargs: of ``torch.jit.script`` or ``torch.jit.trace``.

        Returns:
            the ``ScriptModule``.

        Raises:
            MisconfigurationException: another ``method``, or no input to trace with.
        """
        rank_zero_deprecation(
            "to_torchscript(): torch has deprecated TorchScript; use torch.export.export(module, ...)"
        )
        if method not in ("script", "trace"):
            raise MisconfigurationException(f'to_torchscript(method={method!r}): choose "script" or "trace".')
        training = self.training  # type: ignore[attr-defined]
        # torch looks at every property; what needs a Trainer has to be missing then, not to raise
        trainer, self._trainer = self._trainer, object()  # type: ignore[has-type]
        self.eval()  # type: ignore[attr-defined]
        try:
            if method == "script":
                found: Any = torch.jit.script(self, **kwargs)
            else:
                sample = self._sample(example_inputs, "to_torchscript(method='trace', example_inputs=...)")
                found = torch.jit.trace(self, sample, **kwargs)
        finally:
            self._trainer = trainer
            self.train(training)  # type: ignore[attr-defined]
        if file_path is not None:
            torch.jit.save(found, fspath(file_path))
        return found

    def to_tensorrt(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: export to ONNX, which TensorRT reads.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            f"{type(self).__name__}.to_tensorrt(): lockstep does not export to TensorRT; write `to_onnx(path)`, which "
            "TensorRT reads, or call torch_tensorrt.compile(module, ...) yourself."
        )

    def _sample(self, given: Any, call: str) -> Any:
        """An input of ``forward`` as a batch would come: through the transfer hooks, on the module's device."""
        sample = self.example_input_array if given is None else given  # type: ignore[attr-defined]
        if sample is None:
            raise MisconfigurationException(
                f"{type(self).__name__}.{call}: there is no input to export with; give one, or set "
                "`self.example_input_array`."
            )
        sample = self.on_before_batch_transfer(sample, 0)  # type: ignore[attr-defined]
        sample = self.transfer_batch_to_device(sample, self.device, 0)  # type: ignore[attr-defined]
        return self.on_after_batch_transfer(sample, 0)  # type: ignore[attr-defined]
