"""Rewards that are awaited, responses that cannot be scored, and what a reward raises."""

import asyncio
import functools
import inspect
import math
import threading

import torch

import starter
from support import edits

AT_ONCE = 64  # calls of an async reward that wait for their answers


@functools.cache
def event_loop():
    """One for all steps, as clients need it, in a thread of its own: a notebook's runs already."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


async def results_of(values):
    """Returns the values. Those that can be awaited are, at most AT_ONCE at once."""
    limit = asyncio.Semaphore(AT_ONCE)

    async def result_of(value):
        if not inspect.isawaitable(value):
            return value
        async with limit:
            return await value

    return await asyncio.gather(*map(result_of, values))


def number_of(value):
    """What a reward returns -> its number: nan where that is not known."""
    if value is None or inspect.isawaitable(value):
        return math.nan
    if isinstance(value, (list, tuple)) and edits.is_shipped("score"):
        raise starter.InputError(
            f"the reward returns {value!r:.100}, and must return one number, or None; for its "
            "first one give reward=lambda text, problem: YOURS(text, problem)[0]"
        )
    return value


def score(responses, problems, tokenizer, reward):
    """Like starter.score. None is nan, and an async reward is awaited for all responses at once."""
    own = edits.own("score")
    values = []

    @functools.wraps(reward)  # it gets what the reward asks for
    def call(*arguments, **named):
        values.append(reward(*arguments, **named))
        return number_of(values[-1])

    scored = own(responses, problems, tokenizer, call)
    if any(map(inspect.isawaitable, values)):
        waiting = asyncio.run_coroutine_threadsafe(results_of(values), event_loop())
        try:
            numbers = map(number_of, waiting.result())
        finally:
            waiting.cancel()  # after Ctrl-C
        scored = own(responses, problems, tokenizer, lambda *arguments, **named: next(numbers))
    return scored


def advantages_of_scored(rewards, group_size, *others):
    """Like starter.compute_group_normalized_advantages. A response whose reward is nan leaves its
    group: its advantage is 0, and the others are compared with each other. A step in which no two
    can be compared is left as it is, to be skipped."""
    own = edits.own("compute_group_normalized_advantages")
    is_scored = ~rewards.isnan()
    groups = torch.arange(len(rewards)).split(group_size)
    comparable = [rows[is_scored[rows]] for rows in groups if is_scored[rows].sum() > 1]
    if is_scored.all() or not comparable:
        return own(rewards, group_size, *others)
    advantages = torch.zeros_like(rewards)
    means = {"unscored_frac": 1 - is_scored.float().mean().item()}
    for rows in comparable:
        advantages[rows], metadata = own(rewards[rows], len(rows), *others)
        starter.add_scaled(means, metadata, 1 / len(comparable))
    return advantages, means


def train(policy, tokenizer, llm, optimizer, problems, cfg, run, *others):
    """Like starter.train. What a reward raises ends it after a checkpoint, from which the run can
    go on. Not after the last step, since its evaluation would be missing."""
    score = starter.score

    def score_or_save(*arguments):
        try:
            return score(*arguments)
        except Exception:  # whatever the reward raises
            if 0 < run.state["step"] < cfg.n_train_steps:
                run.save(policy, optimizer)
                print(f"The reward failed; a checkpoint of step {run.state['step']} is saved")
            raise

    edits.wrap(score=score_or_save)
    edits.own("train")(policy, tokenizer, llm, optimizer, problems, cfg, run, *others)
