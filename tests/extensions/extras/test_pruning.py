"""ModelPruning: what is pruned, beside Lightning, over a resume and on several ranks."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.callbacks import StochasticWeightAveraging
from lockstep.extensions.extras.pruning import ModelPruning
from lockstep.ground.errors import MisconfigurationException
from tests.engines.sharded.test_fsdp import Deep
from tests.equivalence.models import rows
from tests.loop.pieces import Slope, numbers, on_ranks, quiet
from tests.tools.pool import RankPool

EPOCHS = 4


def data(batch_size: int = 4) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(12, 3, dtype=torch.float64, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=batch_size)


def module_of(library: Any) -> Any:
    class Net(library.LightningModule):  # type: ignore[misc,name-defined]
        """Notes its state after each batch, masks and all."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Linear(3, 8), nn.Tanh())
            self.head = nn.Linear(8, 1)
            self.double()
            self.states: list[dict[str, Tensor]] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            return nn.functional.mse_loss(self.head(self.body(x)), y)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass

        def on_train_batch_end(self, *args: Any) -> None:
            self.states.append({name: value.detach().clone() for name, value in self.state_dict().items()})

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5, weight_decay=0.01)

    return Net()


def assert_same(ours: list[dict[str, Tensor]], theirs: list[dict[str, Tensor]]) -> None:
    assert len(ours) == len(theirs) > 0
    for step, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert mine.keys() == other.keys(), f"step {step}"
        for name, value in mine.items():
            assert torch.equal(value, other[name]), f"step {step}, {name}"


class Evens(prune.BasePruningMethod):
    """A method of the user's own: every other element of what is compared."""

    PRUNING_TYPE = "unstructured"

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        mask = default_mask.clone()
        mask.view(-1)[::2] = 0
        return mask


def smallest(module: nn.Module, name: str, amount: Any) -> nn.Module:
    """A function of the user's own."""
    return prune.l1_unstructured(module, name=name, amount=amount)


KEEP = {"use_lottery_ticket_hypothesis": False}
ONCE = {"apply_pruning": lambda epoch: epoch == 0}
SETTINGS: list[dict[str, Any]] = [
    {"pruning_fn": "l1_unstructured"} | ONCE,
    {"pruning_fn": "L1_unstructured", "amount": 3, "parameter_names": ["weight"]} | KEEP,
    {"pruning_fn": "random_unstructured", "amount": 0.25} | KEEP,
    {"pruning_fn": "l1_unstructured", "amount": lambda epoch: 0.1 * epoch, "apply_pruning": lambda e: e != 2} | KEEP,
    {"pruning_fn": "l1_unstructured", "use_lottery_ticket_hypothesis": lambda epoch: epoch == 1, "verbose": 2},
    {"pruning_fn": "l1_unstructured", "resample_parameters": True},
    {"pruning_fn": "l1_unstructured", "use_global_unstructured": False, "make_pruning_permanent": False} | KEEP,
    {"pruning_fn": "random_structured", "use_global_unstructured": False, "pruning_dim": 0, "amount": 0.3}
    | {"parameter_names": ["weight"]},
    {"pruning_fn": "ln_structured", "use_global_unstructured": False, "pruning_dim": 1, "pruning_norm": 2}
    | {"parameter_names": ["weight"], "amount": 0.3}
    | KEEP,
    {"pruning_fn": "l1_unstructured", "prune_on_train_epoch_end": False, "verbose": 1} | KEEP,
    {"pruning_fn": "l1_unstructured", "apply_pruning": False},
    {"pruning_fn": Evens} | ONCE,
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(map(str, [s["pruning_fn"], *list(s)[1:]])))
def test_as_lightning_prunes(settings: dict[str, Any], tmp_path: Path, lightning: Any) -> None:
    flags: dict[str, Any] = {"max_epochs": EPOCHS, "logger": False, "enable_checkpointing": False, "accelerator": "cpu"}
    flags.update(enable_progress_bar=False, enable_model_summary=False, default_root_dir=str(tmp_path))
    theirs, ours = module_of(lightning), module_of(lockstep)
    torch.manual_seed(7)
    trainer = lightning.Trainer(callbacks=lightning.callbacks.ModelPruning(**settings), **flags)
    trainer.fit(theirs, data(), data())
    trainer.save_checkpoint(tmp_path / "theirs.ckpt")
    torch.manual_seed(7)
    trainer = quiet(order="torch", max_epochs=EPOCHS, callbacks=ModelPruning(**settings))
    trainer.fit(ours, data(), data())
    trainer.save_checkpoint(tmp_path / "ours.ckpt")
    if "random" not in str(settings["pruning_fn"]) and "resample_parameters" not in settings:
        assert_same(ours.states, theirs.states)
        assert_same([ours.state_dict()], [theirs.state_dict()])
    else:  # each library draws random numbers for its own loaders in between
        for mine, other in zip(ours.states, theirs.states, strict=True):
            assert mine.keys() == other.keys()
            assert masked(mine) == masked(other)
    saved = [torch.load(tmp_path / f"{who}.ckpt", weights_only=False)["state_dict"] for who in ("ours", "theirs")]
    assert saved[0].keys() == saved[1].keys()


def masked(state: dict[str, Tensor]) -> int:
    return sum(int((value == 0).sum()) for name, value in state.items() if name.endswith("_mask"))


def hand_pruned(states: list[dict[str, Tensor]], amount: float) -> Tensor:
    """The weights below the threshold at the end of the first epoch (3 batches)."""
    flat = torch.cat([states[2][f"{name}.weight"].flatten() for name in ("body.0", "head")])
    count = round(amount * flat.numel())
    return (flat.abs() > flat.abs().sort().values[count - 1]).to(flat.dtype)


def test_by_hand() -> None:
    net = module_of(lockstep)
    initial = {name: value.clone() for name, value in net.state_dict().items()}
    pruning = ModelPruning("l1_unstructured", parameter_names=["weight"], amount=0.5, apply_pruning=lambda e: e == 0)
    quiet(max_epochs=2, callbacks=pruning, max_steps=4).fit(net, data())
    after = net.states[3]
    mask = torch.cat([after["body.0.weight_mask"].flatten(), after["head.weight_mask"].flatten()])
    assert torch.equal(mask, hand_pruned(net.states, 0.5))
    assert torch.equal(net.head.weight, after["head.weight_mask"] * after["head.weight_orig"])
    assert not torch.equal(after["head.weight_orig"], net.states[2]["head.weight"])
    assert torch.allclose(after["head.weight_orig"], initial["head.weight"], atol=0.5), "one step from where it began"


def test_every_rewind_goes_to_the_initial_values() -> None:
    """Lightning 2.6.6 hands out its copy of them at the first rewind, and the optimizer trains it."""
    net = module_of(lockstep)
    initial = {name: value.clone() for name, value in net.state_dict().items()}

    class Rewound(ModelPruning):
        seen = 0

        def apply_lottery_ticket_hypothesis(self) -> None:
            super().apply_lottery_ticket_hypothesis()
            self.seen += 1
            for name, value in initial.items():
                assert torch.equal(net.state_dict()[f"{name}_orig"], value)

    pruning = Rewound("l1_unstructured", amount=0.2)
    quiet(max_epochs=3, callbacks=pruning).fit(net, data())
    assert pruning.seen == 3


@pytest.mark.parametrize("permanent", [True, False])
def test_checkpoints_hold_masks_only_if_they_are_not_permanent(permanent: bool, tmp_path: Path) -> None:
    net = module_of(lockstep)
    pruning = ModelPruning("l1_unstructured", make_pruning_permanent=permanent)
    checkpoint = lockstep.callbacks.ModelCheckpoint(dirpath=tmp_path, every_n_epochs=1, save_top_k=-1)
    quiet(max_epochs=2, callbacks=[pruning, checkpoint], enable_checkpointing=True).fit(net, data())
    path = sorted(tmp_path.iterdir())[0]
    saved = torch.load(path)["state_dict"]
    assert any(name.endswith("_mask") for name in saved) is not permanent
    fresh = module_of(lockstep)
    if permanent:
        fresh.load_state_dict(saved)
        assert sum(int((p == 0).sum()) for p in fresh.parameters()) > 0
    quiet(callbacks=ModelPruning("l1_unstructured")).validate(fresh, data(), ckpt_path=path, verbose=False)
    product = saved["head.weight"] if permanent else saved["head.weight_orig"] * saved["head.weight_mask"]
    assert torch.equal(fresh.head.weight, product), "evaluated with the weights that were trained"
    assert not fresh._load_state_dict_pre_hooks


RESUMES: list[dict[str, Any]] = [
    {},
    {"make_pruning_permanent": False},
    {"resample_parameters": True},
    {"pruning_fn": "random_unstructured", "use_lottery_ticket_hypothesis": False, "amount": 0.3},
    {"pruning_fn": smallest, "use_global_unstructured": False},
]


@pytest.mark.everyday
@pytest.mark.parametrize("settings", RESUMES)
@pytest.mark.parametrize("stop_at", [2, 3, 7])
def test_a_resume_is_bitwise_the_run_that_went_on(settings: dict[str, Any], stop_at: int, tmp_path: Path) -> None:
    """Lightning 2.6.6 loses the masks of a checkpoint without them, and cannot load one with them."""
    settings = {"pruning_fn": "l1_unstructured", **settings}
    torch.manual_seed(3)
    whole = module_of(lockstep)
    quiet(max_epochs=EPOCHS, callbacks=ModelPruning(**settings)).fit(whole, data())
    begun = module_of(lockstep)
    trainer = quiet(max_steps=stop_at, max_epochs=EPOCHS, callbacks=[ModelPruning(**settings), Saver(str(tmp_path))])
    trainer.fit(begun, data())
    resumed = module_of(lockstep)
    for parameter in resumed.parameters():
        parameter.data.fill_(0.5)  # another start, as a fresh process has
    trainer = quiet(max_epochs=EPOCHS, callbacks=ModelPruning(**settings))
    trainer.fit(resumed, data(), ckpt_path=tmp_path / "saved.ckpt")

    def live(states: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        """The products: what is behind a mask of a checkpoint without masks is stored apart."""
        return [
            {n.removesuffix("_orig"): v * s[n[:-5] + "_mask"] if n.endswith("_orig") else v for n, v in s.items()}
            for s in states
        ]

    assert_same(live(begun.states + resumed.states), live(whole.states))
    assert_same(begun.states + resumed.states, whole.states)


class Saver(lockstep.Callback):
    """Saves at the end of training, before masks are made permanent: at the last batch."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == trainer.max_steps:
            trainer.save_checkpoint(f"{self.folder}/saved.ckpt")


def test_a_finished_run_is_prolonged_with_its_masks(tmp_path: Path) -> None:
    once = {"pruning_fn": "l1_unstructured", "apply_pruning": lambda epoch: epoch == 0}
    net = module_of(lockstep)
    trainer = quiet(max_epochs=2, callbacks=ModelPruning(**once))
    trainer.fit(net, data())
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    zeros = [p == 0 for p in net.parameters()]
    longer = module_of(lockstep)
    quiet(max_epochs=4, callbacks=ModelPruning(**once)).fit(longer, data(), ckpt_path=tmp_path / "end.ckpt")
    assert all(torch.equal(p == 0, zero) for p, zero in zip(longer.parameters(), zeros, strict=True))


def test_a_module_may_be_fitted_again_and_evaluated_while_it_has_masks() -> None:
    net = module_of(lockstep)
    pruning = ModelPruning("l1_unstructured", make_pruning_permanent=False, amount=0.2)
    for _ in range(2):
        trainer = quiet(max_epochs=2, callbacks=pruning)
        trainer.fit(net, data(), data())
        trainer.validate(net, data(), verbose=False)
    masks = [m for n, m in net.state_dict().items() if n.endswith("_mask")]
    left = sum(int(mask.sum()) for mask in masks) / sum(mask.numel() for mask in masks)
    assert left == pytest.approx(0.8**4, abs=0.03)


@pytest.mark.parametrize("given", [True, False])
def test_it_goes_on_with_a_copy_of_the_model(given: bool) -> None:
    """As after ``ddp_spawn``, when callbacks come back from another process."""
    net = module_of(lockstep)
    pairs = [(net.head, "weight")] if given else []
    pruning = ModelPruning("l1_unstructured", pairs, make_pruning_permanent=False)
    quiet(max_epochs=1, callbacks=pruning).fit(net, data())
    again = module_of(lockstep)
    quiet(max_epochs=1, callbacks=pruning).fit(again, data())
    assert [n for n in again.state_dict() if n.endswith("_mask")] == [
        n for n in net.state_dict() if n.endswith("_mask")
    ]


def test_one_for_each_of_several_layers(tmp_path: Path) -> None:
    def callbacks(net: Any) -> list[ModelPruning]:
        keep: dict[str, Any] = {"use_lottery_ticket_hypothesis": False, "make_pruning_permanent": False}
        pairs = [(net.body[0], "weight", 0.25), (net.head, "weight", 0.5)]
        return [ModelPruning("l1_unstructured", [(part, name)], amount=a, **keep) for part, name, a in pairs]

    net = module_of(lockstep)
    trainer = quiet(max_epochs=1, callbacks=callbacks(net))
    trainer.fit(net, data())
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    longer = module_of(lockstep)
    quiet(max_epochs=2, callbacks=callbacks(longer)).fit(longer, data(), ckpt_path=tmp_path / "one.ckpt")
    for each, left in ((net, (18, 4)), (longer, (14, 2))):
        assert (int(each.body[0].weight_mask.sum()), int(each.head.weight_mask.sum())) == left


def test_validation_outside_a_fit_prunes_nothing() -> None:
    net = module_of(lockstep)
    quiet(callbacks=ModelPruning("l1_unstructured", prune_on_train_epoch_end=False)).validate(
        net, data(), verbose=False
    )
    assert all(int((p == 0).sum()) == 0 for p in net.parameters())


# -- on ranks ----------------------------------------------------------------------------------------------


def prune_on_ranks(settings: dict[str, Any]) -> list[dict[str, Tensor]]:
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)  # masks are drawn apart
    if rank:
        settings = {**settings, "amount": 0.9}  # and rank 0 decides
    net = module_of(lockstep)
    trainer = on_ranks(max_epochs=EPOCHS, callbacks=ModelPruning(**settings), order="torch")
    trainer.fit(net, data(4 // torch.distributed.get_world_size()))
    states: list[dict[str, Tensor]] = net.states
    return states


@pytest.mark.parametrize("settings", [SETTINGS[0], SETTINGS[2], SETTINGS[5]])
def test_all_ranks_prune_alike(ranks: RankPool, settings: dict[str, Any]) -> None:
    first, second = ranks(2).run(prune_on_ranks, settings, timeout=60)
    assert any(name.endswith("_mask") for name in first[-1])
    assert_same(first, second)


def test_ranks_prune_as_one_process(ranks: RankPool) -> None:
    alone = module_of(lockstep)
    quiet(max_epochs=EPOCHS, order="torch", callbacks=ModelPruning("l1_unstructured")).fit(alone, data(4))
    first, _ = ranks(2).run(prune_on_ranks, {"pruning_fn": "l1_unstructured"}, timeout=60)
    for mine, one in zip(first, alone.states, strict=True):
        for name, value in mine.items():
            torch.testing.assert_close(value, one[name], rtol=1e-12, atol=1e-14)


# -- arguments ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"pruning_fn": "l1_unstructured", "parameter_names": ["chocolate"]}, "chocolate isn't in"),
        ({"pruning_fn": {}}, r"pass a str in \["),
        ({"pruning_fn": "l2"}, "'l2'"),
        ({"pruning_fn": "random_structured"}, "`pruning_dim` should be provided"),
        ({"pruning_fn": "ln_structured", "pruning_dim": 0}, "`pruning_norm` should be provided"),
        ({"pruning_fn": "random_structured", "pruning_dim": 0}, "use_global_unstructured=False"),
        ({"pruning_fn": Evens, "use_global_unstructured": False}, "works with use_global_unstructured=True"),
        ({"pruning_fn": Evens()}, "the class, not an instance"),
        ({"pruning_fn": smallest}, "with use_global_unstructured=False also"),
        ({"pruning_fn": "l1_unstructured", "amount": "half"}, "amount='half'"),
        ({"pruning_fn": "l1_unstructured", "amount": 1.5}, "between 0 and 1"),
        ({"pruning_fn": "l1_unstructured", "amount": -1}, "amount=-1"),
        ({"pruning_fn": "l1_unstructured", "verbose": 3}, "pass 0, 1 or 2"),
    ],
)
def test_wrong_arguments(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(MisconfigurationException, match=said):
        ModelPruning(**settings)


def test_parameters_that_the_model_does_not_have() -> None:
    net = module_of(lockstep)
    for pairs, said in (
        ([(nn.Linear(1, 1), "weight")], r"missing modules: \['Linear'\]"),
        ([(net.head, "scale")], r"missing parameters: \['Linear.scale'\]"),
        (["head.weight"], "list of tuples"),
    ):
        pruning = ModelPruning("l1_unstructured", parameters_to_prune=pairs)  # type: ignore[arg-type]
        with pytest.raises(MisconfigurationException, match=said):
            quiet(max_epochs=1, callbacks=pruning).fit(net, data())


def test_which_parameters_are_pruned() -> None:
    class WithoutHead(ModelPruning):
        def filter_parameters_to_prune(self, parameters_to_prune: Any = ()) -> Any:
            return [pair for pair in parameters_to_prune if pair[0].out_features != 1]

    net = module_of(lockstep)
    found = ModelPruning.sanitize_parameters_to_prune(net)
    assert [(id(m), n) for m, n in found] == [(id(m), n) for n in ("weight", "bias") for m in (net.body[0], net.head)]
    for pruning, names in (
        (WithoutHead("l1_unstructured", make_pruning_permanent=False), {"body.0.weight", "body.0.bias"}),
        (ModelPruning("l1_unstructured", [(net.head, "bias")], make_pruning_permanent=False, amount=1), {"head.bias"}),
    ):
        quiet(max_epochs=1, callbacks=pruning).fit(net, data())
        assert {n[:-5] for n in net.state_dict() if n.endswith("_mask")} == names
        pruning.make_pruning_permanent(net)


def test_it_tells_how_much_is_pruned(caplog: pytest.LogCaptureFixture) -> None:
    pruning = ModelPruning("l1_unstructured", amount=0.5, parameter_names=["weight"], verbose=2)
    with caplog.at_level(logging.INFO, logger="lockstep"):
        quiet(max_epochs=2, callbacks=pruning).fit(module_of(lockstep), data())
    told = [message for message in caplog.messages if "pruned" in message]
    assert told == [
        "L1Unstructured pruned: 0/32 (0.00%) -> 16/32 (50.00%)",
        "L1Unstructured pruned: 16/32 (50.00%) -> 24/32 (75.00%)",
    ]
    assert sum(" by 0.5: " in message for message in caplog.messages) == 4


def test_several_that_keep_other_states_are_refused() -> None:
    """One of them has initial values to keep, the other has none: the later one's state would be the only one."""
    net = module_of(lockstep)
    with pytest.raises(MisconfigurationException, match="have the same state_key"):
        quiet(
            callbacks=[
                ModelPruning("l1_unstructured", [(net.head, "weight")], use_lottery_ticket_hypothesis=rewinds)
                for rewinds in (True, False)
            ]
        )


def pruned_in_shards() -> str:
    with pytest.raises(MisconfigurationException) as raised:
        quiet(strategy="fsdp", devices=2, max_epochs=1, callbacks=[ModelPruning("l1_unstructured", amount=0.5)]).fit(
            Deep(), rows(12)(2)
        )
    return str(raised.value)


def test_pruning_of_shards_is_refused(ranks: RankPool) -> None:
    for said in ranks(2).run(pruned_in_shards, timeout=60):
        assert "ModelPruning" in said
        assert '"ddp"' in said


def test_an_average_whose_parameters_others_exchange() -> None:
    """It was a KeyError."""

    class Layered(Slope):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1, dtype=torch.float64)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch[:, None]).mean()

    callbacks = [ModelPruning("l1_unstructured", amount=0.5), StochasticWeightAveraging(0.1, swa_epoch_start=1)]
    with pytest.raises(MisconfigurationException, match=r"weight_orig.*ModelPruning"):
        quiet(max_epochs=3, callbacks=callbacks).fit(Layered(), numbers(2))
