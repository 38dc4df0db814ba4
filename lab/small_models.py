"""Small models with random weights: one for every model type that AutoModelForCausalLM knows, and
variants of some."""

import copy
import inspect
import random

import torch
import transformers
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

VOCABULARY = 61
WINDOW = 5  # tokens that a sliding window sees; prompts are longer

# 1. Rows.  Name -> model type and what its configuration changes.

# Given to every configuration that knows the name.
TINY = {}
for value, names in {
    4: "num_attention_heads n_head n_heads attention_heads decoder_attention_heads "
    "num_experts num_local_experts n_routed_experts mamba_dt_rank linear_num_value_heads "
    "rotary_dim patch_size",
    2: "num_hidden_layers n_layer n_layers num_layers decoder_layers num_key_value_heads "
    "num_experts_per_tok linear_num_key_heads index_n_heads eos_token_id",
    8: "head_dim mamba_n_heads mamba_d_head mamba_d_state mamba_chunk_size "
    "linear_key_head_dim linear_value_head_dim index_head_dim image_size",
    32: "hidden_size hidden_size_global n_embd d_model word_embed_proj_dim",
    128: "max_position_embeddings n_positions max_seq_len context_length",
    48: "ffn_dim intermediate_size decoder_ffn_dim",
    1: "n_shared_experts bos_token_id depth",
    16: "moe_intermediate_size shared_expert_intermediate_size",
    WINDOW: "sliding_window attention_chunk_size",
}.items():
    TINY.update(dict.fromkeys(names.split(), value))
TINY.update(
    vocab_size=VOCABULARY,
    mamba_d_ssm=64,
    index_topk=6,
    is_decoder=True,
    tie_word_embeddings=False,
    pad_token_id=0,
)

LATENT = dict(
    kv_lora_rank=16,
    q_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=8,
    num_key_value_heads=4,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
)
CAPS = dict(final_logit_softcapping=30.0, attn_logit_softcapping=2.0, query_pre_attn_scalar=8)
SMALL_TABLE = dict(hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCABULARY)
GEMMA4 = SMALL_TABLE | dict(global_head_dim=16, num_kv_shared_layers=0)
WINDOWS = ["sliding_attention", "full_attention"]
RECURRENT = ["linear_attention", "full_attention"]
FULL = ["full_attention", "full_attention"]
NGRAMS = dict(
    indexer_n_heads=2,
    indexer_kv_heads=1,
    indexer_head_dim=8,
    indexer_budget=6,
    indexer_compress_ratio=2,
    hc_lowrank=8,
    ngram_vocab_size_base=97,
    ple_layer_ids=[1],
    ple_embed_dim=8,
    heads_per_ngram=2,
    split_ngram_parts=1,
)

# What a model type needs besides, to be small and to use what it is known for.
NEEDED = {
    "bamba": dict(attn_layer_indices=[1]),
    "blt": dict(encoder_hash_byte_group_vocab=100),
    "cohere": dict(logit_scale=0.5),
    "cohere_compass_text": dict(
        layer_types=WINDOWS,
        rope_parameters=dict.fromkeys(
            WINDOWS, {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 1, 2]}
        ),
    ),
    "gemma2": CAPS,
    "gemma3n_text": SMALL_TABLE
    | dict(num_hidden_layers=4, num_kv_shared_layers=2, laurel_rank=8, layer_types=WINDOWS * 2),
    "got_ocr2": dict(
        image_token_index=60,
        text_config=dict(
            model_type="qwen2",
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        ),
    ),
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]], window_size=WINDOW, num_heads=4),
    "granite": dict(logits_scaling=8.0, embedding_multiplier=2.0, residual_multiplier=0.5),
    "granitemoehybrid": dict(layer_types=RECURRENT, shared_intermediate_size=16),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False),
    "kimi_linear": LATENT | dict(linear_head_dim=8, linear_num_heads=4),
    "lfm2": dict(layer_types=["conv", "full_attention"]),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"], num_dense_layers=1),
    "llama4_text": dict(no_rope_layers=[1, 0], floor_scale=4, intermediate_size_mlp=48),
    "longcat_flash": LATENT | dict(zero_expert_num=1),
    "mamba2": dict(num_heads=8, head_dim=8, n_groups=2, state_size=8, chunk_size=8),
    "minicpm3": LATENT | dict(dim_model_base=16),
    "minimax": dict(layer_types=RECURRENT, block_size=4, sliding_window=None),
    "modernbert-decoder": dict(local_attention=2 * WINDOW),
    "nanochat": dict(final_logit_softcapping=30.0),
    "qwen4_exp": NGRAMS,
    "qwen4_exp_text": NGRAMS,
    "recurrent_gemma": dict(num_hidden_layers=3, attention_window_size=WINDOW),
    "reformer": dict(
        attention_head_size=8,
        axial_pos_shape=(8, 16),
        axial_pos_embds_dim=(16, 16),
        feed_forward_size=48,
        attn_layers=("local", "lsh"),
    ),
    "smollm3": dict(no_rope_layers=[1, 0]),
    "vaultgemma": CAPS,
    "xmod": dict(default_language="en_XX"),
    "xlstm": dict(hidden_size=128, num_heads=2, chunk_size=16),
    "zamba2": dict(n_mamba_heads=8, chunk_size=8),
    "zaya": dict(num_experts_per_tok=1, router_hidden_size=16),
}
for changes, names in [
    (
        LATENT,
        "axk1 axk2 deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa hy_v4 youtu",
    ),
    (dict(layer_types=WINDOWS), "cwm dots1 laguna mellum ministral"),
    (GEMMA4, "gemma4 gemma4_text gemma4_unified gemma4_unified_text"),
]:
    NEEDED.update(dict.fromkeys(names.split(), changes))


def rope(kind, **settings):
    """A rope whose frequencies turn visibly within the few tokens of these prompts."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 100.0, **settings}}


# Name -> changes. The model type is the first word.
VARIANTS = {
    "llama (rope linear)": rope("linear", factor=4.0),
    "llama (rope dynamic)": rope("dynamic", factor=4.0),
    "llama (rope yarn)": rope("yarn", factor=4.0, original_max_position_embeddings=32),
    "llama (rope llama3)": rope(
        "llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=32,
    ),
    "llama (biases)": dict(attention_bias=True, mlp_bias=True),
    "qwen3 (rope yarn)": rope("yarn", factor=4.0, original_max_position_embeddings=32),
    "gpt_neox (layers in turn)": dict(use_parallel_residual=False),
    "opt (norm after the layers)": dict(do_layer_norm_before=False),
    "stablelm (parallel, normed queries)": dict(use_parallel_residual=True, qk_layernorm=True),
    "gpt2 (dropout)": dict(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1),
    "falcon (alibi)": dict(alibi=True),
    "falcon (new decoder)": dict(new_decoder_architecture=True, num_kv_heads=2),
    "mpt (logit scale)": dict(logit_scale=0.5),
    "opt (other width of embedding)": dict(word_embed_proj_dim=16),
    "gemma2 (caps, no window)": dict(layer_types=FULL),
    "gemma3n_text (no shared layers)": dict(num_kv_shared_layers=0),
    "gemma3n_text (windows alone)": dict(layer_types=WINDOWS[:1] * 4, pad_token_id=0),
    "gemma4_text (shared layers)": dict(
        num_hidden_layers=4, num_kv_shared_layers=2, layer_types=WINDOWS * 2
    ),
    "gemma4_text (experts)": dict(enable_moe_block=True, top_k_experts=2),
    "gpt_oss (sinks, no window)": dict(layer_types=FULL),
    "rwkv (weights rescaled for sampling)": dict(rescale_every=1),
    "bert (looks ahead)": dict(is_decoder=False),
}
for rows, length in (("", 64), (", rows on both sides", 16)):
    VARIANTS[f"llama (rope longrope{rows})"] = rope(  # positions differ in rows longer than length
        "longrope",
        short_factor=[1.0, 1.1, 1.2, 1.3],
        long_factor=[2.0, 2.5, 3.0, 4.0],
        original_max_position_embeddings=length,
        factor=4.0,
    )
for variant, changes, names in [
    ("window", dict(use_sliding_window=True, max_window_layers=1), "qwen2 qwen3 qwen3_moe"),
    (
        "no window",
        dict(sliding_window=None),
        "mistral mixtral phi3 phimoe starcoder2 ministral3",
    ),
    (
        "tied",
        dict(tie_word_embeddings=True),
        "llama qwen2 qwen3 gemma gemma2 gemma3_text gemma4_text gpt2 opt bloom falcon mamba cohere "
        "starcoder2 smollm3 granite qwen3_5_text lfm2 mixtral phi3 olmo2 glm stablelm qwen3_moe "
        "olmoe deepseek_v3 gpt_neox helium gpt_oss",
    ),
]:
    for name in names.split():
        VARIANTS[f"{name} ({variant})"] = changes

ROWS = [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS]


def small_config(config_class, changes):
    """A configuration class, changes of its text part -> a small configuration that has every
    kind of layer once."""
    known = {*inspect.signature(config_class).parameters, *config_class.attribute_map}
    values = {name: value for name, value in TINY.items() if name in known}
    for name in {"layer_types", "mlp_layer_types", "layers_block_type"} & known:
        kinds = list(dict.fromkeys(getattr(config_class(), name, None) or []))
        if len(kinds) > 1:
            values |= {name: kinds, "num_hidden_layers": len(kinds)}
    for name, part in config_class.sub_configs.items():
        if part is not transformers.AutoConfig:
            of_part = {}
            if name == "text_config":
                of_part, changes = changes, {}
            values[name] = small_config(part, of_part).to_dict()
    return config_class(**{**values, **changes})


# 2. Models.  A name -> a small model with random weights.


@torch.no_grad()
def make_model(name, largest_logit=10.0):
    """Returns a model whose matrices, biases, norms and routers' biases are all random and whose
    logits reach largest_logit, so that nothing that is left out goes unnoticed."""
    model_type = name.split(" (")[0]
    changes = {**NEEDED.get(model_type, {}), **VARIANTS.get(name, {})}
    config = small_config(transformers.CONFIG_MAPPING[model_type], changes)
    # Checkpoints of models that also see images are saved by another class than is trained here.
    kind = transformers.AutoModelForCausalLM
    if model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES and hasattr(config, "text_config"):
        kind = transformers.AutoModelForImageTextToText
    torch.manual_seed(0)
    model = kind.from_config(config).float().eval()
    learnt = {name for name, _ in model.named_parameters()}
    for key, tensor in model.state_dict().items():
        if tensor.dim() > 1 and key in learnt:
            tensor.normal_(0.0, 0.3)
        elif tensor.dim() < 2 and tensor.is_floating_point():
            tensor += 0.1 * torch.randn_like(tensor)
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
            module.weight[module.padding_idx] = 0.0
        # With norms near 1 a tied LM head would repeat the last token, whatever came before.
        if "Norm" in type(module).__name__ and getattr(module, "weight", None) is not None:
            module.weight.sub_(0.9 + 1.3 * torch.randn_like(module.weight).sign())
    model.generation_config.eos_token_id = 2
    ids = torch.tensor([token_ids(random.Random(0), 24)])
    head = model.get_output_embeddings()
    if head is None:
        return model
    for _ in range(5):  # a tied or capped head needs several
        logits = copy.deepcopy(model)(input_ids=ids, use_cache=False).logits
        head.weight *= largest_logit / logits.abs().max()
    return model


def token_ids(rng, n):
    """n random ids, none of which is special."""
    return [rng.randrange(3, VOCABULARY - 3) for _ in range(n)]


def save_tokenizer(folder):
    """A tokenizer whose words are numbers. AutoTokenizer needs one in the folder of a model."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="3"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="2", pad_token="0"
    ).save_pretrained(folder)
