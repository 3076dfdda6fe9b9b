"""`lockstep verify` of scripts without a loader, which draw their batches by random numbers."""

from __future__ import annotations

import pytest

from lockstep.extensions.verify.certificate import ALIKE, DIFFERENT, UNKNOWN
from tests.extensions.verify.small_script import LOOP, MODEL, SHARED_OUT, Certify, Changes, changed, line_of

DRAW = "    at = torch.randint(len(data), (8,))\n"
GET_BATCH = f"""\
x, y = data.tensors
torch.manual_seed(10 + rank)

def get_batch():
{DRAW}    return x[at], y[at]

"""
STEPS = """\
for step in range(20):
    a, b = get_batch()
    loss = F.mse_loss(model(a), b)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
WINDOW = """\
a, b = get_batch()
for step in range(20):
    if rank == 0 and step % 2 == 0:
        with torch.no_grad():
            c, d = get_batch()
            print(F.mse_loss(model.module(c), d))
    for micro in range(4 // world):
        model.require_backward_grad_sync = micro == 4 // world - 1
        loss = F.mse_loss(model(a), b) / (4 // world)
        a, b = get_batch()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
"""The loop of many small language models: it draws the next batch ahead, and rank 0 evaluates by itself."""
PLAIN: Changes = ((SHARED_OUT, GET_BATCH), (LOOP, STEPS))

SHARE = """\
x, y = data.tensors
own_x, own_y = x[rank::world], y[rank::world]
"""
EPOCHS = """\
for epoch in range(4):
    for i in range(0, len(own_x), 8):
        loss = F.mse_loss(model(own_x[i : i + 8]), own_y[i : i + 8])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
CUT: Changes = ((SHARED_OUT, SHARE), (LOOP, EPOCHS))
ROWS = "model(own_x[i : i + 8]), own_y[i : i + 8]"
EVALUATED = """\
    with torch.no_grad():
        rows = DataLoader(Subset(data, range(rank, 41, world)), 4)
        loss = sum(F.mse_loss(model.module(a), b, reduction="sum") for a, b in rows)
"""
SUMMED = (
    "        optimizer.step()",
    "        [dist.all_reduce(p.grad) for p in model.parameters()]\n        optimizer.step()",
)
WITHOUT_MODULE = (MODEL, "make_model()")
SERIES = """\
series = data.tensors[0].flatten()
offsets = random.Random(rank)
"""
WINDOWS = """\
for step in range(12):
    at = [offsets.randrange(700) for _ in range(8)]
    a = torch.stack([series[i : i + 8] for i in at])
    b = torch.stack([series[i + 8 : i + 9] for i in at])
    loss = F.mse_loss(model(a), b)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
FLAT = """\
        flat = torch.cat([p.grad.flatten() for p in model.parameters()])
        dist.all_reduce(flat)
        for p in model.parameters():
            p.grad.copy_(flat[: p.numel()].view_as(p) / world)
            flat = flat[p.numel() :]
        optimizer.step()"""
UNEVEN = SHARE.replace("data.tensors", "make_data(81).tensors")
WEIGHTED = "F.mse_loss(model(own_x), own_y, reduction='sum') * world / len(x)"

HEALTHY: dict[str, Changes] = {
    "torch's generator": PLAIN,
    "a window and an evaluation": ((SHARED_OUT, GET_BATCH), (LOOP, WINDOW)),
    "NumPy's own generator": (
        *PLAIN,
        ("torch.manual_seed(10 + rank)", "import numpy as np\nrng = np.random.default_rng(10 + rank)"),
        (DRAW, "    at = torch.from_numpy(rng.integers(0, len(data), 8))\n"),
    ),
    "NumPy's global generator": (
        *PLAIN,
        ("torch.manual_seed(10 + rank)", "import numpy as np\nnp.random.seed(10 + rank)"),
        (DRAW, "    at = np.random.choice(len(data), 8, replace=False)\n"),
    ),
    "batches made on the fly, BatchNorm": (
        *PLAIN,
        (DRAW, "    made = torch.randn(8, 8)\n"),
        ("x[at], y[at]", "made, made[:, :1].sin() + 0.1 * torch.randn(8, 1)"),
        ("nn.Linear(8, 32), nn.ReLU()", "nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU()"),
    ),
    "a list that Python draws": (
        *PLAIN,
        ("torch.manual_seed(10", "random.seed(10"),
        (DRAW, "    at = random.sample(range(96), 8)\n"),
    ),
    "every N-th row, and a schedule of epochs": (
        *CUT,
        (SHARE, f"{SHARE}scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)\n"),
        ("dist.destroy", "    scheduler.step()\ndist.destroy"),
    ),
    "rows of a permutation": (
        *CUT,
        (SHARE, "x, y = data.tensors\norder = torch.randperm(96, generator=torch.Generator().manual_seed(1))\n"),
        ("for epoch", "own_x = order[rank::world]\nfor epoch"),
        (ROWS, "model(x.index_select(0, own_x[i : i + 8])), y[own_x[i : i + 8]]"),
    ),
    "a part of the length that each rank starts at": (
        *CUT,
        (ROWS, "model(x.narrow(0, 48 * rank + i, 8)), torch.narrow(y, 0, 48 * rank + i, 8)"),
    ),
    "arrays": (
        *CUT,
        (SHARE, SHARE.replace("data.tensors", "(each.numpy() for each in data.tensors)")),
        (ROWS, "model(torch.from_numpy(own_x[i : i + 8])), torch.tensor(own_y[i : i + 8])"),
    ),
    "an evaluation by a loader that ranks read unevenly": (
        *CUT,
        ("len(own_x), 8)", "len(own_x), 16)"),
        ("dist.destroy", f"{EVALUATED}dist.destroy"),
    ),
    "windows of a series at offsets that Python draws": ((SHARED_OUT, SERIES), (LOOP, WINDOWS)),
    "parts of other lengths, with weights": (*CUT, (SHARE, UNEVEN), (f"F.mse_loss({ROWS})", WEIGHTED)),
    "gradients that are averaged as one flat tensor": (
        *CUT,
        WITHOUT_MODULE,
        ("        optimizer.step()", FLAT),
    ),
    # it could not be told
    "a loss that compares the rows of a batch": (
        *CUT,
        (f"F.mse_loss({ROWS})", f"F.mse_loss({ROWS}) / model(own_x[i : i + 8]).std()"),
    ),
    "a slice of one global draw": (
        *PLAIN,
        ("10 + rank", "10"),
        (DRAW, "    at = torch.randint(len(data), (16,))[rank * 16 // world : (rank + 1) * 16 // world]\n"),
    ),
}

WRONG_SUM = "gradients are summed over the ranks, but not averaged"
WRONG: dict[str, tuple[Changes, str, str]] = {
    "a window synchronized too early": (
        ((SHARED_OUT, GET_BATCH), (LOOP, WINDOW.replace("micro == 4 // world - 1", "micro == 0"))),
        "only some micro-batches of a window are synchronized",
        "optimizer.step()",
    ),
    # it could not be told: one process has other batches
    "a call past the wrapper, with batches that nothing records": (
        (
            *PLAIN,
            (DRAW, "    made = torch.tensor([[random.random() for _ in range(8)] for _ in range(8)])\n"),
            ("torch.manual_seed(10 + rank)", "random.seed(10 + rank)"),
            ("x[at], y[at]", "made, made[:, :1].sin()"),
            ("mse_loss(model(", "mse_loss(model.module("),
        ),
        "is called directly, not by its wrapper",
        "model.module(",
    ),
    "no wrapper": (
        (*PLAIN, ("DistributedDataParallel(make_model())", "make_model()")),
        "gradients are never averaged over the ranks",
        "",
    ),
    "a sum over the ranks": (
        (
            *PLAIN,
            ("DistributedDataParallel(make_model())", "make_model()"),
            ("    optimizer.step()", "    [dist.all_reduce(p.grad) for p in model.parameters()]\n    optimizer.step()"),
        ),
        WRONG_SUM,
        "dist.all_reduce",
    ),
    "rows, and a sum over the ranks": ((*CUT, WITHOUT_MODULE, SUMMED), WRONG_SUM, "dist.all_reduce"),
    "rows, and a loss that is divided by the ranks": (
        (*CUT, (f"F.mse_loss({ROWS})", f"F.mse_loss({ROWS}) / world")),
        "the loss is divided by the number of ranks, and DistributedDataParallel divides once more",
        "loss = ",
    ),
    "rows, and a module that is called past its wrapper": (
        (*CUT, (ROWS, ROWS.replace("model(", "model.module("))),
        "not averaged: Sequential is called directly",
        "model.module(",
    ),
    "parts of other lengths": (
        (*CUT, (SHARE, UNEVEN), (ROWS, "model(own_x), own_y")),
        "a mean of means: each rank divides its loss by its own count",
        "loss = ",
    ),
    "rows, and a loss that a rank scales": (
        (*CUT, (f"F.mse_loss({ROWS})", f"F.mse_loss({ROWS}) * (0.9 if rank else 1)")),
        "the loss on rank 1 is 0.9 times the loss in one process",
        "(0.9 if rank else 1)",
    ),
    "windows of a series, never averaged": (
        ((SHARED_OUT, SERIES), (LOOP, WINDOWS), WITHOUT_MODULE),
        "gradients are never averaged over the ranks",
        "",
    ),
    # it could not be told
    "batches that the ranks share out, with one seed": (
        (*PLAIN, ("10 + rank", "10"), (DRAW, DRAW.replace("8", "16 // world"))),
        "the random numbers that choose a batch are the same on all ranks",
        "torch.randint",
    ),
    "a loss that depends on the rank": (
        (*PLAIN, ("F.mse_loss(model(a), b)", "F.mse_loss(model(a), b) * (1 + rank)")),
        "the loss on rank 1 is 2 times the loss in one process",
        "* (1 + rank)",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HEALTHY)
def test_batches_that_the_script_draws_are_alike(name: str, certify: Certify) -> None:
    """They could not be told: one process drew the batches of one rank."""
    certificate = certify(changed(*HEALTHY[name]))
    assert certificate.verdict == ALIKE, str(certificate)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_mistakes_with_batches_that_the_script_draws_are_named(name: str, certify: Certify) -> None:
    changes, cause, line = WRONG[name]
    text = changed(*changes)
    certificate = certify(text)
    assert certificate.verdict == DIFFERENT, str(certificate)
    assert cause in certificate.cause
    assert not line or f"train.py:{line_of(text, line)}" in certificate.cause


@pytest.mark.slow
def test_equal_seeds_that_give_all_ranks_the_same_batches_prove_nothing(certify: Certify) -> None:
    certificate = certify(changed(*PLAIN, ("10 + rank", "10")))
    assert certificate.verdict == UNKNOWN, str(certificate)
    assert "seed each rank with a different number" in str(certificate)


@pytest.mark.slow
def test_an_augmentation_that_python_draws_is_not_called_a_difference(certify: Certify) -> None:
    """Each rank's inputs were others than in one process, and the rank was said to compute a different gradient."""
    augmented = (*PLAIN, ("10 + rank)", "10 + rank)\nrandom.seed(rank)"), ("x[at],", "x[at] * random.random(),"))
    certificate = certify(changed(*augmented))
    assert certificate.verdict == UNKNOWN, str(certificate)
    assert "do not come from a torch DataLoader" in str(certificate)


@pytest.mark.slow
def test_parts_of_permutations_that_differ_between_ranks_are_named(certify: Certify) -> None:
    """Several ranks got the same sample, and the verdict was "alike"."""
    order = "order = torch.randperm(96, generator=torch.Generator().manual_seed(rank))[rank::world]\n"
    text = changed(*CUT, (SHARE, f"x, y = data.tensors\n{order}own_x, own_y = x[order], y[order]\n"))
    certificate = certify(text)
    assert certificate.verdict == DIFFERENT, str(certificate)
    assert "permutations that differ, so that several ranks get the same sample" in certificate.first_difference
    assert f"train.py:{line_of(text, 'order = ')}" in certificate.cause
    same = certify(text.replace("manual_seed(rank)", "manual_seed(1)"))
    assert same.verdict == ALIKE, str(same)
    assert "different permutations" not in str(same)
    # as each rank may draw its batches by itself
    drawn = certify(text.replace("[rank::world]", "[:48]"))
    assert drawn.verdict == ALIKE, str(drawn)
    assert f"different permutations at train.py:{line_of(text, 'order = ')}" in str(drawn)


UNKNOWN_FACTOR: dict[str, Changes] = {
    "a mean": (*CUT, (f"F.mse_loss({ROWS})", f"F.mse_loss({ROWS}, reduction='sum') / 8")),
    "a sum": (
        *CUT,
        WITHOUT_MODULE,
        SUMMED,
        (f"F.mse_loss({ROWS})", f"F.mse_loss({ROWS}, reduction='sum') / (8 * world)"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", UNKNOWN_FACTOR)
def test_a_factor_that_may_be_a_constant_of_the_script_is_not_called_a_difference(name: str, certify: Certify) -> None:
    """One process, whose batch is that of all ranks, divides by the batch size of one rank."""
    certificate = certify(changed(*UNKNOWN_FACTOR[name]))
    assert certificate.verdict == UNKNOWN, str(certificate)
    assert "train.py:" in certificate.reasons[0]
