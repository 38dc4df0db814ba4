"""A model in parts: torch's FSDP2 divides weights, gradients and moments among the processes of
support/ranks.py. No process holds the whole: each reads its part of a checkpoint, samples for its
share of the prompts, learns from its share of the rows, and writes its part of a checkpoint.
"""

import gc
import weakref
from collections import Counter

import torch
import torch.distributed as dist

import starter
from support import checkpoints, edits, rows
from support.ranks import RANK, WORLD, OfTheFirst, gather, share_of

WEIGHTS = []  # of this run: what yields the parts of the policy's weights with their names
PARTS = weakref.WeakKeyDictionary()  # a model without weights: {name: this process's part}
CHANGES = weakref.WeakKeyDictionary()  # the same: how often weights were changed while it was made


def load_model(model_id, device):
    """Like starter.load_model: without the weights, which divide() gives it. transformers reads
    this process's part of each from the file."""
    from transformers import AutoModelForCausalLM

    if device.type == "cpu" and torch.accelerator.is_available():  # where it would put them
        return edits.OWN["load_model"](model_id, device)
    divided, keys = AutoModelForCausalLM.from_pretrained(
        model_id,
        dtype=torch.float32,
        output_loading_info=True,
        trust_remote_code=False,
        distributed_config={"fsdp_size": WORLD},
    )
    if not is_read_rightly(divided):
        print(f"{model_id}: each process reads all weights before it keeps its part")
        return edits.OWN["load_model"](model_id, torch.device("cpu"))
    parts = {name: x.detach() for name, x in divided.named_parameters()}
    buffers = dict(divided.named_buffers())
    config = divided.config
    del config.distributed_config
    _, kind = type(divided).__bases__  # without FSDP2's part
    with torch.device("meta"):
        model = kind._from_config(config, dtype=torch.float32).eval()
    model.generation_config = divided.generation_config
    model._weight_conversions = divided._weight_conversions
    for name, buffer in model.named_buffers():
        of, _, own_name = name.rpartition(".")
        setattr(model.get_submodule(of), own_name, buffers[name])
    PARTS[model] = parts
    CHANGES[model] = n_changes(model)
    del divided
    gc.collect()  # whose parts would stay beside these
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return model, keys


# How transformers changes tensors of a checkpoint while it reads them: kind and dimension. These it
# does rightly in parts, which are rows: it stacks experts, and puts two matrices side by side.
RIGHT_IN_PARTS = {("MergeModulelist", 0), ("Concatenate", 1)}


def is_read_rightly(divided):
    """Whether transformers has read the parts that it should. It cuts and joins rows of the parts
    instead of the whole, and leaves most buffers that no checkpoint holds as they are in modules
    that have weights, too (5.19, of all types that it knows: python -m lab.parts models)."""
    for conversion in divided._weight_conversions:
        for operation in getattr(conversion, "operations", []):
            if (type(operation).__name__, getattr(operation, "dim", None)) not in RIGHT_IN_PARTS:
                return False
    for module in divided.modules():
        if module._parameters and module._non_persistent_buffers_set - {"embed_scale"}:
            return False
    return True


def n_changes(model):
    return sum(parameter._version for parameter in model.parameters())


def check_unchanged(policy):
    """Raises InputError where an edit has changed weights that are not there yet: it would be
    lost."""
    if policy in CHANGES and n_changes(policy) != CHANGES[policy]:
        raise starter.InputError(
            "weights were changed before support.prepare(), and several processes have none until "
            "then; change them after it"
        )


def divide(policy, ref_model, cfg):
    """Divides the weights, and has this file's functions run in the place of starter.py's."""
    starter.limit_logits(policy, cfg)  # all of which a microbatch has at once here
    reshard = None  # each layer after its forward pass
    if cfg.engine == "transformers":
        reshard = False  # not before the backward pass, since processes decode at different pace
    parts = PARTS.pop(policy, {})
    if ref_model is not None:  # with LoRA it shares its weights no longer
        own = PARTS.pop(ref_model, {})  # of a teacher
        shard(ref_model, own or {name: x.clone() for name, x in parts.items()}, cfg, None)
    shard(policy, parts, cfg, reshard)
    WEIGHTS[:] = [starter.MECHANICS["weights_by_name"]]  # or LoRA's
    edits.replace(
        sample=sample,
        by_first_process=by_first_process,
        rows_to_train_on=rows_to_train_on,
        add_up_gradients=add_up_gradients,
        weights_by_name=whole_weights,
        save_checkpoint=checkpoints.save_parts,
        load_checkpoint=checkpoints.load_checkpoint,
    )
    print(
        f"{WORLD} processes divide the weights and the work; what support/fast.py does for one "
        "process with whole weights has no part in it"
    )


def shard_alone(model, cfg):
    """Divides a model that load_model() has loaded, if there are several processes."""
    if WORLD > 1:
        shard(model, PARTS.pop(model, {}), cfg, None)


def shard(model, parts, cfg, reshard):
    """FSDP2 (arXiv:2304.11277): embedding, blocks and head one by one. Gradients are summed, since
    the loss is weighted already. In 16 bits a block's weights are gathered in these, and freed with
    it: autocast would keep its copies of all blocks for the backward pass."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if parts:
        mesh = next(iter(parts.values())).device_mesh
    else:
        mesh = dist.init_device_mesh(cfg.device.type, (WORLD,))
    in_blocks = MixedPrecisionPolicy()
    if cfg.precision != "float32":
        in_blocks = MixedPrecisionPolicy(
            param_dtype=starter.DTYPES[cfg.precision],
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,  # what goes from block to block stays float32
        )
    n_names = Counter(id(x) for _, x in model.named_parameters(remove_duplicate=False))
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    for module in reversed(list(model.modules())):  # inner blocks first, the model last
        is_block = type(module).__name__ in (model._no_split_modules or ())
        is_tied = any(n_names[id(x)] > 1 for x in module.parameters())
        if module is model or ((is_block or module in ends) and not is_tied):
            precision = in_blocks if is_block else MixedPrecisionPolicy()
            fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=precision)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    for name, parameter in list(model.named_parameters()):
        part = parts.pop(name.replace(".base_layer.", "."), None)  # LoRA's name for a weight
        if part is not None:
            part = torch.nn.Parameter(part.to(parameter.dtype), parameter.requires_grad)
            torch.utils.swap_tensors(parameter, part)


def sample(policy, llm, requests, cfg, temperature):
    """Like starter.sample."""
    join_weights(policy, llm)
    responses = []
    share = share_of(requests, cfg.vllm_tp)
    if share:
        responses = edits.OWN["sample"](policy, llm, share, cfg, temperature)
    return gather(responses if RANK % cfg.vllm_tp == 0 else [])


def join_weights(policy, llm):
    """Before processes decode, which they do at different pace."""
    for module in policy.modules():
        if llm is None and hasattr(module, "unshard"):
            module.unshard()


def part_weights(policy):
    """After a forward pass without a backward pass: policy.parameters() are parts again."""
    for module in policy.modules():
        if hasattr(module, "reshard"):
            module.reshard()


def by_first_process(function, *arguments):
    """An error, such as one of a reward, is raised in all processes: they save a checkpoint
    together before they end."""
    outcome = []
    if RANK == 0:
        try:
            outcome.append(function(*arguments))
        except Exception as error:
            error.is_of_all = True
            gather([OfTheFirst(f"{error!r:.500}")])
            raise
    [result] = gather(outcome)
    if isinstance(result, OfTheFirst):
        raise result
    return result


def without_tokens(some):
    """Returns these rows with an empty mask, so that they have no part in the loss."""
    return {**some, "response_mask": torch.zeros_like(some["response_mask"])}


def rows_to_train_on(batch, *others):
    """Each process has every WORLD-th row. One that has none gets a row without a token."""
    all_rows = rows.with_gradient(batch, *others)
    share = starter.keep_rows(all_rows, slice(RANK, None, WORLD))
    if len(share["labels"]) == 0:
        return without_tokens(starter.keep_rows(all_rows, slice(1)))
    return share


def add_up_gradients(policy, microbatches, *others):
    """All processes get the same number of microbatches, since gradients are summed after each;
    some without a token make up for it. Means are over the tokens of all processes."""
    empty = without_tokens(starter.keep_rows(microbatches[0], (slice(1), slice(1))))
    most = max(gather([len(microbatches)]))
    n_tokens = sum(microbatch["response_mask"].sum().item() for microbatch in microbatches)
    microbatches.extend([empty] * (most - len(microbatches)))
    sums = edits.OWN["add_up_gradients"](policy, microbatches, *others)
    shares = gather([(n_tokens, sums)])
    n_all = sum(n for n, _ in shares)
    of_all = {}
    for n, part in shares:
        starter.add_scaled(of_all, {"loss": part.pop("loss")}, 1.0)
        if n:  # else its means are nan
            starter.add_scaled(of_all, part, n / n_all)
    return of_all


def joined_weights(policy, dtype=None):
    """Yields (name, tensor) with the parts of all processes, one at a time, and each tied weight
    once; on request in another precision, which is taken before they are sent."""
    [weights_by_name] = WEIGHTS
    for name, tensor in weights_by_name(policy):
        if name in policy.all_tied_weights_keys:
            continue
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        yield name, checkpoints.whole(tensor)


def whole_weights(policy):
    """Like starter.weights_by_name. In the memory of the first process's machine, since it writes
    all of them."""
    for name, tensor in joined_weights(policy):
        yield name, tensor.cpu() if RANK == 0 else tensor
