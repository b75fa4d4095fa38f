"""
Drafts of other methods, to compare EAGLE-3 with. [`Eagle3Trainer`] trains them, and the target verifies them like any draft.

| method | draft | what it is |
| --- | --- | --- |
| Medusa | [`MedusaForSpeculation`] | heads on the last state |
| Hydra | [`HydraForSpeculation`] | heads that read the path |
| EAGLE | [`EagleForSpeculation`] | a layer that reads the last states, a static tree |
| EAGLE-2 | the same, with `config.static_tree = None` | a dynamic tree |
| HASS | [`HassForSpeculation`] | EAGLE's layer, trained on its own states |
| DFlash | [`DFlashForSpeculation`] | layers that draft a block in one pass |
| JetSpec | the same, with `is_causal=True` | the same, with a causal block |
| DSpark | the same, with a `markov_rank` | the same, whose logits depend on the token before |

P-EAGLE is a form of [`Eagle3ForSpeculation`]: `draft_form="p-eagle"`.
"""

import math
from typing import Any, NamedTuple

from transformers import AutoConfig, AutoModel, PreTrainedModel

from ..remote_code.draft_model_eagle3 import DraftModel
from .baseline import BaselineDraft
from .dflash import DFlashConfig, DFlashForSpeculation
from .eagle import EagleConfig, EagleForSpeculation
from .hass import HassConfig, HassForSpeculation
from .hydra import HydraConfig, HydraForSpeculation
from .medusa import MedusaConfig, MedusaForSpeculation
from .static_tree import best_static_tree, measure_accuracies


class Baseline(NamedTuple):
    """
    A method to compare with.

    Args:
        draft_class (`type`): The class of its draft.
        training (`dict`): Its values for arguments of [`Eagle3TrainingArguments`].
        overrides (`dict`, *optional*): Its arguments of `draft_class.from_target`.
    """

    draft_class: type[BaselineDraft]
    training: dict[str, Any]
    overrides: dict[str, Any] = {}

    def make_draft(self, target: PreTrainedModel, **overrides: Any) -> DraftModel:
        """Returns an untrained draft for a loaded target. `overrides` take precedence over the method's own."""
        return self.draft_class.from_target(target, **{**self.overrides, **overrides})


# As in the DFlash paper for blocks of 16 tokens: mask `k` has the weight exp(-(k - 1) / 7).
_BLOCK_TRAINING = {"ttt_steps": 15, "ttt_warmup": 0.0, "ttt_step_decay": math.exp(-1 / 7)}
# As in DeepSpec's configurations.
_DSPARK_TRAINING = {"ttt_steps": 7, "ttt_warmup": 0.0, "ttt_step_decay": math.exp(-1 / 4)}
_DSPARK = {"sample_from_anchor": True, "markov_rank": 256, "block_size": 7}
BASELINES = {
    "medusa": Baseline(MedusaForSpeculation, {"ttt_steps": 5, "ttt_warmup": 0.0, "ttt_step_decay": 0.8}),
    "hydra": Baseline(HydraForSpeculation, {"ttt_steps": 5, "ttt_warmup": 0.0, "ttt_step_decay": 0.8}),
    "eagle": Baseline(EagleForSpeculation, {"ttt_steps": 1, "ttt_warmup": 0.0}),
    "hass": Baseline(HassForSpeculation, {"ttt_steps": 3, "ttt_warmup": 0.0, "ttt_step_decay": 1.0}),
    "dflash": Baseline(DFlashForSpeculation, _BLOCK_TRAINING),
    "jetspec": Baseline(DFlashForSpeculation, _BLOCK_TRAINING, {"is_causal": True}),
    "dspark": Baseline(DFlashForSpeculation, _DSPARK_TRAINING, _DSPARK),
}

for _baseline in BASELINES.values():
    _config_class = _baseline.draft_class.config_class
    AutoConfig.register(_config_class.model_type, _config_class, exist_ok=True)
    AutoModel.register(_config_class, _baseline.draft_class, exist_ok=True)

__all__ = [
    "BASELINES",
    "Baseline",
    "DFlashConfig",
    "DFlashForSpeculation",
    "EagleConfig",
    "EagleForSpeculation",
    "HassConfig",
    "HassForSpeculation",
    "HydraConfig",
    "HydraForSpeculation",
    "MedusaConfig",
    "MedusaForSpeculation",
    "best_static_tree",
    "measure_accuracies",
]
