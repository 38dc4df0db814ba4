"""Tests of vLLM as the sampler: its start, the weights it gets, what it samples, and whole runs.

Most need vLLM, which requirements-vllm-cpu.txt installs for a CPU. Runs of two processes with vLLM
are in test_ranks.py, kills in lab/crash_test.py.
"""
import gc
import importlib.util
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import make_tokenizer, save_checkpoint
from lab.crash_test import outcome, sums
from test_runs import Killed, at_call, die, full_settings
from transformers import AutoModelForCausalLM

import starter
from support import engines, lora


def needs_vllm(test):
    is_missing = not importlib.util.find_spec("vllm")
    return pytest.mark.slow(pytest.mark.skipif(is_missing, reason="vLLM is not installed")(test))


@pytest.fixture(autouse=True)
def end_of_engine():
    """An engine that ends while another is at work would end the groups of processes of both."""
    yield
    gc.collect()


@pytest.fixture
def cpu_mechanics():
    """Puts support/engines.py's functions into starter, as main() does."""
    engines.attach()


def change_weights(policy, seed):
    """Scales and moves every weight, as updates would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter *= 1.1
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)


def prompts_of(policy, tokenizer, *texts):
    problems = [{"prompt": text} for text in texts]
    cfg = SimpleNamespace(max_new_tokens=20, enable_thinking=False)
    return [problem["prompt_ids"]
            for problem in starter.with_prompt_ids(problems, policy, tokenizer, cfg)]


def sample(llm, policy, prompts, group_size=4, temperature=1.0, seed=0):
    """Samples with vLLM as it is, or with transformers where llm is None."""
    cfg = SimpleNamespace(max_new_tokens=20, bf16=False, stop_token_ids=(1,))
    if llm is None:
        return starter.rollout_with_transformers(policy, prompts, cfg, seed, group_size,
                                                 temperature)
    return starter.rollout_with_vllm(llm, prompts, cfg, seed, group_size, temperature)


def largest_difference(policy, responses, temperature=1.0):
    """The largest |sampler - trainer| log-prob, in nats."""
    batch = starter.make_batch(responses, torch.zeros(len(responses)), "cpu")
    ours = starter.get_response_log_probs(policy, batch["input_ids"], batch["labels"],
                                          batch["response_mask"], temperature)
    return (ours - batch["rollout_log_probs"]).abs().max().item()


def test_weight_sync_refuses_an_engine_that_keeps_its_prefix_cache(checkpoint):
    llm = mock.Mock(**{"reset_prefix_cache.return_value": False})
    policy = AutoModelForCausalLM.from_pretrained(checkpoint)
    with pytest.raises(starter.RunStopped, match="kept its prefix cache"):
        starter.load_policy_into_vllm_instance(policy, llm)


def save_with_vision(folder):
    """Saves a Llama 4 that reads images, too. vLLM's class for it needs torchvision."""
    from transformers import AutoConfig, Llama4Config, Llama4ForConditionalGeneration
    text = save_checkpoint(folder / "text", family="Llama4Text", num_local_experts=2, head_dim=32,
                           intermediate_size_mlp=96, attention_chunk_size=128, tie=False)
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "vision_output_dim",
                           "projector_input_dim", "projector_output_dim"), 32)
    vision = sizes | dict(num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=4)
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(text).to_dict()
    model = Llama4ForConditionalGeneration(Llama4Config(text_config=config, vision_config=vision))
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


EXPERTS = dict(num_experts=4, num_experts_per_tok=2, num_local_experts=4, moe_intermediate_size=32)


@needs_vllm
@pytest.mark.parametrize("lora_rank", [0, 4])
@pytest.mark.parametrize("family, changes", [
    ("Qwen3", dict(tie=True)), ("Qwen3", dict(tie=False)), ("Llama", dict(tie=True)),
    ("Qwen3Moe", EXPERTS | dict(head_dim=32)), ("Olmoe", EXPERTS | dict(tie=False)),
    ("Mixtral", EXPERTS | dict(tie=False)), ("Llama 4 with vision", {})])
def test_engine_agrees_with_the_trainer_after_each_sync(cpu_mechanics, tmp_path, family, changes,
                                                        lora_rank):
    checkpoint = (save_checkpoint(tmp_path / "model", family=family, **changes)
                  if "vision" not in family else save_with_vision(tmp_path / "model"))
    policy, tokenizer = starter.init_policy(checkpoint, "cpu")
    engines.give_text_model(policy, tokenizer, checkpoint)
    threads = torch.set_num_threads, torch.get_num_threads()  # vLLM changes both
    llm = starter.init_vllm(checkpoint, 0, 128, 0.3, False)
    assert (torch.set_num_threads, torch.get_num_threads()) == threads
    if lora_rank:
        lora.add_adapters(policy, starter.cfg_with(lora_rank=lora_rank))
    # The last is longer than a block of vLLM's cache, which the first sync finds filled.
    prompts = prompts_of(policy, tokenizer, "make 3: 1 2", "sort 54321", "a", "b" * 70)
    for seed in range(3):  # before any change, then after each of two
        if seed:
            change_weights(policy, seed)
            stale = sample(llm, policy, prompts, 4, seed=seed)
            assert largest_difference(policy, stale) > 0.1
            starter.load_policy_into_vllm_instance(policy, llm)
        for temperature in (1.0, 0.7):
            responses = sample(llm, policy, prompts, 4, temperature, seed)
            assert [r.prompt_ids for r in responses] == [p for p in prompts for _ in range(4)]
            for r in responses:
                assert r.finished == (r.response_ids[-1] == 1) and 1 not in r.response_ids[:-1]
                assert len(r.log_probs) == len(r.response_ids)
            assert len({tuple(r.response_ids) for r in responses[:4]}) > 1
            assert largest_difference(policy, responses, temperature) < 1e-4
        greedy, ours = (sample(engine, policy, prompts, 1, 0) for engine in (llm, None))
        assert [r.response_ids for r in greedy] == [r.response_ids for r in ours]
        assert largest_difference(policy, greedy) < 1e-4


@needs_vllm
def test_weight_that_does_not_arrive_stops_the_run(cpu_mechanics, checkpoint, monkeypatch):
    policy, _ = starter.init_policy(checkpoint, "cpu")
    llm = starter.init_vllm(checkpoint, 0, 128, 0.3, False)
    weights = dict(starter.weights_of(policy))
    del weights["model.layers.1.mlp.down_proj.weight"]
    monkeypatch.setattr(starter, "weights_of", lambda policy: weights.items())
    with pytest.raises(starter.RunStopped, match="no weights for model.layers.1.mlp.down_proj.wei"):
        starter.load_policy_into_vllm_instance(policy, llm)


@needs_vllm
def test_samples_depend_on_prompt_and_seed_alone(cpu_mechanics, checkpoint, monkeypatch):
    """Not on what was sampled before, so that a resumed run, whose prefix cache is empty, repeats
    the bits; nor on what is sampled with them, so that several processes do."""
    policy, tokenizer = starter.init_policy(checkpoint, "cpu")
    llm = starter.init_vllm(checkpoint, 0, 128, 0.3, False)
    generate = llm.generate
    n_cached = []

    def counted(*args, **kwargs):
        requests = generate(*args, **kwargs)
        n_cached.extend(request.num_cached_tokens for request in requests)
        return requests

    monkeypatch.setattr(llm, "generate", counted)
    prompts = prompts_of(policy, tokenizer, "b" * 70, "a" * 70)  # two blocks of the cache and more
    first = sample(llm, policy, prompts, 1)
    assert sample(llm, policy, prompts, 1) == first
    assert n_cached == [0] * 4
    first = sample(llm, policy, prompts, 4)
    assert sample(llm, policy, prompts[1:], 4, seed=4) == first[4:]
    assert sample(llm, policy, prompts, 4, seed=1) != first


def vllm_settings(checkpoint, folder, **changes):
    """A run in which every state matters, the prefix cache included."""
    return full_settings(checkpoint, folder, **dict(
        engine="vllm", task=sums, max_tokens_per_microbatch=400) | changes)


@needs_vllm
def test_killed_run_with_vllm_ends_with_the_same_bits(checkpoint, tmp_path, capsys):
    starter.main(**vllm_settings(checkpoint, tmp_path / "undisturbed"))
    gc.collect()
    in_step_4 = at_call(starter, "compute_group_normalized_advantages", 4, die)
    with in_step_4, pytest.raises(Killed):
        starter.main(**vllm_settings(checkpoint, tmp_path / "killed"))
    gc.collect()
    starter.main(**vllm_settings(checkpoint, tmp_path / "killed", resume=True))
    assert "after step 2\n" in capsys.readouterr().out
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "undisturbed")


@needs_vllm
def test_stale_sampler_stops_the_run_and_names_the_recipe(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(starter, "load_policy_into_vllm_instance", lambda policy, llm: None)
    with pytest.raises(starter.RunStopped, match=r"stale(.|\n)*recipes/off_policy.patch"):
        starter.main(**vllm_settings(checkpoint, tmp_path, learning_rate=0.1))
