"""
Other methods' drafts, to compare with: trained by [`Eagle3Trainer`], verified as all are, so that the text is the target's.

| method | draft | section of docs/baselines.md |
| --- | --- | --- |
| Medusa | [`MedusaForSpeculation`] | heads on the last state |
| Hydra | [`HydraForSpeculation`] | heads that read the path |
| EAGLE | [`EagleForSpeculation`] | a layer on the last states, a static tree |
| EAGLE-2 | the same, with `config.static_tree = None` | a dynamic tree |
| HASS | [`HassForSpeculation`] | EAGLE's layer, trained on its own states |
| DFlash, JetSpec | [`DFlashForSpeculation`] | layers that draft a block in one pass |

P-EAGLE is a form of our own draft: `draft_form="p-eagle"`.
"""

from typing import Any, NamedTuple

from transformers import AutoConfig, AutoModel

from .dflash import DFlashConfig, DFlashForSpeculation
from .eagle import EagleConfig, EagleForSpeculation
from .hass import HassConfig, HassForSpeculation
from .hydra import HydraConfig, HydraForSpeculation
from .medusa import MedusaConfig, MedusaForSpeculation
from .static_tree import best_static_tree, measure_accuracies


class Baseline(NamedTuple):
    """
    A method.

    Args:
        draft_class (`type`): Of its draft; `from_target` makes one.
        training (`dict`): Arguments of [`Eagle3TrainingArguments`] that are its own.
    """

    draft_class: type
    training: dict[str, Any]


BASELINES = {
    "medusa": Baseline(MedusaForSpeculation, {"ttt_steps": 5, "ttt_warmup": 0.0, "ttt_step_decay": 0.8}),
    "hydra": Baseline(HydraForSpeculation, {"ttt_steps": 5, "ttt_warmup": 0.0, "ttt_step_decay": 0.8}),
    "eagle": Baseline(EagleForSpeculation, {"ttt_steps": 1, "ttt_warmup": 0.0}),
    "hass": Baseline(HassForSpeculation, {"ttt_steps": 3, "ttt_warmup": 0.0, "ttt_step_decay": 1.0}),
}

for _draft_class in (*(baseline.draft_class for baseline in BASELINES.values()), DFlashForSpeculation):
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
