"""Calls of `generate` with whatever a caller may pass: plain decoding and ours must not differ in anything that can be seen."""

import contextlib
import copy
import functools
import math
import random
import re
import threading
import weakref
from types import SimpleNamespace
from unittest import mock

import torch
from conftest import (
    BLOCK_DRAFTS,
    CONVOLUTIONAL,
    FAMILIES,
    INDEXED,
    MORE_FAMILIES,
    RECURRENT,
    VOCAB_SIZE,
    default_dtype,
    lookups_of,
    make_baseline,
    make_batch,
    make_block_draft,
    make_oracle,
    make_prompt,
    make_target,
    make_tokenizer,
)
from simulated_graph import SIMULATION
from transformers import (
    AutoModel,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    StaticCache,
    StoppingCriteria,
    WatermarkingConfig,
)
from transformers.cache_utils import DynamicLayer, StaticLayer

from hf_eagle3 import Eagle3ForSpeculation
from hf_eagle3.baselines import BASELINES
from hf_eagle3.remote_code.outputs_eagle3 import CAN_SELECT_HIDDEN_STATES


# Targets to which tokens were added, and what they were before.
BEFORE_RESIZING: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
EVERY_FAMILY = sorted(FAMILIES | MORE_FAMILIES | CONVOLUTIONAL | INDEXED | RECURRENT)
cached_target = functools.cache(make_target)
tokenizer = functools.cache(make_tokenizer)

# What a call may be refused for that plain `generate` takes; see docs/support.md.
REFUSALS = "|".join(
    (
        "needs `use_cache=True`",
        "cannot tell the free slots of a static cache",
        "cannot roll back",
        "does not offload a static cache",
        "`assistant_ensemble_weight` changes the text",
        "the attentions of a tree",
        "takes a list as `output_hidden_states`",
        "`dola_layers`",
        # transformers' own, of whatever assistant
        "assisted generat",
        "assistant_model",
    )
)


# What processors, criteria and streamers were called with in the newest call, one after another.
EVENTS = []


class OfPairs(LogitsProcessor):
    """Reads the text of each row."""

    def __init__(self, strength):
        self.strength = strength

    def __call__(self, input_ids, scores):
        EVENTS.append(("processor", input_ids))
        favoured = input_ids[:, -2:].sum(dim=1, keepdim=True) % scores.shape[1]
        return scores.scatter_add(1, favoured, torch.full_like(scores[:, :1], self.strength))


class OfOtherRows(OfPairs):
    """Reads the texts of the other rows."""

    def __call__(self, input_ids, scores):
        return super().__call__(input_ids.roll(1, dims=0), scores)


class Draws(OfPairs):
    """Draws from the generator that `generate` samples with."""

    def __call__(self, input_ids, scores):
        return scores + self.strength / 4 * torch.randn_like(scores)


class Counts(OfPairs):
    """Keeps a state from one call to the next."""

    calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores.roll(self.calls % 3, dims=1)


class EditsScores(OfPairs):
    """Changes the scores that it was given."""

    def __call__(self, input_ids, scores):
        return scores.mul_(-1 if int(input_ids[0, -1]) % 2 else 1)


class EditsText(OfPairs):
    """Changes the text that it was given, which the caller gets back so."""

    def __call__(self, input_ids, scores):
        input_ids[:, -1] = (input_ids[:, -1] + 1) % scores.shape[1]
        return scores


class StopsAt(StoppingCriteria):
    """Ends rows at certain pairs of tokens."""

    def __init__(self, modulus):
        self.modulus = modulus

    def __call__(self, input_ids, scores, **kwargs):
        EVENTS.append(("criterion", input_ids))
        return input_ids[:, -2:].sum(dim=1) % self.modulus == 0


class StopsAll(StopsAt):
    """Ends all rows at once."""

    def __call__(self, input_ids, scores, **kwargs):
        return super().__call__(input_ids, scores).any().expand(len(input_ids))


class Interrupt(BaseException):
    pass


class Interrupts:
    """A logits processor, a stopping criterion, a streamer or a forward hook that raises at a certain call."""

    def __init__(self, calls, length=0):
        self.calls, self.length = calls, length

    def __call__(self, *args, **kwargs):
        self.calls -= 1
        if self.calls < 0:
            raise Interrupt
        return args[1] if len(args) == 2 and isinstance(args[1], torch.Tensor) else None

    def put(self, value):
        self()

    def end(self):
        pass


class InterruptingProcessor(Interrupts, LogitsProcessor):
    pass


class InterruptingCriteria(Interrupts, StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        super().__call__()
        return torch.zeros(len(input_ids), dtype=torch.bool)


class ReplacesTheNewest(StopsAt):
    """Before the target reads it."""

    def __call__(self, input_ids, scores, **kwargs):
        input_ids[:, -1] = (input_ids[:, -1] + 1) % VOCAB_SIZE
        return super().__call__(input_ids, scores)


class Recorder:
    """A streamer, which does with its tokens what it wants."""

    def put(self, value):
        EVENTS.append(("streamer", value.clone()))
        value.zero_()

    def end(self):
        EVENTS.append(("streamer", None))


def token(rng):
    return rng.randrange(2, VOCAB_SIZE)


def tokens(rng, most):
    return [token(rng) for _ in range(rng.randint(1, most))]


SAMPLING = {
    "temperature": lambda rng: rng.uniform(0.3, 2.0),
    "top_k": lambda rng: rng.randint(1, VOCAB_SIZE),
    "top_p": lambda rng: rng.uniform(0.1, 1.0),
    "min_p": lambda rng: rng.uniform(0.0, 0.5),
    "top_h": lambda rng: rng.uniform(0.1, 0.9),
    "typical_p": lambda rng: rng.uniform(0.2, 0.95),
    "epsilon_cutoff": lambda rng: rng.uniform(1e-4, 0.05),
    "eta_cutoff": lambda rng: rng.uniform(1e-4, 0.05),
}
PLAIN_FIELDS = {
    "min_length": lambda rng: rng.randint(0, 50),
    "min_new_tokens": lambda rng: rng.randint(1, 10),
    "max_time": lambda rng: rng.choice([0.0, 1e9]),
    "stop_strings": lambda rng: rng.choices("abcdefgh0123", k=rng.randint(1, 3)),
    "use_cache": lambda rng: rng.random() < 0.8,
    "repetition_penalty": lambda rng: rng.uniform(0.7, 1.6),
    "encoder_repetition_penalty": lambda rng: rng.uniform(0.7, 1.6),
    "no_repeat_ngram_size": lambda rng: rng.randint(1, 4),
    "encoder_no_repeat_ngram_size": lambda rng: rng.randint(1, 4),
    "bad_words_ids": lambda rng: [tokens(rng, 2) for _ in range(rng.randint(1, 4))],
    "renormalize_logits": lambda rng: True,
    "forced_bos_token_id": token,
    "forced_eos_token_id": token,
    "remove_invalid_values": lambda rng: True,
    "exponential_decay_length_penalty": lambda rng: (rng.randint(1, 8), rng.uniform(1.01, 1.5)),
    "suppress_tokens": lambda rng: tokens(rng, 30),
    "begin_suppress_tokens": lambda rng: tokens(rng, 30),
    "sequence_bias": lambda rng: {tuple(tokens(rng, 2)): rng.uniform(-8, 8) for _ in range(3)},
    "token_healing": lambda rng: True,
    "guidance_scale": lambda rng: rng.uniform(1.1, 2.0),
    "watermarking_config": lambda rng: WatermarkingConfig(
        greenlist_ratio=rng.uniform(0.1, 0.9), bias=rng.uniform(1, 5)
    ),
    "num_return_sequences": lambda rng: rng.randint(2, 3),
    "num_beams": lambda rng: rng.randint(1, 2),
    "length_penalty": lambda rng: rng.uniform(0.5, 2.0),
    "early_stopping": lambda rng: True,
    "prefill_chunk_size": lambda rng: rng.randint(1, 9),
    "cache_implementation": lambda rng: rng.choice(
        ["static", "static", "static", "dynamic", "offloaded", "quantized"]
    ),
    "max_cache_len": lambda rng: rng.randint(60, 90),
    "disable_compile": lambda rng: True,
    "low_memory": lambda rng: True,
    "bos_token_id": token,
    "is_assistant": lambda rng: False,
    "dola_layers": lambda rng: rng.choice(["low", "high", [2, 4]]),
    "penalty_alpha": lambda rng: 0.6,
    "diversity_penalty": lambda rng: 0.0,
    "num_beam_groups": lambda rng: 1,
    "decoder_start_token_id": token,
}
RETURNED = ("output_scores", "output_logits", "output_hidden_states", "output_attentions")
# Plain decoding would become another kind of assisted decoding by these.
ASSISTED_FIELDS = {
    "num_assistant_tokens": lambda rng: rng.randint(1, 40),
    "num_assistant_tokens_schedule": lambda rng: rng.choice(["constant", "heuristic"]),
    "assistant_confidence_threshold": lambda rng: rng.choice([0.0, 0.01, 0.3]),
    "prompt_lookup_num_tokens": lambda rng: rng.randint(0, 40),
    "max_matching_ngram_size": lambda rng: rng.randint(1, 3),
    "assistant_lookbehind": lambda rng: rng.randint(1, 10),
    "target_lookbehind": lambda rng: rng.randint(1, 10),
    "assistant_ensemble_weight": lambda rng: rng.choice([None, None, 0.5]),
}
# Drawn on their own, or nothing to fuzz: kinds of decoding that are another package's or need other models, compilers.
DRAWN_APART = {"max_length", "max_new_tokens", "do_sample", "return_dict_in_generate", "pad_token_id", "eos_token_id"}
LEFT_OUT = {
    "assistant_early_exit",
    "cache_config",
    "compile_config",
    "constraints",
    "continuous_batching_config",
    "force_words_ids",
    "speculation_type",
    "transformers_version",
    "use_mtp",
}


def unknown_fields() -> set[str]:
    """Fields of transformers' GenerationConfig that nothing here draws: there are new ones."""
    known = {*SAMPLING, *PLAIN_FIELDS, *ASSISTED_FIELDS, *RETURNED, *DRAWN_APART, *LEFT_OUT}
    return {name for name in vars(GenerationConfig()) if not name.startswith("_")} - known


def draw_fields(rng) -> tuple[dict, dict]:
    """Arguments of both calls, and of that with a draft only."""
    kwargs = {"do_sample": rng.random() < 0.5, "pad_token_id": rng.choice([0, 0, 0, token(rng)])}
    kwargs["max_new_tokens"] = rng.randint(1, 32)
    kwargs["eos_token_id"] = rng.choice([None, token(rng), tokens(rng, 8)])
    pool = PLAIN_FIELDS | (SAMPLING if kwargs["do_sample"] else {})
    for name in rng.sample(sorted(pool), rng.choice([0, 0, 1, 1, 2, 3, 4])):
        kwargs[name] = pool[name](rng)
    if rng.random() < 0.2:
        kwargs["return_dict_in_generate"] = True
        # Attentions are refused.
        kwargs |= {name: True for name in RETURNED if rng.random() < (0.02 if name == "output_attentions" else 0.5)}
    if rng.random() < 0.2:
        kinds = [OfPairs, OfOtherRows, Draws, Counts, EditsScores, EditsText]
        kwargs["logits_processor"] = [kind(rng.uniform(2, 8)) for kind in rng.sample(kinds, rng.randint(1, 2))]
    if rng.random() < 0.1:
        kwargs["stopping_criteria"] = [rng.choice([StopsAt, StopsAll, ReplacesTheNewest])(rng.randint(5, 40))]
    if {"stop_strings", "token_healing"} & kwargs.keys():
        kwargs["tokenizer"] = tokenizer()
    names = rng.sample(sorted(ASSISTED_FIELDS), rng.choice([0, 0, 0, 1, 2]))
    return kwargs, {name: value for name in names if (value := ASSISTED_FIELDS[name](rng)) is not None}


def draw_padding(rng, batch) -> dict:
    """The same prompts with padding at the right, or with holes, which a mask may say in any dtype; or at other positions."""
    ids, mask = batch["input_ids"], batch["attention_mask"]
    kind = rng.choice(["right", "holes", "positions", "dtype"])
    if kind == "right":
        ids, mask = ids.flip(1), mask.flip(1)
    elif kind == "holes":
        holes = torch.rand(mask.shape, generator=torch.Generator().manual_seed(rng.randrange(1000))) < 0.3
        mask = mask.masked_fill(holes, 0).index_fill(1, torch.tensor(mask.shape[1] - 1), 1)
    batch = {"input_ids": ids, "attention_mask": mask}
    if kind == "positions":
        batch["position_ids"] = (mask.cumsum(dim=1) - 1).clamp(min=0) + rng.choice([0, 1, rng.randint(2, 40)])
    batch["attention_mask"] = mask.to(rng.choice([torch.long, torch.bool, torch.float32, torch.int32]))
    return batch


# Around both calls.
CONTEXTS = {
    "inference": torch.inference_mode,
    "gradients": torch.enable_grad,
    "device": lambda: torch.device("cpu"),
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
}


def draw_tree(rng) -> dict:
    return {
        "tree_depth": rng.randint(1, 12),
        "branching_factor": rng.randint(1, 16),
        "num_assistant_tokens": rng.randint(1, 64),
        "assistant_confidence_threshold": rng.choice([0.0, 0.01, 0.3]),
        "prompt_lookup_num_tokens": rng.randint(0, 64),
        "tree_policy": rng.choice(["static", "auto", "auto"]),
    }


def make_clock(rng):
    """A clock that tells the same in each run; some are coarse, or stand still."""
    kind, now = rng.choice(["usual", "usual", "usual", "coarse", "frozen", "leaps"]), [1000.0]

    def perf_counter():
        now[0] += 0.0 if kind == "frozen" else rng.lognormvariate(-7, 0.7)
        if kind == "leaps" and rng.random() < 0.02:
            now[0] += rng.choice([1e5, -1.0])
        return now[0] // 0.0156 * 0.0156 if kind == "coarse" else now[0]

    return SimpleNamespace(perf_counter=perf_counter)


def draw_draft(rng, target, text, padding, folder):
    """
    A draft, of EAGLE-3 or of a block: that knows the text, that knows nothing, that is broken, or that came with its own code. Or
    one of another method, that knows nothing.
    """
    kind = rng.choice(["oracle", "oracle", "oracle", "random", "random", "broken", "copy", "other"])
    method = rng.choice(["eagle3", "eagle3", *BLOCK_DRAFTS])
    if kind == "oracle" and text is not None:
        return make_oracle(target, text, rng.randrange(1000), padding, method)
    torch.manual_seed(rng.randrange(1000))
    token_ids, target = range(rng.randrange(90), VOCAB_SIZE), BEFORE_RESIZING.get(target, target)
    if kind == "other":
        draft = make_baseline(rng.choice([*BASELINES, "eagle-2", "p-eagle"]), target)
    elif method in BLOCK_DRAFTS:
        draft = make_block_draft(method, target, draft_token_ids=token_ids)
    else:
        is_finite = bool(target.get_input_embeddings().weight.isfinite().all())  # else its copy would not load
        has_own = {"has_own_embed_tokens": rng.random() < 0.3 and is_finite}
        draft = Eagle3ForSpeculation.from_target(target, token_ids, **has_own).eval()
    if kind == "broken":
        weight = rng.choice([each for each in draft.parameters() if each.dim() == 2])
        weight.data.view(-1)[rng.randrange(weight.numel())] = rng.choice([math.nan, math.inf, 1e30])
    elif kind == "copy" and rng.random() < 0.2:
        draft.save_pretrained(folder)
        draft = AutoModel.from_pretrained(folder, trust_remote_code=method == "eagle3")
    return draft


def poisoned(rng, target):
    """The same target, of which some tokens have states that are no numbers, or overflow."""
    target = copy.deepcopy(target)
    weight = target.get_input_embeddings().weight
    for row in tokens(rng, 10):
        weight.data[row] = rng.choice([math.nan, math.inf, -math.inf, 3e38])
    return target


def with_more_tokens(rng, target):
    """The same target with tokens of which drafts made before know nothing."""
    larger = copy.deepcopy(target)
    torch.manual_seed(rng.randrange(1000))
    larger.resize_token_embeddings(VOCAB_SIZE + rng.randint(1, 8), mean_resizing=False)
    head = larger.get_output_embeddings().weight
    head.data[VOCAB_SIZE:] = 1.5 * head.data[torch.randint(VOCAB_SIZE, (len(head) - VOCAB_SIZE,))]  # often picked
    BEFORE_RESIZING[larger] = target
    return larger


def generate(target, kwargs, seed, draft=None):
    """What a call returns or raises, its tokens as lists, what it streams, and the generator's state after it."""
    target.__dict__.pop("_previous_max_cache_length", None)  # which calls with static caches leave behind
    torch.manual_seed(seed)
    kwargs = dict(kwargs)
    for name in ("input_ids", "logits_processor", "stopping_criteria", "streamer", "past_key_values"):
        if name in kwargs:
            kwargs[name] = copy.deepcopy(kwargs[name])
    if draft is not None:
        kwargs["assistant_model"] = draft
    result = SimpleNamespace(error=None, outputs=None, tokens=None)
    EVENTS.clear()
    result.prompt = kwargs.get("input_ids")
    try:
        with CONTEXTS.get(kwargs.pop("context", None), contextlib.nullcontext)():
            result.outputs = target.generate(**kwargs)
        result.tokens = getattr(result.outputs, "sequences", result.outputs).tolist()
    except Exception as error:
        result.error = error
    result.state, result.events = torch.get_rng_state(), [(name, x if x is None else x.tolist()) for name, x in EVENTS]
    return result


def differences(
    plain, ours, returned=("scores", "logits", "hidden_states", "attentions", "past_key_values")
) -> list[str]:
    """Where the results of two calls differ, but for tokens. Of what it returns, `returned` are compared."""
    found = []
    if not torch.equal(plain.state, ours.state):
        found.append("the generator's state")
    if plain.prompt is not None and not torch.equal(plain.prompt, ours.prompt):
        found.append("the caller's prompt")
    if plain.events != ours.events:  # and what they kept of the text, as it is at the end
        names = [[name for name, _ in each.events] for each in (plain, ours)]
        found.append(
            "what was called" if names[0] != names[1] else "what processors, criteria and streamers were given"
        )
    if hasattr(plain.outputs, "sequences"):
        for name in returned:
            expected, actual = (getattr(each.outputs, name, None) for each in (plain, ours))
            if name == "past_key_values":
                expected, actual = entries_of(expected), entries_of(actual)
            found += compare(expected, actual, name)
    return found


def entries_of(cache):
    """What is stored in each layer of a cache, its length, and the names of its layers."""
    if cache is None:
        return None
    kinds, length = tuple(type(layer).__name__ for layer in cache.layers), int(cache.get_seq_length())

    def states_of(layer):  # what is behind the text in slots of a static cache is overwritten before it is read
        states = tuple(getattr(layer, name, None) for name in ("keys", "values"))
        return (
            (*(each[..., :length, :] for each in states), states[0].shape)
            if isinstance(layer, StaticLayer)
            else states
        )

    return (*map(states_of, cache.layers), kinds, length)


def compare(expected, actual, name) -> list[str]:
    if isinstance(expected, tuple) and isinstance(actual, tuple) and len(expected) == len(actual):
        return [each for i, pair in enumerate(zip(expected, actual)) for each in compare(*pair, f"{name}[{i}]")][:1]
    if isinstance(expected, torch.Tensor) and isinstance(actual, torch.Tensor):
        if expected.shape != actual.shape:
            return [f"{name}: {tuple(expected.shape)} and {tuple(actual.shape)}"]
        scale = expected[expected.isfinite()].abs().amax().item() if expected.isfinite().any() else 1.0
        if not torch.allclose(expected, actual, rtol=1e-3, atol=1e-4 * max(scale, 1.0), equal_nan=True):
            return [f"{name}: values"]
        return []
    return [] if expected == actual else [f"{name}: {expected!r:.80} and {actual!r:.80}"]


def is_near_tie(target, kwargs, seed, expected, actual) -> bool:
    """Whether plain decoding itself writes something else where the texts part, if its scores are rounded otherwise."""
    if len(expected) != len(actual):
        return False
    width = min(len(expected[0]), len(actual[0]))
    column = min((i for i in range(width) if any(a[i] != b[i] for a, b in zip(expected, actual))), default=width)
    rng = torch.Generator().manual_seed(seed)

    def round_otherwise(module, args, outputs):
        outputs.logits = outputs.logits * (1 + 3e-6 * torch.randn(outputs.logits.shape, generator=rng))
        return outputs

    for _ in range(12):
        handle = target.register_forward_hook(round_otherwise)
        again = generate(target, kwargs, seed)
        handle.remove()
        if again.tokens is None or [row[: column + 1] for row in again.tokens] != [
            row[: column + 1] for row in expected
        ]:
            return True
    return False


def run(rng: random.Random, folder) -> tuple[int, str | None]:
    """One case. Returns how many calls with a draft it made, and what is wrong, if anything is."""
    family = rng.choice(EVERY_FAMILY)
    target = cached_target(family)
    if target.config._attn_implementation in ("eager", "sdpa") and rng.random() < 0.25:
        target = copy.deepcopy(target)
        target.set_attn_implementation("eager")
    elif family in ("llama", "qwen3", "qwen3_moe", "mistral-window") and rng.random() < 0.5:
        target = copy.deepcopy(target)
        target.set_attn_implementation("causal_only")
    if is_poisoned := rng.random() < 0.06:
        target = poisoned(rng, target)
    elif rng.random() < 0.1 and not family.startswith("gemma4"):  # which has another table of all tokens
        target = with_more_tokens(rng, target)
    lengths = [rng.randint(1, 40) for _ in range(rng.choice([1, 1, 1, 2, 3, 4, 5]))]
    seed = rng.randrange(10**6)
    kind = rng.choices(["call", "interrupted", "turns", "threads"], [20, 2, 2, 1])[0]
    with contextlib.ExitStack() as stack:
        clock = make_clock(rng)
        stack.enter_context(mock.patch("hf_eagle3.remote_code.decoding_eagle3.time", clock))
        if rng.random() < 0.3:  # as if on an accelerator
            for module in ("accept", "decoding", "drafter", "verify"):
                name = f"hf_eagle3.remote_code.{module}_eagle3.reads_without_sync"
                stack.enter_context(mock.patch(name, lambda device: False))
            if rng.random() < 0.5:  # on which the draft is captured
                for module in ("cache", "decoding", "drafter"):
                    name = f"hf_eagle3.remote_code.{module}_eagle3.captures_graphs"
                    stack.enter_context(mock.patch(name, lambda device: True))
                for name, value in SIMULATION.items():
                    stack.enter_context(mock.patch(name, value))
        cases = {"call": run_call, "interrupted": run_interrupted, "turns": run_turns, "threads": run_threads}
        case = cases[kind]
        num_calls, finding, kwargs = case(rng, target, lengths, seed, folder)
    if finding is not None:
        shown = {name: value for name, value in kwargs.items() if not isinstance(value, torch.Tensor)}
        where = f"{family}{', poisoned' * is_poisoned}, {target.config._attn_implementation}, lengths {lengths}, {sorted(kwargs.keys() - shown.keys())}"
        finding = f"{finding} ({where}, {kind}: {shown})".replace("\n", " ")
    return num_calls, finding


def run_call(rng, target, lengths, seed, folder):
    kwargs, assisted = draw_fields(rng)
    takes_masks = target.config._attn_implementation != "causal_only"  # over the empty slots of a static cache, too
    if not takes_masks:
        kwargs.pop("cache_implementation", None)
    batch = make_batch(lengths, seed)
    if "token_healing" in kwargs:  # by texts of as many tokens
        batch["input_ids"] = batch["input_ids"] % 35 + 3
    if rng.random() < 0.15:
        batch = draw_padding(rng, batch)
    if rng.random() < 0.15:
        kwargs["context"] = rng.choice(sorted(CONTEXTS))
    if rng.random() < 0.1:
        kwargs["max_length"] = batch["input_ids"].shape[1] + kwargs.pop("max_new_tokens")
    padding = (1 - batch["attention_mask"].long()).sum(dim=1, keepdim=True)
    if len(lengths) == 1 and rng.random() < 0.3:
        del batch["attention_mask"]
    if rng.random() < 0.07:
        batch["inputs_embeds"] = target.get_input_embeddings()(batch.pop("input_ids")).detach()
    if rng.random() < 0.15:
        kwargs["streamer"] = Recorder()
    if rng.random() < 0.1 and "cache_implementation" not in kwargs:
        kwargs["past_key_values"] = (
            DynamicCache(config=target.config)
            if rng.random() < 0.7 or not takes_masks
            else StaticCache(config=target.config, max_cache_len=rng.randint(72, 160))
        )
    kwargs |= batch
    plain = generate(target, kwargs, seed)
    text = None
    if plain.tokens is not None and "input_ids" in batch and "token_healing" not in kwargs:
        text = torch.tensor(plain.tokens)
        padding = padding.repeat_interleave(len(text) // len(lengths), dim=0)
    draft = draw_draft(rng, target, text, padding, folder)
    draft.generation_config.update(**draw_tree(rng))
    edits = (*kwargs.get("logits_processor", ()), *kwargs.get("stopping_criteria", ()))
    is_edited = any(isinstance(each, EditsText | ReplacesTheNewest) for each in edits)
    draft, names = None, ()
    if kwargs.get("cache_implementation") == "static" and target.config._attn_implementation == "eager":
        names = [("scores", "logits")]  # padding attends to all slots alike, and ours has more of them
    for number in range(1, rng.randint(3, 6)):
        if draft is None or rng.random() < 0.6:
            draft = draw_draft(rng, target, text, padding, folder / str(number))
            draft.generation_config.update(**draw_tree(rng))
        looks_up = rng.random() < 0.3 and text is not None and not is_edited
        with lookups_of(text, seed) if looks_up else contextlib.nullcontext():
            ours = generate(target, kwargs | assisted, seed, draft)
        if ours.error is not None:
            if isinstance(ours.error, ValueError) and re.search(REFUSALS, str(ours.error)):
                return number, None, kwargs
            if plain.error is None:
                return number, f"raised {ours.error!r}, plain nothing", kwargs | assisted
            if not torch.equal(plain.state, ours.state):
                return number, f"leaves another generator's state after {ours.error!r}", kwargs | assisted
        elif plain.error is not None:
            return number, f"plain raised {plain.error!r}, ours nothing", kwargs | assisted
        elif ours.tokens != plain.tokens:
            if not is_near_tie(target, kwargs, seed, plain.tokens, ours.tokens):
                return number, f"plain {plain.tokens}, ours {ours.tokens}", kwargs | assisted
        elif found := differences(plain, ours, *names):
            return number, f"differs in {'; '.join(found)}", kwargs | assisted
    return number, None, kwargs


def run_turns(rng, target, lengths, seed, folder):
    """A chat: each turn goes on from the cache of the one before, with or without a draft."""
    kwargs = {**make_batch(lengths, seed), "pad_token_id": 0, "return_dict_in_generate": True}
    kwargs["eos_token_id"] = rng.choice([None, tokens(rng, 8)])
    padding = (1 - kwargs["attention_mask"]).sum(dim=1, keepdim=True)
    makers = [lambda: None, lambda: DynamicCache(config=target.config)]
    if target.config._attn_implementation != "causal_only":
        makers.append(lambda: StaticCache(config=target.config, max_cache_len=rng.choice([100, 400])))
    caches = [rng.choice(makers)()] * 2  # of plain decoding, and of that with drafts
    num_calls = 0
    for turn in range(rng.randint(2, 4)):
        kwargs |= {"max_new_tokens": rng.randint(1, 16), "do_sample": rng.random() < 0.5}
        plain, ours = ({**kwargs, "past_key_values": cache} for cache in caches)
        expected = generate(target, plain, seed + turn)
        if expected.error is not None:  # the cache is too short
            break
        draft = None
        if rng.random() < 0.7:
            draft = draw_draft(rng, target, torch.tensor(expected.tokens), padding, folder / str(turn))
            draft.generation_config.update(**draw_tree(rng))
        actual = generate(target, ours, seed + turn, draft)
        num_calls += draft is not None
        if actual.error is not None and draft is not None and re.search(REFUSALS, str(actual.error)):
            break
        what = {**kwargs, "turn": turn, "cache": type(caches[0]).__name__}
        if actual.error is not None:
            return num_calls, f"raised {actual.error!r}, plain nothing", what
        if actual.tokens != expected.tokens:
            if is_near_tie(target, plain, seed + turn, expected.tokens, actual.tokens):
                break
            return num_calls, f"plain {expected.tokens}, ours {actual.tokens}", what
        if found := differences(expected, actual):
            return num_calls, f"differs in {'; '.join(found)}", what
        caches = [each.outputs.past_key_values for each in (expected, actual)]
        if all(type(layer) is DynamicLayer for layer in caches[0].layers) and rng.random() < 0.5:
            num_cropped = rng.randint(1, 5)
            for cache in caches:
                cache.crop(-num_cropped)
        said = torch.tensor([tokens(rng, 1) * rng.randint(1, 5)] * len(lengths))
        kwargs["input_ids"] = torch.cat([torch.tensor(expected.tokens), said], dim=1)
        num_new = kwargs["input_ids"].shape[1] - kwargs["attention_mask"].shape[1]
        kwargs["attention_mask"] = torch.nn.functional.pad(kwargs["attention_mask"], (0, num_new), value=1)
    return num_calls, None, kwargs


def run_interrupted(rng, target, lengths, seed, folder):
    """Something raises in the middle: what the caller's cache holds can be continued from."""
    batch = make_batch(lengths, seed)
    num_new = rng.randint(4, 24)
    kwargs = {**batch, "max_new_tokens": num_new, "do_sample": rng.random() < 0.5, "pad_token_id": 0}
    plain = generate(target, kwargs, seed)
    if plain.error is not None:  # of a target that is poisoned
        return 1, None, kwargs
    text, mask = torch.tensor(plain.tokens), batch["attention_mask"]
    draft = make_oracle(target, text, seed, (1 - mask).sum(dim=1, keepdim=True))
    draft.generation_config.update(**draw_tree(rng))
    kind, calls = rng.choice(["logits_processor", "stopping_criteria", "streamer", "hook"]), rng.randint(1, num_new)
    cache, handle = DynamicCache(config=target.config), None
    call = {**kwargs, "past_key_values": cache, "assistant_model": draft}
    if kind == "hook":
        layers = [each for name, each in target.named_modules() if name.endswith("mlp")] or [target]
        handle = rng.choice(layers).register_forward_hook(Interrupts(calls))
    else:
        makers = {"logits_processor": InterruptingProcessor, "stopping_criteria": InterruptingCriteria}
        interrupts = makers.get(kind, Interrupts)(calls)
        call[kind] = interrupts if kind == "streamer" else [interrupts]
    torch.manual_seed(seed)
    was_interrupted = False
    try:
        target.generate(**call)
    except Interrupt:
        was_interrupted = True
    finally:
        if handle is not None:
            handle.remove()
    what = {**kwargs, "interrupted by": kind, "calls": calls}
    if kind == "hook":  # which leaves plain `generate` some layers a token behind
        if was_interrupted and all(type(layer) is DynamicLayer and layer.is_initialized for layer in cache.layers):
            again = generate_again(target, kwargs, cache, seed)
            if again != plain.tokens and not is_near_tie(target, kwargs, seed, plain.tokens, again):
                return 2, f"from the cache cropped to the prompt {again}, from nothing {plain.tokens}", what
        return 2, go_on_after(target, draft, kwargs, seed, plain), what
    length = int(cache.get_seq_length())
    if length >= text.shape[1]:
        return 1, f"the cache holds {length} of {text.shape[1]} tokens", what
    if was_interrupted and length == 0:  # in the prompt
        return 1, None, what
    known = text[:, : length + 1]
    mask = torch.nn.functional.pad(mask, (0, known.shape[1] - mask.shape[1]), value=1)
    go_on = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "input_ids": known}
    expected = generate(target, go_on, seed)
    torch.manual_seed(seed)
    actual = target.generate(**go_on, past_key_values=cache).tolist()
    if actual != expected.tokens and not is_near_tie(target, go_on, seed, expected.tokens, actual):
        return 2, f"from the cache that was left {actual}, from nothing {expected.tokens}", what
    return 2, go_on_after(target, draft, kwargs, seed, plain), what


def generate_again(target, kwargs, cache, seed) -> list[list[int]]:
    """The same call without a draft, of which the cache has the prompt, but for its last token."""
    cache.crop(min(kwargs["input_ids"].shape[1] - 1 - cache.get_seq_length(), 0))
    torch.manual_seed(seed)
    return target.generate(**kwargs, past_key_values=cache).tolist()


def go_on_after(target, draft, kwargs, seed, plain) -> str | None:
    """The next call of target and draft."""
    ours = generate(target, kwargs, seed, draft)
    if ours.tokens != plain.tokens and not is_near_tie(target, kwargs, seed, plain.tokens, ours.tokens or [[]]):
        return f"after it plain {plain.tokens}, ours {ours.error or ours.tokens}"
    return None


def run_threads(rng, target, lengths, seed, folder):
    """Several threads use one target and one draft."""
    kwargs = {"max_new_tokens": rng.randint(4, 24), "do_sample": False, "pad_token_id": 0}
    # Older transformers make no masks for static caches of Llama 4, with or without a draft.
    may_be_static = target.config.model_type != "llama4_text" or CAN_SELECT_HIDDEN_STATES
    if rng.random() < 0.3 and target.config._attn_implementation != "causal_only" and may_be_static:
        kwargs["cache_implementation"] = "static"
    calls = [{**kwargs, "input_ids": make_prompt(length, seed + i)} for i, length in enumerate((lengths * 3)[:3])]
    plain = [generate(target, {**call, "cache_implementation": None}, seed) for call in calls]
    draft = draw_draft(rng, target, None, None, folder)
    draft.generation_config.update(**draw_tree(rng))
    results = [None] * len(calls)

    def work(i):
        results[i] = generate(target, calls[i], seed, draft)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for call, expected, actual in zip(calls, plain, results):
        if actual.error is not None and re.search(REFUSALS, str(actual.error)):
            continue
        if actual.tokens != expected.tokens:
            if actual.tokens and is_near_tie(target, call, seed, expected.tokens, actual.tokens):
                continue
            return (
                len(calls),
                f"plain {expected.error or expected.tokens}, ours {actual.error!r} {actual.tokens}",
                kwargs,
            )
    return len(calls), None, kwargs
