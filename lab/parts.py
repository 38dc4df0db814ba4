"""Several processes that hold a model in parts.

    python -m lab.parts           -> lab/results/parts.csv
    python -m lab.parts models    -> lab/results/parts_models.csv

parts.csv: what a process takes while a model is loaded, handed to vLLM, and saved.
Four processes on this machine, a Qwen3 of 118 million parameters with random weights, saved in
bf16: 472 MB in float32. Once in parts, as support/ does it, and once with every weight whole in
each process, as before. mb: by how much the resident memory of a process has grown, of that one
where it grew most, when it is done and at the most; pages of the model's files count, too.

parts_models.csv: a small model with random weights of each type that transformers knows is loaded
by two processes, in parts where support/ does so, and whole. same: whether weights, buffers and
logits are the same; "" where no such model can be made.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from lab import bench
from lab.rows import REPOSITORY, where, write_csv

N_PROCESSES = 4
WAYS = ("whole", "in parts")


def save_model(folder):
    """Returns the megabytes of its weights in float32, and those of the largest."""
    import torch
    from transformers import AutoModelForCausalLM

    bench.save_random("118M", folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(bench.config_of("118M"))
    sizes = [4 * parameter.numel() / 1e6 for parameter in model.parameters()]
    return sum(sizes), max(sizes)


def resident_mb(name):
    """Of this process: now ("VmRSS"), or at the most ("VmHWM")."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024 / 1e6


def with_growth(function, *arguments):
    """Returns what the function returns, and by how much it makes this process's memory grow."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident_mb("VmRSS")
    result = function(*arguments)
    return result, {
        "mb": resident_mb("VmRSS") - before,
        "mb_at_most": resident_mb("VmHWM") - before,
    }


def child(way, folder):
    """One of the processes. The first prints, as JSON, the growth of each in each phase."""
    import torch

    import starter
    from support import checkpoints, divided, edits, engines, ranks, tasks

    is_whole = way == "whole"
    given = dict(device="cpu", engine="vllm", precision="bf16", max_tokens_per_microbatch=1000)
    cfg = starter.cfg_with(**given)
    ranks.connect(cfg)
    cfg.device = torch.device("cpu")

    def load(model):
        edits.restore()
        if not is_whole:
            edits.replace(load_model=divided.load_model)
        policy, _ = starter.init_policy(model, cfg.device)
        divided.divide(policy, None, cfg)
        return policy

    def hand_over(policy):
        """vLLM reads one weight after the other, and keeps none of these tensors."""
        weights = engines.in_turn(policy, None if is_whole else torch.bfloat16)
        for _, tensor in [*weights] if is_whole else weights:
            tensor.sum()

    def save(policy, path):
        optimizer = torch.optim.SGD(policy.parameters())
        if is_whole:
            content = {name: checkpoints.whole(x) for name, x in policy.state_dict().items()}
            if ranks.RANK == 0:
                torch.save(content, path)
        else:
            checkpoints.save_parts(path, policy, optimizer, {})

    first = load(tasks.TINY)  # so that all libraries are loaded before anything is measured
    hand_over(first)
    save(first, Path(folder, "checkpoint_1.pt"))
    found = {}
    policy, found["load"] = with_growth(load, f"{folder}/model")
    _, found["hand over to vLLM"] = with_growth(hand_over, policy)
    _, found["save"] = with_growth(save, policy, Path(folder, "checkpoint_2.pt"))
    found = ranks.gather([found])
    if ranks.RANK == 0:
        print(json.dumps(found))


def compared(name, folder, cfg):
    """Returns the row of a model that is saved in this folder. All processes come here."""
    import torch

    from support import checkpoints, divided, edits

    whole, keys = edits.OWN["load_model"](folder, cfg.device)
    model, its_keys = divided.load_model(folder, cfg.device)
    row = {"model": name, "in_parts": model in divided.PARTS}
    divided.shard_alone(model, cfg)
    own = {**model.state_dict(), **dict(model.named_buffers())}
    differ = [key for key in keys if sorted(map(str, keys[key])) != sorted(map(str, its_keys[key]))]
    for key, tensor in {**whole.state_dict(), **dict(whole.named_buffers())}.items():
        if not torch.equal(checkpoints.whole(own[key]), tensor):
            differ.append(key)
    ids = torch.tensor([[3, 4, 5, 6, 7, 8]])
    with torch.no_grad():
        logits = [m(input_ids=ids, use_cache=False).logits for m in (whole, model)]
    if not torch.allclose(*logits, rtol=0, atol=1e-4, equal_nan=True):
        differ.append("logits")
    return {**row, "same": not differ, "differ": " ".join(differ[:3])}


def compare_models(folder, names):
    """One of two processes. The first prints a row, as JSON, for each model."""
    import torch

    import starter
    from lab import small_models
    from support import ranks

    cfg = starter.cfg_with(device="cpu", engine="vllm", precision="float32")
    ranks.connect(cfg)
    cfg.device = torch.device("cpu")
    for name in names or small_models.ROWS:
        of_model = Path(folder, name.replace(" ", "_"))
        fault = None
        if ranks.RANK == 0:
            try:
                small_models.make_model(name).save_pretrained(of_model)
            except Exception as error:  # code of the models' authors
                fault = f"{error!r:.150}"
        [fault, _] = ranks.gather([fault])  # the other one waits
        row = {"model": name, "same": "", "differ": fault}
        if fault is None:
            try:
                row = compared(name, of_model, cfg)
            except Exception as error:  # theirs again
                row["differ"] = f"{error!r:.150}"
        if ranks.RANK == 0:
            print(f"\n{json.dumps(row)}", flush=True)


def output_of(n_processes, *arguments):
    """Returns what processes of this file print."""
    launcher = f"-m torch.distributed.run --standalone --nproc-per-node={n_processes}".split()
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "lab.parts", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def rows_of_models(folder, *names):
    """Returns the rows of models, or of all."""
    lines = output_of(2, "compare", folder, *names).splitlines()
    return [json.loads(line) for line in lines if line.startswith('{"model"')]


def measured(way, folder):
    """Yields a row for each phase."""
    of_processes = json.loads(output_of(N_PROCESSES, way, folder).splitlines()[-1])
    for phase in of_processes[0]:
        row = {"phase": phase, "way": way}
        for column in ("mb", "mb_at_most"):
            row[column] = max(found[phase][column] for found in of_processes)
        yield row


def main():
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        all_mb, largest_mb = save_model(f"{folder}/model")
        for way in WAYS:
            for row in measured(way, folder):
                numbers = {name: f"{row[name]:.0f}" for name in ("mb", "mb_at_most")}
                sizes = {"model_mb": f"{all_mb:.0f}", "largest_mb": f"{largest_mb:.0f}"}
                rows.append({**row, **numbers, **sizes, **where()})
                print(rows[-1], flush=True)
    write_csv("parts", rows)


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            main()
        case ["models"]:
            with tempfile.TemporaryDirectory() as folder:
                write_csv("parts_models", [row | where() for row in rows_of_models(folder)])
        case ["compare", folder, *names]:
            compare_models(folder, names)
        case [way, folder]:
            child(way, folder)
