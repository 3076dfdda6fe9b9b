"""Ways to report a metric: `lockstep verify` names numbers that are not those of one process, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.extensions.verify.certificate import ALIKE, DIFFERENT, Certificate
from lockstep.extensions.verify.compare import REPORTS
from tests.extensions.verify.small_script import LOOP, Certify, changed, line_of

ROOT = Path(__file__).parents[3]

VALID = """\
valid = make_data(29)
own_loader = DataLoader(Subset(valid, range(29)[:19] if rank == 0 and world > 1 else range(29)[19:]), 8)
padded = DataLoader(valid, 8, sampler=DistributedSampler(valid, shuffle=False))
whole = DataLoader(valid, 8)


@torch.no_grad()
def predict(samples):
    model.eval()
    found = [(model.module(x).flatten(), y.flatten()) for x, y in samples]
    model.train()
    return (torch.cat(each) for each in zip(*found))


def right_of(p, y):
    return ((p > 0) == (y > 0)).sum()


def f1_of(p, y):
    return 2 * ((p > 0) & (y > 0)).sum() / ((p > 0).sum() + (y > 0).sum())


def averaged(number):
    number = torch.as_tensor(number, dtype=torch.float32)
    dist.all_reduce(number)
    return number / world


def summed(*numbers):
    numbers = torch.stack([torch.as_tensor(each, dtype=torch.float32) for each in numbers])
    dist.all_reduce(numbers)
    return numbers


"""


def evaluating(text: str) -> str:
    """A training script that evaluates and prints after each epoch."""
    indented = "".join(f"    {line}\n" for line in text.strip().splitlines())
    return changed((LOOP, VALID + LOOP + indented))


LOSS = "p, y = predict(own_loader)\nloss = F.mse_loss(p, y)\n"
PRINT = "if rank == 0: print(f'epoch {epoch}: loss {loss:.4f}')\n"

HEALTHY = {
    "sums and counts": (
        "p, y = predict(own_loader)\nerror = F.mse_loss(p, y, reduction='sum')\n"
        "error, n, right = summed(error, len(y), right_of(p, y))\n"
        "if rank == 0: print(f'loss {error / n:.4f} accuracy {right / n:.2%} of {n:.0f}')"
    ),
    "predictions that are gathered": (
        "found = [None] * world\ndist.all_gather_object(found, [each.tolist() for each in predict(own_loader)])\n"
        "p, y = (torch.tensor(sum((each[i] for each in found), [])) for i in (0, 1))\n"
        "if rank == 0: print('f1', f1_of(p, y).item())"
    ),
    "rank 0 evaluates everything": f"if rank == 0:\n    loss = F.mse_loss(*predict(whole))\n    {PRINT}",
    "all ranks evaluate everything": f"p, y = predict(whole)\nloss = averaged(F.mse_loss(p, y))\n{PRINT}",
    "a mean over ranks of losses of batches, of which one is shorter": (
        "model.eval()\nlosses = [F.mse_loss(model.module(x), y) for x, y in own_loader]\nmodel.train()\n"
        f"loss = averaged(sum(losses) / len(losses)).item()\n{PRINT}"
    ),
    "the same mean, which one process does not reduce": (
        "model.eval()\nlosses = [F.mse_loss(model.module(x), y) for x, y in own_loader]\nmodel.train()\n"
        f"loss = sum(losses) / len(losses)\nif world > 1: loss = averaged(loss)\n{PRINT}"
    ),
    "each rank prints its own": f"{LOSS}print(f'rank {{rank}}: loss {{loss:.4f}} acc {{right_of(p, y) / len(y):.3f}}')",
    "numbers of each rank that rank 0 prints": (
        f"{LOSS}found = [None] * world\ndist.all_gather_object(found, loss.item())\nif rank == 0: print(epoch, found)"
    ),
    "a time, a speed and a number of samples for each rank": (
        f"import time\nstart = time.perf_counter()\n{LOSS}duration = averaged(time.perf_counter() - start)\n"
        "n = averaged(len(y))\n"
        "if rank == 0: print(f'{duration:.6f} s, {n / duration:.3f} samples/s, {n:.1f} samples, {world} ranks')"
    ),
    "the largest loss of a rank": f"{LOSS}dist.all_reduce(loss, op=dist.ReduceOp.MAX)\n{PRINT}",
    "data of its own on each rank": (
        "own = TensorDataset(*(each[rank::world] for each in valid.tensors))\n"
        "p, y = predict(DataLoader(own, 8))\nright, n = summed(right_of(p, y), len(y))\n"
        "if rank == 0: print(f'accuracy {right / n:.6f}')"
    ),
    "a training loss that is averaged": f"loss = averaged(loss.detach())\n{PRINT}",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HEALTHY)
def test_a_right_report_is_alike(name: str, certify: Certify) -> None:
    certificate = certify(evaluating(HEALTHY[name]))
    assert certificate.verdict == ALIKE, str(certificate)
    assert not certificate.notes, str(certificate)


EQUAL_SAMPLES = (
    "twice = TensorDataset(*(torch.cat([each[:28], each[:1]]) for each in valid.tensors))\n"
    "own = predict(DataLoader(twice, 5, sampler=DistributedSampler(twice, shuffle=False)))\n"
    "found = [None] * world\ndist.all_gather_object(found, [each.tolist() for each in own])\n"
    "rows = [row for rows in zip(*(zip(*each) for each in found)) for row in rows][:29]\n"
    "if rank == 0: print(f'mse {sum((p - y) ** 2 for p, y in rows) / len(rows):.4f} n {len(rows):.1f}')"
)


@pytest.mark.slow
def test_one_of_two_equal_samples_is_not_taken_for_a_repeated_one(certify: Certify) -> None:
    """The samples were compared by their contents: a right report of 29 samples was called different."""
    certificate = certify(evaluating(EQUAL_SAMPLES))
    assert certificate.verdict == ALIKE, str(certificate)


BY_HAND = "with torch.no_grad(): p, y = model.module(valid.tensors[0][rank::world]), valid.tensors[1][rank::world]\n"
HEALTHY["sums and counts of rows that are cut by hand"] = (
    f"{BY_HAND}error, n = summed(F.mse_loss(p, y, reduction='sum'), len(y))\n"
    "if rank == 0: print(f'loss {error / n:.4f}')"
)
HEALTHY["a mean over ranks of losses of batches that are cut by hand"] = (
    "with torch.no_grad():\n    own = [each[rank::world] for each in valid.tensors]\n"
    "    parts = [(model.module(x), y) for x, y in zip(*(each.split(8) for each in own))]\n"
    f"loss = averaged(sum(F.mse_loss(*each) for each in parts) / len(parts))\n{PRINT}"
)

WRONG = {
    "a mean of means of rows that are cut by hand": (
        f"{BY_HAND}loss = averaged(F.mse_loss(p, y))\n{PRINT}",
        "the mean of means over different numbers of samples is not",
        "dist.all_reduce(number)",
    ),
    "a mean of means": (
        f"{LOSS}loss = averaged(loss)\n{PRINT}",
        "the mean of means over different numbers of samples is not",
        "dist.all_reduce(number)",
    ),
    "a mean of means that one process does not reduce": (
        f"{LOSS}if world > 1: loss = averaged(loss)\n{PRINT}",
        "the mean of means over different numbers of samples is not",
        "dist.all_reduce(number)",
    ),
    "a mean of gathered means": (
        f"{LOSS}found = [torch.zeros(()) for _ in range(world)]\ndist.all_gather(found, loss)\n"
        f"loss = torch.stack(found).mean()\n{PRINT}",
        "the mean of means over different numbers of samples is not",
        "dist.all_gather(found, loss)",
    ),
    "a perplexity from a mean of means": (
        f"{LOSS}loss = averaged(loss).exp()\n{PRINT}",
        "the mean of means over different numbers of samples is not",
        "dist.all_reduce(number)",
    ),
    "an accuracy in percent": (
        f"{LOSS}accuracy = 100 * averaged(right_of(p, y) / len(y))\nif rank == 0: print('val', accuracy)",
        "the mean of means over different numbers of samples is not",
        "dist.all_reduce(number)",
    ),
    "a mean of F1 scores": (
        "p, y = predict(padded)\nscore = averaged(f1_of(p, y))\nif rank == 0: print(f'f1: {score:.4f}')",
        "the mean of the ranks' own numbers is not the value for all samples",
        "dist.all_reduce(number)",
    ),
    "a mean of roots": (
        f"{LOSS}loss = averaged(loss.sqrt())\nif rank == 0: print(f'rmse {{loss:.4f}}')",
        "the mean of the ranks' own numbers is not the value for all samples",
        "dist.all_reduce(number)",
    ),
    "a sum of means": (
        f"{LOSS}loss = summed(loss)[0]\n{PRINT}",
        "the sum of means over different numbers of samples is not",
        "dist.all_reduce(numbers)",
    ),
    # it was alike: only numbers themselves were compared, not one divided by another
    "sums and counts of predictions that depend on the rank": (
        "p, y = predict(own_loader)\nerror, n = summed(F.mse_loss(p * (1 + rank), y, reduction='sum'), len(y))\n"
        "if rank == 0: print(f'loss {error / n:.4f}')",
        "the sum over all ranks is not that of one process",
        "dist.all_reduce(numbers)",
    ),
    "a sum over a local count": (
        "p, y = predict(own_loader)\nright = summed(right_of(p, y))[0]\n"
        "if rank == 0: print(f'accuracy {right / len(y):.4f}')",
        "divided by the number of samples of rank 0",
        "dist.all_reduce(numbers)",
    ),
}


def judge(certificate: Certificate, text: str, words: str, line: str) -> None:
    assert certificate.verdict == DIFFERENT, str(certificate)
    assert words in certificate.cause, str(certificate)
    assert f"(train.py:{line_of(text, line)}" in certificate.cause, str(certificate)
    assert "one process" in certificate.evidence
    assert any(row.what == REPORTS and row.outcome.startswith("DIFFERENT") for row in certificate.rows)


def test_a_mean_of_means_is_named_with_its_line(certify: Certify) -> None:
    text, words, line = WRONG["a mean of means"]
    certificate = certify(evaluating(text))
    judge(certificate, evaluating(text), words, line)
    page = (ROOT / "docs/verify.md").read_text()
    assert all(part in page for part in (certificate.first_difference, certificate.cause, certificate.evidence))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in WRONG if name != "a mean of means"])
def test_a_wrong_report_is_named_with_its_line(name: str, certify: Certify) -> None:
    text, words, line = WRONG[name]
    judge(certify(evaluating(text)), evaluating(text), words, line)


AHEAD = """\
def ahead(batches):
    batches = iter(batches)
    newest = next(batches)
    for following in batches:
        yield newest
        newest = following
    yield newest


"""


@pytest.mark.slow
def test_an_evaluation_after_a_loader_that_is_read_ahead_is_compared(certify: Certify) -> None:
    """One more step followed, as with Accelerate's loaders, and the script was stopped there."""
    text, words, line = WRONG["a mean of means"]
    script = evaluating(text).replace(VALID, VALID + AHEAD).replace("enumerate(loader)", "enumerate(ahead(loader))")
    certificate = certify(script)
    judge(certificate, script, words, line)
    assert certificate.steps == 5


@pytest.mark.slow
def test_a_sample_that_a_sampler_repeats_is_named(certify: Certify) -> None:
    """Only repetitions of DistributedSampler were found, but Accelerate's loaders repeat samples as well."""
    text = evaluating(
        "own = [*range(29), 0][rank::world]\np, y = predict(DataLoader(valid, 8, sampler=own))\n"
        "right, n = summed(right_of(p, y), len(y))\nif rank == 0: print(f'accuracy {right / n:.6f}')"
    )
    certificate = certify(text)
    assert certificate.verdict == DIFFERENT, str(certificate)
    assert "several ranks get sample 0, which counts" in certificate.first_difference
    lines = (line_of(text, each) for each in ("found = [(model", "dist.all_reduce(numbers)", "right, n = "))
    assert all(f"train.py:{line}" in certificate.cause for line in lines), str(certificate)


@pytest.mark.slow
def test_a_loss_of_rank_0_is_noted(certify: Certify) -> None:
    certificate = certify(evaluating(LOSS + PRINT))
    assert certificate.verdict == ALIKE, str(certificate)
    assert any("rank 0's own number" in note for note in certificate.notes), str(certificate)


@pytest.mark.slow
def test_equal_numbers_are_counted(certify: Certify) -> None:
    certificate = certify(evaluating(HEALTHY["sums and counts"]))
    (row,) = (row for row in certificate.rows if row.what == REPORTS)
    assert (row.number, row.outcome) == ("2 of 2", "equal to the printed digits")
