"""
Drafts for OpenVINO GenAI. Its converter (`optimum-intel`) reads SGLang's layout, and takes the form of the EAGLE-3
paper for granted.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from . import sglang
from .files import save_checkpoint
from .flat import check_table, refuse


NAME = "openvino"
# GenAI looks for the layers there, and reads others without a word where it finds nothing.
WRITE_LAYER_IDS = """
import sys
from pathlib import Path
import openvino

folder, ids = Path(sys.argv[1]), [int(layer_id) for layer_id in sys.argv[2].split(",")]
model = openvino.Core().read_model(folder / "openvino_model.xml")
model.set_rt_info(ids, ["hidden_layers_list"])
openvino.save_model(model, folder / "with_ids.xml", compress_to_fp16=False)
del model
for suffix in (".xml", ".bin"):
    (folder / f"with_ids{suffix}").replace(folder / f"openvino_model{suffix}")
"""


def check(draft) -> None:
    """
    Raises:
        ValueError: naming what GenAI would refuse, or leave out without a word.
    """
    config, layer = draft.config, draft.config.transformer_layer_config
    refuse(
        {
            "more than one layer": config.num_hidden_layers > 1,
            "Qwen3 layers, with q_norm and k_norm": layer.model_type != "llama",
            "`fc_norm`": config.fc_norm,
            "`norm_output`": config.norm_output,
            "`norm_before_fc`": config.norm_before_fc,
            "`norm_before_residual`": config.norm_before_residual,
            "layers with a window": set(layer.layer_types) != {"full_attention"},
            f"{config.num_aux_hidden_states} states in place of three": config.num_aux_hidden_states != 3,
        },
        "OpenVINO",
    )
    if config.has_own_embed_tokens:
        check_table(draft, "OpenVINO")
    if config.eagle_aux_hidden_state_layer_ids is None:
        raise ValueError("This draft does not say which states it reads. Pair it with its target first (`--target`).")


def write(draft, folder, python: str | None = None) -> None:
    """
    Converts a draft.

    Args:
        draft ([`Eagle3ForSpeculation`])
        folder (`str` or `Path`): A new or empty folder.
        python (`str`, *optional*):
            The interpreter of an environment with `optimum-intel` and `openvino`, which want an older transformers than
            this package. Defaults to this one.

    Raises:
        ValueError: if GenAI cannot express the draft, or the converter fails.
    """
    check(draft)
    config, tensors = sglang.write(draft)
    # Where a draft has the whole vocabulary the converter makes a table of whatever is in memory.
    tensors.setdefault("d2t", torch.zeros(draft.config.draft_vocab_size, dtype=torch.long))
    python = python or sys.executable
    with tempfile.TemporaryDirectory() as layout:
        layout = Path(layout, "draft")
        save_checkpoint(layout, config, tensors)
        convert = ["-m", "optimum.commands.optimum_cli", "export", "openvino", "--model", str(layout)]
        convert += [
            "--task",
            "text-generation-with-past",
            "--trust-remote-code",
            "--weight-format",
            "fp32",
            str(folder),
        ]
        ids = ",".join(str(layer_id - 1) for layer_id in draft.config.eagle_aux_hidden_state_layer_ids)
        for arguments in (convert, ["-c", WRITE_LAYER_IDS, str(folder), ids]):
            result = subprocess.run([python, *arguments], capture_output=True, text=True)
            if result.returncode != 0:
                raise ValueError(
                    f"{python} could not convert the draft. It needs optimum-intel and openvino (`--python` names the "
                    f"interpreter of an environment that has them):\n{result.stderr[-2000:]}"
                )
