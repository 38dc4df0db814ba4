"""integrations/trl_kl.py beside TRL's own GRPOTrainer, and beside enumeration in float64.

Run as a program, this file trains in a process of its own: see the end.
"""
import dataclasses
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

pytest.importorskip("trl")

HERE = Path(__file__).resolve().parent
if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parent), str(HERE)]

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from integrations import trl_kl

import starter

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo")
TWO_PROCESSES = ("grpo", "dr_grpo", "dapo")
OPTIONS_OF_RULES = [name for rules in (starter.TERM_RULES, starter.COEFFICIENT_RULES)
                    for name in rules]


def distinct_letters(prompts, completions, **columns):
    """A reward that random weights can earn."""
    return [len(set(text)) / 10 for text in completions]


def fixed_rollout(prompts, trainer):
    """Responses that depend on the prompt and on nothing else, so that processes agree."""
    ids, responses = [], []
    for number, prompt in enumerate(prompts):
        generator = torch.Generator().manual_seed(
            zlib.crc32(f"{prompt} {number % trainer.num_generations}".encode()))
        length = int(torch.randint(2, 9, (1,), generator=generator))
        ids.append(trainer.processing_class(prompt)["input_ids"])
        responses.append(torch.randint(5, 50, (length,), generator=generator).tolist())
    return {"prompt_ids": ids, "completion_ids": responses, "logprobs": None}


def make_trainer(folder, output_dir, plain=False, moved=False, peft=False, callbacks=(),
                 rollout_func=None, **options):
    """A trainer of the small checkpoint. plain: TRL's own; moved: the policy is not the reference;
    peft: with an adapter of rank 4."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if moved:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.03 * torch.randn(parameter.shape, generator=generator)
    settings = dict(
        output_dir=str(output_dir), max_steps=4, beta=0.2, learning_rate=3e-3, use_cpu=True,
        bf16=False, gradient_checkpointing=False, per_device_train_batch_size=16,
        num_generations=4, max_completion_length=8, logging_steps=1, save_strategy="no",
        report_to=[], disable_tqdm=True, seed=0, lr_scheduler_type="constant")
    owner = trl if plain else trl_kl
    more = {}
    if peft:
        from peft import LoraConfig
        more["peft_config"] = LoraConfig(r=4, lora_dropout=0.0, target_modules=["q_proj", "v_proj"],
                                         init_lora_weights="gaussian")
    return owner.GRPOTrainer(
        model=model, args=owner.GRPOConfig(**settings | options),
        reward_funcs=distinct_letters, processing_class=AutoTokenizer.from_pretrained(folder),
        train_dataset=Dataset.from_dict({"prompt": [f"make {n}: {n + 3} 3" for n in range(40)]}),
        callbacks=list(callbacks), rollout_func=rollout_func, **more)


def weights_of(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def logged(trainer, name):
    return [log[name] for log in trainer.state.log_history if name in log]


def trained(*arguments, **options):
    trainer = make_trainer(*arguments, **options)
    trainer.train()
    return trainer


# --------------------------------------------------------------------------------------------------
# Options

def test_options_have_the_documents_names_and_defaults():
    args = trl_kl.GRPOConfig(output_dir="unused", use_cpu=True, bf16=False)
    assert (args.kl_adaptation_method, args.kl_clip_threshold, args.kl_target) == ("none", 1.0, 0.1)
    assert (args.dynamic_beta_decay, args.reward_threshold) == (0.9, 0.8)
    assert (args.beta_min, args.beta_schedule_steps) == (0.0, 1000)
    assert (args.kl_estimator, args.kl_gradient, args.kl_in) == (None, None, None)
    assert trl_kl.kl_settings_of(args) is None


def settings_with(**options):
    given = dict(output_dir="unused", use_cpu=True, bf16=False, beta=0.1)
    return trl_kl.kl_settings_of(trl_kl.GRPOConfig(**given | options))


@pytest.mark.parametrize("rule", OPTIONS_OF_RULES)
def test_each_rule_of_starter_is_available_and_in_combinations(rule):
    assert settings_with(kl_adaptation_method=rule).adaptation == rule
    other = "dynamic" if rule in starter.TERM_RULES else "sigmoid"
    assert settings_with(kl_adaptation_method=f"{rule}+{other}").rule_among([rule]) == rule


def test_rule_added_to_starter_is_available(monkeypatch):
    monkeypatch.setitem(starter.TERM_RULES, "half", lambda kl, lengths, s: kl / 2)
    settings = settings_with(kl_adaptation_method="half")
    assert settings.adapted(torch.ones(1, 1), torch.ones(1, 1)) == 0.5


@pytest.mark.parametrize("options, named", [
    (dict(beta=0.0, kl_adaptation_method="clip"), "beta = 0.0"),
    (dict(loss_type="cispo", kl_adaptation_method="clip"), "loss_type = 'cispo'"),
    (dict(loss_type="sapo", kl_in="loss"), "loss_type = 'sapo'"),
    (dict(kl_adaptation_method="clipp"), "did you mean 'clip'"),
    (dict(kl_adaptation_method="clip+sigmoid"), "one of each"),
    (dict(kl_gradient="forward"), "kl_gradient = 'forward'"),
    (dict(kl_estimator="k4"), "kl_estimator = 'k4'"),
    (dict(kl_in="advantage"), "kl_in = 'advantage'"),
    (dict(kl_target=0.0, kl_adaptation_method="target"), "kl_target = 0.0"),
    (dict(kl_adaptation_method="clip", use_liger_kernel=True,
          liger_kernel_config={"fused_linear_cross_entropy": True}), "liger"),
    (dict(kl_estimator="k1", kl_gradient="as_written", use_bias_correction_kl=False),
     "expected gradient of zero"),
    (dict(kl_estimator="k1", kl_gradient="as_written"), "use_bias_correction_kl"),
    (dict(kl_estimator="k3", kl_in="reward"), "does not see the sign"),
    (dict(kl_estimator="k1", kl_adaptation_method="sigmoid"), "reverses the gradient"),
])
def test_what_cannot_work_is_refused_in_one_sentence(options, named):
    with pytest.raises(starter.InputError) as raised:
        settings_with(**options)
    text = str(raised.value)
    assert named in text and "\n" not in text and ". " not in text


def test_replaced_compute_loss_is_refused_with_options_and_left_alone_without(monkeypatch):
    def replacement(self, model, inputs):
        return 0.0

    replacement.__module__ = "UnslothGRPOTrainer"
    monkeypatch.setattr(trl.GRPOTrainer, "_compute_loss", replacement)
    assert settings_with() is None
    with pytest.raises(starter.InputError, match="replaced by UnslothGRPOTrainer"):
        settings_with(kl_adaptation_method="clip")


# --------------------------------------------------------------------------------------------------
# Loss and gradient

@pytest.fixture(scope="module")
def make(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trl")
    return lambda **options: make_trainer(checkpoint, folder, **options)


def random_batch(trainer, seed):
    """What TRL hands to _compute_loss: ragged prompts and responses, advantages, log-probs of an
    older policy (of every second batch) and of a reference."""
    generator = torch.Generator().manual_seed(seed)
    n_rows, n_prompt, n_response = 6, 5, 7

    def noise(scale):
        return scale * torch.randn(n_rows, n_response, generator=generator)

    ids = torch.randint(5, 50, (n_rows, n_prompt + n_response), generator=generator)
    prompt_lengths = torch.randint(1, n_prompt + 1, (n_rows, 1), generator=generator)
    lengths = torch.randint(1, n_response + 1, (n_rows, 1), generator=generator)
    prompt_mask = (torch.arange(n_prompt) >= n_prompt - prompt_lengths).long()
    mask = (torch.arange(n_response) < lengths).long()
    with torch.no_grad():
        log_probs, _, _ = trl.GRPOTrainer._get_per_token_logps_and_entropies(
            trainer, trainer.model, ids, torch.cat([prompt_mask, mask], 1), n_response)
    batch = {"prompt_ids": ids[:, :n_prompt], "prompt_mask": prompt_mask,
             "completion_ids": ids[:, n_prompt:], "completion_mask": mask,
             "advantages": torch.randn(n_rows, generator=generator),
             "ref_per_token_logps": log_probs + noise(0.5),
             "num_items_in_batch": mask.sum() * 2}
    if seed % 2:
        batch["old_per_token_logps"] = log_probs + noise(0.2)
    return batch


def loss_and_gradient(trainer, batch):
    trainer.model.zero_grad()
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 2
    loss = trainer._compute_loss(trainer.model, dict(batch))
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in trainer.model.parameters()])


@pytest.mark.slow
@pytest.mark.parametrize("corrected", [False, True], ids=["k3", "k3 times the ratio"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_forced_loss_and_gradients_equal_those_of_trl(make, loss_type, corrected):
    options = dict(loss_type=loss_type, use_bias_correction_kl=corrected)
    theirs = make(plain=True, **options)
    ours = make(kl_gradient="as_written", **options)
    other = "grpo" if loss_type == "dapo" else "dapo"
    wrong = [make(kl_gradient="as_written", **options | dict(use_bias_correction_kl=not corrected)),
             make(kl_gradient="as_written", **options | dict(loss_type=other)),
             make(kl_gradient="as_written", **options | dict(beta=0.19))]
    apart = [0.0] * len(wrong)
    for seed in range(20):
        batch = random_batch(theirs, seed)
        loss, gradient = loss_and_gradient(theirs, batch)
        assert gradient.norm() > 1e-3
        our_loss, our_gradient = loss_and_gradient(ours, batch)
        assert abs(our_loss - loss) <= 1e-6
        assert (our_gradient - gradient).abs().max() <= 1e-6
        for i, trainer in enumerate(wrong):
            wrong_loss, wrong_gradient = loss_and_gradient(trainer, batch)
            apart[i] = max(apart[i], (wrong_gradient - gradient).abs().max().item())
    assert min(apart) > 1e-4, "a negative control was not told apart"


@pytest.mark.slow
def test_ratio_of_whole_responses_equals_that_of_trl(make):
    options = dict(importance_sampling_level="sequence", loss_type="grpo")
    theirs, ours = make(plain=True, **options), make(kl_gradient="as_written", **options)
    for seed in (1, 3):
        loss, gradient = loss_and_gradient(theirs, random_batch(theirs, seed))
        our_loss, our_gradient = loss_and_gradient(ours, random_batch(theirs, seed))
        assert abs(our_loss - loss) <= 1e-6 and (our_gradient - gradient).abs().max() <= 1e-6


class Table:
    """Stands in for the model: log-probs (B, T) and exact KL that the test gives."""

    def __init__(self, monkeypatch, trainer):
        self.trainer = trainer
        self.log_probs = self.exact_kl = None
        monkeypatch.setattr(trl.GRPOTrainer, "_get_per_token_logps_and_entropies",
                            lambda *arguments, **named: self.scores())
        monkeypatch.setattr(trainer, "_forward_with_exact_kl", self.exact_scores)
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1

    def scores(self):
        return self.log_probs, torch.zeros_like(self.log_probs), None

    def exact_scores(self, *arguments):
        self.trainer._log_probs, self.trainer._exact_kl = self.log_probs, self.exact_kl
        return self.scores()

    def loss(self, log_probs, ref, old, mask, advantages, exact_kl=None):
        self.log_probs, self.exact_kl = log_probs, exact_kl
        ids = torch.zeros(mask.shape, dtype=torch.long)
        batch = {"prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1] + 1, "completion_ids": ids,
                 "completion_mask": mask.long(), "advantages": advantages,
                 "ref_per_token_logps": ref, "old_per_token_logps": old,
                 "num_items_in_batch": mask.sum()}
        return self.trainer._compute_loss(None, batch)


def random_log_probs(n_rows=3, n_tokens=5):
    generator = torch.Generator().manual_seed(0)
    log_probs = -3 * torch.rand(n_rows, n_tokens, generator=generator)
    ref = log_probs + torch.randn(n_rows, n_tokens, generator=generator)
    old = log_probs + 0.5 * torch.randn(n_rows, n_tokens, generator=generator)
    mask = torch.arange(n_tokens) < torch.tensor([[2], [5], [4]])
    return log_probs, ref, old, mask, torch.rand(n_rows, n_tokens, generator=generator)


@pytest.mark.parametrize("rule", ["none", *starter.TERM_RULES])
def test_kl_of_each_token_equals_that_of_starter(make, monkeypatch, rule):
    trainer = make(kl_in="loss", loss_type="dr_grpo", use_bias_correction_kl=False)
    table = Table(monkeypatch, trainer)
    log_probs, ref, old, mask, exact = random_log_probs()
    advantages = torch.tensor([1.0, -2.0, 0.5])
    tried = 0
    for estimator, gradient, placement in itertools.product(
            ("k1", "k2", "k3", "exact"), ("reverse", "as_written"),
            ("loss", "loss_to_go", "reward")):
        if placement == "reward" and estimator == "exact":
            continue
        kl = starter.KLSettings(estimator, gradient, placement, rule, max_new_tokens=8)
        trainer.kl_settings = kl
        for row, column in itertools.product(range(3), range(5)):
            if not mask[row, column]:
                continue
            # All weight of TRL's average on one token, and no policy term but for the reward.
            one_token = torch.zeros(3, 5)
            one_token[row, column] = 1.0
            monkeypatch.setattr(trainer, "_token_weights", lambda *_: one_token)
            leaf = log_probs.clone().requires_grad_()
            given = advantages if placement == "reward" else torch.zeros(3)
            found = table.loss(leaf, ref, old, mask, given, exact)
            gradient_found, = torch.autograd.grad(found, leaf)

            leaf = log_probs.clone().requires_grad_()
            if placement == "reward":  # TRL averages; so is starter.py's loss
                with_kl = starter.put_kl_into_advantages(given[:, None], old, ref, mask, 0.2, kl)
                expected, _ = starter.compute_loss(with_kl, leaf, old, 0.2, mask=mask)
                expected = torch.where(mask, expected, 0.0).sum() / (3 * 8)
            else:
                expected, _ = starter.compute_loss(given[:, None], leaf, old, 0.2, ref, 0.2, mask,
                                                   kl, exact)
                expected = expected[row, column]
            assert abs((found - expected).item()) <= 1e-6, kl
            assert (gradient_found - torch.autograd.grad(expected, leaf)[0]).abs().max() <= 1e-6
            tried += 1
    assert tried > 200


def test_exact_kl_and_log_probs_equal_the_models_logits(make):
    trainer = make(moved=True, kl_estimator="exact", temperature=0.7)
    batch = random_batch(trainer, 1)
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attended = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    scores = trainer._get_per_token_logps_and_entropies(trainer.model, ids, attended, 7,
                                                        compute_entropy=True)
    assert trainer._log_probs is scores[0]
    fused, _, _ = trl.GRPOTrainer._get_per_token_logps_and_entropies(
        trainer, trainer.model, ids, attended, 7)
    kept = batch["completion_mask"] > 0
    assert (scores[0] - fused)[kept].abs().max() <= 1e-5
    for row, column in kept.nonzero().tolist():
        probabilities = []
        for model in (trainer.model, trainer.ref_model):
            logits = model(input_ids=ids[row:row + 1], attention_mask=attended[row:row + 1]).logits
            logits = logits[0, 5 + column - 1].detach().double() / 0.7
            probabilities.append([float(x) for x in torch.softmax(logits, 0)])
        kl = sum(p * math.log(p / q) for p, q in zip(*probabilities))
        assert kl > 1e-3
        assert abs(trainer._exact_kl[row, column].item() - kl) <= 1e-5


# --------------------------------------------------------------------------------------------------
# Enumeration: two tokens of a vocabulary of three, in float64

def enumerated(trainer, table, logits, ref_logits, old_logits):
    """Sum over all responses of P_old(response) * gradient of TRL's loss."""
    log_p, log_ref, log_old = (torch.log_softmax(x, -1) for x in (logits, ref_logits, old_logits))
    total = torch.zeros_like(logits)
    for first, second in itertools.product(range(3), repeat=2):
        rows = torch.tensor([0, 1 + first])  # state 0, then a state for each first token
        tokens = torch.tensor([first, second])
        p, ref, old = (x[rows, tokens][None] for x in (log_p, log_ref, log_old.detach()))
        loss = table.loss(p, ref, old, torch.ones(1, 2).bool(), torch.zeros(1))
        gradient, = torch.autograd.grad(loss, logits, retain_graph=True)
        total += old.sum().exp() * gradient
    return total / trainer.beta * trainer.max_completion_length


def kl_gradients(logits, ref_logits, old_logits):
    """Gradients of KL(policy || reference): of each token at the states that the old policy
    visits, and of whole responses."""
    log_p, log_ref = torch.log_softmax(logits, -1), torch.log_softmax(ref_logits, -1)
    of_state = (log_p.exp() * (log_p - log_ref)).sum(-1)
    visits = torch.cat([torch.ones(1), torch.softmax(old_logits[0], -1).detach()]).double()
    own_visits = torch.cat([torch.ones(1), log_p[0].exp()])
    return [torch.autograd.grad((of_state * weight).sum(), logits, retain_graph=True)[0]
            for weight in (visits, own_visits)]


def test_expected_gradient_equals_that_of_the_kl_by_enumeration(make, monkeypatch):
    torch.manual_seed(0)
    logits, ref_logits, older = torch.randn(3, 4, 3, dtype=torch.float64)
    logits.requires_grad_()
    trainer = make(kl_gradient="reverse", loss_type="dr_grpo")
    table = Table(monkeypatch, trainer)

    def error(old_logits, of_response=False, **changes):
        trainer.kl_settings = dataclasses.replace(starter.KLSettings(), **changes)
        found = enumerated(trainer, table, logits, ref_logits, old_logits)
        expected = kl_gradients(logits, ref_logits, old_logits)[of_response]
        return (found - expected).abs().max().item()

    for estimator in ("k1", "k2", "k3"):
        assert error(logits, estimator=estimator) <= 1e-8
        assert error(older, estimator=estimator, ratio_cap=math.inf) <= 1e-8
    for estimator in ("k1", "k3"):
        assert error(logits, True, estimator=estimator, placement="loss_to_go") <= 1e-8
    # TRL's default, k3 times the ratio, is right too.
    assert error(logits, gradient="as_written") <= 1e-8
    assert error(older, gradient="as_written") <= 1e-8
    # Negative controls: what is known to be wrong comes out wrong.
    assert error(older) > 1e-2  # the cap of 2
    assert error(logits, True) > 1e-2  # the KL of each token is not that of whole responses
    trainer.args.use_bias_correction_kl = False
    assert error(logits, gradient="as_written") > 1e-2
    assert error(logits, estimator="k1", gradient="as_written") > 1e-2


# --------------------------------------------------------------------------------------------------
# Training

@pytest.mark.slow
def test_defaults_give_the_weights_of_trl_bit_for_bit(checkpoint, tmp_path):
    first, second = (trained(checkpoint, tmp_path, plain=True, max_steps=20) for _ in range(2))
    if not torch.equal(weights_of(first), weights_of(second)):
        pytest.skip("two plain TRL runs differ on this machine")
    ours = trained(checkpoint, tmp_path, max_steps=20)
    assert torch.equal(weights_of(ours), weights_of(first))
    assert not logged(ours, "adaptive_kl/raw_kl")
    changed = trained(checkpoint, tmp_path, max_steps=20, kl_adaptation_method="clip")
    assert not torch.equal(weights_of(changed), weights_of(first))


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_forced_training_equals_that_of_trl(checkpoint, tmp_path, loss_type):
    """With several iterations and gradient accumulation."""
    options = dict(loss_type=loss_type, num_iterations=2, gradient_accumulation_steps=2,
                   per_device_train_batch_size=8, moved=True, optim="sgd", learning_rate=0.1)
    theirs = trained(checkpoint, tmp_path, plain=True, **options)
    ours = trained(checkpoint, tmp_path, kl_gradient="as_written", **options)
    assert torch.allclose(weights_of(ours), weights_of(theirs), rtol=0, atol=1e-5)
    assert logged(ours, "loss") == pytest.approx(logged(theirs, "loss"), abs=1e-5)
    assert len(logged(ours, "adaptive_kl/raw_kl")) == ours.controller.state["step"] == 4


@pytest.mark.slow
def test_peft_takes_the_base_model_as_the_reference(checkpoint, tmp_path):
    pytest.importorskip("peft")
    theirs = trained(checkpoint, tmp_path, plain=True, peft=True)
    ours = trained(checkpoint, tmp_path, peft=True, kl_gradient="as_written")
    assert ours.ref_model is None
    assert torch.allclose(weights_of(ours), weights_of(theirs), rtol=0, atol=1e-6)
    exact = trained(checkpoint, tmp_path, peft=True, kl_estimator="exact")
    kl = logged(exact, "adaptive_kl/raw_kl")
    assert abs(kl[0]) < 1e-6 or kl[0] > 0
    assert kl[-1] > 0


@pytest.mark.slow
def test_evaluation_logs_the_kl_and_leaves_beta_alone(checkpoint, tmp_path):
    trainer = make_trainer(checkpoint, tmp_path, moved=True, kl_adaptation_method="target",
                           per_device_eval_batch_size=16)
    metrics = trainer.evaluate(trainer.train_dataset.select(range(4)))
    assert metrics["eval_adaptive_kl/raw_kl"] > 0
    assert trainer.controller.state["step"] == 0 and trainer.controller.beta == 0.2


@pytest.mark.slow
def test_kl_in_the_reward_trains_with_and_without_old_log_probs(checkpoint, tmp_path):
    for iterations in (1, 2):
        trainer = trained(checkpoint, tmp_path, moved=True, kl_in="reward", kl_estimator="k1",
                          num_iterations=iterations)
        assert all(map(math.isfinite, logged(trainer, "loss")))
        assert trainer.controller.state["step"] == 4


def program(tmp_path, *arguments, launcher=()):
    """Runs this file as a program. Returns the process."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    return subprocess.run([sys.executable, *launcher, __file__, *map(str, arguments)],
                          cwd=tmp_path, env=environment, capture_output=True, text=True,
                          timeout=200)


@pytest.mark.slow
def test_killed_and_resumed_run_has_the_same_beta_path(checkpoint, tmp_path):
    options = dict(moved=True, kl_adaptation_method="target+sigmoid", max_steps=8, save_steps=3,
                   save_strategy="steps", kl_target=0.02)
    whole = trained(checkpoint, tmp_path / "whole", **options)
    killed = program(tmp_path, "killed", checkpoint, tmp_path / "killed", json.dumps(options))
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    resumed = make_trainer(checkpoint, tmp_path / "killed", **options)
    resumed.train(resume_from_checkpoint=True)
    betas = logged(whole, "adaptive_kl/current_beta")
    assert len(set(betas)) > 4
    assert logged(resumed, "adaptive_kl/current_beta") == betas
    assert resumed.controller.state == whole.controller.state
    assert torch.equal(weights_of(resumed), weights_of(whole))
    resumed.train()  # a new run starts from args.beta
    assert logged(resumed, "adaptive_kl/current_beta")[0] == 0.2


@pytest.mark.slow
def test_two_processes_have_the_losses_of_one(checkpoint, tmp_path):
    """Of the loss types, bnpo is left out: it averages over the tokens of each process."""
    options = dict(moved=True, kl_adaptation_method="target+sigmoid", kl_target=0.02)
    done = program(tmp_path, "two", checkpoint, tmp_path / "two", json.dumps(options),
                   launcher=["-m", "accelerate.commands.launch", "--multi_gpu",
                             "--num_processes", "2", "--num_machines", "1",
                             "--mixed_precision", "no", "--main_process_port", "0"])
    assert done.returncode == 0, done.stderr[-3000:]
    for loss_type in TWO_PROCESSES:
        one = trained(checkpoint, tmp_path, rollout_func=fixed_rollout, loss_type=loss_type,
                      **options)
        history = json.loads((tmp_path / "two" / f"{loss_type}.json").read_text())
        assert history["processes"] == 2
        for name in ("loss", "adaptive_kl/raw_kl", "adaptive_kl/adapted_kl",
                     "adaptive_kl/current_beta"):
            assert history[name] == pytest.approx(logged(one, name), abs=1e-5), name
        assert len(set(history["adaptive_kl/current_beta"])) > 2


@pytest.mark.slow
def test_import_leaves_the_environment_of_the_process_alone(tmp_path):
    text = ("import os, trl.trainer.grpo_trainer; before = dict(os.environ); "
            "import integrations.trl_kl; assert dict(os.environ) == before")
    done = subprocess.run([sys.executable, "-c", text], cwd=HERE.parent, capture_output=True,
                          text=True, env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_example_trains_and_fills_its_table(monkeypatch):
    from integrations import example_trl
    monkeypatch.setattr(example_trl, "STEPS", 3)
    folder = starter.find_model("tiny")
    rows = [example_trl.run(folder, method, 0) for method in ("baseline", "dynamic+sigmoid")]
    assert list(rows[0]) == example_trl.COLUMNS
    assert len(example_trl.table(rows)) == 3
    assert rows[0]["beta"] == example_trl.BETA and rows[0]["raw_kl"] == rows[0]["adapted_kl"]
    assert rows[1]["raw_kl"] > rows[1]["adapted_kl"] > 0


# --------------------------------------------------------------------------------------------------
# As a program: train in this process

class KillAt(TrainerCallback):
    def on_step_begin(self, args, state, control, **others):
        if state.global_step == 4:
            os.kill(os.getpid(), signal.SIGKILL)


def main(what, folder, output_dir, options):
    options = json.loads(options)
    if what == "killed":
        trained(folder, output_dir, callbacks=[KillAt()], **options)
    for loss_type in TWO_PROCESSES:
        trainer = trained(folder, output_dir, rollout_func=fixed_rollout, loss_type=loss_type,
                          per_device_train_batch_size=8, **options)
        if trainer.accelerator.is_main_process:
            names = {name for log in trainer.state.log_history for name in log}
            history = {name: logged(trainer, name) for name in names}
            history["processes"] = trainer.accelerator.num_processes
            Path(output_dir, f"{loss_type}.json").write_text(json.dumps(history))


if __name__ == "__main__":
    main(*sys.argv[1:])
