"""Checkpoints of LoRA and of several processes: what learns, and the optimiser's moments, whole and
on the CPU."""

from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

# The first of several processes gets the whole state, the others nothing.
OPTIONS = StateDictOptions(
    full_state_dict=True, cpu_offload=True, strict=False, ignore_frozen_params=True
)


def checkpoint_of(policy, optimizer):
    """Like starter.checkpoint_of, without the weights that do not learn."""
    has_moments = len(optimizer.state) > 0
    model, moments = get_state_dict(policy, optimizer, options=OPTIONS)
    if not has_moments:  # before the first update torch would make some, which count as one
        optimizer.state.clear()
        moments = {}
    return {"model": model, "optimizer": moments}


def load_checkpoint(policy, optimizer, saved):
    """Like starter.load_checkpoint: the optimiser keeps its settings."""
    settings = [dict(group) for group in optimizer.param_groups]
    set_state_dict(
        policy,
        optimizer,
        model_state_dict=saved["model"],
        optim_state_dict=saved["optimizer"],
        options=OPTIONS,
    )
    if not saved["optimizer"]:
        optimizer.state.clear()
    for group, values in zip(optimizer.param_groups, settings):
        group.update(values)
