"""Model cards against published counts, and config.json of the families that vLLM serves."""

import csv
import json
from pathlib import Path

import pytest

from hetero_gateway.errors import ConfigError
from hetero_gateway.files.checkpoints.shape import model_from_config
from hetero_gateway.files.model_cards import MODEL_CARDS, model_card

GIB = 2**30

# Billions, as the models' own pages have them (the sum of their checkpoints' tensors).
PUBLISHED = json.loads(Path(__file__).with_name("published_cards.json").read_text())


def test_every_card_has_the_published_number_of_parameters():
    assert set(PUBLISHED) == set(MODEL_CARDS)
    for name, billions in PUBLISHED.items():
        assert MODEL_CARDS[name].parameters == pytest.approx(billions * 1e9, rel=0.002), name


CONFIGS = json.loads(Path(__file__).with_name("published_models.json").read_text())


def published(name):
    return model_from_config(CONFIGS[name]["config"], name=name)


def config(**changes):
    """Llama-3-8B's."""
    fields = {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 128256, "torch_dtype": "bfloat16", "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    }  # fmt: skip
    return {k: v for k, v in (fields | changes).items() if v is not ...}


def test_a_config_gives_what_the_card_holds():
    assert model_from_config(config(), name="Llama-3-8B") == model_card("Llama-3-8B")
    # Without KV heads every head is one.
    assert model_from_config(config(num_key_value_heads=...), name="m").kv_heads == 32


@pytest.mark.parametrize(
    "field",
    ["hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size", "intermediate_size"],
)
def test_a_missing_field_is_named(field):
    with pytest.raises(ConfigError, match=f"mine: config.json has no {field}"):
        model_from_config(config(**{field: ...}), name="mine")


@pytest.mark.parametrize("value", [0, -1, 3.5, "many", True, [1]])
def test_a_field_of_no_use_is_named_with_its_value(value):
    with pytest.raises(ConfigError, match="num_hidden_layers is"):
        model_from_config(config(num_hidden_layers=value), name="mine")


def test_the_dtype_is_the_files_unless_told_otherwise():
    assert model_from_config(config(), name="m").dtype == "bfloat16"
    assert model_from_config(config(), name="m", dtype="half").dtype == "float16"
    # vLLM loads a float32 checkpoint as float16.
    assert model_from_config(config(torch_dtype="float32"), name="m", dtype="auto").dtype_bytes == 2
    assert model_from_config(config(), name="m", dtype="float32").dtype_bytes == 4
    new_name = config(torch_dtype=..., dtype="float16")
    assert model_from_config(new_name, name="m").dtype == "float16"
    with pytest.raises(ConfigError, match="dtype 'fp7'"):
        model_from_config(config(), name="m", dtype="fp7")


# What vLLM's logs say of Llama-3.1-8B, "Model loading took … GiB".
@pytest.mark.parametrize(
    ("quantization", "t", "gib"),
    [(None, 1, 14.99), (None, 2, 7.51), (None, 4, 3.77), ("fp8", 1, 8.49), ("int8", 1, 8.49),
     ("int4", 1, 5.38)],
)  # fmt: skip
def test_weights_as_loaded_are_what_vllm_logged(quantization, t, gib):
    model = model_card("Llama-3.1-8B", quantization=quantization)
    assert model.weight_bytes(t) / GIB == pytest.approx(gib, rel=0.01)


def test_kv_matrices_are_copied_where_accelerators_outnumber_the_kv_heads():
    model = model_card("Qwen2.5-7B")  # 4 KV heads
    assert model.kv_token_bytes(4) == model.kv_token_bytes(1)
    assert model.kv_token_bytes(28) == 7 * model.kv_token_bytes(1)
    assert 28 * model.weight_bytes(28) > 1.01 * 4 * model.weight_bytes(4)
    assert model.kv_token_bytes(1, "fp8") == model.kv_token_bytes(1) / 2


@pytest.mark.parametrize(
    ("stored", "method", "bits"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}, "gptq", 4),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "awq", 4),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8", 8),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {
            "num_bits": 8, "type": "int"}}}}, "compressed-tensors", 8),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes", 4),
        ({"quant_method": "mxfp4"}, "mxfp4", 4.25),
    ],
)  # fmt: skip
def test_a_quantised_checkpoint_keeps_its_embeddings_wide(stored, method, bits):
    model = model_from_config(config(quantization_config=stored), name="m")
    assert (model.quantization.method, model.quantization.bits) == (method, bits)
    wide = model_from_config(config(), name="m")
    layers = wide.layer_weights * model.quantization.bytes_per_weight
    assert bits / 8 <= model.quantization.bytes_per_weight < 1.1 * bits / 8
    saved = wide.weight_bytes() - model.weight_bytes()
    assert saved == pytest.approx(2 * wide.layer_weights - layers)


@pytest.mark.parametrize(
    "stored",
    ["q4_k_m", {"quant_method": "nothing known"}, {"quant_method": "gptq", "bits": 0},
     {"quant_method": "compressed-tensors"}],
)  # fmt: skip
def test_an_unknown_quantisation_is_an_error(stored):
    with pytest.raises(ConfigError, match="quantization"):
        model_from_config(config(), name="m", quantization=stored)


def test_experts_are_counted_per_family():
    mixtral = config(
        model_type="mixtral", vocab_size=32000, num_local_experts=8, num_experts_per_tok=2,
        max_position_embeddings=32768,
    )  # fmt: skip
    assert model_from_config(mixtral, name="Mixtral-8x7B") == model_card("Mixtral-8x7B")
    model = published("Qwen3-30B-A3B")
    assert model.parameters == MODEL_CARDS["Qwen3-30B-A3B"].parameters
    # Three billion of thirty are active.
    assert model.active_layer_weights + model.embedding_weights == pytest.approx(3.3e9, rel=0.05)
    with pytest.raises(ConfigError, match="num_local_experts or num_experts"):
        model_from_config(mixtral | {"num_local_experts": None}, name="m")


def test_shared_experts_and_dense_layers_count():
    model = published("DeepSeek-V2-Lite")
    assert model.moe_layers == 26
    assert model.parameters == pytest.approx(15.706e9, rel=0.001)
    assert "multi-head latent attention" in model.unmodelled[0].what


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"model_type": "gemma3_text", "layer_types": ["sliding_attention"] * 32}, "sliding"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding window"),
        ({"model_type": "qwen3_next", "layer_types": ["linear_attention"] * 32}, "hybrid"),
        ({"model_type": "gpt_oss", "num_local_experts": 32, "num_experts_per_tok": 4,
          "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 16},
         "sliding"),
    ],
)  # fmt: skip
def test_what_is_not_modelled_is_said(changes, word):
    found = model_from_config(config(**changes), name="m").unmodelled
    assert any(word in doubt.what for doubt in found)


@pytest.mark.parametrize(
    "changes",
    [{}, {"model_type": "qwen2", "sliding_window": 131072, "use_sliding_window": False},
     {"model_type": "gemma2", "sliding_window": 4096},
     {"model_type": "mistral", "sliding_window": None}],
)  # fmt: skip
def test_a_window_that_is_not_used_is_none(changes):
    assert model_from_config(config(**changes), name="m").unmodelled == ()


def test_of_a_multimodal_model_the_text_part_is_taken():
    both = {"model_type": "x", "vision_config": {}, "text_config": config(model_type="llama")}
    model = model_from_config(both, name="m")
    assert model.layers == 32
    assert [doubt.what for doubt in model.unmodelled] == ["the vision or audio part"]


def test_a_card_is_found_by_what_people_call_it():
    """A quantised one by its suffix, or by what its publisher stores it in."""
    with Path(__file__).with_name("model_names.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            model = model_card(row["said"])
            assert model.name == row["meant"]
            stored = model.quantization
            known = ("", "") if stored is None else (stored.method, f"{stored.bits:g}")
            assert known == (row["method"], row["bits"]), row["said"]
            # What is said beside the name counts more.
            assert model_card(row["said"], quantization="none").quantization is None


def test_an_unknown_model_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match=r"'Llama-3-9B' has no built-in card.*Llama-3-8B"):
        model_card("Llama-3-9B")


def test_an_encoder_under_another_name_is_in_doubt():
    speech = {
        "model_type": "granite_speech", "text_config": config(model_type="granite"),
        "encoder_config": {"num_layers": 16, "hidden_dim": 1024},
        "projector_config": {"model_type": "blip_2_qformer", "hidden_size": 1024},
    }  # fmt: skip
    assert model_from_config(speech, name="m").kv_error == 0.3
    # Who speaks is not loaded; nor are experts of images told apart where they are quantised.
    omni = {"model_type": "o", "thinker_config": config(), "talker_config": {"hidden_size": 8}}
    assert not model_from_config(omni, name="m").unmodelled
    images = CONFIGS["ERNIE-4.5-VL-28B-A3B-PT"]["config"]
    assert model_from_config(images, name="m").kv_error == 0.07
    assert model_from_config(images, name="m", quantization="fp8").kv_error == 0.3


def test_experts_that_a_file_says_it_has_none_of():
    guard = CONFIGS["Llama-Guard-4-12B"]["config"]
    assert model_from_config(guard, name="m").moe_layers == 0
    text = {k: v for k, v in guard["text_config"].items() if "experts" not in k and k[:3] != "int"}
    # Not said is Llama-4's default.
    assert model_from_config(guard | {"text_config": text}, name="m").experts == 16


def test_awq_and_gptq_of_the_publisher_may_be_wider_than_the_model():
    widths = {
        name: model_card(name).intermediate
        for name in ("Qwen2.5-72B", "Qwen/Qwen2.5-72B-Instruct-AWQ", "Qwen2.5-72B-GPTQ-Int8",
                     "Qwen2.5-72B-Instruct-FP8", "Qwen2.5-7B-Instruct-AWQ")
    }  # fmt: skip
    assert list(widths.values()) == [29568, 29696, 29696, 29568, 18944]
    assert model_card("Qwen2.5-72B", quantization="gptq").intermediate == 29696


def test_a_patch_may_be_said_as_height_and_width():
    """As InternVL's files for transformers do; made up by the defaults of its class."""
    vision = {"hidden_size": 1024, "num_hidden_layers": 24, "intermediate_size": 4096}
    text = {
        "model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24, "vocab_size": 151674,
        "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864,
    }  # fmt: skip
    found = [
        model_from_config(
            {
                "model_type": "internvl",
                "text_config": text,
                "vision_config": vision | {"patch_size": patch},
            },
            name="internvl",
        ).other_weights
        for patch in ([14, 14], 14)
    ]
    assert found[0] == found[1] > 24 * 12 * 1024 * 1024
