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
from .writing import beyond_classic, check_layer_ids, check_table, refuse


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
            **beyond_classic(draft),
            "biases": layer.attention_bias or getattr(layer, "mlp_bias", False),
            "`norm_before_fc`": config.norm_before_fc,
            "`norm_before_residual`": config.norm_before_residual,
            "the target's embedding (id 0) among its states": 0 in (config.eagle_aux_hidden_state_layer_ids or ()),
        },
        "OpenVINO",
    )
    if config.has_own_embed_tokens:
        check_table(draft, "OpenVINO")
    check_layer_ids(draft)


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
        convert(python, layout, folder)
        ids = ",".join(str(layer_id - 1) for layer_id in draft.config.eagle_aux_hidden_state_layer_ids)
        run(python, "-c", WRITE_LAYER_IDS, folder, ids)


def convert(python: str, model, folder) -> None:
    """
    Converts a model, a target or a draft in SGLang's layout, in float32.

    Args:
        python (`str`): See [`write`].
        model (`str` or `Path`): Its folder.
        folder (`str` or `Path`): The new one.

    Raises:
        ValueError: if the converter fails.
    """
    command = ("-m", "optimum.commands.optimum_cli", "export", "openvino", "--model", model)
    options = ("--task", "text-generation-with-past", "--trust-remote-code", "--weight-format", "fp32")
    run(python, *command, *options, folder)


def run(python: str, *arguments) -> None:
    try:
        subprocess.run([python, *map(str, arguments)], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(
            f"{python} could not convert the model. It needs optimum-intel and openvino (`--python` names the interpreter of "
            f"an environment that has them): {error}\n{(getattr(error, 'stderr', None) or '')[-2000:]}"
        ) from error
