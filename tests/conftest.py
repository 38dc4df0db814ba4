"""Small checkpoints and settings that the tests share."""
import os
import sys
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:  # test files run in two processes, with a thread each
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # `from conftest import settings` in every test

from reference.inputs import make_tokenizer


def save_checkpoint(folder, tie=True, seed=0, family="Qwen3", **changes):
    """Saves a two-layer model of a few thousand random weights with a character tokenizer.
    family: the name of a transformers family such as "Qwen3", "Llama" or "Mistral". Returns the
    folder."""
    import transformers
    tokenizer = make_tokenizer()
    settings = dict(vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96,
                    num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
                    tie_word_embeddings=tie, max_position_embeddings=256,
                    eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
                    bos_token_id=None, initializer_range=0.15)
    if family == "Qwen3":
        settings["head_dim"] = 32
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = getattr(transformers, f"{family}Config")(**settings | changes)
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint") / "model")


def variety(text, problem):
    """A reward that random weights can earn: a tenth for every distinct character."""
    return len(set(text)) / 10


def settings(checkpoint, out_dir, **changes):
    """Returns settings of main() for a run of a few seconds on a small checkpoint."""
    small = dict(model_id=str(checkpoint), task="countdown_small", reward=variety, device="cpu",
                 engine="transformers", bf16=False, n_train_steps=4, rollout_batch_size=16,
                 group_size=4, max_new_tokens=8, learning_rate=1e-3, n_eval_problems=10,
                 eval_every=0, save_every=0, max_tokens_per_microbatch=200,
                 out_dir=str(out_dir))
    return small | changes


def scalars(run_folder):
    """Returns {tag: {step: value}} of a run's TensorBoard files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    log = EventAccumulator(str(run_folder), size_guidance={"scalars": 0})
    log.Reload()
    return {tag: {event.step: event.value for event in log.Scalars(tag)}
            for tag in log.Tags()["scalars"]}
