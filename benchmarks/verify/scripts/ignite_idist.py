"""PyTorch-Ignite: idist.Parallel, auto_model, auto_optim and auto_dataloader, as in its cifar10 example."""

import ignite.distributed as idist
import torch
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import Accuracy
from torch import nn
from torch.utils.data import TensorDataset


def training(local_rank, config):
    torch.manual_seed(config["seed"])
    data = TensorDataset(torch.randn(256, 3, 8, 8), torch.randint(10, (256,)))
    loader = idist.auto_dataloader(data, batch_size=config["batch_size"], shuffle=True)
    test_loader = idist.auto_dataloader(data, batch_size=config["batch_size"], shuffle=False)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 10))
    model = idist.auto_model(network)
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9))
    trainer = create_supervised_trainer(model, optimizer, nn.CrossEntropyLoss(), device=idist.device())
    evaluator = create_supervised_evaluator(model, metrics={"accuracy": Accuracy()}, device=idist.device())

    @trainer.on(Events.EPOCH_STARTED)
    def set_epoch():
        if idist.get_world_size() > 1:
            loader.sampler.set_epoch(trainer.state.epoch - 1)

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate():
        accuracy = evaluator.run(test_loader).metrics["accuracy"]
        if idist.get_rank() == 0:
            print(f"accuracy {accuracy:.4f}")

    trainer.run(loader, max_epochs=2)


with idist.Parallel(backend="gloo") as parallel:
    parallel.run(training, {"seed": 12, "batch_size": 32, "lr": 0.05})
