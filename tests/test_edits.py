"""What a person changes in starter.py is what runs, without support/ and with it.

Each edit is made in the text of a copy, in two strengths, and trained with for three steps. The
weaker one changes nothing, so its run must equal the run of the shipped file. The gradients must be
those of a loss that is written out here, from the model's own logits for the sampled responses.
"""
import ast
import functools
import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, NamedTuple

import pytest
import torch

from conftest import advantages_by_loops, save_checkpoint, scalars, settings, variety
from forked import REPOSITORY, import_copy, import_once, in_new_process, run_all, write_copy

LENGTH = 8  # max_new_tokens
FREQUENT = 33  # a token that the checkpoint samples often


# The losses, written out. x: what compare_with_loss() knows of a step.

def policy_loss(x, weight_of=lambda place, n: 1.0):
    """-advantage * log-prob, as a mean over all tokens of the step. weight_of: (place of a token in
    its response, length of that) -> a factor."""
    total = 0.0
    for advantage, log_probs in zip(x.advantages, x.log_probs):
        weights = torch.tensor([weight_of(t, len(log_probs)) for t in range(len(log_probs))])
        total = total - advantage * (weights * log_probs).sum() / x.n_tokens
    return total


def exact_kl(x):
    """The mean over tokens of KL(policy || reference), over the vocabulary."""
    return sum((table.exp() * (table - ref_table)).sum()
               for table, ref_table in zip(x.tables, x.ref_tables)) / x.n_tokens


def with_exact_kl(x):
    return policy_loss(x) + x.beta * exact_kl(x)


def with_entropy_bonus(x):
    entropy = -sum((table.exp() * table).sum() for table in x.tables) / x.n_tokens
    return policy_loss(x) - x.strength * entropy


def with_rising_weights(x):
    factors = torch.linspace(x.strength, 1, LENGTH)
    return policy_loss(x, lambda place, n: factors[place])


def with_new_average(x):
    return policy_loss(x, lambda place, n: x.n_tokens / n**x.strength / len(x.tables))


def with_new_estimator(x):
    kl = sum((now - before).square().sum() for now, before in zip(x.log_probs, x.ref_log_probs))
    return policy_loss(x) + x.beta * x.strength * kl / x.n_tokens


def with_importance_weights(x):
    """The responses come from older weights."""
    x.log_probs = [
        (now.detach() - torch.tensor(response.log_probs)).exp().clamp(max=2.0) * now
        for now, response in zip(x.log_probs, x.responses)]
    return policy_loss(x)


# The edits

def at_most_half(text, problem):
    """A reward that is equal for all responses of some groups."""
    return min(0.5, variety(text, problem))


class Edit(NamedTuple):
    """One edit. In the texts, STRENGTH stands for one of the strengths."""
    replaced: dict  # text that occurs once in starter.py: text in its place
    off: Any  # the strength at which it changes nothing
    on: Any
    loss: Callable = policy_loss
    settings: dict = {}  # of main()
    shipped: dict = {}  # other settings, for the shipped file


KL = dict(use_kl_penalty=True, kl_coef=0.3, kl_estimator="exact")
AFTER_SOFTMAX = "    tokens = draw_from(probs, uniform) if"

EDITS = dict(
    entropy_bonus=Edit({
        "    loss = torch.where(mask, loss * rows[":
            "    loss = loss - STRENGTH * statistics.entropy\n"
            "    loss = torch.where(mask, loss * rows["},
        0.0, 1.0, with_entropy_bonus, dict(reward=at_most_half)),
    forbidden_token=Edit({
        "    return logits if temperature in (0, 1)":
            "    logits[:, STRENGTH] = -math.inf\n    return logits if temperature in (0, 1)"},
        [], [FREQUENT], with_exact_kl, KL),
    min_p=Edit({
        AFTER_SOFTMAX: "    kept = probs >= STRENGTH * probs.amax(dim=1, keepdim=True)\n"
                       "    probs = probs * kept\n" + AFTER_SOFTMAX},
        0.0, 0.3),
    top_k=Edit({
        AFTER_SOFTMAX: "    kept = probs >= probs.topk(STRENGTH).values[:, -1:]\n"
                       "    probs = probs * kept\n" + AFTER_SOFTMAX},
        58, 2),
    token_level_advantages=Edit({
        "        batch = make_batch(responses, advantages, policy.device)":
            "        factors = torch.linspace(STRENGTH, 1, cfg.max_new_tokens)\n"
            "        batch = make_batch(responses, advantages[:, None] * factors, policy.device)"},
        1.0, 0.0, with_rising_weights),
    moving_reference=Edit({
        "            optimizer.step()":
            "            optimizer.step()\n"
            "            for old, new in zip(ref_model.parameters(), policy.parameters()):\n"
            "                old.data.lerp_(new.data, STRENGTH)"},
        0.0, 0.5, with_exact_kl, KL),
    new_average=Edit({
        "AVERAGES = {": "AVERAGES = {\n    'new': lambda mask, n: mask / len(mask)"
                        " / mask.sum(1, keepdim=True).clamp(min=1)**STRENGTH,"},
        1.0, 0.5, with_new_average, dict(loss_average="new"), dict(loss_average="grpo")),
    new_estimator=Edit({
        "ESTIMATORS = {": "ESTIMATORS = {\n    'new': lambda d: STRENGTH * d.square(),"},
        0.5, 2.0, with_new_estimator, KL | dict(kl_estimator="new", kl_gradient="as_written"),
        dict(kl_estimator="k2")),
    new_coefficient_rule=Edit({
        "COEFFICIENT_RULES = {":
            "COEFFICIENT_RULES = {'new': lambda c, s, kl, reward: STRENGTH * c.beta, "},
        1.0, 0.5, with_exact_kl, KL | dict(kl_adaptation_method="new"),
        dict(kl_adaptation_method="none")),
    new_parameter=Edit({
        "    loss_average=\"dapo\",": "    loss_scale=STRENGTH,\n    loss_average=\"dapo\",",
        "loss * rows[\"weights\"]": "cfg.loss_scale * loss * rows[\"weights\"]"},
        1.0, 2.0, lambda x: x.strength * policy_loss(x)),
    off_policy_sampling=Edit({
        "        # 1. Sample a group":
            "        if step % STRENGTH == 1 % STRENGTH:\n"
            "            sampler = copy.deepcopy(policy)\n"
            "        # 1. Sample a group",
        "rollout(policy, llm, prompts, cfg, step,": "rollout(sampler, llm, prompts, cfg, step,"},
        1, 2, with_importance_weights, dict(max_sampler_diff=None)),
    reward_on_token_counts=Edit({
        "def reward_fn(response_text, problem)": "def reward_fn(response_text, problem, response)",
        "    scorers = [scorer for": "    return STRENGTH * len(response.response_ids)\n"
                                 "    scorers = [scorer for"},
        0.0, 1.0, policy_loss, dict(reward="the file's own")),
)


def edited_text(replaced, strength):
    text = (REPOSITORY / "starter.py").read_text("utf-8")
    for old, new in replaced.items():
        assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times in starter.py"
        text = text.replace(old, new.replace("STRENGTH", repr(strength)))
    return text


# A run, in a process of its own

def train(checkpoint, folder, **changes):
    """Three steps with the copy in this folder. Returns its module, what it logged, and of each
    step the responses, and the policy's weights and gradients before the update."""
    starter = import_copy(folder)
    if (folder / "support").is_dir():
        starter.find_support().report = lambda *args: None  # its pictures take a second
    steps = []
    real_rollout = starter.rollout
    real_clip = torch.nn.utils.clip_grad_norm_

    def rollout(policy, llm, prompts, cfg, purpose, *others):
        responses = real_rollout(policy, llm, prompts, cfg, purpose, *others)
        if isinstance(purpose, int):
            steps.append(SimpleNamespace(responses=responses))
        return responses

    def clip(parameters, max_norm):
        parameters = list(parameters)
        steps[-1].weights = [parameter.detach().clone() for parameter in parameters]
        steps[-1].gradient = torch.cat([parameter.grad.flatten() for parameter in parameters])
        return real_clip(parameters, max_norm)

    starter.rollout = rollout
    torch.nn.utils.clip_grad_norm_ = clip
    small = settings(checkpoint, folder / "runs", n_train_steps=3, learning_rate=1e-2,
                     warmup_steps=0, max_new_tokens=LENGTH, **changes)
    if isinstance(small["reward"], str):
        del small["reward"]
    logged = scalars(starter.main(**small)["run_folder"])
    return starter, {tag: list(values.values()) for tag, values in logged.items()}, steps


def run(checkpoint, folder, name, kind):
    """Prints what the test of an edit looks at."""
    edit = EDITS[name]
    changes = edit.settings | (edit.shipped if kind == "shipped" else {})
    starter, logged, steps = train(checkpoint, folder, **changes)
    found = {"logged": logged, "ids": [[r.response_ids for r in step.responses] for step in steps]}
    if kind != "shipped":
        found |= compare_with_loss(checkpoint, edit, getattr(edit, kind), steps, logged)
    if name == "new_parameter":
        starter.test_functions()
    print("\n" + json.dumps(found))


def tables_of(model, weights, responses, forbidden):
    """The (T, V) log-probs at the tokens of each response, by the model with these weights."""
    for parameter, values in zip(model.parameters(), weights):
        parameter.data.copy_(values)
    rows = [torch.tensor(r.prompt_ids + r.response_ids) for r in responses]
    logits = model(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)).logits
    logits = logits.index_fill(2, torch.tensor(forbidden, dtype=torch.long), -1e30)
    return [row[len(r.prompt_ids) - 1:len(r.prompt_ids) + len(r.response_ids) - 1].log_softmax(1)
            for row, r in zip(logits, responses)]


def compare_with_loss(checkpoint, edit, strength, steps, logged):
    """Returns of each step the relative error of its gradient and the exact KL; and of the sampled
    tokens the smallest share of the largest probability beside them, and the largest rank."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    forbidden = strength if isinstance(strength, list) else []
    reference = steps[0].weights
    found = {"errors": [], "exact_kl": [], "share": 1.0, "rank": 0}
    for step, beta in zip(steps, logged.get("adaptive_kl/current_beta", [0.0] * 3)):
        if edit is EDITS["moving_reference"] and step is not steps[0]:
            reference = [old.lerp(new, strength) for old, new in zip(reference, step.weights)]
        x = SimpleNamespace(strength=strength, responses=step.responses, beta=beta)
        x.ref_tables = [table.detach()
                        for table in tables_of(model, reference, x.responses, forbidden)]
        x.tables = tables_of(model, step.weights, x.responses, forbidden)
        x.log_probs, x.ref_log_probs = (
            [table[range(len(table)), r.response_ids] for table, r in zip(tables, x.responses)]
            for tables in (x.tables, x.ref_tables))
        x.n_tokens = sum(len(table) for table in x.tables)
        rewards = [strength * len(r.response_ids) for r in x.responses]
        if edit is not EDITS["reward_on_token_counts"]:
            reward = edit.settings.get("reward", variety)
            rewards = [reward(tokenizer.decode(r.response_ids, skip_special_tokens=True), None)
                       for r in x.responses]
        x.advantages = advantages_by_loops(rewards, 4, 1e-6, True)
        for table, log_probs in zip(x.tables, x.log_probs):
            share = (log_probs - table.amax(dim=1)).exp().min().item()
            rank = 1 + (table > log_probs[:, None]).sum(dim=1).max().item()
            found |= {"share": min(found["share"], share), "rank": max(found["rank"], rank)}
        model.zero_grad()
        edit.loss(x).backward()
        expected = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        error = (step.gradient - expected).norm() / expected.norm().clamp(min=1e-6)
        found["errors"].append(error.item())
        found["exact_kl"].append(exact_kl(x).item())
    return found


# The tests

KINDS = ("shipped", "off", "on")
QUICK = ("entropy_bonus", "min_p")


def run_all_edits(checkpoint, folder, names):
    """Imports torch once and forks for each run. Returns outcomes in the order of names, KINDS, and
    without or with support/. The shipped file runs once for all edits with the same settings."""
    import_once()
    programs = {}
    keys = []
    for name, kind, with_support in itertools.product(names, KINDS, (False, True)):
        edit = EDITS[name]
        is_shipped = kind == "shipped"
        text = edited_text({} if is_shipped else edit.replaced, getattr(edit, kind))
        keys.append((text, repr(edit.settings | edit.shipped), with_support))
        if keys[-1] not in programs:
            copy = write_copy(Path(folder) / str(len(programs)), text, with_support)
            programs[keys[-1]] = functools.partial(run, checkpoint, copy, name, kind)
    outcomes = dict(zip(programs, run_all(list(programs.values()))))
    return [outcomes[key] for key in keys]


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    """(name of an edit, kind, with support/) -> outcome, of the edits whose tests were selected."""
    names = [name for name in EDITS if any(f"[{name}-" in item.name
                                           for item in request.session.items)]
    folder = tmp_path_factory.mktemp("edits")
    checkpoint = str(save_checkpoint(folder / "model"))
    return dict(zip(itertools.product(names, KINDS, (False, True)), in_new_process(
        "test_edits", "run_all_edits", folder, REPOSITORY, checkpoint, str(folder), names)))


@pytest.mark.parametrize("with_support", [False, True], ids=["alone", "support"])
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in EDITS])
def test_edit_takes_effect(outcomes, name, with_support):
    found = {}
    for kind in KINDS:
        outcome = outcomes[name, kind, with_support]
        assert outcome["status"] == 0, outcome["stdout"][-2000:] + outcome["stderr"][-3000:]
        found[kind] = SimpleNamespace(**json.loads(outcome["stdout"].splitlines()[-1]))
    shipped, off, on = found.values()
    assert off.ids == shipped.ids
    norms = "train/grad_norm"
    assert off.logged[norms] == pytest.approx(shipped.logged[norms], rel=1e-5)
    assert on.logged[norms] != pytest.approx(off.logged[norms], rel=0.01)
    assert max(off.errors + on.errors) < 1e-3
    for one in (off, on):
        assert all(map(math.isfinite, itertools.chain(*one.logged.values())))
        if "train/kl_per_token" in one.logged:
            assert one.logged["train/kl_per_token"] == pytest.approx(one.exact_kl, abs=1e-5)
    if name == "forbidden_token":
        assert FREQUENT in sum(off.ids[0], []) and FREQUENT not in sum(sum(on.ids, []), [])
    if name == "min_p":
        assert off.share < 0.3 <= on.share + 1e-5
    if name == "top_k":
        assert off.rank > on.rank == 2
    if name == "new_coefficient_rule":
        assert on.logged["adaptive_kl/current_beta"] == pytest.approx([0.3, 0.15, 0.075])
    if name == "off_policy_sampling":
        first, second, _ = on.logged["train/sampler_logprob_diff"]
        assert first < 1e-4 and second > 0.01
    if name == "new_parameter":
        assert "no longer holds" not in outcomes[name, "on", with_support]["stdout"]
    if name == "reward_on_token_counts":
        assert on.logged["train/reward_mean"] == on.logged["train/response_length"]


def run_with_all_mechanics_edited(checkpoint, folder):
    """Every function that is marked @mechanics notes its name in EDITED when it is called."""
    text = edited_text({}, None)
    lines = text.splitlines(keepends=True)
    for node in reversed(ast.parse(text).body):
        if "mechanics" in map(ast.unparse, getattr(node, "decorator_list", ())):
            first = node.body[1 if ast.get_docstring(node) else 0]
            lines.insert(first.lineno - 1, f"    EDITED.add({node.name!r})\n")
    lines.insert(lines.index("class InputError(ValueError):\n"), "EDITED = set()\n")
    copy = write_copy(Path(folder) / "copy", "".join(lines), True)
    problems = [{"prompt": f"add {a} {a}", "answer": str(2 * a)} for a in range(40)]
    path = Path(folder) / "sums.jsonl"
    path.write_text("\n".join(map(json.dumps, problems)), "utf-8")
    starter, _, _ = train(checkpoint, copy, task=str(path))
    return sorted(starter.EDITED)


@pytest.mark.slow
def test_edited_mechanics_run_in_the_place_of_those_of_support(checkpoint, tmp_path):
    edited = in_new_process("test_edits", "run_with_all_mechanics_edited", tmp_path, REPOSITORY,
                            str(checkpoint), str(tmp_path))
    assert edited == ["accumulate_gradients", "cut_microbatches", "decode", "draw_from",
                      "have_slope", "log_train", "read_problems", "rollout_with_transformers",
                      "rows_to_decode", "score", "token_statistics", "weights_of"]
