"""Bugs that people report, each a change of a small script: `lockstep verify` names its cause and its line."""

from __future__ import annotations

import pytest

from lockstep.extensions.verify.certificate import ALIKE, DIFFERENT, UNKNOWN, Certificate
from lockstep.extensions.verify.compare import NOT_FINITE
from tests.extensions.verify.bugs import BUGS
from tests.extensions.verify.small_script import (
    LOCKSTEP,
    LOOP,
    LOSS,
    MODEL,
    SET_EPOCH,
    SHARED_OUT,
    STEP,
    Certify,
    Changes,
    changed,
    line_of,
)

AVERAGED = STEP.replace(
    "optimizer.step()", "[(dist.all_reduce(p.grad), p.grad.div_(world)) for p in model.parameters()]"
)
BY_HAND = ((MODEL, "make_model()"), (STEP, AVERAGED + STEP))
SHARDED = """\
make_model()
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
fully_shard(model)
"""
INNER = """\
make_model()
from torch.distributed.fsdp import fully_shard
fully_shard(model[0])
"""
OWN_NORM = """\
        parts = [p.grad.to_local() for p in model.parameters()]
        norm = torch.stack([part.norm() for part in parts]).norm()
        for part in parts:
            part.mul_((0.01 / norm).clamp(max=1.0))
"""
COUNTED = """\
        counts = x[:, 0] > 0.3
        errors = (model(x) - y).square().squeeze(1) * counts
        loss = errors.sum() / counts.sum()
"""
REDUCING = """\
class Reducing(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            grad = p.grad.clone()
            dist.all_reduce(grad)
            p.add_(grad / world, alpha=-0.05)


dist.init"""
HOOKS = """\
def average(p):
    dist.all_reduce(p.grad)
    p.grad.div_(world)


model[2].bias.requires_grad = False
for p in model.parameters():
    if p.requires_grad:
        p.register_post_accumulate_grad_hook(average)
model[2].bias.requires_grad = True
"""
FULLY_SHARD = "from torch.distributed.fsdp import fully_shard\nif world > 1:\n    fully_shard(model)\n"
LOADED = """\
if rank == 0:
    model.module.load_state_dict({name: value + 1.0 for name, value in model.module.state_dict().items()})
"""
COUNTING = "nn.Sequential(Centered(), *make_model())"
COUNTING_MODEL = """\
class Centered(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        result = x - self.mean
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        return result


"""
WRITTEN = "model.module[0].weight.data[0] = 0.0\n"
CRITIC = """\
critic = make_model()
critics = torch.optim.SGD(critic.parameters(), lr=0.05)
"""
CRITIC_STEP = """\
        critics.zero_grad()
        F.mse_loss(critic(x), y).backward()
        critics.step()
"""
QUIET = """\
def quiet(model):
    return model.no_sync()


"""
CLIP = STEP.replace("optimizer.step()", "nn.utils.clip_grad_norm_(model.parameters(), 0.1 * world**0.5)")
ITERABLE = """\
class Squares(IterableDataset):
    def __iter__(self):
        for i in range(200):
            x = torch.randn(8, generator=torch.Generator().manual_seed(i))
            yield x, x.sum().view(1).sin()


loader = DataLoader(Squares(), 8)
"""

SLICES = """\
share = len(data) // world
own = Subset(data, range(rank * share, min(len(data), (rank + 1) * share + 12)))
loader = DataLoader(own, 8, drop_last=True)
"""
SPLIT = """\
torch.manual_seed(rank)
own, left = torch.utils.data.random_split(data, [80, 16])
sampler = DistributedSampler(own)
loader = DataLoader(own, 8, sampler=sampler)
"""
SPLIT_TWICE = """\
own = Subset(data, range(rank, len(data), world))
sampler = DistributedSampler(own)
loader = DataLoader(own, 4, sampler=sampler)
"""
GATHER = """\
def gather(features):
    found = [torch.zeros_like(features) for _ in range(world)]
    dist.all_gather(found, features.detach())
    found[rank] = features
    return torch.cat(found)


for epoch"""
CONTRASTIVE = "F.cross_entropy(-torch.cdist(gather(model(x)), gather(y)), torch.arange(world * len(x)))"
WINDOW = STEP.replace("optimizer.step()", "if i % 2: optimizer.step()")
CLEAR = "        optimizer.zero_grad()"
COUNT = "        count = torch.tensor(float(len(x)))\n        dist.all_reduce(count)\n"

SAMPLERS: dict[str, tuple[Changes, str]] = {
    "a sampler with a seed for each rank": (
        (("DistributedSampler(data)", "DistributedSampler(data, seed=rank)"),),
        "ranks share samples: DistributedSampler is created with seed=0, 1 on the ranks",
    ),
    "a sampler that has rank 0 everywhere": (
        (("DistributedSampler(data)", "DistributedSampler(data, num_replicas=world, rank=0)"),),
        "DistributedSampler is created with rank=0, 0 on the ranks",
    ),
    # it was alike: "every rank reads the full batch, and computes with its part"
    "no sampler, and a model that is called by keyword": (
        (
            (SHARED_OUT, "loader = DataLoader(data, 8, shuffle=True)\n"),
            (SET_EPOCH, ""),
            (LOSS, "F.mse_loss(model(input=x), y)"),
        ),
        "all ranks read the same data: RandomSampler does not split the data among the ranks",
    ),
    "a stream that no rank takes a share of": (
        ((SHARED_OUT, ITERABLE), (SET_EPOCH, "")),
        "the IterableDataset Squares yields the same samples on each of 2 ranks",
    ),
    "slices of the data that overlap after the last step": (
        ((SHARED_OUT, SLICES), (SET_EPOCH, "")),
        "ranks share samples: their Subsets of the data overlap",
    ),
    "a split that each rank draws by its own seed": (
        ((SHARED_OUT, SPLIT),),
        "ranks share samples: DistributedSampler splits a Subset that differs between ranks",
    ),
    # it was alike: one process was fed what the ranks read
    "a part of the data for each rank, which the sampler splits again": (
        ((SHARED_OUT, SPLIT_TWICE),),
        "the script splits the data set by rank, and the sampler splits it again",
    ),
    # it was alike: only the first epoch was compared
    "an epoch that only one rank's sampler gets": (
        ((SET_EPOCH, "    if rank == 0:\n        sampler.set_epoch(epoch)\n"),),
        "ranks share samples: DistributedSampler has the epochs 1, 0 on the ranks",
    ),
    "an epoch that the sampler gets after it": (
        ((SET_EPOCH, ""), ("dist.destroy", "    sampler.set_epoch(epoch)\ndist.destroy")),
        "DistributedSampler does not get the epoch",
    ),
}

NUMBERS: dict[str, tuple[Changes, str, str]] = {
    "a rank that leaves out some batches is not an in-batch loss": (
        ((LOSS, f"{LOSS} * (0.0 if rank == 1 and x[0, 0] > 0 else 1.0)"),),
        "the loss on rank 1 is zero times the loss in one process for the same samples",
        "loss = ",
    ),
    "a rank whose loss is scaled is not a mean of means": (
        ((LOSS, f"{LOSS} * (0.9 if rank == 1 else 1)"),),
        "the loss on rank 1 is 0.9 times the loss in one process for the same samples",
        "loss = ",
    ),
    "noise on one rank": (
        ((LOSS, "F.mse_loss(model(x + (0.3 * torch.randn_like(x) if rank == 1 else 0)), y)"),),
        "code or random numbers depend on the rank",
        "loss = ",
    ),
    "a bound of clipping that follows the number of ranks": (
        ((MODEL + "\n", SHARDED), (STEP, CLIP + STEP)),
        "ranks and one process clip by different values of max_norm",
        "clip_grad_norm_",
    ),
    "a loss that is divided where gradients are averaged by hand": (
        (*BY_HAND, (LOSS, f"{LOSS} / world")),
        "the loss is divided by the number of ranks, and the average of gradients over the ranks (train.py:",
        "loss = ",
    ),
    "a window of shards whose first backward is synchronized": (
        (
            (MODEL + "\n", SHARDED),
            ("        loss = ", "        model.set_requires_gradient_sync(i % 2 == 0)\n        loss = "),
            (STEP, WINDOW),
            (CLEAR, "        if i % 2 == 0: optimizer.zero_grad()"),
        ),
        "call set_requires_gradient_sync(True) before the last backward of a window",
        "loss.backward()",
    ),
    "batches that a rank leaves out by its own loss": (
        (
            (
                "        optimizer.zero_grad()\n",
                "        if loss.item() > 2.2:\n            continue\n        optimizer.zero_grad()\n",
            ),
        ),
        "ranks skip different batches",
        "for i, (x, y)",
    ),
    "a step that a rank leaves out by its own loss": (
        ((STEP, "        if loss.item() > 2.2:\n            continue\n" + STEP),),
        "ranks skip different steps",
        "optimizer.step()",
    ),
    "a criterion with parameters, which is in no wrapper": (
        (
            (MODEL + "\n", MODEL + "\nscale = nn.Linear(1, 1)\n"),
            ("model.parameters()", "[*model.parameters(), *scale.parameters()]"),
            (LOSS, "F.mse_loss(scale(model(x)), y)"),
        ),
        "DistributedDataParallel does not cover them (they belong to a module outside it",
        "optimizer = ",
    ),
    "features of other ranks that are gathered without their gradients": (
        (("for epoch", GATHER), (LOSS, CONTRASTIVE)),
        "the loss uses values gathered from all ranks, but all_gather passes no gradient to the other ranks",
        "dist.all_gather(",
    ),
    "synchronization that is switched off, and never on again": (
        (
            ("        loss = ", "        model.require_backward_grad_sync = False\n        loss = "),
            (CLEAR, "        if i % 2 == 0: optimizer.zero_grad()"),
            (STEP, WINDOW),
        ),
        "require_backward_grad_sync is False in the last backward of a window",
        "loss.backward()",
    ),
    "a penalty that each rank adds to gradients that are summed": (
        (
            *((old, new.replace(", p.grad.div_(world)", "")) for old, new in BY_HAND),
            (LOSS, f"{LOSS} / world + 0.1 * sum((p**2).sum() for p in model.parameters())"),
        ),
        "gradients are summed over the ranks, but not averaged",
        "dist.all_reduce",
    ),
    "a loss that is divided by all ranks' samples, and averaged": (
        (("        loss = ", COUNT + "        loss = "), (LOSS, "F.mse_loss(model(x), y, reduction='sum') / count")),
        "the loss is divided by a number that counts all ranks' samples, and DistributedDataParallel divides once more",
        "loss = ",
    ),
    "a collective within the optimizer's step that sums": (
        ((MODEL, "make_model()"), ("torch.optim.SGD(", "Reducing("), ("dist.init", REDUCING.replace(" / world", ""))),
        "Reducing reduces gradients in its step, but its update is not that of one process",
        "dist.all_reduce(grad)",
    ),
    # they were called averaged after the step
    "parameters without the hooks that average": (
        ((MODEL + "\n", f"make_model()\n{HOOKS}"),),
        "gradients of 2.bias are not averaged by the collective that reduces gradients",
        "dist.all_reduce(p.grad)",
    ),
    "a helper that enters no_sync in each backward": (
        (
            ("dist.init", QUIET + "dist.init"),
            ("        loss = ", "        with quiet(model):\n            loss = "),
            ("        loss.backward()", "            loss.backward()"),
            ("        optimizer.zero_grad()\n", "            optimizer.zero_grad()\n"),
        ),
        "no_sync() covers the backward",
        "with quiet(model)",
    ),
    "gradients that are averaged after the step": (
        ((MODEL, "make_model()"), (STEP, STEP + AVERAGED)),
        "gradients are not averaged before the step: the script averages them after it, which is too late",
        "dist.all_reduce",
    ),
    "a scheduler that uses each rank's own loss": (
        (
            ("sampler = ", "plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)\nsampler = "),
            (STEP, STEP + "        plateau.step(loss.item())\n"),
        ),
        "a scheduler uses a value that differs between ranks",
        "plateau.step",
    ),
    "a scheduler that uses each rank's own loss after an epoch": (
        (
            ("sampler = ", "plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)\nsampler = "),
            ("dist.destroy", "    plateau.step(loss.detach())\ndist.destroy"),
        ),
        "a scheduler uses a value that differs between ranks",
        "plateau.step",
    ),
    # they were named at the step
    "a rate that each rank sets by hand": (
        ((STEP, "        optimizer.param_groups[0]['lr'] = 0.1 * (rank + 1)\n" + STEP),),
        "ranks use different learning rates",
        "optimizer.param_groups[0]['lr'] =",
    ),
    "a scheduler that only rank 0 steps": (
        (
            ("sampler = ", "schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)\nsampler = "),
            (STEP, STEP + "        if rank == 0:\n            schedule.step()\n"),
        ),
        "ranks use different learning rates",
        "schedule.step()",
    ),
    "optimizers of ranks with rates of their own": (
        (("lr=", "lr=(rank + 1) * "),),
        "ranks use different learning rates",
        "optimizer = torch.optim.SGD",
    ),
    # it was called a clipping, with the line of the step
    "gradients that are reduced to one rank": (
        ((MODEL, "make_model()"), (STEP, AVERAGED.replace("dist.all_reduce(p.grad", "dist.reduce(p.grad, 0") + STEP)),
        "not all ranks get the mean of the gradients",
        "dist.reduce(p.grad",
    ),
    # the line was that of the tensor's use
    "a tensor that each rank draws by its own seed": (
        (
            ("sampler = ", "torch.manual_seed(rank + 1)\nnoise = torch.randn(8)\nsampler = "),
            (LOSS, "F.mse_loss(model(x * noise), y)"),
        ),
        "code or random numbers depend on the rank (their seeds differ: ",
        "torch.manual_seed(rank + 1)",
    ),
    # no cause was named
    "shards of weights that each rank draws by its own seed": (
        (
            (MODEL, "make_model()"),
            ("torch.manual_seed(0)", "torch.manual_seed(rank)"),
            ("optimizer = ", f"{FULLY_SHARD}optimizer = "),
        ),
        "ranks start with different weights",
        "torch.manual_seed(rank)",
    ),
    # no cause was named
    "an optimizer that is created before fully_shard": (
        ((MODEL, "make_model()"), ("sampler = ", f"{FULLY_SHARD}sampler = ")),
        "no parameter of the optimizer gets a gradient: create it after calls such as fully_shard",
        "optimizer = torch.optim.SGD",
    ),
    # the line was that of the backward
    "a second model without a wrapper": (
        (
            ("sampler = ", f"{CRITIC}sampler = "),
            (STEP, STEP + CRITIC_STEP),
        ),
        "gradients are not averaged: the optimizer has them, but DistributedDataParallel does not cover them",
        "critics = torch.optim.SGD",
    ),
    "a collective that a helper calls on one rank": (
        (
            ("dist.init", "def mean(x):\n    dist.all_reduce(x)\n    return x / world\n\n\ndist.init"),
            (STEP, STEP + "        if rank == 0:\n            print(mean(loss.detach()))\n"),
        ),
        "ranks call different collectives",
        "print(mean(loss.detach()))",
    ),
    "a checkpoint that one rank loads": (
        (("optimizer = ", f"{LOADED}optimizer = "),),
        "only some ranks change a tensor by copy_()",
        "model.module.load_state_dict",
    ),
    "a loss that is divided on a line of its own": (
        (("        optimizer.zero_grad()", "        loss = loss / world\n        optimizer.zero_grad()"),),
        "the loss is divided by the number of ranks, and DistributedDataParallel divides once more",
        "loss = loss / world",
    ),
    "a buffer that each rank updates": (
        (
            (MODEL, f"DistributedDataParallel({COUNTING}, broadcast_buffers=False)"),
            ("def make_model", COUNTING_MODEL + "def make_model"),
        ),
        "the buffer 0.mean depends on a rank's own samples",
        "self.mean.lerp_(",
    ),
    "weights that one rank writes between steps": (
        ((STEP, f"{STEP}        if rank == 0:\n            {WRITTEN}"),),
        "only some ranks change a tensor by __setitem__()",
        "model.module[0].weight.data[0] = ",
    ),
    "weights that only one rank changes between steps": (
        (
            (
                STEP,
                f"{STEP}        if rank == 0:\n            with torch.no_grad():\n"
                "                teacher[0].weight.lerp_(model.module[0].weight, 0.5)\n",
            ),
            ("sampler = ", "teacher = make_model()\nsampler = "),
            (LOSS, f"{LOSS} + F.mse_loss(model(x), teacher(x).detach())"),
        ),
        "only some ranks change a tensor by lerp_(), and the step depends on it",
        "lerp_",
    ),
    "layers of which only the inner ones are sharded": (
        ((MODEL + "\n", INNER),),
        "no shard contains 2.weight, 2.bias, which fully_shard does not cover",
        "fully_shard(model[0])",
    ),
    "shards that are clipped by their own norm, by hand": (
        ((MODEL + "\n", SHARDED), (STEP, OWN_NORM + STEP)),
        "each rank clips (scales) its shards by their own norm",
        "part.mul_",
    ),
    "weights that are drawn with a seed for each rank": (
        (*BY_HAND, ("torch.manual_seed(0)", "torch.manual_seed(int(os.environ['RANK']))")),
        "ranks start with different weights, and nothing broadcasts rank 0's",
        "torch.manual_seed(int",
    ),
    "a mean over the samples that count": (
        ((f"        loss = {LOSS}\n", COUNTED),),
        "a mean of means: each rank divides its loss by its own count",
        "errors.sum()",
    ),
    "two losses that are each divided by their own count": (
        ((LOSS, "F.mse_loss(model(x), y) + F.l1_loss(model(x)[x[:, 0] > 0.3], y[x[:, 0] > 0.3])"),),
        "a mean of means: each rank divides parts of its loss by its own counts",
        "loss = ",
    ),
}


HALF = """\
own = Subset(data, range(rank, len(data), world))
order = torch.Generator().manual_seed(rank)
loader = DataLoader(own, 8, sampler=torch.utils.data.RandomSampler(own, num_samples=len(own) // 2, generator=order))
"""
ALONE = "    if rank == 0: print(sum(len(x) for x, _ in DataLoader(make_data(29), 8)))\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(((SHARED_OUT, HALF), (SET_EPOCH, "")), id="a sampler that visits half of a rank's data"),
        pytest.param((("dist.destroy", ALONE + "dist.destroy"),), id="a loader of rank 0 alone"),
    ],
)
def test_data_that_are_not_split_twice_are_alike(changes: Changes, certify: Certify) -> None:
    certificate = certify(changed(*changes))
    assert certificate.verdict == ALIKE, str(certificate)


def judge(certificate: Certificate, text: str, words: str, line: str) -> None:
    assert certificate.verdict == DIFFERENT, str(certificate)
    assert words in certificate.cause, str(certificate)
    assert f"train.py:{line_of(text, line)}" in certificate.cause, str(certificate)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLERS)
def test_samples_that_ranks_share_are_named(name: str, certify: Certify) -> None:
    changes, words = SAMPLERS[name]
    certificate = certify(changed(*changes))
    line = "sampler = " if "DistributedSampler" in words else "def __iter__" if "stream" in name else "loader = "
    # the line was that of the sampler, or of the loader
    line = "random_split(" if "split that" in name else "Subset(" if "slices" in name or "again" in name else line
    judge(certificate, changed(*changes), words, "for i, (x, y)" if "get the epoch" in words else line)
    if "seed for each rank" in name:
        assert "of 96 are on no rank" in certificate.first_difference


@pytest.mark.slow
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_differ_have_a_cause_and_a_line(name: str, certify: Certify) -> None:
    changes, words, line = NUMBERS[name]
    judge(certify(changed(*changes)), changed(*changes), words, line)


OLDER_SHARDS = """\
make_model()
from torch.distributed.fsdp import FullyShardedDataParallel
model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
"""
LOOP_HEAD = LOOP[: LOOP.index("        loss")]
ENDLESS = """\
def batches():
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


endless = batches()
for step in range(8):
    for i in range(4 // world):
        x, y = next(endless)
"""

MODEL_OF_LAYERS = """\
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
"""
RECURRENT = """\
    return Recurrent()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.GRU(1, 8, num_layers=2, dropout=0.4, batch_first=True)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.layers(x.unsqueeze(-1))[0][:, -1])
"""
MASKED = """\
def masked(samples):
    x, y = (torch.stack(each) for each in zip(*samples))
    return x * torch.bernoulli(torch.full_like(x, 0.8)), y


sampler = DistributedSampler(data)
loader = DataLoader(data, 8, sampler=sampler, collate_fn=masked)
"""
MADE = "optimizer = torch.optim"
SEEDED = (MADE, f"torch.manual_seed(rank + 1)\n{MADE}")

DRAWN = """\
class Drawn(torch.utils.data.Sampler):
    def __iter__(self):
        generator = torch.Generator().manual_seed(9)
        for _ in range(6):
            yield torch.randint(96, (8 * world,), generator=generator)[rank::world].tolist()


loader = DataLoader(data, batch_sampler=Drawn())
"""
HEAD = """\
model.module[2] = nn.Linear(32, 1)
model = DistributedDataParallel(model.module)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
"""

HEALTHY: dict[str, Changes] = {
    # it was called different: no wrapper averages gradients
    "an optimizer that reduces gradients in its step": (
        (MODEL, "make_model()"),
        ("torch.optim.SGD(", "Reducing("),
        ("dist.init", REDUCING),
    ),
    # it was called different: gradients are averaged too late
    "weights that are averaged after each step of SGD": (
        (MODEL, "make_model()"),
        (STEP, STEP + "        [(dist.all_reduce(p.data), p.data.div_(world)) for p in model.parameters()]\n"),
    ),
    "a sampler of the script that draws with replacement for all ranks": ((SHARED_OUT, DRAWN), (SET_EPOCH, "")),
    "a new head in the second part of the training": (
        (
            LOOP,
            LOOP.replace("range(3)", "range(1)") + "        if i == 1: break\n" + HEAD + LOOP.replace("(3)", "(1, 3)"),
        ),
    ),
    "a scheduler that uses a loss of all ranks": (
        ("sampler = ", "plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)\nsampler = "),
        ("dist.destroy", "    dist.all_reduce(loss.data)\n    plateau.step(loss.detach())\ndist.destroy"),
    ),
    "a recurrent network that drops out between its layers": ((MODEL_OF_LAYERS, RECURRENT),),
    "masks that are drawn where samples are put together": ((SHARED_OUT, MASKED), SEEDED),
    "a number of torch's that each rank draws for its batch": (
        (LOSS, "F.mse_loss(model(x * torch.rand(())), y)"),
        SEEDED,
    ),
    "random numbers of a distribution": (
        (LOSS, "F.mse_loss(model(x * torch.distributions.Beta(2.0, 2.0).sample((len(x), 1))), y)"),
        SEEDED,
    ),
    "random numbers within a function of torch's": (
        (LOSS, "F.mse_loss(model(F.gumbel_softmax(x, tau=2.0)), y)"),
        SEEDED,
    ),
    "clipping by keywords": (
        (STEP, STEP.replace("optimizer.step()", "nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.3)") + STEP),
    ),
    "a permutation that mixes samples": ((LOSS, "F.mse_loss(model(0.7 * x + 0.3 * x[torch.randperm(len(x))]), y)"),),
    "the older wrapper of shards, with a clipping of its own": (
        (MODEL + "\n", OLDER_SHARDS),
        (STEP, STEP.replace("optimizer.step()", "model.clip_grad_norm_(1.0)") + STEP),
    ),
    "an accumulation that follows the ranks, of batches without end": (
        (LOOP_HEAD, ENDLESS),
        (LOSS, f"{LOSS} / (4 // world)"),
        (CLEAR, "        if i == 0: optimizer.zero_grad()"),
        (STEP, STEP.replace("optimizer", "if i + 1 == 4 // world: optimizer")),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", [*(changed(*changes) for changes in HEALTHY.values()), LOCKSTEP], ids=[*HEALTHY, "fsdp"]
)
def test_a_healthy_script_is_alike(text: str, certify: Certify) -> None:
    """They failed, were called different, or did not end.

    The last one is a training_step that calls a part of a sharded module: ranks seemed to hold parts of a model.
    """
    certificate = certify(text)
    assert certificate.verdict == ALIKE, str(certificate)
    assert ("the optimizer reduces gradients in its step" in str(certificate)) == ("Reducing(" in text)


WITHIN = """\
for epoch in range(3):
    with model.join(divide_by_initial_world_size=False) if world > 1 else contextlib.nullcontext():
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
"""
UNEVEN = """\
loader = DataLoader(Subset(data, [i for i in range(56) if (i // 8) % world == rank]), 8)
"""


@pytest.mark.slow
@pytest.mark.parametrize("by_all", [False, True])
def test_epochs_of_other_lengths_within_join_are_alike(by_all: bool, certify: Certify) -> None:
    """From the second epoch on the steps of one rank were compared with others: a healthy script was different."""
    loop = WITHIN.replace("False", str(by_all))
    text = changed((SHARED_OUT, UNEVEN), (LOOP, loop)).replace("import os,", "import contextlib, os,")
    certificate = certify(text)
    assert certificate.verdict == ALIKE, str(certificate)
    assert "Join: from step 3 on some ranks have no data" in str(certificate)


@pytest.mark.slow
def test_a_rank_that_has_made_its_steps_inside_join_is_not_called_one_that_others_wait_for(certify: Certify) -> None:
    """Rank 1 started the next epoch after rank 0 had ended, and waited: a healthy script was called different."""
    much_less = "loader = DataLoader(Subset(data, range(56)[:40] if rank == 0 else range(56)[40:]), 8)\n"
    whole = f"if world == 1:\n    loader = DataLoader(data, 8)\nelse:\n    {much_less}"
    text = changed((SHARED_OUT, whole), (LOOP, WITHIN)).replace("import os,", "import contextlib, os,")
    certificate = certify(text)
    assert certificate.verdict == ALIKE, str(certificate)


@pytest.mark.slow
def test_a_loss_that_is_divided_by_the_global_batch_size_of_the_settings_cannot_be_judged(certify: Certify) -> None:
    """One process gets the samples of all ranks, but divides by the size for one: a healthy script was different."""
    certificate = certify(changed((LOSS, "F.mse_loss(model(x), y, reduction='sum') * world / (8 * world)")))
    assert certificate.verdict == UNKNOWN, str(certificate)
    assert "one process divides the loss by 8, the number of samples of a rank's batch" in certificate.reasons[0]


@pytest.mark.slow
def test_an_optimizer_of_rank_0_alone_cannot_be_verified(certify: Certify) -> None:
    """Rank 0 was stopped after its steps, and rank 1 waited for its broadcasts: it was called a deadlock."""
    alone = """\
        for p in model.parameters():
            dist.reduce(p.grad, 0)
        if rank == 0:
            optimizer.step()
        for p in model.parameters():
            dist.broadcast(p.data, 0)
"""
    certificate = certify(changed((MODEL, "make_model()"), (STEP, alone)))
    assert certificate.verdict == UNKNOWN
    assert certificate.reasons[0].startswith("rank 1 made no optimizer step, but others did"), str(certificate)


@pytest.mark.slow
def test_a_gradient_that_a_rank_scales_is_named_with_its_line(certify: Certify) -> None:
    """It was called a window that is synchronized only in part."""
    scale = "[p.grad.mul_(1 + 0.01 * rank) for p in model.parameters()]"
    text = changed((STEP, STEP.replace("optimizer.step()", scale) + STEP))
    certificate = certify(text)
    assert certificate.verdict == DIFFERENT
    assert "rank 1: 1.01 times the mean" in certificate.cause
    assert f"train.py:{line_of(text, 'p.grad.mul_')}" in certificate.cause
    assert "window" not in str(certificate)


@pytest.mark.slow
def test_a_module_that_reads_the_rank_is_named_with_the_line_that_reads_it(certify: Certify) -> None:
    """In the first step the trace of one process began with the loading of parameters, and its first call differed."""
    bug = BUGS["rank_in_model"]
    certificate = certify(bug.text)
    assert certificate.verdict == DIFFERENT, str(certificate)
    assert f"train.py:{line_of(bug.text, bug.cause)}" in certificate.cause


LIGHTNING = """\
import os
import lightning, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Tokens(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 20))

    def training_step(self, batch, i):
        logits = self.net(batch[0][:, :-1]).flatten(0, 1)
        return nn.functional.cross_entropy(logits, batch[0][:, 1:].flatten(), ignore_index=0)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


lightning.seed_everything(0)
tokens = torch.randint(1, 20, (96, 12))
tokens[torch.arange(12) >= torch.randint(3, 12, (96, 1))] = 0
flags = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, max_epochs=2)
trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", **flags)
trainer.fit(Tokens(), DataLoader(TensorDataset(tokens), 8))
"""


@pytest.mark.slow
def test_a_mean_of_means_of_lightnings_is_named_with_the_modules_names(certify: Certify) -> None:
    """Its steps are closures: gradients were taken for unknown, and parameters had no names."""
    pytest.importorskip("lightning")
    certificate = certify(LIGHTNING)
    assert "gradient of net.1.weight" in certificate.first_difference
    judge(certificate, LIGHTNING, "a mean of means", "cross_entropy(")


SAME_NOISE = "torch.randn(x.shape, generator=noise)"
BF16 = "fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))"
POLICY = ((MODEL + "\n", SHARDED.replace("fully_shard(model)", BF16)), (LOSS, "F.mse_loss(model(x).float(), y)"))
OWN_NUMBERS = "each rank draws its own random numbers from Python's"
RANK = "rank, world = dist.get_rank(), dist.get_world_size()\n"
OWN_GENERATOR = (LOSS, "F.mse_loss(model(x * own.uniform(0.5, 1.5)), y)")
EXPECTED: dict[str, tuple[str, Changes]] = {
    "policy": ("MixedPrecisionPolicy was disabled", POLICY),
    "negatives": (
        "in-batch negatives",
        ((LOSS, "F.cross_entropy(-torch.cdist(model(x), y), torch.arange(len(x)))"),),
    ),
    "noise that is the same on all ranks": (
        "all ranks draw the same random numbers for different samples at train.py:",
        (
            (RANK, f"{RANK}noise = torch.Generator().manual_seed(5)\n"),
            (LOSS, f"F.mse_loss(model(x + 0.1 * {SAME_NOISE}), y)"),
        ),
    ),
    "random": (OWN_NUMBERS, ((LOSS, "F.mse_loss(model(x * random.uniform(0.5, 1.5)), y)"),)),
    # with generators of their own, the code seemed to depend on the rank
    "random.Random": (OWN_NUMBERS, ((RANK, f"{RANK}own = random.Random(rank)\n"), OWN_GENERATOR)),
    "numpy.default_rng": (
        OWN_NUMBERS,
        ((RANK, f"{RANK}import numpy\nown = numpy.random.default_rng(rank)\n"), OWN_GENERATOR),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("words", "changes"), EXPECTED.values(), ids=list(EXPECTED))
def test_an_expected_difference_is_noted(words: str, changes: Changes, certify: Certify) -> None:
    """With rank 0's random numbers of Python's for the samples of each, the code seemed to depend on the rank."""
    certificate = certify(changed(*changes))
    assert certificate.verdict == ALIKE, str(certificate)
    assert any(words in note for note in certificate.notes)


FLAT = """\
    return Flat()


class Flat(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Parameter(torch.randn(8, 32) / 3), nn.Parameter(torch.randn(32) / 6)

    def forward(self, x):
        return (x @ self.first).tanh() @ self.last
"""
PARTED = "(model(x) - y[:, 0]).square()"
MADE_OF = "optimizer = torch.optim.SGD(model.parameters(), lr=0.05)\n"
OLDER_OPTIMIZER = SHARDED.replace("make_model()\n", "make_model()\n" + MADE_OF)
PARTED_LOSS = f"{PARTED}[x[:, 0] > -0.5].mean() + {PARTED}[x[:, 1] > -0.5].mean()"
REFUSED: dict[str, tuple[Changes, str]] = {
    # it was called a sum over samples: one process has the samples of all ranks in a batch
    "a loss that is divided by the batch size of a rank": (
        ((LOSS, "F.mse_loss(model(x), y, reduction='sum') / 8"),),
        "one process divides the loss by 8, the number of samples of a rank's batch",
    ),
    "a loss that is not a number": (((LOSS, f"{LOSS} * float('nan')"),), NOT_FINITE),
    # they were called comparisons of samples, and the scripts alike
    "means of a model that no layer shows": (
        ((MODEL_OF_LAYERS, FLAT), (LOSS, PARTED_LOSS)),
        "or each rank divides it by its own",
    ),
    "an optimizer that is older than the shards": (
        ((MADE_OF, ""), (MODEL + "\n", OLDER_OPTIMIZER)),
        "after calls that replace parameters, such as fully_shard",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_a_script_that_proves_nothing_is_refused(name: str, certify: Certify) -> None:
    changes, words = REFUSED[name]
    certificate = certify(changed(*changes))
    assert certificate.verdict == UNKNOWN, str(certificate)
    assert words in certificate.reasons[0]
