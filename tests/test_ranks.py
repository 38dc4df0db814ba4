"""Tests of support/ranks.py: several processes under torchrun compute what one process computes.

torchrun starts this very file as a program; the functions named program_... are what it runs.
"""
import atexit
import copy
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("support.fast")

import safetensors.torch
import starter
from conftest import save_checkpoint, scalars, settings, variety
from support import fast, ranks

REPOSITORY = Path(starter.__file__).parent
needs_vllm = pytest.mark.skipif(not starter.importlib.util.find_spec("vllm"),
                                reason="vLLM is not installed")


# --------------------------------------------------------------------------------------------------
# What torchrun runs

RESPONSE_LENGTHS = (1, 9, 4, 6, 7, 2, 8, 3)


def ragged_batch():
    """Eight responses of different lengths to three prompts, as one batch with its weights."""
    responses = [
        starter.Response(list(range(5, 6 + n % 3)), [5 + (5 * n + i * i) % 32 for i in range(n)],
                         [-3.4] * n, True)
        for n in RESPONSE_LENGTHS]
    batch = starter.make_batch(responses, torch.linspace(-1, 1, len(responses)), "cpu")
    batch["weights"] = starter.token_weights(batch["response_mask"], "dapo", 9)
    return batch


def gradients_and_means(model, ref_model, microbatches, parts):
    """Returns {name: whole gradient} and {name: mean over the step's tokens}."""
    cfg = SimpleNamespace(clip_range=0.2, importance_cap=2.0, temperature=1.0, bf16=False,
                          kl=starter.KLSettings("exact"))
    means, _ = starter.accumulate_gradients(model, microbatches, sum(RESPONSE_LENGTHS), cfg, parts,
                                            ref_model, 0.1)
    gradients = {name: parts.ranks.whole(p.grad) for name, p in model.named_parameters()}
    return gradients, {name: float(mean) for name, mean in means.items()}


def compare_with_one_process(folder, divided, weights_at_once):
    """One step by the plain path on this process alone, and one by all ranks. Returns the
    differences of gradients and means, and the microbatches of this rank."""
    ranks.WEIGHTS_AT_ONCE = weights_at_once
    policy, _ = starter.init_policy(folder, "cpu")
    ref_model = copy.deepcopy(policy).requires_grad_(False)
    generator = torch.Generator().manual_seed(3)
    for parameter in ref_model.parameters():
        parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    batch = ragged_batch()
    sampling = starter.Sampling(group_size=2, max_new_tokens=4, temperature=1.0, seed=0,
                                stop_token_ids=(1,))

    alone = starter.Parts(starter.PLAIN, starter.OneProcess(), None)
    plain = copy.deepcopy(policy)
    gradients, means = gradients_and_means(plain, copy.deepcopy(ref_model),
                                           starter.cut_microbatches(batch, 60), alone)
    sampled = starter.rollout(plain, None, [[5, 6]], sampling, alone)

    for model in (policy, ref_model):
        fast.COMPUTE.prepare(model)
    compute = divided.shard([policy, ref_model], fast.COMPUTE)
    parts = starter.Parts(compute, divided, None)
    microbatches = divided.microbatches(batch, 9, parts.compute.cut_microbatches)
    our_gradients, our_means = gradients_and_means(policy, ref_model, microbatches, parts)
    our_sampled = starter.rollout(policy, None, [[5, 6]], sampling, parts)

    scale = max(gradient.abs().max() for gradient in gradients.values())
    errors = [(gradients[name] - our_gradients[name]).abs().max() / scale for name in gradients]
    return {
        "gradient": max(errors).item(),
        "means": max(abs(means[name] - our_means[name]) for name in means),
        "is_divided": any(hasattr(parameter, "full_tensor") for parameter in policy.parameters()),
        "same_samples": [r.response_ids for r in sampled] == [r.response_ids for r in our_sampled],
        "n_sampled": len(our_sampled),  # the second rank had no prompt
        "microbatches": len(microbatches),
        "with_responses": sum(rows["response_mask"].any().item() for rows in microbatches),
    }


class AtTheInterpretersEnd:
    """Writes a line if it is still there when the interpreter ends. gloo's threads release
    tensors then, and abort the process."""
    def __del__(self, write=os.write):
        write(2, b"met the interpreter's own end\n")


def program_memory(folder, out_dir):
    """Trains, saves, resumes. Writes to out_dir/memory_<rank>.json the most memory, in GB above
    that before the model was loaded, in each phase."""
    peaks = {}

    def status(name):
        found = re.search(rf"{name}:\s*(\d+) kB", Path("/proc/self/status").read_text())
        return int(found[1]) * 1024 / 1e9

    def watched(phase, function):
        def call(*args, **kwargs):
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            result = function(*args, **kwargs)
            peaks[phase] = max(peaks.get(phase, 0.0), status("VmHWM") - at_first)
            if phase == "update":
                models.append(args[0])
            return result

        return call

    divided = ranks.find()
    models = []
    with divided.joined():
        at_first = status("VmRSS")
        given = dict(n_train_steps=2, save_every=1, use_kl_penalty=True, kl_coef=0.1, bf16=True,
                     max_tokens_per_microbatch=2048, rollout_batch_size=64, max_new_tokens=16)
        for phase, owner, name in (("update", starter, "accumulate_gradients"),
                                   ("rollout", starter, "rollout"), ("save", starter.Run, "save"),
                                   ("load", starter.Run, "load"),
                                   ("the model", ranks.Ranks, "collect")):
            setattr(owner, name, watched(phase, getattr(owner, name)))
        starter.main(**run_settings(folder, out_dir, **given))
        starter.main(**run_settings(folder, out_dir, resume=True, **given | {"n_train_steps": 3}))
        watched("sync", starter.drain)(divided.weights(models[-1]))
        path = Path(out_dir) / f"memory_{divided.rank}.json"
        path.write_text(json.dumps(peaks))


def program_gradients(folder):
    """Writes what compare_with_one_process finds to folder/rank_<n>.json."""
    global late
    late = AtTheInterpretersEnd()
    atexit.register(sys.stderr.write, "left in order\n")
    divided = ranks.find()
    with divided.joined():
        totals = divided.total({"largest": divided.rank + 1, "sum": 1.5}, largest=("largest",))
        assert totals == {"largest": 2, "sum": 3}
        own, first = divided.share(list(range(5)))
        assert own == list(range(5))[first:first + 3]
        assert divided.gather(own) == list(range(5))
        rows = [compare_with_one_process(f"{folder}/{tie}", divided, weights_at_once)
                for tie in (True, False) for weights_at_once in (1, 10**6)]
        Path(folder, f"rank_{divided.rank}.json").write_text(json.dumps(rows))


def fails_on_second_rank(text, problem):
    """A reward that raises on one rank of two, while the other goes on."""
    return variety(text, problem) / (int(os.environ.get("RANK", 0)) == 0)


def program_run(checkpoint, folder, changes):
    """Trains, and writes the run folder that main() returns to folder/rank_<n>.txt."""
    changes = json.loads(changes)
    if changes.pop("fails", False):
        changes["reward"] = fails_on_second_rank
    starter.warnings.filterwarnings("ignore", category=FutureWarning)
    divided = ranks.find()
    with divided.joined():
        result = starter.main(**run_settings(checkpoint, folder, **changes))
        Path(folder, f"rank_{divided.rank}.txt").write_text(str(result["run_folder"]))


def run_settings(checkpoint, folder, **changes):
    """A run in which every state matters: moments, old log-probs, and with the KL penalty the
    reference and the controller."""
    of_run = dict(n_train_steps=6, save_every=2, eval_every=3, epochs_per_rollout=2)
    return settings(checkpoint, folder, **of_run | changes)


WITH_KL = dict(use_kl_penalty=True, kl_coef=0.1, kl_adaptation_method="target_sound")


def environment():
    paths = os.pathsep.join([str(REPOSITORY), str(Path(__file__).parent)])
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}


def torchrun(*arguments, nodes=1, timeout=600):
    """Runs a program of this file on two ranks, of one node or of two that meet on the loopback
    device. Returns the exit codes of the nodes and all output."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}",
        f"--nproc-per-node={2 // nodes}", f"--rdzv-endpoint=localhost:{port}",
        "--rdzv-backend=c10d", "--rdzv-id=test", __file__, *map(str, arguments)]
    errors = tempfile.TemporaryFile("w+")
    of_nodes = [subprocess.Popen(command, env=environment(), text=True, stdout=subprocess.PIPE,
                                 stderr=errors) for _ in range(nodes)]
    try:
        outputs = [node.communicate(timeout=timeout)[0] for node in of_nodes]
    finally:
        for node in of_nodes:
            node.kill()
    errors.seek(0)
    global last_errors
    last_errors = errors.read()
    return [node.returncode for node in of_nodes], "".join(outputs) + last_errors


# --------------------------------------------------------------------------------------------------
# One process

def rank_of(rank, world):
    """Returns a Ranks that knows its place and is connected to nobody."""
    unconnected = object.__new__(ranks.Ranks)
    unconnected.rank = rank
    unconnected.world = world
    return unconnected


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("max_tokens", [9, 1000])
def test_microbatches_of_all_ranks_hold_every_row_once(world, max_tokens):
    batch = ragged_batch()
    batch["row"] = torch.arange(len(RESPONSE_LENGTHS))[:, None]
    of_ranks = [rank_of(rank, world).microbatches(batch, max_tokens, fast.cut_microbatches)
                for rank in range(world)]
    assert len({len(microbatches) for microbatches in of_ranks}) == 1
    rows_of_ranks = [[row for rows in microbatches
                      for row, mask in zip(rows["row"][:, 0].tolist(), rows["response_mask"])
                      if mask.any()] for microbatches in of_ranks]
    assert sorted(sum(rows_of_ranks, [])) == list(range(len(RESPONSE_LENGTHS)))
    for rows in rows_of_ranks:  # the prompt of a response of n tokens has n % 3 + 1
        prompts = {RESPONSE_LENGTHS[row] % 3 for row in rows}
        assert len(rows) == sum(n % 3 in prompts for n in RESPONSE_LENGTHS)


@pytest.mark.parametrize("n", [0, 1, 4, 7])
def test_shares_of_all_ranks_make_the_list(n):
    shares = [rank_of(rank, 3).share(list(range(n))) for rank in range(3)]
    assert sum((items for items, _ in shares), []) == list(range(n))
    for items, first in shares:
        assert items == list(range(first, first + len(items)))


def test_several_ranks_refuse_a_model_that_the_fast_path_does_not_fit():
    with pytest.raises(starter.InputError, match="start one process, without torchrun"):
        rank_of(0, 2).shard([], starter.PLAIN)


# --------------------------------------------------------------------------------------------------
# Two processes

@pytest.mark.slow
def test_gradient_of_two_ranks_is_that_of_one_process(tmp_path):
    """Ragged responses with a reference, tied and untied heads, layers gathered one by one and
    together, and ranks with different numbers of microbatches."""
    for tie in (True, False):
        save_checkpoint(tmp_path / str(tie), tie=tie)
    codes, output = torchrun("program_gradients", tmp_path)
    assert codes == [0], output[-3000:]
    rows = [row for path in tmp_path.glob("rank_*.json") for row in json.loads(path.read_text())]
    assert len(rows) == 8
    for row in rows:
        assert row["is_divided"] and row["same_samples"] and row["n_sampled"] == 2, row
        assert row["gradient"] < 1e-5 and row["means"] < 1e-5, row
    assert any(row["microbatches"] > row["with_responses"] for row in rows), rows
    assert output.count("left in order") == 2 and "own end" not in output, output[-3000:]


def assert_same_run(first, second):
    """Every logged number but those of time, memory and the sampler's rounding, and the weights."""
    def numbers(run_folder):
        return {tag: values for tag, values in scalars(run_folder).items()
                if not tag.startswith(("time/", "mem/"))
                and "per_s" not in tag and "sampler" not in tag}

    one, two = numbers(first), numbers(second)
    assert one.keys() == two.keys()
    for tag in one:
        assert one[tag] == pytest.approx(two[tag], rel=2e-3, abs=1e-5), tag
    one, two = (safetensors.torch.load_file(folder / "model" / "model.safetensors")
                for folder in (first, second))
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("nodes, changes", [
    (1, WITH_KL), (2, {}), (1, WITH_KL | dict(lora_rank=4, learning_rate=1e-2))],
    ids=["one node, with KL", "two nodes, without KL", "one node, adapters"])
def test_two_ranks_have_the_run_of_one_process(checkpoint, tmp_path, nodes, changes):
    """Also where one process goes on from the ranks' checkpoint, and the other way round."""
    alone = starter.main(**run_settings(checkpoint, tmp_path / "alone", **changes))["run_folder"]
    codes, output = torchrun("program_run", checkpoint, tmp_path / "ranks", json.dumps(changes),
                             nodes=nodes)
    assert codes == [0] * nodes and "ranks 2" in output, output[-3000:]
    assert output.count("=== Report ===") == 1
    ranks_folder, = tmp_path.glob("ranks/20*")
    returned = [(tmp_path / "ranks" / f"rank_{rank}.txt").read_text() for rank in (0, 1)]
    assert returned == [str(ranks_folder)] * 2
    assert_same_run(alone, ranks_folder)

    # The runs saved after steps 2, 4 and 6, and kept the last two.
    (ranks_folder / "checkpoints" / "step_00000006.safetensors").unlink()
    starter.main(**run_settings(checkpoint, tmp_path / "ranks", resume=True, **changes))
    assert_same_run(alone, ranks_folder)

    (alone / "checkpoints" / "step_00000006.safetensors").unlink()
    codes, output = torchrun("program_run", checkpoint, tmp_path / "alone",
                             json.dumps(changes | {"resume": True}), nodes=nodes)
    assert codes == [0] * nodes and "after step 4" in output, output[-3000:]
    assert_same_run(ranks_folder, alone)


@needs_vllm
@pytest.mark.slow
def test_two_ranks_with_vllm_have_the_run_of_one_process(checkpoint, tmp_path):
    """Each rank has a vLLM of its own."""
    changes = json.dumps(WITH_KL | dict(engine="vllm", n_train_steps=3))
    codes, output = torchrun("program_run", checkpoint, tmp_path / "ranks", changes)
    assert codes == [0] and "ranks 2" in output and "engine: vllm" in output, output[-3000:]
    assert last_errors == ""
    alone = subprocess.run([sys.executable, __file__, "program_run", checkpoint,
                            tmp_path / "alone", changes], env=environment(), capture_output=True,
                           text=True, timeout=600)
    assert alone.returncode == 0, alone.stderr[-3000:]
    one, two = (scalars(next(tmp_path.glob(f"{name}/20*"))) for name in ("alone", "ranks"))
    for tag in ("train/reward_mean", "train/response_length", "train/loss", "train/kl_per_token",
                "train/grad_norm", "eval/reward_mean"):
        assert one[tag] == pytest.approx(two[tag], rel=5e-3, abs=1e-4), tag


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_no_rank_holds_much_more_than_in_a_step(tmp_path):
    """While it saves, loads or hands its weights on. 41 million parameters: 0.16 GB a copy."""
    bench = pytest.importorskip("lab.bench")
    bench.make_checkpoint(tmp_path / "model", **bench.SIZES["L"])
    codes, output = torchrun("program_memory", tmp_path / "model", tmp_path)
    assert codes == [0], output[-3000:]
    for path in tmp_path.glob("memory_*.json"):
        peaks = json.loads(path.read_text())
        step = max(peaks["update"], peaks["rollout"])
        assert {"save", "load", "the model", "sync"} < peaks.keys() and step > 0.3, peaks
        assert max(peaks.values()) <= 1.3 * step, peaks


@pytest.mark.slow
def test_rank_that_fails_ends_all(checkpoint, tmp_path):
    codes, output = torchrun("program_run", checkpoint, tmp_path / "ranks", '{"fails": true}',
                             timeout=300)
    assert codes[0] != 0 and "reward raised ZeroDivisionError" in output, output[-3000:]
    assert not list(tmp_path.glob("ranks/rank_*.txt"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]](*sys.argv[2:])
