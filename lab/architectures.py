"""Is starter.py right for an architecture, or does it refuse to train it?

    python -m lab.architectures          writes lab/results/architectures.csv, in about a minute
    python -m lab.architectures Gemma2   prints the outcome of the configurations of this name

Each row of TABLE is a small model with random weights. It goes through the same start-up checks
as in main(). If they accept it, the trainer's log-probs and greedy sampling are compared with the
model's own forward pass, one row at a time and without padding. tests/test_architectures.py runs
the same table.
"""
import copy
import csv
import dataclasses
import inspect
import random
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers

import starter

WINDOW = 5  # tokens that a sliding window sees; prompts are longer
VOCABULARY = 61
MAX_NEW_TOKENS = 12
PROMPT_LENGTHS = (3, 7, 12, 20)
STOP_TOKEN = 2
CAP = 30.0

# --------------------------------------------------------------------------------------------------
# 1. The table.  Name -> transformers class and what its configuration changes.

# Given to every configuration that knows the name.
TINY = dict(
    vocab_size=VOCABULARY, max_position_embeddings=128, n_positions=128, max_seq_len=128,
    context_length=128, hidden_size=32, n_embd=32, d_model=32, intermediate_size=48,
    ffn_dim=48, num_hidden_layers=2, n_layer=2, n_layers=2, num_layers=2, decoder_layers=2,
    num_attention_heads=4, n_head=4, n_heads=4, attention_heads=4, decoder_attention_heads=4,
    num_key_value_heads=2, head_dim=8, decoder_ffn_dim=48, word_embed_proj_dim=32,
    moe_intermediate_size=16, shared_expert_intermediate_size=16, num_experts=4,
    num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2,
    mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_chunk_size=8, mamba_d_ssm=64,
    mamba_dt_rank=4, linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2,
    linear_num_value_heads=4, tie_word_embeddings=False, pad_token_id=0, bos_token_id=1,
    eos_token_id=STOP_TOKEN)

ONE_OF_EACH = ["sliding_attention", "full_attention"]
FULL = ["full_attention", "full_attention"]
RECURRENT = ["linear_attention", "full_attention"]
LATENT_ATTENTION = dict(kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
                        v_head_dim=8, num_key_value_heads=4, n_group=1, topk_group=1,
                        first_k_dense_replace=1, head_dim=8)


def rope(kind, theta=100.0, **settings):
    """A rope whose frequencies turn visibly within the few tokens of these prompts."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **settings}}


def longrope(original_length):
    """Positions are computed differently as soon as a row is longer than original_length."""
    return rope("longrope", short_factor=[1.0, 1.1, 1.2, 1.3], long_factor=[2.0, 2.5, 3.0, 4.0],
                original_max_position_embeddings=original_length, factor=4.0)


def table():
    """{name: (class, changes)}. A name is the family and, in brackets, what is special."""
    rows = {}

    def add(name, kind, **changes):
        rows[name] = (kind, changes)

    # Llama with each kind of rope.
    add("Llama", "LlamaForCausalLM")
    add("Llama (tied, bias)", "LlamaForCausalLM", tie_word_embeddings=True, attention_bias=True,
        mlp_bias=True)
    add("Llama (rope linear)", "LlamaForCausalLM", **rope("linear", factor=4.0))
    add("Llama (rope dynamic)", "LlamaForCausalLM", **rope("dynamic", factor=4.0))
    add("Llama (rope dynamic, rows longer than it knows)", "LlamaForCausalLM",
        max_position_embeddings=16, **rope("dynamic", factor=4.0))
    add("Llama (rope yarn)", "LlamaForCausalLM",
        **rope("yarn", factor=4.0, original_max_position_embeddings=32))
    add("Llama (rope llama3)", "LlamaForCausalLM",
        **rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
               original_max_position_embeddings=32))
    add("Llama (rope longrope)", "LlamaForCausalLM", **longrope(64))
    add("Llama (rope longrope, rows on both sides)", "LlamaForCausalLM", **longrope(16))

    # Attention over everything before.
    add("Qwen2", "Qwen2ForCausalLM")
    add("Qwen2 (tied)", "Qwen2ForCausalLM", tie_word_embeddings=True)
    add("Qwen2-MoE", "Qwen2MoeForCausalLM")
    add("Qwen3", "Qwen3ForCausalLM")
    add("Qwen3 (tied)", "Qwen3ForCausalLM", tie_word_embeddings=True)
    add("Qwen3-MoE", "Qwen3MoeForCausalLM")
    add("Mistral", "MistralForCausalLM", sliding_window=None)
    add("Mixtral", "MixtralForCausalLM", sliding_window=None)
    add("Gemma", "GemmaForCausalLM", tie_word_embeddings=True)
    add("Phi", "PhiForCausalLM", partial_rotary_factor=0.5)
    add("Phi3", "Phi3ForCausalLM", sliding_window=None)
    add("Phi3 (rope longrope)", "Phi3ForCausalLM", sliding_window=None,
        original_max_position_embeddings=64, **longrope(64))
    add("PhiMoE", "PhimoeForCausalLM", sliding_window=None, lm_head_bias=True)
    add("OPT", "OPTForCausalLM", tie_word_embeddings=True)
    add("OPT (other width of embedding)", "OPTForCausalLM", word_embed_proj_dim=16,
        tie_word_embeddings=True)
    add("GPT2 (dropout)", "GPT2LMHeadModel", tie_word_embeddings=True, resid_pdrop=0.1,
        embd_pdrop=0.1, attn_pdrop=0.1)
    add("GPT-BigCode", "GPTBigCodeForCausalLM", tie_word_embeddings=True)
    add("GPT-J", "GPTJForCausalLM", rotary_dim=4)
    add("CodeGen", "CodeGenForCausalLM", rotary_dim=4)
    add("GPT-NeoX", "GPTNeoXForCausalLM")
    add("Falcon", "FalconForCausalLM", tie_word_embeddings=True)
    add("Falcon (alibi)", "FalconForCausalLM", alibi=True, tie_word_embeddings=True)
    add("Falcon (new decoder)", "FalconForCausalLM", new_decoder_architecture=True,
        num_kv_heads=2, tie_word_embeddings=True)
    add("Bloom", "BloomForCausalLM", tie_word_embeddings=True)
    add("MPT", "MptForCausalLM", tie_word_embeddings=True)
    add("OLMo", "OlmoForCausalLM", clip_qkv=2.0)
    add("OLMo2", "Olmo2ForCausalLM")
    add("OLMoE", "OlmoeForCausalLM")
    add("GLM", "GlmForCausalLM")
    add("GLM4", "Glm4ForCausalLM")
    add("GLM4-MoE", "Glm4MoeForCausalLM", n_group=1, topk_group=1, first_k_dense_replace=1)
    add("Granite (logit scale)", "GraniteForCausalLM", logits_scaling=8.0,
        embedding_multiplier=2.0, residual_multiplier=0.5, attention_multiplier=0.25)
    add("Granite-MoE (logit scale)", "GraniteMoeForCausalLM", logits_scaling=4.0)
    add("Cohere (logit scale)", "CohereForCausalLM", tie_word_embeddings=True, logit_scale=0.5)
    add("StableLM", "StableLmForCausalLM", use_qkv_bias=True, qk_layernorm=True)
    add("StableLM (parallel)", "StableLmForCausalLM", use_parallel_residual=True)
    add("Nemotron", "NemotronForCausalLM")
    add("DeepSeek-V2", "DeepseekV2ForCausalLM", **LATENT_ATTENTION)
    add("DeepSeek-V3", "DeepseekV3ForCausalLM", **LATENT_ATTENTION)
    add("GLM4-MoE-Lite", "Glm4MoeLiteForCausalLM", **LATENT_ATTENTION)
    add("MiniCPM3", "MiniCPM3ForCausalLM", dim_model_base=16, **LATENT_ATTENTION)
    add("SmolLM3", "SmolLM3ForCausalLM", no_rope_layers=[1, 0])
    add("Starcoder2", "Starcoder2ForCausalLM", sliding_window=None)
    add("XGLM", "XGLMForCausalLM", tie_word_embeddings=True)
    add("BioGPT", "BioGptForCausalLM", tie_word_embeddings=True)
    add("Persimmon", "PersimmonForCausalLM")
    add("Seed-OSS", "SeedOssForCausalLM")
    add("Arcee", "ArceeForCausalLM")
    add("Apertus", "ApertusForCausalLM")
    add("Helium", "HeliumForCausalLM")
    add("ERNIE-4.5", "Ernie4_5ForCausalLM")
    add("HunYuan", "HunYuanDenseV1ForCausalLM")
    add("BitNet", "BitNetForCausalLM")
    add("DiffLlama", "DiffLlamaForCausalLM")
    add("JetMoE", "JetMoeForCausalLM")
    add("Doge", "DogeForCausalLM")
    add("HRM", "HrmTextForCausalLM")
    add("HY-V3", "HYV3ForCausalLM")
    add("MiniMax-M2", "MiniMaxM2ForCausalLM")
    add("Solar-Open", "SolarOpenForCausalLM")
    add("ERNIE-4.5-MoE", "Ernie4_5_MoeForCausalLM")
    add("FlexOLMo", "FlexOlmoForCausalLM")
    add("HunYuan-MoE", "HunYuanMoEV1ForCausalLM")
    add("Ministral3", "Ministral3ForCausalLM", sliding_window=None)
    add("Jais2", "Jais2ForCausalLM")
    add("HyperCLOVA-X", "HyperCLOVAXForCausalLM")
    add("Aria", "AriaTextForCausalLM")
    add("Emu3", "Emu3ForCausalLM")
    add("Fuyu", "FuyuForCausalLM")
    add("Youtu", "YoutuForCausalLM", **LATENT_ATTENTION)
    add("LongCat-Flash", "LongcatFlashForCausalLM", ffn_hidden_size=48, moe_topk=2,
        expert_ffn_hidden_size=16, zero_expert_num=1, **LATENT_ATTENTION)
    add("DeepSeek-V3.2 (chosen tokens)", "DeepseekV32ForCausalLM", **LATENT_ATTENTION)
    add("GLM-MoE-DSA (chosen tokens)", "GlmMoeDsaForCausalLM", **LATENT_ATTENTION)
    add("DeepSeek-V4 (compressed)", "DeepseekV4ForCausalLM")
    add("Zaya", "ZayaForCausalLM", num_experts_per_tok=1, router_hidden_size=16)
    add("GPT-NeoX-Japanese", "GPTNeoXJapaneseForCausalLM")
    add("NanoChat (cap)", "NanoChatForCausalLM", final_logit_softcapping=CAP)

    # Sliding windows, chunks, caps and sinks.
    window = dict(sliding_window=WINDOW)
    add("Mistral (window)", "MistralForCausalLM", **window)
    add("Mixtral (window)", "MixtralForCausalLM", **window)
    add("Qwen2 (window)", "Qwen2ForCausalLM", use_sliding_window=True, max_window_layers=1,
        **window)
    add("Qwen3-MoE (window)", "Qwen3MoeForCausalLM", use_sliding_window=True, max_window_layers=1,
        **window)
    add("Phi3 (window)", "Phi3ForCausalLM", **window)
    add("Starcoder2 (window)", "Starcoder2ForCausalLM", **window)
    add("Ministral (window)", "MinistralForCausalLM", layer_types=ONE_OF_EACH, **window)
    add("Gemma2 (window, caps)", "Gemma2ForCausalLM", layer_types=ONE_OF_EACH,
        final_logit_softcapping=CAP, attn_logit_softcapping=2.0, tie_word_embeddings=True,
        query_pre_attn_scalar=8, **window)
    add("Gemma2 (caps, no window)", "Gemma2ForCausalLM", layer_types=FULL,
        final_logit_softcapping=CAP, attn_logit_softcapping=2.0, tie_word_embeddings=True,
        query_pre_attn_scalar=8)
    add("Gemma3 (window)", "Gemma3ForCausalLM", layer_types=ONE_OF_EACH, query_pre_attn_scalar=8,
        tie_word_embeddings=True, **window)
    add("Gemma3 (image, window)", "Gemma3ForConditionalGeneration")
    add("VaultGemma (window, caps)", "VaultGemmaForCausalLM", layer_types=ONE_OF_EACH,
        final_logit_softcapping=CAP, attn_logit_softcapping=2.0, tie_word_embeddings=True,
        query_pre_attn_scalar=8, **window)
    add("OLMo3 (window)", "Olmo3ForCausalLM", layer_types=ONE_OF_EACH, **window)
    add("Cohere2 (window, logit scale)", "Cohere2ForCausalLM", layer_types=ONE_OF_EACH,
        tie_word_embeddings=True, logit_scale=0.5, **window)
    add("EXAONE4 (window)", "Exaone4ForCausalLM", layer_types=ONE_OF_EACH, **window)
    add("GPT-Neo (window)", "GPTNeoForCausalLM", attention_types=[[["global", "local"], 1]],
        window_size=WINDOW, num_heads=4, tie_word_embeddings=True)
    add("Llama4 (chunks)", "Llama4ForCausalLM", attention_chunk_size=WINDOW, no_rope_layers=[1, 0],
        layer_types=["chunked_attention", "full_attention"], floor_scale=4,
        intermediate_size_mlp=48, interleave_moe_layer_step=2)
    add("GPT-OSS (window, sinks)", "GptOssForCausalLM", layer_types=ONE_OF_EACH, **window)
    add("GPT-OSS (sinks, no window)", "GptOssForCausalLM", layer_types=FULL)
    add("MiMo-V2 (window, sinks)", "MiMoV2FlashForCausalLM", layer_types=ONE_OF_EACH, v_head_dim=8,
        **window)

    add("AFMoE (window)", "AfmoeForCausalLM", layer_types=ONE_OF_EACH, **window)
    add("CWM (window)", "CwmForCausalLM", layer_types=ONE_OF_EACH, **window)
    add("Laguna (window)", "LagunaForCausalLM", layer_types=ONE_OF_EACH, **window)
    add("Granite-SWA (window, sinks)", "GraniteSWAForCausalLM", layer_types=ONE_OF_EACH, **window)
    add("Dots1 (window)", "Dots1ForCausalLM", layer_types=ONE_OF_EACH, n_shared_experts=1,
        **window)
    add("EXAONE-MoE (window)", "ExaoneMoeForCausalLM", layer_types=ONE_OF_EACH, **window)
    add("Cohere2-MoE (window)", "Cohere2MoeForCausalLM", layer_types=ONE_OF_EACH, **window)
    add("Mellum (window)", "MellumForCausalLM", layer_types=ONE_OF_EACH, **window)
    add("ModernBERT (decoder, window)", "ModernBertDecoderForCausalLM", local_attention=2 * WINDOW)

    # Recurrence and convolutions.
    add("Qwen3-Next (recurrence)", "Qwen3NextForCausalLM", layer_types=RECURRENT)
    add("Qwen3.5 (recurrence)", "Qwen3_5ForCausalLM", layer_types=RECURRENT)
    add("OLMo-Hybrid (recurrence)", "OlmoHybridForCausalLM", layer_types=RECURRENT)
    add("MiniMax (recurrence)", "MiniMaxForCausalLM", layer_types=RECURRENT, block_size=4,
        sliding_window=None)
    add("Kimi-Linear (recurrence)", "KimiLinearForCausalLM", layer_types=RECURRENT,
        linear_head_dim=8, linear_num_heads=4, mlp_layer_types=["dense", "sparse"],
        **LATENT_ATTENTION)
    add("Mamba", "MambaForCausalLM", state_size=4, tie_word_embeddings=True)
    add("Mamba2", "Mamba2ForCausalLM", num_heads=8, n_groups=2, state_size=8, chunk_size=8)
    add("Falcon-Mamba", "FalconMambaForCausalLM", state_size=4)
    add("Falcon-H1 (recurrence)", "FalconH1ForCausalLM", lm_head_multiplier=0.5)
    add("Bamba (recurrence)", "BambaForCausalLM", attn_layer_indices=[1])
    add("Granite-MoE-Hybrid (recurrence)", "GraniteMoeHybridForCausalLM", logits_scaling=4.0,
        layer_types=["mamba", "attention"], shared_intermediate_size=16)
    add("Jamba (recurrence)", "JambaForCausalLM", attn_layer_period=2, attn_layer_offset=1,
        use_mamba_kernels=False)
    add("LFM2 (convolution)", "Lfm2ForCausalLM", layer_types=["conv", "full_attention"])
    add("RecurrentGemma (recurrence, cap)", "RecurrentGemmaForCausalLM", num_hidden_layers=3,
        attention_window_size=WINDOW, logits_soft_cap=CAP, tie_word_embeddings=True)
    add("LFM2-MoE (convolution)", "Lfm2MoeForCausalLM", layer_types=["conv", "full_attention"],
        num_dense_layers=1)
    add("Qwen3.5-MoE (recurrence)", "Qwen3_5MoeForCausalLM", layer_types=RECURRENT)
    add("Zamba2 (recurrence)", "Zamba2ForCausalLM", layers_block_type=["mamba", "hybrid"],
        n_mamba_heads=8, mamba_d_state=8, chunk_size=8)
    add("Nemotron-H (recurrence)", "NemotronHForCausalLM", mamba_num_heads=8, mamba_head_dim=8,
        ssm_state_size=8, n_groups=2, moe_shared_expert_intermediate_size=16, chunk_size=8)
    add("RWKV", "RwkvForCausalLM", attention_hidden_size=32)
    add("RWKV (weights rescaled for sampling)", "RwkvForCausalLM", attention_hidden_size=32,
        rescale_every=1)
    add("xLSTM", "xLSTMForCausalLM")

    # Not made to continue a text.
    add("BERT (decoder)", "BertLMHeadModel", is_decoder=True, tie_word_embeddings=True)
    add("BERT (looks ahead)", "BertLMHeadModel", is_decoder=False, tie_word_embeddings=True)
    add("RoBERTa (decoder)", "RobertaForCausalLM", is_decoder=True, tie_word_embeddings=True)
    add("BART (decoder)", "BartForCausalLM", is_decoder=True, tie_word_embeddings=True)
    add("Whisper (decoder)", "WhisperForCausalLM", is_decoder=True, tie_word_embeddings=True)
    add("TrOCR (decoder)", "TrOCRForCausalLM")
    add("XLM", "XLMWithLMHeadModel")
    add("CTRL", "CTRLLMHeadModel", tie_word_embeddings=True, dff=48)
    add("GPT", "OpenAIGPTLMHeadModel", tie_word_embeddings=True)
    return rows


TABLE = table()
FAMILIES = {kind.removesuffix("ForCausalLM") for kind, _ in TABLE.values()}

# --------------------------------------------------------------------------------------------------
# 2. Models.  A name in the table -> a small model with random weights.


def config_of(name):
    kind, changes = TABLE[name]
    config_class = getattr(transformers, kind).config_class
    if kind == "Gemma3ForConditionalGeneration":
        return gemma3_with_images(config_class)
    known = {*inspect.signature(config_class).parameters, *config_class.attribute_map}
    return config_class(**{key: value for key, value in TINY.items() if key in known} | changes)


def gemma3_with_images(config_class):
    text = config_of("Gemma3 (window)").to_dict()
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                  image_size=8, patch_size=4)
    return config_class(text_config=text, vision_config=vision, mm_tokens_per_image=4,
                        boi_token_index=58, eoi_token_index=59, image_token_index=60)


@torch.no_grad()
def make_model(name, largest_logit=25.0, dropout=False):
    """Returns a model whose matrices, biases and norms are all random and whose logits reach
    largest_logit, so that nothing that is left out goes unnoticed. dropout=True leaves its dropout
    rates as they are."""
    kind, _ = TABLE[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, kind)(config_of(name)).float().eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.3)
            else:
                parameter += 0.1 * torch.randn_like(parameter)
        for module in model.modules():
            # With norms near 1 a tied LM head would repeat the last token, whatever came before.
            if "Norm" in type(module).__name__ and getattr(module, "weight", None) is not None:
                module.weight.sub_(0.9 + 1.3 * torch.randn_like(module.weight).sign())
    model.generation_config.eos_token_id = STOP_TOKEN
    if not dropout:
        starter.make_forward_exact(model)
    ids = torch.tensor([token_ids(random.Random(0), 24)])
    for _ in range(5):  # more than once, where the embedding is tied or the logits are capped
        largest = model(input_ids=ids, use_cache=False).logits.abs().max()
        model.get_output_embeddings().weight *= largest_logit / largest
    return model


def token_ids(rng, n):
    """n random ids, none of which is special."""
    return [rng.randrange(3, VOCABULARY - 3) for _ in range(n)]


def make_prompts():
    rng = random.Random(1)
    return [token_ids(rng, n) for n in PROMPT_LENGTHS]


def settings(name="", **changes):
    """What the checks read of main()'s settings."""
    values = dict(seed=0, max_new_tokens=MAX_NEW_TOKENS, temperature=1.0, bf16=False,
                  engine="transformers", stop_token_ids=(STOP_TOKEN,), model_id=name)
    return SimpleNamespace(**values | changes)


def candidates():
    """The candidates for compute: that of support/, where it is installed, and the plain one."""
    return starter.find_parts()[0]


# --------------------------------------------------------------------------------------------------
# 3. Oracle.  The model's own forward pass, one row at a time, without padding and without a cache.

@torch.no_grad()
def own_logits(model, ids):
    """Token ids -> (len(ids), V) logits in float64. model: untouched by any compute, in eval
    mode."""
    assert not model.training
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double()


def own_log_prob_rows(model, rows):
    """[(prompt, response)] -> log-probs of all response tokens, row after row."""
    log_probs = []
    for prompt, response in rows:
        log_softmax = own_logits(model, [*prompt, *response]).log_softmax(dim=1)
        for i, token in enumerate(response):
            log_probs.append(log_softmax[len(prompt) + i - 1, token])
    return torch.stack(log_probs)


def scoring_difference(model, policy, compute, rows):
    """Returns the largest |log-prob of the trainer - the model's own|, in nats."""
    responses = [starter.Response(prompt, response, [0.0] * len(response), True)
                 for prompt, response in rows]
    batch = starter.make_batch(responses, torch.zeros(len(responses)), "cpu")
    with torch.no_grad():
        hidden = compute.hidden_states(policy, batch)
        labels = batch["labels"][batch["response_mask"]]
        ours = compute.token_statistics(hidden, labels, compute.head_of(policy), 1.0).log_probs
    difference = (ours - own_log_prob_rows(model, rows)).abs().max().item()
    return difference if difference == difference else float("inf")


def greedy_gap(model, policy, compute, prompts):
    """Returns the most by which the model's own largest logit exceeds that of a token that was
    sampled greedily."""
    sampling = starter.Sampling(1, MAX_NEW_TOKENS, 0.0, 0, (STOP_TOKEN,))
    # Sampling goes on after a stop token, so that every row has all its tokens.
    sampling = dataclasses.replace(sampling, stop_token_ids=(VOCABULARY + 1,))
    gap = 0.0
    for response in compute.rollout(policy, prompts, sampling):
        prompt, sampled = response.prompt_ids, response.response_ids
        assert len(sampled) == MAX_NEW_TOKENS
        logits = own_logits(model, [*prompt, *sampled])[len(prompt) - 1:-1]
        chosen = logits.gather(1, torch.tensor(sampled)[:, None])[:, 0]
        gap = max(gap, (logits.amax(dim=1) - chosen).max().item())
    return gap


# --------------------------------------------------------------------------------------------------
# 4. Outcome.  A name in the table -> right, refused or wrong.

@dataclass
class Outcome:
    name: str
    kind: str  # class in transformers
    outcome: str  # "right", "refused" or "wrong"
    compute: str = ""  # that the self-check chose
    dtype: str = ""  # of the comparison
    scoring_difference: str = ""  # nats, the larger of both computes
    greedy_gap: str = ""  # of the logits
    sentence: str = ""  # of the refusal


def rows_for_scoring(prompts):
    rng = random.Random(2)
    return [(prompt, token_ids(rng, n))
            for prompt, n in zip(prompts * 2, (12, 5, 9, 1, 3, 12, 2, 12))]


def works_in_float64(model):
    """Whether the forward pass works in float64 from end to end: some parts of some models are
    always float32 and raise an error."""
    try:
        logits = model(input_ids=torch.tensor([[5, 6, 7]]), use_cache=False).logits
    except RuntimeError:
        return False
    return logits.dtype == torch.float64


TOLERANCE = {"float64": 1e-5, "float32": 1e-4}


def examine(name):
    """Returns the Outcome of a configuration."""
    kind, _ = TABLE[name]
    policy = make_model(name)
    own = copy.deepcopy(policy)
    own_eager = copy.deepcopy(policy)
    own_eager.set_attn_implementation("eager")  # torch's fused kernel drops soft-caps
    prompts = make_prompts()
    cfg = settings(name)
    try:
        compute, _ = starter.choose_compute(candidates(), policy, prompts, cfg,
                                            starter.OneProcess())
    except starter.InputError as error:
        return Outcome(name, kind, "refused", sentence=str(error))
    rows = rows_for_scoring(prompts)
    gap = greedy_gap(own_eager, policy, compute, prompts)
    difference = scoring_difference(own_eager, policy, compute, rows)
    right = gap <= 1e-4 and difference <= 1e-4
    dtype = "float32"
    with torch.no_grad():
        if policy.config._attn_implementation == "eager":
            own = own_eager
        elif works_in_float64(copy.deepcopy(own).double()):
            # More exact than eager attention, whose softmax is always in float32.
            own.double()
            policy.double()
            dtype = "float64"
            difference = scoring_difference(own, policy, compute, rows)
        compute.undo(policy)
        difference = max(difference, scoring_difference(own, policy, starter.PLAIN, rows))
    right = right and difference <= TOLERANCE[dtype]
    return Outcome(name, kind, "right" if right else "wrong", compute.name, dtype,
                   f"{difference:.1e}", f"{gap:.1e}")


def main(wanted):
    outcomes = []
    for name in TABLE:
        if wanted and not any(name.startswith(word) for word in wanted):
            continue
        start = time.perf_counter()
        outcome = examine(name)
        outcomes.append(outcome)
        print(*dataclasses.astuple(outcome), f"{time.perf_counter() - start:.2f} s", sep=" | ")
    if wanted:
        return
    path = Path(__file__).parent / "results" / "architectures.csv"
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in dataclasses.fields(Outcome)] + [*versions])
        writer.writeheader()
        for outcome in outcomes:
            writer.writerow(dataclasses.asdict(outcome) | versions)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    main(sys.argv[1:])
