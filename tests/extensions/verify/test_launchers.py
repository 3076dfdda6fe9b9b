"""Scripts that do what Accelerate, Hugging Face's Trainer, Ignite and DeepSpeed do: all train as one process does."""

from __future__ import annotations

import pytest

from lockstep.extensions.verify.certificate import ALIKE, UNKNOWN
from tests.extensions.verify.small_script import LOOP, LOSS, MODEL, SET_EPOCH, SHARED_OUT, Certify, changed

READS_ON = """\
for epoch in range(3):
    sampler.set_epoch(epoch)
    batches = iter(loader)
    for i in range(len(loader)):
        try:
            x, y = next(batches)
        except StopIteration:
            batches = iter(loader)
            x, y = next(batches)
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""

DISPATCHED = """\
class Stream(IterableDataset):
    def __iter__(self):
        yield from data


batches = iter(DataLoader(Stream(), 8)) if rank == 0 else None
for i in range(6):
    parts = [None] * world
    if rank == 0:
        parts = [next(batches) for _ in range(world)]
    own = [None]
    dist.scatter_object_list(own, parts, src=0)
    x, y = own[0]
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

REPLACED_LOADER = """\
sampler = DistributedSampler(data)
whole = DataLoader(data, 8, shuffle=True)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, len(whole))
loader = DataLoader(data, 8, sampler=sampler)
"""
STEPS_FOR_EACH_RANK = "        optimizer.step()\n        for _ in range(world):\n            scheduler.step()\n"

CHECKPOINTED = """\
class Block(nn.Linear):
    def forward(self, x):
        # the norm of a Llama computes so
        return super().forward(x.to(torch.float32))


def make_model():
    torch.manual_seed(0)
    return nn.ModuleList([Block(8, 32), Block(32, 1)])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = make_model()

    def forward(self, x):
        from torch.utils.checkpoint import checkpoint

        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x

"""

OWN_PARTITION = """\
for parameter in model.parameters():
    dist.broadcast(parameter.data, 0)
flat = nn.Parameter(torch.cat([p.detach().flatten() for p in model.parameters()]).chunk(world)[rank].clone())
optimizer.param_groups[0]["params"] = [flat]
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = F.mse_loss(model(x), y)
        model.zero_grad()
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        dist.all_reduce(gradient)
        flat.grad = (gradient / world).chunk(world)[rank]
        norm = torch.FloatTensor([float(gradient.norm() / world)])
        flat.grad.mul_(1.0 / max(1.0, norm.item()))
        optimizer.step()
        parts = [torch.empty_like(flat) for _ in range(world)]
        dist.all_gather(parts, flat.detach())
        nn.utils.vector_to_parameters(torch.cat(parts), model.parameters())
"""

SAME_AS_ONE_PROCESS = {
    "reading_on_after_an_epoch_that_ended_early": [(LOOP, READS_ON)],
    "rank_0_reads_the_batches_of_all_ranks": [(SHARED_OUT, ""), (LOOP, DISPATCHED)],
    "a_schedule_by_the_length_of_the_loader_of_all_samples": [
        (SHARED_OUT, REPLACED_LOADER),
        ("        optimizer.step()\n", STEPS_FOR_EACH_RANK),
    ],
    "a_cast_within_a_checkpoint": [
        ('dist.init_process_group("gloo")', CHECKPOINTED + 'dist.init_process_group("gloo")'),
        ("DistributedDataParallel(make_model())", "DistributedDataParallel(Net())"),
    ],
    "an_optimizer_of_a_partition_of_the_parameters": [
        ("DistributedDataParallel(make_model())", "make_model()"),
        ("nn.Linear(32, 1)", "nn.Linear(32, 1, bias=False)"),  # the partitions have equal sizes
        (LOOP, OWN_PARTITION),
    ],
    "a_random_part_of_each_batch": [(LOSS, "F.mse_loss(model(x[(i := torch.randperm(len(x))[:4])]), y[i])")],
    "a_gpu_that_is_chosen_but_not_used": [
        (SET_EPOCH, SET_EPOCH + '    torch.cuda.set_device(int(os.environ["RANK"]))\n'),
        (MODEL, "DistributedDataParallel(make_model(), device_ids=[rank], output_device=rank)"),
    ],
    "no_process_group_without_the_variable_of_accelerate": [
        (SET_EPOCH, SET_EPOCH + '    assert os.environ["ACCELERATE_USE_CPU"] == "true"\n')
    ],
}


INTERLEAVED = OWN_PARTITION.replace(".chunk(world)[rank]", ".view(-1, world)[:, rank]").replace(
    "nn.utils.vector_to_parameters(torch.cat(parts)", "nn.utils.vector_to_parameters(torch.stack(parts, 1).flatten()"
)


@pytest.mark.slow
def test_partitions_in_another_order_than_the_parameters_are_not_called_different(certify: Certify) -> None:
    """ZeRO stage 3 was called different in its first parameters."""
    *changes, _ = SAME_AS_ONE_PROCESS["an_optimizer_of_a_partition_of_the_parameters"]
    certificate = certify(changed(*changes, (LOOP, INTERLEAVED)))
    assert certificate.verdict == UNKNOWN, str(certificate)
    assert "verify the script with stage 2" in certificate.reasons[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", SAME_AS_ONE_PROCESS)
def test_what_launchers_do_is_alike(name: str, certify: Certify) -> None:
    certificate = certify(changed(*SAME_AS_ONE_PROCESS[name]))
    assert certificate.verdict == ALIKE, str(certificate)
