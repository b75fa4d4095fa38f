# /// script
# dependencies = ["hf-eagle3", "xgrammar", "outlines", "llguidance", "lm-format-enforcer"]
# ///
r"""
How many tokens a step accepts if a grammar constrains the text, and whether the text is that without a draft.

    python experiments/structured_output.py --target HuggingFaceTB/SmolLM2-135M-Instruct --draft DRAFT

The target extracts six people from sentences, as JSON that follows a schema or as lines that match a regular expression. It prints, for
each library and grammar:

    own      share of tokens that the target would also take without the grammar
    one      share of tokens for which the grammar allows no other
    few      share of tokens for which the grammar allows at most eight
    perfect  tokens a step of chains of eight that know what the target would take without the grammar
    same     texts that are those of plain `generate`
    tau      tokens a step of the draft
    root     tau if the draft's tokens for the root are masked as the grammar will mask the target's (with xgrammar alone)
    all      tau if those for all nodes are

The draft grows the largest tree in every step, so nothing depends on times. Without a draft the last four columns are left out.
"""

import argparse
import functools
import importlib
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LogitsProcessor,
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
)

from hf_eagle3.evaluation.drafts import load_draft


SENTENCES = [
    "Anna Keller is 34 years old. She lives in Hamburg and likes rowing, chess and baking bread.",
    "My neighbour, Tom Ferris, turned 61 last week. When he is not in his garden in Leeds, he restores old radios.",
    "Maria Lopez, a nurse of 29 from Seville, plays the guitar and goes climbing on Sundays.",
    "At 45, Kenji Sato of Osaka runs marathons, and he collects stamps and fountain pens.",
    "Dr. Ruth Cohen (52) moved to Boston in 2004. She paints, and she sings in a choir.",
    "Peter Novak lives in Prague. He is 19, and he spends his days on football and video games.",
]
STRING = {"type": "string", "maxLength": 40}
PROPERTIES = {
    "name": STRING,
    "age": {"type": "integer"},
    "city": STRING,
    "hobbies": {"type": "array", "items": STRING, "minItems": 1, "maxItems": 4},
}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": list(PROPERTIES), "additionalProperties": False}
WORD, NAME = "[a-z]{3,12}", "[A-Z][a-z]{2,12}"
REGEX = rf"Name: {NAME} {NAME}\nAge: [1-9][0-9]\nCity: {NAME}\nHobbies: {WORD}(, {WORD}){{1,4}}\n"
TASKS = {
    "json": f"Extract the person as JSON that follows this schema:\n{json.dumps(SCHEMA)}",
    "example": 'Extract the person as JSON, such as {"name": "Jo Doe", "age": 7, "city": "Rome", "hobbies": ["singing"]}.',
    "regex": "Write the person's name, age, city and hobbies, each on a line of its own, as `Name: ...`.",
}


class Watch(LogitsProcessor):
    """Keeps the scores of each token, before and after a grammar."""

    def __init__(self):
        self.scores, self.ids = [], None

    def __call__(self, input_ids, scores):
        self.scores.append(scores[0].clone())
        self.ids = input_ids[0]
        return scores


class Masked:
    """Grows a draft's tree with logits that are masked as a grammar will mask the target's, at nodes of the first `most_levels`."""

    def __init__(self, draft, grammar, watch: Watch, prompt_length: int, most_levels: int):
        self.grow_tree, self.vocab_size = type(draft).grow_tree, draft.config.vocab_size
        self.watch, self.prompt_length, self.most_levels = watch, prompt_length, most_levels
        self.xgrammar = importlib.import_module("xgrammar")
        self.matchers = {(): self.xgrammar.GrammarMatcher(grammar)}

    def matcher(self, tokens: tuple):
        """The state of the grammar after these tokens; `None` if it does not allow them."""
        if tokens not in self.matchers:
            above = self.matcher(tokens[:-1])
            state = None if above is None or above.is_terminated() else above.fork()
            self.matchers[tokens] = state if state is not None and state.accept_token(tokens[-1]) else None
        return self.matchers[tokens]

    def mask(self, logits: torch.Tensor, tokens: tuple, token_ids: torch.Tensor | None) -> torch.Tensor:
        state = self.matcher(tokens)
        if state is None or state.is_terminated():
            return logits
        bitmask = self.xgrammar.allocate_token_bitmask(1, self.vocab_size)
        state.fill_next_token_bitmask(bitmask)
        scores = torch.zeros(1, self.vocab_size)
        self.xgrammar.apply_token_bitmask_inplace(scores, bitmask)
        return logits + (scores[0] if token_ids is None else scores[0, token_ids])

    def __call__(self, root_tokens, logits, hidden_states, advance, token_ids, *settings):
        prefix = (*self.watch.ids[self.prompt_length :].tolist(), int(root_tokens))
        nodes: list[int] = []

        def masked_advance(tokens, hidden_states, level, visible):
            logits, hidden_states = advance(tokens, hidden_states, level, visible)
            nodes.extend(tokens[0].tolist())
            if level < self.most_levels:
                paths = [tuple(nodes[i] for i in row.nonzero()[:, 0].tolist()) for row in visible[0]]
                masked = [self.mask(row, prefix + path, token_ids) for row, path in zip(logits[0], paths)]
                logits = torch.stack(masked)[None]
            return logits, hidden_states

        masked = self.mask(logits[0], prefix, token_ids)[None]
        return self.grow_tree(root_tokens, masked, hidden_states, masked_advance, token_ids, *settings)


class Grammar(NamedTuple):
    """A grammar of a library: its task, what makes a logits processor for one call, and xgrammar's object, if it is of xgrammar."""

    task: str
    processor: Callable
    compiled: Any = None


def grammars(target, tokenizer) -> dict[str, Grammar]:
    """Grammars by name. None of them is compiled yet, because that may take long."""
    # Here, so that `--help` needs none of these libraries. lm-format-enforcer 0.11.3 imports a name from where
    # transformers 4 had it.
    sys.modules["transformers.tokenization_utils"] = transformers.tokenization_utils_base
    import outlines
    import xgrammar
    from lmformatenforcer import JsonSchemaParser, RegexParser
    from lmformatenforcer.integrations.transformers import (
        build_token_enforcer_tokenizer_data,
        build_transformers_prefix_allowed_tokens_fn,
    )
    from outlines.backends import get_json_schema_logits_processor, get_regex_logits_processor

    schema, model = json.dumps(SCHEMA), outlines.from_transformers(target, tokenizer)
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=target.config.vocab_size)
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)
    data = functools.cache(lambda: build_token_enforcer_tokenizer_data(tokenizer))
    of_xgrammar = {
        "schema": ("json", compiler.compile_json_schema(schema)),
        "schema in one form": ("json", compiler.compile_json_schema(schema, any_whitespace=False)),
        "schema, shown by an example": ("example", compiler.compile_json_schema(schema)),
        "regex": ("regex", compiler.compile_regex(REGEX)),
    }

    def of_enforcer(parser: Callable) -> LogitsProcessor:
        return PrefixConstrainedLogitsProcessor(build_transformers_prefix_allowed_tokens_fn(data(), parser()), 1)

    return {
        **{f"none, {task}": Grammar(task, Watch) for task in TASKS},
        **{
            f"xgrammar, {name}": Grammar(task, partial(xgrammar.contrib.hf.LogitsProcessor, compiled), compiled)
            for name, (task, compiled) in of_xgrammar.items()
        },
        **{
            f"outlines with {backend}, {task}": Grammar(task, partial(make, backend, model, text))
            for task, make, text in (
                ("json", get_json_schema_logits_processor, schema),
                ("regex", get_regex_logits_processor, REGEX),
            )
            for backend in ("outlines_core", "llguidance", "xgrammar")
        },
        "lm-format-enforcer, json": Grammar("json", partial(of_enforcer, lambda: JsonSchemaParser(SCHEMA))),
        "lm-format-enforcer, regex": Grammar("regex", partial(of_enforcer, lambda: RegexParser(REGEX))),
    }


def perfect_length(own: list[bool]) -> float:
    """The mean tokens a step of chains of eight, if these tokens after the first one are what the chains propose."""
    num_steps, left = 0, own[1:]
    while left:
        accepted = next((i for i, is_own in enumerate(left[:8]) if not is_own), min(8, len(left)))
        num_steps, left = num_steps + 1, left[accepted + 1 :]
    return (len(own) - 1) / max(num_steps, 1)


class Run(NamedTuple):
    text: list[int]
    before: list[torch.Tensor]  # scores of each token before the grammar
    after: list[torch.Tensor]


def generate(target, inputs, grammar: Grammar, args, draft=None, masked_levels: int = 0) -> Run:
    before, after, prompt_length = Watch(), Watch(), inputs["input_ids"].shape[1]
    if masked_levels > 0:
        draft.grow_tree = Masked(draft, grammar.compiled, before, prompt_length, masked_levels)
    torch.manual_seed(0)
    text = target.generate(
        **inputs,
        logits_processor=LogitsProcessorList([before, grammar.processor(), after]),
        assistant_model=draft,
        max_new_tokens=args.max_new_tokens,
        do_sample=args.temperature > 0,
        **({"temperature": args.temperature} if args.temperature > 0 else {}),
    )
    if masked_levels > 0:
        del draft.grow_tree
    return Run(text[0, prompt_length:].tolist(), before.scores, after.scores)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="A chat model: a folder or a Hub id")
    parser.add_argument("--draft", help="Its draft: a folder or a Hub id")
    parser.add_argument("--only", nargs="+", default=[""], help="How the names of grammars begin")
    parser.add_argument("--num_sentences", type=int, default=len(SENTENCES))
    parser.add_argument("--max_new_tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    draft = None if args.draft is None else load_draft(args.draft, dtype=torch.float32)
    if draft is not None:
        draft.generation_config.tree_policy = "static"

    print("| grammar | tokens | own | one | few | perfect | same | tau | root | all |")
    print("| --- " * 10 + "|")
    for name, grammar in grammars(target, tokenizer).items():
        if not name.startswith(tuple(args.only)):
            continue
        num_same, own, allowed, perfect = [], [], [], []
        accepted = {levels: [] for levels in ((0, 1, sys.maxsize) if grammar.compiled else (0,)) if draft is not None}
        for sentence in SENTENCES[: args.num_sentences]:
            chat = [{"role": "user", "content": f"{TASKS[grammar.task]}\n\n{sentence}"}]
            inputs = tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            plain = generate(target, inputs, grammar, args)
            is_own = [int(scores.argmax()) == token for scores, token in zip(plain.before, plain.text)]
            own += is_own
            perfect.append(perfect_length(is_own))
            allowed += [int(scores.isfinite().sum()) for scores in plain.after]
            for levels, lengths in accepted.items():
                num_same.append(generate(target, inputs, grammar, args, draft, levels).text == plain.text)
                lengths += draft.last_generation.accepted_lengths
        shares = own, [count == 1 for count in allowed], [count <= 8 for count in allowed]
        means = [f"{statistics.mean(each):.2f}" for each in (*shares, perfect)]
        same = [f"{sum(num_same)}/{len(num_same)}"] if num_same else []
        columns = [name, str(len(own)), *means, *same, *(f"{statistics.mean(each):.2f}" for each in accepted.values())]
        print(f"| {' | '.join(columns + ['-'] * (10 - len(columns)))} |", flush=True)


if __name__ == "__main__":
    main()
