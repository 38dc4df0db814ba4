"""Tokens at the ends of prompts and responses. Each case is the built-in model with another
tokenizer, which must solve what it solves as it is shipped."""

import json
import shutil
from pathlib import Path

import pytest

import starter
from support import rules, tasks

from conftest import make_tokenizer, settings, small_sums
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


def end_of_turn_stands_apart(tokenizer):
    """As in templates that end a turn by a space or line break and their token."""
    tokenizer.chat_template = tokenizer.chat_template.replace("'<|end|>'", "' <|end|>'")
    assert "' <|end|>'" in tokenizer.chat_template
    return eos_ends_a_document(tokenizer)


def bos_is_not_in_the_template(tokenizer):
    tokenizer.bos_token = "<|pad|>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|pad|> $A", special_tokens=[("<|pad|>", tokenizer.pad_token_id)]
    )
    return {}


CASES = {
    tags_are_special: "stop tokens: ['<|end|>']",
    eos_ends_a_document: "stop tokens: ['<|end|>', '<unk>']",
    end_of_turn_stands_apart: "stop tokens: ['<|end|>', '<unk>']",
    bos_is_not_in_the_template: "no <|pad|> in prompts",
}


def changed_model(folder, change):
    """Returns the folder of the built-in model with another tokenizer, and that."""
    model = shutil.copytree(tasks.TINY, folder / "model")
    tokenizer = make_tokenizer()
    path = model / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change(tokenizer)))
    (model / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(model)
    return str(model), tokenizer


def before_training(folder, change):
    model, _ = changed_model(folder, change)

    def task(cfg):
        problems = tasks.make_countdown(25, True, 0, **tasks.SMALL_COUNTDOWN)
        return problems[:5], problems[5:]

    given = dict(preset="tiny", model_id=model, task=task, n_train_steps=0, engine="transformers")
    result = starter.main(**given, device="cpu", precision="float32", out_dir=folder / "runs")
    return result["before"]["solved"], result["before"]["response_length"]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    solved, length = before_training(tmp_path_factory.mktemp("shipped"), as_shipped)
    assert solved > 0.2
    return solved, length


@pytest.mark.slow
@pytest.mark.parametrize("change", CASES)
def test_other_tokenizer_solves_as_much(tmp_path, capsys, expected, change):
    assert before_training(tmp_path, change) == expected
    assert CASES[change] in capsys.readouterr().out


def test_eos_that_a_tokenizer_puts_after_each_text_is_not_in_the_prompt():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    expected = starter.ids_of_prompt({"prompt": "1"}, tokenizer, False)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <|end|>", special_tokens=[("<|end|>", tokenizer.eos_token_id)]
    )
    assert tokenizer("1")["input_ids"] == [*expected, tokenizer.eos_token_id]
    assert starter.ids_of_prompt({"prompt": "1"}, tokenizer, False) == expected


# Rules of published chat templates: Gemma 2 and Mistral, Phi-3, Llama 3

NO_SYSTEM_ROLE = """{% for message in messages %}
{% if message.role == "system" %}{{ raise_exception("System role not supported") }}{% endif %}
<|user|>{{ message.content | trim }}<|assistant|>{% endfor %}"""
SYSTEM_IS_LEFT_OUT = """{% for message in messages %}
{% if message.role == "user" %}<|user|>{{ message.content }}<|assistant|>{% endif %}{% endfor %}"""
DATED = """<|user|>{{ strftime_now("%d %m %Y") }} {{ messages[0].content }}<|assistant|>"""


def with_template(template):
    return lambda tokenizer: vars(tokenizer).update(chat_template=template) or {}


def chats(cfg):
    problems, held_out = small_sums(cfg)
    for problem in problems + held_out:
        system = {"role": "system", "content": "be brief"}
        problem["prompt"] = [system, {"role": "user", "content": problem["prompt"]}]
    return problems, held_out


@pytest.mark.parametrize(
    "template, words",
    [
        (NO_SYSTEM_ROLE, "be brief.*System role not supported.*no system message"),
        (SYSTEM_IS_LEFT_OUT, "the chat template leaves out {'role': 'system', 'content': 'be b"),
        (None, "give texts where there is no chat template"),
    ],
)
def test_chat_that_the_template_does_not_take_is_refused(tmp_path, template, words):
    model, _ = changed_model(tmp_path, with_template(template))
    with pytest.raises(starter.InputError, match=words):
        starter.main(**settings(model, tmp_path, task=chats))


TOOL_IS_LEFT_OUT = """{% for message in messages %}{% if message.role != "tool" %}
{{ message.content.split("</think>")[-1] }}{% endif %}{% endfor %}<|assistant|>"""
TURNS = [
    {"role": "user", "content": "weather?"},
    {"role": "assistant", "content": "<think>look it up</think>wait"},
    {"role": "tool", "content": "sunny"},
]


def check_template(template, **problem):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    cfg = starter.cfg_with(enable_thinking=True)
    problem["prompt_ids"] = starter.ids_of_prompt(problem, tokenizer, True)
    rules.check_template([problem], tokenizer, cfg)


@pytest.mark.parametrize("n_turns", [2, 3])
def test_each_message_of_each_problem_must_be_in_its_prompt(capsys, n_turns):
    """But for the reasoning of earlier turns, which templates cut on purpose."""
    prompt = [*TURNS[:n_turns], {"role": "user", "content": "so?"}]
    if n_turns == 3:
        with pytest.raises(starter.InputError, match="leaves out {'role': 'tool', 'content': 'sun"):
            check_template(TOOL_IS_LEFT_OUT, prompt=prompt)
    else:
        check_template(TOOL_IS_LEFT_OUT, prompt=prompt)
        assert "leaves out the reasoning of 1 earlier turns" in capsys.readouterr().out


WITH_SWITCHES = """{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}\
{{ messages[0].content }}{% if style %} {{ style }}{% endif %}<|assistant|>"""
TOOL = {"type": "function", "function": {"name": "find", "parameters": {}}}


def test_tools_and_switches_of_a_problem_reach_its_template():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = WITH_SWITCHES
    problem = {"prompt": "add 1", "tools": [TOOL], "chat_template_kwargs": {"style": "short"}}
    text = tokenizer.decode(starter.ids_of_prompt(problem, tokenizer, False))
    assert text == "find add 1 short<|assistant|>"


def test_switches_that_a_template_lacks_are_said(capsys):
    problem = {"prompt": "add 1", "tools": [TOOL], "chat_template_kwargs": {"style": "short"}}
    check_template("{{ messages[0].content }}<|assistant|>", **problem)
    printed = capsys.readouterr().out
    for name in ("enable_thinking", "style", "tools"):
        assert f"Warning: the chat template has no {name}, so" in printed


@pytest.mark.parametrize("begun", ["<answer>", "<answer> ", " ", "\n\n", " a\n"])
@pytest.mark.parametrize("content", ["m.content", "m.content | trim"])
def test_answer_that_a_prompt_began_goes_on(begun, content):
    """The response follows the assistant's words, and the blanks behind them, without an end of
    turn between them. Blanks before the words are as the template writes them."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ " + content + " }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    chat = [{"role": "user", "content": "2 + 3"}, {"role": "assistant", "content": begun}]
    text = starter.text_of_prompt({"prompt": chat}, tokenizer, False)
    written = begun.lstrip() if "trim" in content and begun.strip() else begun
    assert text == f"<|user|>2 + 3<|end|><|assistant|>{written}"


def test_empty_message_of_the_assistant_begins_no_answer():
    tokenizer = make_tokenizer()
    chat = [{"role": "user", "content": "2 + 3"}]
    empty = {"role": "assistant", "content": ""}
    texts = [
        starter.text_of_prompt({"prompt": prompt}, tokenizer, False)
        for prompt in (chat, [*chat, empty])
    ]
    assert texts[0] == texts[1]


def test_template_in_a_file_of_its_own_is_found(tmp_path):
    """As in repositories of processors of images and text."""
    model, tokenizer = changed_model(tmp_path, with_template(None))
    template = "<|user|>{{ messages[0].content }}<|assistant|>"
    Path(model, "chat_template.json").write_text(json.dumps({"chat_template": template}))
    _, tokenizer = starter.init_policy(model, "cpu")
    assert tokenizer.chat_template == template


def test_template_that_writes_the_date_gives_the_same_prompts_on_another_day(tmp_path):
    """And is saved as it is."""
    model, _ = changed_model(tmp_path, with_template(DATED))
    _, tokenizer = starter.init_policy(model, "cpu")
    ids = starter.ids_of_prompt({"prompt": "add 1 2"}, tokenizer, False)
    assert tokenizer.decode(ids) == "<|user|>26 07 2024 add 1 2<|assistant|>"
    tokenizer.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "chat_template.jinja").read_text() == DATED


@pytest.mark.slow
def test_model_with_an_invalid_generation_config_is_saved(tmp_path):
    """As of Vicuna 1.5."""
    model, _ = changed_model(tmp_path, lambda tokenizer: {"temperature": 0.9, "top_p": 0.6})
    result = starter.main(**settings(model, tmp_path / "runs", n_train_steps=1))
    saved = json.loads((result["run_folder"] / "model" / "generation_config.json").read_text())
    assert saved["eos_token_id"] == make_tokenizer().eos_token_id and "top_p" not in saved
