"""The pretrained model of lab/real_model.py, where it was made; tests/test_lab.py has the rest."""
import pytest

import starter
from conftest import save_checkpoint, scalars, settings

import torch
from lab import real_model


def test_nats_per_token_is_the_mean_over_all_tokens(tmp_path):
    model, tokenizer = starter.init_policy(save_checkpoint(tmp_path / "model"), "cpu")
    texts = ["make 12: 3 4", "78 9"]
    by_hand = []
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        log_probs = model(torch.tensor([ids])).logits[0].double().log_softmax(dim=1)
        by_hand += [-log_probs[i, ids[i + 1]].item() for i in range(len(ids) - 1)]
    ours = real_model.nats_per_token(model, tokenizer, texts)
    assert ours == pytest.approx(sum(by_hand) / len(by_hand), abs=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(not (real_model.CACHE / "SmolLM2-135M-Instruct" / "config.json").is_file(),
                    reason="python -m lab.real_model has not converted the model here")
@pytest.mark.parametrize("changes", [{}, dict(lora_rank=8)])
def test_converted_model_answers_and_trains(tmp_path, changes):
    """With the functions of support/, whose comparison must hold for trained weights, too."""
    folder = real_model.model_folder()
    model, tokenizer = starter.init_policy(folder, "cpu")
    ids, = real_model.greedy(model, tokenizer, ["What is the capital of France?"], 24)
    assert real_model.names_answer(tokenizer.decode(ids), "Paris")
    result = starter.main(**settings(
        folder, tmp_path, task="addition", n_train_steps=2, learning_rate=1e-4, warmup_steps=0,
        max_tokens_per_microbatch=2000, use_kl_penalty=True, kl_coef=0.1) | changes)
    log = scalars(result["run_folder"])
    assert log["train/kl_per_token"][1] < 1e-6 < log["train/kl_per_token"][2]
    assert max(log["train/sampler_logprob_diff"].values()) < 1e-3
    assert "token_statistics" in starter.MECHANICS
