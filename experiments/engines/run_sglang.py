"""
Runs the model classes of SGLang on a CPU: `run_sglang.py JOB.json RESULT.json`. SGLang's engine does not speculate on a CPU
without kernels that the package index lacks. So this calls the target and the draft itself, as the engine's worker does.

SGLang reads the files, chooses and captures the target's states, shares the embedding and maps the draft vocabulary. Only
the attention over cached keys and values (`RadixAttention`) is replaced, by torch's.
"""

import json
import os
import sys
import types
from pathlib import Path
from unittest.mock import MagicMock

import torch
from safetensors.torch import load_file


class Kernels(types.ModuleType):
    """In place of SGLang's compiled kernels, which have no build for CPUs. None is called here."""

    __path__: list[str] = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: sys.exit(f"sgl_kernel.{name} was called.")


os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
sys.modules["sgl_kernel"] = Kernels("sgl_kernel")
for name in ("nms", "qnms"):  # torchvision's wheel needs CUDA to load its own
    torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from sglang import __version__  # noqa: E402
from sglang.srt.configs.device_config import DeviceConfig  # noqa: E402
from sglang.srt.configs.load_config import LoadConfig  # noqa: E402
from sglang.srt.configs.model_config import ModelConfig  # noqa: E402
from sglang.srt.distributed.parallel_state import (  # noqa: E402
    init_distributed_environment,
    initialize_model_parallel,
)
from sglang.srt.layers.radix_attention import RadixAttention  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import (  # noqa: E402
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import (  # noqa: E402
    resolve_spec_aux_hidden_state_config,
)
from sglang.srt.model_loader import get_model  # noqa: E402
from sglang.srt.models.registry import ModelRegistry  # noqa: E402
from sglang.srt.runtime_context import SpawnRanks, publish  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # noqa: E402


def attention(self, query, key, value, forward_batch, *args, **kwargs):
    query, key, value = (rows.view(1, len(rows), -1, self.head_dim).transpose(1, 2) for rows in (query, key, value))
    if self.layer_id in forward_batch.cache:
        past_key, past_value = forward_batch.cache[self.layer_id]
        key, value = torch.cat([past_key, key], dim=2), torch.cat([past_value, value], dim=2)
    forward_batch.cache[self.layer_id] = key, value
    num_rows, num_keys = query.shape[2], key.shape[2]
    mask = torch.ones(num_rows, num_keys, dtype=torch.bool).tril(num_keys - num_rows)
    attended = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask, scale=self.scaling, enable_gqa=True
    )
    return attended.transpose(1, 2).reshape(num_rows, -1)


RadixAttention.forward = attention


def forward(model, input_ids, positions, cache, states=None):
    batch = ForwardBatch(
        forward_mode=ForwardMode.DECODE,  # which returns the logits of all rows
        batch_size=len(input_ids),
        input_ids=input_ids,
        req_pool_indices=torch.zeros(1, dtype=torch.long),
        seq_lens=torch.tensor([len(input_ids)]),
        out_cache_loc=torch.arange(len(input_ids)),
        seq_lens_sum=len(input_ids),
        spec_info=types.SimpleNamespace(hidden_states=states),
        capture_hidden_mode=CaptureHiddenMode.FULL,
    )
    batch.cache = cache
    output = model(input_ids, positions, batch)
    return output.next_token_logits, output.hidden_states


def start(job):
    settings = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
    settings |= {"device": "cpu", "dtype": "float32", "attention_backend": "torch_native", "skip_tokenizer_init": True}
    args = ServerArgs(
        model_path=job["target"],
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path=job["draft"],
        **settings,
    )
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0))
    init_distributed_environment(1, 0, f"file://{Path(job['store']).absolute()}", 0, "gloo")
    initialize_model_parallel(backend="gloo")
    return args


def load(config):
    return get_model(model_config=config, load_config=LoadConfig(), device_config=DeviceConfig("cpu"))


def check_names(draft, folder):
    """Returns the tensors that the draft ignores, and its parameters that no tensor fills."""
    ignored = []
    for parameter in draft.parameters():
        parameter.data.fill_(torch.nan)
    for name, tensor in load_file(Path(folder, "model.safetensors")).items():
        before = sum(parameter.isnan().sum() for parameter in draft.parameters())
        draft.load_weights([(name, tensor)])
        if name != "d2t" and sum(parameter.isnan().sum() for parameter in draft.parameters()) == before:
            ignored.append(name)
    return ignored, [name for name, parameter in draft.named_parameters() if parameter.isnan().any()]


def captured(model_class, layer_ids, num_layers=12):
    """Returns which layers' inputs a target of this class captures, or `None` if it asks a model within."""
    model = MagicMock()
    model.pp_group.is_last_rank, model.config.num_hidden_layers = True, num_layers
    model_class.set_eagle3_layers_to_capture(model, list(layer_ids))
    if (call := model.model.set_eagle3_layers_to_capture.call_args) is not None:
        return None if list(call.args[0]) == layer_ids else list(call.args[0])
    lists = (part.layers_to_capture for part in (model.model, model.language_model))
    return next((layers for layers in lists if isinstance(layers, list)), None)


@torch.inference_mode()
def main(job_file, result_file):
    job = json.loads(Path(job_file).read_text())
    args = start(job | {"store": f"{result_file}.store"})
    target_config = ModelConfig.from_server_args(args)
    target, draft = (
        load(target_config),
        load(ModelConfig.from_server_args(args, model_path=job["draft"], is_draft_model=True)),
    )
    spec = resolve_spec_aux_hidden_state_config(
        server_args=args,
        model_config=target_config,
        spec_algorithm=SpeculativeAlgorithm.EAGLE3,
        is_draft_worker=False,
    )
    target.set_eagle3_layers_to_capture(spec.eagle_aux_hidden_state_layer_ids)
    embedding = target.get_embed_and_head()[0]
    draft.set_embed(embedding)
    found = {"logits": [], "tokens": [], "version": __version__}
    for name, model_class in ModelRegistry.models.items():
        if hasattr(model_class, "set_eagle3_layers_to_capture"):
            of_class = [captured(model_class, layer_ids) for layer_ids in job.get("layer_ids", [])]
            found.setdefault("captured", {})[name] = of_class
    for prompt in job["prompts"]:
        tokens = torch.tensor(prompt)
        target_logits, states = forward(target, tokens, torch.arange(len(tokens)), cache := {})
        # Row t has the states at position t, and the token after it.
        tokens = torch.cat([tokens[1:], target_logits[-1:].argmax(-1)])
        position, drafted, of_prompt, cache = len(tokens), [], [], {}
        logits, states = forward(draft, tokens, torch.arange(position), cache, states)
        of_prompt.append(logits.tolist())
        for step in range(job["num_draft_tokens"]):
            token = logits[-1:].argmax(-1)
            token = token if draft.hot_token_id is None else draft.hot_token_id[token]
            drafted.append(token.item())
            logits, states = forward(draft, token, torch.tensor([position + step]), cache, states[-1:])
            of_prompt.append(logits.tolist())
        found["logits"].append(of_prompt)
        found["tokens"].append(drafted)
    found["ignored"], found["unfilled"] = check_names(draft, job["draft"])
    Path(result_file).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
