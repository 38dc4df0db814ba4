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
import socket
import sys
import time
from collections import Counter

import torch
import torch.distributed as dist

import starter
from support import checkpoints, edits, rows

WORLD = int(os.environ.get("WORLD_SIZE", 1))
RANK = int(os.environ.get("RANK", 0))

if RANK:  # the first process speaks for all
    sys.stdout = open(os.devnull, "w", encoding="utf-8")


def connect(cfg):
    """Connects the processes, and gives this one its GPU. Comes before all that may differ between
    machines: where one process fails, its connections close, and the others end too. Raises
    InputError where machines without a disk in common see other states of a run to resume."""
    if WORLD == 1:
        return
    on_gpu = "cuda" in str(cfg.device) or (cfg.device == "auto" and torch.cuda.is_available())
    if on_gpu:
        cfg.device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(cfg.device)
    if not dist.is_initialized():
        longest_wait = datetime.timedelta(hours=1)  # for the process that writes a checkpoint
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=longest_wait)
        # Gloo's threads need the interpreter once more: one that is late to release a tensor would
        # find none, and abort a finished run.
        atexit.register(time.sleep, 0.5)
        if on_gpu:
            atexit.register(dist.destroy_process_group)
    if cfg.resume:
        seen = dict(gather([(f"{socket.gethostname()}, process {RANK}", what_is_there(cfg))]))
        if len(set(seen.values())) > 1:
            raise starter.InputError(
                f"resume: each machine needs the same newest checkpoint, and they see {seen}; copy "
                "the run's folder to all of them, to the same place"
            )


def what_is_there(cfg):
    """Returns the newest checkpoint of the run to resume, as this machine sees it."""
    try:
        folder = starter.folder_of_run(cfg)
    except starter.InputError:
        return "no such folder"
    return str(max(folder.glob("checkpoint_*.pt"), default=f"no checkpoint in {folder}"))


def join(run):
    """The first process writes, and gives the folder."""
    device = run.cfg.device
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
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
    """Divides the weights, and has this file's functions run in the place of starter.py's."""
    starter.limit_logits(policy, cfg)  # all of which a microbatch has at once here
    reshard = None  # each layer after its forward pass
    if cfg.engine == "transformers":
        reshard = False  # not before the backward pass, since processes decode at different pace
    shard(policy, cfg, reshard)
    if ref_model is not None:  # with LoRA it shares its weights no longer
        shard(ref_model, cfg, None)
    own_weights = starter.MECHANICS["weights_by_name"]  # or LoRA's
    edits.replace(
        sample=sample,
        by_first_process=by_first_process,
        rows_to_train_on=rows_to_train_on,
        add_up_gradients=add_up_gradients,
        clip_gradient=clip_gradient,
        weights_by_name=functools.partial(whole_weights, own_weights),
        checkpoint_of=checkpoint_of,
        load_checkpoint=checkpoints.load_checkpoint,
    )
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


def share_of(items):
    """Returns those of this process, which stand together."""
    n = -(-len(items) // WORLD)
    return items[RANK * n : (RANK + 1) * n]


def sample(policy, llm, requests, cfg, temperature):
    """Like starter.sample."""
    join_weights(policy, llm)
    responses = []
    share = share_of(requests)
    if share:
        responses = edits.own("sample")(policy, llm, share, cfg, temperature)
    return gather(responses)


def join_weights(policy, llm):
    """Before processes decode, which they do at different pace."""
    for module in policy.modules():
        if llm is None and hasattr(module, "unshard"):
            module.unshard()


def by_first_process(function, *arguments):
    results = []
    if RANK == 0:
        results.append(function(*arguments))
    return gather(results)[0]


def rows_to_train_on(batch, *others):
    """Each process has every WORLD-th row. One that has none gets a row without a token."""
    all_rows = rows.with_gradient(batch, *others)
    share = starter.keep_rows(all_rows, slice(RANK, None, WORLD))
    if len(share["labels"]) == 0:
        share = starter.keep_rows(all_rows, slice(1))
        share["response_mask"] = torch.zeros_like(share["response_mask"])
    return share


def add_up_gradients(policy, microbatches, *others):
    """All processes get the same number of microbatches, since gradients are summed after each;
    some without a token make up for it. Means are over the tokens of all processes."""
    empty = starter.keep_rows(microbatches[0], (slice(1), slice(1)))
    empty["response_mask"] = torch.zeros_like(empty["response_mask"])
    most = max(gather([len(microbatches)]))
    n_tokens = sum(microbatch["response_mask"].sum().item() for microbatch in microbatches)
    microbatches.extend([empty] * (most - len(microbatches)))
    sums = edits.own("add_up_gradients")(policy, microbatches, *others)
    of_all = {}
    n_all = sum(gather([n_tokens]))
    for n, part in zip(gather([n_tokens]), gather([sums])):
        loss = {"loss": part.pop("loss")}
        starter.add_scaled(of_all, loss, 1.0)
        if n:  # else its means are nan
            starter.add_scaled(of_all, part, n / n_all)
    return of_all


def clip_gradient(parameters, max_norm):
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    return getattr(norm, "full_tensor", lambda: norm)().item()


def checkpoint_of(policy, optimizer):
    """Like that of checkpoints.py. To an error of one process the others do not come, so that there
    is no whole checkpoint of it: the error goes on."""
    error = sys.exception()
    if error is not None:
        raise error
    return checkpoints.checkpoint_of(policy, optimizer)


def whole_weights(weights_by_name, policy):
    """Yields (name, tensor) with the parts of all processes, and each tied weight once."""
    for name, tensor in weights_by_name(policy):
        if name not in policy.all_tied_weights_keys:
            yield name, checkpoints.whole(tensor)
