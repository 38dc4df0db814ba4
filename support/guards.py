"""Looks on while starter.py trains: locks the run's folder, logs samples and more numbers, warns of
signs of trouble, and ends the run after Ctrl-C. Nothing here enters a sample, a loss or a gradient.
"""

import math
import signal
import textwrap
from pathlib import Path

import torch

import starter
from support import ranks, report

try:
    import fcntl
except ImportError:  # Windows: no lock
    fcntl = None

MAX_SKIPPED_STEPS = 5  # in a row, before the run stops
LOCKS = []  # the open lock file of this process's run: the lock lasts as long as that is open
HANDLERS = {}  # number of a signal: what handled it before the run


def unlock():
    """Lets other processes into the folder of this process's run."""
    while LOCKS:
        LOCKS.pop().close()


def lock(run):
    """Raises InputError where another process is at work in the run's folder."""
    unlock()
    if ranks.RANK or not fcntl or not run.folder.is_dir():
        return
    file = open(run.folder / ".lock", "ab")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise starter.InputError(
            f"{run.folder} is in use by another process; wait until it ends, or do not resume"
        ) from None
    LOCKS.append(file)


def keep_source(run):
    """Puts starter.py into the run's folder. One that has changed since gets another name."""
    source = Path(starter.__file__).read_bytes()
    kept = run.folder / "starter.py"
    if kept.is_file() and kept.read_bytes() != source:
        kept = run.folder / f"starter_from_step_{run.state['step'] + 1}.py"
        print(f"resume: starter.py has changed since the run began; kept as {kept}")
    kept.write_bytes(source)


def set_handlers(handlers):
    """{number of a signal: handler} -> those before. Only the first thread may set them."""
    try:
        return {number: signal.signal(number, handler) for number, handler in handlers.items()}
    except ValueError:  # main() was called in another thread
        return {}


def put_handlers_back():
    if set_handlers(HANDLERS):
        HANDLERS.clear()


class Guards:
    """Called after each step with its metrics and (problems, texts, rewards, responses), and after
    each evaluation with its metrics and [(problem, text, reward)]. What must survive a resume is
    in run.state."""

    def __init__(self, run):
        self.run = run
        self.signal = 0  # the number of the first one that this process got
        lock(run)
        if run.writes_files:
            keep_source(run)
            lines = [f"    {name} = {value!r}" for name, value in vars(run.cfg).items()]
            run.writer.add_text("settings", "\n".join(lines), run.state["step"])
        put_handlers_back()  # those of a run that failed
        HANDLERS.update(set_handlers({signal.SIGINT: self.stop, signal.SIGTERM: self.stop}))

    def stop(self, number, frame):
        """Handles a signal. The first one in training ends the run after its step. A second one,
        and one before the first evaluation has ended or after training, act at once."""
        while frame is not None and frame.f_code is not starter.train.__code__:
            frame = frame.f_back  # whoever called
        if frame is None or self.signal or self.run.state["before"] is None:
            put_handlers_back()
            signal.raise_signal(number)
            return
        self.signal = number
        name = signal.Signals(number).name
        print(f"\n{name}: stopping after this step; again: now", flush=True)

    def __call__(self, step, metrics, samples):
        state, cfg = self.run.state, self.run.cfg
        if "solved" in metrics:
            self.log_evaluation(step, metrics, samples)
            signs = evaluation_signs(step, metrics, state, cfg)
        else:
            self.run.stop = max(ranks.gather([self.signal]))  # all processes end together
            update_state(step, metrics, samples, state)
            self.log_step(step, metrics)
            signs = step_signs(step, metrics, samples, state, cfg)
        warned = state.setdefault("warned", [])
        for sign, text in signs.items():
            if sign not in warned:
                print(f"Warning: {text}", flush=True)
                warned.append(sign)

    def log_evaluation(self, step, metrics, samples):
        numbers = {"0_headline/solved": metrics["solved"]}
        skills = [value for name, value in metrics.items() if name.startswith("retention_")]
        if skills:
            numbers["0_headline/other_skills"] = sum(skills) / len(skills)
        self.run.log("eval", numbers, step)
        for i, (problem, text, reward) in enumerate(samples[:3]):
            gold = problem.get("answer", problem.get("target", "none given"))
            sample = f"prompt: {problem['prompt']}\nresponse: {text}\nreward: {reward:g}\n"
            if self.run.writes_files:  # indented, so that nothing in it is taken for markup
                sample = textwrap.indent(f"{sample}expected answer: {gold}", "    ")
                self.run.writer.add_text(f"samples/held_out_{i}", sample, step)

    def log_step(self, step, metrics):
        length, seconds = metrics["response_length"], metrics["time/total"]
        numbers = {
            "0_headline/reward": metrics["reward_mean"],
            "0_headline/response_length": length,
            "tokens_per_s": length * self.run.cfg.rollout_batch_size / seconds,
            "skipped_steps": len(self.run.state["skipped"]),
        }
        if torch.cuda.is_initialized():
            numbers["mem/peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        if "kl_per_token" in metrics:
            numbers["0_headline/kl_per_token"] = metrics["kl_per_token"]
            numbers["kl_per_sequence"] = metrics["kl_per_token"] * length
            numbers["adaptive_kl/raw_kl"] = metrics["kl_penalty"]
        self.run.log("train", numbers, step)

    def report(self, result, policy, ref_model, llm, tokenizer, problems):
        """After the run: how far the policy is from where it began, intervals, pictures."""
        run, cfg = self.run, self.run.cfg
        put_handlers_back()
        report.report(result, policy, ref_model, llm, tokenizer, problems, run)
        unlock()
        if run.stop and run.state["step"] < cfg.n_train_steps:
            print(
                f"stopped after step {run.state['step']} of {cfg.n_train_steps}; to go on, add "
                f"--resume {run.folder}, or resume={str(run.folder)!r} in a script"
            )
            raise SystemExit(128 + run.stop)


def update_state(step, metrics, samples, state):
    """Keeps what warnings and the report need of earlier steps."""
    _, texts, rewards, _ = samples
    state["seconds"] = state.get("seconds", 0.0) + metrics["time/total"]
    state.setdefault("first_step", dict(metrics))
    state["best_reward"] = max(state.get("best_reward", 0.0), rewards.max().item())
    state["n_equal"] = state.get("n_equal", 0) + 1  # steps in a row that teach nothing
    if metrics["frac_zero_std"] < 1:
        state["n_equal"] = 0
    skipped = state.setdefault("skipped", [])
    if math.isfinite(metrics["loss"] + metrics["grad_norm"]):
        return
    if math.isfinite(metrics["loss"]) and state["scaler"].get("scale", 0.0) >= 1:
        return  # an overflow of fp16: the next loss is scaled less
    skipped.append(step)
    for text, reward in zip(texts, rewards.tolist()):
        if not math.isfinite(reward):
            print(f"The reward of {text!r:.100} was {reward}; return a number", flush=True)
            break
    if skipped[-MAX_SKIPPED_STEPS:] == list(range(step - MAX_SKIPPED_STEPS + 1, step + 1)):
        raise starter.RunStopped(
            f"{MAX_SKIPPED_STEPS} steps in a row had a loss or gradient that is not finite; mend "
            "the reward or lower learning_rate"
        )


def step_signs(step, metrics, samples, state, cfg):
    """Returns {sign: text} of what is wrong after a step."""
    problems, texts, rewards, _ = samples
    first, n_equal = state["first_step"], state["n_equal"]
    kl = metrics.get("kl_per_token", 0.1)
    reference_error = math.sqrt(2 * metrics.get("kl_k2", 0.0))  # k2 is d^2 / 2
    has_learnt = metrics["reward_mean"] > first["reward_mean"] + 0.02
    all_cut = metrics["truncated_frac"] == 1
    asks_for_tags = cfg.reward is starter.reward_fn and "last_number" not in problems[0]
    signs = {}
    if metrics["grad_norm"] == 0 and n_equal:
        signs["no gradient"] = (
            f"step {step}: all rewards of each group are equal, so that it has no gradient: the "
            "weights stay as they are. If that goes on, take easier or harder problems"
        )
    elif metrics["grad_norm"] == 0:
        signs["cut gradient"] = (
            f"step {step}: the gradient is 0 although rewards differ: the weights stay as they "
            "are; something cuts it, such as a detach(), or mask_truncated"
        )
    if all_cut and not has_learnt:
        signs["truncated"] = (
            f"all responses were cut at max_new_tokens = {cfg.max_new_tokens}, none reached a stop "
            f"token {cfg.stop_token_ids}; raise max_new_tokens, or look into generation_config.json"
            f"; if few were cut at first, lower learning_rate = {cfg.learning_rate:g}"
        )
    elif n_equal > 1 and asks_for_tags and "</answer>" not in "".join(texts):
        signs["untagged"] = (
            "no response has its answer between <answer> and </answer>, where the reward looks for "
            'it; ask for these tags in the prompts, or add "last_number": true to each line of a '
            "JSONL file, which needs no tags, or give a reward of your own"
        )
    elif n_equal == 5 and rewards.max() < 1:
        signs["flat"] = (
            "for 5 steps all rewards of each group have been equal, none of them solved; look at "
            "the samples (TensorBoard, Text): the task may be too hard, the reward the same for "
            f"every response, or learning_rate = {cfg.learning_rate:g} too high"
        )
    if step == cfg.epochs_per_rollout == 1 and reference_error > (
        1e-4 if cfg.precision == "float32" else 0.5
    ):
        signs["reference"] = (
            f"policy and reference differ by {reference_error:.2g} nats before training; they are "
            "the same model unless you have changed that on purpose"
        )
    if kl > 0.2:
        signs["drift"] = f"KL is {kl:.2f} nats per token: the policy drifts; raise kl_coef"
    return signs


def evaluation_signs(step, metrics, state, cfg):
    """Returns {sign: text} of what is wrong at an evaluation."""
    first = state["before"] or metrics
    before, now = first["solved"], metrics["solved"]
    lost = [
        f"{name.removeprefix('retention_')} from {first[name]:.0%} to {value:.0%}"
        for name, value in metrics.items()
        if name.startswith("retention_") and value < first[name] - 0.05
    ]
    signs = {}
    if now < before - 0.1:
        signs["collapse"] = (
            f"solved fell from {before:.0%} to {now:.0%}: training does harm; lower learning_rate "
            f"= {cfg.learning_rate:g} first, for example to a tenth"
        )
    elif lost:
        remedy = "raise kl_coef" if cfg.use_kl_penalty else "set use_kl_penalty = True"
        signs["forgotten"] = (
            f"other skills are lost ({', '.join(lost)}): lower learning_rate, or {remedy}"
        )
    is_own = cfg.reward is not starter.reward_fn
    if is_own and step > 0 and now == before == 0 and state["best_reward"] < 1:
        signs["unsolved"] = (
            "no response has earned a reward of 1, which is what counts as solved: watch the "
            "reward instead, or let it return 1 for a solution"
        )
    return signs
