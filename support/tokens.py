"""Special tokens at the ends of responses, as templates and tokenizers mean them, and templates."""

import json
from datetime import datetime
from pathlib import Path

from transformers.utils import cached_file, chat_template_utils


def end_of_turn(tokenizer):
    """Returns the id of the special token that the chat template puts after an answer, or None."""
    chat = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "ANSWER"}]
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False)
    except Exception:  # there is none, or one for prompts alone
        return None
    after = text.rpartition("ANSWER")[2]  # perhaps with a line break before it
    for token in tokenizer(after, add_special_tokens=False)["input_ids"]:
        if token in tokenizer.added_tokens_decoder:
            return token


def template_beside(model_id):
    """Returns the chat template in a chat_template.json, where processors of images and text keep
    it, or None."""
    try:
        path = cached_file(
            model_id, "chat_template.json", _raise_exceptions_for_missing_entries=False
        )
        return json.loads(Path(path).read_text("utf-8"))["chat_template"]
    except Exception:  # there is none, or no hub
        return None


class FixedDate(datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2024, 7, 26, tzinfo=tz)


def on_a_fixed_date(apply_chat_template, *arguments, **named):
    """Calls apply_chat_template. The date that a template may ask for is always the same."""
    own = chat_template_utils.datetime
    chat_template_utils.datetime = FixedDate
    try:
        return apply_chat_template(*arguments, **named)
    finally:
        chat_template_utils.datetime = own
