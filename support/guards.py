"""Looks on while starter.py trains: locks the run's folder, logs samples, and warns of signs of
trouble. Nothing here enters a sample, a loss or a gradient."""
import json
import math
import sys
import textwrap
from pathlib import Path

import torch

import starter
from starter import InputError, RunStopped
from support import report

try:
    import fcntl
    import resource
except ImportError:  # Windows: no lock, and no number for the memory
    fcntl = resource = None

MAX_SKIPPED_STEPS = 5  # in a row, before the run stops
SAMPLES_EVERY = 10  # steps between the best and worst samples in TensorBoard
LOCKED = {}  # folder: its open lock file. The lock lasts as long as that is open.


def unlock():
    """Lets other processes into the folder of this process's run."""
    for file in LOCKED.values():
        file.close()
    LOCKED.clear()


def lock(run):
    """Raises InputError where another process is at work in the run's folder."""
    is_run = (run.folder / "settings.json").is_file()
    if run.folder in LOCKED or not (fcntl and run.is_first and is_run):
        return
    unlock()
    file = open(run.folder / ".lock", "ab")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise InputError(f"{run.folder} is in use by another process; wait until it ends, or do "
                         "not resume") from None
    LOCKED[run.folder] = file


def keep_source(run):
    """Puts starter.py into the run's folder. One that has changed since gets another name."""
    source = Path(starter.__file__).read_bytes()
    kept = run.folder / "starter.py"
    if kept.is_file() and kept.read_bytes() != source:
        kept = run.folder / f"starter_from_step_{run.state['step'] + 1}.py"
        print(f"resume: starter.py has changed since the run began; kept as {kept}")
    kept.write_bytes(source)


def peak_memory_gb():
    """Returns the most memory used so far: the GPU's where torch uses one, else this process's."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9 if resource else 0.0


def sample_text(problem, text, reward):
    """A sample for TensorBoard, indented so that nothing in it is taken for markup."""
    gold = problem.get("answer", problem.get("target", "none given"))
    return textwrap.indent(f"prompt: {problem['prompt']}\nresponse: {text}\nreward: {reward:g}\n"
                           f"expected answer: {gold}", "    ")


class Guards:
    """Called after each step with its metrics and (problems, texts, rewards, responses), and after
    each evaluation with its metrics and [(problem, text, reward)]. What must survive a resume is
    in run.state."""

    def __init__(self, run):
        self.run = run
        self.n_steps = 0  # in this process
        lock(run)
        if run.is_first:
            keep_source(run)
        if run.state["step"] == 0:
            lines = [f"    {name} = {value!r}" for name, value in run.settings.items()]
            run.log("add_text", "settings", "\n".join(lines), 0)  # comes after "samples"

    def __call__(self, step, metrics, samples):
        state, cfg = self.run.state, self.run.cfg
        if "solved" in metrics:
            self.log_evaluation(step, metrics, samples)
            signs = evaluation_signs(metrics, state["before"] or metrics, samples, step, cfg)
        else:
            self.log_step(step, metrics, samples)
            self.n_steps += 1
            minutes = (cfg.n_train_steps - step) * metrics["time/total"] / 60
            if self.n_steps == 2 and minutes > 1:  # the first one is slower
                print(f"about {minutes:.0f} min to go, without evaluations", flush=True)
            first = state.setdefault("first", dict(metrics))
            first["frac_zero_std"] = min(first["frac_zero_std"], metrics["frac_zero_std"])
            state["n_equal"] = (state.get("n_equal", 0) + 1) * (metrics["frac_zero_std"] == 1)
            signs = step_signs(metrics, first, samples, step, cfg, state["n_equal"])
        warned = state.setdefault("warned", [])
        for sign, text in signs.items():
            if sign not in warned or sign in ("forgotten", "collapse"):
                print(f"Warning: {text}", flush=True)
            warned += [sign] if sign not in warned else []
        if "solved" not in metrics and step in state["skipped"]:
            self.after_skipped_step(step, samples)

    def report(self, result, policy, ref_model, llm, tokenizer, problems):
        """After the run: how far the policy is from where it began, intervals, pictures."""
        report.report(result, policy, ref_model, llm, tokenizer, problems, self.run)
        unlock()

    def log_evaluation(self, step, metrics, samples):
        skills = [value for name, value in metrics.items() if name.startswith("retention_")]
        self.run.log("add_scalar", "0_headline/solved", metrics["solved"], step)
        if skills:
            self.run.log("add_scalar", "0_headline/other_skills", sum(skills) / len(skills), step)
        for i, sample in enumerate(samples[:3]):
            self.run.log("add_text", f"samples/held_out_{i}", sample_text(*sample), step)

    def log_step(self, step, metrics, samples):
        problems, texts, rewards, responses = samples
        log_probs = [value for response in responses for value in response.log_probs]
        log_prob = sum(log_probs) / len(log_probs)
        numbers = {"0_headline/reward": metrics["reward_mean"], "mem/peak_gb": peak_memory_gb(),
                   "0_headline/response_length": metrics["response_length"],
                   "debug/policy_logp_mean": log_prob}
        if "kl_per_token" in metrics:
            numbers |= {"0_headline/kl_per_token": metrics["kl_per_token"],
                        "debug/ref_logp_mean": log_prob - metrics["kl_k1"],
                        "debug/kl_mean": metrics["kl_k3"]}
        for tag, value in numbers.items():
            self.run.log("add_scalar", tag, value, step)
        if step == 1 or step % SAMPLES_EVERY == 0:
            for title, i in (("best", rewards.argmax().item()), ("worst", rewards.argmin().item())):
                problem = problems[i * len(problems) // len(texts)]
                self.run.log("add_text", f"samples/{title}",
                             sample_text(problem, texts[i], rewards[i].item()), step)

    def after_skipped_step(self, step, samples):
        """Keeps what the step was about to learn from. Raises RunStopped after several of them."""
        problems, texts, rewards, responses = samples
        rows = [{"prompt": problems[i * len(problems) // len(texts)]["prompt"], "text": texts[i],
                 "reward": rewards[i].item(), "ids": r.response_ids, "log_probs": r.log_probs}
                for i, r in enumerate(responses)]
        path = self.run.folder / f"skipped_step_{step}.json"
        if self.run.is_first:
            path.write_text(json.dumps({"step": step, "responses": rows}, indent=1), "utf-8")
            print(f"The responses of step {step} are kept in {path}", flush=True)
            for row in [row for row in rows if not math.isfinite(row["reward"])][:1]:
                print(f"The reward of {row['text']!r:.100} was {row['reward']}; return a number")
        if set(range(step - MAX_SKIPPED_STEPS + 1, step + 1)) <= set(self.run.state["skipped"]):
            raise RunStopped(f"{MAX_SKIPPED_STEPS} steps in a row had a loss or gradient that is "
                             "not finite; mend the reward or lower learning_rate")


def is_built_in(reward):
    """Whether the reward that says what is solved is starter.py's own."""
    return (reward if callable(reward) else reward[0][0]) is starter.reward_fn


def step_signs(metrics, first, samples, step, cfg, n_equal=0):
    """Metrics of a step and of the first one -> {sign: text} of what is wrong. n_equal: the number
    of steps up to this one in which all rewards of each group were equal."""
    problems, texts, rewards, _ = samples
    kl, ratio = metrics.get("kl_per_token", 0.1), metrics.get("ratio_mean", 1.0)
    learnt = metrics["reward_mean"] > first["reward_mean"] + 0.02
    all_equal = metrics["frac_zero_std"] == first["frac_zero_std"] == 1 and step > 1
    all_cut = metrics["truncated_frac"] == 1
    longer = metrics["response_length"] > 1.5 * first["response_length"]
    untagged = (is_built_in(cfg.reward) and not any("last_number" in p for p in problems)
                and not any("</answer>" in text for text in texts))
    return {sign: text for sign, wrong, text in (
        ("untagged", all_equal and untagged and not all_cut,
         "no response has its answer between <answer> and </answer>, where the reward looks for "
         "it; ask for these tags in the prompts, or add \"last_number\": true to each line of a "
         "JSONL file, which needs no tags, or give a reward of your own"),
        ("equal", all_equal and not untagged,
         "since the first step all rewards of each group are equal, which teaches nothing; look at "
         "the samples (TensorBoard, Text): the task may be too hard or too easy, or the reward the "
         "same for every response"),
        ("flat", n_equal == 5 and first["frac_zero_std"] < 1 and rewards.max() < 1,
         "for 5 steps all rewards of each group have been equal, none of them solved: nothing is "
         f"learnt; lower learning_rate = {cfg.learning_rate:g}, or take easier problems"),
        ("endless", all_cut and first["truncated_frac"] < 0.5,
         "hardly any response was cut at first, now all are: training does harm; lower "
         f"learning_rate = {cfg.learning_rate:g} first, for example to a tenth"),
        ("truncated", all_cut and first["truncated_frac"] >= 0.5 and not learnt,
         f"all responses were cut at max_new_tokens = {cfg.max_new_tokens}, none reached a stop "
         f"token {cfg.stop_token_ids}; raise max_new_tokens, or look into generation_config.json"),
        ("weights", ratio > 2 or ratio < 0.5,
         f"the mean of pi / old is {ratio:.2g}, not about 1: the policy has moved far within a "
         "step, or weights_of_tokens was not given the whole step"),
        ("no gradient", metrics["grad_norm"] == 0 and metrics["frac_zero_std"] < 1
         and not cfg.mask_truncated,
         "the gradient is 0 although rewards differ: something cuts it, such as a detach()"),
        ("infinite", math.isinf(kl),
         "KL is infinite: the reference forbids a token that the policy may draw"),
        ("drift", 0.2 < kl < math.inf,
         f"KL is {kl:.2f} nats per token, above 0.2: the policy drifts; raise kl_coef"),
        ("stuck", kl < 0.01 and not learnt and step > max(20, cfg.n_train_steps / 4),
         f"KL is {kl:.4f} nats per token, below 0.01, and the reward has not risen: nothing is "
         "learnt; lower kl_coef or raise learning_rate"),
        ("capped", metrics.get("kl_capped_frac", 0) > 0.1,
         "for over 10 % of the tokens pi / sampler is above kl_ratio_cap, or with clip_sound the "
         "reference far away; lower epochs_per_rollout or learning_rate"),
        ("length", longer and "kl_per_token" in metrics,
         "responses are 1.5 times as long as at first, so that KL per token can fall while KL per "
         "response rises; watch train/kl_per_sequence"),
    ) if wrong}


def evaluation_signs(metrics, first, samples, step, cfg):
    """Metrics of an evaluation and of the one before training -> {sign: text} of what is wrong."""
    before, now = first["solved"], metrics["solved"]
    collapsed = now < before - 0.1
    nearly = sum(0.5 <= reward < 1 for _, _, reward in samples) / len(samples)
    many_are_nearly = callable(cfg.reward) and nearly > max(0.2, now)
    is_number = math.isfinite(metrics["reward_mean"])
    unsolved = step > 0 and now == before == 0 and is_number and not is_built_in(cfg.reward)
    fallen = [f"{name.removeprefix('retention_')} from {first[name]:.0%} to {value:.0%}"
              for name, value in metrics.items()
              if name.startswith("retention_") and value < first[name] - 0.05]
    remedy = "raise kl_coef" if cfg.use_kl_penalty else "set use_kl_penalty = True"
    return {sign: text for sign, wrong, text in (
        ("collapse", collapsed,
         f"solved fell from {before:.0%} to {now:.0%}: training does harm; lower learning_rate = "
         f"{cfg.learning_rate:g} first, for example to a tenth"),
        ("forgotten", fallen and not collapsed,
         f"other skills are lost ({', '.join(fallen)}): lower learning_rate, or {remedy}"),
        ("nearly", many_are_nearly,
         f"{nearly:.0%} of the rewards are from 0.5 to below 1, and only 1 or more counts as "
         "solved; if something is taken off the reward of a solution, give its parts with weights, "
         "the solution first: reward = [(solves, 1.0), (is_short, 0.1)]"),
        ("not a number", not is_number,
         "a reward is nan or infinite, and a step with such a reward is skipped; mend the reward"),
        ("unsolved", unsolved and not many_are_nearly,
         "no response earned a reward of 1, which is what counts as solved: watch the reward "
         "instead, or let the reward return 1 for a solution"),
    ) if wrong}
