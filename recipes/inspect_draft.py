# /// script
# dependencies = ["hf-eagle3"]
# ///
"""
Describes a draft on one screen: format, target, layers, vocabulary, flags, sizes, and which engine takes it. It may be an
EAGLE-3 draft, a block draft, or another draft of `hf_eagle3.baselines`.

    python recipes/inspect_draft.py RedHatAI/Qwen3-8B-speculator.eagle3
    python recipes/inspect_draft.py path/to/draft --target Qwen/Qwen3-8B
    python recipes/inspect_draft.py path/to/draft --target Qwen/Qwen3-8B --prompt "def main(argv):"

`--target` also checks whether the draft fits that model. It loads only the model's configuration, embedding and head. But if the model
is on the Hub and not in the cache, transformers downloads all of its weights.

`--prompt` loads the whole model (on a GPU, if there is one), decodes greedily from the prompt, and prints the whole trees of the first
steps (tree policy `static`, no confidence threshold), with a tick at each accepted token.
"""

import torch

from hf_eagle3.checkpoints import describe_engines, load_ends
from hf_eagle3.checkpoints.target import load_on_device
from hf_eagle3.drawing import describe_step, tree_text
from hf_eagle3.environment import is_path
from hf_eagle3.evaluation.drafts import load_draft, method_of
from hf_eagle3.remote_code.configuration_eagle3 import FLAGS, tree_settings
from hf_eagle3.scripts import (
    ScriptParser,
    add_device,
    add_place_of_draft,
    add_trust_remote_code,
    folder_or_hub_id,
    place_of_draft,
    positive_integer,
    run_script,
)
from hf_eagle3.tokenizer import PromptEncoder, load_tokenizer


NOT_TO_PUBLISH = "a path on this machine, which config.json says; recipes/push.py leaves it out, other uploads do not"


def describe(draft, info) -> list[tuple[str, str]]:
    config = draft.config
    num_parameters = sum(parameter.numel() for parameter in draft.parameters())
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in draft.state_dict().values())
    rows = [
        ("format", info["format"]) if is_eagle3(draft) else ("method", method_of(draft)),
        ("target", config.verifier + (f" ({NOT_TO_PUBLISH})" if is_path(config.verifier) else "")),
        *describe_layers(draft),
        ("reads", describe_states(draft)),
        ("vocabulary", f"{config.draft_vocab_size} of {config.vocab_size} tokens"),
        ("embedding", "its own" if config.has_own_embed_tokens else "the target's"),
        ("head", "its own" if draft.get_output_embeddings().out_features else "the target's"),
        *describe_form(config),
        ("size", f"{num_parameters / 1e6:.1f} M parameters, {num_bytes / 2**20:.1f} MiB in {draft.dtype}"),
    ]
    for name in ("renamed", "ignored"):
        if info.get(name):
            rows.append((name, f"{len(info[name])} tensors: {', '.join(list(info[name])[:3])} ..."))
    if info.get("assumed"):
        rows.append(("assumed", ", ".join(f"{flag}: {value}" for flag, value in info["assumed"].items())))
    return rows


def is_eagle3(draft) -> bool:
    return draft.config.model_type == "eagle3"


def describe_layers(draft) -> list[tuple[str, str]]:
    config, layer = draft.config, draft.config.transformer_layer_config
    if config.model_type in ("medusa", "hydra"):
        return [("heads", f"{len(draft.heads)}, each for a token further ahead, width {layer.hidden_size}")]
    return [
        (
            "layers",
            f"{config.num_hidden_layers} x {layer.model_type}, width {layer.hidden_size}, MLP {layer.intermediate_size}, "
            f"{layer.num_attention_heads} heads of {layer.head_dim} ({layer.num_key_value_heads} for keys)",
        ),
        ("attention", ", ".join(layer.layer_types)),
        ("rotary", ", ".join(f"{name} {value}" for name, value in layer.rope_parameters.items())),
    ]


def describe_form(config) -> list[tuple[str, str]]:
    """Returns what a configuration says beyond its layers, by method."""
    if config.model_type == "dflash":
        layer = config.transformer_layer_config
        layer_types = dict.fromkeys(layer.layer_types)
        window = f"{layer.sliding_window} tokens, from {'the known' if config.follows_speculators else 'each'} token"
        causal = {name: "causal" if config.is_causal_in(name) else "full" for name in layer_types}
        within = ", ".join(f"{how} in layers of {name}" for name, how in causal.items())
        return [
            ("block", f"{config.block_size} tokens: one that is known, then masks (token {config.mask_token_id})"),
            (
                "in the block",
                f"attention is {within if len(set(causal.values())) > 1 else next(iter(causal.values()))}",
            ),
            *([("window", window)] if "sliding_attention" in layer_types else []),
            ("drafting", f"{config.num_drafted} tokens in one pass"),
            *([("Markov head", f"of rank {config.markov_rank}")] if config.markov_rank else []),
        ]
    if config.model_type != "eagle3":
        nodes = config.static_tree
        return [("tree", "by the draft's confidence" if nodes is None else f"static, {len(nodes)} nodes")]
    flags = [flag for flag in FLAGS if flag != "has_own_embed_tokens" and getattr(config, flag)]
    none = "none" if config.is_parallel else "none (the form of the EAGLE-3 paper)"
    return [
        ("flags", ", ".join(flags) or none),
        (
            "drafting",
            f"all tokens in one pass (P-EAGLE), token {config.mask_token_id} for those not known yet"
            if config.is_parallel
            else "one token after the other",
        ),
    ]


def describe_states(draft, target=None) -> str:
    """Returns which of the target's states a draft reads, and how that is known."""
    config, ids = draft.config, draft.config.eagle_aux_hidden_state_layer_ids
    if target is None and ids is None:
        return "[2, L // 2, L - 3] of the target's L layers, since its config.json names none"
    if target is None and config.aux_layer_ids_assumed:
        return (
            f"the states entering layers {ids} of the target, if its ids {[layer_id - 1 for layer_id in ids]} count outputs of "
            "layers (pass --target to see)"
        )
    if target is None:
        return f"the states entering layers {ids} of the target"
    text_config = target.config.get_text_config(decoder=True)
    depth, read = text_config.num_hidden_layers, draft.resolve_aux_layer_ids(target)
    known = "as its config.json says"
    if ids is None:
        known = "the usual ones, since its config.json names none"
    elif config.aux_layer_ids_assumed:
        kind = "outputs" if read == ids else "inputs"
        known = f"its ids {[layer_id - 1 for layer_id in ids]} taken for {kind} of layers"
    side = "before" if draft.reads_after_last_layer(target) else "after"
    last = f"; {depth} is what leaves the last one, {side} the final norm" if depth in read else ""
    return f"the states entering layers {read} of the target's {depth} ({known}{last})"


def describe_engines_of(draft, info) -> list[tuple[str, str]]:
    """Returns which engine takes a draft, as far as that was tested."""
    if is_eagle3(draft):
        return describe_engines(draft, info["format"])
    has_blocks = draft.config.model_type == "dflash" and not draft.config.follows_speculators
    if (
        has_blocks
        and not draft.config.is_dspark
        and set(draft.config.transformer_layer_config.layer_types) == {"full_attention"}
    ):
        return [("vLLM", 'takes it as it is, with `"method": "dflash"` in --speculative-config')]
    return []


def print_trees(draft, args) -> None:
    """Prints the trees of the first steps after a prompt."""
    trust = {"trust_remote_code": args.trust_remote_code}
    tokenizer = load_tokenizer(args.target, **trust)
    encoder = PromptEncoder(tokenizer)
    chat = [{"role": "user", "content": args.prompt}]
    tokens = encoder.chat(chat) if encoder.has_template else encoder.text(args.prompt)
    if not tokens:
        raise ValueError("--prompt is empty. Write a prompt.")
    target = load_on_device(args.target, args.device, device_map=args.device_map, **trust)
    inputs = torch.tensor([tokens], device=target.device)
    config = draft.generation_config
    config.tree_policy, config.assistant_confidence_threshold, config.output_steps = "static", 0.0, True
    most = 1 + tree_settings(config)["tree_depth"]  # tokens that a step writes
    # Trees get shorter where the text ends, so it ends after the steps that are shown.
    target.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        assistant_model=draft.to(target.device).eval(),
        do_sample=False,
        max_new_tokens=(1 + args.steps) * most,
    )
    first, *steps = draft.last_generation.steps
    first_token = tokenizer.decode(first.new_tokens[0])
    print(f"\nAfter {args.prompt!r} the target writes {first_token!r}, the root of the first tree.")
    for number, step in enumerate(steps[: args.steps], start=1):
        print(f"\nStep {number}: {describe_step(step)}\n{tree_text(step, tokenizer)}")


def main():
    parser = ScriptParser(description=__doc__)
    parser.add_argument("draft", type=folder_or_hub_id, help="Folder or Hub id")
    add_place_of_draft(parser)
    add_trust_remote_code(parser)
    parser.add_argument(
        "--target", type=folder_or_hub_id, help="Folder or Hub id of a model to check the draft against"
    )
    parser.add_argument(
        "--prompt", help="Print the trees after this prompt. The target's chat template is used, if it has one"
    )
    parser.add_argument(
        "--steps", type=positive_integer, default=3, help="How many trees --prompt prints. By default %(default)s"
    )
    add_device(parser)
    args = parser.parse_args()
    if args.prompt is not None and args.target is None:
        parser.error("--prompt needs a model that continues it: pass --target")
    draft, info = load_draft(args.draft, output_loading_info=True, **place_of_draft(args))
    if info["format"] == "speculators" and draft.config.speculators_config is None:
        info["format"] += ", without a target"  # vLLM does not take it as it is, whatever it is paired with below
    rows, fits = [*describe(draft, info), ("transformers", "generate(assistant_model=draft)")], []
    if args.target:
        try:
            target = load_ends(args.target, trust_remote_code=args.trust_remote_code)
            draft.validate_target(target)
            reads = describe_states(draft, target)
            rows = [("reads", reads) if name == "reads" else (name, text) for name, text in rows]
            draft.pair_with(target)  # engines may want what only the target says
            fits.append((args.target, "fits"))
        except ValueError as error:
            fits.append((args.target, f"does not fit. {error}"))
    rows += [*describe_engines_of(draft, info), *fits]
    width = max(len(name) for name, _ in rows)
    print("\n".join(f"{name:<{width}}  {text}" for name, text in rows))
    if any(text.startswith("does not fit") for _, text in rows):
        raise SystemExit(1)
    if args.prompt is not None:
        print_trees(draft, args)


if __name__ == "__main__":
    run_script(main)
