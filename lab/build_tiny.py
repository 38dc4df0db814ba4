"""Builds the built-in model of support/tiny/: a 0.6M-parameter Qwen3 in bf16, trained from scratch
on Countdown and four other skills.

    python -m lab.build_tiny      a few minutes on one CPU core

It is a warm start for GRPO. It has room to learn: two in five Countdown answers that it was shown
multiply the numbers as they stand, right or wrong, as a careless corpus would. It has something to
forget: the skills sort, reverse, next and max, whose held-out problems go into
folder/retention.jsonl. No held-out problem is trained on.

The files are part of the repository, since the same program gives other weights on another
processor.
"""

import json
import random

import starter
from support import tasks

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

LETTERS = "abcdefghijklmnopqrstuvwxyz"
DIGITS = "0123456789"
NEXT_LETTER = str.maketrans(LETTERS, LETTERS[1:] + "a")
SKILLS = {  # alphabet, length, answer; a fifth character takes twice as long to learn
    "sort": (DIGITS, 4, lambda text: "".join(sorted(text))),
    "reverse": (LETTERS, 4, lambda text: text[::-1]),
    "next": (LETTERS, 4, lambda text: text.translate(NEXT_LETTER)),
    "max": (DIGITS, 5, max),
}
STEPS = 750
BATCH_SIZE = 48
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{{ '<|assistant|>' + m['content'] + '<|end|>' }}"
    "{% else %}{{ '<|user|>' + m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make_tokenizer():
    """Returns a tokenizer with one token for each character. The answer tags are one token each
    and survive skip_special_tokens."""
    special = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<unk>"]
    tokens = [*special, "<answer>", "</answer>", *LETTERS, *DIGITS, *" +-*/()=:.,?!<>"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()  # without it decode() puts a space between characters
    core.add_tokens(["<answer>", "</answer>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
        extra_special_tokens=["<|user|>", "<|assistant|>"],
        model_max_length=256,
        clean_up_tokenization_spaces=False,
    )


def make_skill(skill, n, held_out):
    """Returns n different problems {"skill", "prompt", "answer"}."""
    rng = random.Random(f"{skill} {held_out} 0")
    alphabet, length, solve = SKILLS[skill]
    problems = {}
    while len(problems) < n:
        text = "".join(rng.choices(alphabet, k=length))
        if starter.is_held_out(skill, text) == held_out:
            problems[text] = {"skill": skill, "prompt": f"{skill} {text}", "answer": solve(text)}
    return list(problems.values())


def make_examples(n):
    """Returns n shuffled (prompt, answer) pairs, none of them held out. Three in five are of
    Countdown; each other skill gets an equal part of the rest."""
    rng = random.Random(0)
    pairs = []
    some = dict(tasks.SMALL_COUNTDOWN, repeats=True)
    for problem in tasks.make_countdown(round(n * 0.6), False, 0, **some):
        answer = problem["solution"]
        if rng.random() < 0.4:
            answer = "*".join(map(str, problem["numbers"]))
        pairs.append((problem["prompt"], answer))
    for skill in SKILLS:
        problems = make_skill(skill, 6000, held_out=False)
        for problem in rng.choices(problems, k=round(n * 0.4 / len(SKILLS))):
            pairs.append((problem["prompt"], problem["answer"]))
    rng.shuffle(pairs)
    return pairs


def to_tensors(tokenizer, pairs):
    """n pairs -> input_ids (n, T), labels (n, T): the next token in the response, else -100."""
    rows = []
    for prompt, answer in pairs:
        text = f"<|user|>{prompt}<|assistant|><answer>{answer}</answer><|end|>"
        rows.append(torch.tensor(tokenizer(text)["input_ids"]))
    rows = pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
    ids, labels = rows[:, :-1], rows[:, 1:]
    begun = (ids == tokenizer.convert_tokens_to_ids("<|assistant|>")).cumsum(dim=1) > 0
    return ids, labels.masked_fill(~begun | (labels == tokenizer.pad_token_id), -100)


def fit(model, ids, labels):
    """Next-token training with AdamW. The learning rate warms up over 50 steps and falls linearly
    to 0. Half of it learns half as much in this time; twice as much diverges now and then."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-3, weight_decay=0.01, betas=(0.9, 0.98), fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 50, 1 - step / STEPS)
    )
    for rows in torch.arange(len(ids)).split(BATCH_SIZE):
        logits = model(input_ids=ids[rows]).logits  # (B, T, V); right padding needs no mask
        loss = F.cross_entropy(logits.flatten(0, 1), labels[rows].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def build(folder, **sizes):
    """Builds the checkpoint in folder. starter.py tells what it can do before the first step.
    sizes: of a model of another shape."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    ids, labels = to_tensors(tokenizer, make_examples(STEPS * BATCH_SIZE))
    settings = dict(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=256,
        tie_word_embeddings=True,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(Qwen3Config(**settings | sizes))
    fit(model, ids, labels)
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with open(f"{folder}/retention.jsonl", "w") as file:
        for skill in SKILLS:
            for problem in make_skill(skill, 125, held_out=True):
                file.write(json.dumps(problem) + "\n")


if __name__ == "__main__":
    build(tasks.TINY)
