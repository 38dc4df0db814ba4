"""Small models with random weights: one for every model type that AutoModelForCausalLM knows, and
variants of some. Their sizes are in small_models.yaml."""

import copy
import inspect
import random
from pathlib import Path

import torch
import transformers
import yaml
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

SIZES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
VOCABULARY = SIZES["tiny"]["vocab_size"]
ROWS = [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *SIZES["variants"]]


def small_config(config_class, changes):
    """A configuration class, changes of its text part -> a small configuration that has every
    kind of layer once."""
    known = {*inspect.signature(config_class).parameters, *config_class.attribute_map}
    values = {name: value for name, value in SIZES["tiny"].items() if name in known}
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


@torch.no_grad()
def make_model(name, largest_logit=10.0):
    """Returns a model whose matrices, biases, norms and routers' biases are all random and whose
    logits reach largest_logit, so that nothing that is left out goes unnoticed."""
    model_type = name.split(" (")[0]
    changes = SIZES["needed"].get(model_type, {}) | SIZES["variants"].get(name, {})
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
