"""Writes steps.html into a run's folder: what eight of its steps did to each token.

The numbers are those of the loss. In a step that is due this file keeps what token_statistics gives
and the derivative of the loss by each token's log-prob; after the update another forward pass gives
the log-probs of then. In other steps it only hands calls through. support/steps.html is the page
without its numbers, and computes the rest from them.
"""

import json
from pathlib import Path

import torch

import starter
from support import edits, ranks

TEMPLATE = Path(__file__).with_suffix(".html").read_text("utf-8")
TOKENS = 160  # shown of a group from the beginnings of its responses, and as many from the ends

tokenizer = None  # of this process; support/attach.py sets it
CALLS = []  # of token_statistics for the loss of this step: (policy, rows, {name: (B, T) tensor})


def attach(run):
    """Puts functions around two of starter.py, which keep what they see in steps that are due."""
    CALLS.clear()  # of a run that was stopped
    due = torch.linspace(1, run.cfg.n_train_steps, 8).int().tolist()
    make_batch = starter.make_batch
    token_statistics = starter.token_statistics

    def make_numbered_batch(responses, *others):
        batch = make_batch(responses, *others)
        if run.state["step"] + 1 in due:
            batch["row"] = torch.arange(len(responses))[:, None].to(batch["labels"])
        return batch

    def keep_statistics(model, rows, *others, **named):
        stats = token_statistics(model, rows, *others, **named)
        if "row" in rows and stats["log_probs"].requires_grad:
            values = {name: x.detach() for name, x in stats.items()}
            for name in "advantages", "weights", "rollout_log_probs":
                values[name] = rows[name]
            stats["log_probs"].register_hook(lambda slope: values.update(slope=slope))
            CALLS.append((model, rows, values))
        return stats

    edits.wrap(make_batch=make_numbered_batch, token_statistics=keep_statistics)


@torch.no_grad()
def numbers_of_rows(responses, cfg):
    """-> {row of the step: {name: a number for each token of its response, then padding}}, without
    the rows that were left out of the loss. All processes come here together."""
    found = []
    for policy, rows, values in CALLS:
        stats = starter.token_statistics(policy, rows, cfg.temperature, cfg.precision)
        values["after"] = stats["log_probs"]
        for i, row in enumerate(rows["row"].flatten().tolist()):
            first = len(responses[row].prompt_ids) - 1
            found.append((row, {name: x[i, first:].tolist() for name, x in values.items()}))
    CALLS.clear()
    return dict(reversed(ranks.gather(found)))  # of several epochs the first one stays


def after_step(run, step, metrics, samples):
    """Adds the step to the page if it was due."""
    if not CALLS:
        return
    problems, _, rewards, responses = samples
    numbers = numbers_of_rows(responses, run.cfg)
    size = run.cfg.group_size
    half = 1 + TOKENS // size  # of a response's tokens, at its beginning and its end
    order = rewards.view(-1, size).std(1).argsort(descending=True).tolist()
    order.insert(1, order.pop())  # a group of equal rewards, if there is one
    groups = []
    for g in order[: 2 + 512 // (size * run.cfg.max_new_tokens)]:
        shown = []
        for i in range(g * size, g * size + size):
            ids = responses[i].response_ids
            places = [*range(len(ids))]
            del places[half:-half]
            response = {
                "reward": rewards[i],
                "finished": responses[i].finished,
                "length": len(ids),
                "tokens": tokenizer.convert_ids_to_tokens([ids[t] for t in places]),
            }
            for name, values in numbers.get(i, {}).items():
                response[name] = " ".join(f"{values[t]:.5g}" for t in places if t < len(values))
            shown.append(response)
        prompt = tokenizer.decode(problems[g]["prompt_ids"])[-400:]
        groups.append({"prompt": prompt, "responses": shown})
    content = {
        "step": step,
        "metrics": metrics,
        "scaler": run.state["scaler"],  # its scale is in slope
        "importance_cap": run.cfg.importance_cap,
        "n_groups": len(problems),
        "groups": groups,
    }
    texts = run.state.setdefault("steps_shown", [])  # those before a resume, too
    texts.append(json.dumps(content, default=float).replace("<", "\\u003c"))
    while len(texts) > 2 and sum(map(len, texts)) > 475_000:  # bytes; first and last step stay
        del texts[1]
    if run.writes_files:
        text = TEMPLATE.replace("STEPS", f"[{','.join(texts)}]")
        (run.folder / "steps.html").write_text(text, "utf-8")
