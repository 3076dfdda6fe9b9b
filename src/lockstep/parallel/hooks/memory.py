"""What a hook remembers of each parameter from one round to the next, wherever its bucket is."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.parallel.grad_bucket import GradBucket

Record = dict[str, Tensor]


class Memory:
    """Tensors by parameter, saved by their places in the buckets.

    Buckets may be laid out anew (the reducer does so after its first round, and when parameters are thawed), so
    records belong to parameters. A checkpoint has no parameters to name them by: there they stand by bucket and place,
    and the checkpoint's bucket plan is laid out before they are asked for.
    """

    def __init__(self) -> None:
        self._records: Any = WeakIdKeyDictionary()
        self._layout: dict[int, list[Record]] = {}
        self._saved: dict[int, list[Record]] = {}

    def records(self, bucket: GradBucket) -> list[Record]:
        """The record of each parameter in ``bucket``, for the caller to fill and change.

        Raises:
            ValueError: what was loaded was saved with other buckets.
        """
        parameters, index = bucket.parameters(), bucket.index()
        saved = self._saved.pop(index, None)
        if saved is not None:
            self._take(saved, bucket)
        found = []
        for parameter in parameters:
            record = self._records.get(parameter)
            if record is None:
                record = self._records[parameter] = {}
            found.append(record)
        if bucket.index() == 0:
            self._layout.clear()  # a round begins, perhaps with fewer buckets than the last
        self._layout[index] = found
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {"saved": self.state_dict()}  # in another process there are other parameters

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self.load_state_dict(state["saved"])

    def _take(self, saved: list[Record], bucket: GradBucket) -> None:
        parameters, buffer = bucket.parameters(), bucket.buffer()
        index, way = bucket.index(), "lay the buckets out as they were (reducer.replan), or do not load the state"
        if len(saved) != len(parameters):
            raise ValueError(
                f"the hook's state was saved with {len(saved)} parameters in bucket {index}, which has "
                f"{len(parameters)} now: {way}"
            )
        for place, (parameter, record) in enumerate(zip(parameters, saved, strict=True)):
            numbers = parameter.numel() * (2 if parameter.is_complex() else 1)
            if "error" in record and record["error"].numel() != numbers:
                raise ValueError(
                    f"the hook's state was saved with {record['error'].numel()} numbers at place {place} of bucket "
                    f"{index}, where there are {numbers} now: {way}"
                )
        for parameter, record in zip(parameters, saved, strict=True):
            self._records[parameter] = {name: value.to(buffer.device) for name, value in record.items()}

    @property
    def bytes(self) -> int:
        """What the records take."""
        return sum(value.nbytes for record in self._records.values() for value in record.values())

    def state_dict(self) -> dict[int, list[Record]]:
        """Copies, by bucket and place."""
        layout = {**self._layout, **self._saved}
        return {
            index: [{name: value.detach().clone() for name, value in record.items()} for record in records]
            for index, records in sorted(layout.items())
        }

    def load_state_dict(self, saved: dict[int, list[Record]]) -> None:
        """Take what `state_dict` gave; parameters get it when their buckets come."""
        self._records.clear()
        self._layout.clear()
        self._saved = {
            int(index): [{name: value.clone() for name, value in record.items()} for record in records]
            for index, records in saved.items()
        }
