"""Other skills than the task: what training forgets. A model's folder has problems of them in
retention.jsonl, each with its skill's name under "skill"."""

import statistics
from pathlib import Path

import starter
from support import edits


def attach(policy, tokenizer, cfg):
    """Has each evaluation answer these problems, too, which score_answer scores."""
    path = Path(cfg.model_id) / "retention.jsonl"
    if not path.is_file():
        return
    problems = edits.own("read_problems")(path)  # without a word
    skills = starter.with_prompt_ids(problems, policy, tokenizer, cfg)
    evaluate_task = starter.evaluate

    def evaluate(policy, llm, tokenizer, problems, cfg):
        metrics, samples = evaluate_task(policy, llm, tokenizer, problems, cfg)
        cfg = starter.cfg_with(**vars(cfg) | {"reward": starter.score_answer})
        _, answered = evaluate_task(policy, llm, tokenizer, skills, cfg)
        solved = {}
        for problem, _, reward in answered:
            solved.setdefault(problem["skill"], []).append(reward >= 1)
        for name in sorted(solved):
            metrics[f"retention_{name}"] = statistics.mean(solved[name])
        return metrics, samples

    edits.wrap(evaluate=evaluate)
