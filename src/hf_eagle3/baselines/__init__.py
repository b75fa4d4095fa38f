"""
Drafts of other methods, to compare EAGLE-3 with. [`Eagle3Trainer`] trains them, and the target verifies them like any draft.

| method | draft | what it is |
| --- | --- | --- |
| Medusa | [`MedusaForSpeculation`] | heads on the last state |
| Hydra | [`HydraForSpeculation`] | heads that read the path |
| EAGLE | [`EagleForSpeculation`] | a layer that reads the last states, a static tree |
| EAGLE-2 | the same, with `config.static_tree = None` | a dynamic tree |
| HASS | [`HassForSpeculation`] | EAGLE's layer, trained on its own states |
| DFlash, JetSpec | [`DFlashForSpeculation`] | layers that draft a block in one pass |

P-EAGLE is a form of [`Eagle3ForSpeculation`]: `draft_form="p-eagle"`.
"""

from typing import Any, NamedTuple

from transformers import AutoConfig, AutoModel

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
        draft_class (`type`): The class of its draft. `draft_class.from_target(target)` makes one.
        training (`dict`): Its values for arguments of [`Eagle3TrainingArguments`].
    """

    draft_class: type[BaselineDraft]
    training: dict[str, Any]


BASELINES = {
    "medusa": Baseline(MedusaForSpeculation, {"ttt_steps": 5, "ttt_warmup": 0.0, "ttt_step_decay": 0.8}),
    "hydra": Baseline(HydraForSpeculation, {"ttt_steps": 5, "ttt_warmup": 0.0, "ttt_step_decay": 0.8}),
    "eagle": Baseline(EagleForSpeculation, {"ttt_steps": 1, "ttt_warmup": 0.0}),
    "hass": Baseline(HassForSpeculation, {"ttt_steps": 3, "ttt_warmup": 0.0, "ttt_step_decay": 1.0}),
}

_DRAFT_CLASSES: list[type[BaselineDraft]] = [*(each.draft_class for each in BASELINES.values()), DFlashForSpeculation]
for _draft_class in _DRAFT_CLASSES:
    _config_class = _draft_class.config_class
    AutoConfig.register(_config_class.model_type, _config_class, exist_ok=True)
    AutoModel.register(_config_class, _draft_class, exist_ok=True)

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
