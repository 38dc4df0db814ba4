"""Tokens at the ends of prompts and responses. Each case is the built-in model with another
tokenizer, which must solve what it solves as it is shipped."""

import importlib.util
import json
import shutil

import pytest

import starter
from support import tasks

from conftest import make_tokenizer
from tokenizers.processors import TemplateProcessing


def as_shipped(tokenizer):
    return {}


def tags_are_special(tokenizer):
    tokenizer.add_special_tokens({"additional_special_tokens": ["<answer>", "</answer>"]})
    assert "answer" not in tokenizer.decode(tokenizer("<answer>1")["input_ids"], True)
    return {}


def eos_ends_a_document(tokenizer):
    """The end of a turn stays the template's own."""
    tokenizer.eos_token = "<unk>"
    return {"eos_token_id": tokenizer.unk_token_id}


def eos_ends_each_text(tokenizer):
    """Without a template the prompts are its texts."""
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <|end|>", special_tokens=[("<|end|>", tokenizer.eos_token_id)]
    )
    tokenizer.chat_template = None
    assert tokenizer("1")["input_ids"][-1] == tokenizer.eos_token_id
    return {}


def bos_is_not_in_the_template(tokenizer):
    tokenizer.bos_token = "<|pad|>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|pad|> $A", special_tokens=[("<|pad|>", tokenizer.pad_token_id)]
    )
    return {}


CASES = {
    tags_are_special: "stop tokens: ['<|end|>']",
    eos_ends_a_document: "stop tokens: ['<|end|>', '<unk>']",
    eos_ends_each_text: "ends each text with EOS",
    bos_is_not_in_the_template: "begins a text with BOS",
}


def before_training(folder, change, engine):
    model = shutil.copytree(tasks.TINY, folder / change.__name__)
    tokenizer = make_tokenizer()
    template = tokenizer.chat_template
    path = model / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change(tokenizer)))
    (model / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(model)

    def task(cfg):
        problems = starter.TASKS["countdown_small"](cfg)[1][:25]
        if tokenizer.chat_template is None:
            for problem in problems:
                chat = [{"role": "user", "content": problem["prompt"]}]
                problem["prompt"] = make_tokenizer().apply_chat_template(
                    chat, chat_template=template, tokenize=False, add_generation_prompt=True
                )
        return problems[:5], problems[5:]

    given = dict(preset="tiny", model_id=str(model), task=task, n_train_steps=0, engine=engine)
    result = starter.main(**given, device="cpu", precision="float32", out_dir=folder / "runs")
    return result["before"]["solved"], result["before"]["response_length"]


needs_vllm = pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="not installed")


@pytest.fixture(
    scope="module",
    params=["transformers", pytest.param("vllm", marks=[pytest.mark.slow, needs_vllm])],
)
def engine(request):
    return request.param


@pytest.fixture(scope="module")
def expected(engine, tmp_path_factory):
    solved, length = before_training(tmp_path_factory.mktemp("shipped"), as_shipped, engine)
    assert solved > 0.2
    return solved, length


@pytest.mark.parametrize("change", CASES)
def test_other_tokenizer_solves_as_much(tmp_path, capsys, expected, engine, change):
    assert before_training(tmp_path, change, engine) == expected
    assert CASES[change] in capsys.readouterr().out
