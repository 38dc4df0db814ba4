"""Presets beside those of starter.py, and which one preset="auto" is; numbers in presets.yaml."""

import json
from pathlib import Path

import torch
import yaml

import starter
from support import ranks

NUMBERS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
for name, preset in NUMBERS["presets"].items():
    starter.PRESETS.setdefault(name, preset)  # one of yours stays


def choose(cfg):
    """preset="auto" is "tiny" for the built-in model, which is also that of a machine without a
    GPU. On a GPU it is what fits, or "qwen3-1.7b" for a model of yours."""
    if cfg.preset != "auto":
        starter.check_known("preset", cfg.preset, starter.PRESETS)
        return
    if cfg.device == "auto":
        cfg.device = "cuda" if torch.cuda.is_available() else "cpu"
    if cfg.model_id is None and "cuda" in str(cfg.device):
        choose_for_gpu(cfg)
    elif cfg.model_id in (None, "tiny"):
        cfg.preset = "tiny"
    else:
        cfg.preset = preset_of_run(cfg.model_id) or "qwen3-1.7b"


def read_settings(path):
    """Returns what a run's settings.json holds; {} where it is not there, or damaged."""
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text("utf-8")))
    except (TypeError, ValueError) as error:
        print(f"{path} is damaged ({error}): what it says is not known")
        return {}


def preset_of_run(model_id):
    """Returns the preset of the run that saved this model, or None if none did."""
    settings = Path(model_id).with_name("settings.json")
    if Path(model_id).name != "model" or not settings.is_file():
        return None
    preset = read_settings(settings).get("preset")
    return preset if preset in starter.PRESETS else None


def choose_for_gpu(cfg):
    """Takes the largest preset that fits into the free memory, and says so. Given values stay."""
    free_gb = torch.cuda.mem_get_info(cfg.device)[0] / 1e9
    free_gb = min(ranks.gather([free_gb]))  # all processes choose the same
    for least_gb, name, settings in NUMBERS["on_gpu"]:
        if cfg.use_kl_penalty and not settings:  # with LoRA there is no copy
            least_gb += NUMBERS["reference_gb"]
        if free_gb >= least_gb:
            break
    cfg.preset = name
    if "gpu_mem_util" in settings:
        cache = settings["gpu_mem_util"] + int(free_gb - least_gb)
        settings = {**settings, "gpu_mem_util": min(8, cache)}
    unchanged = vars(starter.cfg_with())
    taken = {key: x for key, x in settings.items() if getattr(cfg, key) == unchanged[key]}
    vars(cfg).update(taken)
    card = torch.cuda.get_device_name(cfg.device)
    print(f"{card}, {free_gb:.0f} GB free: preset {name}, and {taken or 'all weights learn'}")
