"""What a model forgets of other skills than the task."""

import json
import shutil

import starter

from conftest import make_tokenizer, settings

ROWS = [
    {"skill": "sort", "prompt": "sort 21", "answer": "12"},
    {"skill": "sort", "prompt": "sort 43", "answer": "34"},
    {"skill": "max", "prompt": "max 56", "answer": "6"},
    {"skill": "long", "prompt": "a" * 250, "answer": "1"},  # which does not fit into the context
]
ANSWERS = {"add 1 1": "2", "sort 21": "12", "sort 43": "43", "max 56": "6"}


def test_evaluation_answers_other_skills_whatever_the_reward_is(
    checkpoint, tmp_path, monkeypatch, capsys, with_support
):
    """They lie beside the model. They are never trained on."""
    model = shutil.copytree(checkpoint, tmp_path / "model")
    (model / "chat_template.jinja").unlink()
    (model / "retention.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    tokenizer = make_tokenizer()
    asked = []
    shipped = starter.rollout

    def rollout(policy, llm, problems, cfg, purpose, group_size, temperature, agent):
        texts = tokenizer.batch_decode([problem["prompt_ids"] for problem in problems])
        asked.append((purpose, texts, group_size, temperature))
        responses = shipped(policy, llm, problems, cfg, purpose, group_size, temperature, agent)
        if purpose != "evaluate":
            return responses
        replies = tokenizer([f"<answer>{ANSWERS[text]}</answer>" for text in texts])["input_ids"]
        return [starter.Response([], ids, [], False) for ids in replies]

    def task(cfg):
        problem = {"prompt": "add 1 1", "answer": "2"}
        return [problem | {"prompt": "add 2 0"}], [problem]

    monkeypatch.setattr(starter, "rollout", rollout)
    given = dict(task=task, reward=lambda *_: 0.25, n_train_steps=1)
    result = starter.main(**settings(model, tmp_path, **given))
    evaluation = [("evaluate", ["add 1 1"], 1, 0.0)]
    evaluation.append(("evaluate", [row["prompt"] for row in ROWS[:3]], 1, 0.0))
    assert asked[:5] == [*evaluation, (1, 4 * ["add 2 0"], 4, 1.0), *evaluation]
    assert [purpose for purpose, *_ in asked[5:]] == ["measure_kl"] * with_support
    for metrics in (result["before"], result["after"]):
        assert metrics["retention_sort"] == 0.5 and metrics["retention_max"] == 1.0
        assert metrics["reward_mean"] == 0.25 and metrics["solved"] == 0.0
        assert "retention_long" not in metrics
    assert capsys.readouterr().out.count("| max: 100% | sort: 50%\n") == 2
