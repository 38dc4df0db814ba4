"""Several processes for starter.py: `torchrun --nproc_per_node=N starter.py` starts them.

torch's FSDP2 divides weights, gradients and moments of any model among them. Each samples for its
share of the prompts and learns from its share of the rows; the first one scores. All of them hold
all responses of a step, so that groups and the weights of the loss are those of one process. After
Ctrl-C torchrun waits 30 s for the end of the step, the checkpoint and the report; with
`torchrun --shutdown-timeout 600` longer.
"""

import atexit
import datetime
import functools
import os
import sys
import time
from collections import Counter

import torch
import torch.distributed as dist

import starter
from support import edits, rewards

WORLD = int(os.environ.get("WORLD_SIZE", 1))
RANK = int(os.environ.get("RANK", 0))

if RANK:  # the first process speaks for all
    sys.stdout = open(os.devnull, "w", encoding="utf-8")


def join(run):
    """Gives this process its GPU, and connects the processes, before vLLM makes groups of its own.
    The first one writes, and gives the folder."""
    cfg = run.cfg
    on_gpu = cfg.device.type == "cuda"
    if on_gpu and WORLD > 1:
        cfg.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if on_gpu and cfg.device.index is not None:
        torch.cuda.set_device(cfg.device)
    if WORLD > 1 and not dist.is_initialized():
        longest_wait = datetime.timedelta(hours=1)  # for the process that writes a checkpoint
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=longest_wait)
        # Gloo's threads need the interpreter once more: one that is late to release a tensor would
        # find none, and abort a finished run.
        atexit.register(time.sleep, 0.5)
        if on_gpu:
            atexit.register(dist.destroy_process_group)
    run.writes_files = RANK == 0
    run.folder = gather([run.folder])[0]


def gather(items):
    """Returns the lists of all processes as one list, when all of them have come here."""
    if WORLD == 1:
        return items
    parts = [None] * WORLD
    dist.all_gather_object(parts, items)
    return sum(parts, [])


def divide(policy, ref_model, cfg):
    """Divides the weights, and puts this file's functions around those of starter.py."""
    reshard = None  # each layer after its forward pass
    if cfg.engine == "transformers":
        reshard = False  # not before the backward pass, since processes decode at different pace
    shard(policy, cfg, reshard)
    if ref_model is not None:  # with LoRA it shares its weights no longer
        shard(ref_model, cfg, None)
    edits.wrap(
        rollout_with_transformers=rollout_with_transformers,
        rollout_with_vllm=functools.partial(sample_share, "rollout_with_vllm"),
        score=score,
        cut_microbatches=cut_microbatches,
        weights_by_name=functools.partial(whole_weights, starter.weights_by_name),  # or LoRA's
    )
    edits.replace(sum_over_processes=sum_over_processes, clip_gradient=clip_gradient)
    print(f"{WORLD} processes divide the weights and the work, without support/fast.py")


def shard(model, cfg, reshard):
    """FSDP2 (arXiv:2304.11277), block by block. Gradients are summed, since the loss is weighted
    already."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh(cfg.device.type, (WORLD,))
    n_names = Counter(id(x) for _, x in model.named_parameters(remove_duplicate=False))
    for module in reversed(list(model.modules())):  # inner blocks first, the model last
        is_block = type(module).__name__ in (model._no_split_modules or ())
        is_tied = any(n_names[id(x)] > 1 for x in module.parameters())
        if module is model or (is_block and not is_tied):
            fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def rollout_with_transformers(policy, *options):
    for module in policy.modules():
        if hasattr(module, "unshard"):
            module.unshard()
    return sample_share("rollout_with_transformers", policy, *options)


def sample_share(name, model, prompts, cfg, seed, group_size, temperature):
    """name: of a rollout. Each response has the seed that it has in one process."""
    sample = edits.own(name)
    n = -(-len(prompts) // WORLD)
    first = RANK * n
    own = prompts[first : first + n]
    return gather(sample(model, own, cfg, seed + first * group_size, group_size, temperature))


def score(*arguments):
    """The first process scores for all."""
    scored = []
    if RANK == 0:
        scored.append(rewards.score(*arguments))
    return gather(scored)[0]


def cut_microbatches(batch, max_tokens):
    """This process's microbatches. All processes have the same number of them, since gradients are
    summed after each; some without a token make up for it."""
    own = starter.keep_rows(batch, slice(RANK, None, WORLD))
    microbatches = edits.own("cut_microbatches")(own, max_tokens)
    empty = starter.keep_rows(batch, (slice(1), slice(1)))
    empty["response_mask"] = torch.zeros_like(empty["response_mask"])
    most = max(gather([len(microbatches)]))
    return microbatches + [empty] * (most - len(microbatches))


def sum_over_processes(sums):
    of_all = {}
    for part in gather([sums]):
        starter.add_scaled(of_all, part, 1.0)
    return of_all


def clip_gradient(policy, max_norm):
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), max_norm)
    return norm.full_tensor().item()


def whole(tensor):
    """Returns a tensor with the parts of all processes."""
    if hasattr(tensor, "full_tensor"):
        return tensor.full_tensor()
    return tensor


def whole_weights(weights_by_name, policy):
    """Yields (name, tensor) with the parts of all processes, and each tied weight once."""
    for name, tensor in weights_by_name(policy):
        if name not in policy.all_tied_weights_keys:
            yield name, whole(tensor)
