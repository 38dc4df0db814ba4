"""What a model forgets of other skills than the task."""

import json
from types import SimpleNamespace

import starter
from support import skills
from tests import conftest


def test_evaluation_answers_other_skills_whatever_the_reward_is(tmp_path, monkeypatch):
    tokenizer = conftest.make_tokenizer()
    tokenizer.chat_template = None
    said = {"sort 21": "12", "sort 43": "43", "max 56": "6"}
    right = {"sort 21": "12", "sort 43": "34", "max 56": "6"}
    rows = [
        {"skill": prompt[:-3], "prompt": prompt, "answer": answer}
        for prompt, answer in right.items()
    ]
    (tmp_path / "retention.jsonl").write_text("\n".join(map(json.dumps, rows)))
    asked = []

    def rollout(policy, llm, prompts, cfg, purpose, group_size, temperature):
        asked.append((tokenizer.batch_decode(prompts), group_size, temperature))
        texts = [f"<answer>{said[prompt]}</answer>" for prompt in asked[-1][0]]
        return [starter.Response([], tokenizer(text)["input_ids"], [], False) for text in texts]

    monkeypatch.setattr(starter, "rollout", rollout)
    cfg = starter.cfg_with(model_id=tmp_path, max_new_tokens=9, reward=lambda *_: 0.25)
    text = SimpleNamespace(max_position_embeddings=None)
    policy = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text))
    skills.attach(policy, tokenizer, cfg)
    problems = [{"prompt": "max 56", "prompt_ids": tokenizer("max 56")["input_ids"]}]
    metrics, samples = starter.evaluate(None, None, tokenizer, problems, cfg)
    assert metrics["retention_sort"] == 0.5 and metrics["retention_max"] == 1.0
    assert metrics["reward_mean"] == 0.25 and metrics["solved"] == 0.0 and len(samples) == 1
    assert asked == [(["max 56"], 1, 0.0), ([*said], 1, 0.0)]
