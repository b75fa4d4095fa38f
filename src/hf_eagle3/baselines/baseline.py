"""What the drafts of other methods have in common."""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedModel

from ..remote_code.configuration_eagle3 import Eagle3Config
from ..remote_code.modeling_eagle3 import DraftModel
from .static_tree import best_static_tree, grow_static_tree, guessed_accuracies


@strict
class BaselineConfig(Eagle3Config):
    """
    Of the draft of another method. It is [`Eagle3Config`]'s, of which flags that the method does not know are off, and
    is not saved in the `speculators` schema, which has no such drafts.

    Args:
        static_tree (`list[list[int]]`, *optional*):
            The nodes of the tree that is verified in every step, by the ranks of the children on the path to each, the
            most promising first: [`~static_tree.best_static_tree`]. `None` grows a tree by the draft's confidence in
            each step (EAGLE-2, https://huggingface.co/papers/2406.16858).
    """

    _auto_class = None  # its code is not saved with it
    static_tree: list[list[int]] | None = None

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        on = [name for name in flags if getattr(self, name)] + ["mask_token_id"] * self.is_parallel
        if on:
            raise ValueError(f"A {self.model_type} draft has no {on}, which are of EAGLE-3's.")
        if self.num_aux_hidden_states != 1 and self.eagle_aux_hidden_state_layer_ids is not None:
            raise ValueError(
                f"A {self.model_type} draft reads one state, not {self.eagle_aux_hidden_state_layer_ids}."
            )
        known = {()}
        for path in map(tuple, self.static_tree or ()):
            if path[:-1] not in known or not path or min(path) < 0:
                raise ValueError(f"`static_tree` has {list(path)} before its parent.")
            known.add(path)

    @classmethod
    def recognises(cls, content: dict[str, Any], source) -> bool:
        """
        Raises:
            ValueError: if it is the `config.json` of something else.
        """
        if content.get("model_type") != cls.model_type:
            name = content.get("model_type") or content.get("speculators_model_type")
            raise ValueError(f"{source} is no {cls.model_type} draft: its config.json is of {name!r}.")
        return True

    def _saved_form(self, output: dict[str, Any]) -> dict[str, Any]:
        output = super()._saved_form(output)
        for name in ("auto_map", "speculators_model_type", "speculators_version"):
            output.pop(name, None)
        return output | {"model_type": self.model_type, "architectures": None}


class BaselineDraft(DraftModel):
    """
    A draft that reads what the target's head reads, at the newest position, and has a tree of fixed form.

    A subclass is trained by its `training_loss(batch, steps)`, on the steps of its `unroll(batch, steps)`.
    """

    config_class = BaselineConfig
    reads_normed_state = True
    _auto_class = None  # its code is this package's, and not saved with it

    @classmethod
    def default_overrides(cls, target: PreTrainedModel, overrides: dict[str, Any]) -> dict[str, Any]:
        """The overrides of [`from_target`], with this method's defaults."""
        depth = target.config.get_text_config(decoder=True).num_hidden_layers
        tree = best_static_tree(guessed_accuracies())
        return {"eagle_aux_hidden_state_layer_ids": [depth], "static_tree": tree} | overrides

    @classmethod
    def from_target(cls, target: PreTrainedModel, *args, **overrides):
        """See [`~modeling_eagle3.DraftModel.from_target`]."""
        return super().from_target(target, *args, **cls.default_overrides(target, overrides))

    def grow_tree(self, root, logits, hidden_states, advance, token_ids, plan, threshold=0.0, power=1.0, guess=None):
        """The static tree, or that of [`~tree_eagle3.grow_tree`]."""
        arguments = root, logits, hidden_states, advance, token_ids, plan
        if self.config.static_tree is None:
            return DraftModel.grow_tree(*arguments, threshold, power, guess)
        return grow_static_tree(*arguments, self.config.static_tree, guess)

    def push_to_hub(self, repo_id: str, **kwargs):
        """See [`~transformers.utils.PushToHubMixin.push_to_hub`]. There are no cards of ours for such drafts."""
        return PreTrainedModel.push_to_hub(self, repo_id, **kwargs)


def check_steps(draft, steps: int, most: int) -> None:
    """
    Raises:
        ValueError: if a draft cannot be trained so many steps deep.
    """
    if steps > most:
        raise ValueError(
            f"A {draft.config.model_type} draft is trained at most {most} steps deep, not {steps}: pass `ttt_steps={most}`."
        )
