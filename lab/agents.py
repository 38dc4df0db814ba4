"""Agents whose runs are measured, and what agents cost.

python -m lab.sweep agents      the second try: fills lab/results/agents.csv
python -m lab.agents            the cost: ROUNDS rounds of each pair in turn
                                -> lab/results/agents_cost.csv
"""

import asyncio
import statistics
import time

import starter
from lab import bench
from lab.rows import append_rows, where

ROUNDS = 10
SECONDS = 0.05  # that a tool takes


async def second_try(problem, ask):
    """Countdown with a second try after a wrong answer, which earns less."""
    if starter.score_answer(await ask(problem["prompt"]), problem) == 1:
        return 1.0
    return 0.8 if starter.score_answer(await ask(problem["prompt"]), problem) == 1 else 0.1


async def answer_at_once(problem, ask):
    """For models that write no answer tags: the first one stands there already."""
    begun = [{"role": "user", "content": problem["prompt"]}]
    begun += [{"role": "assistant", "content": "<answer>"}]
    return starter.score_answer("<answer>" + await ask(begun), problem)


async def one_turn(problem, ask):
    return starter.score_answer(await ask(problem["prompt"]), problem)


def three_turns(seconds):
    """Three questions, after each of which a tool takes so long."""

    async def agent(problem, ask):
        for _ in range(3):
            await ask(problem["prompt"])
            if seconds:
                await asyncio.sleep(seconds)
        return 0.0

    return agent


def seconds_of(agent, policy, tokenizer, problems, cfg, group_size, seed, with_gradient):
    """Of a rollout with its rewards, or of a step but for the optimiser's part."""
    start = time.perf_counter()
    responses = starter.rollout(policy, None, problems, cfg, seed, group_size, 1.0, agent)
    reward = starter.reward_of_agent if agent else starter.reward_fn
    _, rewards = starter.score(responses, problems, tokenizer, reward)
    if with_gradient:
        advantages, _ = starter.compute_group_normalized_advantages(rewards, group_size, 1e-6, True)
        batch = starter.make_batch(responses, advantages, policy.device)
        batch["weights"] = starter.weights_of_tokens(batch, cfg)
        rows = starter.rows_to_train_on(batch, policy, None, cfg)
        microbatches = starter.cut_microbatches(rows, cfg.max_tokens_per_microbatch)
        starter.add_up_gradients(policy, microbatches, cfg)
        policy.zero_grad()
    return time.perf_counter() - start


def measure(policy, tokenizer, llm, optimizer, problems, cfg, *others):
    """Of the built-in model, in the place of train()."""
    with_tools, without = three_turns(SECONDS), three_turns(0)
    pairs = {  # what is compared: (agent, agent, prompts, responses to each, with the gradient)
        "a rollout of one turn: by an agent, by reward_fn": (one_turn, None, 32, 8, False),
        "a step of one turn: by an agent, by reward_fn": (one_turn, None, 32, 8, True),
        "64 agents with tools, without their time": (with_tools, without, 8, 8, False),
    }
    for name, (agent, other, n, group_size, with_gradient) in pairs.items():
        seconds = {agent: [], other: []}
        for seed in range(ROUNDS + 1):
            order = [agent, other] if seed % 2 else [other, agent]
            for some in order:
                given = policy, tokenizer, problems.train[:n], cfg, group_size, seed, with_gradient
                seconds[some].append(seconds_of(some, *given))
        first, second = (statistics.median(values[1:]) for values in seconds.values())
        row = {"what": name, "rounds": ROUNDS, "seconds": f"{first:.3f}", "beside": f"{second:.3f}"}
        print(row, flush=True)
        append_rows("agents_cost", [{**row, **where()}])


if __name__ == "__main__":
    settings = dict(preset="tiny", device="cpu", precision="float32", max_new_tokens=60)
    bench.in_place_of_train(measure, settings)
