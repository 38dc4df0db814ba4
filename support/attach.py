"""What starter.py asks of support/: at four places of main(), and in the functions below that are
named there. No decision is made here: starter.py draws the tokens, scores them, and computes the
loss; this folder makes that faster and looks on."""

from support import adaptive_rules  # noqa: F401  adds rules to starter's dicts, as tasks does
from support import (
    agents,
    checkpoints,
    divided,
    edits,
    engines,
    fast,
    gpu,
    guards,
    kl_checks,
    lora,
    memory,
    models,
    opinion,
)
from support import presets, ranks, rows, rules, tasks
from support.agents import play  # noqa: F401
from support.models import mend_model  # noqa: F401
from support.rewards import awaited  # noqa: F401
from support.tasks import read_rows  # noqa: F401


def begin(cfg):
    """1. Before anything else: that each setting is of its kind; and the processes that torchrun
    started. Raises InputError."""
    edits.check_is_served()
    edits.restore()  # after an earlier run of this process
    engines.ROUNDS.clear()
    ranks.connect(cfg)
    given = dict(vars(cfg))
    presets.choose(cfg)
    rules.check_kinds(cfg, given)


def check(run):
    """2. Before anything is loaded: that the settings fit together, the built-in model, the lock of
    a run that is resumed, and memory. Raises InputError."""
    cfg = run.cfg
    ranks.join(run)  # first: it gives all processes the same folder
    rules.check_settings(cfg)
    kl_checks.check_kl(cfg)
    for name in ("model_id", "ref_model_id"):
        if getattr(cfg, name) == "tiny":
            setattr(cfg, name, tasks.TINY)
    guards.lock(run)
    rules.check_resume(run)
    rules.check_hub(cfg.model_id, cfg.ref_model_id, cfg.task, cfg.eval_file)
    rules.check_config(cfg)
    memory.check_fits(cfg)
    if ranks.WORLD > 1:
        edits.replace(load_model=divided.load_model)
    if cfg.engine == "vllm" or cfg.device.type == "cuda":
        engines.attach(cfg)  # before the model is loaded, which then gets another head


def prepare(policy, ref_model, tokenizer, problems, run):
    """3. When everything is loaded: adapters, faster mechanics, several processes. Returns the
    reference: without a teacher, and with LoRA, the policy without its adapters."""
    cfg = run.cfg
    divided.check_unchanged(policy)
    rules.check_model(policy, tokenizer, problems, cfg)
    agents.begin_run(tokenizer)
    prompts = [p["prompt_ids"] for some in problems for p in some]
    if ranks.WORLD == 1:
        models.check_reading(policy, prompts, cfg)  # without adapters
    if cfg.lora_rank:
        start = lora.add_adapters(policy, cfg)
        if cfg.use_kl_penalty:
            ref_model = ref_model or start
    if ranks.WORLD == 1:
        fast.attach(policy, ref_model, prompts, cfg)  # compares in float32
        edits.replace(add_up_gradients=memory.add_up_gradients)
        opinion.attach(run, [policy, ref_model])
    if cfg.frozen_in_bf16:
        memory.store_frozen_in_bf16(policy, ref_model, cfg)
    if cfg.engine == "vllm":  # before the processes divide the policy, which renames its class
        engines.give_text_model(policy, tokenizer, cfg.model_id)
    if ranks.WORLD > 1:
        divided.divide(policy, ref_model, cfg)
        models.check_reading(policy, prompts, cfg)  # whole it may not fit
        divided.part_weights(policy)  # joined while it was read
    elif any(path.is_dir() for path in run.folder.glob("checkpoint_*")):
        edits.replace(load_checkpoint=checkpoints.load_checkpoint)
    rules.note_changed_sources(policy, problems, cfg)
    gpu.attach(policy, ref_model, cfg)
    edits.log_edits(unused=["limit_logits"] if ranks.WORLD == 1 else [])
    rows.log_rows(ref_model)
    return ref_model


def watch(run, policy, ref_model, tokenizer, optimizer):
    """4. Returns what looks on after each step and evaluation, and reports at the end."""
    memory.resume(run, optimizer)
    opinion.resume(run, [policy, ref_model])
    return guards.Guards(run, policy, ref_model, tokenizer, optimizer)
