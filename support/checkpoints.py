"""Checkpoints of LoRA, and of several processes.

LoRA's hold what learns alone. Of several processes each writes its part: their checkpoint is a
folder of safetensors files, by torch.distributed.checkpoint, beside state.pt with all that is no
tensor. Any number of processes reads it, one included.
"""

import contextlib
import json
import os
import secrets
import sys
import warnings
import zipfile
from types import SimpleNamespace

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.tensor import DTensor, distribute_tensor

import starter
from support import edits, ranks


def whole(tensor):
    """Returns a tensor with the parts of all processes, or another value as it is."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    return tensor


def tensors_in(tree, *keys):
    """Yields (keys, tensor) of nested dicts."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from tensors_in(value, *keys, key)
        elif isinstance(value, torch.Tensor):
            yield (*keys, key), value


def without_tensors(tree):
    rest = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            rest[key] = without_tensors(value)
        elif not isinstance(value, torch.Tensor):
            rest[key] = value
    return rest


def put(tree, keys, value):
    *path, last = keys
    for key in path:
        tree = tree[key]
    tree[last] = value


def what_learns(policy):
    """The policy as a checkpoint has it: without the weights that do not learn, which stay as they
    were loaded."""
    content = policy.state_dict()
    for name, parameter in policy.named_parameters():
        if not parameter.requires_grad:
            del content[name]

    def load_state_dict(saved):
        policy.load_state_dict({**policy.state_dict(), **saved})

    return SimpleNamespace(state_dict=lambda: content, load_state_dict=load_state_dict)


def save_checkpoint(path, policy, optimizer, state):
    """Like starter.save_checkpoint."""
    edits.OWN["save_checkpoint"](path, what_learns(policy), optimizer, state)


def load_checkpoint(path, policy, optimizer):
    """Like starter.load_checkpoint."""
    learning = what_learns(policy)
    own = learning.state_dict()
    parameters = [x for group in optimizer.param_groups for x in group["params"]]

    def alike(keys, shape):
        """Returns the tensor that is divided as this one of a checkpoint should be, or None."""
        match keys:
            case "model", name:
                tensor = own.get(name)
            case "optimizer", "state", int(number), _:
                tensor = parameters[number]
            case _:
                return None
        return tensor if isinstance(tensor, DTensor) and tensor.shape == shape else None

    if path.is_dir():
        saved = read_parts(path, alike)
    else:
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=ranks.WORLD > 1)
        for keys, tensor in [*tensors_in(saved)]:
            part = alike(keys, tensor.shape)
            if part is not None:
                tensor = tensor.to(part.device)
                put(saved, keys, distribute_tensor(tensor, part.device_mesh, part.placements))
    starter.take_over(learning, optimizer, saved)
    return saved["state"]


# 2. Parts

STATE = "state.pt"


def save_parts(path, policy, optimizer, state):
    """Like starter.save_checkpoint: all processes come here, and each writes its part. After an
    error of one of them alone the others do not come, so that there is no checkpoint of it."""
    error = sys.exception()
    if error is not None and not getattr(error, "is_of_all", False):
        raise error
    model = what_learns(policy).state_dict()
    for name in policy.all_tied_weights_keys.keys() & model.keys():
        del model[name]  # the same tensor as another one
    content = {"model": model, "optimizer": optimizer.state_dict()}
    parts = {json.dumps(keys): tensor for keys, tensor in tensors_in(content)}
    with folder_of_all(path.with_suffix(""), parts) as (folder, is_own):
        try:
            dcp.save(parts, storage_writer=HuggingFaceStorageWriter(folder, save_distributed=True))
        except dcp.api.CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from None  # of one process
        files = set(ranks.gather([file.name for file in folder.glob("*.safetensors")]))
        if is_own:
            rest = {**without_tensors(content), "state": state, "files": sorted(files)}
            with open(folder / STATE, "wb") as file:
                torch.save(rest, file)
                file.flush()
                os.fsync(file.fileno())


@contextlib.contextmanager
def folder_of_all(path, parts):
    """Gives the folder to which all processes write, and whether this one made it. It gets its name
    when they have. A machine that does not see the disk of the first one has a folder of its own,
    with the parts of its processes."""
    folder = path.with_name("unfinished")
    mark = ranks.gather([secrets.token_hex(8)])[0]
    is_own = False
    with contextlib.ExitStack() as stack:
        for is_next in (ranks.RANK == 0, os.environ["LOCAL_RANK"] == "0"):
            if is_next and not (folder / mark).is_file():
                path.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(starter.written_whole(path, parts))
                folder.mkdir()
                (folder / mark).touch()
                is_own = True
            ranks.gather([])  # all wait
        try:
            yield folder, is_own
        except Exception as error:
            if is_own:  # it says how much room there is
                raise
            raise starter.RunStopped(f"{path} cannot be written ({error})") from error
        if is_own:
            (folder / mark).unlink()
    if is_own:
        starter.keep_last_two(path.parent)


def missing_parts(path):
    """Returns the names of the files that a checkpoint lacks."""
    if not (path / STATE).is_file():
        return []
    files = torch.load(path / STATE, map_location="cpu", weights_only=True)["files"]
    return [name for name in files if not (path / name).is_file()]


def is_whole(path):
    """Whether each part of state.pt, or of a file, has its checksum, and each file of tensors the
    size that its header tells."""
    try:
        for file in path.glob("*.safetensors"):
            safe_open(file, framework="pt")
        return zipfile.ZipFile(path / STATE if path.is_dir() else path).testzip() is None
    except Exception:  # whatever is raised over damaged bytes
        return False


def read_parts(path, alike):
    """Returns what save_parts was given, with this process's part of each tensor."""
    saved = torch.load(path / STATE, map_location="cpu", weights_only=True)
    reader = HuggingFaceStorageReader(path)
    parts = {}
    for name, about in reader.read_metadata().state_dict_metadata.items():
        part = alike(tuple(json.loads(name)), about.size)
        dtype = about.properties.dtype
        empty = torch.empty(about.size, dtype=dtype) if part is None else torch.empty_like(part)
        parts[name] = empty.detach().to(dtype)
    with warnings.catch_warnings(action="ignore"):  # that one process reads alone
        dcp.load(parts, storage_reader=reader, no_dist=ranks.WORLD == 1)
    for name, tensor in parts.items():
        put(saved, json.loads(name), tensor)
    return saved
