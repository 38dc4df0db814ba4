"""What callers get wrong: each mistake costs one sentence and exit code 1, and harms no file.

A row of a table below is what is changed in a run that works, and the sentence that must come.
"""
import hashlib
import importlib.util
import json
import math
import os
import random
import re
import shutil
import sys
import time
from functools import partial
from pathlib import Path

import numpy
import pytest
import torch
from conftest import save_checkpoint, settings
from forked import REPOSITORY, import_once, in_new_process, run_all, run_here

import starter

HAS_VLLM = importlib.util.find_spec("vllm") is not None
HAS_SUPPORT = (REPOSITORY / "support" / "fast.py").is_file()


def with_kl(**changes):
    return dict(use_kl_penalty=True, kl_coef=0.1) | changes


def raises_two_lines(text, problem):
    raise ValueError("two\nlines")


def raises_in_the_middle(text, problem):
    """Right in the trial before the run, wrong afterwards."""
    return 1.0 if text == "<answer>1</answer>" else 1 / 0


def misses_the_time(text, problem):
    time.sleep(60)


FILE = dict(task="train.jsonl")
RESUME = dict(resume=True, n_train_steps=2)
NO_FILE = r"is not a file that can be read; give the path of a JSONL file"
NO_RUN = r"there is no run that can be read in .*; use the folder of one, or resume = False"
WHOLE = r"must be a whole number from {} to 10\*\*9"
NEEDS = ("must have a text or a list of chat messages under 'prompt', and a text or a number "
         "under 'answer'; mend or delete it")
BAD_LINES = [
    ("bad_line.jsonl", r"line 17 is not JSON \(Expecting value: .*\); mend or delete that line"),
    ("no_answer.jsonl", f"line 17 {NEEDS}"),
    ("list.jsonl", f"line 17 {NEEDS}"),
    ("yes.jsonl", f"line 17 {NEEDS}"),
    ("deep.jsonl", r"line 17 is not JSON \(.*recursion.*\); mend"),
    ("binary.jsonl", r"line 1 is not JSON \(.*\); mend"),
    ("surrogate.jsonl", r"line 17 is not JSON \(.*surrogates not allowed\); mend"),
    ("empty.jsonl", r"has no lines; each must be a JSON object with 'prompt' and 'answer'"),
]

# Found by the guards of support/ before a model is loaded: nothing is printed on stdout.
SETTINGS = [
    (dict(grop_size=8), r"grop_size is not a parameter of main\(\); did you mean 'group_size'\?"),
    (dict(model_id=3), r"model_id = 3 must be 'tiny', a checkpoint folder or a Hugging Face name; "
                       "use for example 'tiny'"),
    (dict(model_id=""), r"model_id = '' must be 'tiny', a checkpoint folder"),
    (dict(model_id="./nowhere"), r"model_id = './nowhere' is not a folder; give a checkpoint"),
    (dict(model_id=Path("nowhere/model")), r"model_id = 'nowhere/model' is not a folder; give"),
    (dict(model_id="tinny"), r"model_id = 'tinny' is not a folder; .*did you mean 'tiny'\?"),
    (dict(model_id="x" * 5000), r"model_id = 'xxx.*\.\.\. is not a folder; give"),
    (dict(model_id="a\0b"), r"model_id = 'a\\x00b' is not a folder; give"),
    (dict(model_id="train.jsonl"), r"model_id = 'train.jsonl' is not a folder; give"),
    (dict(model_id="empty"), r"model_id = 'empty' is not a checkpoint: config.json and "
                             r"\*.safetensors are not there; give a folder written by"),
    (dict(model_id="no_config"), r"model_id = 'no_config' is not a checkpoint: .*; give"),
    (dict(model_id="no_weights"), r"model_id = 'no_weights' is not a checkpoint: .*; give"),
    (dict(task="chess"), r"task = 'chess' must be one of 'countdown', .*; use for example"),
    (dict(task="countdwon"), r"task = 'countdwon' must be .*; did you mean 'countdown'\?"),
    (dict(task=["countdown"]), r"task = \['countdown'\] must be .*; did you mean 'countdown'\?"),
    (dict(task=lambda cfg: 3), r"task = '<lambda>' returned int; it must return two lists"),
    (dict(task=lambda cfg: ([], [])), r"task = .* gave no training problems; give more different"),
    (dict(task=lambda cfg: ([{"question": "?"}],) * 2), r"task = .* gave a training problem "
                                                        "without a 'prompt'; each problem must"),
    (dict(train_file="train.jsonl"), r"train_file is not a parameter of main\(\); did you mean"),
    (dict(eval_file="train.jsonl"), r"eval_file = 'train.jsonl' is not read by task = "
                                    "'countdown_small'; give the path of a .jsonl file as task, "),
    (dict(task="missing.jsonl"), r"task = 'missing.jsonl' " + NO_FILE),
    (dict(task=3), r"task = 3 must be one of 'countdown', 'countdown_small', 'addition', the path "
                   "of a .jsonl file, or a function; use for example 'countdown'"),
    (dict(task="y" * 300 + ".jsonl"), r"task = 'yyy.* " + NO_FILE),
    (dict(task="folder.jsonl"), r"task = 'folder.jsonl' " + NO_FILE),
    (FILE | dict(eval_file="missing.jsonl"), r"eval_file = 'missing.jsonl' " + NO_FILE),
    (FILE | dict(eval_file=True), r"eval_file = True must be None or the path of a JSONL file"),
    (FILE | dict(eval_file=""), r"eval_file = '' must be None or the path of a JSONL file"),
    *((FILE | {name: file}, file + " " + message)
      for name in ("task", "eval_file") for file, message in BAD_LINES),
    (dict(task="one.jsonl"), r"task = 'one.jsonl' gave no (training|held-out) problems; "
                             "give more different prompts, or an eval_file"),
    (dict(dataset=3), r"dataset = 3 must be None or a name on the Hugging Face hub such as "),
    (FILE | dict(dataset="openai/gsm8k"), r"task = 'train.jsonl' and dataset = 'openai/gsm8k' are "
                                          "both given; leave one of them out"),
    (dict(reward=[]), r"reward = \[\] must be a function .*, or a list of \(function, weight\)"),
    (dict(reward=[(len, "1")]), r"reward = .* must be a function"),
    (dict(reward=[len]), r"reward = .* must be a function"),
    (dict(mask_truncated=1), r"mask_truncated = 1 must be True or False; use for example False"),
    (dict(enable_thinking="yes"), r"enable_thinking = 'yes' must be True or False"),
    (dict(run_name="a/b"), r"run_name = 'a/b' must be None or a name of letters, digits and "),
    (dict(resume_from=3), r"resume_from = 3 must be None, a checkpoint or the folder of a run"),
    (dict(resume_from="train.jsonl"), r"'train.jsonl' is not a checkpoint that can be read; give "),
    (dict(resume_from="empty"), r"resume_from = 'empty' has no checkpoint; give the folder of a run"
                                " that has saved one"),
    (dict(resume=True, resume_from="runs"), r"resume and resume_from are both given; resume goes "
                                            "on with a run, resume_from begins a new one"),
    (dict(n_eval_problems=5000), r"n_eval_problems = 5000: only \d+ different Countdown "
                                  r"problems were found; use n_eval_problems = \d+ or fewer"),
    (dict(reward="exact"), r"reward = 'exact' must be a function \(response_text, problem\) -> "
                           r"number, or a list of \(function, weight\); use reward_fn"),
    (dict(reward=None), r"reward = None must be a function"),
    (dict(seed=-1), r"seed = -1 " + WHOLE.format(0)),
    (dict(seed=0.5), r"seed = 0.5 " + WHOLE.format(0)),
    (dict(seed=True), r"seed = True " + WHOLE.format(0)),
    (dict(seed=2**31), r"seed = 2147483648 " + WHOLE.format(0)),
    (dict(device="tpu"), r"device = 'tpu' must be 'auto', 'cpu', 'mps', 'cuda' or 'cuda:N'; "),
    (dict(device="cdua"), r"device = 'cdua' must be .*; did you mean 'cuda'\?"),
    (dict(device=0), r"device = 0 must be 'auto', "),
    (dict(device="cuda:99"), r"device = 'cuda:99' needs a CUDA GPU of that number and there are "
                             r"\d+ here; use device = 'cpu'"),
    (dict(engine="sglang"), r"engine = 'sglang' must be one of 'auto', 'vllm', 'transformers'; "),
    (dict(engine="vlm"), r"engine = 'vlm' must be .*; did you mean 'vllm'\?"),
    (dict(engine=torch.zeros(2)), r"engine = .* must be one of"),
    (dict(n_train_steps=0), r"n_train_steps = 0 " + WHOLE.format(1)),
    (dict(n_train_steps="80"), r"n_train_steps = '80' " + WHOLE.format(1)),
    (dict(n_train_steps=math.inf), r"n_train_steps = inf " + WHOLE.format(1)),
    (dict(n_train_steps=10**400), r"n_train_steps = 1000+\.\.\. " + WHOLE.format(1)),
    (dict(rollout_batch_size=100, group_size=8),
     r"rollout_batch_size = 100 is not a multiple of group_size = 8; use 96 or 104"),
    (dict(rollout_batch_size=4, group_size=8),
     r"rollout_batch_size = 4 is not a multiple of group_size = 8; use 8"),
    (dict(rollout_batch_size=1), r"rollout_batch_size = 1 " + WHOLE.format(2)),
    (dict(group_size=1), r"group_size = 1 " + WHOLE.format(2)),
    (dict(group_size=4.0), r"group_size = 4.0 " + WHOLE.format(2)),
    (dict(group_size=None), r"group_size = None " + WHOLE.format(2)),
    (dict(max_new_tokens=0), r"max_new_tokens = 0 " + WHOLE.format(1)),
    (dict(temperature=0), r"temperature = 0 must be a number from 0.01 to 10; use for example"),
    (dict(temperature=math.nan), r"temperature = nan must be a number"),
    (dict(temperature="1"), r"temperature = '1' must be a number"),
    (dict(temperature=torch.ones(2)), r"temperature = \[1.0, 1.0\] must be a number"),
    (dict(gpu_mem_util=4), r"gpu_mem_util = 4 must be a number from 0.05 to 0.95; use for"),
    (dict(normalize_by_std=1), r"normalize_by_std = 1 must be True or False"),
    (dict(loss_average="mean"), r"loss_average = 'mean' must be one of 'grpo', 'dapo', 'dr_grpo'"),
    (dict(loss_average="drgrpo"), r"loss_average = 'drgrpo' .*; did you mean 'dr_grpo'\?"),
    (dict(clip_range=-0.1), r"clip_range = -0.1 must be a number from 0 to 0.99, or a pair"),
    (dict(clip_range=1), r"clip_range = 1 must be a number from 0 to 0.99, or a pair"),
    (dict(clip_range=(0.2, "0.3")), r"clip_range = \(0.2, '0.3'\) must be a number"),
    (dict(clip_range=(0.1, 0.2, 0.3)), r"clip_range = \(0.1, 0.2, 0.3\) must be a number"),
    (dict(importance_cap=0.5), r"importance_cap = 0.5 must be None or a number of at least 1"),
    (dict(importance_cap=math.inf), r"importance_cap = inf must be None or a number"),
    (dict(epochs_per_rollout=0), r"epochs_per_rollout = 0 " + WHOLE.format(1)),
    (dict(use_kl_penalty="yes"), r"use_kl_penalty = 'yes' must be True or False"),
    (dict(use_kl_penalty=1), r"use_kl_penalty = 1 must be True or False"),
    (with_kl(kl_coef=-0.1), r"kl_coef = -0.1 must be a number of at least 0"),
    (with_kl(kl_coef=math.nan), r"kl_coef = nan must be a number of at least 0"),
    (with_kl(kl_coef=0), r"kl_coef = 0 with use_kl_penalty = True penalises nothing; use a number "
                         "above 0, or use_kl_penalty = False"),
    (dict(kl_coef=0.1), r"kl_coef = 0.1 changes nothing while the KL penalty is off; set "
                        "use_kl_penalty = True, or leave it out"),
    (dict(kl_target=0.2), r"kl_target = 0.2 changes nothing while the KL penalty is off; set"),
    (with_kl(kl_estimator="k4"), r"kl_estimator = 'k4' must be one of 'k1', 'k2', 'k3', 'exact'"),
    (with_kl(kl_estimator="exactt"), r"kl_estimator = 'exactt' .*; did you mean 'exact'\?"),
    (with_kl(kl_gradient="revers"), r"kl_gradient = 'revers' must .*; did you mean 'reverse'\?"),
    (with_kl(kl_in="rewards"), r"kl_in = 'rewards' must .*; did you mean 'reward'\?"),
    *((with_kl(kl_estimator=name, kl_in="reward"),
       rf"kl_estimator = '{name}' with kl_in = 'reward' does not see the sign .*; use "
       "kl_estimator = 'k1', or reproduce_paper = True") for name in ("k2", "k3", "exact")),
    (with_kl(kl_estimator="k1", kl_gradient="as_written"),
     r"kl_estimator = 'k1' .* expected gradient of zero .*; use kl_gradient = 'reverse', or"),
    (with_kl(kl_gradient="as_written", kl_in="loss_to_go"),
     r"kl_gradient = 'as_written' .* is the gradient of no divergence; use kl_gradient = "),
    (with_kl(kl_estimator="k2", kl_in="loss_to_go"),
     r"kl_estimator = 'k2' .* biased KL; use kl_estimator = 'exact'"),
    (with_kl(kl_estimator="k1", kl_adaptation_method="sigmoid"),
     r"kl_adaptation_method = .* reverses the gradient where k1 is negative; use kl_estimator"),
    (with_kl(kl_estimator="exact", kl_adaptation_method="clip_sound"),
     r"kl_adaptation_method = 'clip_sound' clamps .*; use kl_estimator = 'k3'"),
    (with_kl(kl_adaptation_method="huber"), r"kl_adaptation_method = 'huber' must be 'none', a "
                                            "term rule, a coefficient rule, or one of each"),
    (with_kl(kl_adaptation_method="clip+sigmoid"), r"kl_adaptation_method = 'clip\+sigmoid' must"),
    (with_kl(kl_adaptation_method="sigmiod"), r"kl_adaptation_method = .*; did you mean 'sigmoid"),
    (with_kl(kl_adaptation_method=None), r"kl_adaptation_method = None must be a text"),
    (with_kl(kl_clip_threshold=-1), r"kl_clip_threshold = -1 must be None or a number"),
    (with_kl(kl_target=0), r"kl_target = 0 must be a number above 0, in nats per token"),
    (with_kl(dynamic_beta_decay=1.1), r"dynamic_beta_decay = 1.1 must be a number above 0 and"),
    (with_kl(reward_threshold="0.8"), r"reward_threshold = '0.8' must be a number"),
    (with_kl(beta_min=-1), r"beta_min = -1 must be a number of at least 0"),
    (with_kl(beta_schedule_steps=0), r"beta_schedule_steps = 0 " + WHOLE.format(1)),
    (with_kl(reproduce_paper="no"), r"reproduce_paper = 'no' must be True or False"),
    (dict(learning_rate="1e-5"), r"learning_rate = '1e-5' must be a number above 0"),
    (dict(learning_rate=0), r"learning_rate = 0 must be a number above 0"),
    (dict(learning_rate=math.inf), r"learning_rate = inf must be a number above 0"),
    (dict(learning_rate=1j), r"learning_rate = 1j must be a number above 0"),
    (dict(warmup_steps=-1), r"warmup_steps = -1 " + WHOLE.format(0)),
    (dict(weight_decay=2), r"weight_decay = 2 must be a number from 0 to 1"),
    (dict(max_grad_norm=0), r"max_grad_norm = 0 must be a number above 0"),
    (dict(max_tokens_per_microbatch=8), r"max_tokens_per_microbatch = 8 " + WHOLE.format(16)),
    (dict(gradient_checkpointing=0), r"gradient_checkpointing = 0 must be True or False"),
    (dict(bf16="True"), r"bf16 = 'True' must be 'auto', True or False"),
    (dict(eval_every=-1), r"eval_every = -1 " + WHOLE.format(0)),
    (dict(n_eval_problems=0), r"n_eval_problems = 0 " + WHOLE.format(1)),
    (dict(eval_temperature=-1), r"eval_temperature = -1 must be a number from 0 to 10"),
    (dict(eval_temperature="greedy"), r"eval_temperature = 'greedy' must be a number"),
    (dict(out_dir="/dev/null/runs"), r"out_dir = '/dev/null/runs' cannot be written: /dev/null is "
                                     "not a folder that can be written to; use one that is"),
    (dict(out_dir="train.jsonl"), r"out_dir = 'train.jsonl' cannot be written: .*; use one"),
    (dict(out_dir=3), r"out_dir = 3 must be the path of a folder; use for example 'runs'"),
    (dict(out_dir=""), r"out_dir = '' must be the path of a folder"),
    (dict(out_dir="z" * 300), r"out_dir = 'zzz.* cannot be written: .*; use out_dir = 'runs'"),
    (dict(out_dir="a\0b"), r"out_dir = 'a\\x00b' cannot be written: .*; use out_dir = 'runs'"),
    (dict(save_every=-1), r"save_every = -1 " + WHOLE.format(0)),
    (dict(save_every=True), r"save_every = True " + WHOLE.format(0)),
    (dict(resume=2), r"resume = 2 must be True, False or the folder of a run; use"),
    (dict(resume=True, out_dir="empty"), r"resume = True: " + NO_RUN),
    *((dict(resume=name), rf"resume = '{name}': {NO_RUN}")
      for name in ("nowhere", "checkpoint", "empty", "train.jsonl")),
    *((RESUME | dict(resume=name), rf"resume = '{name}': {NO_RUN}")
      for name in ("torn_run", "list_run", "binary_run", "flat_run")),
    (RESUME | dict(clip_range=0.5), r"clip_range = 0.5 would break the curve of runs/.*, "
                                       "which began with 0.2; use that value, or give"),
    (RESUME | dict(model_id="with_space"), r"model_id = 'with_space' would break the curve of "
                                           "runs/.*, which began with 'checkpoint'; use that"),
    (RESUME | dict(seed=1, eval_every=7), r"seed = 1 would break .*, which began with 0; use"),
    (RESUME | dict(reward=math.hypot), r"reward = 'hypot' would break .*, which began with '"),
    (dict(resume=True, n_train_steps=1), r"n_train_steps = 1 counts from the start of the run, "
                                         "and runs/.* has done 2 steps; use at least 2"),
]
if not HAS_VLLM:
    SETTINGS.append((dict(engine="vllm"), r"engine = 'vllm' needs vLLM, which is not installed "
                                          "here; use engine = 'transformers', or install vllm"))

UNREADABLE = [
    ("half_tokenizer", ""), ("torn_config", "OSError: .*not a valid JSON"), ("list_config", ""),
    ("odd_config", ""), ("unknown_architecture", "ValueError: .*perceptron"),
    ("no_architecture", "ValueError"), ("torn_weights", "SafetensorError"),
    ("garbage_weights", "SafetensorError"), ("empty_weights", "SafetensorError"),
    ("half_header", "SafetensorError"), ("torn_tokenizer", ""), ("list_tokenizer", ""),
    ("nobody/no-such-model", "OSError"), ("nobody/--..--", ""),
]
ONE_NUMBER = "; it must return one (finite )?number for every text"

# Found once files were read or models were loaded.
FILES = [
    (RESUME | dict(resume="damaged_run"), r"no checkpoint of damaged_run is whole; use resume = "
                                          "False to begin a new run"),
    (RESUME | dict(resume="other_problems"), r"the problems are not those that other_problems "
                                             "began with; put their files back, or use resume"),
    (RESUME | dict(resume="other_start", model_id="other_weights"),
     r"model_id = 'other_weights' holds other weights than those that the run began with; put"),
    (RESUME, r"runs/.* is in use by another process; wait until it ends, or use resume = False"),
    (FILE | dict(eval_file="train.jsonl"), r"10 of 10 held-out problems are also trained on, for "
                                            "example '.*'; take them out of one of the two lists"),
    (FILE | dict(eval_file="overlap.jsonl"), r"1 of 4 held-out problems are also trained on, for "
                                              r"example 'What is 39 \+ 1\?"),
    (dict(reward=pow), r"reward raised TypeError: .* on the text .*" + ONE_NUMBER),
    (dict(reward=lambda text, problem: 10**400), r"reward raised OverflowError: .*" + ONE_NUMBER),
    (dict(reward=lambda text, problem: "a\nb"), r"reward returned 'a\\nb' on the .*" + ONE_NUMBER),
    (dict(reward=raises_two_lines), r"reward raised ValueError: two lines on the .*" + ONE_NUMBER),
    (dict(reward=lambda text, problem: math.inf), r"reward returned inf on the .*" + ONE_NUMBER),
    (dict(reward=misses_the_time), r"reward took more than 0.2 s on the text .*" + ONE_NUMBER),
    *((dict(model_id=name), rf"model_id = '{name}' cannot be loaded \({cause}.*\); give a folder "
                            "written by save_pretrained with its tokenizer")
      for name, cause in UNREADABLE),
    *((dict(model_id=name), rf"model_id = '{name}' has no weights for {which} more in the shape "
                            "that its config.json says; give a folder written by save_pretrained")
      for name, which in (("missing_weights", r".* and \d+"), ("other_shapes", r".* and \d+"),
                          ("other_layers", "model.layers.2.* and 10"))),
    (dict(model_id="nan_weights"), r"model_id = 'nan_weights' has weights that are not finite; "),
    (dict(model_id="no_tokenizer"), r"the tokenizer of no_tokenizer makes nothing of a text; save"),
    (dict(model_id="no_eos"), r"the tokenizer has no EOS token, so that no response could end; "
                              "set its eos_token and save it"),
    (dict(model_id="more_tokens"), r"the tokenizer of more_tokens has ids up to \d+, its model "
                                   "reads 57 tokens; take the tokenizer that belongs to it"),
    *((dict(model_id=name), rf"the chat template of {name} fails on a user's message \(.*\); mend "
                            "it, or delete it") for name in ("raising_template", "torn_template")),
    (dict(model_id="deaf_template"), r"the chat template of deaf_template leaves out the user's "
                                     "message; mend it, or delete it"),
    (dict(model_id="bad_skills"), r"bad_skills/retention.jsonl line 1 " + NEEDS),
    (dict(max_new_tokens=250), r"\d+ of \d+ training prompts do not fit, with max_new_tokens = "
                               r"250, into the 256 tokens .*; use 2\d\d or fewer"),
    (dict(task="long.jsonl"), r"\d+ of \d+ training prompts do not fit, with max_new_tokens = 8, "
                              "into the 256 tokens that the model reads; shorten the prompts"),
    (with_kl(kl_adaptation_method="clip", kl_clip_threshold=1e9),
     r"kl_adaptation_method = 'clip' changes nothing here: .*; leave it at 'none'"),
    (with_kl(kl_coef=1e-12), r"kl_coef = 1e-12 changes nothing here: .*; use a larger one"),
]

NOTHING = object()  # this setting is left out

# Found by a copy of starter.py in an empty folder.
ALONE = [
    (dict(grop_size=8), r"grop_size is not a parameter of main\(\); did you mean 'group_size'\?"),
    (dict(rollout_batch_size=100, group_size=8),
     r"rollout_batch_size = 100 is not a multiple of group_size = 8; use 96 or 104"),
    (dict(group_size=0), r"group_size = 0 must be a whole number of at least 2; use 2 or more"),
    (dict(n_train_steps=0), r"n_train_steps = 0 must be a whole number of at least 1; use"),
    (dict(task="countdwon"), r"task = 'countdwon' is not known; did you mean 'countdown'\?"),
    (dict(task=lambda cfg: 3), r"task = '<lambda>' returned int; it must return two lists"),
    (dict(engine="vlm"), r"engine = 'vlm' is not known; did you mean 'vllm'\?"),
    (dict(model_id="nowhere"), r"model_id = 'nowhere' cannot be loaded \(.*\); give a folder"),
    (dict(model_id="torn_weights"), r"model_id = 'torn_weights' cannot be loaded \(.*\); give"),
    (dict(model_id="other_layers"), r"model_id = 'other_layers' has no weights for .*; give"),
    (dict(model_id="no_eos"), r"the tokenizer has no EOS token, .*; set its eos_token"),
    (dict(model_id="more_tokens"), r"the tokenizer of more_tokens has ids up to \d+, .*; take"),
    (with_kl(kl_estimator="k4"), r"kl_estimator = 'k4' is not known; did you mean 'k[123]'\?|"
                                 "kl_estimator = 'k4' is not known; use one of 'k1', 'k2'"),
    (with_kl(kl_adaptation_method="sigmiod"), r"kl_adaptation_method = 'sigmiod' must be .*; did "
                                              r"you mean 'sigmoid'\?"),
    (with_kl(kl_estimator="k1", kl_gradient="as_written"),
     r"kl_estimator = 'k1' .* expected gradient of zero .*; use kl_gradient = 'reverse', or"),
    (with_kl(kl_coef=0), r"kl_coef = 0 with use_kl_penalty = True penalises nothing; use"),
    (dict(kl_coef=0.1), r"kl_coef = 0.1 changes nothing while the KL penalty is off; set"),
    (dict(reward=3), r"reward = 3 must be a function \(response_text, problem\) -> number, or"),
    (dict(task="missing.jsonl"), r"'missing.jsonl' is not a file; give the path"),
    *((dict(task=file), file + " " + message) for file, message in BAD_LINES),
    (dict(device="cuda:99"), r"device = 'cuda:99' needs a CUDA GPU of that number and there are "
                             r"\d+ here; use device = 'cpu'"),
    (dict(device="tpu"), r"device = 'tpu' is not known; use 'auto', 'cpu' or 'cuda'"),
    (dict(resume=True, out_dir="empty"), r"resume = True: " + NO_RUN),
    (RESUME | dict(clip_range=0.5), r"clip_range = 0.5 would break the curve of runs/.*, "
                                       "which began with 0.2; use that value, or give"),
    (dict(resume=True, n_train_steps=1), r"n_train_steps = 1 counts from the start of the run, "
                                         "and runs/.* has done 2 steps; use at least 2"),
    (dict(max_new_tokens=250), r"\d+ of \d+ training prompts do not fit, with max_new_tokens = "
                               r"250, into the 256 tokens .*; use 2\d\d or fewer"),
]
if not HAS_VLLM:
    ALONE.append((dict(engine="vllm"), r"engine = 'vllm' needs vLLM, which is not installed here"))
if not torch.cuda.is_available():
    ALONE.append((dict(model_id="tiny"), r"model_id = 'tiny' needs the folder support/ beside "
                                         "starter.py; give model_id = a checkpoint folder"))
# These come last, since they are found during the first evaluation, in a run folder of their own.
ALONE += [
    (dict(reward=raises_two_lines), r"reward raised ValueError: two lines on the .*" + ONE_NUMBER),
    (dict(reward=lambda text, problem: "1.0"), r"reward returned '1.0' on the .*" + ONE_NUMBER),
]


# Unusual, and right: each runs a step.
GOOD = {
    "spare rows in the embedding, no padding token, no chat template": dict(model_id="bare"),
    "a chat template without a generation prompt": dict(model_id=Path("turn_only")),
    "paths": dict(model_id=Path("checkpoint"), out_dir=Path("good/runs")),
    "numbers of numpy and torch": dict(
        group_size=numpy.int64(4), seed=numpy.int32(7), learning_rate=numpy.float32(0.001),
        normalize_by_std=numpy.bool_(False), clip_range=torch.tensor(0.25)),
    "a pair of clip ranges": with_kl(clip_range=numpy.array([0.2, 0.28]), kl_estimator="exact"),
    "JSONL as written on Windows": dict(task=Path("windows.jsonl")),
    "a file for evaluation": FILE | dict(eval_file="other.jsonl"),
    "chat messages, two rewards, truncated responses left out": dict(
        task="chat.jsonl", reward=[(starter.reward_fn, 1.0), (lambda text, problem: 0.1, 0.5)],
        mask_truncated=True, enable_thinking=True, run_name="two-rewards"),
    "some prompts that are too long": dict(task="some_long.jsonl"),
    "a reward that returns a whole number": dict(reward=lambda text, problem: len(text)),
}


# --------------------------------------------------------------------------------------------------
# Files that the rows name

def sums(numbers, more=""):
    """JSONL in the form of GSM8K's."""
    rows = [{"question": f"What is {i} + 1?", "answer": f"#### {i + 1}"} for i in numbers]
    return "".join(json.dumps(row) + "\n" for row in rows) + more


def write_problem_files(root):
    long = [{"question": f"What is {i} + 1?" + " Why?" * 60, "answer": "1"} for i in range(40)]
    files = {
        "train.jsonl": sums(range(40)),
        "overlap.jsonl": sums(range(39, 43)),
        "long.jsonl": "".join(json.dumps(row) + "\n" for row in long),
        "bad_line.jsonl": sums(range(16), '{"question": "?", "answer": '),
        "no_answer.jsonl": sums(range(16), '{"question": "?"}'),
        "list.jsonl": sums(range(16), "[1]"),
        "yes.jsonl": sums(range(16), '{"question": "?", "answer": true}'),
        "deep.jsonl": sums(range(16), "[" * 100_000),
        "surrogate.jsonl": sums(range(16), r'{"question": "\ud800", "answer": "#### 1"}'),
        "other.jsonl": sums(range(40, 60)),
        "chat.jsonl": "".join(json.dumps({"prompt": [
            {"role": "system", "content": "add"}, {"role": "user", "content": f"{i} + 1"}],
            "answer": i + 1}) + "\n" for i in range(40)),
        "some_long.jsonl": sums(range(40), json.dumps(long[0]) + "\n"),
        "empty.jsonl": "\n \n",
        "one.jsonl": json.dumps({"question": "?", "answer": "1"}),
    }
    for name, text in files.items():
        (root / name).write_text(text)
    (root / "binary.jsonl").write_bytes(bytes(range(256)) * 8)
    windows = "\ufeff" + sums(range(40)).replace("\n", "\r\n") + "\r\n"
    (root / "windows.jsonl").write_bytes(windows.encode())
    (root / "empty").mkdir()
    (root / "folder.jsonl").mkdir()


def write_checkpoints(root):
    """Writes a good checkpoint, and copies of it in which a file is another or is missing."""
    from safetensors.torch import load_file, save_file
    good = save_checkpoint(root / "checkpoint")
    config = json.loads((good / "config.json").read_text())
    weights = (good / "model.safetensors").read_bytes()
    tokenizer_config = json.loads((good / "tokenizer_config.json").read_text())

    def copy(name, file=None, content=None):
        shutil.copytree(good, root / name)
        if isinstance(content, dict):
            content = json.dumps(content)
        if isinstance(content, str):
            content = content.encode()
        if file is not None:
            (root / name / file).unlink(missing_ok=True)
        if content is not None:
            (root / name / file).write_bytes(content)

    copy("with_space")
    copy("no_config", "config.json")
    copy("torn_config", "config.json", (good / "config.json").read_text()[:200])
    copy("list_config", "config.json", "[]")
    copy("odd_config", "config.json", config | {"hidden_size": "many"})
    copy("unknown_architecture", "config.json",
         config | {"model_type": "perceptron", "architectures": ["Perceptron"]})
    copy("no_architecture", "config.json", {name: value for name, value in config.items()
                                            if name not in ("model_type", "architectures")})
    copy("other_shapes", "config.json", config | {"hidden_size": 32})
    copy("other_layers", "config.json",
         config | {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3})
    copy("no_weights", "model.safetensors")
    copy("torn_weights", "model.safetensors", weights[:-1000])
    copy("garbage_weights", "model.safetensors", random.Random(0).randbytes(5000))
    copy("empty_weights", "model.safetensors", b"")
    copy("half_header", "model.safetensors", weights[:100])
    copy("torn_tokenizer", "tokenizer.json", (good / "tokenizer.json").read_text()[:200])
    copy("list_tokenizer", "tokenizer.json", "[]")
    copy("half_tokenizer", "tokenizer.json")
    copy("no_tokenizer", "tokenizer.json")
    (root / "no_tokenizer" / "tokenizer_config.json").unlink()
    (root / "no_tokenizer" / "chat_template.jinja").unlink()
    copy("no_eos", "tokenizer_config.json",
         {name: value for name, value in tokenizer_config.items() if name != "eos_token"})
    generation = json.loads((good / "generation_config.json").read_text())
    generation.pop("eos_token_id")
    (root / "no_eos" / "generation_config.json").write_text(json.dumps(generation))
    (root / "no_eos" / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    copy("raising_template", "chat_template.jinja", "{{ raise_exception('no\\nsystem message') }}")
    copy("torn_template", "chat_template.jinja", "{% for m in messages %}{{ m['content']")
    copy("deaf_template", "chat_template.jinja",
         "{% for m in messages %}<|user|>{% endfor %}<|assistant|>")
    copy("bad_skills", "retention.jsonl", '{"skill": "sort", "prompt": "sort 21"}\n')
    tensors = load_file(good / "model.safetensors")
    copy("missing_weights")
    copy("nan_weights")
    some = {name: tensor for name, tensor in tensors.items() if "layers.1.mlp" not in name}
    last = max(tensors)  # one of many is enough
    nan = tensors | {last: tensors[last] * math.nan}
    for name, changed in (("missing_weights", some), ("nan_weights", nan)):
        save_file(changed, root / name / "model.safetensors", metadata={"format": "pt"})
    save_checkpoint(root / "other_weights", seed=1)
    save_checkpoint(root / "more_tokens", vocab_size=57)  # the tokenizer has one more
    bare = save_checkpoint(root / "bare", vocab_size=100)
    (bare / "chat_template.jinja").unlink()
    no_padding = {name: value for name, value in tokenizer_config.items() if name != "pad_token"}
    (bare / "tokenizer_config.json").write_text(json.dumps(no_padding))
    copy("turn_only", "chat_template.jinja",
         "{% for m in messages %}<|user|>{{ m['content'] }}<|assistant|>{% endfor %}")


def copy_run(name, **changes_of_state):
    """Copies the earlier run. Its checkpoints' state gets these entries, and checksums that fit."""
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file
    run, = Path("runs").iterdir()
    shutil.copytree(run, name)
    for path in Path(name).glob("checkpoints/*.safetensors"):
        with safe_open(path, "pt") as file:
            state = json.loads(file.metadata()["state"])
        save_file(load_file(path), path, {"state": json.dumps(state | changes_of_state)})
        path.with_suffix(".sha256").write_text(hashlib.sha256(path.read_bytes()).hexdigest())
    return Path(name) / "config.json"


def write_runs():
    """Copies of the earlier run, each of which cannot be resumed for another reason."""
    text = copy_run("torn_run").read_text()
    Path("torn_run/config.json").write_text(text[:100])
    copy_run("list_run").write_text("[]")
    copy_run("binary_run").write_bytes(b"\xff\xfe\0" * 50)
    copy_run("flat_run").write_text(json.dumps(json.loads(text)["settings"]))  # of version 1
    copy_run("damaged_run")
    for path in Path("damaged_run").glob("checkpoints/*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    copy_run("other_problems", problems="those of another file")
    copy_run("other_start").write_text(text.replace('"model_id": "checkpoint"',
                                                    '"model_id": "other_weights"'))


def hold_the_lock():
    """Another process at work in the earlier run, for as long as this one lives."""
    import fcntl
    ready, tell = os.pipe()
    end, own = os.pipe()
    if os.fork() == 0:
        os.close(own)
        run, = Path("runs").iterdir()
        lock = open(run / ".lock", "a")
        fcntl.lockf(lock, fcntl.LOCK_EX)
        os.write(tell, b".")
        os._exit(len(os.read(end, 1)))
    os.read(ready, 1)


# --------------------------------------------------------------------------------------------------
# The process in which the rows run

def try_row(changes):
    """Runs main() with the sentences of `python starter.py`."""
    sys.excepthook = starter.show_one_sentence
    given = settings("checkpoint", "runs", n_train_steps=2, save_every=1, n_eval_problems=10)
    given = {name: value for name, value in (given | changes).items() if value is not NOTHING}
    starter.main(**given)


def try_good(name):
    """A step of a row of GOOD. What numpy's and torch's numbers are in config.json must be what
    plain ones are, or the run could not be resumed with these."""
    from support.runs import plain_numbers
    changes = GOOD[name]
    given = settings("checkpoint", f"good/{name}", n_train_steps=1, save_every=1) | changes
    folder = starter.main(**given)["run_folder"]
    kept = json.loads((folder / "config.json").read_text())["settings"]
    for name, value in given.items():
        value = str(value) if isinstance(value, Path) else plain_numbers(value)
        assert name == "reward" or kept[name] == value, (name, kept[name], value)


def make_earlier_run():
    import_once()
    starter.N_TRAIN_PROBLEMS = 60
    earlier, = run_all([partial(try_row, {})])
    assert earlier["status"] == 0, earlier


def try_with_support():
    """Returns the outcomes of all rows of each table."""
    from support import runs
    make_earlier_run()
    runs.REWARD_SECONDS = 0.2
    write_runs()
    hold_the_lock()
    return {"settings": [run_here(partial(try_row, changes)) for changes, _ in SETTINGS],
            "files": run_all([partial(try_row, changes) for changes, _ in FILES]),
            "good": run_all([partial(try_good, name) for name in GOOD])}


def try_alone():
    make_earlier_run()
    return run_all([partial(try_row, changes) for changes, _ in ALONE])


@pytest.fixture(scope="module")
def folder_of_files(tmp_path_factory):
    root = tmp_path_factory.mktemp("files")
    write_problem_files(root)
    write_checkpoints(root)
    return root


@pytest.fixture(scope="module")
def outcomes(folder_of_files):
    return in_new_process("test_inputs", "try_with_support", folder_of_files, REPOSITORY)


@pytest.fixture(scope="module")
def outcomes_alone(folder_of_files, tmp_path_factory):
    root = tmp_path_factory.mktemp("alone")
    shutil.copytree(folder_of_files, root, dirs_exist_ok=True,
                    ignore=shutil.ignore_patterns("runs", "*_run", "other_problems", "good"))
    folder = tmp_path_factory.mktemp("the_file")
    shutil.copy(REPOSITORY / "starter.py", folder)
    return in_new_process("test_inputs", "try_alone", root, folder)


def names_of(rows):
    return [", ".join(f"{name}={str(value)[:20]!a}" for name, value in changes.items())
            for changes, _ in rows]


def check_sentence(outcome, message):
    """Exit code 1, one sentence with the value and the remedy, no file changed."""
    assert outcome["status"] == 1, outcome
    assert outcome["stderr"].count("\n") == 1 and len(outcome["stderr"]) < 1000, outcome
    assert re.match(f"starter.py stopped: ({message})", outcome["stderr"]), outcome
    assert "; " in outcome["stderr"] and not outcome["changed"], outcome


@pytest.mark.skipif(not HAS_SUPPORT, reason="needs support/")
@pytest.mark.parametrize("row", range(len(SETTINGS)), ids=names_of(SETTINGS))
def test_bad_setting_is_refused_before_a_model_is_loaded(outcomes, row):
    outcome = outcomes["settings"][row]
    check_sentence(outcome, SETTINGS[row][1])
    assert not outcome["stdout"] and not outcome["made"], outcome


@pytest.mark.skipif(not HAS_SUPPORT, reason="needs support/")
@pytest.mark.parametrize("row", range(len(FILES)), ids=names_of(FILES))
def test_bad_file_or_reward_is_refused_before_anything_is_written(outcomes, row):
    outcome = outcomes["files"][row]
    check_sentence(outcome, FILES[row][1])
    assert not outcome["made"], outcome


@pytest.mark.skipif(not HAS_SUPPORT, reason="needs support/")
def test_unusual_and_right_inputs_work(outcomes):
    for name, outcome in zip(GOOD, outcomes["good"]):
        printed = outcome["stdout"]
        assert outcome["status"] == 0, (name, outcome["stderr"][-3000:])
        assert "Step 1 |" in printed and "=== Report ===" in printed
        warned = "Warning: the chat template of turn_only adds no generation prompt" in printed
        assert warned == (name == "a chat template without a generation prompt")


@pytest.mark.parametrize("row", range(len(ALONE)), ids=names_of(ALONE))
def test_file_alone_refuses_the_commonest_mistakes(outcomes_alone, row):
    check_sentence(outcomes_alone[row], ALONE[row][1])
