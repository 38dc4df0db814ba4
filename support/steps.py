"""Writes steps.html into a run's folder: what eight of its steps did to each token.

It is handed what a step made. In a step that is due, another forward pass of its microbatches gives
their statistics after the update, and starter.compute_loss, at the log-probs of before, gives the
derivative of the loss by each of these. support/steps.html is the page without its numbers, and
computes the rest from them.
"""

import json
import math
from pathlib import Path

import torch

import starter
from support import ranks
from support.safely import write_whole

TEMPLATE = Path(__file__).with_suffix(".html").read_text("utf-8")
TOKENS = 160  # shown of a group from the beginnings of its responses, and as many from the ends

# Of a token, as they were in the update; others are shown as they are after it
OF_UPDATE = "advantages", "weights", "sampler_log_probs"


def response_of(microbatch, i):
    """Returns the ids of a row with the length of its prompt, by which its response is found, and
    the columns of that. A response may hold tokens that were only read, which the mask leaves
    out."""
    columns = microbatch["response_mask"][i].nonzero()[:, 0].tolist() or [0]
    columns = slice(columns[0], columns[-1] + 1)
    ids = microbatch["input_ids"][i, : columns.start + 1].tolist()
    return (len(ids), *ids, *microbatch["labels"][i, columns].tolist()), columns


class Page:
    """The page of a run, step by step."""

    def __init__(self, run, policy, ref_model, tokenizer):
        self.run = run
        self.policy = policy
        self.ref_model = ref_model
        self.tokenizer = tokenizer
        self.due = torch.linspace(1, run.cfg.n_train_steps, 8).int().tolist()

    def numbers_of_microbatch(self, microbatch, beta):
        """-> {name: (B, T) tensor}."""
        cfg = self.run.cfg
        mask = microbatch["response_mask"]
        with torch.no_grad():
            stats = starter.token_statistics(
                self.policy, microbatch, cfg.temperature, cfg.precision, self.ref_model
            )
        numbers = {name: microbatch[name] for name in OF_UPDATE}
        numbers |= {name: x for name, x in stats.items() if name != "log_pi_over_ref"}
        numbers["after"] = numbers["log_probs"]
        log_probs = microbatch["old_log_probs"].clone().requires_grad_()
        numbers["log_probs"] = log_probs.detach()
        loss, _ = starter.compute_loss(
            microbatch["advantages"],
            log_probs,
            microbatch["old_log_probs"],
            cfg.clip_range,
            stats.get("ref_log_probs"),
            beta,
            mask,
            kl_settings=cfg,
            exact_kl=stats.get(starter.EXACT.get(cfg.kl_estimator)),
            sampler_log_probs=microbatch["sampler_log_probs"],
            importance_cap=cfg.importance_cap,
        )
        loss = torch.where(mask, loss * microbatch["weights"], 0.0).sum()
        [numbers["slope"]] = torch.autograd.grad(loss, log_probs, materialize_grads=True)
        return numbers

    def numbers_of_rows(self, microbatches, beta):
        """-> {key: {name: a number for each token of the response}}, without the rows that were
        left out of the loss. All processes come here together."""
        found = []
        for microbatch in microbatches:
            numbers = self.numbers_of_microbatch(microbatch, beta)
            for i in range(len(microbatch["labels"])):
                key, columns = response_of(microbatch, i)
                found.append((key, {name: x[i, columns].tolist() for name, x in numbers.items()}))
        return dict(ranks.gather(found))

    def after_step(self, step, metrics, problems, responses, rewards, microbatches):
        """Adds the step to the page if it is due."""
        if step not in self.due:
            return
        run = self.run
        size = run.cfg.group_size
        beta = metrics.get("adaptive_kl/current_beta", 0.0)
        numbers = self.numbers_of_rows(microbatches, beta)
        half = 1 + TOKENS // size  # of a response's tokens, at its beginning and its end
        order = rewards.view(-1, size).std(1).argsort(descending=True).tolist()
        order.insert(1, order.pop())  # a group of equal rewards, if there is one
        groups = []
        for g in order[: 2 + 512 // (size * run.cfg.max_new_tokens)]:
            shown = []
            for response, reward in zip(responses[g * size :], rewards[g * size : (g + 1) * size]):
                places = [*range(len(response.response_ids))]
                del places[half:-half]
                ids = [response.response_ids[t] for t in places]
                of_response = {
                    "reward": reward,
                    "finished": response.finished,
                    "length": len(response.response_ids),
                    "tokens": self.tokenizer.convert_ids_to_tokens(ids),
                }
                read = [math.isnan(response.log_probs[t]) for t in places]  # between turns
                if any(read):
                    of_response["read"] = read
                prompt_ids = response.prompt_ids
                key = (len(prompt_ids), *prompt_ids, *response.response_ids)
                for name, values in numbers.get(key, {}).items():
                    of_response[name] = " ".join(f"{values[t]:.5g}" for t in places)
                shown.append(of_response)
            prompt = self.tokenizer.decode(
                problems[g]["prompt_ids"], clean_up_tokenization_spaces=False
            )[-400:]
            groups.append({"prompt": prompt, "responses": shown})
        content = {
            "step": step,
            "metrics": metrics,
            "importance_cap": run.cfg.importance_cap,
            "n_groups": len(problems),
            "groups": groups,
        }
        self.add(json.dumps(content, default=float).replace("<", "\\u003c"))

    def add(self, text):
        """Adds a step's JSON to the page, and writes that."""
        run = self.run
        texts = run.state.setdefault("steps_shown", [])  # those before a resume, too
        texts.append(text)
        while len(texts) > 2 and sum(map(len, texts)) > 475_000:  # bytes; first and last step stay
            del texts[1]
        if run.writes_files:
            page = TEMPLATE.replace("STEPS", f"[{','.join(texts)}]")
            write_whole(run.folder / "steps.html", page.encode())
