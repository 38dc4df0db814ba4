"""Tests of the programs in lab/, and of what they published in lab/results."""

import math
import re
from unittest import mock

import pytest
import transformers
from conftest import REPOSITORY, scalars, settings
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import starter

from lab import race, real_model, rows, small_models, sweep, verify_kl


@pytest.mark.parametrize(
    "make_rows, settings",
    [
        (verify_kl.gradient_rows, {"n_policies": 3}),
        (verify_kl.mistake_rows, {"n_policies": 3}),
        pytest.param(verify_kl.explosion_rows, {"n_seeds": 1}, marks=pytest.mark.slow),
    ],
)
def test_enumerated_claims_hold(make_rows, settings):
    made = make_rows(**settings)
    assert any(row["holds"] is True for row in made)
    assert not [row for row in made if row["holds"] is False]


def test_claim_that_is_not_so_does_not_hold(monkeypatch):
    monkeypatch.setattr(starter, "add_gradient", lambda value, surrogate: value)
    made = verify_kl.gradient_rows(1)
    assert any(row["gradient"] == "reverse" and not row["holds"] for row in made)


def test_sweep_goes_on_where_it_was(tmp_path, monkeypatch):
    """Lines of the present commit are not run again; a run that fails does not end the sweep."""
    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    lines = ['{"kl_coef": 0.3}', "{}", '{"recipe": "rloo"}']
    rows.write_csv("mine", [{"settings": settings, "seed": 1} for settings in lines])
    measured = [{"solved_after": share, "commit": rows.commit()} for share in (0.7, 0.8, 0.9)]
    run_one = mock.Mock(side_effect=[measured[0], {}, *measured[1:]])
    monkeypatch.setattr(sweep, "run_one", run_one)
    sweep.sweep("mine", 1)
    sweep.sweep("mine", 1)
    ran = [call.args[0] for call in run_one.call_args_list]
    assert ran == [{"kl_coef": 0.3}, {}, {"recipe": "rloo"}, {}]
    assert [row["solved_after"] for row in rows.read_csv("mine")] == ["0.7", "0.9", "0.8"]


@pytest.mark.slow
def test_run_gives_a_whole_row():
    small = dict(n_train_steps=10, rollout_batch_size=64, n_eval_problems=20, eval_every=5)
    row = sweep.run_one(small | {"recipe": "rloo+pass_at_k", "eval_samples": 4}, 0, 1)
    assert 0 < row["kl_per_token"] < 1 and row["solved_after"] > 0
    assert row["commit"] == rows.commit()
    shares = [float(share) for share in row["curve_kept"].split()]
    assert len(shares) == 3 and shares[-1] == float(row["kept_after"])
    assert len(row["curve_solved"].split()) == 3 and "pass_at_4_after" in row


def points(*solved, seconds=10.0):
    return [(5 * i, seconds * i, share) for i, share in enumerate(solved)]


def test_goal_is_reached_where_the_mean_of_three_evaluations_is(monkeypatch):
    times = [race.time_to(points(0.4, 0.9, 0.5, 0.7, 0.9), goal) for goal in (0.65, 0.68, 0.75)]
    assert times == [10.0, 30.0, math.inf]
    solved = 0.4, 0.8, 0.8, 0.8
    runs = {("starter.py", seed): points(*solved) for seed in (0, 1, 2)}
    runs["TRL", 0] = points(0.4, 0.4, 0.4, 0.4, seconds=20.0)
    runs["TRL", 1] = points(*solved, seconds=30.0)
    runs["TRL", 2] = points(*solved, seconds=20.0)
    monkeypatch.setattr(race, "read_runs", lambda name: runs)
    lines = race.race_lines("tiny")
    assert lines[1] == ["75% solved", 3, "30.0", "75.0", "3.00"]
    assert lines[-1] == ["all 15 steps, to 80.0% and 66.7% solved", 3, "30.0", "60.0", "2.00"]


REQUIREMENTS = REPOSITORY / "requirements-cpu.txt"


@pytest.mark.skipif(
    f"transformers=={transformers.__version__}\n" not in REQUIREMENTS.read_text(),
    reason="another version has other models",
)
def test_every_causal_model_of_transformers_was_examined():
    examined = {row["name"] for row in rows.read_csv("architectures")}
    assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) <= set(small_models.ROWS) <= examined
    assert len(examined) >= 200


@pytest.mark.slow
@pytest.mark.skipif(
    not (real_model.CACHE / "SmolLM2-135M-Instruct" / "config.json").is_file(),
    reason="python -m lab.real_model has not converted the model here",
)
def test_converted_model_answers_and_trains(tmp_path, capsys):
    """With the functions of support/, whose comparison must hold for trained weights, too."""
    folder = real_model.model_folder()
    model, tokenizer = starter.init_policy(folder, "cpu")
    [text] = real_model.greedy(model, tokenizer, ["What is the capital of France?"])
    assert real_model.names_answer(text, "Paris")
    given = settings(folder, tmp_path, task="addition", n_train_steps=1, learning_rate=1e-4)
    given |= dict(rollout_batch_size=8, n_eval_problems=2)
    log = scalars(starter.main(**given, use_kl_penalty=True)["run_folder"])
    assert log["train/kl_per_token"][1] < 1e-6
    assert log["train/sampler_logprob_diff"][1] < 1e-3
    assert re.search("of support/ run: .*token_statistics", capsys.readouterr().out)
