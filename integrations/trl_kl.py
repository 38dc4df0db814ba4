"""The KL penalty of starter.py inside TRL's GRPOTrainer. One line of a TRL script changes:

    from integrations.trl_kl import GRPOConfig, GRPOTrainer  # was: from trl import ...

With the new options at their defaults TRL's own code runs, bit for bit. With any of them set, TRL
computes its loss without a KL term, and the KL term of starter.py is added to it, averaged over
tokens as TRL's loss_type averages. docs/trl.md explains the options and what was measured.

Needs TRL 1.16 (pip install trl==1.16.0), and starter.py and support/ beside integrations/.
SPDX-License-Identifier: MIT
"""

import inspect
import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
import trl
from trl.trainer.utils import use_adapter

environment = set(os.environ)
try:
    import starter
    from integrations import options
except ModuleNotFoundError as error:
    raise ImportError(
        f"{__file__} needs starter.py, support/ and integrations/ of its repository "
        f"in a folder on sys.path ({error}); add that folder to PYTHONPATH"
    ) from None

for variable in set(os.environ) - environment:
    del os.environ[variable]  # starter.py sets some for its own runs; TRL's run as they would alone

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo")  # whose average _token_weights() knows
CONTROLLER_FILE = "kl_controller.json"  # in each checkpoint folder


@dataclass
class GRPOConfig(trl.GRPOConfig):
    """TRL's GRPOConfig with the options of the adaptive-KL document and of starter.py."""

    kl_adaptation_method: str = "none"  # a term rule, a rule for beta, or "dynamic+sigmoid"
    kl_clip_threshold: float | None = None  # nats; None: 1.0 for clip, 5.0 for clip_sound
    kl_target: float = 0.1  # nats per token
    dynamic_beta_decay: float = 0.9
    reward_threshold: float = 0.8
    beta_min: float = 0.0
    beta_schedule_steps: int = 1000  # optimiser steps
    # None in these three is TRL's own KL term, or "k3", "reverse", "loss" if another is given.
    kl_estimator: str | None = None  # the value: "k1", "k2", "k3", or one of starter.EXACT
    kl_gradient: str | None = None  # "reverse", or "as_written": autograd through the value
    kl_in: str | None = None  # "loss", "loss_to_go", "reward"
    reproduce_paper: bool = False  # True: allow a KL term that is known not to work


def check_options(args):
    """Raises starter.InputError, in one sentence, for what cannot work together with TRL."""
    fault = fault_of(args)
    if fault is not None:
        raise starter.InputError(fault)


def fault_of(args):
    """Returns what cannot work together with TRL, and what to use, or None."""
    if not args.beta > 0:
        return (
            f"beta = {args.beta!r} leaves nothing for the KL options to act on; use a beta above "
            "0, or leave out kl_adaptation_method, kl_estimator, kl_gradient and kl_in"
        )
    if args.loss_type not in LOSS_TYPES:
        return (
            f"loss_type = {args.loss_type!r} does not work with the KL options; use one of "
            f"{LOSS_TYPES}"
        )
    if args.kl_gradient == "as_written" and args.use_bias_correction_kl:
        return (
            "kl_gradient = 'as_written' would be TRL's k3 times the importance ratio, which has "
            "the gradient of 'reverse'; use that, or use_bias_correction_kl = False"
        )
    acts_on_all = (
        args.importance_sampling_level != "token"
        or args.top_entropy_quantile != 1
        or args.off_policy_mask_threshold is not None
    )
    if args.kl_in == "reward" and acts_on_all:
        return (
            "kl_in = 'reward' does not work with importance_sampling_level = 'sequence', "
            "top_entropy_quantile or off_policy_mask_threshold, which would act on the KL too; "
            "use kl_in = 'loss_to_go'"
        )
    if (args.liger_kernel_config or {}).get("fused_linear_cross_entropy"):
        return (
            "liger_kernel_config with fused_linear_cross_entropy computes a loss of its own, past "
            "the KL options; use use_liger_kernel = False"
        )
    for function in (trl.GRPOTrainer.compute_loss, trl.GRPOTrainer._compute_loss):
        if function.__module__ != "trl.trainer.grpo_trainer":
            return (
                f"GRPOTrainer's loss was replaced by {function.__module__}, which would ignore "
                "the KL options; remove that import (of unsloth, say), or leave the options out"
            )
    return None


def kl_settings_of(args):
    """GRPOConfig -> starter.KLSettings, or None where TRL's own KL term is asked for. Raises
    starter.InputError for a combination that support/ refuses, or that TRL cannot do."""
    if not isinstance(args, GRPOConfig):
        return None
    given = {name: getattr(args, name) for name in options.NAMES if hasattr(args, name)}
    if all(value == getattr(GRPOConfig, name) for name, value in given.items()):
        return None
    check_options(args)
    return options.checked_kl_settings(
        **given, kl_coef=args.beta, max_new_tokens=args.max_completion_length
    )


class GRPOTrainer(trl.GRPOTrainer):
    """TRL's GRPOTrainer. kl_settings is None where TRL's own KL term is used."""

    def __init__(self, model, reward_funcs=None, args=None, *others, **named):
        self.kl_settings = kl_settings_of(args)
        super().__init__(model, reward_funcs, args, *others, **named)
        if self.kl_settings is None:
            return
        self.controller = starter.KLController(self.beta, self.kl_settings)
        self._mean_reward = float("nan")
        self._log_probs = self._statistics = None  # of the last forward pass
        if self.accelerator.is_main_process:
            shown = {name: getattr(self.kl_settings, name) for name in options.NAMES}
            print(
                f"TRL {trl.__version__} (tried with 1.16) with the KL term of starter.py instead "
                f"of its own: {shown}",
                flush=True,
            )

    def _calculate_rewards(self, inputs, *others):
        """(N, n functions) rewards of all processes. Their weighted mean moves beta."""
        rewards = super()._calculate_rewards(inputs, *others)
        if self.kl_settings is not None and self.model.training:
            scored = rewards[~rewards.isnan().all(dim=1)]
            weighted = scored * self.reward_weights.to(scored.device)
            self._mean_reward = weighted.nansum(dim=1).mean().item()
        return rewards

    def _generate_and_score_completions(self, inputs):
        """Adds the log-probs at rollout where KL in the reward needs them. TRL leaves them out
        where each rollout serves a single update, so that costs one more forward pass."""
        batch = super()._generate_and_score_completions(inputs)
        in_reward = self.kl_settings is not None and self.kl_settings.kl_in == "reward"
        if in_reward and "old_per_token_logps" not in batch:
            tokens = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
            attended = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
            names = inspect.signature(super()._get_per_token_logps_and_entropies).parameters
            with torch.no_grad():
                batch["old_per_token_logps"] = self._get_per_token_logps_and_entropies(
                    self.model,
                    tokens,
                    attended,
                    batch["completion_ids"].size(1),
                    self.args.per_device_train_batch_size,
                    **{name: batch[name] for name in names if name in batch},
                )[0]
        return batch

    def _compute_loss(self, model, inputs):
        """TRL's loss without its KL term + beta * the KL term of starter.py."""
        if self.kl_settings is None:
            return super()._compute_loss(model, inputs)
        kl = self.kl_settings
        beta = self.controller.beta
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1) > 0
        ref_log_probs = torch.where(mask, inputs["ref_per_token_logps"], 0.0)
        if kl.kl_in == "reward":
            old_log_probs = inputs["old_per_token_logps"]
            of_tokens = starter.kl_in_reward(old_log_probs, ref_log_probs, mask, kl)
            advantages = inputs["advantages"].unsqueeze(1) - beta * of_tokens
            inputs = {**inputs, "advantages": advantages}
        given_beta, self.beta = self.beta, 0.0  # TRL's loss then has no KL term
        try:
            loss = super()._compute_loss(model, inputs)
        finally:
            self.beta = given_beta

        log_probs = torch.where(mask, self._log_probs, 0.0)
        old_log_probs = inputs.get("old_per_token_logps", log_probs.detach())
        old_log_probs = torch.where(mask, old_log_probs, 0.0)
        stats = self._statistics or {}
        exact_kl = stats.get(starter.EXACT.get(kl.kl_estimator))
        given = log_probs, ref_log_probs, old_log_probs, mask, kl, exact_kl
        metadata = starter.kl_for_log(*given)
        metadata["kl_per_token"] = stats.get("kl_per_token", metadata["kl_k3"])
        self._log_probs = self._statistics = None
        if kl.kl_in != "reward":
            weighted = starter.kl_in_loss(*given) * self._token_weights(mask, inputs)
            loss = loss + beta * torch.where(mask, weighted, 0.0).sum()
        self._note_kl(metadata, mask, beta)
        return loss

    def _token_weights(self, mask, inputs):
        """(B, T) mask -> the weight of each token in TRL's loss: (B, 1) or a number."""
        microbatches = self.current_gradient_accumulation_steps if self.model.training else 1
        if self.loss_type == "dapo":  # num_items_in_batch counts the tokens of the whole rollout
            n_tokens = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
            of_rollout = self.args.steps_per_generation if self.model.training else 1
            return of_rollout / (n_tokens * microbatches)
        if self.loss_type == "grpo":
            return 1 / (mask.sum(1, keepdim=True).clamp(min=1) * len(mask) * microbatches)
        if self.loss_type == "bnpo":
            return 1 / (mask.sum().clamp(min=1) * microbatches)
        return 1 / (len(mask) * self.max_completion_length * microbatches)

    def _get_per_token_logps_and_entropies(
        self,
        model,
        input_ids,
        attention_mask,
        logits_to_keep,
        batch_size=None,
        compute_entropy=False,
        **others,
    ):
        """TRL's log-probs. Those of its loss, which alone asks for entropies, are kept."""
        kl = self.kl_settings
        if kl is not None and compute_entropy and kl.kl_estimator in starter.EXACT:
            return self._forward_over_vocabulary(
                model, input_ids, attention_mask, logits_to_keep, others
            )
        scores = super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, **others
        )
        if kl is not None and compute_entropy:
            self._log_probs = scores[0]
        return scores

    def _forward_over_vocabulary(self, model, input_ids, attention_mask, n_tokens, others):
        """(B, P + T) ids -> (B, T) log-probs, entropies, and self._statistics. TRL's fused head
        does not keep logits, so this holds (B, T, V) of them."""
        if any(value is not None and value is not False for value in others.values()):
            raise starter.InputError(
                f"kl_estimator = {self.kl_settings.kl_estimator!r} works for "
                "text without an auxiliary loss of experts; use 'k3'"
            )

        def logits_of(scored_model):
            with self.accelerator.autocast():
                logits = scored_model(
                    input_ids=input_ids,
                    attention_mask=attention_mask,
                    logits_to_keep=n_tokens + 1,
                    use_cache=False,
                ).logits
            return logits[:, -n_tokens - 1 : -1].flatten(0, 1)

        logits = logits_of(model)
        with torch.no_grad():
            if self.ref_model is not None:
                ref_logits = logits_of(self.ref_model)
            else:  # the policy with its PEFT adapter off, or as it was when training began
                adapted = self.accelerator.unwrap_model(self.model)
                with use_adapter(adapted, "ref" if "ref" in adapted.peft_config else None):
                    ref_logits = logits_of(model)
        labels = input_ids[:, -n_tokens:].flatten()
        stats = starter.statistics_of_logits(logits, labels, self.temperature, ref_logits)
        stats = {name: values.view(-1, n_tokens) for name, values in stats.items()}
        self._statistics = stats
        self._log_probs = stats["log_probs"]
        return stats["log_probs"], stats["entropy"], None

    def _note_kl(self, metadata, mask, beta):
        """Adds a microbatch to the sums over tokens. After the last one of an optimiser step it
        logs their means over all processes and moves beta, for the next step."""
        summed = ("kl_penalty_mean", "adaptive_kl/adapted_kl", "kl_per_token")
        sums = torch.stack(
            [torch.where(mask, metadata[name].detach(), 0.0).sum() for name in summed]
            + [mask.sum()]
        )
        training = self.model.training
        if training:
            self._kl_sums = sums = self._kl_sums + sums
            if not self.accelerator.sync_gradients:
                return
            self._kl_sums = 0.0
        sums = self.accelerator.reduce(sums)
        raw, adapted, per_token = (sums[:-1] / sums[-1].clamp(min=1)).tolist()
        for name, value in (
            ("kl", raw),
            ("adaptive_kl/raw_kl", raw),
            ("adaptive_kl/adapted_kl", adapted),
            ("adaptive_kl/current_beta", beta),
        ):
            self._metrics["train" if training else "eval"][name].append(value)
        if training:
            self.controller.update(per_token, self._mean_reward)

    def _save_checkpoint(self, model, trial):
        if self.kl_settings is not None and self.args.should_save:
            folder = Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")
            folder.mkdir(parents=True, exist_ok=True)
            (folder / CONTROLLER_FILE).write_text(json.dumps(self.controller.state))
        super()._save_checkpoint(model, trial)

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if self.kl_settings is not None and checkpoint is not None:
            self.controller.state |= json.loads(Path(checkpoint, CONTROLLER_FILE).read_text())

    def train(self, *arguments, **named):
        """Beta starts from args.beta, or from the checkpoint that is resumed."""
        if self.kl_settings is not None:
            self.controller = starter.KLController(self.beta, self.kl_settings)
            self._kl_sums = 0.0  # since the last optimiser step
        return super().train(*arguments, **named)
