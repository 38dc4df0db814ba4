"""Agents whose runs are measured: `python -m lab.sweep agents` names them in its settings."""

import starter


async def second_try(problem, ask):
    """Countdown with a second try after a wrong answer, which earns less."""
    if starter.score_answer(await ask(problem["prompt"]), problem) == 1:
        return 1.0
    return 0.8 if starter.score_answer(await ask(problem["prompt"]), problem) == 1 else 0.1
