"""A third party's module: it knows Lightning, and nothing of lockstep."""

from lightning.pytorch.callbacks import Callback


class Tells(Callback):
    """Says on each rank where its base class is from."""

    def on_fit_end(self, trainer, pl_module):
        print(f"rank {trainer.global_rank} of {trainer.world_size}: {Callback.__module__}\n", end="", flush=True)


def home():
    """Where the name of Lightning leads, in the process that calls."""
    import pytorch_lightning

    return pytorch_lightning.Callback.__module__
