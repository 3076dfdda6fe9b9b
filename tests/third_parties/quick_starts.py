"""Quick starts of packages that build on Lightning, on made-up data, without pretrained weights.

    lockstep run --lightning tests/third_parties/quick_starts.py gluonts    # where gluonts is installed

``python`` in place of ``lockstep run --lightning`` trains by Lightning itself; with ``PL_TRAINER_ORDER=torch`` both
print the same numbers.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

NUMBERS = np.random.default_rng(0)
QUIET: dict[str, Any] = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}


def gluonts() -> None:
    import pandas as pd
    from gluonts.dataset.pandas import PandasDataset
    from gluonts.torch import DeepAREstimator, SimpleFeedForwardEstimator

    index = pd.date_range("2020-01-01", periods=200, freq="D")
    values = np.sin(np.arange(200) / 7).astype("float32")
    data = PandasDataset({"a": pd.DataFrame({"target": values}, index=index)}, target="target")
    trains = {"num_batches_per_epoch": 5, "batch_size": 8, "trainer_kwargs": {"max_epochs": 2, **QUIET}}
    for estimator in (
        SimpleFeedForwardEstimator(prediction_length=7, **trains),
        DeepAREstimator(prediction_length=7, freq="D", **trains),
    ):
        forecast = next(iter(estimator.train(data, validation_data=data).predict(data)))
        print("forecast:", type(estimator).__name__, forecast.mean.shape, np.isfinite(forecast.mean).all())


def u8darts() -> None:
    import pandas as pd
    from darts import TimeSeries
    from darts.models import NBEATSModel

    days = pd.date_range("2020-01-01", periods=120, freq="D")
    series = TimeSeries.from_times_and_values(days, np.sin(np.arange(120) / 5).astype("float32"))
    model = NBEATSModel(
        input_chunk_length=12,
        output_chunk_length=4,
        n_epochs=3,
        num_stacks=1,
        num_blocks=1,
        layer_widths=8,
        random_state=0,
        batch_size=16,
        save_checkpoints=True,
        force_reset=True,
        model_name="nbeats",
        work_dir="darts",
        pl_trainer_kwargs=QUIET,
    )
    model.fit(series[:100], val_series=series[90:])
    print("forecast:", model.predict(4).values().sum())
    best = NBEATSModel.load_from_checkpoint("nbeats", work_dir="darts", best=True)
    print("best:", best.predict(4, series=series).values().sum())
    model.save("nbeats.pt")
    print("same:", np.allclose(NBEATSModel.load("nbeats.pt").predict(4).values(), model.predict(4).values()))


def neuralforecast() -> None:
    import pandas as pd
    from neuralforecast import NeuralForecast
    from neuralforecast.losses.pytorch import MQLoss
    from neuralforecast.models import NBEATS, NHITS

    months = pd.date_range("2020-01-31", periods=120, freq="ME")
    data = pd.concat(
        pd.DataFrame({"unique_id": name, "ds": months, "y": np.sin(np.arange(120) / 6 + phase) + 2})
        for phase, name in enumerate("ab")
    )
    known: dict[str, Any] = {"input_size": 24, "h": 12, "random_seed": 1, **QUIET}
    nbeats = NBEATS(max_steps=20, val_check_steps=10, early_stop_patience_steps=2, **known)
    forecaster = NeuralForecast(models=[nbeats, NHITS(max_steps=10, loss=MQLoss(level=[80]), **known)], freq="ME")
    forecaster.fit(df=data, val_size=12)
    found = forecaster.predict()
    print("forecast:", found.shape, found["NBEATS"].sum(), found["NHITS-median"].sum())
    forecaster.save("saved", overwrite=True, save_dataset=True)
    print("same:", np.allclose(NeuralForecast.load("saved").predict()["NBEATS"], found["NBEATS"]))


def pytorch_forecasting() -> None:
    import pandas as pd
    from lightning.pytorch import Trainer, seed_everything
    from pytorch_forecasting import NBeats, TimeSeriesDataSet

    seed_everything(0)
    data = pd.concat(
        pd.DataFrame({"series": str(k), "time_idx": np.arange(60), "value": 5 + np.sin(np.arange(60) / (2 + k))})
        for k in range(4)
    ).reset_index(drop=True)
    training = TimeSeriesDataSet(
        data[data.time_idx < 50],
        time_idx="time_idx",
        target="value",
        group_ids=["series"],
        max_encoder_length=12,
        min_encoder_length=12,
        max_prediction_length=4,
        min_prediction_length=4,
        time_varying_unknown_reals=["value"],
    )
    validation = TimeSeriesDataSet.from_dataset(training, data, predict=True, stop_randomization=True)
    val_loader = validation.to_dataloader(train=False, batch_size=4)
    model = NBeats.from_dataset(training, learning_rate=1e-3, widths=[8, 16], log_interval=-1)
    trainer = Trainer(max_epochs=2, gradient_clip_val=0.1, **QUIET)
    trainer.fit(model, training.to_dataloader(train=True, batch_size=16), val_loader)
    print("val_loss:", trainer.callback_metrics["val_loss"].item())
    best = NBeats.load_from_checkpoint(trainer.checkpoint_callback.best_model_path, weights_only=False)
    print("forecast:", best.predict(val_loader, trainer_kwargs={**QUIET, "logger": False}).sum().item())


def pytorch_tabular() -> None:
    import pandas as pd
    from pytorch_tabular import TabularModel
    from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
    from pytorch_tabular.models import CategoryEmbeddingModelConfig

    data = pd.DataFrame({"a": NUMBERS.normal(size=120), "b": NUMBERS.normal(size=120), "c": list("xyz") * 40})
    data["target"] = (data.a + data.b > 0).astype(int)
    model = TabularModel(
        data_config=DataConfig(target=["target"], continuous_cols=["a", "b"], categorical_cols=["c"]),
        model_config=CategoryEmbeddingModelConfig(task="classification", layers="8-8", learning_rate=1e-2),
        optimizer_config=OptimizerConfig(),
        trainer_config=TrainerConfig(batch_size=16, max_epochs=3, accelerator="cpu", progress_bar="none"),
    )
    model.fit(train=data[:80], validation=data[80:100])
    print("test:", model.evaluate(data[100:])[0])
    found = model.predict(data[100:])
    print("predicted:", found["target_1_probability"].sum())
    model.save_model("saved")
    again = TabularModel.load_model("saved").predict(data[100:])
    print("same:", np.allclose(again["target_1_probability"], found["target_1_probability"]))


def scvi_tools() -> None:
    import scvi
    from anndata import AnnData

    scvi.settings.seed = 0
    labels = {"batch": ["a", "b"] * 100, "label": ["x"] * 100 + ["y"] * 100}
    cells = AnnData(NUMBERS.poisson(2.0, size=(200, 50)).astype("float32"), obs=labels)
    scvi.model.SCVI.setup_anndata(cells, batch_key="batch")
    model = scvi.model.SCVI(cells, n_latent=4)
    model.train(max_epochs=3, accelerator="cpu", devices=1, check_val_every_n_epoch=1, early_stopping=True)
    print("elbo:", model.history["elbo_train"].iloc[-1, 0], len(model.history["elbo_validation"]))
    model.save("saved", overwrite=True)
    print("loaded:", scvi.model.SCVI.load("saved", adata=cells).get_latent_representation().shape)
    labelled = scvi.model.SCANVI.from_scvi_model(model, unlabeled_category="u", labels_key="label")
    labelled.train(max_epochs=2, accelerator="cpu")
    print("labels:", labelled.predict().shape)


def chemprop() -> None:
    from chemprop import data, featurizers, models, nn
    from lightning.pytorch import Trainer, seed_everything
    from lightning.pytorch.callbacks import ModelCheckpoint

    seed_everything(0)
    names = ["C" * (i % 7 + 1) + "O" * (i % 3) for i in range(40)]
    points = [data.MoleculeDatapoint.from_smi(name, np.array([float(len(name))])) for name in names]
    featurizer = featurizers.SimpleMoleculeMolGraphFeaturizer()
    train, val, test = (data.MoleculeDataset(points[a:b], featurizer) for a, b in ((0, 24), (24, 32), (32, 40)))
    scaler = train.normalize_targets()
    val.normalize_targets(scaler)
    train_loader = data.build_dataloader(train, batch_size=8, num_workers=0)
    val_loader, test_loader = (
        data.build_dataloader(part, batch_size=8, num_workers=0, shuffle=False) for part in (val, test)
    )
    head = nn.RegressionFFN(output_transform=nn.UnscaleTransform.from_standard_scaler(scaler))
    model = models.MPNN(nn.BondMessagePassing(), nn.MeanAggregation(), head, True, [nn.metrics.RMSE()])
    best = ModelCheckpoint("best", "best-{epoch}", "val_loss", mode="min", save_last=True)
    trainer = Trainer(max_epochs=3, logger=False, callbacks=[best], **QUIET)
    trainer.fit(model, train_loader, val_loader)
    print("rmse:", trainer.test(dataloaders=test_loader, weights_only=False)[0]["test/rmse"])
    loaded = models.MPNN.load_from_checkpoint(best.best_model_path)
    print("predicted:", torch.cat(trainer.predict(loaded, test_loader)).sum().item())


def mlcolvar() -> None:
    from lightning.pytorch import Trainer, seed_everything
    from mlcolvar.cvs import AutoEncoderCV, DeepTDA
    from mlcolvar.data import DictDataset, DictModule
    from mlcolvar.utils.trainer import MetricsCallback

    seed_everything(0)
    states = torch.cat([torch.randn(60, 4), torch.randn(60, 4) + 2])
    labels = torch.cat([torch.zeros(60), torch.ones(60)])
    for model, parts in (
        (AutoEncoderCV([4, 8, 2]), {"data": states}),
        (DeepTDA(2, 1, [-7.0, 7.0], [0.2, 0.2], [4, 8, 1]), {"data": states, "labels": labels}),
    ):
        metrics = MetricsCallback()
        trainer = Trainer(max_epochs=5, callbacks=[metrics], logger=False, enable_checkpointing=False, **QUIET)
        trainer.fit(model, DictModule(DictDataset(parts), lengths=[0.8, 0.2], batch_size=16))
        print("valid_loss:", type(model).__name__, float(metrics.metrics["valid_loss"][-1]))


def pina_mathlab() -> None:
    from lightning.pytorch import seed_everything
    from pina import Condition, Trainer
    from pina.domain import CartesianDomain
    from pina.equation import Equation
    from pina.equation.zoo import FixedValue
    from pina.model import FeedForward
    from pina.operator import grad
    from pina.problem import SpatialProblem
    from pina.solver import PhysicsInformedSingleModelSolver

    def equation(inputs: Any, outputs: Any) -> Any:
        return grad(outputs, inputs, components=["u"], d=["x"]) - outputs.extract(["u"])

    class Growth(SpatialProblem):
        output_variables = ["u"]
        spatial_domain = CartesianDomain({"x": [0, 1]})
        domains = {"start": CartesianDomain({"x": 0.0}), "inside": CartesianDomain({"x": [0, 1]})}
        conditions = {
            "start": Condition(domain="start", equation=FixedValue(1.0)),
            "inside": Condition(domain="inside", equation=Equation(equation)),
        }

    seed_everything(0)
    problem = Growth()
    problem.discretise_domain(n=20, mode="grid", domains=["inside", "start"])
    solver = PhysicsInformedSingleModelSolver(problem, FeedForward(input_dimensions=1, output_dimensions=1, layers=[8]))
    trainer = Trainer(solver, max_epochs=50, train_size=0.8, val_size=0.2, batch_size=8, **QUIET)
    trainer.train()
    print("train_loss:", trainer.callback_metrics["train_loss"].item())


def rl4co() -> None:
    from lightning.pytorch import seed_everything
    from rl4co.envs import TSPEnv
    from rl4co.models import REINFORCE, AttentionModelPolicy
    from rl4co.utils import RL4COTrainer

    seed_everything(0)
    env = TSPEnv(generator_params={"num_loc": 6})
    policy = AttentionModelPolicy(env_name=env.name, embed_dim=16, num_heads=2, num_encoder_layers=1)
    sizes = {"train_data_size": 64, "val_data_size": 16, "test_data_size": 16, "batch_size": 16}
    model = REINFORCE(env, policy, baseline="rollout", optimizer_kwargs={"lr": 1e-3}, **sizes)
    trainer = RL4COTrainer(max_epochs=2, devices=1, logger=None, **QUIET)
    trainer.fit(model)
    print("reward:", trainer.callback_metrics["val/reward"].item())
    print("test:", trainer.test(model)[0])


def torchgeo() -> None:
    from lightning.pytorch import Trainer, seed_everything
    from torch.utils.data import DataLoader
    from torchgeo.trainers import ClassificationTask, SemanticSegmentationTask

    seed_everything(0)
    images = torch.rand(12, 3, 32, 32)
    labelled = [{"image": image, "label": torch.tensor(i % 3)} for i, image in enumerate(images)]
    masked = [{"image": image, "mask": (image[0] > 0.5).long()} for image in images]
    known: dict[str, Any] = {"in_channels": 3, "lr": 1e-3}
    for task, data in (
        (ClassificationTask(model="resnet18", num_classes=3, **known), labelled),
        (SemanticSegmentationTask(model="unet", backbone="resnet18", num_classes=2, loss="ce", **known), masked),
    ):
        trainer = Trainer(max_epochs=1, log_every_n_steps=1, **QUIET)
        trainer.fit(task, DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=4))
        print("loss:", type(task).__name__, trainer.test(task, DataLoader(data, batch_size=4))[0]["test_loss"])


def anomalib() -> None:
    from anomalib.data import Folder
    from anomalib.engine import Engine
    from anomalib.models import Padim
    from lightning.pytorch import seed_everything
    from PIL import Image

    seed_everything(0)
    for kind, count in (("good", 8), ("bad", 4)):
        (Path("images") / kind).mkdir(parents=True)
        for i in range(count):
            pixels = NUMBERS.integers(90, 110, (64, 64, 3)).astype("uint8")
            if kind == "bad":
                pixels[20:40, 20:40] = 255
            Image.fromarray(pixels).save(Path("images") / kind / f"{i}.png")
    sizes = {"train_batch_size": 4, "eval_batch_size": 4, "num_workers": 0}
    data = Folder(name="made_up", root="images", normal_dir="good", abnormal_dir="bad", **sizes)
    model = Padim(backbone="resnet18", layers=["layer1"], n_features=20, pre_trained=False)
    engine = Engine(max_epochs=1, devices=1, default_root_dir="out", logger=False, **QUIET)
    engine.fit(model=model, datamodule=data)
    print("test:", engine.test(model=model, datamodule=data)[0])
    print("predicted:", len(engine.predict(model=model, datamodule=data)))


def lightly_train() -> None:
    from lightly_train import embed, pretrain
    from PIL import Image

    Path("images").mkdir()
    for i in range(8):
        Image.fromarray(NUMBERS.integers(0, 255, (96, 96, 3)).astype("uint8")).save(f"images/{i}.png")
    known: dict[str, Any] = {"data": "images", "batch_size": 4, "num_workers": 0, "accelerator": "cpu"}
    pretrain(
        out="out",
        model="torchvision/resnet18",
        method="simclr",
        epochs=1,
        devices=1,
        transform_args={"image_size": (64, 64)},
        **known,
    )
    embed(out="embedded.csv", checkpoint="out/checkpoints/last.ckpt", format="csv", **known)
    print("embedded:", len(Path("embedded.csv").read_text().splitlines()) - 1)


def rfdetr() -> None:
    from PIL import Image
    from rfdetr import RFDETRNano

    for split in ("train", "valid", "test"):
        Path("images", split).mkdir(parents=True)
        Image.fromarray(NUMBERS.integers(0, 255, (64, 64, 3)).astype("uint8")).save(f"images/{split}/0.jpg")
        box = {"id": 1, "image_id": 0, "category_id": 1, "bbox": [20, 20, 40, 40], "area": 1600, "iscrowd": 0}
        found = {
            "images": [{"id": 0, "file_name": "0.jpg", "width": 64, "height": 64}],
            "annotations": [box],
            "categories": [{"id": 1, "name": "a", "supercategory": "none"}],
        }
        Path("images", split, "_annotations.coco.json").write_text(json.dumps(found))
    torch.manual_seed(0)
    RFDETRNano(pretrain_weights=None, resolution=64).train(
        dataset_dir="images",
        epochs=1,
        batch_size=1,
        grad_accum_steps=1,
        output_dir="out",
        device="cpu",
        num_workers=0,
        tensorboard=False,
        multi_scale=False,
        expanded_scales=False,
    )
    print("metrics:", Path("out/metrics.csv").read_text())
    print("done:", sorted(os.listdir("out")))


if __name__ == "__main__":
    start = globals()[sys.argv[1].replace("-", "_")]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        start()
        os.chdir("/")
