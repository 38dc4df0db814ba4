"""The seam between starter.py and support/: what support/ may replace, how an edit is seen, that
what looks on never ends a run and never changes it, and what a checkpoint holds of an edit.

Each edit here is made in the text of a copy, without support/ and with it; tests/test_edits.py has
those whose gradient is written out.
"""

import ast
import importlib.util
import inspect
import json
import re
import subprocess
import sys
import textwrap
from unittest import mock

import pytest
import torch
from conftest import make_responses, make_step, needs_vllm, scalars, settings
from forked import REPOSITORY, edited_text, import_copy, in_forks, write_copy

import starter
from support import edits, fast, guards, report, resumed, rows, steps

SOURCE = (REPOSITORY / "starter.py").read_text("utf-8")


# 1. What may be replaced


def section_of(name):
    """The number of the section of starter.py in which a function stands."""
    before = SOURCE[: SOURCE.index(f"\ndef {name}(")]
    return int(re.findall(r"^# (\d+)\. ", before, re.MULTILINE)[-1])


def test_mechanics_are_twelve_at_most_and_stand_in_one_section():
    assert 0 < len(starter.MECHANICS) <= 12
    assert {section_of(name) for name in starter.MECHANICS} == {11}


def test_nothing_else_may_be_replaced():
    with pytest.raises(ValueError, match="compute_loss is none of the mechanics"):
        edits.replace(compute_loss=starter.compute_loss)


def test_docstrings_of_no_other_section_speak_of_support():
    for node in ast.walk(ast.parse(SOURCE)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)):
            text = ast.get_docstring(node) or ""
            name = getattr(node, "name", "")
            is_nested = f"\ndef {name}(" not in SOURCE
            if "support/" in text and not is_nested and name not in ("", "main"):
                assert section_of(name) in (11, 14), name
    assert "support/" not in starter.__doc__


def test_run_leaves_every_name_of_starter_py_as_it_was(checkpoint, tmp_path):
    """While it trains as well as afterwards."""
    before = {name: value for name, value in vars(starter).items() if callable(value)}
    found = []

    def reward(text, problem):
        found.append({name: vars(starter)[name] for name in before})
        return len(set(text)) / 10

    starter.main(**settings(checkpoint, tmp_path, reward=reward, use_kl_penalty=True))
    for now in (found[-1], vars(starter)):
        changed = {name for name in before if now[name] is not before[name]}
        assert changed == set()


# 2. How an edit is seen

OWN = """
    def double(x, text=" of "):
        for i in range(2):
            x = x + i
        return x
"""


@pytest.mark.parametrize(
    "old, new, is_edit",
    [
        ("x = x + i", "x = x + i  # a comment", False),
        ("x = x + i", "x = (x\n                 + i)", False),
        ('" of "):', '" of "):\n        """A docstring."""', False),
        ("        return x", "            return x", True),
        ('" of "', '" of"', True),
        ("+ i", "- i", True),
    ],
)
def test_edit_is_seen_by_its_meaning(old, new, is_edit, tmp_path):
    """Indentation and the blanks in a text have one; comments, docstrings and layout have none."""
    assert OWN.count(old) == 1
    prints = []
    for i, text in enumerate((OWN, OWN.replace(old, new))):
        path = tmp_path / f"module_{i}.py"
        path.write_text(textwrap.dedent(text), "utf-8")
        scope = {}
        exec(compile(path.read_text("utf-8"), str(path), "exec"), scope)  # noqa: S102
        prints.append(edits.fingerprint(scope["double"]))
    assert (prints[0] != prints[1]) == is_edit


@pytest.mark.slow  # while you edit they are not
def test_shipped_fingerprints_are_those_of_the_file(tmp_path, monkeypatch):
    """After a change of starter.py that is to stay: python -m support.edits"""
    assert edits.edited_names() == []
    functions = {
        name
        for name, value in vars(starter).items()
        if getattr(value, "__module__", None) == "starter"
    }
    monkeypatch.setattr(edits, "SHIPPED_FILE", tmp_path / "shipped.json")
    edits.write_shipped()
    written = json.loads((tmp_path / "shipped.json").read_text("utf-8"))
    assert written == edits.SHIPPED and written.keys() == functions


@pytest.mark.parametrize(
    "helper, left", [("response_logits", ["start_decoding"]), ("read_on", ["token_statistics"])]
)
def test_edit_of_what_a_mechanic_calls_keeps_that_mechanic(helper, left, monkeypatch):
    monkeypatch.setattr(starter, helper, lambda *inputs: None)
    edits.replace(**fast.FUNCTIONS)
    assert edits.replaced_names() == left


@pytest.mark.parametrize("name", ["add_up_gradients", "cut_microbatches", "compute_loss", "train"])
def test_rows_without_an_advantage_stay_where_something_of_the_loss_is_edited(
    name, monkeypatch, capsys
):
    """A term that was added there may have a gradient for them."""
    batch = make_step(make_responses((3, 2)), advantages=torch.tensor([1.0, 0.0]))
    cfg = starter.cfg_with()
    assert len(rows.with_gradient(batch, None, None, cfg)["labels"]) == 1
    monkeypatch.setattr(starter, name, lambda *inputs: None)
    assert len(rows.with_gradient(batch, None, None, cfg)["labels"]) == 2
    rows.log_rows(None)
    assert f"computed, too, since {name} was edited" in capsys.readouterr().out


@pytest.mark.parametrize(
    "line, stay",
    [
        ("        rollout_seconds = time.perf_counter() - start\n", False),
        ("        microbatches = cut_microbatches(rows, cfg.max_tokens_per_microbatch)\n", True),
        ("            scaler.unscale_(optimizer)\n", True),
        ("        log_train(run, step, metrics)\n", False),
    ],
)
def test_edit_of_train_keeps_all_rows_only_where_it_is_behind_their_choice(line, stay, tmp_path):
    path = tmp_path / "edited.py"
    path.write_text(edited_text({line: line + line.replace(line.strip(), "print(step)")}), "utf-8")
    spec = importlib.util.spec_from_file_location("edited", path)
    edited = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(edited)
    assert rows.is_edited_behind_the_rows(edited.train) == stay


def test_file_that_was_loaded_anew_is_refused(monkeypatch):
    """As by importlib.reload in a notebook: support/ would run functions of the one before."""
    monkeypatch.setattr(starter, "MECHANICS", dict(starter.MECHANICS))
    with pytest.raises(starter.InputError, match="or the kernel of the notebook, again"):
        starter.main(n_train_steps=0)


OWN_NAMES = """
import starter
own = lambda *inputs: 0.5
starter.TASKS["addition"] = starter.TERM_RULES["clip"] = own
starter.COEFFICIENT_RULES["dynamic"] = starter.PRESETS["smollm2"] = own
starter.find_support()
for names, name in (
    (starter.TASKS, "addition"),
    (starter.TERM_RULES, "clip"),
    (starter.COEFFICIENT_RULES, "dynamic"),
    (starter.PRESETS, "smollm2"),
):
    assert names[name] is own and len(names) > 1, name
"""


def test_task_rule_or_preset_of_yours_stays_beside_one_of_that_name():
    subprocess.run([sys.executable, "-c", OWN_NAMES], cwd=REPOSITORY, check=True)


def test_edit_of_what_a_lone_copy_alone_calls_is_said_to_have_no_part(
    checkpoint, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(starter, "limit_logits", lambda policy, cfg: None)
    starter.main(**settings(checkpoint, tmp_path, n_train_steps=0))
    printed = capsys.readouterr().out
    assert "edited, and without a part beside support/: limit_logits\n" in printed
    assert "run as they are: limit_logits" not in printed


# 3. What looks on


def broken(*arguments, **named):
    raise OSError(28, "No space left on device")


LOOKING_ON = {  # what is said: (owner, name) of what fails
    "steps.html": (steps.Page, "numbers_of_rows"),
    "the copy of the program": (guards, "program_of"),
    "state": (resumed, "keep"),
    "the log of more numbers": (guards.Guards, "log_step"),
    "the warnings of steps": (guards, "step_signs"),
    "the log of evaluations": (guards.Guards, "log_evaluation"),
    "the warnings of evaluations": (guards, "evaluation_signs"),
    "the report": (report, "write_report"),
    "TensorBoard's table of settings": (report, "log_hparams"),
    "curve.png": (report, "draw"),
    "the check of the saved model": (report, "check_saved_model"),
}


def test_what_looks_on_never_ends_a_run_and_never_changes_it(
    checkpoint, tmp_path, monkeypatch, capsys
):
    """Each fails once and is said once; the weights are those of a run in which nothing failed."""
    weights = []
    for i in range(2):
        given = settings(checkpoint, tmp_path / str(i), eval_every=1)
        folder = starter.main(**given)["run_folder"]
        assert (folder / "model" / "model.safetensors").is_file()
        weights.append(torch.load(max(folder.glob("checkpoint_*")), weights_only=True)["model"])
        printed = capsys.readouterr().out
        for what in LOOKING_ON:
            line = f"{what} ends here: OSError(28, 'No space left on device') (test_seam.py, line "
            assert printed.count(line) == i, what
        for owner, name in LOOKING_ON.values():
            monkeypatch.setattr(owner, name, broken)
    torch.testing.assert_close(*weights, rtol=0, atol=0)


# 4. Edits of the loop, of what is logged, and of what is saved


class Edit:
    """replaced: {text of starter.py: text in its place}. check(starter, given, printed): trains and
    asserts. given: settings of main(). printed(): what was printed since the last call."""

    def __init__(self, replaced, check, **changes):
        self.replaced = replaced
        self.check = check
        self.changes = changes


def stops_after_two(starter, given, printed):
    folder = starter.main(**given)["run_folder"]
    logged = scalars(folder)
    assert [*logged["train/loss"]] == [1, 2]
    assert 2 in logged["eval/solved"]
    assert (folder / "checkpoint_00000002.pt").is_file()
    assert (folder / "model").is_dir()
    text = printed()
    assert "--resume" not in text and "without a part" not in text


def refused(words):
    def check(starter, given, printed):
        with pytest.raises(starter.InputError, match=words):
            starter.main(**given)

    return check


def ends_well(starter, given, printed):
    """With a model and a checkpoint, from which it goes on to the bits of a run without an end."""
    whole = starter.main(**given)["run_folder"]
    part = starter.main(**{**given, "n_train_steps": 2})["run_folder"]
    again = starter.main(**{**given, "resume": str(part)})["run_folder"]
    for name in ("model", "optimizer"):
        found = [
            torch.load(max(folder.glob("checkpoint_*.pt")), weights_only=True)[name]
            for folder in (whole, again)
        ]
        torch.testing.assert_close(*found, rtol=0, atol=0)


def says_what_no_checkpoint_holds(starter, given, printed):
    ends_well_until = {**given, "n_train_steps": 2}
    starter.main(**ends_well_until)
    if starter.find_support():
        assert "1 of the optimiser's parameters are none of the policy's" in printed()


def says_that_it_was_read_before(starter, given, printed):
    starter.main(**given)
    if starter.find_support():
        assert printed().count("cfg.kl_coef was changed to 0.6, without effect") == 1


def says_that_the_reference_changed(starter, given, printed):
    folder = starter.main(**{**given, "n_train_steps": 2})["run_folder"]
    if starter.find_support():
        assert "KL(policy || reference at the end)" in printed()
    starter.main(**given, resume=str(folder))
    if starter.find_support():
        assert "resume: the reference is another one than before" in printed()


def replay_trains(starter, given, printed):
    folder = starter.main(**given)["run_folder"]
    assert [*scalars(folder)["train/loss"]] == [1, 2, 3, 4]
    if starter.find_support():
        assert printed().count("steps.html ends here") <= 1


def page_has_pushes(starter, given, printed):
    folder = starter.main(**given)["run_folder"]
    if starter.find_support():
        text = (folder / "steps.html").read_text("utf-8")
        slopes = re.findall(r'"slope": "([^"]+)"', text)
        assert any(float(x) != 0 for x in " ".join(slopes).split())


def half_for_a_wrong_answer(starter, given, printed):
    countdown = starter.TASKS.get("countdown_small")
    if countdown is None:  # alone there is no such task
        return
    train, held_out = countdown(starter.cfg_with(n_eval_problems=5))
    for reward in (starter.score_answer, starter.reward_fn):
        assert reward("<answer>1+1</answer>", held_out[0]) == 0.5
        assert reward(f"<answer>{held_out[0]['solution']}</answer>", held_out[0]) == 1.0


STEP = "        # 1. Sample a group of responses"
NOISE = """\
            for parameter in trainable:
                parameter.grad += 1e-3 * torch.randn(parameter.shape)
            sums = joined(sums, {"grad_norm": clip_gradient"""
TWO_OPTIMIZERS = """\
    class Both:
        def __init__(self):
            vectors = [p for p in policy.parameters() if p.dim() < 2]
            matrices = [p for p in policy.parameters() if p.dim() > 1]
            self.parts = [
                torch.optim.SGD(matrices, cfg.learning_rate, momentum=0.9),
                torch.optim.AdamW(vectors, cfg.learning_rate),
            ]

        @property
        def param_groups(self):
            return self.parts[0].param_groups + self.parts[1].param_groups

        def step(self):
            for part in self.parts:
                part.step()

        def zero_grad(self):
            for part in self.parts:
                part.zero_grad()

        def state_dict(self):
            states = [part.state_dict() for part in self.parts]
            return {"state": [s["state"] for s in states], "param_groups": [
                s["param_groups"] for s in states
            ]}

        def load_state_dict(self, saved):
            for part, state, groups in zip(self.parts, saved["state"], saved["param_groups"]):
                part.load_state_dict({"state": state, "param_groups": groups})

    optimizer = Both()
    run.open(policy, optimizer)
"""
VALUE_HEAD = """\
    value_head = torch.nn.Parameter(torch.zeros(3))
    optimizer.add_param_group({"params": [value_head]})
    run.open(policy, optimizer)
"""
OPEN = "    run.open(policy, optimizer)\n"
MOVING_REFERENCE = """\
        with torch.no_grad():
            for old, new in zip(ref_model.parameters(), policy.parameters()):
                old.lerp_(new, 0.5)
        # 1. Sample a group of responses"""
PROMPT_KL = """\
    before = microbatch["response_mask"].cumsum(dim=1) == 0
    of_prompts = {**microbatch, "response_mask": before}
    prompt_stats = token_statistics(policy, of_prompts, 1.0, cfg.precision, ref_model)
    loss = loss + 0.1 * prompt_stats["kl_per_token"]
    loss = torch.where(mask"""
STATISTICS = '        "entropy": -(log_p.exp() * log_p).sum(dim=1),\n'
KL = dict(use_kl_penalty=True, kl_coef=0.3)

EDITS = dict(
    stop_in_an_evaluation=Edit(
        {
            '        state["after"] = metrics\n': '        state["after"] = metrics\n'
            "        run.stop = step == 2\n"
        },
        stops_after_two,
        eval_every=1,
    ),
    stop_in_the_loop=Edit(
        {"        # 5. Log, evaluate and save.": "        run.stop = step == 2"}, stops_after_two
    ),
    mixed_reference_that_exact_does_not_read=Edit(
        {
            "    zeros = torch.zeros(mask.shape, dtype=stats": """\
    if ref_model is not None:
        stats["ref_log_probs"] = stats["ref_log_probs"] - 0.1
    zeros = torch.zeros(mask.shape, dtype=stats"""
        },
        refused("ref_log_probs were changed, which kl_estimator = 'exact' does not read"),
        **KL,
        kl_estimator="exact",
    ),
    coefficient_changed_in_the_settings=Edit(
        {STEP: "        cfg.kl_coef = 0.3 * min(step, 2)\n" + STEP},
        says_that_it_was_read_before,
        **KL,
        n_train_steps=3,
    ),
    moving_reference=Edit(
        {STEP: MOVING_REFERENCE}, says_that_the_reference_changed, **KL, n_train_steps=3
    ),
    metric_with_the_name_of_a_statistic=Edit(
        {
            STEP: "        metrics = {}\n" + STEP,
            "        # 3. Lay": """\
        metrics["entropy"] = 0.0
        # 3. Lay""",
        },
        refused("'entropy' is logged twice"),
    ),
    statistic_with_the_name_of_the_loss=Edit(
        {STATISTICS: STATISTICS + '        "loss": logits.logsumexp(dim=1),\n'},
        refused("'loss' is logged twice"),
    ),
    statistic_with_the_name_of_the_gradients_norm=Edit(
        {STATISTICS: STATISTICS + '        "grad_norm": logits.logsumexp(dim=1),\n'},
        refused("'grad_norm' is logged twice"),
    ),
    statistic_with_the_name_of_the_rate=Edit(
        {STATISTICS: STATISTICS + '        "lr": logits.logsumexp(dim=1),\n'},
        refused("'lr' is logged twice"),
    ),
    group_statistic_with_the_name_of_another=Edit(
        {
            "    if not is_scored.all():\n        metadata": """\
    metadata["clip_frac"] = 0.0
    if not is_scored.all():
        metadata"""
        },
        refused("'clip_frac' is logged twice"),
    ),
    two_optimizers_in_one=Edit({OPEN: TWO_OPTIMIZERS}, ends_well),
    optimizer_that_cannot_be_saved=Edit(
        {OPEN: "    optimizer.state_dict = None\n" + OPEN}, refused("optimiser cannot be saved")
    ),
    parameters_beside_the_policy=Edit({OPEN: VALUE_HEAD}, says_what_no_checkpoint_holds),
    replay_of_a_response=Edit(
        {
            "        if cfg.gradient_checkpointing:\n            set": """\
        responses = responses + responses[:1]
        advantages = torch.cat([advantages, advantages[:1]])
        if cfg.gradient_checkpointing:
            set"""
        },
        replay_trains,
    ),
    scheduler_of_torch=Edit(
        {
            "    controller = KLController(": """\
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)
    controller = KLController(""",
            "            scaler.update()": """\
            scheduler.step()
            scaler.update()""",
        },
        refused("step 2: the learning rate was set to"),
    ),
    gradient_noise=Edit(
        {'            sums = joined(sums, {"grad_norm": clip_gradient': NOISE}, ends_well
    ),
    response_in_the_state=Edit(
        {"        # 5. Log, evaluate and save.": "        state['first'] = responses[0]"},
        refused(r"run.state\['first'\] cannot be read back from a checkpoint"),
        n_train_steps=1,
    ),
    kl_on_prompt_tokens=Edit({"    loss = torch.where(mask": PROMPT_KL}, page_has_pushes, **KL),
    wrong_answers_earn_half=Edit(
        {
            "    return max(0.1, share_right)": """\
    return 1.0 if is_right(answer, problem) else 0.5"""
        },
        half_for_a_wrong_answer,
    ),
)


def run_edit(checkpoint, folder, name):
    """In a process of its own."""
    starter = import_copy(folder)
    if starter.find_support():
        sys.modules["support.report"].draw = mock.Mock(__name__="draw")  # it takes a second
    printed = []
    sys.stdout.write = lambda text, write=sys.stdout.write: (printed.append(text), write(text))

    def printed_since():
        text = "".join(printed)
        printed.clear()
        return text

    edit = EDITS[name]
    given = settings(checkpoint, f"{folder}/runs", save_every=1, **edit.changes)
    edit.check(starter, given, printed_since)


@pytest.mark.slow
@pytest.mark.parametrize("with_support", [False, True])
def test_edits_act_or_are_refused(with_support, checkpoint, tmp_path):
    calls = []
    for name in EDITS:
        text = edited_text(EDITS[name].replaced)
        calls.append((str(checkpoint), write_copy(tmp_path / name, text, with_support), name))
    wrong = []
    for name, outcome in zip(EDITS, in_forks("test_seam", "run_edit", calls, tmp_path)):
        if outcome["status"] != 0:
            wrong.append(name + outcome["stdout"][-1500:] + outcome["stderr"][-2500:])
    assert not wrong, "\n".join(wrong)


# 5. Functions around functions


@pytest.mark.slow
def test_function_around_a_mechanic_after_a_run_that_failed_runs_in_the_next(
    checkpoint, tmp_path, monkeypatch
):
    """As in a notebook: nothing of support/ is left inside it."""

    def failing(text, problem):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        starter.main(**settings(checkpoint, tmp_path, reward=failing))
    calls = []
    before = starter.token_statistics

    def counted(*inputs, **named):
        calls.append(inspect.stack()[1].function)
        return before(*inputs, **named)

    monkeypatch.setattr(starter, "token_statistics", counted)
    starter.main(**settings(checkpoint, tmp_path, n_train_steps=2))
    assert "grpo_microbatch_step" in calls
    assert "token_statistics" not in edits.replaced_names()


# 6. Edits with vLLM, which draws the tokens by itself

WITH_VLLM = {
    "            temperature=temperature,\n            max_tokens": """\
            temperature=temperature,
            min_p=0.05,
            max_tokens""",
    "tokens = draw_from(probs, uniform)": "tokens = draw_from(probs.square(), uniform)",
}


def run_with_vllm(checkpoint, folder):
    """In a process of its own."""
    starter = import_copy(folder)
    given = settings(checkpoint, f"{folder}/runs", engine="vllm", n_train_steps=1)
    starter.main(**given, max_sampler_diff=float("inf"))


@needs_vllm
def test_edit_of_sampling_without_a_part_beside_vllm_is_said_and_no_other(checkpoint, tmp_path):
    """One of its sampling parameters has a part, one of the drawing has none."""
    call = str(checkpoint), write_copy(tmp_path / "copy", edited_text(WITH_VLLM), True)
    [outcome] = in_forks("test_seam", "run_with_vllm", [call], tmp_path)
    assert outcome["status"] == 0, outcome["stdout"][-1000:] + outcome["stderr"][-3000:]
    assert "edited, but without a part in this step: draw_tokens;" in outcome["stdout"]
    assert outcome["stdout"].count("without a part") == 1
