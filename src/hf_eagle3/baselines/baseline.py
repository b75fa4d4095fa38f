"""Base classes of other methods' drafts and their configurations."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedModel

from ..checkpoints.files import check_repo, verifier_without_path
from ..remote_code.configuration_eagle3 import Eagle3Config
from ..remote_code.draft_model_eagle3 import DraftModel
from ..remote_code.tree_eagle3 import DraftTree
from .static_tree import GUESSED_ACCURACIES, best_static_tree, grow_static_tree


@strict
class BaselineConfig(Eagle3Config):
    """
    The configuration of another method's draft: an [`Eagle3Config`] without EAGLE-3's flags. It is not saved in the
    `speculators` schema, which has no such drafts.

    Args:
        static_tree (`list[list[int]]`, *optional*):
            The tree to verify in every step. Each node is a path of ranks of children, and the most promising nodes come
            first: see [`~static_tree.best_static_tree`]. With `None` each step grows a tree by the draft's confidence
            (EAGLE-2, https://huggingface.co/papers/2406.16858).
    """

    _auto_class = None  # drafts are saved without this code
    reads_one_state: ClassVar[bool] = True  # the state that the target's head reads
    static_tree: list[list[int]] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        on = [name for name in flags if getattr(self, name)] + ["mask_token_id"] * self.is_parallel
        if on:
            raise ValueError(f"A {self.model_type} draft has no {on}. Only EAGLE-3 drafts have them: leave them out.")
        ids = self.eagle_aux_hidden_state_layer_ids
        if self.reads_one_state and ids is not None and len(ids) != 1:
            raise ValueError(f"A {self.model_type} draft reads one state, not those of {ids}.")
        known: set[tuple[int, ...]] = {()}
        for path in map(tuple, self.static_tree or ()):
            if path[:-1] not in known or not path or min(path) < 0:
                raise ValueError(f"`static_tree` has {list(path)} before its parent. Put each node behind its parent.")
            known.add(path)

    @classmethod
    def recognizes(cls, content: dict[str, Any], source: str | Path) -> bool:
        """
        Returns `True`, or raises `ValueError` if the `config.json` is of another model. It never returns `False`, because the package
        converts only checkpoints of EAGLE-3.
        """
        if content.get("model_type") != cls.model_type:
            name = content.get("model_type") or content.get("speculators_model_type")
            raise ValueError(f"{source} is not a {cls.model_type} draft: its config.json is of {name!r}.")
        return True

    def _saved_form(self, output: dict[str, Any]) -> dict[str, Any]:
        output = super()._saved_form(output)
        for name in ("auto_map", "speculators_model_type", "speculators_version"):
            output.pop(name, None)
        return output | {"model_type": self.model_type, "architectures": None}


class BaselineDraft(DraftModel):
    """
    A draft that reads the state that the target's head reads, and by default proposes a static tree.

    A draft of any class may define how it is trained ([`~ttt.draft_loss`]). Subclasses of this one define `unroll`, EAGLE-3's drafts
    none of these:

    - `unroll(batch, steps)` yields the first `steps` drafting steps ([`~ttt.UnrollStep`]). By default they are those of [`~ttt.ttt_unroll`].
    - `row_loss(logits, targets)` returns the loss of each row of the draft's own `unroll`, `(B, R)`, given logits `(B, R,
      draft_vocab_size)` and [`~ttt.RowTargets`]. By default it is the divergence from the target. Only that can be estimated
      from a sample of the vocabulary (`sampled_vocab_size`).
    - `most_steps` is the largest `ttt_steps` that the draft can be trained with. By default any number is allowed.
    """

    config_class = BaselineConfig
    reads_normed_state = True
    _auto_class = None  # its code is this package's, and not saved with it

    @classmethod
    def default_overrides(cls, target: PreTrainedModel, overrides: dict[str, Any]) -> dict[str, Any]:
        """The overrides of [`from_target`], with this method's defaults."""
        depth = target.config.get_text_config(decoder=True).num_hidden_layers
        tree = best_static_tree(GUESSED_ACCURACIES)
        return {"eagle_aux_hidden_state_layer_ids": [depth], "static_tree": tree} | overrides

    @classmethod
    def from_target(cls, target: PreTrainedModel, *args: Any, **overrides: Any) -> DraftModel:
        """See [`~draft_model_eagle3.DraftModel.from_target`]."""
        return super().from_target(target, *args, **cls.default_overrides(target, overrides))

    @property
    def grow_tree(self) -> Callable[..., DraftTree]:  # type: ignore[override]
        """[`~static_tree.grow_static_tree`] with the draft's tree, or without one [`~tree_eagle3.grow_tree`]."""
        tree = self.config.static_tree
        return DraftModel.grow_tree if tree is None else partial(grow_static_tree, tree)

    @property
    def most_steps(self) -> int | None:
        """The largest `ttt_steps` that the draft can be trained with, or `None` if any number is allowed."""
        return None

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:
        """
        Pushes the draft with transformers' own card, and without the path of the target's folder on this machine. See
        [`~transformers.utils.PushToHubMixin.push_to_hub`]. Raises `ValueError` if the repo has another model.
        """
        check_repo(repo_id, kwargs.get("revision"), kwargs.get("token"))
        with verifier_without_path(self):
            return PreTrainedModel.push_to_hub(self, repo_id, **kwargs)
