"""Makes recipes/*.patch: variants of starter.py, each a patch of a few lines.

    python -m lab.recipes           writes the patches anew, after a change of starter.py
    python -m lab.recipes --check   whether each is what this file makes of starter.py

A recipe is a list of places: what stands exactly once in starter.py, and what takes its place.
"""
import argparse
import difflib
import re
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
FOLDER = REPOSITORY / "recipes"
MOST_LINES = 30  # that a recipe adds


def places(text):
    """<<<<, what stands, ====, what takes its place, >>>> -> [(what stands, what replaces it)]"""
    return re.findall(r"^<<<<\n(.*?)^====\n(.*?)^>>>>\n", text, re.MULTILINE | re.DOTALL)


# Several optimiser steps on each rollout: in the first the ratio is 1, and these change nothing.
TWO_EPOCHS = """
<<<<
    epochs_per_rollout=1,  # optimiser steps per rollout
====
    epochs_per_rollout=2,  # optimiser steps per rollout; in the first the ratio is 1
>>>>
"""

RECIPES = {
    "rloo": """
<<<<
    advantages = groups - groups.mean(dim=1, keepdim=True)
====
    # RLOO (arXiv:2402.14740): minus the mean of the other responses of the group.
    mean_of_others = (groups.sum(dim=1, keepdim=True) - groups) / (group_size - 1)
    advantages = groups - mean_of_others
>>>>
<<<<
    normalize_by_std=True,  # False: Dr. GRPO
====
    normalize_by_std=False,  # RLOO does not divide
>>>>
""",
    "maxrl": """
<<<<
        advantages = advantages / (groups.std(dim=1, keepdim=True) + advantage_eps)
====
        # MaxRL (arXiv:2602.02710): the rarer a solution, the more it weighs.
        advantages = advantages / (groups.mean(dim=1, keepdim=True) + advantage_eps)
>>>>
""",
    "gspo": """
<<<<
    ratio = torch.exp(policy_log_probs - old_log_probs)
    clipped_ratio
====
    # GSPO (arXiv:2507.18071): one ratio for a response, from the mean of its tokens' log-ratios.
    # Its gradient reaches each token through the token's own log-prob.
    log_ratio = masked_mean(policy_log_probs - old_log_probs, mask, dim=1)[:, None].detach()
    ratio = torch.exp(log_ratio + policy_log_probs - policy_log_probs.detach())
    clipped_ratio
>>>>
<<<<
    loss_average="dapo",  # mean over the step's tokens; "grpo": over each response first; "dr_grpo"
    clip_range=0.2,  # of the ratio pi / old; (0.2, 0.28) clips less above 1
====
    loss_average="grpo",  # mean over each response first: GSPO's
    clip_range=(3e-4, 4e-4),  # GSPO's: the ratio of a whole response stays near 1
>>>>
""" + TWO_EPOCHS,
    "cispo": """
<<<<
    loss = -torch.minimum(ratio * advantages, clipped_ratio * advantages)
====
    # CISPO (arXiv:2506.13585): the clipped ratio is a weight, and no token loses its gradient.
    weight = ratio.clamp(max=1 + clip_high).detach()
    loss = -weight * advantages * policy_log_probs
>>>>
<<<<
    clip_range=0.2,  # of the ratio pi / old; (0.2, 0.28) clips less above 1
====
    clip_range=(0.9, 4.0),  # CISPO cuts above only, at 5
>>>>
""" + TWO_EPOCHS,
    "sapo": """
<<<<
    loss = -torch.minimum(ratio * advantages, clipped_ratio * advantages)
====
    # SAPO (arXiv:2511.20347): a smooth gate in the place of the clip, steeper where the response
    # was worse than its group.
    steepness = torch.where(advantages > 0, 1.0, 1.05)
    gate = torch.sigmoid(steepness * (ratio - 1)) * 4 / steepness
    loss = -gate * advantages
>>>>
""" + TWO_EPOCHS,
    "cosine": '''
<<<<
    """Linear warm-up, then constant."""
    return cfg.learning_rate * min(1.0, step / max(cfg.warmup_steps, 1))
====
    """Linear warm-up, then half a cosine down to a tenth (SGDR, arXiv:1608.03983)."""
    warm_up = min(1.0, step / max(cfg.warmup_steps, 1))
    progress = max(0, step - cfg.warmup_steps) / max(1, cfg.n_train_steps - cfg.warmup_steps)
    return cfg.learning_rate * warm_up * (0.55 + 0.45 * math.cos(math.pi * min(1.0, progress)))
>>>>
''',
    "dynamic_sampling": """
<<<<
            asked = problems_of_step(problems.train, step - 1, prompts_per_step, cfg.seed)
            prompts = [problem["prompt_ids"] for problem in asked]
            with timed(seconds, "rollout"):
                responses = rollout(policy, llm, prompts,
                                    sampling_for(cfg, step, cfg.group_size), parts)
====
            # DAPO (arXiv:2503.14476): draws prompts, three times at most, until the rewards of
            # enough groups differ.
            groups = []  # (whether all rewards are equal, problem, responses)
            for draw in range(3):
                if sum(not equal for equal, _, _ in groups) >= prompts_per_step:
                    break
                drawn = problems_of_step(problems.train, 3 * (step - 1) + draw, prompts_per_step,
                                         cfg.seed)
                prompts = [problem["prompt_ids"] for problem in drawn]
                with timed(seconds, "rollout"):
                    sampled = rollout(policy, llm, prompts, sampling_for(
                        cfg, f"{step} {draw}", cfg.group_size), parts)
                _, rewards, *_ = score(sampled, drawn, tokenizer, cfg.reward, parts)
                for i, of_group in enumerate(rewards.split(cfg.group_size)):
                    own = sampled[i * cfg.group_size:(i + 1) * cfg.group_size]
                    groups.append((bool((of_group == of_group[0]).all()), drawn[i], own))
            groups = sorted(groups, key=lambda group: group[0])[:prompts_per_step]
            asked = [problem for _, problem, _ in groups]
            responses = [response for _, _, own in groups for response in own]
>>>>
""",
    "minibatches": """
<<<<
            microbatches = ranks.microbatches(batch, cfg.max_tokens_per_microbatch,
                                              compute.cut_microbatches)
====
            # Minibatches as in PPO (arXiv:1707.06347): an optimiser step on each part of the rows,
            # with n times their weight. Later ones take the old log-probs from the sampler.
            n = min(MINIBATCHES, len(batch["labels"]))
            batch["weights"] *= n
            n_learning /= n
            minibatches = []
            for first in range(n):
                part = take_rows(batch, slice(first, None, n), batch["labels"].shape[1])
                if first > 0:
                    part["old_log_probs"] = part["rollout_log_probs"]
                minibatches.append(ranks.microbatches(part, cfg.max_tokens_per_microbatch,
                                                      compute.cut_microbatches))
>>>>
<<<<
            for epoch in range(cfg.epochs_per_rollout):
====
            for epoch, microbatches in enumerate(minibatches * cfg.epochs_per_rollout):
>>>>
<<<<
ADVANTAGE_EPS = 1e-6  # added to the standard deviation of a group
====
ADVANTAGE_EPS = 1e-6  # added to the standard deviation of a group
MINIBATCHES = 4  # optimiser steps per rollout, each on a part of its rows
>>>>
""",
    "distillation": '''
<<<<
        ref_model = policy if with_lora else copy.deepcopy(policy).eval().requires_grad_(False)
====
        assert not with_lora, "with LoRA the policy is its own reference, and no teacher"
        ref_model = init_policy(teacher(model_folder), cfg.device)[0].requires_grad_(False)
        compute.prepare(ref_model)
        sizes = [model.config.get_text_config().vocab_size for model in (policy, ref_model)]
        if sizes[0] != sizes[1]:
            raise InputError(f"the teacher knows {sizes[1]} tokens, the policy {sizes[0]}; return "
                             "the folder of a model with the same tokenizer from teacher()")
>>>>
<<<<
ADVANTAGE_EPS = 1e-6  # added to the standard deviation of a group
====
ADVANTAGE_EPS = 1e-6  # added to the standard deviation of a group


def teacher(model_folder):
    """The reference, from which the policy learns on its own samples (arXiv:2306.13649): a model
    with the same tokenizer. Here the newest that a run has saved."""
    found = sorted(Path("runs").glob("*/model/config.json"))
    folder = found[-1].parent if found else model_folder
    print(f"teacher: {folder}" if found else "no teacher in runs/: nothing will be learnt")
    return folder
>>>>
<<<<
            # 3. Lay the step out
====
            advantages = torch.zeros_like(advantages)  # the KL alone is learnt from
            # 3. Lay the step out
>>>>
<<<<
    if step == 1 and not found["reference"] < (0.5 if cfg.bf16 else 1e-4):
        raise RunStopped(f"step {step}: the policy differs from its own copy by "
                         f"{found['reference']:.2g} nats before any update: the reference is not "
                         "the starting model, or is scored otherwise (temperature, dropout)")
====
>>>>
<<<<
    use_kl_penalty=False,
====
    use_kl_penalty=True,
>>>>
<<<<
    max_tokens_per_microbatch=8_192,
    kl_coef=0.3,
====
    max_tokens_per_microbatch=8_192,
    kl_coef=1.0,
>>>>
''',
    "moving_reference": """
<<<<
                        optimizer.step()
====
                        optimizer.step()
                        if ref_model is not None and step % REFERENCE_EVERY == 0:
                            ref_model.load_state_dict(policy.state_dict())
>>>>
<<<<
ADVANTAGE_EPS = 1e-6  # added to the standard deviation of a group
====
ADVANTAGE_EPS = 1e-6  # added to the standard deviation of a group
REFERENCE_EVERY = 50  # steps between resets of the reference (ProRL, arXiv:2505.24864)
>>>>
<<<<
        return tensors

    def write_checkpoint
====
        if self.ref_model is not None:  # it moves, so a resumed run needs it
            for name, parameter in self.ref_model.named_parameters():
                tensors[f"reference {name}"] = parameter.detach()
        return tensors

    def write_checkpoint
>>>>
<<<<
            if kind == "weights":
                parameter.data.copy_(tensor)
====
            if kind == "reference":
                self.ref_model.get_parameter(name).data.copy_(tensor)
            elif kind == "weights":
                parameter.data.copy_(tensor)
>>>>
<<<<
    run.open(policy, optimizer)
====
    run.ref_model = ref_model
    run.open(policy, optimizer)
>>>>
<<<<
    use_kl_penalty=False,
====
    use_kl_penalty=True,
>>>>
""",
    "wandb": """
<<<<
            self.writer = SummaryWriter(self.folder)
====
            self.writer = SummaryWriter(self.folder)
            import wandb
            self.wandb = wandb.init(project="starter", id=self.folder.name, resume="allow",
                                    dir=self.folder, config=self.settings)
>>>>
<<<<
        getattr(self.writer, what)(*values)
====
        getattr(self.writer, what)(*values)
        if what == "add_scalar":
            tag, value, step = values
            self.wandb.log({tag: float(value)}, step=step)
>>>>
""",
    "calculator": '''
<<<<
    if llm is not None:
        responses = rollout_with_vllm(llm, own_prompts, sampling)
    else:
        responses = parts.compute.rollout(policy, own_prompts, sampling)
    return parts.ranks.gather(responses)
====
    def sample(prompts, sampling):
        if llm is not None:
            return rollout_with_vllm(llm, prompts, sampling)
        return parts.compute.rollout(policy, prompts, sampling)

    responses = sample(own_prompts, sampling)
    # Two turns: where a response calls <calc>2+3</calc>, the result and a second turn follow. The
    # log-prob None marks tokens that are not the model's own.
    calls = {}
    decode = parts.run.tokenizer.decode
    for row, r in enumerate(responses):
        if "</calc>" in decode(r.response_ids):
            n = next(n for n in range(len(r.response_ids) + 1)
                     if "</calc>" in decode(r.response_ids[:n]))
            value = arithmetic(decode(r.response_ids[:n]).split("<calc>")[-1].split("</calc>")[0])
            result = parts.run.tokenizer(f" = {value[0] if value else 'error'} ",
                                         add_special_tokens=False)["input_ids"]
            calls[row] = r._replace(response_ids=r.response_ids[:n] + result,
                                    log_probs=r.log_probs[:n] + [None] * len(result))
    again = dataclasses.replace(sampling, group_size=1, seed=sampling.seed + 2**20)
    more = sample([r.prompt_ids + r.response_ids for r in calls.values()], again) if calls else []
    for (row, r), m in zip(calls.items(), more):
        responses[row] = m._replace(prompt_ids=r.prompt_ids, log_probs=r.log_probs + m.log_probs,
                                    response_ids=r.response_ids + m.response_ids)
    return parts.ranks.gather(responses)
>>>>
<<<<
        "response_mask": padded([zeros + [1] * len(r.response_ids)
                                 for zeros, r in zip(before, responses)], torch.bool),
        "rollout_log_probs": padded([zeros + list(r.log_probs)
                                     for zeros, r in zip(before, responses)], torch.float32),
====
        "response_mask": padded([zeros + [x is not None for x in r.log_probs]
                                 for zeros, r in zip(before, responses)], torch.bool),
        "rollout_log_probs": padded([zeros + [x or 0.0 for x in r.log_probs]
                                     for zeros, r in zip(before, responses)], torch.float32),
>>>>
<<<<
    cfg.stop_token_ids = find_stop_tokens(policy, tokenizer)
====
    cfg.stop_token_ids = find_stop_tokens(policy, tokenizer)
    run.tokenizer = tokenizer
>>>>
''',
}


def apply(name, text):
    """Returns starter.py's text with a recipe in it. Raises ValueError where it does not fit."""
    for stands, becomes in places(RECIPES[name]):
        stands, becomes = without_newline(stands, becomes)
        if text.count(stands) != 1:
            raise ValueError(f"{name}: stands {text.count(stands)} times: {stands!r}")
        text = text.replace(stands, becomes)
    return text


def without_newline(stands, becomes):
    """A place may end in the middle of a line of starter.py; then both sides do."""
    if not becomes:
        return stands, becomes
    return stands.removesuffix("\n"), becomes.removesuffix("\n")


def patch_of(name, text):
    """Returns the patch as `git apply` reads it."""
    return "".join(difflib.unified_diff(text.splitlines(True), apply(name, text).splitlines(True),
                                        "a/starter.py", "b/starter.py"))


def n_added(patch):
    return sum(line.startswith("+") and not line.startswith("+++") for line in patch.splitlines())


def main():
    parser = argparse.ArgumentParser(description="makes recipes/*.patch")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    text = (REPOSITORY / "starter.py").read_text("utf-8")
    stale = 0
    for name in RECIPES:
        path = FOLDER / f"{name}.patch"
        patch = patch_of(name, text)
        if path.is_file() and path.read_text("utf-8") == patch:
            continue
        stale += 1
        if given.check:
            print(f"{path.name} is not what lab/recipes.py makes of starter.py; run "
                  "python -m lab.recipes")
        else:
            FOLDER.mkdir(exist_ok=True)
            path.write_text(patch, "utf-8")
            print(f"{path.name}: {n_added(patch)} lines added")
    return 1 if given.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
