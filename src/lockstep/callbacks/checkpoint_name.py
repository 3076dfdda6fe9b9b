"""Names of checkpoint files: templates with the names of metrics in braces."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lockstep.ground.errors import MisconfigurationException

_FIELD = re.compile(r"\{([^{}:]*)(?::([^{}]*))?\}")


def fill(template: str, metrics: Mapping[str, Any], equals: str | None = "=") -> str:
    """`template` with each ``{name}`` or ``{name:format}`` replaced by the metric of that name, or 0.

    Args:
        template: such as ``"{epoch:02d}-{val/loss:.2f}"``.
        metrics: numbers or tensors of one element, by name.
        equals: what stands between a name and its value; None leaves the name out.

    Raises:
        MisconfigurationException: a format does not fit its value.

    Example::

        >>> fill("{epoch:02d}-{loss:.2f}", {"epoch": 5, "loss": 0.123})
        'epoch=05-loss=0.12'
    """

    def value(field: re.Match[str]) -> str:
        name, form = field[1], field[2] or ""
        try:
            text = format(metrics.get(name, 0), form)
        except ValueError as error:
            raise MisconfigurationException(
                f"The file name {template!r} writes {name!r} as {form!r}, which does not fit its value "
                f"{metrics.get(name, 0)} ({error}): change the part after the colon."
            ) from error
        return text if equals is None else f"{name}{equals}{text}"

    return _FIELD.sub(value, template)


def pattern(template: str, extension: str) -> re.Pattern[str]:
    """What matches all names that `template` can give, with or without a version at their end."""
    literal = re.split(r"\{[^{}]*\}", template)
    return re.compile(".*".join(map(re.escape, literal)) + r"(-v\d+)?" + re.escape(extension))
