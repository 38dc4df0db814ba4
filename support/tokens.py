"""Special tokens at the ends of responses, as templates and tokenizers mean them."""


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
