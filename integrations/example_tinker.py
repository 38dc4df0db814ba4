"""GRPO with a KL penalty through Tinker's API: a training loop that compares the methods.

    python -m integrations.example_tinker             three methods, about two minutes
    python -m integrations.example_tinker clip        one method of METHODS, by name
    python -m integrations.example_tinker --save      all methods and SEEDS -> lab/results/
    python -m integrations.example_tinker --cost      what a custom loss costs -> lab/results/

BASE_MODEL decides where it runs. "tiny" is the built-in model behind a local stand-in for the
service (tinker_local.py). Any other name is a model of the real service, which needs
TINKER_API_KEY and costs money; that path has not been run here.
"""
import asyncio
import csv
import functools
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import tinker
import torch
from tinker import types
from torch.utils.flop_counter import FlopCounterMode

import starter
from integrations import tinker_kl
from integrations.tinker_local import LocalServiceClient

BASE_MODEL = "tiny"  # or a model of the service, such as "Qwen/Qwen3-8B"

RESULTS = Path(starter.__file__).parent / "lab" / "results"
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
SEEDS = (0, 1, 2)
SHOWN = ["no penalty (ppo)", "kl_coef = 0", "reverse (default)"]


@dataclass(frozen=True)
class Settings:
    """The numbers of a run, with the values for the built-in model."""
    n_steps: int = 40
    prompts_per_step: int = 16
    group_size: int = 8
    max_tokens: int = 16
    learning_rate: float = 6e-4  # twice the rate of starter.TINY: enough to forget in 40 steps
    epochs: int = 1  # optimiser steps per rollout
    cliprange: float = 0.2
    normalize_by_std: bool = True
    n_eval: int = 100  # held-out problems of the task, and of each other skill
    seed: int = 0


REAL = Settings(max_tokens=512, learning_rate=4e-5, n_eval=50)  # a start, not measured


def make_service(base_model):
    return LocalServiceClient() if base_model == "tiny" else tinker.ServiceClient()


def load_data(base_model, cfg):
    """Returns training problems, held-out problems, and problems of skills that are not trained."""
    size = starter.SMALL_COUNTDOWN if base_model == "tiny" else {}
    made = [starter.make_countdown(n, held_out, cfg.seed, **size)
            for n, held_out in ((2000, False), (cfg.n_eval, True))]
    if base_model != "tiny":
        return *made, []
    path = Path(starter.find_model("tiny")) / "retention.jsonl"
    skills = starter.read_jsonl(path)
    per_skill = {name: [row for row in skills if row["skill"] == name]
                 for name in sorted({row["skill"] for row in skills})}
    return *made, [row for rows in per_skill.values() for row in rows[:cfg.n_eval]]


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
    shares = []
    for some in (problems, skills):
        prompts = starter.prompt_ids_of(some, tokenizer)
        _, responses, _ = await sample(client, prompts, 1, cfg, 0.0, seed=1)
        solved = [reward >= 1.0 for reward in rewards_of(responses, some, tokenizer)]
        shares.append(statistics.mean(solved) if some else float("nan"))
    prompts = starter.prompt_ids_of(problems, tokenizer)
    asked = await sample(client, prompts, 4, cfg, 1.0, seed=10**6)
    ref_logprobs = await tinker_kl.compute_reference_logprobs(ref_client, *asked[:2])
    return {"solved": shares[0], "other_skills": shares[1],
            "kl_per_token": kl_per_token(asked[2], ref_logprobs)}


async def update(training_client, rollout, ref_logprobs, method, controller, cfg):
    """One optimiser step on a rollout (prompts, responses, log-probs, advantages) -> metrics."""
    prompts, responses, logprobs, advantages = rollout
    beta = controller.beta if controller else 0.0
    if method["loss"] == "ppo":
        if controller:
            advantages = tinker_kl.advantages_with_kl(advantages, logprobs, ref_logprobs, beta,
                                                      controller.settings)
        datums = tinker_kl.make_ppo_datums(prompts, responses, logprobs, advantages)
        future = training_client.forward_backward(
            datums, "ppo", tinker_kl.ppo_loss_fn_config(cfg.cliprange))
    else:
        kl = {"kl": controller.settings} if controller else {}
        loss_fn = functools.partial(
            tinker_kl.compute_grpo_kl_loss, kl_coef=beta, cliprange=cfg.cliprange,
            advantages=advantages, old_logprobs=logprobs, ref_logprobs=ref_logprobs,
            as_printed=method.get("as_printed", False), **kl)
        datums = tinker_kl.make_datums(prompts, responses)
        future = training_client.forward_backward_custom(datums, loss_fn)
    # Sent before the request above is done, so that the service runs them back to back.
    step = training_client.optim_step(types.AdamParams(learning_rate=cfg.learning_rate))
    result = await future
    await step
    return result.metrics


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
    problems, held_out, skills = load_data(base_model, cfg)
    rows = []
    for step in range(cfg.n_steps):
        began = time.perf_counter()
        client = await training_client.save_weights_and_get_sampling_client()
        asked = starter.problems_of_step(problems, step, cfg.prompts_per_step, cfg.seed)
        prompts, responses, logprobs = await sample(
            client, starter.prompt_ids_of(asked, tokenizer), cfg.group_size, cfg, 1.0,
            seed=cfg.seed * 10**7 + step * 10**4)
        of_each = [problem for problem in asked for _ in range(cfg.group_size)]
        rewards = rewards_of(responses, of_each, tokenizer)
        advantages, stats = tinker_kl.compute_advantages(rewards, cfg.group_size,
                                                         cfg.normalize_by_std)
        sampled = time.perf_counter()
        ref_logprobs = None
        if controller:
            ref_logprobs = await tinker_kl.compute_reference_logprobs(ref_client, prompts,
                                                                      responses)
        scored = time.perf_counter()
        beta = controller.beta if controller else 0.0
        for _ in range(cfg.epochs):
            metrics = await update(training_client, (prompts, responses, logprobs, advantages),
                                   ref_logprobs, method, controller, cfg)
            if controller:  # the built-in "ppo" reports no KL: then that of the rollout
                kl = metrics.get("kl_per_token", kl_per_token(logprobs, ref_logprobs))
                controller.update(kl, stats["reward_mean"])
        rows.append({"reward": stats["reward_mean"], "beta": beta,
                     "length": statistics.mean(map(len, responses)),
                     "sample_s": sampled - began, "reference_s": scored - sampled,
                     "update_s": time.perf_counter() - scored})
        if (step + 1) % 10 == 0:
            print(f"{name} | step {step + 1} | reward {stats['reward_mean']:.3f} | beta {beta:.3g}")
    client = await training_client.save_weights_and_get_sampling_client()
    after = await evaluate(client, ref_client, tokenizer, held_out, skills, cfg)
    few = max(1, cfg.n_steps // 6)  # first and last steps
    seconds = {key: statistics.median(row[key] for row in rows) for key in list(rows[0])[-3:]}
    return {"method": name, "seed": cfg.seed, "steps": cfg.n_steps,
            "reward_first": statistics.mean(row["reward"] for row in rows[:few]),
            "reward_last": statistics.mean(row["reward"] for row in rows[-few:]),
            **after, "beta_last": rows[-1]["beta"],
            "length_last": statistics.mean(row["length"] for row in rows[-few:]),
            **seconds}, training_client


def measure_cost(cfg=Settings(), repeats=15):
    """Forward and backward pass of one rollout on the local stand-in, each way in turn. Returns
    the floating-point operations that torch counts, and median seconds."""
    service = LocalServiceClient()
    training_client = service.create_lora_training_client(base_model="tiny").result()
    ref_client = service.create_sampling_client(base_model="tiny").result()
    problems = load_data("tiny", cfg)[0][:cfg.prompts_per_step]
    asked = starter.prompt_ids_of(problems, training_client.get_tokenizer())
    prompts, responses, logprobs = asyncio.run(
        sample(ref_client, asked, cfg.group_size, cfg, 1.0, seed=0))
    advantages = [1.0, -1.0] * (len(responses) // 2)
    ppo = tinker_kl.make_ppo_datums(prompts, responses, logprobs, advantages)
    datums = tinker_kl.make_datums(prompts, responses)

    def reference():
        return asyncio.run(tinker_kl.compute_reference_logprobs(ref_client, prompts, responses))

    def custom(ref_logprobs):
        # _run and _run_custom do the work here and not in the client's thread.
        training_client._run_custom(datums, functools.partial(
            tinker_kl.compute_grpo_kl_loss, kl_coef=COEF, advantages=advantages,
            old_logprobs=logprobs, ref_logprobs=ref_logprobs))

    built_in = functools.partial(training_client._run, ppo, "ppo", None, True)
    ways = {"built-in ppo": built_in,
            "ppo and reference": lambda: (reference(), built_in()),
            "custom loss": lambda: custom(logprobs),
            "custom loss and reference": lambda: custom(reference())}
    rows = {name: {"way": name, "seconds": []} for name in ways}
    for name, way in ways.items():
        with FlopCounterMode(display=False) as counter:
            way()
        rows[name]["gflop"] = counter.get_total_flops() / 1e9
    for name, way in list(ways.items()) * repeats:
        began = time.perf_counter()
        way()
        rows[name]["seconds"].append(time.perf_counter() - began)
    base = rows["built-in ppo"]
    for row in rows.values():
        row["seconds"] = statistics.median(row["seconds"])
    return [row | {f"{key}_ratio": row[key] / base[key] for key in ("gflop", "seconds")}
            for row in rows.values()]


def table(rows):
    """Returns the runs as lines of text."""
    names = list(rows[0])[3:-3]
    lines = [f"{'method':26}" + "".join(f"{name:>14}" for name in names)]
    for row in rows:
        lines.append(f"{row['method']:26}" + "".join(f"{row[name]:14.3f}" for name in names))
    return "\n".join(lines)


def save(name, rows):
    rows = [{key: round(value, 5) if isinstance(value, float) else value
             for key, value in row.items()} for row in rows]
    with open(RESULTS / name, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main(arguments):
    keep = "--save" in arguments
    if "--cost" in arguments:
        return save("tinker_cost.csv", measure_cost())
    names = [name for name in arguments if name != "--save"] or (list(METHODS) if keep else SHOWN)
    for name in names:
        if name not in METHODS:
            raise starter.InputError(f"{name!r} is not a method; use one of {list(METHODS)}")
    rows = []
    for seed in SEEDS if keep else SEEDS[:1]:
        for name in names:
            settings = Settings(seed=seed) if BASE_MODEL == "tiny" else REAL
            rows.append(asyncio.run(train(name, settings))[0])
            if keep:
                save("tinker_runs.csv", rows)
    print(table(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
