"""Writing drafts as GGUF files, for llama.cpp's server (`--spec-type draft-eagle3`)."""

from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ..remote_code.draft_model_eagle3 import DraftModel
from .writing import CONFIGURED, EMBEDDING, check_features, check_head, check_layer_ids


NAME = "gguf"
ARCHITECTURE = "eagle3"
TARGET_FILE = "the target's GGUF file, which llama.cpp serves, too (its `convert_hf_to_gguf.py TARGET` writes one),"
TAKES = {*CONFIGURED, "`norm_before_fc`", "`norm_before_residual`", EMBEDDING}
# Our names of tensors, and llama.cpp's (gguf-py's constants, `MODEL_ARCH.EAGLE3`).
TENSORS = {
    "fc": "fc",
    "input_norm": "enc.output_norm",
    "norm": "output_norm",
    "lm_head": "output",
    "embed_tokens": "token_embd",
    "layers.0.input_layernorm": "blk.0.attn_norm",
    "layers.0.hidden_norm": "blk.0.attn_norm_2",
    "layers.0.self_attn.q_proj": "blk.0.attn_q",
    "layers.0.self_attn.k_proj": "blk.0.attn_k",
    "layers.0.self_attn.v_proj": "blk.0.attn_v",
    "layers.0.self_attn.o_proj": "blk.0.attn_output",
    "layers.0.post_attention_layernorm": "blk.0.ffn_norm",
    "layers.0.mlp.gate_proj": "blk.0.ffn_gate",
    "layers.0.mlp.up_proj": "blk.0.ffn_up",
    "layers.0.mlp.down_proj": "blk.0.ffn_down",
}


def check(draft: DraftModel) -> None:
    """Raises `ValueError`, naming what llama.cpp would refuse, or silently ignore."""
    check_features(draft, TAKES, "GGUF")
    check_layer_ids(draft)
    check_head(draft)


def write(draft: DraftModel, folder: str | Path, target_gguf: str | Path | None = None) -> None:
    """
    Writes `draft.gguf` to a new or empty folder. The draft gets the tokenizer of `target_gguf`, the target's GGUF file.

    Raises:
        FileNotFoundError: if there is no file `target_gguf`.
        ValueError: if llama.cpp cannot express the draft, or the file is not its target's.
        ModuleNotFoundError: if the package `gguf` is not installed.
    """
    check(draft)
    if target_gguf is None:
        raise ValueError(
            f"llama.cpp needs the tokenizer in the draft's file, too. Pass {TARGET_FILE} as `--target_gguf`."
        )
    if not Path(target_gguf).is_file():
        raise FileNotFoundError(f"There is no file {target_gguf}. Pass {TARGET_FILE} as `--target_gguf`.")
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("Writing GGUF files needs gguf: pip install gguf") from error
    tokenizer = read_tokenizer(gguf, draft, target_gguf)
    config, layer = draft.config, draft.config.transformer_layer_config
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rope = layer.rope_parameters
    writer = gguf.GGUFWriter(folder / "draft.gguf", ARCHITECTURE)
    add_sizes(writer, layer)
    writer.add_rope_dimension_count(layer.head_dim)
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    writer.add_vocab_size(config.vocab_size)
    # gguf has no methods for these, up to version 0.19.
    writer.add_array(f"{ARCHITECTURE}.target_layers", config.eagle_aux_hidden_state_layer_ids)
    writer.add_uint32(f"{ARCHITECTURE}.target_hidden_size", config.target_hidden_size)
    writer.add_bool(f"{ARCHITECTURE}.norm_before_residual", config.norm_before_residual)
    writer.add_bool(f"{ARCHITECTURE}.norm_before_fc", config.norm_before_fc)
    for name, (value, types) in tokenizer.items():
        writer.add_key_value(name, value, types[0], sub_type=types[-1] if len(types) > 1 else None)
    for name, tensor in gguf_tensors(draft).items():
        add_tensor(gguf, writer, name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_sizes(writer: Any, layer_config: Any) -> None:
    """Writes the keys that GGUF needs for the layers of any model."""
    writer.add_block_count(layer_config.num_hidden_layers)
    writer.add_context_length(layer_config.max_position_embeddings)
    writer.add_embedding_length(layer_config.hidden_size)
    writer.add_feed_forward_length(layer_config.intermediate_size)
    writer.add_head_count(layer_config.num_attention_heads)
    writer.add_head_count_kv(layer_config.num_key_value_heads)
    writer.add_key_length(layer_config.head_dim)
    writer.add_value_length(layer_config.head_dim)
    writer.add_layer_norm_rms_eps(layer_config.rms_norm_eps)
    writer.add_rope_freq_base(layer_config.rope_parameters["rope_theta"])


def read_tokenizer(gguf: ModuleType, draft: DraftModel, target_gguf: str | Path) -> dict[str, tuple[Any, list]]:
    """Returns the tokenizer in a target's file: values and their types, by name."""
    try:
        fields = gguf.GGUFReader(target_gguf).fields
        architecture = fields["general.architecture"].contents()
        width, depth = (fields[f"{architecture}.{name}"].contents() for name in ("embedding_length", "block_count"))
        num_tokens = len(fields["tokenizer.ggml.tokens"].data)
    except (IndexError, KeyError, ValueError) as error:
        raise ValueError(
            f"{target_gguf} is not a complete GGUF file of a model with its tokenizer: {error!r}. Convert the target again."
        ) from error
    config = draft.config
    last_layer, last_token = max(config.eagle_aux_hidden_state_layer_ids), int(draft.draft_token_ids.max())
    if width != config.target_hidden_size or depth <= last_layer or not last_token < num_tokens <= config.vocab_size:
        raise ValueError(
            f"{target_gguf} is a target of width {width} with {depth} layers and {num_tokens} tokens, but the draft needs one "
            f"of width {config.target_hidden_size} with {config.vocab_size} tokens, and reads layer {last_layer}."
        )
    return {name: (field.contents(), field.types) for name, field in fields.items() if name.startswith("tokenizer.")}


def gguf_tensors(draft: DraftModel) -> dict[str, torch.Tensor]:
    """Returns a draft's tensors by their names in GGUF."""
    layer, tensors = draft.config.transformer_layer_config, {}
    for name, tensor in draft.state_dict().items():
        if name in ("d2t", "t2d"):
            continue
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            # llama.cpp keeps numbers that are rotated together side by side. Here they are half a head apart.
            tensor = tensor.unflatten(0, (-1, 2, layer.head_dim // 2)).transpose(1, 2).flatten(0, 2)
        tensors[TENSORS[name.removesuffix(".weight")] + ".weight"] = tensor
    if draft.d2t is not None:
        tensors["d2t"] = draft.draft_token_ids  # token ids, not offsets
    if (rope := layer.rope_parameters)["rope_type"] == "llama3":
        plain = rope["rope_theta"] ** -(torch.arange(0, layer.head_dim, 2) / layer.head_dim)
        tensors["rope_freqs.weight"] = plain / draft.rotary_emb.inv_freq.cpu()
    return tensors


def add_tensor(gguf: ModuleType, writer: Any, name: str, tensor: torch.Tensor) -> None:
    """Writes a tensor, in a dtype that llama.cpp computes with."""
    types = gguf.GGMLQuantizationType
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16 and tensor.dim() > 1:
        writer.add_tensor(name, tensor.view(torch.uint8).numpy(), raw_dtype=types.BF16)
    elif tensor.is_floating_point() and (tensor.dim() == 1 or tensor.dtype != torch.float16):
        writer.add_tensor(name, tensor.float().numpy())  # vectors must be float32
    else:
        writer.add_tensor(name, tensor.numpy())
