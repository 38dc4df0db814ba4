"""inputs.py: inputs of the reference values: settings, tensors, models, responses, a checkpoint.

record.py gives them to the old code and writes what comes out. A test of the new code gives the
same inputs to the new code and compares with differences(). So nothing here imports a module of
either; only torch, transformers and tokenizers are needed. Every function gives the same result at
each call, because it draws from generators of its own with fixed seeds.
"""

import copy
import itertools
import math
import random
import zlib

import torch

KL_ESTIMATORS = ("k1", "k2", "k3", "exact")
KL_GRADIENTS = ("reverse", "as_written")
KL_PLACES = ("loss", "loss_to_go", "reward")
LOSS_AVERAGES = ("dapo", "grpo", "dr_grpo")
TERM_RULES = (
    "clip",
    "clip_sound",
    "sigmoid",
    "sigmoid_sound",
    "length_normalized",
    "length_normalized_sound",
)
COEFFICIENT_RULES = ("target", "target_sound", "dynamic", "dynamic_sound")


# --------------------------------------------------------------------------------------------------
# Settings

COMMON = {  # A setting that says nothing else about a name has the value given here.
    "kl_estimator": "k3",
    "kl_gradient": "reverse",
    "kl_in": "loss",
    "kl_ratio_cap": 2.0,
    "kl_adaptation_method": "none",  # One of TERM_RULES or of COEFFICIENT_RULES, or none.
    "kl_clip_threshold": None,  # None: the rule's own; see the section rule_numbers.
    "kl_target": None,  # None: likewise.
    "kl_coef": 0.3,
    "with_reference": True,  # False: the loss has no KL term and shows no KL.
    "clip_range": 0.2,
    "clip_range_high": None,
    "importance_cap": 2.0,  # None: no importance weights.
    "loss_average": "dapo",
    "max_new_tokens": 16,
}
OF_A_LOSS = COMMON | {
    "with_exact_kl": True,  # False: the KL over the vocabulary is not known.
    "extreme": False,  # True: see loss_tensors().
}
OF_A_STEP = COMMON | {
    "temperature": 1.0,
    "epochs_per_rollout": 3,
    "max_tokens_per_microbatch": 60,  # The 12 responses then go into several microbatches.
    "bf16": False,
}


def named(defaults, all_changes):
    """Gives {name: setting}. A name says what differs from the defaults.

    A setting that comes twice is kept once.
    """
    settings = {}
    for changes in all_changes:
        setting = defaults | changes
        different = [f"{key}={value}" for key, value in setting.items() if value != defaults[key]]
        settings[" ".join(different) or "defaults"] = setting
    return settings


def possible(changes):
    """Whether the old code can compute it.

    The KL over the vocabulary cannot be put into the advantages, and it has to be known.
    """
    if changes.get("kl_estimator") != "exact":
        return True
    return changes.get("kl_in") != "reward" and changes.get("with_exact_kl") is not False


def combinations(**options):
    """Gives a list of changes: every combination of the options that is possible."""
    found = (dict(zip(options, values)) for values in itertools.product(*options.values()))
    return [changes for changes in found if possible(changes)]


def random_combinations(n, seed, **options):
    """Gives n changes with each option drawn by itself: settings meet that nobody would pair."""
    rng, found = random.Random(seed), []
    while len(found) < n:
        changes = {name: rng.choice(values) for name, values in options.items()}
        if possible(changes):
            found.append(changes)
    return found


ANY = dict(
    kl_estimator=KL_ESTIMATORS,
    kl_gradient=KL_GRADIENTS,
    kl_in=KL_PLACES,
    kl_ratio_cap=(2.0, math.inf),
    kl_adaptation_method=("none", *TERM_RULES),
    clip_range_high=(None, 0.3),
    kl_coef=(0.3, 0.05),
    importance_cap=(2.0, None),
    loss_average=LOSS_AVERAGES,
)


def loss_settings():
    """Gives {name: setting} of single losses; the names of a setting are those of OF_A_LOSS."""
    return named(
        OF_A_LOSS,
        [
            *combinations(kl_estimator=KL_ESTIMATORS, kl_gradient=KL_GRADIENTS, kl_in=KL_PLACES),
            *combinations(
                kl_adaptation_method=TERM_RULES, kl_in=KL_PLACES, kl_estimator=("k1", "k3", "exact")
            ),
            *combinations(
                kl_adaptation_method=("clip", "clip_sound"),
                kl_in=KL_PLACES,
                kl_clip_threshold=(0.4, 1.5),
            ),
            *combinations(kl_adaptation_method=("sigmoid", "sigmoid_sound"), kl_target=(0.5,)),
            *combinations(
                kl_ratio_cap=(math.inf,),
                kl_in=("loss", "loss_to_go"),
                kl_estimator=("k1", "k3", "exact"),
            ),
            *combinations(clip_range_high=(0.3,), kl_in=KL_PLACES),
            *combinations(kl_coef=(0.0,), kl_in=KL_PLACES, clip_range_high=(None, 0.3)),
            *combinations(loss_average=LOSS_AVERAGES, kl_in=KL_PLACES),
            *combinations(
                with_reference=(False,), loss_average=LOSS_AVERAGES, importance_cap=(2.0, None)
            ),
            *combinations(with_exact_kl=(False,), kl_in=KL_PLACES),
            *combinations(extreme=(True,), kl_estimator=KL_ESTIMATORS, kl_in=KL_PLACES),
            *random_combinations(40, seed=1, **ANY, with_exact_kl=(True, True, False)),
        ],
    )


def step_settings():
    """Gives {name: setting} of whole steps; the names of a setting are those of OF_A_STEP."""
    temperatures, epochs = (1.0, 0.7), (1, 3)
    return named(
        OF_A_STEP,
        [
            *combinations(kl_estimator=KL_ESTIMATORS, kl_gradient=KL_GRADIENTS, kl_in=KL_PLACES),
            *combinations(
                kl_adaptation_method=TERM_RULES, kl_in=("loss", "loss_to_go"), temperature=(0.7,)
            ),
            *combinations(kl_adaptation_method=TERM_RULES, kl_in=("reward",), kl_estimator=("k1",)),
            *combinations(
                loss_average=LOSS_AVERAGES, temperature=temperatures, epochs_per_rollout=epochs
            ),
            *combinations(
                with_reference=(False,), loss_average=LOSS_AVERAGES, epochs_per_rollout=epochs
            ),
            *combinations(kl_coef=(0.0,), temperature=temperatures),
            *combinations(
                kl_ratio_cap=(math.inf,), kl_in=("loss", "loss_to_go"), kl_estimator=("k3", "exact")
            ),
            *combinations(importance_cap=(None, 1.1), clip_range_high=(None, 0.3)),
            *combinations(
                max_tokens_per_microbatch=(1, 10_000), kl_in=KL_PLACES, epochs_per_rollout=(1,)
            ),
            *random_combinations(
                12, seed=2, **ANY, temperature=temperatures, epochs_per_rollout=epochs
            ),
        ],
    )


def rule_names():
    """Gives the values of kl_adaptation_method whose default numbers are recorded."""
    pairs = [f"{beta}+{term}" for beta in COEFFICIENT_RULES for term in TERM_RULES]
    return ["none", *TERM_RULES, *COEFFICIENT_RULES, *pairs]


# --------------------------------------------------------------------------------------------------
# Losses: log-probs as tensors, without a model


def generator(seed):
    """Gives a generator of torch with this seed."""
    return torch.Generator().manual_seed(seed)


def loss_tensors(extreme=False):
    """Gives {name: tensor} of 6 responses of at most 11 tokens, in float32.

    policy, old, sampler, reference: (6, 11) log-probs of the labels.
    exact_kl: (6, 11) KL(policy || reference) over the vocabulary.
    advantages: (6, 1).
    mask: (6, 11), ragged, True from the left. Outside it the tensors hold ordinary numbers too.
    direction: (6, 11), for along().

    extreme: two tokens get log(policy / reference) of about -25 and 25, beyond the cut at 20.
    """
    # With this seed no value is within 0.002 of a bound, where rounding could take it across.
    draw = generator(241)
    policy = 1.5 * torch.randn(6, 11, 13, generator=draw)
    # Many ratios of policy to old leave the clip range, and some exceed 2.
    old = policy + 0.45 * torch.randn(6, 11, 13, generator=draw)
    # Some importance weights exceed 2.
    sampler = old + 0.45 * torch.randn(6, 11, 13, generator=draw)
    # Some log-ratios of policy to reference exceed 5.
    reference = policy + 2.2 * torch.randn(6, 11, 13, generator=draw)
    labels = torch.randint(13, (6, 11, 1), generator=draw)
    logits = {"policy": policy, "old": old, "sampler": sampler, "reference": reference}
    normal = {name: x.log_softmax(2) for name, x in logits.items()}
    tensors = {name: x.gather(2, labels)[:, :, 0] for name, x in normal.items()}
    if extreme:
        for name, value in dict(policy=-27.0, old=-27.1, sampler=-26.8, reference=-2.0).items():
            tensors[name][0, 2] = value
        tensors["reference"][3, 5] = tensors["policy"][3, 5] - 25.0
    tensors["exact_kl"] = (normal["policy"].exp() * (normal["policy"] - normal["reference"])).sum(2)
    tensors["advantages"] = torch.tensor([[1.3], [-0.7], [0.2], [-1.1], [0.9], [-0.6]])
    tensors["mask"] = torch.arange(11) < torch.tensor([[11], [4], [1], [9], [7], [10]])
    tensors["direction"] = torch.randn(6, 11, generator=draw)
    return tensors


def along(gradient, direction):
    """Gives the inner product of both as a float.

    A norm does not see a wrong sign or a wrong direction; this number does.
    """
    return (gradient.double() * direction.double()).sum().item()


# --------------------------------------------------------------------------------------------------
# Steps: a small model, its reference, responses

SGD_STEP = 0.15  # Length of the move of all weights between two epochs, against the gradient.


def fill(model, std, seed):
    """Gives the model with random weights that do not depend on how transformers draws its own.

    Weights of norms are near 1, all others have this standard deviation.
    """
    with torch.no_grad():
        for i, (name, parameter) in enumerate(sorted(model.named_parameters())):
            noise = torch.randn(parameter.shape, generator=generator(1000 * seed + i))
            parameter.copy_(1 + 0.1 * noise if parameter.dim() == 1 else std * noise)
    return model


def make_models():
    """Gives policy and reference, 2-layer Qwen3 models in float32 and in eval mode.

    All weights of the reference differ from those of the policy. The attention is the default of
    transformers; a caller who has another one sets it on both.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    with torch.random.fork_rng(devices=[]):
        policy = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=32,
                hidden_size=32,
                intermediate_size=32,
                num_hidden_layers=2,
                head_dim=8,
                num_attention_heads=4,
                num_key_value_heads=2,
                tie_word_embeddings=True,
            )
        )
    policy = fill(policy.float().eval(), 0.15, seed=4)
    reference = copy.deepcopy(policy).requires_grad_(False)
    for i, (name, parameter) in enumerate(sorted(reference.named_parameters())):
        parameter += 0.06 * torch.randn(parameter.shape, generator=generator(5000 + i))
    return policy, reference


def make_responses():
    """Gives 12 responses as dicts of plain lists: 3 to each of 4 prompts, group after group.

    Each has prompt_ids, response_ids, finished and log_probs, which are made up and stand for those
    of the sampler. Lengths are ragged; one prompt and two responses have a single token.
    """
    rng, responses = random.Random(6), []
    for prompt_length, lengths in ((4, (9, 2, 5)), (1, (1, 7, 3)), (6, (8, 8, 1)), (2, (4, 6, 9))):
        prompt = [rng.randrange(32) for _ in range(prompt_length)]
        for length in lengths:
            responses.append(
                {
                    "prompt_ids": prompt,
                    "response_ids": [rng.randrange(32) for _ in range(length)],
                    "log_probs": [round(min(-0.1, rng.gauss(-3.4, 0.8)), 4) for _ in range(length)],
                    "finished": length < 9,
                }
            )
    return responses


def step_advantages():
    """Gives the (12,) advantages of make_responses()."""
    return torch.tensor([1.1, -0.8, -0.3, 0.4, 0.7, -1.1, -0.2, 1.2, -1.0, 0.9, -0.9, 0.05])


def direction_of(name, shape):
    """Gives a fixed direction for along(), for the parameter of this name."""
    return torch.randn(shape, generator=generator(zlib.crc32(name.encode())))


# --------------------------------------------------------------------------------------------------
# Controllers of the coefficient


def controller_settings():
    """Gives {name: setting}, two for each rule: with its own target and with a given one."""
    common = dict(
        kl_coef=0.1,
        kl_clip_threshold=None,
        dynamic_beta_decay=0.9,
        reward_threshold=0.5,
        beta_schedule_steps=45,
    )
    settings = {}
    for rule in COEFFICIENT_RULES:
        settings[rule] = common | dict(kl_adaptation_method=rule, kl_target=None, beta_min=0.0)
        given = dict(kl_target=0.02, beta_min=0.03)
        settings[f"{rule} kl_target=0.02 beta_min=0.03"] = settings[rule] | given
    return settings


def kl_and_reward_of_steps():
    """Gives 60 pairs (KL in nats per token, mean reward), three of which are not finite."""
    rng, pairs = random.Random(7), []
    for step in range(60):
        # The KL starts below every target and ends above.
        kl = 0.004 * math.exp(0.08 * step + rng.gauss(0, 0.8))
        # The reward rises and falls.
        reward = 0.2 + 0.4 * math.sin(step / 9) + rng.gauss(0.15, 0.1)
        reward = min(1.0, max(0.0, reward))
        pairs.append((kl, reward))
    pairs[17] = (math.nan, pairs[17][1])
    pairs[33] = (pairs[33][0], math.nan)
    pairs[41] = (math.inf, pairs[41][1])
    return pairs


# --------------------------------------------------------------------------------------------------
# A run: a checkpoint, a reward, the settings of main()

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{{ '<|assistant|>' + m['content'] + '<|end|>' }}"
    "{% else %}{{ '<|user|>' + m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make_tokenizer():
    """Gives a tokenizer for which each character is a token; the answer tags are one token each."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<unk>"]
    characters = "abcdefghijklmnopqrstuvwxyz0123456789 +-*/()=:.,?!<>"
    tokens = [*special, "<answer>", "</answer>", *characters]
    core = Tokenizer(
        models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>")
    )
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()  # Without it decode() puts a space between characters.
    core.add_tokens(["<answer>", "</answer>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
        extra_special_tokens=["<|user|>", "<|assistant|>"],
        model_max_length=256,
        clean_up_tokenization_spaces=False,
    )


def save_checkpoint(folder):
    """Writes a small Qwen3 model with random weights and its tokenizer. Gives the folder."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = make_tokenizer()
    with torch.random.fork_rng(devices=[]):
        model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=len(tokenizer),
                hidden_size=64,
                intermediate_size=96,
                num_hidden_layers=2,
                head_dim=32,
                num_attention_heads=2,
                num_key_value_heads=2,
                tie_word_embeddings=True,
                max_position_embeddings=256,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
                bos_token_id=None,
            )
        )
    fill(model.float(), 0.15, seed=8).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def variety(text, problem):
    """A reward that random weights can earn: a tenth for every distinct character of the text."""
    return len(set(text)) / 10


def run_settings():
    """Gives {name: settings of main()}. model_id and out_dir are for the caller to add."""
    common = dict(
        task="countdown",
        numbers_per_problem=(2,),
        max_number=20,
        max_target=99,
        n_train_problems=60,
        n_eval_problems=20,
        countdown_prompt="make {target}: {numbers}",
        reward=variety,
        seed=1,
        engine="transformers",
        device="cpu",
        bf16=False,
        n_train_steps=20,
        rollout_batch_size=32,
        group_size=4,
        max_new_tokens=8,
        temperature=1.0,
        normalize_by_std=True,
        loss_average="dapo",
        learning_rate=1e-3,
        warmup_steps=10,
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_tokens_per_microbatch=200,
        eval_every=0,
        save_every=0,
        save_model=False,
    )
    penalty = dict(
        use_kl_penalty=True, kl_coef=0.1, kl_estimator="k3", kl_gradient="reverse", kl_in="loss"
    )
    return {
        "KL penalty": common | penalty | dict(epochs_per_rollout=1),
        "two epochs, no KL penalty": common | dict(use_kl_penalty=False, epochs_per_rollout=2),
    }


# --------------------------------------------------------------------------------------------------
# Small functions: rewards, advantages, weights of tokens, values of the KL

REWARD_PROBLEMS = {
    "countdown": {"numbers": [3, 5, 7], "target": 22},
    "text": {"answer": "1,234.5"},
}
REWARD_TEXTS = [  # They come before the lines of fuzz_corpus.jsonl, few of which are solved.
    "<answer>3*5+7</answer>",
    "so <answer> 7 - -(5 * 3) </answer>.",
    "<answer>1</answer><answer>7+3*5</answer>",
    "<answer>22</answer>",
    "<answer>3*5+7+0</answer>",
    "<answer>7/(5-5)</answer>",
    "<answer>9**9**9</answer>",
    "<answer>" + 300 * "(" + "</answer>",
    "<answer>$1,234.50</answer>",
    "<answer>1234.5 dollars</answer>",
    "<answer>it costs 1,234.5</answer>",
    "<answer>-1234.5</answer>",
    "<answer>\u22121234.5</answer>",
    "",
    "3*5+7",
    "<answer>",
    "</answer><answer>3*5+7",
    "<answer></answer>",
    "<answer>   </answer>",
]


def advantage_inputs():
    """Gives {name: dict(rewards (12,), group_size, advantage_eps, normalize_by_std)}.

    One group has equal rewards.
    """
    rewards = torch.tensor([0.11, 0.11, 0.11, 0.11, 0.0, 1.0, 0.1, 0.0, 0.3, 0.31, 0.3, 0.2])
    return {
        f"group_size={size} advantage_eps={eps} normalize_by_std={by_std}": dict(
            rewards=rewards, group_size=size, advantage_eps=eps, normalize_by_std=by_std
        )
        for size in (2, 4, 6)
        for eps in (1e-6, 1e-2)
        for by_std in (True, False)
    }


def weight_inputs():
    """Gives {name: dict(response_mask (5, 7), loss_average, max_new_tokens)}."""
    mask = torch.arange(7) < torch.tensor([[7], [1], [3], [5], [2]])
    return {
        f"{average} max_new_tokens={n}": dict(
            response_mask=mask, loss_average=average, max_new_tokens=n
        )
        for average in LOSS_AVERAGES
        for n in (7, 10)
    }


def kl_inputs():
    """Gives policy and reference log-probs, (1, 11) each, of many different distances."""
    d = torch.tensor([[0.0, 1e-4, -1e-4, 0.01, -0.01, 0.5, -0.5, 2.0, -2.0, 9.0, -9.0]])
    reference = torch.tensor(
        [[-1.0, -2.0, -0.5, -3.0, -0.1, -4.0, -1.5, -2.5, -0.25, -10.0, -0.125]]
    )
    return reference + d, reference


# --------------------------------------------------------------------------------------------------
# Comparison


FLOORS = {"losses": 1e-3, "steps": 0.1, "run: KL penalty": 0.1,
          "run: two epochs, no KL penalty": 0.1}


def floor_of(section):
    """Gives the floor for differences(), which is the size of the numbers that were summed up.

    A loss or a signed mean of a whole step is a small remainder of numbers around 1. Other sections
    hold few sums or none.
    """
    return FLOORS.get(section, 1e-6)


def differences(recorded, found, floor, path="", scale=0.0):
    """Gives a list of (relative difference, path, recorded value, found value), largest first.

    Both are nested dicts and lists of numbers and texts. A difference is divided by the larger of
    both values, but by no less than floor, since a number near 0 is what is left of larger ones.
    The inner product of a gradient with a direction, "along", is likewise divided by no less than
    the norm of that gradient. These count as infinitely different: what is missing, what is too
    much, texts that are not the same, nan or infinity against another number.
    """
    if isinstance(recorded, dict) and isinstance(found, dict):
        norm = recorded.get("gradient_norm", 0.0)
        keys = recorded | found
        both = [(key, recorded.get(key, "missing"), found.get(key, "missing")) for key in keys]
    elif isinstance(recorded, list) and isinstance(found, list):
        norm = 0.0
        pairs = itertools.zip_longest(recorded, found, fillvalue="missing")
        both = [(i, a, b) for i, (a, b) in enumerate(pairs)]
    else:
        numbers = all(isinstance(x, (int, float)) for x in (recorded, found))
        if recorded == found or numbers and math.isnan(recorded) and math.isnan(found):
            size = 0.0
        elif numbers and math.isfinite(recorded) and math.isfinite(found):
            size = abs(recorded - found) / max(abs(recorded), abs(found), floor, scale)
        else:
            size = math.inf
        return [(size, path, recorded, found)]
    rows = []
    for key, a, b in both:
        longer = f"{path} / {key}" if path else str(key)
        rows += differences(a, b, floor, longer, norm if key == "along" else 0.0)
    return sorted(rows, key=lambda row: -row[0])
