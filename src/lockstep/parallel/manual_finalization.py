"""torch's names, since 2.15, for a backward whose gradients are there when the caller says so: refused here."""

from __future__ import annotations

from lockstep.ground.errors import MisconfigurationException

ALWAYS = (
    "gradients are there when backward() returns, and each bucket travels while the backward still runs: leave it at "
    "False, and step after the backward"
)


class ManualFinalization:
    """What a container of torch's has for it."""

    @property
    def require_manual_backward_finalization(self) -> bool:
        """False: the end of a backward is the end of its reduction."""
        return False

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        if required:
            raise MisconfigurationException(f"require_manual_backward_finalization=True: {ALWAYS}.")

    @property
    def should_finalize_after_backward(self) -> bool:
        """False: nobody has to."""
        return False

    def finalize_backward(self) -> None:
        """Nothing is left to do, and as in torch's class it is an error to ask for it.

        Raises:
            MisconfigurationException: always.
        """
        raise MisconfigurationException(f"finalize_backward(): {ALWAYS}.")
