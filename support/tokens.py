"""Special tokens at the ends of prompts and responses, as templates and tokenizers mean them."""

import starter
from support import edits


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


def find_stop_tokens(policy, tokenizer):
    """Like starter.find_stop_tokens, and the end of a turn. Says which they are."""
    own = edits.own("find_stop_tokens")(policy, tokenizer)
    stop_tokens = sorted({*own, end_of_turn(tokenizer)} - {None})
    print(f"stop tokens: {tokenizer.convert_ids_to_tokens(stop_tokens)}")
    return stop_tokens


def ids_of_prompt(prompt, tokenizer, enable_thinking):
    """Like starter.ids_of_prompt, without EOS at the end of a text, after which nothing follows."""
    try:
        ids = edits.own("ids_of_prompt")(prompt, tokenizer, enable_thinking)
    except Exception as error:  # whatever others' templates raise
        raise starter.InputError(
            f"no prompt for this tokenizer can be made of {prompt!r:.200} ({error!s:.200}); give "
            "texts where there is no chat template, and no system message where it has no such role"
        ) from error
    if tokenizer.chat_template is None and ids and ids[-1] == tokenizer.eos_token_id:
        ids = ids[:-1]
    return ids
