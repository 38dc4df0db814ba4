"""integrations/trl_kl.py beside TRL's own GRPOTrainer and beside enumeration. Also a program."""

import functools
import itertools
import json
import math
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path
from unittest import mock

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

TWO_PROCESSES = ("grpo", "dr_grpo", "dapo")  # bnpo averages over the tokens of each process
COMPARED = ("loss", "adaptive_kl/raw_kl", "adaptive_kl/adapted_kl", "adaptive_kl/current_beta")
IN_REWARD = dict(kl_estimator="k1", kl_in="reward")
LAUNCH = (
    "-m accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 "
    "--mixed_precision no --main_process_port 0"
)
PRINTED = dict(kl_gradient="as_written", use_bias_correction_kl=False)  # TRL's k3 on our path


def distinct_letters(prompts, completions, **columns):
    """A reward that random weights can earn."""
    return [len(set(text)) / 10 for text in completions]


def fixed_rollout(prompts, trainer):
    """Responses that depend on the prompt and on nothing else, so that processes agree."""
    ids, responses = [], []
    for number, prompt in enumerate(prompts):
        code = zlib.crc32(f"{prompt} {number % trainer.num_generations}".encode())
        ids.append(trainer.processing_class(prompt)["input_ids"])
        responses.append([5 + (code >> i) % 45 for i in range(2 + code % 7)])
    return {"prompt_ids": ids, "completion_ids": responses, "logprobs": None}


FIXED = {"rollout_func": fixed_rollout}


def make_trainer(
    folder,
    output_dir,
    plain=False,
    moved=False,
    arguments={},
    **options,
):
    """A trainer of the small checkpoint. plain: TRL's; moved: the policy is not the reference;
    arguments: more of the trainer's; options: of its config."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if moved:
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.03 * torch.randn(parameter.shape)
    settings = dict(
        output_dir=str(output_dir),
        max_steps=4,
        beta=0.2,
        learning_rate=3e-3,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=16,
        num_generations=4,
        max_completion_length=8,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
        lr_scheduler_type="constant",
    )
    owner = trl if plain else trl_kl
    return owner.GRPOTrainer(
        model=model,
        args=owner.GRPOConfig(**settings | options),
        reward_funcs=distinct_letters,
        processing_class=AutoTokenizer.from_pretrained(folder),
        train_dataset=Dataset.from_dict({"prompt": [f"make {n}: {n + 3} 3" for n in range(40)]}),
        **arguments,
    )


def weights_of(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def logged(trainer, name):
    return [log[name] for log in trainer.state.log_history if name in log]


def trained(*arguments, **options):
    trainer = make_trainer(*arguments, **options)
    trainer.train()
    return trainer


# Options


def settings_with(**options):
    given = dict(output_dir="unused", use_cpu=True, bf16=False, beta=0.1)
    return trl_kl.kl_settings_of(trl_kl.GRPOConfig(**given | options))


def test_options_have_the_defaults_of_starter():
    for name in trl_kl.options.NAMES:
        assert getattr(trl_kl.GRPOConfig, name, None) in (None, vars(starter.cfg_with())[name])
    assert settings_with() is None


@pytest.mark.parametrize(
    "options, named",
    [
        (dict(beta=0.0, kl_adaptation_method="clip"), "beta = 0.0"),
        (dict(loss_type="cispo", kl_adaptation_method="clip"), "loss_type = 'cispo'"),
        (dict(kl_target=0.2), "kl_target = 0.2 changes nothing"),
        (IN_REWARD | dict(top_entropy_quantile=0.5), "'loss_to_go'"),
        (IN_REWARD | dict(importance_sampling_level="sequence"), "'loss_to_go'"),
        (
            dict(
                kl_adaptation_method="clip",
                use_liger_kernel=True,
                liger_kernel_config={"fused_linear_cross_entropy": True},
            ),
            "liger",
        ),
        (dict(kl_gradient="as_written"), "use_bias_correction_kl = False"),
    ],
)
def test_what_cannot_work_is_refused(options, named):
    with pytest.raises(starter.InputError, match=re.escape(named)):
        settings_with(**options)


def test_replaced_compute_loss_is_refused_with_options_and_left_alone_without(monkeypatch):
    def replacement(self, model, inputs):
        return 0.0

    replacement.__module__ = "UnslothGRPOTrainer"
    monkeypatch.setattr(trl.GRPOTrainer, "_compute_loss", replacement)
    assert settings_with() is None
    with pytest.raises(starter.InputError, match="replaced by Unsloth"):
        settings_with(kl_adaptation_method="clip")


# Loss and gradient


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", trl_kl.LOSS_TYPES)
def test_forced_loss_and_gradients_equal_those_of_trl(checkpoint, tmp_path, loss_type):
    """k3 as written on our path beside TRL's own, on the 20 batches of a run."""
    trainer = make_trainer(
        checkpoint,
        tmp_path,
        moved=True,
        loss_type=loss_type,
        max_steps=10,
        num_iterations=2,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=8,
        **PRINTED,
    )
    compute_loss, kl_settings = trainer._compute_loss, trainer.kl_settings
    compared = []

    def compare(model, inputs):
        found = []  # TRL's, ours
        for settings in (None, kl_settings):
            trainer.kl_settings = settings
            with mock.patch.object(trainer, "_note_kl"):
                loss = compute_loss(model, dict(inputs))
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            found.append(torch.cat([loss[None], *(x.flatten() for x in gradients)]).detach())
        compared.append((found[1] - found[0]).abs().max().item())
        return compute_loss(model, inputs)

    trainer._compute_loss = compare
    trainer.train()
    assert len(compared) == 20 and max(compared) <= 1e-6
    assert min(logged(trainer, "adaptive_kl/raw_kl")) > 1e-3
    assert len(logged(trainer, "adaptive_kl/raw_kl")) == trainer.controller.state["step"] == 10


def test_exact_kl_and_log_probs_equal_the_models_logits(checkpoint, tmp_path):
    trainer = make_trainer(checkpoint, tmp_path, moved=True, kl_estimator="exact", temperature=0.7)
    ids = torch.randint(5, 50, (3, 9))
    attended = (torch.arange(9) >= torch.tensor([[0], [3], [1]])).long()  # padded on the left
    log_probs, *_ = trainer._get_per_token_logps_and_entropies(
        trainer.model, ids, attended, 5, compute_entropy=True
    )
    tables = []
    for model in (trainer.model, trainer.ref_model):
        logits = model(input_ids=ids, attention_mask=attended).logits[:, 3:-1].double()
        tables.append((logits / 0.7).log_softmax(dim=2))
    log_p, log_q = tables
    assert trainer._log_probs is log_probs
    own = {
        "log_probs": log_p.gather(2, ids[:, 4:, None])[..., 0],
        "kl_per_token": (log_p.exp() * (log_p - log_q)).sum(dim=2),
        "kl_forward": (log_q.exp() * (log_q - log_p)).sum(dim=2),
    }
    found = {"log_probs": log_probs} | trainer._statistics
    for name, x in own.items():
        assert (x.abs() > 1e-3).all()
        assert (found[name] - x).abs().max() <= 1e-5


# Enumeration: two tokens of a vocabulary of three, in float64


def enumerated(trainer, logits, ref_logits, old_logits):
    """Sum over all responses of P_old(response) * gradient of TRL's loss."""
    log_p, log_ref, log_old = (torch.log_softmax(x, -1) for x in (logits, ref_logits, old_logits))
    total = torch.zeros_like(logits)
    for first, second in itertools.product(range(3), repeat=2):
        rows = torch.tensor([0, 1 + first])  # state 0, then a state for each first token
        tokens = torch.tensor([first, second])
        p, ref, old = (x[rows, tokens][None] for x in (log_p, log_ref, log_old.detach()))
        one, ids = torch.ones(1, 2).long(), torch.zeros(1, 2).long()
        with mock.patch.object(
            trl.GRPOTrainer,
            "_get_per_token_logps_and_entropies",
            lambda *arguments, **named: (p, torch.zeros(1, 2), None),
        ):
            loss = trainer._compute_loss(
                None,
                {
                    "prompt_ids": ids,
                    "prompt_mask": one,
                    "completion_ids": ids,
                    "completion_mask": one,
                    "advantages": torch.zeros(1),
                    "ref_per_token_logps": ref,
                    "old_per_token_logps": old,
                    "num_items_in_batch": one.sum(),
                },
            )
        (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
        total += old.sum().exp() * gradient
    return total / trainer.beta * trainer.max_completion_length


def kl_gradient(logits, ref_logits, visiting):
    """Gradient of the KL(policy || reference) of tokens, at the states that this policy visits."""
    log_p, log_ref = torch.log_softmax(logits, -1), torch.log_softmax(ref_logits, -1)
    of_state = (log_p.exp() * (log_p - log_ref)).sum(-1)
    visits = torch.cat([torch.ones(1), torch.softmax(visiting[0], -1)])
    return torch.autograd.grad((of_state * visits).sum(), logits, retain_graph=True)[0]


def test_expected_gradient_equals_that_of_the_kl_by_enumeration(checkpoint, tmp_path):
    torch.manual_seed(0)
    logits, ref_logits, older = torch.randn(3, 4, 3, dtype=torch.float64)
    logits.requires_grad_()
    trainer = make_trainer(checkpoint, tmp_path, kl_gradient="reverse", loss_type="dr_grpo")
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    trainer._note_kl = lambda *means: None

    def error(old_logits, settings, of_response=False):
        trainer.kl_settings = settings
        found = enumerated(trainer, logits, ref_logits, old_logits)
        visiting = old_logits if of_response else old_logits.detach()  # whose gradient counts, too
        return (found - kl_gradient(logits, ref_logits, visiting)).abs().max().item()

    KL = starter.KLSettings
    for estimator in starter.ESTIMATORS:
        assert error(logits, KL(kl_estimator=estimator)) <= 1e-8
        assert error(older, KL(kl_estimator=estimator, kl_ratio_cap=math.inf)) <= 1e-8
    for estimator in ("k1", "k3"):
        assert error(logits, KL(kl_estimator=estimator, kl_in="loss_to_go"), True) <= 1e-8
    assert error(logits, KL(kl_estimator="k1", kl_in="reward"), True) <= 1e-8
    # Negative controls: what is known to be wrong comes out wrong.
    assert error(older, KL()) > 1e-2  # the cap of 2
    assert error(logits, KL(), True) > 1e-2  # the KL of each token is not that of whole responses
    assert error(logits, KL(kl_gradient="as_written")) > 1e-2
    # TRL's own default, k3 times the ratio, is right on own and on older samples.
    for corrected in (True, False):
        trainer.args.use_bias_correction_kl = corrected
        for old_logits in (logits, older):
            assert (error(old_logits, None) <= 1e-8) == corrected


# Training


@pytest.mark.slow
def test_defaults_give_the_weights_of_trl_bit_for_bit(checkpoint, tmp_path):
    theirs = trained(checkpoint, tmp_path, plain=True, max_steps=20)
    ours = trained(checkpoint, tmp_path, max_steps=20)
    assert torch.equal(weights_of(ours), weights_of(theirs))
    assert not logged(ours, "adaptive_kl/raw_kl")


@pytest.mark.slow
def test_peft_takes_the_base_model_as_the_reference(checkpoint, tmp_path):
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian"
    )
    train = functools.partial(trained, checkpoint, tmp_path, arguments={"peft_config": adapter})
    theirs = train(plain=True, use_bias_correction_kl=False)
    ours = train(**PRINTED)
    assert ours.ref_model is None
    assert torch.allclose(weights_of(ours), weights_of(theirs), rtol=0, atol=1e-6)
    for estimator in starter.EXACT:
        assert logged(train(kl_estimator=estimator), "adaptive_kl/raw_kl")[-1] > 1e-6


@pytest.mark.slow
def test_kl_in_the_reward_trains_and_evaluation_leaves_beta_alone(checkpoint, tmp_path):
    for iterations in (1, 2):  # without and with TRL's own log-probs at rollout
        trainer = trained(
            checkpoint,
            tmp_path,
            moved=True,
            num_iterations=iterations,
            per_device_eval_batch_size=16,
            **IN_REWARD,
        )
        assert all(map(math.isfinite, logged(trainer, "loss")))
        metrics = trainer.evaluate(trainer.train_dataset.select(range(4)))
        assert metrics["eval_adaptive_kl/raw_kl"] != 0
        assert trainer.controller.state["step"] == 4


class StopAtStep4(TrainerCallback):
    def on_step_begin(self, args, state, control, **others):
        if state.global_step == 4:
            raise KeyboardInterrupt


@pytest.mark.slow
def test_stopped_and_resumed_run_has_the_same_beta_path(checkpoint, tmp_path):
    options = dict(
        moved=True,
        kl_adaptation_method="target+sigmoid",
        max_steps=8,
        save_steps=3,
        save_strategy="steps",
        kl_target=0.02,
    )
    whole = trained(checkpoint, tmp_path / "whole", **options)
    with pytest.raises(KeyboardInterrupt):
        trained(
            checkpoint, tmp_path / "stopped", arguments={"callbacks": [StopAtStep4()]}, **options
        )
    resumed = make_trainer(checkpoint, tmp_path / "stopped", **options)
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
    options = dict(moved=True, kl_adaptation_method="target+sigmoid", kl_target=0.02)
    arguments = [checkpoint, tmp_path / "two", json.dumps(options)]
    done = subprocess.run(
        [sys.executable, *LAUNCH.split(), __file__, *map(str, arguments)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={"OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"], "HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for loss_type in TWO_PROCESSES:
        one = trained(checkpoint, tmp_path, arguments=FIXED, loss_type=loss_type, **options)
        history = json.loads((tmp_path / "two" / f"{loss_type}.json").read_text())
        assert history["processes"] == 2
        for name in COMPARED:
            assert history[name] == pytest.approx(logged(one, name), abs=1e-5), name
        assert len(set(history["adaptive_kl/current_beta"])) > 2


# As a program: one of two processes


def main(folder, output_dir, options):
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in os.environ  # starter.py sets it for itself
    options = json.loads(options)
    for loss_type in TWO_PROCESSES:
        trainer = trained(
            folder,
            output_dir,
            arguments=FIXED,
            loss_type=loss_type,
            per_device_train_batch_size=8,
            **options,
        )
        if trainer.accelerator.is_main_process:
            history = {name: logged(trainer, name) for name in COMPARED}
            history["processes"] = trainer.accelerator.num_processes
            Path(output_dir, f"{loss_type}.json").write_text(json.dumps(history))


if __name__ == "__main__":
    main(*sys.argv[1:])
