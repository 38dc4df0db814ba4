"""What main() of starter.py asks of support/, at four places. No decision is made here: starter.py
draws the tokens, scores them, and computes the loss; this folder makes that faster and looks on."""

from support import adaptive_rules  # noqa: F401  adds rules to starter's dicts, as tasks does
from support import checkpoints, edits, engines, fast, gpu, guards, kl_checks, lora, memory, models
from support import presets, ranks, rewards, rules, skills, steps, tasks, tokens


def check_settings(cfg):
    """1. Before anything else: that each setting is of its kind. Raises InputError."""
    edits.restore()
    edits.wrap(
        score_answer=tasks.score_answer,
        score=rewards.score,
        compute_group_normalized_advantages=rewards.advantages_of_scored,
    )
    edits.replace(
        check_known=rules.check_known,
        init_policy=rules.init_policy,
        read_problems=tasks.read_problems,
        find_stop_tokens=tokens.find_stop_tokens,
        ids_of_prompt=tokens.ids_of_prompt,
        # For any run, so that it may go on with another number of processes
        checkpoint_of=checkpoints.checkpoint_of,
        load_checkpoint=checkpoints.load_checkpoint,
    )
    presets.choose(cfg)
    rules.check_kinds(cfg)


def check(run):
    """2. Before anything is loaded: that the settings fit together, the built-in model, the lock of
    a run that is resumed, memory, and the processes that torchrun started. Raises InputError."""
    cfg = run.cfg
    ranks.join(run)  # first: it gives each process its device
    rules.check_settings(cfg)
    kl_checks.check_kl(cfg)
    for name in ("model_id", "ref_model_id"):
        if getattr(cfg, name) == "tiny":
            setattr(cfg, name, tasks.TINY)
    guards.lock(run)
    rules.check_resume(run)
    rules.check_hub(cfg.model_id, cfg.ref_model_id, cfg.task, cfg.eval_file)
    if ranks.WORLD == 1:
        memory.check_fits(cfg)
    if cfg.engine == "vllm" or cfg.device.type == "cuda":
        engines.attach()


def prepare(policy, ref_model, tokenizer, problems, cfg):
    """3. When everything is loaded: adapters, faster mechanics, several processes. Returns the
    reference: without a teacher, and with LoRA, the policy without its adapters."""
    rules.note_changed_sources(policy, problems, cfg)
    rules.check_model(policy, tokenizer, problems, cfg)
    models.check_reading(policy, [p["prompt_ids"] for some in problems for p in some], cfg)
    if cfg.lora_rank:
        start = lora.add_adapters(policy, cfg)
        if cfg.use_kl_penalty:
            ref_model = ref_model or start
    if ranks.WORLD == 1:
        fast.attach(policy, ref_model, problems, cfg)  # compares in float32
    if cfg.frozen_in_bf16:
        memory.store_frozen_in_bf16(policy, ref_model, cfg)
    if cfg.engine == "vllm":  # before the processes divide the policy, which renames its class
        engines.give_text_model(policy, tokenizer, cfg.model_id)
    if ranks.WORLD > 1:
        ranks.divide(policy, ref_model, cfg)
    gpu.attach(policy, ref_model, problems, cfg)
    skills.attach(policy, tokenizer, cfg)
    steps.tokenizer = tokenizer
    edits.log_edits(cfg)
    return ref_model


def watch(run):
    """4. Returns what looks on after each step and evaluation, and reports at the end."""
    if ranks.WORLD == 1:  # several processes would wait for each other
        memory.attach(run)
        edits.wrap(train=rewards.train)
    steps.attach(run)
    return guards.Guards(run)
