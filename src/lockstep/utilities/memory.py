"""Functions that release memory, detach tensors and detect out-of-memory errors; Lightning's import path."""

from lockstep.ground.memory_use import garbage_collection_cuda, is_oom_error
from lockstep.ground.transfer import recursive_detach

__all__ = ["garbage_collection_cuda", "is_oom_error", "recursive_detach"]
