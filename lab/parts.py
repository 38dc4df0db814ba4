"""What several processes take while a model is loaded, handed to vLLM, and saved.

    python -m lab.parts     -> lab/results/parts.csv

Four processes on this machine, a Qwen3 of 118 million parameters with random weights, saved in
bf16: 472 MB in float32. Once in parts, as support/ does it, and once with every weight whole in
each process, as before. mb: by how much the resident memory of a process has grown, of that one
where it grew most, when it is done and at the most; pages of the model's files count, too.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from lab.rows import REPOSITORY, where, write_csv

N_PROCESSES = 4
WAYS = ("whole", "in parts")


def save_model(folder):
    """Returns the megabytes of its weights in float32, and those of the largest."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    from support import tasks

    config = Qwen3Config(
        vocab_size=32_000,
        hidden_size=768,
        intermediate_size=2304,
        num_hidden_layers=10,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    model.bfloat16().save_pretrained(folder)
    AutoTokenizer.from_pretrained(tasks.TINY).save_pretrained(folder)
    sizes = [4 * parameter.numel() / 1e6 for parameter in model.parameters()]
    return sum(sizes), max(sizes)


class Growth:
    """The resident memory of this process, from here on."""

    def __init__(self):
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self.before = self.megabytes("VmRSS")

    def megabytes(self, name):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024 / 1e6

    def since(self):
        now, most = self.megabytes("VmRSS"), self.megabytes("VmHWM")
        return {"mb": now - self.before, "mb_at_most": most - self.before}


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
    growth = Growth()
    policy = load(f"{folder}/model")
    found["load"] = growth.since()
    growth = Growth()
    hand_over(policy)
    found["hand over to vLLM"] = growth.since()
    growth = Growth()
    save(policy, Path(folder, "checkpoint_2.pt"))
    found["save"] = growth.since()
    found = ranks.gather([found])
    if ranks.RANK == 0:
        print(json.dumps(found))


def measured(way, folder):
    """Yields a row for each phase."""
    launcher = f"-m torch.distributed.run --standalone --nproc-per-node={N_PROCESSES}".split()
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "lab.parts", way, folder],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    of_processes = json.loads(done.stdout.splitlines()[-1])
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
    if sys.argv[1:]:
        child(*sys.argv[1:])
    else:
        main()
