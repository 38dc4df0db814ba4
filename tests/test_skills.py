"""What a model forgets of other skills than the task."""

import json
from unittest import mock

import starter
from support import skills

from conftest import make_tokenizer


def test_evaluation_answers_other_skills_whatever_the_reward_is(tmp_path, monkeypatch):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    rows = [
        {"skill": "sort", "prompt": "sort 21", "answer": "12"},
        {"skill": "sort", "prompt": "sort 43", "answer": "34"},
        {"skill": "max", "prompt": "max 56", "answer": "6"},
    ]
    (tmp_path / "retention.jsonl").write_text("\n".join(map(json.dumps, rows)))
    answers = {"sort 21": "12", "sort 43": "43", "max 56": "6"}
    asked = []

    def rollout(policy, llm, prompts, cfg, purpose, group_size, temperature):
        texts = tokenizer.batch_decode(prompts)
        asked.append((texts, group_size, temperature))
        replies = tokenizer([f"<answer>{answers[text]}</answer>" for text in texts])["input_ids"]
        return [starter.Response([], ids, [], False) for ids in replies]

    monkeypatch.setattr(starter, "rollout", rollout)
    cfg = starter.cfg_with(model_id=tmp_path, max_new_tokens=9, reward=lambda *_: 0.25)
    policy = mock.Mock()
    policy.config.get_text_config().max_position_embeddings = None
    skills.attach(policy, tokenizer, cfg)
    problems = [{"prompt_ids": tokenizer("max 56")["input_ids"]}]
    metrics, samples = starter.evaluate(None, None, tokenizer, problems, cfg)
    assert metrics["retention_sort"] == 0.5 and metrics["retention_max"] == 1.0
    assert metrics["reward_mean"] == 0.25 and metrics["solved"] == 0.0 and len(samples) == 1
    assert asked == [(["max 56"], 1, 0.0), ([*answers], 1, 0.0)]
