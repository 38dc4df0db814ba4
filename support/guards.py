"""Looks on while starter.py trains: locks the run's folder, logs samples and more numbers, warns of
signs of trouble, and ends the run after Ctrl-C. Nothing here enters a sample, a loss or a gradient.
"""

import contextlib
import inspect
import math
import os
import shlex
import shutil
import signal
import sys
import threading
from pathlib import Path
from statistics import fmean

import torch

import starter
from support import agents, edits, fast, gpu, lora, ranks, report, resumed, rules, steps
from support.safely import safely

# What this process's run holds: the open lock file, since the lock lasts as long as that is open,
# and the signal handlers, which close() puts back
HELD = contextlib.ExitStack()
HANDLERS = contextlib.ExitStack()

# Settings that are read before the first step alone: what to change in a step instead
READ_ONCE = {
    "kl_coef": "kl_coef in train()",
    "learning_rate": "learning_rate_schedule",
    "weight_decay": "optimizer.param_groups",
    "rollout_batch_size": "n_prompts in train()",
}


OFTEN = 300  # interruptions a second; 40 on a quiet machine, 1,900 beside a busy program


def interruptions():
    """Returns how often a core was taken from this process. On Windows, which does not say, 0."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def close():
    """Gives back what an earlier run of this process held. Only the main thread may do so with
    signal handlers; in another one they stay until then."""
    HELD.close()
    if threading.current_thread() is threading.main_thread():
        HANDLERS.close()


def lock(run):
    """Raises InputError where another process is at work in the run's folder. Whatever an earlier
    run of this process held is given back."""
    close()
    if ranks.RANK or not run.folder.is_dir():
        return
    try:
        import fcntl
    except ImportError:  # Windows: no lock
        return
    file = HELD.enter_context(open(run.folder / ".lock", "ab"))
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise starter.InputError(
            f"{run.folder} is in use by another process; wait until it ends, or do not resume"
        ) from None


def program_of(cfg):
    """Returns the files that hold what runs: starter.py, the script that was started, and those of
    the functions that it has given to main()."""
    files = {starter.__file__, os.path.abspath(sys.argv[0])}
    for given in (cfg.task, cfg.reward, cfg.agent):
        with contextlib.suppress(TypeError):  # no function, such as the name of a task
            files.add(inspect.getsourcefile(inspect.unwrap(given)))
    return [file for file in files if str(file).endswith(".py") and Path(file).is_file()]


def keep_program(run):
    """Copies the files of the program to the run's folder, and says which of them are others than
    those with which the run began or was resumed before."""
    for file in program_of(run.cfg):
        stem = Path(file).stem
        before = max(run.folder.glob(f"{stem}_from_step_*.py"), key=os.path.getmtime, default=None)
        if before and before.read_bytes() != Path(file).read_bytes():
            print(f"resume: {stem}.py is another one than {before.name}")
        shutil.copyfile(file, run.folder / f"{stem}_from_step_{run.state['step'] + 1}.py")


class Guards:
    """Called after each step and each evaluation with what they made, of which it changes nothing.
    What must survive a resume is in run.state."""

    def __init__(self, run, policy, ref_model, tokenizer, optimizer):
        self.run = run
        self.policy = policy
        self.ref_model = ref_model
        self.optimizer = optimizer
        self.signal = 0  # the number of the first one that this process got
        self.ended = set()  # what looked on until it failed
        self.said = []  # the signs of the last evaluation that were warned of
        self.settings = {name: getattr(run.cfg, name) for name in READ_ONCE}
        self.interruptions = interruptions()
        self.n_interrupted = 0  # steps one after the other
        lock(run)
        if run.writes_files:
            self.look("the copy of the program", keep_program, run)
        if threading.current_thread() is threading.main_thread():  # others may not
            for number in (signal.SIGINT, signal.SIGTERM):
                before = signal.signal(number, self.stop)
                HANDLERS.callback(signal.signal, number, before)
        self.page = steps.Page(run, policy, ref_model, tokenizer)
        self.look("state", resumed.say_what_is_new, run, policy, ref_model, optimizer)
        self.edits = edits.EditsInStep(not fast.COMPILED)  # which a trace would disturb

    def look(self, what, function, *arguments):
        """Calls what looks on, until it fails."""
        if what not in self.ended and not safely(what, function, *arguments):
            self.ended.add(what)

    def stop(self, number, frame):
        """Handles a signal. The first one in training ends the run after its step. A second one,
        and one before the first evaluation has ended or after training, act at once."""
        while frame is not None and frame.f_code is not starter.train.__code__:
            frame = frame.f_back  # whoever called
        if frame is None or self.signal or self.run.state["before"] is None:
            if self.signal:
                print("\nending now: what was learnt since the last checkpoint is lost")
            close()
            signal.raise_signal(number)
            return
        self.signal = number
        print(f"\n{signal.Signals(number).name}: stopping after this step; again: now")

    def after_step(self, step, metrics, asked, responses, texts, rewards, microbatches):
        """Returns whether a signal asks to end the run. All processes come here together."""
        state = self.run.state
        self.look("the list of edits without a part", self.edits.end)
        step_data = asked, responses, rewards, microbatches
        self.look("steps.html", self.page.after_step, step, metrics, *step_data)
        self.look("the count of steps without effect", update_state, metrics, state)
        self.look("state", resumed.keep, self.run, self.ref_model)
        self.look("the log of more numbers", self.log_step, step, metrics, responses, microbatches)
        signs = step_signs, step, metrics, asked, texts, state, self.run.cfg
        self.look("the warnings of steps", self.warn, *signs)
        self.look("the settings", self.say_what_was_changed, step)
        self.look("the count of interruptions", self.note_interruptions, metrics["time/total"])
        number = max(ranks.gather([self.signal]))
        if number:  # 0 would undo a signal that came while they gathered; the next step sees it
            self.signal = number
        return number > 0

    def after_evaluation(self, step, metrics, samples):
        self.look("the log of evaluations", self.log_evaluation, step, metrics, samples)
        self.said.clear()
        signs = evaluation_signs, metrics, self.run.state, step, self.run.cfg
        self.look("the warnings of evaluations", self.warn, *signs)

    def say_what_was_changed(self, step):
        """Says which settings an edit has changed where they are not read again: once each."""
        for name, before in self.settings.items():
            now = getattr(self.run.cfg, name)
            if now != before:
                self.settings[name] = now
                print(
                    f"Warning: step {step}: cfg.{name} was changed to {now}, without effect, since "
                    f"it was read before; change {READ_ONCE[name]}"
                )

    def note_interruptions(self, seconds):
        """Threads of torch wait for each other many times a step, so that one whose core is taken
        by another program stops all of them."""
        before, self.interruptions = self.interruptions, interruptions()
        is_often = self.interruptions - before > OFTEN * seconds
        self.n_interrupted = self.n_interrupted + 1 if is_often else 0
        n_threads = torch.get_num_threads()
        if self.n_interrupted == 5 and n_threads > 1 and self.run.cfg.device.type == "cpu":
            print(
                f"Warning: other programs take the cores of torch's {n_threads} threads, which "
                "wait for each other; with a small model OMP_NUM_THREADS=1 may take half the time "
                "(docs/performance.md), with other bits"
            )

    def warn(self, signs_of, *arguments):
        """Prints each warning once in a run."""
        warned = self.run.state.setdefault("warned", [])
        for sign, text in signs_of(*arguments):
            if sign not in warned:
                print(f"Warning: {text}")
                warned.append(sign)
                self.said.append(sign)

    def warn_at_the_end(self, metrics):
        """Prints again what was warned of before, and is still so."""
        state = self.run.state
        for sign, text in evaluation_signs(metrics, state, state["step"], self.run.cfg):
            if sign not in self.said:
                print(f"Warning: {text}")

    def log_evaluation(self, step, metrics, samples):
        numbers = {"0_headline/solved": metrics["solved"]}
        skills = [value for name, value in metrics.items() if name.startswith("retention_")]
        if skills:
            numbers["0_headline/other_skills"] = sum(skills) / len(skills)
        self.run.log("eval", numbers, step)
        problem, text, reward = samples[0]
        prompt = agents.messages_of(problem["prompt"])[-1]["content"]
        print(f"Sample: {prompt[-100:]!r} -> {text!r:.300}, reward {reward:g}")

    def log_step(self, step, metrics, responses, microbatches):
        run = self.run
        numbers = {"0_headline/reward": metrics["reward_mean"]}
        if run.cfg.agent:
            numbers["turns"] = fmean(map(agents.turns_of, responses))
        if torch.cuda.is_initialized():
            numbers["mem/peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
            numbers |= gpu.share_of_peak(self.policy, metrics, microbatches, run.cfg)
        if "kl_per_token" in metrics:
            name = "kl_to_teacher" if run.cfg.ref_model_id else "kl_per_token"
            numbers[f"0_headline/{name}"] = metrics["kl_per_token"]
            numbers["kl_per_sequence"] = metrics["kl_per_token"] * metrics["response_length"]
        run.log("train", numbers, step)

    def report(self, result, llm, problems):
        """After the run, whose model is on the disk: how far the policy is from where it began,
        intervals, pictures."""
        run = self.run
        if run.cfg.lora_rank:
            safely("adapters/", lora.save_adapters, self.policy, run.folder / "adapters")
        if hasattr(self.optimizer, "state"):  # room for a second model
            self.optimizer.state.clear()
        gpu.end_compiling(*filter(None, (self.policy, self.ref_model)))
        report.report(result, self.policy, self.ref_model, llm, problems, run)
        self.look("the warnings at the end", self.warn_at_the_end, result["after"])
        edits.restore()
        close()
        if self.signal and run.state["step"] < run.cfg.n_train_steps:
            again = f"main(..., resume={str(run.folder)!r})"  # in the script
            if rules.is_program():
                again = f"{shlex.join(['python', *sys.argv])} --resume {run.folder}"
            print(
                f"stopped after step {run.state['step']} of {run.cfg.n_train_steps}; "
                f"to go on: {again}"
            )
            raise SystemExit(128 + self.signal)


def count_in_a_row(state, name, happens):
    """Counts steps one after the other in which something happens."""
    state[name] = state.get(name, 0) + 1 if happens else 0


def update_state(metrics, state):
    """Keeps what warnings and the report need of earlier steps."""
    count_in_a_row(state, "n_equal", metrics["frac_zero_std"] == 1)  # which teach nothing
    state["kl_per_token"] = metrics.get("kl_per_token")
    is_finite = math.isfinite(metrics["loss"] + metrics["grad_norm"])
    # An overflow of fp16 is none of those that are skipped: the next loss is scaled less
    is_scaled = math.isfinite(metrics["loss"]) and state["scaler"].get("scale", 0.0) >= 1
    count_in_a_row(state, "n_skipped", not (is_finite or is_scaled))
    if state["n_skipped"] >= 5:  # more, where a run goes on after that
        raise starter.RunStopped(
            "5 steps in a row had a loss or gradient that is not finite; mend a reward of nan or "
            "inf, or lower learning_rate"
        )


def step_signs(step, metrics, problems, texts, state, cfg):
    """Yields (sign, text) of what is wrong after a step."""
    n_equal = state["n_equal"]
    has_shipped_reward = cfg.reward is starter.reward_fn and edits.is_shipped("reward_fn")
    asks_for_tags = has_shipped_reward and "last_number" not in problems[0]
    if step == 1 and cfg.engine == "transformers":
        try:  # as if step 1 had been exact
            starter.check_sampler(metrics["sampler_logprob_diff"], step, 0.0, cfg)
        except starter.RunStopped as error:
            yield "sampler", str(error)
    unscored = metrics.get("unscored_frac", 0.0)
    if 0.5 <= unscored < 1:
        yield (
            "mostly unscored",
            f"step {step}: the reward returned None or nan for {unscored:.0%} of the responses, "
            "which leave their groups; if that is not meant, look for a missing return",
        )
    if unscored == 1:
        yield (
            "unscored",
            f"step {step}: the reward scored none of the {cfg.rollout_batch_size} responses: it "
            "returned None or nan for each, so that nothing is learnt",
        )
    elif metrics["grad_norm"] == 0 and n_equal == 0:
        yield (
            "cut gradient",
            f"step {step}: the gradient is 0 although rewards differ, so the weights stay as they "
            "are; something cuts it, such as a detach(), or mask_truncated",
        )
    if metrics["truncated_frac"] == 1:
        yield (
            "truncated",
            f"step {step}: all responses were cut at max_new_tokens = {cfg.max_new_tokens}, none "
            f"reached a stop token {cfg.stop_token_ids}; raise max_new_tokens, or look into "
            "generation_config.json; if few were cut at first, lower learning_rate",
        )
    elif n_equal > 1 and asks_for_tags and "</answer>" not in "".join(texts):
        yield (
            "untagged",
            "no response has its answer between <answer> and </answer>, where the reward looks for "
            'it; ask for these tags in the prompts, or add "last_number": true to each line of a '
            "JSONL file, which needs no tags, or give a reward of your own",
        )
    elif n_equal == 5 and cfg.reward is not None:
        yield (
            "flat",
            "for 5 steps all rewards of each group have been equal, so that nothing was learnt; "
            "look at the samples in steps.html: the task may be too hard or too easy, the "
            "reward the same for every response, or learning_rate too high",
        )


def evaluation_signs(metrics, state, step, cfg):
    """Yields (sign, text) of what is wrong at an evaluation."""
    first = state["before"] or metrics
    rise = metrics["solved"] - first["solved"]
    is_held = step >= 30 and rise < 0.2 and metrics["solved"] < 0.5 and cfg.use_kl_penalty
    kl = state.get("kl_per_token")  # there is none before the first step
    if is_held and not cfg.ref_model_id and kl is not None and kl < 0.2:
        yield (
            "held",
            f"after {step} steps {metrics['solved']:.0%} are solved, and the policy is only "
            f"{kl:.2g} nats per token from where it started: the KL penalty may "
            f"hold it there; lower kl_coef = {cfg.kl_coef:g}, for example to a tenth",
        )
    lost = [
        f"{name.removeprefix('retention_')} from {first[name]:.0%} to {value:.0%}"
        for name, value in metrics.items()
        if name.startswith("retention_") and value < first[name] - 0.05
    ]
    if metrics["solved"] < first["solved"] - 0.1:
        yield (
            "collapse",
            f"solved fell from {first['solved']:.0%} to {metrics['solved']:.0%}: training does "
            "harm; lower learning_rate first, for example to a tenth",
        )
    elif lost:
        remedy = "raise kl_coef" if cfg.use_kl_penalty else "set use_kl_penalty = True"
        if metrics["solved"] == 0:
            remedy = "look at what the reward rewards: nothing is solved"
        yield (
            "forgotten",
            f"other skills are lost ({', '.join(lost)}): lower learning_rate, or {remedy}",
        )
