"""integrations/trl_kl.py beside TRL's own GRPOTrainer and beside starter.py."""

import functools
import math
import re
from unittest import mock

import pytest

pytest.importorskip("trl")

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from integrations import trl_kl

import starter

IN_REWARD = dict(kl_estimator="k1", kl_in="reward")
PRINTED = dict(kl_gradient="as_written", use_bias_correction_kl=False)  # TRL's k3 on our path


def distinct_letters(prompts, completions, **columns):
    """A reward that random weights can earn."""
    return [len(set(text)) / 10 for text in completions]


def make_trainer(
    folder,
    output_dir,
    plain=False,
    moved=False,
    peft_config=None,
    **options,
):
    """A trainer of the small checkpoint. plain: TRL's; moved: the policy is not the reference;
    options: of its config."""
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
        lr_scheduler_type="constant",
    )
    owner = trl if plain else trl_kl
    return owner.GRPOTrainer(
        model=model,
        args=owner.GRPOConfig(**settings | options),
        reward_funcs=distinct_letters,
        processing_class=AutoTokenizer.from_pretrained(folder),
        train_dataset=Dataset.from_dict({"prompt": [f"make {n}: {n + 3} 3" for n in range(40)]}),
        peft_config=peft_config,
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
        (dict(loss_type="cispo", kl_adaptation_method="clip"), "loss_type = 'cispo'"),
        (IN_REWARD | dict(importance_sampling_level="sequence"), "'loss_to_go'"),
        (dict(kl_gradient="as_written"), "use_bias_correction_kl = False"),
    ],
)
def test_what_cannot_work_is_refused(options, named):
    with pytest.raises(starter.InputError, match=re.escape(named)):
        settings_with(**options)


def test_replaced_compute_loss_is_refused(monkeypatch):
    monkeypatch.setattr(trl.GRPOTrainer, "_compute_loss", make_trainer)
    with pytest.raises(starter.InputError, match="was replaced by"):
        settings_with(kl_adaptation_method="clip")


# Loss and gradient


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", trl_kl.LOSS_TYPES)
def test_forced_loss_and_gradients_equal_those_of_trl(checkpoint, tmp_path, loss_type):
    """k3 as written on our path beside TRL's own, on the 20 batches of a run, averaged as for two
    processes."""
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
            with (
                mock.patch.object(trainer, "_note_kl"),
                mock.patch.object(type(trainer.accelerator), "num_processes", 2),
            ):
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


def test_loss_and_gradients_equal_those_of_starter(checkpoint, tmp_path):
    """Of log-probs and of sums over the vocabulary that are taken from the models' own logits."""
    trainer = make_trainer(
        checkpoint,
        tmp_path,
        moved=True,
        loss_type="dr_grpo",
        temperature=0.7,
        kl_gradient="reverse",
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    trainer._note_kl = mock.Mock()
    torch.manual_seed(0)
    ids = torch.randint(5, 50, (3, 9))
    mask = torch.arange(5) < torch.tensor([[5], [2], [4]])
    prompt_mask = torch.arange(4) >= torch.tensor([[0], [3], [1]])
    attended = torch.cat([prompt_mask, mask], dim=1).long()
    tables = []
    for model in (trainer.model, trainer.ref_model):
        logits = model(input_ids=ids, attention_mask=attended).logits[:, 3:-1]
        tables.append((logits / 0.7).log_softmax(dim=2))
    log_p, log_q = tables
    now, ref = [table.gather(2, ids[:, 4:, None])[..., 0] for table in tables]
    old = now.detach() + torch.randn(3, 5) / 2
    advantages = torch.tensor([0.8, -1.2, 0.3])
    inputs = {
        "prompt_ids": ids[:, :4],
        "prompt_mask": prompt_mask.long(),
        "completion_ids": ids[:, 4:],
        "completion_mask": mask.long(),
        "advantages": advantages,
        "ref_per_token_logps": ref.detach(),
        "old_per_token_logps": old,
    }
    exact_kl = {
        "exact": (log_p.exp() * (log_p - log_q)).sum(dim=2),
        "exact_forward": (log_q.exp() * (log_q - log_p)).sum(dim=2),
    }
    for options in (
        *(dict(kl_estimator=name) for name in ("k1", "k2", "k3", *starter.EXACT)),
        dict(kl_in="loss_to_go"),
        dict(kl_gradient="as_written"),
        dict(kl_adaptation_method="clip_sound", kl_clip_threshold=0.5),
        IN_REWARD,
    ):
        kl = trainer.kl_settings = starter.KLSettings(**options)
        expected, _ = starter.compute_loss(
            advantages[:, None],
            now,
            old,
            0.2,
            ref.detach(),
            trainer.beta,
            mask,
            kl,
            exact_kl=exact_kl.get(kl.kl_estimator),
        )
        losses = [trainer._compute_loss(trainer.model, inputs), expected[mask].sum() / (3 * 8)]
        gradients = [
            torch.autograd.grad(loss, [*trainer.model.parameters()], retain_graph=True)
            for loss in losses
        ]
        torch.testing.assert_close(*losses)
        torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)
        if kl.kl_estimator in exact_kl:
            metadata, *_ = trainer._note_kl.call_args.args
            torch.testing.assert_close(metadata["kl_per_token"], exact_kl["exact"])


def test_kl_is_the_mean_over_the_tokens_of_all_processes(checkpoint, tmp_path):
    trainer = make_trainer(checkpoint, tmp_path, **IN_REWARD)
    trainer.model.train()
    trainer._kl_sums = 0.0
    trainer.controller = mock.Mock()
    kl = torch.tensor([[1.0, 3.0, math.nan]])
    names = ("kl_penalty_mean", "adaptive_kl/adapted_kl", "kl_per_token")
    others = torch.tensor([8.0, 10.0, 12.0, 2.0])  # sums of another process, over two tokens
    with mock.patch.object(trainer.accelerator, "reduce", others.add):
        trainer._note_kl(dict.fromkeys(names, kl), torch.tensor([[True, True, False]]), 0.2)
    assert trainer._metrics["train"]["kl"] == [3.0]
    assert trainer._metrics["train"]["adaptive_kl/adapted_kl"] == [3.5]
    assert trainer.controller.update.call_args.args[0] == 4.0


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
    train = functools.partial(trained, checkpoint, tmp_path, peft_config=adapter)
    theirs = train(plain=True, use_bias_correction_kl=False)
    ours = train(**PRINTED)
    assert ours.ref_model is None
    assert torch.allclose(weights_of(ours), weights_of(theirs), rtol=0, atol=1e-6)
    assert logged(train(kl_estimator="exact"), "adaptive_kl/raw_kl")[-1] > 1e-6


@pytest.mark.slow
def test_kl_in_the_reward_trains_and_a_resumed_run_has_the_same_beta_path(checkpoint, tmp_path):
    options = dict(
        moved=True,
        kl_adaptation_method="target_sound",
        kl_target=0.02,
        save_steps=3,
        per_device_eval_batch_size=16,
        **IN_REWARD,
    )
    whole = trained(checkpoint, tmp_path / "whole", max_steps=8, **options)
    trained(checkpoint, tmp_path / "stopped", max_steps=3, **options)
    resumed = make_trainer(checkpoint, tmp_path / "stopped", max_steps=8, **options)
    resumed.train(resume_from_checkpoint=True)
    betas = logged(whole, "adaptive_kl/current_beta")
    assert len(set(betas)) > 4
    assert logged(resumed, "adaptive_kl/current_beta") == betas
    assert torch.equal(weights_of(resumed), weights_of(whole))
    metrics = whole.evaluate(whole.train_dataset.select(range(4)))
    assert metrics["eval_adaptive_kl/raw_kl"] != 0
    assert resumed.controller.state == whole.controller.state
