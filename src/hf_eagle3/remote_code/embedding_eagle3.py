# SPDX-License-Identifier: Apache-2.0
"""The target's embedding as a draft reads it: without a factor, unpacked, and gathered from all processes."""

import torch
from torch import nn
from transformers import PreTrainedModel

from .target_eagle3 import device_of


# Weights in other dtypes are packed, or have scales beside them.
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def table_of(target: PreTrainedModel) -> nn.Embedding:
    """The target's input embedding, for [`look_up`]."""
    embedding = target.get_input_embeddings()
    num_rows = target.config.get_text_config(decoder=True).vocab_size
    return PackedTable(embedding, num_rows) if is_packed(embedding) else embedding


def look_up(table: nn.Embedding, input_ids: torch.Tensor) -> torch.Tensor:
    """Rows of an embedding table, without the factor of some targets (Gemma)."""
    input_ids = input_ids.to(table.weight.device)
    return table(input_ids) if isinstance(table, PackedTable) else nn.functional.embedding(input_ids, table.weight)


def gathered_table(table: nn.Embedding) -> nn.Embedding:
    """An embedding with its whole weight. If processes hold shares of it, all of them must call this together."""
    if not hasattr(table.weight, "full_tensor"):
        return table
    return nn.Embedding.from_pretrained(gathered(table.weight.detach()))


def gathered(weight: torch.Tensor) -> torch.Tensor:
    """The whole weight. If processes hold shares of it, all of them must call this together."""
    if hasattr(weight, "full_tensor"):
        weight = weight.full_tensor()
    is_plain = type(weight) in (torch.Tensor, nn.Parameter) or not weight.is_floating_point()
    return weight if is_plain else weight.dequantize()  # torchao's cannot be copied


def is_packed(module: nn.Module) -> bool:
    """Whether an embedding or a head stores no floating-point weight, so that only the module itself can unpack it."""
    # PEFT's wrappers show the weight of what they wrap. Others compute one each time.
    is_stored = "weight" in dict(module.named_parameters(recurse=False)) or type(module).__module__.startswith("peft.")
    return not is_stored or module.weight.dtype not in FLOATS


class PackedTable(nn.Embedding):
    """A packed embedding without the factor of some targets (Gemma). Its `weight` has its size, dtype and device, but no values."""

    def __init__(self, embedding: nn.Module, num_rows: int):
        row = unscaled(embedding, torch.zeros(1, dtype=torch.long, device=device_of(embedding)))
        super().__init__(num_rows, row.shape[-1], _weight=row.expand(num_rows, -1), _freeze=True)
        self._embedding = [embedding]  # no submodule

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return unscaled(self._embedding[0], input)


def unscaled(embedding: nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
    return embedding(input_ids).detach() / getattr(embedding, "scalar_embed_scale", 1.0)


class Borrowed(list):
    """Modules of a target that a draft uses. Copies of the draft share them, and pickles have none."""

    def __deepcopy__(self, memo: dict) -> "Borrowed":
        return self

    def __reduce__(self) -> tuple:
        return Borrowed, ()
