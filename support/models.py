"""What is odd in some models, and whether starter.py is right for the one that was loaded."""

import functools
import inspect
import random

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

import starter
from starter import InputError
from support import divided, edits, engines, ranks, tokens


def mend_model(policy, tokenizer, unread):
    """Changes what some models and tokenizers need, of each that is loaded. unread: the names of
    the weights in the checkpoint that the model lacks.

    * torch's fused attention leaves out the soft-cap of some models (Gemma 2).
    * A generation_config.json that is not valid could not be saved after the run.
    * A chat template may write today's date: a fixed one, so that a run that is resumed tomorrow
      reads the same prompts.
    * The token that the chat template puts after an answer ends responses too, while training and
      of the saved model.
    * The chat template of some lies in a file of its own.
    * vLLM and GPUs have a head of their own."""
    check_unread(policy, unread)
    if getattr(policy.config.get_text_config(), "attn_logit_softcapping", None):
        policy.set_attn_implementation("eager")
    own = policy.generation_config
    try:
        own.validate(strict=True)
    except ValueError:
        policy.generation_config = GenerationConfig(
            bos_token_id=own.bos_token_id, eos_token_id=own.eos_token_id
        )
        print("generation_config.json is not valid: BOS and EOS are all that is kept of it")
    stop_tokens = policy.generation_config.eos_token_id
    stop_tokens = stop_tokens if isinstance(stop_tokens, list) else [stop_tokens]
    if tokenizer.chat_template is None:
        tokenizer.chat_template = tokens.template_beside(tokenizer.name_or_path)
    end = tokens.end_of_turn(tokenizer)
    if end not in (None, tokenizer.eos_token_id, *stop_tokens):
        policy.generation_config.eos_token_id = [x for x in stop_tokens if x is not None] + [end]
    tokenizer.apply_chat_template = functools.partial(
        tokens.on_a_fixed_date, tokenizer.apply_chat_template
    )
    engines.give_head(policy)


def check_unread(policy, unread):
    """Raises InputError where the checkpoint holds more of a layer than the model has: a bias, a
    scale, an adapter."""
    leaves = {name for name, module in policy.named_modules() if not any(module.children())}
    for name in unread:
        parts = name.split(".")
        owners = {".".join(parts[:n]) for n in range(1, len(parts))}
        if owners & leaves:
            raise InputError(
                f"the checkpoint holds {name}, which its config.json does not tell the model of, "
                "so that it would be another model; mend config.json, or merge its adapters"
            )


def check_reading(policy, prompts, cfg):
    """Raises InputError for a model that padding on the right changes, whose weights a forward pass
    changes, or whose backward pass fails. One that decodes otherwise than it reads is decoded by
    reading everything again, and the log says so."""
    name = type(policy).__name__.removeprefix("FSDP")
    prompts = sorted(prompts, key=len)
    lengths = [len(prompts[0]), len(prompts[-1])]
    ids = longest_row(policy, prompts[-1], cfg.max_new_tokens)
    # Several processes gather weights in 16 bits, so that layers cannot compute in more
    precision = cfg.precision if ranks.WORLD > 1 else "float32"
    with starter.autocast(policy.device, precision):
        try:
            fault = fault_of_reading(policy, ids, lengths, cfg)
        except Exception as error:  # code of the model's authors
            fault = f"its forward or backward pass fails with {error!r:.150}"
        policy.zero_grad()
        policy.eval()
        if fault:
            raise InputError(f"{name} cannot be trained here: {fault}; give another model")
        own = edits.OWN["start_decoding"]
        is_shipped = edits.is_shipped("start_decoding")
        if is_shipped and not decodes_as_it_reads(own, policy, ids, lengths):
            edits.replace(start_decoding=start_decoding)
            print(
                f"{name} decodes otherwise than it reads: it samples without a cache, which is slow"
            )


def longest_row(policy, prompt, max_new_tokens):
    """Returns (1, L) ids as long as a run's longest row: the prompt, and its tokens again in any
    order. Padding's id comes first, which a policy may well sample."""
    config = policy.config.get_text_config()
    row = prompt + random.Random(0).choices(prompt, k=max_new_tokens)
    pad = getattr(config, "pad_token_id", None)
    if pad in range(config.vocab_size):
        row[len(prompt)] = pad
    return torch.tensor([row], device=policy.device)


def log_probs(policy, ids, columns):
    """(1, L) ids -> (n, V) log-probs of what follows these columns, by the model's own forward
    pass."""
    columns = torch.tensor(columns, device=ids.device)
    names = inspect.signature(policy.forward).parameters
    if "logits_to_keep" in names:  # the other logits are not made
        logits = policy(input_ids=ids, use_cache=False, logits_to_keep=columns).logits[0]
    else:
        logits = policy(input_ids=ids, use_cache=False).logits[0, columns]
    return starter.all_log_probs(logits, 1.0)


def differ(log_p, other):
    """Whether log-probs of the same tokens differ by more than rounding; nan always does."""
    limit = 0.25 if torch.is_autocast_enabled(log_p.device.type) else 0.01
    return not (log_p - other).abs().max() < limit


def checksum(policy):
    divided.part_weights(policy)
    return [p.sum().item() for p in policy.parameters()]


def last_columns(n):
    """The columns of a row of n tokens whose log-probs are compared."""
    return [*range(max(0, n - 64), n)]


def fault_of_reading(policy, ids, lengths, cfg):
    """Returns what is wrong with a forward and a backward pass, or None."""
    if type(policy.config) not in AutoModelForCausalLM._model_mapping:
        return "for its type transformers has no model of text alone (AutoModelForCausalLM)"
    weights = checksum(policy)
    with torch.no_grad():
        for n in (*lengths, ids.shape[1] - 1):
            columns = last_columns(n)
            whole = log_probs(policy, ids, columns)
            if differ(log_probs(policy, ids[:, :n], columns), whole):
                return "what stands after a token changes its log-probs"
        if cfg.gradient_checkpointing:
            starter.set_train_mode_of_checkpointed_layers(policy)
            if differ(log_probs(policy, ids, columns), whole):
                return "with gradient_checkpointing its log-probs change, without it perhaps not"
    if not cfg.lora_rank:  # else there may be no memory for gradients of all weights
        n = lengths[-1]
        log_probs(policy, ids[:, :n], last_columns(n))[:, 0].sum().backward()
    if checksum(policy) != weights:
        return "its forward pass changes its weights"


N_DECODED = 12  # tokens


@torch.no_grad()
def decodes_as_it_reads(start_decoding, policy, ids, lengths):
    """Compares tokens after the first ones of (1, L) ids, and the last ones, with the same of the
    row read at once. lengths: of the prompts, which are decoded together."""
    row = ids[0]
    lengths = [*lengths, max(1, len(row) - N_DECODED)]
    n_tokens = min(N_DECODED, len(row) - max(lengths))
    columns = torch.tensor(lengths)[:, None] - 1 + torch.arange(n_tokens)
    whole = log_probs(policy, ids, columns.flatten().tolist()).unflatten(0, columns.shape)
    tokens = None
    try:
        next_logits = start_decoding(policy, [row[:n].tolist() for n in lengths])
        for t in range(n_tokens):
            logits = next_logits(tokens)
            if differ(starter.all_log_probs(logits, 1.0), whole[:, t]):
                return False
            tokens = row[columns[:, t] + 1, None]
    except Exception:  # code of the model's authors: some have no cache that works
        return False
    return True


def start_decoding(policy, prompts):
    """Like starter.start_decoding, without a cache: all ids are read again for each token."""

    def read(input_ids, **options):
        return policy(input_ids=input_ids, use_cache=False)

    read.device = policy.device
    read.forward = policy.forward
    read.config = policy.config
    return edits.OWN["start_decoding"](read, prompts)
