"""Functions for releasing memory and for out-of-memory errors, importable from here as in Lightning."""

from lockstep.ground.memory_use import garbage_collection_cuda, is_oom_error
from lockstep.ground.transfer import recursive_detach

__all__ = ["garbage_collection_cuda", "is_oom_error", "recursive_detach"]
