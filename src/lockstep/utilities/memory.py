"""Memory, by the names that users import."""

from lockstep.ground.memory import garbage_collection_cuda, is_oom_error, recursive_detach

__all__ = ["garbage_collection_cuda", "is_oom_error", "recursive_detach"]
