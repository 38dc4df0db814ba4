"""GRPO with a KL penalty through Tinker's API: a training loop that compares the methods.

    python -m integrations.example_tinker             three methods, about five minutes
    python -m integrations.example_tinker clip        one method of METHODS, by name
    python -m integrations.example_tinker --save      all methods, 3 seeds -> lab/results/

BASE_MODEL "tiny" is the built-in model behind a local stand-in for the service (tinker_local.py).
Any other is a model of the real service, which needs TINKER_API_KEY and costs money; that path has
not been run here.
"""
import asyncio
import functools
import statistics
import sys
from dataclasses import dataclass

import tinker
import torch
from tinker import types

import starter
from integrations import examples, tinker_kl
from integrations.tinker_local import LocalServiceClient
from support import tasks

BASE_MODEL = "tiny"  # or a model of the service, such as "Qwen/Qwen3-8B"
COEF = 1.0  # keeps the other skills of the built-in model at this learning rate (README_KL.md)

# What is trained. "loss" is the built-in "ppo" or "custom"; the rest goes to make_controller().
IN_LOSS = dict(loss="custom", kl_coef=COEF)
METHODS = {
    "no penalty (ppo)": dict(loss="ppo"),
    "kl_coef = 0": dict(loss="custom"),
    "reverse (default)": IN_LOSS,
    "as printed": IN_LOSS | dict(as_printed=True),
    "in the advantages": dict(loss="ppo", kl_coef=COEF, kl_estimator="k1", kl_in="reward"),
    "loss_to_go": IN_LOSS | dict(kl_in="loss_to_go"),
    "k3 as written": IN_LOSS | dict(kl_gradient="as_written"),
    "k1 as written": IN_LOSS | dict(kl_estimator="k1", kl_gradient="as_written",
                                    reproduce_paper=True),
    "clip": IN_LOSS | dict(kl_adaptation_method="clip"),
    "length_normalized": IN_LOSS | dict(kl_adaptation_method="length_normalized"),
    "dynamic": IN_LOSS | dict(kl_adaptation_method="dynamic", reward_threshold=0.7),
    "sigmoid": IN_LOSS | dict(kl_adaptation_method="sigmoid"),
    "target_sound": IN_LOSS | dict(kl_adaptation_method="target_sound", kl_target=0.05),
    "dynamic_sound+clip_sound": IN_LOSS | dict(kl_adaptation_method="dynamic_sound+clip_sound",
                                               reward_threshold=0.7),
}


@dataclass(frozen=True)
class Settings:
    """The numbers of a run, with the values for the built-in model."""
    n_steps: int = 40
    prompts_per_step: int = 16
    group_size: int = 8
    max_tokens: int = examples.MAX_NEW_TOKENS
    learning_rate: float = 6e-4  # twice the rate of starter.py: enough to forget in 40 steps
    n_eval: int = 100  # held-out problems of the task
    seed: int = 0


REAL = Settings(max_tokens=512, learning_rate=4e-5, n_eval=50)  # a start, not measured


def make_service(base_model):
    return LocalServiceClient() if base_model == "tiny" else tinker.ServiceClient()


async def sample(client, prompts, n, cfg, temperature, seed):
    """-> B = P * n prompts, responses and log-probs as lists, group after group. All requests run
    at the same time."""
    requests = [client.sample(
        prompt=types.ModelInput.from_ints(prompt), num_samples=n,
        sampling_params=types.SamplingParams(max_tokens=cfg.max_tokens, temperature=temperature,
                                             seed=seed + i * n))
        for i, prompt in enumerate(prompts)]
    sequences = [sequence for response in await asyncio.gather(*requests)
                 for sequence in response.sequences]
    asked = [prompt for prompt in prompts for _ in range(n)]
    return asked, [own.tokens for own in sequences], [own.logprobs for own in sequences]


def rewards_of(responses, problems, tokenizer):
    """Compares the last <answer> with what the problem asks for (starter.reward_fn)."""
    texts = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in responses]
    return [starter.reward_fn(text, problem) for text, problem in zip(texts, problems)]


def kl_per_token(logprobs, ref_logprobs):
    """B lists of log-probs of sampled tokens, and of the reference -> mean k3 in nats."""
    own, ref = (torch.tensor(sum(rows, [])) for rows in (logprobs, ref_logprobs))
    return starter.compute_kl_divergence(own, ref, "k3").mean().item()


async def evaluate(client, ref_client, tokenizer, problems, skills, cfg):
    """Returns the share solved greedily, that of the other skills, and the KL per token of
    responses that are sampled at temperature 1."""
    asked = problems + skills
    _, responses, _ = await sample(client, examples.prompt_ids_of(asked, tokenizer), 1, cfg, 0.0, 1)
    solved = [reward >= 1.0 for reward in rewards_of(responses, asked, tokenizer)]
    n = len(problems)
    prompts, responses, logprobs = await sample(
        client, examples.prompt_ids_of(problems, tokenizer), 4, cfg, 1.0, seed=10**6)
    ref_logprobs = await tinker_kl.compute_reference_logprobs(ref_client, prompts, responses)
    return {"solved": statistics.mean(solved[:n]),
            "other_skills": statistics.mean(solved[n:] or [float("nan")]),
            "kl_per_token": kl_per_token(logprobs, ref_logprobs)}


async def update(training_client, rollout, ref_logprobs, method, controller, cfg):
    """One optimiser step on a rollout: prompts, responses, log-probs, advantages."""
    prompts, responses, logprobs, advantages = rollout
    beta = controller.beta if controller else 0.0
    if method["loss"] == "ppo":
        if controller:
            advantages = tinker_kl.advantages_with_kl(advantages, logprobs, ref_logprobs, beta,
                                                      controller.settings)
        datums = tinker_kl.make_ppo_datums(prompts, responses, logprobs, advantages)
        future = training_client.forward_backward(datums, "ppo", tinker_kl.ppo_loss_fn_config())
    else:
        loss_fn = functools.partial(
            tinker_kl.compute_grpo_kl_loss, kl_coef=beta, advantages=advantages,
            old_logprobs=logprobs, ref_logprobs=ref_logprobs,
            kl=controller.settings if controller else starter.KLSettings(),
            as_printed=method.get("as_printed", False))
        datums = tinker_kl.make_datums(prompts, responses)
        future = training_client.forward_backward_custom(datums, loss_fn)
    # Sent before the request above is done, so that the service runs them back to back.
    step = training_client.optim_step(types.AdamParams(learning_rate=cfg.learning_rate))
    await future
    await step


async def train(name, cfg=Settings(), base_model=BASE_MODEL):
    """Trains with a method of METHODS. Returns the numbers of the run, and its training client."""
    method = METHODS[name]
    options = {key: value for key, value in method.items() if key not in ("loss", "as_printed")}
    controller = None
    if options:
        controller = tinker_kl.make_controller(max_new_tokens=cfg.max_tokens, **options)
    service = make_service(base_model)
    training_client = await service.create_lora_training_client(base_model=base_model, rank=32)
    ref_client = await service.create_sampling_client(base_model=base_model)
    tokenizer = training_client.get_tokenizer()
    make = examples.small_countdown if base_model == "tiny" else tasks.make_countdown
    problems, held_out = make(2000, False, cfg.seed), make(cfg.n_eval, True, cfg.seed)
    skills = examples.other_skills() if base_model == "tiny" else []
    rewards_of_steps, lengths, beta = [], [], 0.0
    for step in range(cfg.n_steps):
        client = await training_client.save_weights_and_get_sampling_client()
        asked = starter.problems_of_step(problems, step, cfg.prompts_per_step, cfg.seed)
        prompts, responses, logprobs = await sample(
            client, examples.prompt_ids_of(asked, tokenizer), cfg.group_size, cfg, 1.0,
            seed=cfg.seed * 10**7 + step * 10**4)
        of_each = [problem for problem in asked for _ in range(cfg.group_size)]
        rewards = rewards_of(responses, of_each, tokenizer)
        advantages, stats = starter.compute_group_normalized_advantages(
            torch.tensor(rewards), cfg.group_size, starter.ADVANTAGE_EPS, True)
        ref_logprobs = None
        if controller:
            beta = controller.beta
            ref_logprobs = await tinker_kl.compute_reference_logprobs(ref_client, prompts,
                                                                      responses)
        await update(training_client, (prompts, responses, logprobs, advantages.tolist()),
                     ref_logprobs, method, controller, cfg)
        if controller:
            controller.update(kl_per_token(logprobs, ref_logprobs), stats["reward_mean"])
        rewards_of_steps.append(stats["reward_mean"])
        lengths.append(statistics.mean(map(len, responses)))
        if (step + 1) % 10 == 0:
            print(f"{name} | step {step + 1} | reward {stats['reward_mean']:.3f} | beta {beta:.3g}")
    client = await training_client.save_weights_and_get_sampling_client()
    after = await evaluate(client, ref_client, tokenizer, held_out, skills, cfg)
    few = max(1, cfg.n_steps // 6)  # first and last steps
    return {"method": name, "seed": cfg.seed, "steps": cfg.n_steps,
            "reward_first": statistics.mean(rewards_of_steps[:few]),
            "reward_last": statistics.mean(rewards_of_steps[-few:]), **after, "beta_last": beta,
            "length_last": statistics.mean(lengths[-few:])}, training_client


def main(arguments):
    keep = "--save" in arguments
    names = [name for name in arguments if name != "--save"] or list(METHODS)[:None if keep else 3]
    for name in names:
        if name not in METHODS:
            raise starter.InputError(f"{name!r} is not a method; use one of {list(METHODS)}")
    rows = []
    for seed in (0, 1, 2) if keep else (0,):
        for name in names:
            settings = Settings(seed=seed) if BASE_MODEL == "tiny" else REAL
            rows.append(asyncio.run(train(name, settings))[0])
            if keep:
                examples.save("tinker_runs.csv", rows)
    print(*examples.table(rows), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
