"""The built-in base model: trains a 0.66M-parameter Qwen3 on Countdown and four other skills, from scratch, in about a minute.

    python make_tiny.py [folder]

It is the warm start for GRPO, so it has room to learn (Countdown is solved now and then, never well) and something to
forget (sort, reverse, next, max at >= 95 %). Held-out problems of those skills go to folder/retention.jsonl.
"""
import json, os, random, shutil, sys, time

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from starter import is_held_out, make_countdown

COUNTDOWN = dict(numbers_per_problem=(3,), max_number=9, max_target=99)
LETTERS, DIGITS = "abcdefghijklmnopqrstuvwxyz", "0123456789"
CHAT_TEMPLATE = ("{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|assistant|>' + m['content'] + '<|end|>' }}"
                 "{% else %}{{ '<|user|>' + m['content'] }}{% endif %}{% endfor %}"
                 "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}")


# ----------------------------------------------------------------------------------------------------------------------
# 1. Tokenizer: one character, one token

def make_tokenizer():
    special = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<unk>"]
    vocab = {token: i for i, token in enumerate([*special, "<answer>", "</answer>", *LETTERS, *DIGITS, *" +-*/()=:.,?!<>"])}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()  # without it decode() puts a space between characters
    core.add_tokens(["<answer>", "</answer>"])  # not special: they survive skip_special_tokens
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<|pad|>", eos_token="<|end|>", unk_token="<unk>", chat_template=CHAT_TEMPLATE,
        extra_special_tokens=["<|user|>", "<|assistant|>"], model_max_length=256, clean_up_tokenization_spaces=False)


# ----------------------------------------------------------------------------------------------------------------------
# 2. Problems: skill -> (prompt, answer)

SKILLS = {  # alphabet, length, what the answer is
    "sort": (DIGITS, 5, lambda s: "".join(sorted(s))),
    "reverse": (LETTERS, 4, lambda s: s[::-1]),
    "next": (LETTERS, 4, lambda s: "".join(chr((ord(c) - 96) % 26 + 97) for c in s)),
    "max": (DIGITS, 5, max),
}


def make_skill(skill, n, held_out, seed):
    """-> n (prompt, answer) pairs; a string of which is_held_out is the other way round is never made."""
    rng, (alphabet, length, solve), pairs = random.Random(f"{skill} {seed} {held_out}"), SKILLS[skill], {}
    while len(pairs) < n:
        text = "".join(rng.choices(alphabet, k=length))
        if is_held_out(skill, text) == held_out:
            pairs[f"{skill} {text}"] = solve(text)
    return list(pairs.items())


def sloppy(numbers, rng):
    """The numbers as they stand, any operations: well-formed, and the target is hit by luck only."""
    return "{}{}{}{}{}".format(*(x for pair in zip(numbers, rng.choices("+-*", k=3)) for x in pair))


def make_examples(n, countdown_share, noise, seed):
    """-> n shuffled (prompt, response) pairs, none of them held out."""
    rng, pairs = random.Random(seed), []
    for problem in make_countdown(int(n * countdown_share), **COUNTDOWN, held_out=False, seed=seed):
        noisy = rng.random() < noise
        pairs.append((problem["prompt"], sloppy(problem["numbers"], rng) if noisy else problem["solution"]))
    for skill in SKILLS:
        pairs += make_skill(skill, int(n * (1 - countdown_share) / len(SKILLS)), False, seed)
    rng.shuffle(pairs)
    return [(prompt, f"<answer>{answer}</answer>") for prompt, answer in pairs]


def to_tensors(tokenizer, pairs):
    """n (prompt, response) pairs -> input_ids (n, T), labels (n, T): next token where it belongs to the response, else -100."""
    prompts = tokenizer([f"<|user|>{prompt}<|assistant|>" for prompt, _ in pairs])["input_ids"]
    responses = tokenizer([f"{response}<|end|>" for _, response in pairs])["input_ids"]
    T = max(len(p) + len(r) for p, r in zip(prompts, responses)) - 1
    ids = torch.full((len(pairs), T), tokenizer.pad_token_id)
    labels = torch.full((len(pairs), T), -100)
    for i, (p, r) in enumerate(zip(prompts, responses)):
        ids[i, :len(p) + len(r) - 1] = torch.tensor((p + r)[:-1])
        labels[i, len(p) - 1:len(p) + len(r) - 1] = torch.tensor(r)
    return ids, labels


# ----------------------------------------------------------------------------------------------------------------------
# 3. Training and measuring

@torch.no_grad()
def greedy(model, tokenizer, prompts, batch_size=256):
    """prompts -> text inside <answer>...</answer>, or all of the text."""
    texts = []
    for i in range(0, len(prompts), batch_size):
        chats = [f"<|user|>{prompt}<|assistant|>" for prompt in prompts[i:i + batch_size]]
        inputs = tokenizer(chats, return_tensors="pt", padding=True, padding_side="left", return_token_type_ids=False)
        out = model.generate(**inputs, max_new_tokens=16, do_sample=False)
        texts += tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1]:], skip_special_tokens=True)
    return [text.removeprefix("<answer>").removesuffix("</answer>") for text in texts]


def solved(expression, problem):
    """Digits and + - * / ( ) only, each number once, and the value is the target."""
    if set(expression) - set("0123456789+-*/()") or "**" in expression or "//" in expression:
        return False
    numbers = "".join(c if c.isdigit() else " " for c in expression).split()
    if sorted(map(int, numbers)) != sorted(problem["numbers"]):
        return False
    import re
    if not re.fullmatch(r"\(*\d+\)*([-+*/]\(*\d+\)*)*", expression) or expression.count("(") != expression.count(")"): return False
    try:  # a model's text: three small numbers and no power, so eval is quick
        return abs(eval(expression) - problem["target"]) < 1e-9
    except (SyntaxError, ZeroDivisionError, TypeError):
        return False


def make_tiny(folder="tiny", seed=0, steps=1400, batch_size=32, lr=3e-3, countdown_share=0.6, noise=0.4):
    start, cpu = time.time(), time.process_time()
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    ids, labels = to_tensors(tokenizer, make_examples(steps * batch_size, countdown_share, noise, seed))
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, intermediate_size=256, tie_word_embeddings=True, max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None))
    print(f"data {time.time() - start:.1f} s, {sum(p.numel() for p in model.parameters()):,} parameters, {tuple(ids.shape)}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01, betas=(0.9, 0.98), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min((t + 1) / 50, 1 - t / steps))
    for step in range(steps):
        rows = slice(step * batch_size, (step + 1) * batch_size)
        x, y = ids[rows], labels[rows]
        is_long, tokens = (x[:, 20:] != tokenizer.pad_token_id).any(1), (y >= 0).sum()
        loss = 0.0
        for part, T in (is_long, None), (~is_long, 20):
            if part.any():
                logits = model(input_ids=x[part, :T]).logits
                part_loss = F.cross_entropy(logits.flatten(0, 1), y[part, :T].flatten(), reduction="sum") / tokens
                part_loss.backward()
                loss += part_loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 200 == 199:
            print(f"step {step + 1}/{steps} | loss {loss.item():.3f} | {time.time() - start:.0f} s wall {time.process_time() - cpu:.0f} cpu", flush=True)
            if os.environ.get("DEBUG"): report(model, tokenizer, 100)
    report(model, tokenizer, 500)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{time.time() - start:.0f} s wall {time.process_time() - cpu:.0f} cpu")


def report(model, tokenizer, n):
    model.eval()
    problems = make_countdown(n, **COUNTDOWN, held_out=True)
    answers = greedy(model, tokenizer, [p["prompt"] for p in problems])
    accuracy = {"countdown": sum(map(solved, answers, problems)) / len(problems)}
    for skill in SKILLS:
        pairs = make_skill(skill, 100, True, 1)
        accuracy[skill] = sum(a == b for a, (_, b) in zip(greedy(model, tokenizer, [p for p, _ in pairs]), pairs)) / len(pairs)
    print(" ".join(f"{k} {v:.0%}" for k, v in accuracy.items()), flush=True)
    model.train()


if __name__ == "__main__":
    make_tiny(*sys.argv[1:2], **eval(sys.argv[2] if sys.argv[2:] else '{}'))
