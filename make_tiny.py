"""make_tiny.py: the built-in model, a 0.6M-parameter Qwen3 trained from scratch on Countdown and four other skills.

    python make_tiny.py [folder]      about a minute on two CPU cores; a folder that is complete is reused

It is a warm start for GRPO. It has room to learn: half of the Countdown answers that it was shown carelessly multiply
the numbers as they stand, right or wrong, as a corpus would be careless. It has something to forget: sort, reverse,
next and max; held-out problems of these go into folder/retention.jsonl. No held-out problem is trained on.
"""
import json
import os
import random
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import starter
import shared_prompts  # noqa: F401  registers that attention

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

NUMBERS = {name: values[0] for name, values in starter.DEFAULTS.items()}  # of the built-in model
COUNTDOWN = {"numbers_per_problem": NUMBERS["numbers_per_problem"], "max_number": NUMBERS["max_number"],
             "max_target": 99, "template": NUMBERS["countdown_prompt"]}
LETTERS, DIGITS = "abcdefghijklmnopqrstuvwxyz", "0123456789"
SKILLS = {  # alphabet, length, answer; a fifth character takes twice as long to learn
    "sort": (DIGITS, 4, lambda text: "".join(sorted(text))),
    "reverse": (LETTERS, 4, lambda text: text[::-1]),
    "next": (LETTERS, 4, lambda text: "".join(LETTERS[(LETTERS.index(letter) + 1) % 26] for letter in text)),
    "max": (DIGITS, 5, max),
}
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|assistant|>' + m['content'] + '<|end|>' }}"
    "{% else %}{{ '<|user|>' + m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}")


def make_tokenizer():
    """-> tokenizer: one character, one token; the answer tags are one token each and survive skip_special_tokens."""
    special = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<unk>"]
    tokens = [*special, "<answer>", "</answer>", *LETTERS, *DIGITS, *" +-*/()=:.,?!<>"]
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()  # without it decode() puts a space between characters
    core.add_tokens(["<answer>", "</answer>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<|pad|>", eos_token="<|end|>", unk_token="<unk>", chat_template=CHAT_TEMPLATE,
        extra_special_tokens=["<|user|>", "<|assistant|>"], model_max_length=256, clean_up_tokenization_spaces=False)


def make_skill(skill, n, held_out, seed):
    """-> n different problems {"skill", "prompt", "answer"}."""
    rng, (alphabet, length, solve), problems = random.Random(f"{skill} {held_out} {seed}"), SKILLS[skill], {}
    while len(problems) < n:
        text = "".join(rng.choices(alphabet, k=length))
        if starter.tasks.is_held_out(skill, text) == held_out:
            problems[text] = {"skill": skill, "prompt": f"{skill} {text}", "answer": solve(text)}
    return list(problems.values())


def make_examples(n, countdown_share, careless_share, seed):
    """-> n shuffled (prompt, answer) pairs, none of them held out."""
    rng, pairs = random.Random(seed), []
    problems = starter.tasks.make_countdown(round(n * countdown_share), held_out=False, seed=seed, **COUNTDOWN)
    for problem in problems:
        careless = rng.random() < careless_share
        pairs.append((problem["prompt"], "*".join(map(str, problem["numbers"])) if careless else problem["solution"]))
    for skill in SKILLS:
        problems = make_skill(skill, 6000, False, seed)
        n_skill = round(n * (1 - countdown_share) / len(SKILLS))
        pairs += [(problem["prompt"], problem["answer"]) for problem in rng.choices(problems, k=n_skill)]
    rng.shuffle(pairs)
    return pairs


def to_tensors(tokenizer, pairs):
    """n pairs -> input_ids (n, T), labels (n, T): the next token where that is part of the response, else -100."""
    texts = [f"<|user|>{prompt}<|assistant|><answer>{answer}</answer><|end|>" for prompt, answer in pairs]
    rows = tokenizer(texts)["input_ids"]
    T, assistant = max(map(len, rows)), tokenizer.convert_tokens_to_ids("<|assistant|>")
    first = [row.index(assistant) + 1 for row in rows]
    ids = torch.tensor([row + [tokenizer.pad_token_id] * (T - len(row)) for row in rows])
    labels = torch.tensor([[-100] * i + row[i:] + [-100] * (T - len(row)) for i, row in zip(first, rows)])
    return ids[:, :-1], labels[:, 1:]


def fit(model, ids, labels, steps, batch_size, lr):
    """Next-token training with AdamW; the learning rate warms up over 50 steps and falls linearly to 0."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01, betas=(0.9, 0.98), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min((t + 1) / 50, 1 - t / steps))
    start = time.time()
    for step in range(1, steps + 1):
        rows = slice((step - 1) * batch_size, step * batch_size)
        logits = model(input_ids=ids[rows]).logits  # (B, T, V); right padding needs no mask in a causal model
        loss = F.cross_entropy(logits.flatten(0, 1), labels[rows].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 150 == 0:
            print(f"  step {step} of {steps} | loss {loss.item():.3f} | {time.time() - start:.0f} s", flush=True)


def make_tiny(
    folder=Path(__file__).parent / "tiny",
    seed=0,
    steps=750,  # x 0.12 CPU seconds
    batch_size=48,
    lr=3e-3,  # half of it learns half as much in this time; twice as much diverges now and then
    countdown_share=0.6,  # of the examples; each other skill gets an equal part of the rest
    careless_share=0.5,  # of the Countdown examples
):
    """Builds the checkpoint in folder, unless it is there, and prints what it can do."""
    folder, start = Path(folder), time.time()
    if (folder / "config.json").is_file():
        print(f"{folder} is complete and reused (delete it to build it again)")
        return folder
    logging.disable_progress_bar()
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    ids, labels = to_tensors(tokenizer, make_examples(steps * batch_size, countdown_share, careless_share, seed))
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, intermediate_size=256, tie_word_embeddings=True, max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    print(f"building {folder.name}: {sum(p.numel() for p in model.parameters()):,} parameters, {len(ids):,} examples")
    fit(model, ids, labels, steps, batch_size, lr)
    model.set_attn_implementation("starter")  # with which transformers samples here

    skills = [problem for skill in SKILLS for problem in make_skill(skill, 125, True, seed)]
    c = SimpleNamespace(seed=seed, max_new_tokens=16, eval_temperature=0, temperature=1.0, reward=starter.reward_fn,
                        reward_seconds=10.0, reward_if_broken=None, bf16=False)
    problems = starter.tasks.make_countdown(500, held_out=True, seed=seed, **COUNTDOWN)
    can, _ = starter.evaluate(model.eval(), None, tokenizer, problems, skills, c)
    unfinished = folder.with_name(f"{folder.name}.unfinished.{os.getpid()}")  # a killed build leaves no half model
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    (unfinished / "retention.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in skills))
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)
    others = ", ".join(f"{skill} {can[f'retention_{skill}']:.0%}" for skill in SKILLS)
    print(f"  greedy, held out: countdown {can['solved']:.0%}, {others} | {time.time() - start:.0f} s")
    return folder


if __name__ == "__main__":
    make_tiny(*sys.argv[1:2])
