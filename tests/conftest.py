"""Small checkpoints, tasks and settings that the tests share."""

import importlib.util
import os
import random
import signal
import statistics
import threading
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:  # test files run in two processes, with a thread each
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

import starter  # before torch, for which it sets variables

import torch
from torch.nn.utils import parameters_to_vector
from tensorboard.summary.writer import event_file_writer

REPOSITORY = Path(__file__).resolve().parent.parent

# TensorBoard reads the files of a run by name: the second, then a count that is not padded.
event_file_writer._global_uid = event_file_writer.AtomicCounter(1000)

if starter.find_support():  # names of its tasks, presets and KL rules are known to every test
    from support import edits, report
    from support.rows import LOSS


@pytest.fixture(autouse=True)
def plain_functions_before_and_after(monkeypatch):  # which ends later than this
    monkeypatch.setattr(report, "draw", lambda *_: None)  # a fourth of the time of a short run
    edits.restore()
    yield
    edits.restore()


@pytest.fixture
def without_support(monkeypatch):
    monkeypatch.setattr(starter, "find_support", lambda: None)


@pytest.fixture(params=[True, False])
def with_support(request):
    """A test that takes it runs with support/, and without it."""
    if not request.param:
        request.getfixturevalue("without_support")
    return request.param


def needs_vllm(test):
    is_missing = not importlib.util.find_spec("vllm")
    return pytest.mark.slow(pytest.mark.skipif(is_missing, reason="vLLM is not installed")(test))


def of_the_shipped_loss(test):
    """Rows without a gradient are left out unless you have edited something of the loss."""
    is_edited = not edits.is_shipped(*LOSS)
    return pytest.mark.skipif(is_edited, reason="the loss of starter.py is edited")(test)


def make_tokenizer():
    """Returns the built-in model's, for which each character, and each answer tag, is a token."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(REPOSITORY / "support" / "tiny")


def save_checkpoint(folder, tie=True, family="Qwen3", **changes):
    """Saves a two-layer model of a few thousand random weights with make_tokenizer(). Returns the
    folder. family: the name of a transformers family such as "Qwen3", "Mistral" or "GPT2"."""
    import transformers

    tokenizer = make_tokenizer()
    config = dict(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=tie,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        initializer_range=0.15,
    )
    if family == "Qwen3":
        config["head_dim"] = 32
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            getattr(transformers, f"{family}Config")(**config | changes)
        )
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint") / "model")


def small_sums(cfg):
    """A task: 60 sums for training, with prompts of three lengths, and 20 held out."""
    problems = [
        {"prompt": f"add {a} {b}", "answer": str(a + b)} for b in range(6, 14) for a in range(5, 15)
    ]
    return problems[20:], problems[:20]


def variety(text, problem):
    """A reward that random weights can earn: a tenth for every distinct character."""
    return len(set(text)) / 10


def often_equal(text, problem):
    """A reward that is equal for all responses to half of the prompts."""
    return 0.5 if int(problem["answer"]) % 2 else variety(text, problem)


def make_responses(lengths, prompt_lengths=(1, 9, 4), vocabulary=32, seed=0):
    """Random responses of these lengths. Response i has prompt i modulo the number of prompts."""
    rng = random.Random(seed)
    prompts = [rng.choices(range(vocabulary), k=n) for n in prompt_lengths]
    return [
        starter.Response(
            prompts[i % len(prompts)],
            rng.choices(range(vocabulary), k=n),
            [-3.0 + rng.gauss(0, 0.3) for _ in range(n)],
            True,
        )
        for i, n in enumerate(lengths)
    ]


def make_step(responses, loss_average="dapo", max_new_tokens=12, advantages=None):
    """One batch with the weights of its tokens."""
    if advantages is None:
        advantages = torch.linspace(-1, 1, len(responses))
    batch = starter.make_batch(responses, advantages, "cpu")
    cfg = starter.cfg_with(loss_average=loss_average, max_new_tokens=max_new_tokens)
    batch["weights"] = starter.weights_of_tokens(batch, cfg)
    return batch


def advantages_by_loops(rewards, group_size, eps, normalize_by_std):
    advantages = []
    for start in range(0, len(rewards), group_size):
        group = rewards[start : start + group_size]
        mean = statistics.mean(group)  # of equal numbers exactly that number
        divisor = statistics.stdev(group) + eps if normalize_by_std else 1.0
        advantages += [(reward - mean) / divisor for reward in group]
    return advantages


def gradient_of(model):
    return parameters_to_vector(parameter.grad for parameter in model.parameters())


@pytest.fixture
def gradients(monkeypatch):
    """Returns a list of the gradients of all updates, before they are clipped."""
    found = []
    shipped = starter.clip_gradient

    def clip_gradient(parameters, max_norm):
        found.append(parameters_to_vector(parameter.grad for parameter in parameters))
        return shipped(parameters, max_norm)

    monkeypatch.setattr(starter, "clip_gradient", clip_gradient)
    return found


def interrupt_twice():
    """Sends this process SIGINT, soon and a second later."""
    for seconds in (0.2, 1.2):
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()


def at_each_call(owner, name, keep):
    """Has keep(*arguments) called before each call of this function of a module."""
    real = getattr(owner, name)

    def keep_and_call(*arguments):
        keep(*arguments)
        return real(*arguments)

    setattr(owner, name, keep_and_call)


def load_copy(folder):
    """Returns the starter.py of this folder as a module of its own."""
    spec = importlib.util.spec_from_file_location("starter_copy", folder / "starter.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def settings(checkpoint, out_dir, **changes):
    """Returns settings of main() for a run of a few seconds on a small checkpoint."""
    defaults = dict(
        model_id=str(checkpoint),
        task=small_sums,
        reward=variety,
        device="cpu",
        engine="transformers",
        precision="float32",
        n_train_steps=4,
        rollout_batch_size=16,
        group_size=4,
        max_new_tokens=8,
        learning_rate=1e-3,
        warmup_steps=10,
        n_eval_problems=10,
        eval_every=0,
        save_every=0,
        max_tokens_per_microbatch=200,
        out_dir=str(out_dir),
    )
    return defaults | changes


def log_of(run_folder):
    """Returns a run's TensorBoard files, as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(run_folder), size_guidance={"scalars": 0}).Reload()


def scalars(run_folder):
    """Returns {tag: {step: value}} of a run."""
    log = log_of(run_folder)
    return {
        tag: {event.step: event.value for event in log.Scalars(tag)}
        for tag in log.Tags()["scalars"]
    }
