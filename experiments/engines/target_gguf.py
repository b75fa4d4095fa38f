"""Writes a small Qwen3 as GGUF. llama.cpp's own converter refuses tokenizers that it does not know."""

import json

import gguf

from hf_eagle3.checkpoints.llama_cpp import add_sizes


LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_target(target, tokenizer, path) -> None:
    config, writer = target.config, gguf.GGUFWriter(path, "qwen3")
    add_sizes(writer, config)
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(model["vocab"], key=model["vocab"].get))
    special = set(tokenizer.all_special_ids)
    kinds = (gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for i in range(len(model["vocab"])))
    writer.add_token_types(list(kinds))
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in model.get("merges", [])])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_add_bos_token(False)
    for name, tensor in target.state_dict().items():
        kind, name = name.rsplit(".", 1)[-1], name.removeprefix("model.").removesuffix(".weight")
        if name == "lm_head":  # tied
            continue
        if name.startswith("layers."):
            _, number, name = name.split(".", 2)
            name = f"blk.{number}.{LAYER[name]}"
        else:
            name = {"embed_tokens": "token_embd", "norm": "output_norm"}[name]
        writer.add_tensor(f"{name}.{kind}", tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
