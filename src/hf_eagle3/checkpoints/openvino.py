"""
Converting drafts for OpenVINO GenAI. Its converter (`optimum-intel`) reads SGLang's layout, and knows only the form of
the EAGLE-3 paper.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from ..remote_code.draft_model_eagle3 import DraftModel
from . import sglang
from .files import save_checkpoint
from .writing import CONFIGURED, check_layer_ids, layer_ids


NAME = "openvino"
TAKES = {*CONFIGURED, "an activation other than silu", "rotary embeddings scaled other than by linear or llama3"}
# GenAI looks for the layer ids in `rt_info`. Without them it silently reads other layers.
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


def layout(draft: DraftModel) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """
    Returns a draft's configuration and tensors, as the converter reads them. Raises `ValueError`, naming what GenAI would refuse, or
    silently ignore.
    """
    config, tensors = sglang.layout(draft, TAKES, "OpenVINO")
    check_layer_ids(draft)
    # Without `d2t` (a full vocabulary) the converter would fill it from uninitialized memory.
    tensors.setdefault("d2t", torch.zeros(draft.config.draft_vocab_size, dtype=torch.long))
    return config | layer_ids(draft), tensors


def write(draft: DraftModel, folder: str | Path, python: str | None = None) -> None:
    """
    Converts a draft into a new or empty folder. `python` is the interpreter of an environment with `optimum-intel` and
    `openvino`, which need an older transformers than this package. Raises `ValueError` if GenAI cannot express the draft, or
    the converter fails.
    """
    config, tensors = layout(draft)
    python = python or sys.executable
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "draft")
        save_checkpoint(source, config, tensors)
        convert(python, source, folder)
        ids = ",".join(str(layer_id - 1) for layer_id in draft.config.eagle_aux_hidden_state_layer_ids)
        run(python, "-c", WRITE_LAYER_IDS, folder, ids)


def convert(python: str, model: str | Path, folder: str | Path) -> None:
    """Converts a target, or a draft in SGLang's layout, in float32. Raises `ValueError` if the converter fails."""
    command = ("-m", "optimum.commands.optimum_cli", "export", "openvino", "--model", model)
    options = ("--task", "text-generation-with-past", "--trust-remote-code", "--weight-format", "fp32")
    run(python, *command, *options, folder)


def run(python: str, *arguments: Any) -> None:
    """Runs an interpreter, and raises a `ValueError` with the end of its output if it fails."""
    try:
        subprocess.run(
            [python, *map(str, arguments)], capture_output=True, check=True, encoding="utf-8", errors="replace"
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(
            f"{python} could not convert the model. It needs optimum-intel and openvino: pass the interpreter of an environment "
            f"that has them as `--python`. {error}\n{(getattr(error, 'stderr', None) or '')[-2000:]}"
        ) from error
