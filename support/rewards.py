"""Rewards that are awaited, and what a reward must return."""

import asyncio
import functools
import inspect
import threading
from concurrent.futures import ThreadPoolExecutor

import starter

AT_ONCE = 64  # calls of an async reward that wait for their answers


@functools.cache
def event_loop():
    """One for all steps, as clients need it, in a thread of its own: a notebook's runs already."""
    loop = asyncio.new_event_loop()
    # Agents that block a thread wait for each other: each needs its own, which is made when needed
    loop.set_default_executor(ThreadPoolExecutor(max_workers=10_000))
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


async def results_of(values):
    """Returns the values. Those that can be awaited are, at most AT_ONCE at once."""
    limit = asyncio.Semaphore(AT_ONCE)

    async def result_of(value):
        if not inspect.isawaitable(value):
            return value
        async with limit:
            try:
                return await value
            except SystemExit:  # would end the event loop, for which all wait
                raise RuntimeError("exit() was called by the reward") from None
            except Exception as error:
                error.add_note("It is of the reward")
                raise

    return await asyncio.gather(*map(result_of, values))


def awaited(values):
    """What a reward returned for each response -> a number of each, or None. Raises InputError."""
    if any(map(inspect.isawaitable, values)):
        waiting = asyncio.run_coroutine_threadsafe(results_of(values), event_loop())
        try:
            values = waiting.result()
        finally:
            waiting.cancel()  # after Ctrl-C
    for value in values:
        if isinstance(value, (list, tuple)):
            raise starter.InputError(
                f"the reward returns {value!r:.100}, and must return one number, or None; for its "
                "first one give reward=lambda text, problem: YOURS(text, problem)[0]"
            )
    return values
