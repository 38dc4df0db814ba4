"""Other skills than the task: what training forgets. A model's folder has problems of them in
retention.jsonl, each with its skill's name under "skill"."""

from pathlib import Path

import torch

import starter
from support import edits


def attach(policy, tokenizer, cfg):
    """Has each evaluation answer these problems, too, which score_answer scores."""
    path = Path(cfg.model_id) / "retention.jsonl"
    if not path.is_file():
        return
    skills = starter.with_prompt_ids(starter.read_problems(path), policy, tokenizer, cfg)
    evaluate_task = starter.evaluate

    def evaluate(policy, llm, tokenizer, problems, cfg):
        metrics, samples = evaluate_task(policy, llm, tokenizer, problems, cfg)
        prompts = [problem["prompt_ids"] for problem in skills]
        responses = starter.rollout(policy, llm, prompts, cfg, "skills", 1, cfg.eval_temperature)
        _, rewards = starter.score(responses, skills, tokenizer, starter.score_answer)
        is_right = (rewards >= 1).float()
        for name in sorted({problem["skill"] for problem in skills}):
            is_this = torch.tensor([problem["skill"] == name for problem in skills])
            metrics[f"retention_{name}"] = is_right[is_this].mean().item()
        return metrics, samples

    edits.wrap(evaluate=evaluate)
