"""
Computes drafts by vLLM's model classes, without its engine: `run_vllm_models.py JOB.json RESULT.json`. vLLM reads the files, and makes and
fills the models. Only the attention over cached keys and values is replaced, by torch's.
"""

import json
import os
import sys
from pathlib import Path


os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from vllm import __version__  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.distributed import init_distributed_environment, initialize_model_parallel  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.model_executor.layers.attention import Attention  # noqa: E402
from vllm.model_executor.models.registry import ModelRegistry  # noqa: E402


def attention(self, query, key, value, output_shape=None):
    query, key, value = (rows.view(1, len(rows), -1, self.head_size).transpose(1, 2) for rows in (query, key, value))
    num_rows = query.shape[2]
    mask = torch.ones(num_rows, num_rows, dtype=torch.bool).tril()
    if self.sliding_window is not None:
        mask = mask.triu(1 - self.sliding_window)
    attended = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask, scale=self.impl.scale, enable_gqa=True
    )
    return attended.transpose(1, 2).reshape(num_rows, -1)


Attention.forward = attention


def configure(job_of_draft):
    settings = {"dtype": "float32", "max_model_len": 64, "enforce_eager": True}
    speculation = {"method": "eagle3", "model": job_of_draft["draft"], "num_speculative_tokens": 3}
    return EngineArgs(job_of_draft["target"], speculative_config=speculation, **settings).create_engine_config()


def compute(config, job_of_draft):
    draft_config = config.speculative_config.draft_model_config
    model_class, _ = ModelRegistry.resolve_model_cls(draft_config.hf_config.architectures, draft_config)
    model = model_class(vllm_config=config)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data.fill_(torch.nan)
    model.load_weights(load_file(Path(job_of_draft["draft"], "model.safetensors")).items())
    for module in model.modules():
        if hasattr(method := getattr(module, "quant_method", None), "process_weights_after_loading"):
            method.process_weights_after_loading(module)
    aux, embeds = torch.tensor(job_of_draft["aux"]), torch.tensor(job_of_draft["embeds"])
    tokens = torch.zeros(len(embeds), dtype=torch.long)  # not read, since there are embeddings
    outputs, states = model(tokens, torch.arange(len(embeds)), model.combine_hidden_states(aux), embeds)
    return {
        "logits": [
            # Tokens outside of the draft vocabulary have -inf.
            [number for number in row if number > -torch.inf]
            for row in model.compute_logits(outputs).tolist()
        ],
        "states": states.tolist(),
        "unfilled": [name for name, parameter in model.named_parameters() if parameter.isnan().any()],
    }


@torch.inference_mode()
def main(job_file, result_file):
    job, results = json.loads(Path(job_file).read_text()), []
    for job_of_draft in job["drafts"]:
        config = configure(job_of_draft)
        with set_current_vllm_config(config):
            if not results:
                init_distributed_environment(1, 0, f"file://{Path(result_file).absolute()}.store", 0, "gloo")
                initialize_model_parallel()
            results.append(compute(config, job_of_draft))
    Path(result_file).write_text(json.dumps({"drafts": results, "version": __version__}))


if __name__ == "__main__":
    main(*sys.argv[1:])
