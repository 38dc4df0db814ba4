"""Tests of support/ranks.py: several processes under torchrun compute what one process computes.

torchrun starts this very file as a program, which makes many runs one after the other, since each
start of a process takes seconds. `python -m lab.crash_test processes` kills such runs.
"""

import contextlib
import functools
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch
import test_agents
import torch
from conftest import REPOSITORY, at_each_call, save_checkpoint, scalars, settings
from lab import parts
from lab.crash_test import outcome
from test_runs import Killed, at_call

import starter
from support import edits, engines, models, ranks, report

pytestmark = pytest.mark.slow

WITH_KL = dict(use_kl_penalty=True, kl_coef=0.1, kl_adaptation_method="target_sound")
ADAPTERS = dict(WITH_KL, lora_rank=4, learning_rate=1e-2)
AGENTS = dict(agent="talks", max_new_tokens=60)
FP16 = dict(precision="fp16", learning_rate=1e-12, n_train_steps=12)
LARGE_SCALE = 2.0**22  # of a loss; the first gradients overflow
EXACT = dict(
    use_kl_penalty=True,
    kl_coef=0.1,
    kl_estimator="exact",
    kl_in="loss_to_go",
    gradient_checkpointing=True,
)
CASES = {  # name: (checkpoint, changes of the run)
    "tied": ({}, WITH_KL),
    "adapters": ({}, ADAPTERS),
    "uneven shares, a teacher": (
        {},
        dict(EXACT, ref_model_id="tiny", rollout_batch_size=12, n_eval_problems=1),
    ),
    "rows that are left out": ({}, dict(reward="rare")),
    "agents": ({}, dict(WITH_KL, **AGENTS)),
    "Mixtral, untied": (dict(family="Mixtral", num_local_experts=4, tie=False), WITH_KL),
}
if importlib.util.find_spec("vllm") is not None:
    CASES["vLLM, adapters"] = ({}, dict(ADAPTERS, engine="vllm"))
    CASES["one vLLM of both"] = ({}, dict(WITH_KL, engine="vllm", vllm_tp=2))
    CASES["one vLLM of both, agents, adapters"] = (
        {},
        dict(ADAPTERS, engine="vllm", vllm_tp=2, **AGENTS),
    )

of_both = pytest.mark.parametrize("name", ["tied", "adapters"])


def rare(text, problem):
    """A reward that is equal for all responses to most prompts, and in most steps to all."""
    return float("7" in text and "add 5" in problem["prompt"])


def disturb(event):
    """What happens in step 3, in process 1 or in both."""
    if event == "killed":
        raise Killed
    if ranks.RANK == 0:
        return
    if event == "interrupted":
        signal.raise_signal(signal.SIGINT)
    if event == "fails":
        raise MemoryError("of an edit")
    if event == "dies":
        os.kill(os.getpid(), signal.SIGKILL)


def run_settings(checkpoint, folder, **changes):
    """A run in which every state matters: moments, old log-probs, and with the KL penalty the
    reference and the controller."""
    of_run = dict(n_train_steps=4, save_every=2, eval_every=2, epochs_per_rollout=2)
    of_run.update(changes)
    if "reward" in changes:
        of_run["reward"] = rare
    if ranks.WORLD == 1:
        of_run.pop("vllm_tp", None)
    if "agent" in changes:
        of_run.update(agent=test_agents.talks, reward=starter.reward_fn)
    return settings(checkpoint, f"{folder}/runs", **of_run)


def make_runs(file):
    """Makes the runs of a JSON file. This process holds half of the weights in each."""

    def check(policy, *others):
        n_here = sum(parameter.to_local().numel() for parameter in policy.parameters())
        assert 0.4 < n_here / sum(parameter.numel() for parameter in policy.parameters()) < 0.6

    at_each_call(models, "check_reading", check)
    start, started = engines.init_vllm, []

    def init_vllm(*options, **named):
        # One that is freed ends the groups of its process alone
        started.append(start(*options, **named))
        return started[-1]

    engines.init_vllm = init_vllm
    report.draw = lambda *of_run: None
    torch.amp.GradScaler = functools.partial(torch.amp.GradScaler, init_scale=LARGE_SCALE)
    for checkpoint, out, changes in json.loads(Path(file).read_text()):
        edits.restore()
        act = functools.partial(disturb, changes.pop("event", None))
        in_step_3 = at_call(starter, "compute_group_normalized_advantages", 3, act)
        with in_step_3, contextlib.suppress(Killed, SystemExit):
            starter.main(**run_settings(checkpoint, out, **changes))


def torchrun(*arguments):
    """Returns a launcher that starts this program in two processes."""
    options = "-m torch.distributed.run --standalone --nproc-per-node=2 --shutdown-timeout=600"
    paths = os.pathsep.join([str(REPOSITORY), str(Path(__file__).parent)])
    return subprocess.Popen(
        [sys.executable, *options.split(), *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def last_words(errors):
    """What the processes themselves have said at last, among lines of torchrun."""
    return re.findall(r"^process \d ends: .*", errors, re.MULTILINE)[-1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Makes all runs of two processes. Returns their folder, one subfolder for each case."""
    folder = tmp_path_factory.mktemp("ranks")
    runs = []
    for name, (model, changes) in CASES.items():
        checkpoint = str(save_checkpoint(folder / name / "checkpoint", **model))
        if "agent" in changes:  # whose turns would seldom end by the model's own stop token
            path = Path(checkpoint, "generation_config.json")
            ends = {"eos_token_id": [1, *range(2, 58, 5)]}
            path.write_text(json.dumps(json.loads(path.read_text()) | ends))
        more = [("two", {})]
        if name in ("tied", "adapters"):
            begun_by_one = folder / name / "begun by one"
            starter.main(**run_settings(checkpoint, begun_by_one, **changes, n_train_steps=2))
            more += [
                ("killed", {"event": "killed"}),
                ("killed", {"resume": True}),
                ("begun by one", {"resume": True}),
            ]
        if name == "tied":
            more += [("fp16", FP16), ("interrupted", {"event": "interrupted"})]
        runs += [(checkpoint, str(folder / name / out), {**changes, **x}) for out, x in more]
    of_one_engine = [run for run in runs if "vllm_tp" in run[2]]  # one size of it in a process
    rest = [run for run in runs if run not in of_one_engine]
    for event, runs in (("fails", of_one_engine), ("dies", rest)):
        runs.append((checkpoint, str(folder / event), {"event": event}))
        file = folder / f"{event}.json"
        file.write_text(json.dumps(runs))
        launcher = torchrun(__file__, file)
        output, errors = launcher.communicate(timeout=1800)
        assert output.count("2 processes divide") == len(runs), errors[-3000:]  # one of them speaks
        assert launcher.returncode == 1
        of_step_2 = run_folder_in(folder / event) / "checkpoint_00000002"
        assert time.time() - of_step_2.stat().st_mtime < 60
        assert "Step 3/" not in output.rpartition("2 processes divide")[2]
        (folder / f"{event}.txt").write_text(errors)
    return folder


def run_folder_in(folder):
    [path] = folder.glob("runs/*/settings.json")
    return path.parent


def assert_same_run(first, second):
    """Every logged number but those of time, memory, rounding and the report, and the weights."""
    numbers, weights = [], []
    for folder in map(run_folder_in, (first, second)):
        weights.append(safetensors.torch.load_file(folder / "model" / "model.safetensors"))
        logged = scalars(folder).items()
        is_rounded = re.compile("time/|mem/|.*(per_s$|sampler)|eval/kl").match
        numbers.append({tag: values for tag, values in logged if not is_rounded(tag)})
    assert numbers[0].keys() == numbers[1].keys() and "train/grad_norm" in numbers[0]
    for tag in numbers[0]:
        assert numbers[0][tag] == pytest.approx(numbers[1][tag], rel=1e-3, abs=1e-5), tag
    torch.testing.assert_close(*weights, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_have_the_run_of_one(folder, name):
    checkpoint, one = folder / name / "checkpoint", folder / name / "one"
    starter.main(**run_settings(checkpoint, one, **CASES[name][1]))
    assert_same_run(one, folder / name / "two")
    if "left out" in name:
        shares = scalars(run_folder_in(one))["train/frac_zero_std"].values()
        assert 1 in shares and {*shares} != {1}


@of_both
def test_killed_run_goes_on_with_the_same_bits(folder, name):
    assert outcome(folder / name / "killed") == outcome(folder / name / "two")


def test_signal_to_one_process_ends_all_with_a_checkpoint(folder):
    checkpoints = run_folder_in(folder / "tied" / "interrupted").glob("checkpoint_*")
    assert max(checkpoints).name == "checkpoint_00000003"


@of_both
def test_checkpoint_does_not_depend_on_the_number_of_processes(folder, name):
    assert_same_run(folder / name / "two", folder / name / "begun by one")
    begun_by_two = folder / name / "begun by two"
    shutil.copytree(folder / name / "two", begun_by_two)
    shutil.rmtree(run_folder_in(begun_by_two) / "checkpoint_00000004")
    checkpoint = folder / name / "checkpoint"
    starter.main(**run_settings(checkpoint, begun_by_two, resume=True, **CASES[name][1]))
    assert_same_run(folder / name / "two", begun_by_two)


def test_loss_scale_of_fp16_falls_in_all_processes_alike(folder):
    """Otherwise gradients of several scales would be added up. The weights hardly move."""
    one = folder / "float32"
    changes = {**WITH_KL, **FP16, "precision": "float32"}
    starter.main(**run_settings(folder / "tied" / "checkpoint", one, **changes))
    exact, ours = (
        scalars(run_folder_in(of))["train/grad_norm"] for of in (one, folder / "tied" / "fp16")
    )
    finite = {step: norm for step, norm in ours.items() if math.isfinite(norm)}
    assert finite and 1 not in finite
    assert finite == pytest.approx({step: exact[step] for step in finite}, rel=0.1)


def test_sigterm_stops_torchrun_and_the_same_command_goes_on(checkpoint, tmp_path):
    command = [REPOSITORY / "starter.py", f"--out_dir={tmp_path}", f"--model_id={checkpoint}"]
    command += "--task=countdown_small --device=cpu --engine=transformers".split()
    command += "--rollout_batch_size=16 --max_new_tokens=8 --n_eval_problems=8".split()
    launcher = torchrun(*command, "--n_train_steps=1000")
    while not launcher.stdout.readline().startswith("Step 2/"):
        assert launcher.poll() is None, launcher.stderr.read()
    launcher.send_signal(signal.SIGTERM)
    output, _ = launcher.communicate(timeout=600)
    step = int(re.search(r"stopped after step (\d+) of 1000", output)[1])
    launcher = torchrun(*command, f"--n_train_steps={step + 1}", "--resume")
    output, errors = launcher.communicate(timeout=600)
    assert launcher.returncode == 0, errors
    assert output.count("=== Report") == 1 and f"after step {step}\n" in output


# Each process sees a folder of its own
APART = """
import ctypes, os, shutil, signal, sys, time
from pathlib import Path
import starter
from conftest import settings
from support import ranks, report
folder, checkpoint, rank = Path(sys.argv[1]), sys.argv[2], os.environ["RANK"]
Path(folder, rank).mkdir(exist_ok=True)
os.chdir(folder / rank)
os.environ["LOCAL_RANK"] = "0"
report.draw = lambda *of_run: None
def train(**changes):
    starter.main(**settings(checkpoint, "runs", use_kl_penalty=True, **changes))
"""
FAILS = """
scored = []
def reward(text, problem):
    scored.append(text)
    return 1 / (len(scored) < 100) + len(text) % 3
train(n_train_steps=30, reward=reward)
"""
GOES_ON = """
try:
    train(n_train_steps=6, resume=True)
except starter.InputError as error:
    print(error)
ranks.gather([])
if rank == "0":
    for here, there in ("01", "10"):
        shutil.copytree(folder / here / "runs", folder / there / "runs", dirs_exist_ok=True)
ranks.gather([])
train(n_train_steps=6, resume=True)
"""


def run_apart(tmp_path, checkpoint, program):
    """Returns a launcher of two processes that run this program after APART."""
    tmp_path.mkdir(exist_ok=True)
    script = tmp_path / "script.py"
    script.write_text(APART + program)
    return torchrun(script, tmp_path, checkpoint)


def test_machines_without_a_common_disk_train_and_a_resume_says_what_is_missing(
    checkpoint, tmp_path
):
    """The first part ends by an error of the reward, which all processes have."""
    launcher = run_apart(tmp_path, checkpoint, FAILS)
    output, errors = launcher.communicate(timeout=100)
    assert launcher.returncode != 0
    assert last_words(errors).startswith("process 1 ends: process 0 has failed: ZeroDivisionError")
    assert errors.count("It is of the reward, for") == 1
    assert output.count("An error ends the run; a checkpoint of step 5 is saved") == 1
    [of_1] = (tmp_path / "1").glob("runs/*/*")
    [of_0] = (tmp_path / "0").glob("runs/*/checkpoint_*")
    for part in (of_0, of_1):
        assert part.name == "checkpoint_00000005" and len([*part.glob("*.safetensors")]) == 1
    launcher = run_apart(tmp_path, checkpoint, GOES_ON)
    output, errors = launcher.communicate(timeout=100)
    assert launcher.returncode == 0, errors
    refused, trained = output.split("after step 5\n")
    assert "each machine needs the same newest checkpoint" in refused
    assert "checkpoint_00000005, 2 parts" in refused
    assert trained.count("=== Report") == 1
    assert (of_0.parent / "model" / "model.safetensors").is_file()
    assert len([*of_1.with_name("checkpoint_00000006").glob("*.safetensors")]) == 1


def test_no_process_holds_more_than_its_part_and_the_largest_tensor(tmp_path):
    """In megabytes of resident memory, beside weights that are whole in each process."""
    of_model, largest = parts.save_model(tmp_path / "model")
    grown = {}
    for way in parts.WAYS:
        for row in parts.measured(way, str(tmp_path)):
            grown[way, row["phase"]] = row
    part = of_model / parts.N_PROCESSES
    in_parts = {phase: row for (way, phase), row in grown.items() if way == "in parts"}
    assert in_parts["load"]["mb"] < part + largest
    assert in_parts["load"]["mb_at_most"] < part + part / 2 + largest  # with the file's pages
    assert in_parts["hand over to vLLM"]["mb_at_most"] < part + largest
    assert in_parts["save"]["mb_at_most"] < 2 * part + largest  # and the bytes that are written
    for phase in in_parts:
        assert grown["whole", phase]["mb_at_most"] > 1.5 * in_parts[phase]["mb_at_most"]


def test_model_that_is_read_in_parts_is_the_one_that_is_read_whole(tmp_path):
    """Weights, buffers and logits: of experts, routers with buffers, scaled embeddings, Conv1D; and
    one whose parts transformers would join wrongly."""
    names = "mixtral deepseek_v3 gemma2 gpt2 llama4_text kimi_linear".split()
    for row in parts.rows_of_models(str(tmp_path), *names):
        assert row["same"], row
        assert row["in_parts"] == (names.pop(0) != "kimi_linear")
    assert not names


IN_16_BITS = """
import sys
import torch
import starter
from support import divided, edits, engines, ranks
cfg = starter.cfg_with(device="cpu", engine="vllm", precision="bf16", max_tokens_per_microbatch=99)
ranks.connect(cfg)
cfg.device = torch.device("cpu")
model, _ = divided.load_model(sys.argv[1], cfg.device)
divided.shard_alone(model, cfg)
shapes = {tuple(x.shape) for n, x in model.named_parameters() if "layers" in n and x.dim() > 1}
kept = []
def keep(tensor):
    if tensor.dtype == torch.bfloat16 and {tensor.shape, tensor.T.shape} & shapes:
        kept.append(tensor)
    return tensor
with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
    with starter.autocast(cfg.device, cfg.precision):
        loss = model(input_ids=torch.arange(12)[None], use_cache=False).logits.sum()
print(len(kept), sum(tensor.untyped_storage().nbytes() for tensor in kept))
loss.backward()
gradients = [parameter.grad for parameter in model.parameters()]
assert {gradient.dtype for gradient in gradients} == {torch.float32}
assert all(gradient.to_local().any() for gradient in gradients)
"""


def test_weights_in_16_bits_are_not_kept_for_the_backward_pass(checkpoint, tmp_path):
    """Of each matrix of the layers, seven in each of two, the backward pass needs what a gather
    brings back. Autocast alone would keep 2 bytes of each weight."""
    script = tmp_path / "script.py"
    script.write_text(IN_16_BITS)
    launcher = torchrun(script, checkpoint)
    output, errors = launcher.communicate(timeout=100)
    assert launcher.returncode == 0, errors
    n_kept, n_bytes = map(int, output.splitlines()[-1].split())
    assert n_kept >= 14 and n_bytes == 0


@pytest.mark.parametrize(
    "event, words",
    [
        ("fails", "process 1 has failed: MemoryError('of an edit')"),
        ("dies", "process 1 was killed, perhaps for its memory"),
    ],
)
def test_process_that_ends_ends_the_others_which_say_why(folder, event, words):
    said = last_words((folder / f"{event}.txt").read_text())
    assert said.startswith("process 0 ends: ") and words in said


# Nobody's connection is closed, as where a machine or a network is gone
SILENT = """
ranks.PULSE, ranks.PATIENCE = 0.5, 6.0
begin = ranks.LastWords.__init__
def begin_silent(self):
    begin(self)
    if event == "was never heard" and rank == "1":
        os.kill(self.watch.pid, signal.SIGSTOP)
ranks.LastWords.__init__ = begin_silent
acts = {
    "is slow": lambda: ctypes.PyDLL(None).sleep(18),  # and lets no other thread run
    "is halted": lambda: time.sleep(1),  # to be found in a step
    "is silent": lambda: [os.kill(int(pid), signal.SIGSTOP) for pid in pids],
    "was never heard": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}
real = starter.compute_group_normalized_advantages
def compute_group_normalized_advantages(*given):
    global pids
    pids = [str(ranks.LAST_WORDS[0].watch.pid), str(os.getpid())]
    Path(folder, f"{event} {rank}").write_text(" ".join(pids))
    if rank == "1":
        acts[event]()
    return real(*given)
starter.compute_group_normalized_advantages = compute_group_normalized_advantages
for event, n_train_steps in EVENTS.items():
    train(n_train_steps=n_train_steps)
"""


def run_events(tmp_path, checkpoint, events):
    """events: {what happens in process 1: steps of the run}, one run after the other."""
    return run_apart(tmp_path, checkpoint, f"EVENTS = {events}\n{SILENT}")


def check_words_about_silence(launcher, file):
    """torchrun itself waits for the process, whose numbers are in this file."""
    said = next((line for line in launcher.stderr if "process 0 ends: " in line), "")
    for pid in file.read_text().split():
        os.kill(int(pid), signal.SIGKILL)
    output, _ = launcher.communicate(timeout=60)
    assert "no sign of life from processes [1] for 6 s" in said and launcher.returncode != 0
    return output


def test_silent_process_ends_the_others_but_no_slow_reward_and_no_halt_of_all(checkpoint, tmp_path):
    """The reward takes three times as long as a process may be silent. The halt, as by Ctrl-Z and
    fg, lasts longer than that, too. Another run, beside it, has a process that was never heard."""
    other = run_events(tmp_path / "other", checkpoint, {"was never heard": 1})
    events = {"is slow": 1, "is halted": 9, "is silent": 1}
    launcher = run_events(tmp_path, checkpoint, events)
    pids = []  # of both processes and their watches
    while len(pids) < 4:
        assert launcher.poll() is None, launcher.stderr.read()
        time.sleep(0.1)
        texts = [file.read_text() for file in tmp_path.glob("is halted ?")]
        pids = [int(pid) for text in texts for pid in text.split()]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(9)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.3)
    output = check_words_about_silence(launcher, tmp_path / "is silent 1")
    assert output.count("=== Report") == 2
    check_words_about_silence(other, tmp_path / "other" / "was never heard 1")


if __name__ == "__main__":
    make_runs(sys.argv[1])
