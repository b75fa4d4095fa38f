"""
Makes the fixtures: tiny drafts written by the `speculators` package, and the logits that its own code gives.

    pip install speculators
    python tests/checkpoints/make_fixtures.py tests/checkpoints/fixtures
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file


VOCAB_SIZE, DRAFT_VOCAB_SIZE, WIDTH, LENGTH, STEPS = 24, 12, 8, 10, 3
LAYER = {
    **{"vocab_size": VOCAB_SIZE, "hidden_size": WIDTH, "intermediate_size": 12, "max_position_embeddings": 64},
    **{"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4},
}
WINDOW = {"layer_types": ["sliding_attention"], "use_sliding_window": True, "sliding_window": 4}
PART_OF_HEAD = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
# Name: layer type, changes to LAYER, flags of the draft.
VARIANTS = {
    "classic": ("llama", {}, {}),
    "norm_before_residual": ("llama", {}, {"norm_before_residual": True}),
    "norm_before_fc": ("llama", {}, {"norm_before_fc": True}),
    "fc_norm": ("llama", {}, {"fc_norm": True}),
    "norm_output": ("llama", {}, {"fc_norm": True, "norm_output": True}),
    "qwen3": ("qwen3", {}, {}),
    "two_layers": ("qwen3", {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}, {"norm_output": True}),
    "four_states": ("llama", {}, {"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4]}),
    "sliding_window": ("qwen3", WINDOW, {}),
    # Of a target that rotates a part of each head. The draft's layers rotate whole ones.
    "part_of_head": ("llama", PART_OF_HEAD, {}),
    "full_vocabulary": ("llama", {}, {"draft_vocab_size": VOCAB_SIZE}),
}


def make(name: str):
    """A draft of the speculators package, with random weights."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.models.eagle3.core import Eagle3DraftModel
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import AutoConfig

    model_type, changes, flags = VARIANTS[name]
    layer_config = AutoConfig.for_model(model_type, **{**LAYER, **changes})
    layer_config._attn_implementation = "eager"
    flags = {"draft_vocab_size": DRAFT_VOCAB_SIZE, "eagle_aux_hidden_state_layer_ids": [2, 3, 4], **flags}
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer_config,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path="tiny", architectures=["LlamaForCausalLM"]),
        ),
        **flags,
    )
    draft = Eagle3DraftModel(config).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in draft.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.4
        if parameter.dim() == 1:
            parameter.data += 1
    if flags["draft_vocab_size"] < VOCAB_SIZE:
        token_ids = torch.arange(0, VOCAB_SIZE, 2)
        t2d = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
        t2d[token_ids] = True
        draft.load_vocab_mappings(t2d, token_ids - torch.arange(len(token_ids)))
    return draft


@torch.no_grad()
def run(draft) -> dict[str, torch.Tensor]:
    """Inputs of an unroll, and the logits of its steps."""
    generator, logits = torch.Generator().manual_seed(1), []
    handle = draft.lm_head.register_forward_hook(lambda module, inputs, output: logits.append(output))
    num_states = len(draft.config.eagle_aux_hidden_state_layer_ids)
    inputs = {
        "hidden_states": torch.randn(1, LENGTH, num_states * WIDTH, generator=generator),
        "input_ids": torch.randint(VOCAB_SIZE, (1, LENGTH), generator=generator),
    }
    draft(**inputs, document_ids=torch.zeros(1, LENGTH, dtype=torch.long), ttt_steps=STEPS)
    handle.remove()
    return {**inputs, "logits": torch.cat(logits)}


def main(folder: Path):
    for name in VARIANTS:
        draft = make(name)
        draft.save_pretrained(folder / name)
        (folder / name / "config.py").unlink(missing_ok=True)  # its code, which no reader of ours runs
        save_file(run(draft), folder / name / "expected.safetensors")
        print(name, sum(path.stat().st_size for path in (folder / name).iterdir()), "bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
