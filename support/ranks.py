"""Several processes for starter.py: `torchrun --nproc_per_node=N starter.py` starts them.

torch's FSDP2 divides weights, moments and gradients among them, and each samples and scores its
share of the prompts. All of them hold all responses of a step, so that groups, the weights of the
loss and the cut into microbatches are those of one process.
"""
import atexit
import contextlib
import dataclasses
import datetime
import os
import sys

import torch
import torch.distributed as dist

import starter

LONGEST_WAIT = datetime.timedelta(hours=1)  # of a rank for another that writes a checkpoint
WEIGHTS_AT_ONCE = 8_000_000  # layers are gathered together up to that many: small messages are slow


def find():
    """Returns starter.OneProcess, or Ranks if torchrun started this process as one of several.
    Joins the others, before vLLM makes a process group of its own."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return starter.OneProcess()
    if not dist.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, timeout=LONGEST_WAIT)
        if dist.get_rank():
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # rank 0 speaks for all
    return Ranks()


def whole(tensor):
    """Returns the tensor with its parts from all ranks. Every rank has to call this. The gradient
    is summed over the ranks."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    from torch.distributed.tensor import Partial
    return tensor.full_tensor(grad_placements=[Partial()])


def head_of(model):
    """Like starter.lm_head_of, with a whole weight. A tied one is the embedding's, which is
    gathered with the layers before it."""
    head = starter.lm_head_of(model)
    module = model.get_output_embeddings()
    if getattr(module, "tied", False):
        module = model.get_input_embeddings()
    return head._replace(weight=whole(module.weight))


def shard(model):
    """Divides the weights (FSDP2, arXiv:2304.11277). Those of a model that learns are whole from
    its forward pass until release(), those of another until the next are needed. Gradients are
    summed: the loss is weighted already."""
    from torch.distributed.fsdp import fully_shard
    body = model.base_model
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    head.tied = head.weight is embedding.weight
    learns = any(parameter.requires_grad for parameter in model.parameters())
    layers = list(body.layers)
    n = max(1, WEIGHTS_AT_ONCE // sum(p.numel() for p in layers[0].parameters()))
    groups = [layers[i:i + n] for i in range(0, len(layers), n)]
    if len(groups) == 1:  # few layers: all of them together with the embedding
        groups = []
    groups.append([body])
    if not head.tied:
        groups.append([head])
    for modules in groups:
        keep = False if learns else None
        fully_shard(modules, reshard_after_forward=keep)
        modules[0].set_reshard_after_backward(False, recurse=False)
        modules[0].set_gradient_divide_factor(1.0)
        modules[0].set_force_sum_reduction_for_comms(True)
    if head.tied:
        head.weight = embedding.weight


def rollout(policy, prompts, sampling):
    """support.fast's rollout, with layers that are whole from here to the end of the update."""
    from support import fast
    for module in policy.base_model.modules():
        if hasattr(module, "unshard"):
            module.unshard()
    return fast.rollout(policy, prompts, sampling, head_of=head_of)


class Ranks(starter.OneProcess):
    """What starter.py's OneProcess does, among several processes."""

    def __init__(self):
        self.world = dist.get_world_size()
        self.rank = dist.get_rank()

    @contextlib.contextmanager
    def joined(self):
        """Around a program. Where all went well its process ends with it, before the
        interpreter's own end: there a thread of gloo's, late to release a tensor, finds no
        interpreter and aborts the finished run."""
        yield
        atexit._run_exitfuncs()  # vLLM ends in these, and its process groups in it
        if dist.is_initialized():
            dist.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def share(self, items):
        n = -(-len(items) // self.world)
        return items[self.rank * n:(self.rank + 1) * n], self.rank * n

    def gather(self, items):
        parts = [None] * self.world
        dist.all_gather_object(parts, items)
        return [item for part in parts for item in part]

    def total(self, numbers, largest=()):
        device = "cuda" if torch.cuda.is_available() else "cpu"
        own = torch.stack([torch.as_tensor(x, dtype=torch.double, device=device)
                           for x in numbers.values()])
        gathered = own.new_empty(self.world * len(own))
        dist.all_gather_into_tensor(gathered, own)
        of_each = zip(numbers, gathered.view(self.world, -1).T)
        return type(numbers)({name: x.max() if name in largest else x.sum()
                              for name, x in of_each})

    def microbatches(self, batch, max_tokens, cut):
        """Returns this rank's microbatches. The responses to a prompt stay together, since it is
        read once for them; prompts go, those with the most tokens first, to the rank with the
        least work so far. Gradients are summed after each microbatch, so all ranks have the same
        number; empty ones make up for it."""
        from support.fast import split_rows
        prompts = split_rows(batch).prompts
        distinct, prompt_of = prompts.unique(dim=0, return_inverse=True)
        tokens = batch["response_mask"].sum(dim=1).double()
        work = prompt_of.bincount(tokens) + (distinct >= 0).sum(dim=1)
        given = [0.0] * self.world
        owner = torch.zeros_like(prompt_of)
        for prompt in work.argsort(descending=True, stable=True).tolist():
            least = given.index(min(given))
            given[least] += work[prompt].item()
            owner[prompt_of == prompt] = least
        # Each rank cuts for all, which spares a message about their numbers.
        of_ranks = [{name: tensor[owner == rank] for name, tensor in batch.items()}
                    for rank in range(self.world)]
        cuts = [cut(rows, max_tokens) if len(rows["labels"]) else [] for rows in of_ranks]
        empty = starter.take_rows(batch, slice(1), 1)
        empty["response_mask"] = torch.zeros_like(empty["response_mask"])
        own = cuts[self.rank]
        return own + [dict(empty) for _ in range(max(map(len, cuts)) - len(own))]

    def shard(self, models, compute):
        if compute.name != "fast":
            raise starter.InputError(
                "several processes need a model that the fast path of support/ fits, and it does "
                "not fit this one; start one process, without torchrun")
        for i, model in enumerate(models):
            if model is not None and model not in models[:i]:  # LoRA: the reference is the policy
                shard(model)
        return dataclasses.replace(compute, head_of=head_of, rollout=rollout)

    def release(self, model):
        for module in model.base_model.modules():
            if hasattr(module, "reshard"):
                module.reshard()

    def weights(self, model):
        self.release(model)
        return starter.merged_weights(model, whole)

    def collect(self, pairs):
        """One tensor at a time is whole on each rank; the first keeps it, in the CPU's memory."""
        kept = {}
        for name, tensor in pairs:
            if self.rank == 0:
                kept[name] = tensor.cpu()
        return kept

    def whole(self, tensor):
        return whole(tensor)

    def sharded_like(self, tensor, parameter):
        from torch.distributed.tensor import distribute_tensor
        return distribute_tensor(tensor, parameter.device_mesh, parameter.placements)
