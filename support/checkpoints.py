"""Checkpoints of LoRA and of several processes: what learns, and the optimiser's moments, whole, as
one process writes them. So a run may go on with another number of processes."""

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map

from support import edits


def whole(tensor):
    """Returns a tensor with the parts of all processes, or another value as it is."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    return tensor


def whole_on_cpu(tensor):
    """The same, for a file."""
    return whole(tensor).cpu() if isinstance(tensor, DTensor) else tensor


def divided_like(part, tensor):
    """Divides a whole tensor among the processes as `part` is divided, if it is."""
    if isinstance(part, DTensor) and isinstance(tensor, torch.Tensor):
        if tensor.shape == part.shape:
            return distribute_tensor(tensor.to(part.device), part.device_mesh, part.placements)
    return tensor


def checkpoint_of(policy, optimizer):
    """Like starter.checkpoint_of, without the weights that do not learn."""
    content = edits.own("checkpoint_of")(policy, optimizer)
    for name, parameter in policy.named_parameters():
        if not parameter.requires_grad:
            del content["model"][name]
    return tree_map(whole_on_cpu, content)


def load_checkpoint(policy, optimizer, saved):
    """Like starter.load_checkpoint. Weights that do not learn stay as they were loaded."""
    own = policy.state_dict()
    model = dict(own)
    for name, tensor in saved["model"].items():
        model[name] = divided_like(own[name], tensor)
    parameters = [x for group in optimizer.param_groups for x in group["params"]]
    moments = {}
    for i, values in saved["optimizer"]["state"].items():
        moments[i] = {name: divided_like(parameters[i], x) for name, x in values.items()}
    divided = {"model": model, "optimizer": {**saved["optimizer"], "state": moments}}
    edits.own("load_checkpoint")(policy, optimizer, divided)
