"""What the searches of the tests submit: digits in nine trials, each step told in the trial's folder."""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.digits import Classifier, Digits
from lockstep import Trainer, seed_everything
from lockstep.extensions.search.cluster import SlurmCluster
from lockstep.extensions.search.parser import HyperOptArgumentParser
from tests.slurm.train import BatchLog


def main(hparams: Any) -> float:
    """One trial: rank 0 leaves the hash of the weights in the trial's folder; the validation loss is its value."""
    folder = Path(os.environ["LOCKSTEP_TRIAL"])
    seed_everything(1, workers=True)
    callbacks: list[Any] = [BatchLog(folder / "history", hparams.pause)]
    if hparams.strategy == "optuna":
        from lockstep.callbacks import PruneTrial

        callbacks.append(PruneTrial(monitor="val_loss"))
    trainer = Trainer(
        accelerator="cpu",
        devices="auto",
        num_nodes=hparams.nodes,
        max_epochs=hparams.epochs,
        limit_train_batches=10,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    model = Classifier(hparams.decay, hparams.learning_rate)
    trainer.fit(model, datamodule=Digits(1))
    print(f"rank {trainer.global_rank} ends at step {trainer.global_step}", flush=True)
    if trainer.is_global_zero:
        weights = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
        (folder / "weights").write_text(hashlib.sha256(weights).hexdigest())
    return float(trainer.callback_metrics["val_loss"])


if __name__ == "__main__":
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--strategy", default="grid_search")
    strategy = first.parse_known_args()[0].strategy
    parser = HyperOptArgumentParser(strategy=strategy, parents=[first])
    parser.opt_list("--learning_rate", default=1e-3, type=float, options=[1e-4, 1e-3, 1e-2], tunable=True)
    parser.opt_list("--decay", default=10, type=int, options=[4, 10, 20], tunable=True)
    parser.add_argument("--log_path")
    parser.add_argument("--name", default="digits")
    parser.add_argument("--nb_trials", type=int, default=9)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--at_most", type=int)
    parser.add_argument("--minutes", type=int, help="the time limit; the signal comes a minute before")
    parser.add_argument("--tasks", type=int, default=1)
    parser.add_argument("--option", action="append", default=[], help="of sbatch")
    hyperparams = parser.parse_args()
    cluster = SlurmCluster(
        hyperparam_optimizer=hyperparams,
        log_path=hyperparams.log_path,
        per_experiment_nb_nodes=hyperparams.nodes,
        per_experiment_nb_cpus=3 if hyperparams.tasks == 1 else 2,
        job_time=hyperparams.minutes,
        minutes_to_checkpoint_before_walltime=5 if hyperparams.minutes is None else 1,
        array=hyperparams.at_most is not None,
        at_most=hyperparams.at_most,
    )
    for option in [f"ntasks-per-node={hyperparams.tasks}", *hyperparams.option]:
        name, _, value = option.partition("=")
        cluster.add_slurm_cmd(name, value or None)
    cluster.optimize_parallel_cluster_cpu(main, nb_trials=hyperparams.nb_trials, job_name=hyperparams.name)
