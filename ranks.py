"""ranks.py: one step on several processes. `torchrun --nproc_per_node=N starter.py` starts them; torch's FSDP2 shards
weights, moments and gradients; each rank samples and scores its share of the prompts. All ranks hold all responses of a
step, so groups, weights of the loss and the cut into microbatches are those of one process. A process alone sends
nothing and cuts nothing up here.
"""
import atexit
import contextlib
import os
import sys

import torch
import torch.distributed as dist


def world():
    return dist.get_world_size() if dist.is_initialized() else 1


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def start():
    """Joins the ranks that torchrun started, before vLLM makes a group of its own. Solely rank 0 is heard."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        if rank():
            sys.stdout = open(os.devnull, "w")


@contextlib.contextmanager
def joined():
    """A program's time as one of the ranks. Where all went well its process ends with it, before the interpreter's own
    end: there a thread of gloo's, late to let go of a tensor, finds no interpreter and aborts the finished run."""
    start()
    yield
    if world() > 1:
        dist.destroy_process_group()
        atexit._run_exitfuncs()  # vLLM's processes end in these
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(0)


def shard(model, at_once=8_000_000):
    """Weights over the ranks (arXiv:2304.11277): layers are gathered together up to that many weights, since small
    messages are slow. Those of a model that learns stay whole until release(), those of another until the next are
    needed. Gradients are summed: the loss is weighted already."""
    from torch.distributed.fsdp import fully_shard
    if world() > 1:
        body, head, embedding = model.base_model, model.get_output_embeddings(), model.get_input_embeddings()
        head.tied, layers = head.weight is embedding.weight, list(body.layers)
        n = max(1, at_once // sum(p.numel() for p in layers[0].parameters()))
        groups = [layers[i:i + n] for i in range(0, len(layers), n)] * (n < len(layers))  # few: all with the embedding
        for modules in [*groups, [body], *[[head]] * (not head.tied)]:
            fully_shard(modules, reshard_after_forward=False if head.weight.requires_grad else None)
            modules[0].set_reshard_after_backward(False, recurse=False)
            modules[0].set_gradient_divide_factor(1.0)
            modules[0].set_force_sum_reduction_for_comms(True)
        if head.tied:
            head.weight = embedding.weight
    return model


def gather(model):
    """All layers of a sharded model, whole, on every rank until release(). -> (V, H) weight of the LM head."""
    for module in model.base_model.modules():
        if hasattr(module, "unshard"):
            module.unshard()
    return head_of(model)


def release(model):
    """-> the model, back to shards: weights and their gradients are those that the optimiser knows."""
    for module in model.base_model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    return model


def head_of(model):
    """-> (V, H) weight of the LM head, whole. A tied one is the embedding's, gathered with the layers before it."""
    head = model.get_output_embeddings()
    return whole((model.get_input_embeddings() if getattr(head, "tied", False) else head).weight)


def weights_of(model):
    """-> {name: whole weight}, on each rank."""
    return {name: whole(parameter.detach()) for name, parameter in release(model).named_parameters()}


def whole(tensor):
    """A tensor with its shards from all ranks. Every rank has to call this; its gradient is summed over them."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    from torch.distributed.tensor import Partial
    return tensor.full_tensor(grad_placements=[Partial()])


def sharded_like(tensor, parameter):
    """The whole tensor -> this rank's part of it, laid out like the parameter."""
    if not hasattr(parameter, "full_tensor"):
        return tensor
    from torch.distributed.tensor import distribute_tensor
    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements)


def share_of(items):
    """-> this rank's slice of a list, and where it begins."""
    n = -(-len(items) // world())
    return items[rank() * n:(rank() + 1) * n], rank() * n


def gathered(items):
    """The slices of all ranks -> the whole list, on each of them."""
    if world() == 1:
        return items
    parts = [None] * world()
    dist.all_gather_object(parts, items)
    return [item for part in parts for item in part]


def total(numbers, largest=()):
    """{name: number} -> the same with the sum over the ranks of each, or the largest of those so named."""
    if world() == 1:
        return numbers
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mine = torch.stack([torch.as_tensor(x, dtype=torch.double, device=device) for x in numbers.values()])
    found = mine.new_empty(world() * len(mine))
    dist.all_gather_into_tensor(found, mine)
    of_each = zip(numbers, found.view(world(), -1).T)
    return type(numbers)({name: x.max() if name in largest else x.sum() for name, x in of_each})


def own_microbatches(batch, max_tokens, cut):
    """The step's batch -> this rank's microbatches. A prompt's responses stay together, since it is read once for them;
    prompts go, those with the most tokens first, to the rank with the least work so far. All ranks have the same
    number, since their gradients are summed after each: empty ones make up for it."""
    if world() == 1:
        return cut(batch, max_tokens)
    prompts, prompt_of = batch["prompts"].unique(dim=0, return_inverse=True)
    work = prompt_of.bincount(batch["response_mask"].sum(dim=1).double()) + (prompts >= 0).sum(dim=1)
    given, owner = [0.0] * world(), torch.zeros_like(prompt_of)
    for prompt in work.argsort(descending=True, stable=True).tolist():
        least = given.index(min(given))
        given[least] += work[prompt].item()
        owner[prompt_of == prompt] = least
    # each cuts for all, which spares a message about their numbers
    cuts = [cut({name: tensor[owner == i] for name, tensor in batch.items()}, max_tokens) for i in range(world())]
    empty = {name: tensor[:1] if name == "prompts" else tensor[:1, :1] for name, tensor in batch.items()}
    empty["response_mask"] = torch.zeros_like(empty["response_mask"])
    return cuts[rank()] + [empty] * (max(map(len, cuts)) - len(cuts[rank()]))
