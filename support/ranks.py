"""Several processes for starter.py: `torchrun --nproc_per_node=N starter.py` starts them.

torch's FSDP2 divides weights, gradients and moments of any model among them. Each samples and
scores its share of the prompts and learns from its share of the rows. All of them hold all
responses of a step, so that groups, the weights of the loss and the cut into microbatches are those
of one process. After Ctrl-C torchrun waits 30 s for the end of the step, the checkpoint and the
report; with `torchrun --shutdown-timeout 600` longer.
"""
import atexit
import datetime
import os
import sys
import time
from collections import Counter

import torch
import torch.distributed as dist

import starter

WORLD = int(os.environ.get("WORLD_SIZE", 1))
RANK = int(os.environ.get("RANK", 0))
LONGEST_WAIT = datetime.timedelta(hours=1)  # for the process that writes a checkpoint

if RANK:  # the first process speaks for all
    sys.stdout = open(os.devnull, "w", encoding="utf-8")


class CommonRun(starter.Run):
    """A run that all processes leave after the same step: a signal to one of them ends the run in
    all, from the next step that they log together."""

    @property
    def stop(self):
        return self.agreed

    @stop.setter
    def stop(self, number):
        self.received = number


def join(run):
    """Connects the processes, before vLLM makes groups of its own. The first gives the folder."""
    if WORLD == 1:
        return
    on_gpu = run.cfg.device.type == "cuda"
    if on_gpu:
        run.cfg.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(run.cfg.device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=LONGEST_WAIT)
        atexit.register(leave)
    run.__class__ = CommonRun
    run.received = run.agreed = 0
    run.folder = gather([run.folder])[0]


def leave():
    """Gives gloo's threads the interpreter once more. One that is late to release a tensor would
    find none, and abort a finished run."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        dist.destroy_process_group()
    time.sleep(0.5)


def share_of(items):
    """Returns this process's part of a list, and the index at which it begins."""
    n = -(-len(items) // WORLD)
    return items[RANK * n:(RANK + 1) * n], RANK * n


def gather(items):
    """Returns the lists of all processes as one list."""
    parts = [None] * WORLD
    try:
        dist.all_gather_object(parts, items)
    except RuntimeError as error:
        raise starter.RunStopped(f"another process of this run has ended ({error})") from None
    return [item for part in parts for item in part]


def divide(policy, ref_model, cfg):
    """Divides the weights, and puts this file's functions around those of starter.py."""
    for model in (policy, ref_model):
        if isinstance(model, torch.nn.Module):
            shard(model, cfg)
    weights_of = starter.MECHANICS.get("weights_of", starter.weights_of.__wrapped__)
    starter.MECHANICS |= {
        "rollout_with_transformers": rollout_with_transformers, "score": score,
        "rollout_with_vllm": rollout_with_vllm, "log_train": log_train,
        "cut_microbatches": cut_microbatches, "accumulate_gradients": accumulate_gradients,
        "have_slope": lambda slopes: True,  # FSDP2 divides the weights again in each backward pass
        "weights_of": lambda policy: whole(weights_of(policy), policy)}
    print(f"{WORLD} processes divide the weights and the work; each runs the model's own forward "
          "pass, not support/fast.py")


def shard(model, cfg):
    """FSDP2 (arXiv:2304.11277), block by block. Gradients are summed, since the loss is weighted
    already. Where transformers samples, the policy's layers stay whole from the rollout to the
    backward pass, since processes decode at different pace."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard
    mesh = init_device_mesh(cfg.device.type, (WORLD,))
    learns = any(parameter.requires_grad for parameter in model.parameters())
    keep_whole = cfg.engine == "transformers" and learns
    names = Counter(id(x) for _, x in model.named_parameters(remove_duplicate=False))
    for module in reversed(list(model.modules())):  # inner blocks come first
        is_block = type(module).__name__ in (model._no_split_modules or ())
        if is_block and all(names[id(x)] == 1 for x in module.parameters()):  # nothing is tied
            fully_shard(module, mesh=mesh, reshard_after_forward=False if keep_whole else None)
    fully_shard(model, mesh=mesh, reshard_after_forward=False if keep_whole else None)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def rollout_with_transformers(policy, prompts, cfg, seed, group_size=1, temperature=1.0):
    for module in policy.modules():
        if hasattr(module, "unshard"):
            module.unshard()
    own, first = share_of(prompts)
    return gather(starter.rollout_with_transformers.__wrapped__(
        policy, own, cfg, seed + first * group_size, group_size, temperature))


def rollout_with_vllm(llm, prompts, cfg, seed, group_size=1, temperature=1.0):
    own, first = share_of(prompts)
    return gather(starter.rollout_with_vllm.__wrapped__(
        llm, own, cfg, seed + first * group_size, group_size, temperature))


def score(responses, problems, tokenizer, reward):
    group_size = len(responses) // max(1, len(problems))  # no skills: nothing
    own, first = share_of(problems)
    some = responses[first * group_size:(first + len(own)) * group_size]
    parts = ([], torch.zeros(0), torch.zeros(0, dtype=torch.bool), {})
    if own:
        parts = starter.score.__wrapped__(some, own, tokenizer, reward)
    texts, rewards, solved, means = zip(*gather([parts]))
    n = torch.tensor([len(x) for x in texts]) / max(1, len(responses))
    return ([text for some in texts for text in some], torch.cat(rewards), torch.cat(solved),
            {name: sum(x.get(name, 0.0) * share.item() for x, share in zip(means, n))
             for name in means[0]})


def cut_microbatches(batch, max_tokens):
    """This process's microbatches. All processes have the same number of them, since gradients are
    summed after each; rows without a token make up for it."""
    lengths = batch["response_mask"].sum(dim=1)
    lengths -= lengths.max() * ~batch["mean_weights"].any(dim=1)  # those not in the means come last
    own_rows = lengths.argsort(descending=True, stable=True)[RANK::WORLD]
    microbatches = []
    if len(own_rows):
        own = {name: tensor[own_rows] for name, tensor in batch.items()}
        microbatches = starter.cut_microbatches.__wrapped__(own, max_tokens)
    empty = {name: tensor[:1, :1] for name, tensor in batch.items()}
    empty["response_mask"] = torch.zeros_like(empty["response_mask"])
    most = max(gather([len(microbatches)]))
    return microbatches + [dict(empty) for _ in range(most - len(microbatches))]


def accumulate_gradients(policy, microbatches, cfg, ref_model=None, kl_coef=0.0):
    """The sums over all processes."""
    parts = gather([starter.accumulate_gradients.__wrapped__(
        policy, microbatches, cfg, ref_model, kl_coef)])
    return {name: sum(part[name] for part in parts) for name in parts[0]}


def log_train(run, step, metrics):
    run.agreed = max(gather([run.received]))
    starter.log_train.__wrapped__(run, step, metrics)


def whole(weights, policy):
    """(name, tensor) pairs -> the same with the parts of all processes, one tensor at a time. The
    names of a tied weight have one tensor, so that it is saved once."""
    names_of = {}
    for name, parameter in policy.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
    tied_to = {name: names[0] for names in names_of.values() for name in names[1:]}
    kept = {}
    for name, tensor in weights:
        if name in tied_to:
            tensor = kept[tied_to[name]]
        elif hasattr(tensor, "full_tensor"):
            tensor = tensor.full_tensor()
        if name in tied_to.values():
            kept[name] = tensor
        yield name, tensor
