"""LoRA for starter.py: adapters learn, the weights stay (arXiv:2106.09685). Needs peft.

The reference is the policy without its adapters. It shares the weights, so that it costs no memory.
"""

import contextlib
import copy
import inspect
import re
from collections import Counter

import torch
from safetensors.torch import save_file

from support import checkpoints, edits, memory, ranks


@torch.no_grad()
def layers_to_adapt(policy):
    """Names of the linear layers of the blocks. Left out are the LM head, so that policy and
    reference share it; weights that several layers share; stacks of experts, which are no layers;
    and layers whose weight the code around them reads, as Mamba's kernels do, past any adapter."""
    layers = set(memory.linear_layers(policy))
    uses = Counter(id(layer.weight) for layer in layers)
    names = []
    for name, module in policy.named_modules():
        if module not in layers or uses[id(module.weight)] > 1:
            continue
        n_inputs = getattr(module, "in_features", len(module.weight))  # a Conv1D has no such name
        try:
            outputs = module(module.weight.new_zeros(1, n_inputs))
        except Exception:  # a subclass that takes other inputs, as grouped layers do
            outputs = None
        parent, _, own_name = name.rpartition(".")
        code = inspect.getsource(type(policy.get_submodule(parent)))
        is_read = re.search(rf"self\.{own_name}\.weight(?!\.(dtype|device))", code)
        if isinstance(outputs, torch.Tensor) and not is_read:  # a router of experts gives more
            names.append(name)
    return names


def add_adapters(policy, cfg):
    """Freezes the policy and puts trainable matrices A and B beside its linear layers: W x becomes
    W x + 2 B A x. B is 0 at first. Returns the policy without its adapters, as a reference."""
    from peft import LoraConfig, inject_adapter_in_model

    weights = [*policy.parameters(), *policy.buffers()]
    reference = copy.deepcopy(policy, {id(x): x for x in weights})  # a copy of all but these
    names = layers_to_adapt(policy)
    torch.manual_seed(cfg.seed)
    # In a list, so that peft does not see which architecture it is and choose other layers.
    config = LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(cfg.model_id),
        r=cfg.lora_rank,
        lora_alpha=2 * cfg.lora_rank,
        target_modules=[f"0.{name}" for name in names],
    )
    with weights_without_memory(policy, names):
        inject_adapter_in_model(config, torch.nn.ModuleList([policy]))
    config.target_modules = names
    policy.adapter_config = config
    edits.replace(
        weights_by_name=merged_weights,
        save_checkpoint=checkpoints.save_checkpoint,
        load_checkpoint=checkpoints.load_checkpoint,
    )
    return reference


@contextlib.contextmanager
def weights_without_memory(policy, names):
    """Of a model on the meta device, where peft would make its adapters, too: within this, the
    layers have weights on the CPU that take no memory."""
    at_first = {}
    for name in names:
        layer = policy.get_submodule(name)
        if layer.weight.is_meta:
            at_first[name] = layer.weight
            zeros = layer.weight.new_zeros(1, device="cpu").expand(layer.weight.shape)
            layer.weight = torch.nn.Parameter(zeros)
    yield
    for name, weight in at_first.items():
        policy.get_submodule(name).base_layer.weight = weight.requires_grad_(False)


def save_adapters(policy, folder):
    """Saves the adapters alone, for PeftModel.from_pretrained(model, folder)."""
    tensors = {}
    for name, tensor in edits.OWN["weights_by_name"](policy):
        if ".lora_" in name:
            name = name.replace(".default.", ".")
            tensors[f"base_model.model.{name}"] = checkpoints.whole(tensor)
    if ranks.RANK == 0:
        policy.adapter_config.save_pretrained(folder)
        save_file(tensors, folder / "adapter_model.safetensors")


def merged_weights(policy):
    """Yields (name, tensor) of parameters and persistent buffers, one at a time. An adapter is
    added to the weight beside it: names and shapes are those of the model as it was loaded."""
    for name, tensor in edits.OWN["weights_by_name"](policy):
        if ".lora_" in name:
            continue
        if tensor.is_floating_point():  # in 16 bits with frozen_in_bf16
            tensor = tensor.float()
        beside, _, kind = name.rpartition(".base_layer.")
        if kind == "weight":
            layer = policy.get_submodule(beside)
            tensor = tensor + layer.get_delta_weight("default")
        yield name.replace(".base_layer.", "."), tensor.detach()
