"""Somebody copies starter.py and changes ten lines: training starts all the same.

Each edit below is made in a copy of the file, and `python starter.py` is run there on a small
checkpoint, with support/ beside it or without.
"""
import importlib.util
import os
import re
import runpy
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import save_checkpoint
from forked import REPOSITORY, import_once, in_new_process, run_all

HAS_SUPPORT = (REPOSITORY / "support" / "fast.py").is_file()
NUMBERS = dict(
    model_id="checkpoint", task="countdown_small", device="cpu", engine="transformers", bf16=False,
    n_train_steps=2, rollout_batch_size=16, group_size=4, max_new_tokens=8, learning_rate=1e-3,
    max_tokens_per_microbatch=200, n_eval_problems=10, eval_every=0, save_every=0,
    reward=b"variety")
VARIETY = """
N_TRAIN_PROBLEMS = 60


def variety(text, problem):  # random weights can earn it
    return len(set(text)) / 10
"""


def change_numbers(text, **numbers):
    """Changes lines `name=value,` of main(). A value that is code is given as bytes."""
    start = text.index("\ndef main(")
    head, main = text[:start], text[start:]
    for name, value in numbers.items():
        code = value.decode() if isinstance(value, bytes) else repr(value)
        main, n = re.subn(rf"(?m)^    {name}=.*$", f"    {name}={code},", main, count=1)
        assert n == 1, f"main() has no line for {name}"
    return head + main


def insert(text, code):
    """Puts code in front of main(): a function there takes the place of an earlier one."""
    start = text.index("\n@with_preset\ndef main(")
    return text[:start] + "\n" + code + text[start:]


# --------------------------------------------------------------------------------------------------
# The edits: text of starter.py -> edited text

def nothing(text):
    return text


def rloo(text):
    return insert(text, '''
def compute_group_normalized_advantages(rewards, group_size, advantage_eps, normalize_by_std):
    groups = rewards.reshape(-1, group_size)
    others = (groups.sum(dim=1, keepdim=True) - groups) / (group_size - 1)
    advantages = 3 * (groups - others)
    return advantages.reshape(-1), {
        "reward_mean": rewards.mean().item(), "reward_std": groups.std(dim=1).mean().item(),
        "frac_zero_std": (advantages == 0).all(dim=1).float().mean().item()}
''')


TOKEN_RATIO = "torch.exp(policy_log_probs - old_log_probs)"
SEQUENCE_RATIO = "torch.exp(masked_mean(policy_log_probs - old_log_probs, mask, dim=1))[:, None]"


def with_ratio(text, ratio):
    """Sets the ratio of the policy term. Returns None where compute_loss has no line for it,
    since somebody has rewritten the term."""
    start = text.index("\ndef compute_loss(")
    end = text.index("\ndef ", start + 1)
    function, n = re.subn(r"(?m)^    ratio = .*\)$", f"    ratio = {ratio}", text[start:end])
    return text[:start] + function + text[end:] if n == 1 else None


def gspo(text):
    """The ratio of the policy term becomes that of the whole response (arXiv:2507.18071)."""
    return with_ratio(text, SEQUENCE_RATIO) or text


def other_reward(text):
    """The built-in reward itself is written anew."""
    text = insert(text, '''
def reward_fn(response_text, problem):
    return len(response_text.strip("0123456789")) / 10
''')
    return change_numbers(text, reward=b"reward_fn")


def other_task(text):
    text = insert(text, '''
def sums(cfg):
    problems = [{"prompt": f"{a} + {b}", "answer": str(a + b)}
                for a in range(20) for b in range(20)]
    return problems[:-cfg.n_eval_problems], problems[-cfg.n_eval_problems:]


TASKS["sums"] = sums
''')
    return change_numbers(text, task="sums")


def other_kl(text):
    """An estimator that is not in the literature."""
    text = insert(text, '''
def compute_kl_divergence(policy_log_probs, ref_log_probs, estimator="k1"):
    return (policy_log_probs - ref_log_probs).abs()
''')
    return change_numbers(text, use_kl_penalty=True)


def other_parameters(text):
    """Other numbers; min_learning_rate is new, dynamic_beta_decay becomes a constant."""
    text = change_numbers(text, group_size=8, clip_range=(0.2, 0.28), epochs_per_rollout=2,
                          loss_average="dr_grpo", use_kl_penalty=True, kl_coef=0.05)
    text = text.replace("\ndef main(\n", "\ndef main(\n    min_learning_rate=1e-5,\n")
    text, n = re.subn(r"(?m)^    dynamic_beta_decay=.*\n", "", text)
    assert n == 1, "main() has no line for dynamic_beta_decay"
    text = text.replace("cfg.dynamic_beta_decay", "0.9")
    return insert(text, '''
def learning_rate_at(step, cfg):
    wave = 0.5 + 0.5 * math.cos(math.pi * step / cfg.n_train_steps)
    return cfg.min_learning_rate + (cfg.learning_rate - cfg.min_learning_rate) * wave
''')


def bad_number(text):
    return change_numbers(text, group_size=7)


def ctrl_c_while_loading(text):
    return insert(text, '''
def init_policy(model_id, device):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
''')


# The edit, and the quick tests that then no longer hold: at least these, in their printed form.
TRAINS = [
    (nothing, []), (rloo, ["advantages are those of grpo"]),
    (gspo, []),
    (other_reward, ["reward accepts only solutions"]), (other_task, []),
    (other_kl, ["kl estimators match hand computed values"]), (other_parameters, []),
]
STOPS = [bad_number, ctrl_c_while_loading]
EDITS = [edit for edit, _ in TRAINS] + STOPS


# --------------------------------------------------------------------------------------------------
# The process in which the copies run

def run_copy(folder):
    """`python starter.py` in this folder."""
    os.chdir(folder)
    sys.path.insert(0, os.getcwd())
    runpy.run_path("starter.py", run_name="__main__")


def run_copies(folders):
    import_once()
    return run_all([partial(run_copy, folder) for folder in folders])


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Returns {(name of the edit, whether support/ lies beside the copy): outcome}."""
    root = tmp_path_factory.mktemp("copies")
    text = (REPOSITORY / "starter.py").read_text()
    folders = {}
    for edit in EDITS:
        for with_support in (True, False):
            if with_support and not HAS_SUPPORT:
                continue
            if not with_support and edit not in (nothing, gspo):
                continue
            folder = root / f"{edit.__name__}_{with_support}"
            folder.mkdir()
            save_checkpoint(folder / "checkpoint")
            edited = edit(change_numbers(insert(text, VARIETY), **NUMBERS))
            (folder / "starter.py").write_text(edited)
            if with_support:
                shutil.copytree(REPOSITORY / "support", folder / "support")
            folders[edit.__name__, with_support] = folder
    answers = in_new_process("test_changes", "run_copies", root, root,
                             [str(folder) for folder in folders.values()])
    return dict(zip(folders, answers))


def of_edit(outcomes, edit):
    """Returns the outcomes of an edit, with and without support/."""
    return [outcome for (name, _), outcome in outcomes.items() if name == edit.__name__]


@pytest.mark.parametrize("edit, broken_tests", TRAINS, ids=[edit.__name__ for edit, _ in TRAINS])
def test_training_starts_after_an_edit(outcomes, edit, broken_tests):
    for outcome in of_edit(outcomes, edit):
        printed = outcome["stdout"]
        assert outcome["status"] == 0, outcome["stderr"][-3000:]
        assert "Step 2 |" in printed and "=== Report ===" in printed
        lines = [line for line in printed.splitlines() if "no longer holds" in line]
        for title in broken_tests:
            assert len([line for line in lines if title in line]) == 1, lines
        if lines:
            assert f"=== {len(lines)} of " in printed and "training goes on ===" in printed
        else:
            assert "=== All Tests Passed! ===" in printed
        if edit in (other_task, other_parameters):  # no matter of the quick tests
            unchanged = of_edit(outcomes, nothing)[0]["stdout"].splitlines()
            assert lines == [line for line in unchanged if "no longer holds" in line]


@pytest.mark.skipif(not HAS_SUPPORT, reason="needs support/")
def test_edit_changes_what_is_trained(outcomes):
    """The first line of a step differs from that of the unchanged file."""
    def first_step(edit):
        printed = of_edit(outcomes, edit)[0]["stdout"]
        return re.search(r"Step 1 \| (.*?) \| \d+\.\d+ s", printed).group(1)

    unchanged = first_step(nothing)
    for edit in (rloo, other_reward, other_task, other_parameters):
        assert first_step(edit) != unchanged, edit.__name__


def test_bad_number_in_main_costs_one_sentence(outcomes):
    for outcome in of_edit(outcomes, bad_number):
        assert outcome["status"] == 1
        assert outcome["stderr"] == ("starter.py stopped: rollout_batch_size = 16 is not a "
                                     "multiple of group_size = 7; use 14 or 21\n")


def test_ctrl_c_before_training_costs_one_line(outcomes):
    for outcome in of_edit(outcomes, ctrl_c_while_loading):
        assert outcome["status"] in (-2, 130)
        assert outcome["stderr"] == "starter.py stopped: interrupted\n"


# --------------------------------------------------------------------------------------------------
# A sequence-level ratio leaves the KL term as it is

def module_of(text, name, folder):
    """Imports a text as a module."""
    path = Path(folder) / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def gradients(starter, advantages, kl_coef):
    """Gradients of compute_loss on log-probs that have moved since the rollout, for each kind of
    KL term."""
    generator = torch.Generator().manual_seed(0)
    old, moved, ref, weights = torch.randn(4, 3, 6, generator=generator, dtype=torch.float64)
    mask = torch.arange(6) < torch.tensor([[6], [2], [4]])
    found = []
    for kl in (starter.KLSettings(), starter.KLSettings("k1"),
               starter.KLSettings("k3", placement="loss_to_go"),
               starter.KLSettings("k3", "as_written"), starter.KLSettings(adaptation="sigmoid")):
        log_probs = (old + 0.3 * moved).requires_grad_()
        loss, _ = starter.compute_loss(advantages, log_probs, old, 0.2, ref, kl_coef, mask, kl)
        (loss * weights * mask).sum().backward()
        found.append(log_probs.grad)
    return torch.stack(found)


def test_sequence_level_ratio_does_not_change_the_kl_gradient(tmp_path):
    text = (REPOSITORY / "starter.py").read_text()
    texts = [with_ratio(text, ratio) for ratio in (TOKEN_RATIO, SEQUENCE_RATIO)]
    if None in texts:
        pytest.skip("the policy term has been rewritten")
    unchanged = module_of(texts[0], "starter_with_token_ratio", tmp_path)
    edited = module_of(texts[1], "starter_with_sequence_ratio", tmp_path)
    zero = torch.zeros(3, 1, dtype=torch.float64)
    of_kl = [gradients(module, zero, 0.7) - gradients(module, zero, 0.0)
             for module in (unchanged, edited)]
    assert of_kl[0].abs().max() > 0.01
    torch.testing.assert_close(of_kl[1], of_kl[0], rtol=0, atol=1e-12)
    of_policy = [gradients(module, zero + 1, 0.0) for module in (unchanged, edited)]
    assert (of_policy[1] - of_policy[0]).abs().max() > 0.01  # the edit has changed the policy term
