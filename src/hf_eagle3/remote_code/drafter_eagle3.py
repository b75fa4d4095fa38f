# SPDX-License-Identifier: Apache-2.0
"""The draft proposes: its keys and values during one call, what it has yet to read, and the tree that it grows."""

import torch
import torch.nn.functional as F
from transformers import DynamicCache

from .accept_eagle3 import reads_without_sync
from .cache_eagle3 import compiled
from .cuda_eagle3 import GraphedFunction, captures_graphs
from .noise_eagle3 import sample_scores
from .proposer_eagle3 import Call, Proposer
from .ragged_eagle3 import additive_mask, flat_indices, on_device, right_index, stack_right, take_rows
from .tree_eagle3 import DraftTree, Plan


class Slots:
    """
    What a forward of the draft takes as its cache. A row has slots of its own, which its text fills from the left and
    a tree goes on with: nothing is moved when rows accept different numbers of tokens, or when a tree is forgotten.

    Args:
        keys, values (`list[torch.Tensor]`): Of each layer, `(B, num_heads, num_slots, head_dim)`.
        indices (`torch.LongTensor` of shape `(B, Q)`): Slots of the tokens that are read.
        num_visible (`int`): It attends to so many from the left, but for those that the mask hides.
    """

    def __init__(self, keys, values, indices, num_visible):
        self.keys, self.values, self.indices, self.num_visible = keys, values, indices, num_visible

    def update(self, key_states, value_states, layer_idx):
        """What attention calls, as of a [`~transformers.Cache`]."""
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        indices = flat_indices(self.indices, keys.shape)
        for states, new in ((keys, key_states), (values, value_states)):
            states.view(-1, states.shape[3]).index_copy_(0, indices, new.flatten(0, 2).to(states.dtype))
        return keys[:, :, : self.num_visible], values[:, :, : self.num_visible]

    def masks(self, config, allowed, distances) -> dict[str, torch.FloatTensor]:
        """Additive masks by layer type, of which slots `(B, Q, num_visible)` are attended to, and how far away those are."""
        dtype, masks = self.keys[0].dtype, {}
        for layer_type in set(config.layer_types):
            seen = allowed & (distances < config.sliding_window) if layer_type == "sliding_attention" else allowed
            masks[layer_type] = additive_mask(seen, dtype)[:, None]
        return masks


def read(draft, embedding, keys, values, longest, tokens, features, positions, counts, lengths, num_masks=0):
    """
    Reads the newest tokens of each row.

    Args:
        draft (`Eagle3ForSpeculation`): The draft.
        embedding (`nn.Embedding`): The target's, for drafts without a table of their own.
        keys, values: See [`Slots`].
        longest (`int`, *optional*): The largest of `lengths`. `None` if shapes must not depend on it.
        tokens (`torch.LongTensor` of shape `(B, R)`): The newest `R` tokens of each row.
        features (`torch.FloatTensor` of shape `(B, R, n_aux * H)`): The target's states at the positions before them.
        positions (`torch.LongTensor` of shape `(B, R)`): Those positions.
        counts (`torch.LongTensor` of shape `(B,)`): How many of them, at the right, are to be read.
        lengths (`torch.LongTensor` of shape `(B,)`): How many each row has read before.
        num_masks (`int`, *optional*, defaults to 0): How many places behind them a parallel draft reads, too.

    Returns:
        [`Eagle3Output`], of the last token of each row, and of the places behind it.
    """
    index = right_index(counts, tokens.shape[1])  # (B, R)
    inputs_embeds, hidden_states = draft.embed(tokens, embedding), draft.combine_hidden_states(features)
    if num_masks > 0:
        ahead = torch.arange(num_masks, device=tokens.device)
        index = torch.cat([index, counts[:, None] + ahead], dim=1)
        positions = torch.cat([positions, positions[:, -1:] + 1 + ahead], dim=1)
        inputs_embeds, hidden_states = (
            torch.cat([read, mask.expand(len(tokens), -1, -1)], dim=1)
            for read, mask in zip((inputs_embeds, hidden_states), draft.mask_inputs(num_masks, embedding))
        )
    num_visible = keys[0].shape[2] if longest is None else longest + index.shape[1]
    # Padding goes to free slots behind the row's text.
    indices = (lengths[:, None] + index % index.shape[1]).clamp(max=keys[0].shape[2] - 1)
    slots = Slots(keys, values, indices, num_visible)
    distances = (lengths[:, None] + index.clamp(min=0))[..., None] - torch.arange(num_visible, device=tokens.device)
    return draft(
        inputs_embeds=inputs_embeds,
        hidden_states=hidden_states,
        position_ids=positions,
        attention_mask=slots.masks(draft.config.transformer_layer_config, distances >= 0, distances),
        cache=slots,
        logits_to_keep=1 + num_masks,
    )


def read_and_grow(
    draft, embedding, keys, values, longest, tokens, features, positions, counts, lengths, plan, *settings
) -> DraftTree:
    """
    Reads the newest tokens of each row and grows a tree below them, which it forgets again. A parallel draft is asked
    once: what it says of a token does not depend on those before it that are not known yet.

    Args:
        draft, embedding, keys, values, longest, tokens, features, positions, counts, lengths: See [`read`].
        plan (`Plan`), settings: See [`~tree_eagle3.grow_tree`]: from `threshold` on.
    """
    num_masks = plan.depth - 1 if draft.config.is_parallel else 0
    newest = read(draft, embedding, keys, values, longest, tokens, features, positions, counts, lengths, num_masks)
    logits, hidden_states = newest.logits[:, -1 - num_masks], newest.last_hidden_state[:, -1 - num_masks]
    lengths, num_read = (lengths + counts)[:, None], tokens.shape[1]  # (B, 1)
    depths, all_slots = tokens[:, :0], torch.arange(keys[0].shape[2], device=tokens.device).expand(len(tokens), -1)

    def advance(tokens, hidden_states, level, visible):
        nonlocal depths
        if draft.config.is_parallel:
            return newest.logits[:, level - 1 - num_masks, None].expand(-1, tokens.shape[1], -1), hidden_states
        depths = torch.cat([depths, torch.full_like(tokens, level)], dim=1)  # (B, T) of all nodes so far
        width, nodes = tokens.shape[1], lengths + torch.arange(depths.shape[1], device=tokens.device)
        past = all_slots if longest is None else all_slots[:, : longest + num_read + depths.shape[1]]
        slots = Slots(keys, values, nodes[:, -width:], past.shape[1])
        allowed = (past < lengths)[:, None].expand(-1, width, -1)
        allowed = allowed.scatter(2, nodes[:, None].expand(-1, width, -1), visible)
        # Siblings are at one position; that of the first level is the one after the newest token's.
        distances = (lengths + level - 1) - past.scatter(1, nodes, lengths + depths - 1)
        outputs = draft(
            inputs_embeds=draft.embed(tokens, embedding),
            hidden_states=hidden_states,
            position_ids=(positions[:, -1:] + level).expand(-1, width),
            attention_mask=slots.masks(draft.config.transformer_layer_config, allowed, distances[:, None]),
            cache=slots,
        )
        return outputs.logits, outputs.last_hidden_state

    token_ids = None if draft.d2t is None else draft.draft_token_ids
    tree = draft.grow_tree(tokens[:, -1:], logits, hidden_states, advance, token_ids, plan, *settings)
    # What it leaves may be no numbers, and no mask keeps those from the next step.
    num_left = depths.shape[1] + num_masks
    indices = flat_indices(lengths + torch.arange(num_left, device=tokens.device), keys[0].shape)
    for states in (*keys, *values):
        states.view(-1, states.shape[3]).index_fill_(0, indices, 0)
    return tree


def read_and_grow_fixed(*args):
    """
    [`read_and_grow`] as a function of tensors, to be compiled: the last three arguments are the power, and the noise
    `(B, plan.depth, draft_vocab_size)` and the temperature with which the next tokens will be sampled, or `None`.
    Returns the fields of a [`DraftTree`].
    """
    *args, power, noise, temperature = args

    def guess(logits, level):
        return sample_scores(logits.float() / temperature, noise[:, level])

    tree = read_and_grow(*args, 0.0, power, None if noise is None else guess)
    return tree.tokens, tree.parents, tree.depths, tree.ancestors, tree.confidences


class Drafter(Proposer):
    """
    The draft, during one call. Beside a static cache it draws the same tree in every step, by one function of fixed
    shapes, which is compiled where the target is. On CUDA devices it does so beside other caches, too, and the function
    is captured as a CUDA graph.

    Args:
        draft (`Eagle3ForSpeculation`): The draft.
        call (`Call`): The call of `generate`.
    """

    # At most so many steps wait to be read; older ones are dropped, so that plain decoding keeps no states of the whole text.
    MAX_UNREAD = 256

    def __init__(self, draft, call: Call):
        self.draft, self.call, self.has_fixed_shapes = draft, call, call.capacity is not None
        self.whole = call.whole._replace(depth=min(call.whole.depth, call.whole.num_nodes))
        self.most = self.whole.depth + 1  # tokens that a step with a tree leaves to read
        self.spare = max(self.most, self.whole.branching_factor * (self.whole.depth - 1))  # slots beside the text
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.lengths: list[int] = []  # of what each row has read
        # What was accepted and not read yet: tokens, states and positions (B, R, ...), and how many of each row.
        self.unread: list[tuple[tuple[torch.Tensor, ...], list[int]]] = []
        self.fixed_tree = compiled(read_and_grow_fixed, draft, call.compile_config)
        self.graphed_tree = None
        if not self.has_fixed_shapes and captures_graphs(draft.get_output_embeddings().weight.device):
            self.graphed_tree = GraphedFunction()

    def inference_mode(self):
        """What it computes never leaves the call, and costs less in inference mode, if it is not compiled."""
        return torch.no_grad() if self.has_fixed_shapes else torch.inference_mode()

    def observe(self, accepted):
        blocks, counts = (accepted.tokens, accepted.states, accepted.positions), accepted.counts
        self.unread.append((tuple(block[:, -max(counts) :] for block in blocks), counts))
        if len(self.unread) > self.MAX_UNREAD:
            if not self.lengths:  # the prompt, to whose first tokens all later ones attend
                with self.inference_mode():
                    *blocks, counts = self.read_all_but_newest(self.has_fixed_shapes)
                self.unread = [(tuple(block[:, -max(counts) :] for block in blocks), counts)]
            else:
                del self.unread[0]

    def select(self, rows):
        unread, self.unread = self.unread, []
        for blocks, counts in unread:
            counts = [counts[row] for row in rows]
            self.unread.append((tuple(block[rows, -max(counts) :] for block in blocks), counts))
        if self.lengths:
            with self.inference_mode():
                self.lengths = [self.lengths[row] for row in rows]
                self.keys, self.values = ([states[rows] for states in each] for each in (self.keys, self.values))

    def propose(self, plan: Plan, root_tokens, sampler=None) -> DraftTree:
        with self.inference_mode():
            is_graphed = self.graphed_tree is not None and plan == self.whole
            *blocks, counts = self.read_all_but_newest(has_fixed_shape := self.has_fixed_shapes or is_graphed)
            past, num_rows = self.lengths, blocks[0].shape[1]
            self.reserve(max(past) + max(num_rows, self.most * has_fixed_shape) + self.spare)
            self.lengths = [length + count for length, count in zip(past, counts)]
            longest = None if has_fixed_shape else max(past)
            arguments = self.draft, self.call.embedding, self.keys, self.values, longest
            numbers = on_device([counts, past], blocks[0].device)
            if has_fixed_shape:
                blocks = [_padded(block, self.most - num_rows) for block in blocks]
                power = on_device(self.call.calibration.power, blocks[0].device, torch.float32)

                def grow(tokens, features, positions, counts, past, *settings):
                    inputs = tokens, features, positions, counts, past
                    return self.fixed_tree(*arguments, *inputs, self.whole, *settings)

                inputs = *blocks, *numbers, power, *self.noise_ahead(sampler)
                fields = self.graphed_tree(grow, self.keys, *inputs) if is_graphed else grow(*inputs)
                # What a CUDA graph returns is overwritten by the next one.
                fields = (None if entries is None else entries.clone() for entries in fields)
                return DraftTree(*fields, depth=self.whole.depth)

            def guess(logits, level):
                return sampler.guess(logits, level, self.token_ids)

            # To count the nodes above a threshold is to wait for the device, which verifies a few more as fast.
            threshold = self.call.threshold if reads_without_sync(blocks[0].device) else 0.0
            settings = threshold, self.call.calibration.power, None if sampler is None else guess
            return read_and_grow(*arguments, *blocks, *numbers, plan, *settings)

    @property
    def token_ids(self) -> torch.LongTensor | None:
        return None if self.draft.d2t is None else self.draft.draft_token_ids

    def noise_ahead(self, sampler):
        """What [`read_and_grow_fixed`] takes."""
        if sampler is None:
            return None, None
        like, token_ids = self.draft.get_output_embeddings().weight.T, self.token_ids  # as wide as logits
        noise = [sampler.noise_ahead(level, token_ids, like) for level in range(self.whole.depth)]
        return torch.stack(noise, dim=1), on_device(sampler.temperature, like.device)

    def take_unread(self) -> tuple[torch.LongTensor, torch.FloatTensor, torch.LongTensor, list[int]]:
        """The newest tokens `(B, R)`, the states and positions before them, and how many of those each row has to read."""
        (tokens, states, positions), counts = self.unread[0]
        if len(self.unread) > 1:
            rows, begin = [[] for _ in counts], 0
            for (block, *_), block_counts in self.unread:
                begin += block.shape[1]
                for row, count in zip(rows, block_counts):
                    row += range(begin - count, begin)
            index, counts = stack_right(rows, device=tokens.device), list(map(len, rows))
            tokens, states, positions = (
                torch.cat(blocks, dim=1) for blocks in zip(*(blocks for blocks, _ in self.unread))
            )
            tokens, positions = tokens.gather(1, index), positions.gather(1, index.to(positions.device))
            states = take_rows(states, index.to(states.device))
        self.unread = []
        parameter = self.draft.get_output_embeddings().weight
        return tokens.to(parameter.device), states.to(parameter), positions.to(parameter.device), counts

    def read_all_but_newest(self, has_fixed_shape: bool = False):
        """
        Catches up with all but the newest tokens. Returns what [`take_unread`] does, of those: of at most `self.most`
        if they must fit a fixed shape.
        """
        *blocks, counts = self.take_unread()
        most = self.most if has_fixed_shape else blocks[0].shape[1] if self.lengths else 1
        excess = blocks[0].shape[1] - most
        if excess > 0:
            self.read(*(block[:, :excess] for block in blocks), [max(count - most, 0) for count in counts])
            blocks = [block[:, excess:] for block in blocks]
        self.lengths = self.lengths or [0] * len(counts)
        return *blocks, [min(count, most) for count in counts]

    def read(self, tokens, states, positions, counts) -> None:
        past, num_rows = self.lengths or [0] * len(counts), tokens.shape[1]
        self.lengths = [length + count for length, count in zip(past, counts)]
        self.reserve(max(past) + num_rows)
        numbers = on_device([counts, past], tokens.device)
        if any(past):
            longest = None if self.has_fixed_shapes else max(past)
            arguments = self.draft, self.call.embedding, self.keys, self.values, longest
            read(*arguments, tokens, states, positions, *numbers)
            return
        # A prompt may be long, and attention can do without a mask over all pairs of its tokens.
        index, cache = right_index(numbers[0], num_rows), DynamicCache()
        self.draft.step(
            inputs_embeds=self.draft.embed(tokens, self.call.embedding),
            hidden_states=self.draft.combine_hidden_states(states),
            position_ids=positions,
            attention_mask=(index >= 0).long() if len(counts) > 1 else None,
            cache=cache,
            only_last=True,
        )
        slots = Slots(self.keys, self.values, index % num_rows, num_rows)
        is_text = (index >= 0)[:, None, :, None]  # what padding leaves may be no numbers
        for i, layer in enumerate(cache.layers):
            slots.update(layer.keys.where(is_text, 0), layer.values.where(is_text, 0), i)

    def reserve(self, num_slots: int) -> None:
        """Makes room for so many tokens in each row."""
        config, parameter = self.draft.config.transformer_layer_config, self.draft.get_output_embeddings().weight
        if self.has_fixed_shapes:
            num_slots = self.call.capacity + self.spare
        if not self.keys:
            shape = len(self.lengths), config.num_key_value_heads, 0, config.head_dim
            self.keys, self.values = ([parameter.new_zeros(shape) for _ in self.draft.layers] for _ in range(2))
        if (missing := num_slots - self.keys[0].shape[2]) > 0:
            missing = missing if self.has_fixed_shapes else max(missing, num_slots)  # twice as many each time
            self.keys, self.values = (
                [F.pad(states, (0, 0, 0, missing)) for states in each] for each in (self.keys, self.values)
            )
            if self.has_fixed_shapes:  # as for static caches in transformers: CUDA graphs write to them
                for states in (*self.keys, *self.values):
                    torch._dynamo.mark_static_address(states)


def _padded(block: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Rows of so many entries more at the left. Compilers look at strides, even where there is but one row."""
    padding = *(0, 0) * (block.dim() - 2), num_rows, 0
    return F.pad(block, padding).clone(memory_format=torch.contiguous_format)
