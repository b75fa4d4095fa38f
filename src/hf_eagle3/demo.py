"""
A page that shows what a draft does: the same prompt without and with it, where each token came from, and the tree of
each step. `recipes/demo.py` opens it, and a Space runs it. Only [`make_app`] and [`push_space`] need gradio.
"""

import copy
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from html import escape
from importlib.metadata import PackageNotFoundError, version

import torch
from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi, SpaceCardData
from transformers import AutoModelForCausalLM, BatchEncoding, set_seed
from transformers.generation.streamers import BaseStreamer

from .environment import is_path, machine_name, public_name
from .remote_code.modeling_eagle3 import Eagle3ForSpeculation
from .remote_code.outputs_eagle3 import Eagle3GenerationStats, Eagle3Step
from .remote_code.policy_eagle3 import tree_settings
from .tokenizer import PromptEncoder, load_tokenizer


SECONDS_PER_FRAME = 0.1
NEEDS_GRADIO = "The page needs gradio: pip install 'hf-eagle3[demo]'"


def encode(tokenizer, prompt: str, is_chat: bool) -> BatchEncoding:
    """The prompt as what a user says, by the chat template, or as a text that goes on."""
    encoder = PromptEncoder(tokenizer)
    tokens = encoder.chat([{"role": "user", "content": prompt}]) if is_chat else encoder.text(prompt)
    if not tokens:
        raise ValueError("There is no prompt. Write one.")
    input_ids = torch.tensor([tokens])
    return BatchEncoding({"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)})


def decode(tokenizer, tokens: Sequence[int]) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


class Pieces:
    """
    The text of each token of a text that grows. Where several tokens spell one character, it comes with the last.
    """

    def __init__(self, tokenizer):
        self.tokenizer, self.tokens, self.texts = tokenizer, [], []
        # A token is decoded behind a few others, on which its spaces may depend: those from `start` to `known`.
        self.start, self.known = 0, 0

    def read(self, tokens: Sequence[int]) -> list[str]:
        """The texts of `tokens`, which begin with those that were read last."""
        for token in tokens[len(self.tokens) :]:
            self.tokens.append(token)
            before = decode(self.tokenizer, self.tokens[self.start : self.known])
            text = decode(self.tokenizer, self.tokens[self.start :])
            is_whole = len(text) > len(before) and not text.endswith("\N{REPLACEMENT CHARACTER}")
            self.texts.append(text[len(before) :] if is_whole else "")
            if is_whole:
                self.start, self.known = self.known, len(self.tokens)
        return self.texts


@dataclass
class Written:
    """
    One of the two texts, as far as it is written.

    Args:
        pieces ([`Pieces`]): Makes text of tokens.
        streamed (`list[int]`): The new tokens without the draft.
        stats ([`Eagle3GenerationStats`], *optional*): How the call with the draft goes.
        started (`float`, *optional*): When the call began, by `time.perf_counter`.
        seconds (`float`, *optional*): How long it took, the prompt included, once it has ended.
        returned (`list[int]`, *optional*): The new tokens that it returned.
    """

    pieces: Pieces
    streamed: list[int] = field(default_factory=list)
    stats: Eagle3GenerationStats | None = None
    started: float | None = None
    seconds: float | None = None
    returned: list[int] | None = None

    @property
    def tokens(self) -> list[int]:
        if self.returned is not None:
            return self.returned
        if self.stats is not None:
            return [token for step in list(self.stats.steps) for token in step.new_tokens[0]]
        return list(self.streamed)

    @property
    def texts(self) -> list[str]:
        return self.pieces.read(self.tokens)

    @property
    def tokens_per_second(self) -> float:
        if self.started is None:
            return 0.0
        return len(self.tokens) / (self.seconds or time.perf_counter() - self.started)


class Interrupted(Exception):
    """Nobody reads the text any more."""


class Listener(BaseStreamer):
    """Keeps new tokens in a list."""

    def __init__(self, tokens: list[int]):
        self.tokens, self.is_prompt = tokens, True

    def put(self, value):
        if not self.is_prompt:
            self.tokens += value.flatten().tolist()
        self.is_prompt = False

    def end(self):
        pass


class Comparison:
    """
    Writes the same text without and with a draft, one after the other, so that each has the machine for itself.

    Args:
        target (`PreTrainedModel`), draft ([`Eagle3ForSpeculation`]): The models.
        tokenizer (`PreTrainedTokenizerBase`): The target's.

    Raises:
        ValueError: if the draft is not for this target.
    """

    def __init__(self, target, draft, tokenizer):
        draft.validate_target(target)
        self.target, self.draft, self.tokenizer = target, draft, tokenizer
        self.worker = ThreadPoolExecutor(max_workers=1)

    @classmethod
    def from_pretrained(cls, target: str, draft: str, dtype: str = "auto", device: str | None = None) -> "Comparison":
        """Loads both, by folder or Hub id, and lets each write a little: the first call is slow."""
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        tokenizer = load_tokenizer(target)
        model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype).to(device).eval()
        assistant = Eagle3ForSpeculation.from_pretrained(draft, dtype=dtype).to(device).eval()
        comparison = cls(model, assistant, tokenizer)
        for _ in comparison.run("A", max_new_tokens=16):
            pass
        return comparison

    @property
    def has_chats(self) -> bool:
        return self.tokenizer.chat_template is not None

    def run(
        self,
        prompt: str,
        is_chat: bool | None = None,
        temperature: float = 0.0,
        max_new_tokens: int = 128,
        seed: int = 0,
        **settings,
    ) -> Iterator[tuple[Written, Written]]:
        """
        Yields both texts, without and with the draft, while they grow. Closing the iterator ends the call that is
        going on.

        Args:
            prompt (`str`): The prompt.
            is_chat (`bool`, *optional*):
                Whether it goes through the chat template. By default it does if the tokenizer has one.
            temperature (`float`, *optional*, defaults to 0): 0 decodes greedily.
            max_new_tokens, seed (`int`, *optional*, defaults to 128 and 0): Of both texts.
            settings (*optional*): Of the tree, such as `tree_depth`: see docs/decoding.md. By default the draft's own.

        Raises:
            ValueError: if there is no prompt, or a setting is out of range.
        """
        inputs = encode(self.tokenizer, prompt, self.has_chats if is_chat is None else is_chat)
        call = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
        call |= {"temperature": temperature} if temperature > 0 else {}
        plain, drafted = Written(Pieces(self.tokenizer)), Written(Pieces(self.tokenizer))
        without, with_draft = {"streamer": Listener(plain.streamed)}, {"assistant_model": self.draft}
        for written, assistance in ((plain, without), (drafted, with_draft)):
            is_unwanted = threading.Event()
            future = self.worker.submit(
                self.write, written, is_unwanted, seed, settings, **inputs, **call, **assistance
            )
            try:
                while not future.done():
                    wait([future], timeout=SECONDS_PER_FRAME)
                    yield plain, drafted
            finally:
                is_unwanted.set()
            future.result()
            yield plain, drafted

    def write(self, written: Written, is_unwanted: threading.Event, seed: int, settings: dict, **call) -> None:
        """Calls `generate`, and tells `written` how it goes."""
        earlier = self.draft.last_generation

        # A hook, since streamers and stopping criteria of one's own make sampling with a draft slower.
        def before_forward(*_):
            if is_unwanted.is_set():
                raise Interrupted
            if (stats := self.draft.last_generation) is not earlier:
                written.stats = stats

        own_config = self.draft.generation_config
        self.draft.generation_config = copy.deepcopy(own_config)
        for name, value in {"output_steps": True, **settings}.items():
            setattr(self.draft.generation_config, name, value)
        call = {
            name: value.to(self.target.device) if torch.is_tensor(value) else value for name, value in call.items()
        }
        hook = self.target.register_forward_pre_hook(before_forward)
        set_seed(seed)
        written.started = time.perf_counter()
        try:
            sequences = self.target.generate(**call)
            returned = sequences[0, call["input_ids"].shape[1] :].tolist()
            written.seconds = time.perf_counter() - written.started
        except Interrupted:
            return
        finally:
            hook.remove()
            self.draft.generation_config = own_config
        before_forward()  # a call of one forward
        written.returned = returned

    def verdict(self, plain: Written, drafted: Written) -> str:
        """Whether both texts are the same, and what the second one took. Both are complete."""
        stats = drafted.stats
        took = (
            f"The draft's took {stats.target_forwards} forward passes of the target instead of {len(plain.tokens)}, and was "
            f"{drafted.tokens_per_second / plain.tokens_per_second:.2f} times as fast."
        )
        if plain.tokens == drafted.tokens:
            return f"The two texts are identical. {took}"
        pairs = list(zip(plain.tokens, drafted.tokens))
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        dtype = str(self.target.dtype).removeprefix("torch.")
        why = (
            "In float32 that must not happen: please report it."
            if self.target.dtype == torch.float32
            else f"In {dtype}, a forward pass over several tokens rounds differently than one over a single token, so "
            "that texts may part where two tokens are nearly tied. In float32 they are identical."
        )
        return f"The two texts differ from token {place + 1} on. {why} {took}"


# Drawing.

TARGET_COLOUR, LOOKUP_COLOUR = "#e5e7eb", "hsl(40 95% 75%)"
NUM_DEPTHS = 8  # that have a colour of their own; deeper tokens have the last


def colour(source: str, depth: int) -> str:
    """The background of a token by where it came from. Text on it is black, in dark pages, too."""
    if source == "draft":
        return f"hsl({100 + 30 * min(depth, NUM_DEPTHS)} 75% 80%)"
    return LOOKUP_COLOUR if source == "lookup" else TARGET_COLOUR


def describe_origin(source: str, depth: int) -> str:
    return {"draft": f"drafted at depth {depth}", "lookup": f"looked up, number {depth}"}.get(
        source, "the target's own"
    )


def text_html(label: str, written: Written) -> str:
    """A text below its number of tokens and its speed; tokens that a draft helped with are coloured by origin."""
    texts, spans = written.texts, []
    origins = written.stats.origins() if written.stats is not None else []
    for text, origin in zip(texts, origins):
        style = f"background:{colour(*origin)};color:#111;border-radius:3px"
        spans.append(f'<span style="{style}" title="{describe_origin(*origin)}">{escape(text)}</span>')
    spans += map(escape, texts[len(spans) :])
    speed = (
        "waiting" if written.started is None else f"{len(texts)} tokens, {written.tokens_per_second:.1f} per second"
    )
    text_style = "font-family:monospace;white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.5"
    return f'<div><b>{escape(label)}</b>: {speed}</div><div style="{text_style}">{"".join(spans)}</div>'


def legend_html() -> str:
    """What the colours mean."""
    style = "color:#111;border-radius:3px;padding:0 .5em;margin-right:.4em"

    def sample(text, *origin):
        return f'<span style="background:{colour(*origin)};{style}">{text}</span>'

    levels = "".join(sample(depth, "draft", depth) for depth in range(1, NUM_DEPTHS))
    levels += sample(f"{NUM_DEPTHS}+", "draft", NUM_DEPTHS)
    return (
        f"<div>{sample('the target&#39;s own', 'target', 0)} drafted at depth {levels} {sample('looked up', 'lookup', 1)}"
        "</div>"
    )


@dataclass
class Node:
    """
    A node of a drawn tree.

    Args:
        text (`str`): Its token.
        parent (`int`, *optional*): Index of its parent; the root has none.
        depth (`int`): Distance from the root.
        kind (`str`): `"root"`, `"accepted"`, `"rejected"`, or `"target"`: what the target wrote after them.
        children (`list[int]`): Indices of its children.
    """

    text: str
    parent: int | None
    depth: int
    kind: str
    children: list[int] = field(default_factory=list)


def nodes_of(step: Eagle3Step, tokenizer, row: int = 0) -> list[Node]:
    """The tree of a step, with the target's own token below what it accepted. Parents precede their children."""
    tokens, parents, accepted = list(step.tokens[row]), list(step.parents[row]), step.accepted[row]
    kinds = ["accepted" if node in accepted else "rejected" for node in range(len(tokens))]
    if len(step.new_tokens[row]) > len(accepted):
        tokens.append(step.new_tokens[row][-1])
        parents.append(accepted[-1] if accepted else 0)
        kinds.append("target")
    paths, nodes = [], []  # paths: the tokens from the root to each node
    for index, (token, parent, kind) in enumerate(zip(tokens, parents, kinds)):
        before = paths[parent] if index > 0 else []
        paths.append([*before, token])
        known, text = decode(tokenizer, before), decode(tokenizer, paths[-1])
        text = text[len(known) :] if text.startswith(known) else decode(tokenizer, [token])
        if index == 0:
            nodes.append(Node(visible(text), None, 0, "root"))
        else:
            nodes.append(Node(visible(text), parent, len(paths[-1]) - 1, kind))
            nodes[parent].children.append(index)
    return nodes


def visible(text: str) -> str:
    """With signs for spaces and ends of lines."""
    text = text.replace(" ", "␣").replace("\n", "↵").replace("\t", "⇥")
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def describe_step(step: Eagle3Step, row: int = 0) -> str:
    """What a step did, in a line."""
    num_checked, num_accepted = len(step.tokens[row]) - 1, len(step.accepted[row])
    if num_checked == 0:
        return "a plain step: nothing was checked"
    verb = "looked up" if step.source == "lookup" else "drafted"
    return f"{num_checked} tokens {verb}, {num_accepted} accepted, {len(step.new_tokens[row])} written"


def tree_text(step: Eagle3Step, tokenizer, row: int = 0) -> str:
    """The tree of a step for a terminal. Accepted nodes have a tick."""
    nodes, marks = nodes_of(step, tokenizer, row), {"accepted": " ✓", "target": " (the target's own)"}
    lines, stack = [], [(0, "", "")]  # a node, what stands before it, and before its children
    while stack:
        index, head, indent = stack.pop()
        node = nodes[index]
        lines.append(f"{head}{node.text}{marks.get(node.kind, '')}")
        for child in reversed(node.children):
            is_last = child == node.children[-1]
            stack.append((child, indent + ("└─ " if is_last else "├─ "), indent + ("   " if is_last else "│  ")))
    return "\n".join(lines)


COLUMN, LINE, BOX = 124, 28, (100, 20)  # pixels


def tree_svg(step: Eagle3Step, tokenizer, row: int = 0) -> str:
    """The tree of a step, from left to right: what was accepted is coloured, what was not is grey."""
    nodes = nodes_of(step, tokenizer, row)
    lines, stack, num_leaves = [0.0] * len(nodes), [0], 0
    while stack:
        index = stack.pop()
        if not nodes[index].children:
            lines[index], num_leaves = float(num_leaves), num_leaves + 1
        stack += reversed(nodes[index].children)
    for index in reversed(range(len(nodes))):
        if children := nodes[index].children:
            lines[index] = (lines[children[0]] + lines[children[-1]]) / 2
    width, height = (1 + max(node.depth for node in nodes)) * COLUMN, num_leaves * LINE
    edges, boxes = [], []
    for node, line in zip(nodes, lines):
        x, y = node.depth * COLUMN + 4, (line + 0.5) * LINE
        is_written = node.kind in ("accepted", "target")
        if node.parent is not None:
            start, end = (x - COLUMN + BOX[0], (lines[node.parent] + 0.5) * LINE), (x, y)
            middle = (start[0] + end[0]) / 2
            edges.append(
                f'<path d="M {start[0]} {start[1]} C {middle} {start[1]}, {middle} {end[1]}, {end[0]} {end[1]}" fill="none" '
                f'stroke="{"#374151" if is_written else "#d1d5db"}" stroke-width="{2.5 if is_written else 1}"/>'
            )
        fill = {
            "accepted": colour(step.source, node.depth),
            "rejected": "#ffffff",
            "root": "#ffffff",
            "target": TARGET_COLOUR,
        }[node.kind]
        origin = (step.source, node.depth) if node.kind in ("accepted", "rejected") else ("target", 0)
        what = "the root: already written" if node.kind == "root" else f"{describe_origin(*origin)}, {node.kind}"
        what = "the target's own" if node.kind == "target" else what
        label = node.text if len(node.text) <= 12 else node.text[:11] + "…"
        boxes.append(
            f'<g class="{node.kind}"><title>{escape(node.text)} ({what})</title>'
            f'<rect x="{x}" y="{y - BOX[1] / 2}" width="{BOX[0]}" height="{BOX[1]}" rx="5" fill="{fill}" '
            f'stroke="{"#d1d5db" if node.kind == "rejected" else "#374151"}"/>'
            f'<text x="{x + BOX[0] / 2}" y="{y + 4}" text-anchor="middle" '
            f'fill="{"#6b7280" if node.kind == "rejected" else "#111111"}">{escape(label)}</text></g>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="monospace" font-size="12" '
        f'style="background:#ffffff;border-radius:6px">{"".join(edges)}{"".join(boxes)}</svg>'
    )


def step_html(steps: Sequence[Eagle3Step], number: int, tokenizer) -> str:
    """The step of this number, counted from 1 and drawn."""
    step = steps[number - 1]
    return (
        f"<div>Step {number} of {len(steps)}: {describe_step(step)}</div>"
        f'<div style="overflow-x:auto">{tree_svg(step, tokenizer)}</div>'
    )


# The page.


def import_gradio():
    try:
        import gradio
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{NEEDS_GRADIO} ({error})") from error
    return gradio


def make_app(comparison: Comparison):
    """
    The page: a `gradio.Blocks` to `launch()`.

    Raises:
        ModuleNotFoundError: if gradio is not installed.
    """
    gr = import_gradio()
    target, draft, tokenizer = comparison.target, comparison.draft, comparison.tokenizer
    own = tree_settings(draft.generation_config)
    names = [public_name(model.config._name_or_path) or type(model).__name__ for model in (target, draft)]
    dtype = str(target.dtype).removeprefix("torch.")

    def compare(prompt, is_chat, temperature, max_new_tokens, seed, policy, depth, num_nodes, branching_factor):
        settings = {"tree_policy": policy, "tree_depth": int(depth), "num_assistant_tokens": int(num_nodes)}
        settings["branching_factor"] = int(branching_factor)
        call = {"temperature": temperature, "max_new_tokens": int(max_new_tokens), "seed": int(seed)}
        nothing = ("", [], gr.Slider(interactive=False), "")
        try:
            for plain, drafted in comparison.run(prompt, is_chat, **call, **settings):
                yield text_html("Without", plain), text_html("With the draft", drafted), *nothing
        except ValueError as error:
            raise gr.Error(str(error)) from error
        steps = drafted.stats.steps[1:]  # the first read the prompt
        shown = (steps, gr.Slider(interactive=False), "")
        if steps:
            # A tree, if there is one, of which much was accepted.
            best = max(range(len(steps)), key=lambda i: (steps[i].source == "draft", len(steps[i].accepted[0])))
            slider = gr.Slider(value=best + 1, minimum=1, maximum=max(len(steps), 2), interactive=len(steps) > 1)
            shown = (steps, slider, step_html(steps, best + 1, tokenizer))
        texts = text_html("Without", plain), text_html("With the draft", drafted)
        yield *texts, f"<b>{escape(comparison.verdict(plain, drafted))}</b>", *shown

    def draw(steps, number):
        return step_html(steps, min(int(number), len(steps)), tokenizer) if steps else ""

    with gr.Blocks(title="EAGLE-3", analytics_enabled=False) as app:
        gr.Markdown(
            f"## {names[0]} without and with {names[1]}\n\nThe same prompt twice, one after the other: the speeds are those "
            f"of each by itself, in {dtype} on {machine_name(target.device)}. With the policy `auto` the first run with other settings "
            "also measures: run twice for its speed."
        )
        is_chat = comparison.has_chats
        example = "Explain in three sentences how an engine works." if is_chat else "def main(argv):\n"
        prompt = gr.Textbox(example, label="Prompt", lines=3, max_lines=8)
        with gr.Row():
            run, stop = gr.Button("Run", variant="primary"), gr.Button("Stop")
        with gr.Accordion("Decoding settings", open=False):
            with gr.Row():
                temperature = gr.Slider(0, 2, 0, step=0.1, label="Temperature (0: greedy)")
                max_new_tokens = gr.Slider(1, 1024, 128, step=1, label="New tokens, at most")
                seed = gr.Number(0, label="Seed", precision=0)
                chat = gr.Checkbox(is_chat, label="Chat template", interactive=is_chat)
            with gr.Row():
                policy = gr.Radio(["auto", "static"], value=own["tree_policy"], label="Tree policy")
                depth = gr.Slider(1, 12, own["tree_depth"], step=1, label="Tree depth")
                num_nodes = gr.Slider(1, 64, own["num_assistant_tokens"], step=1, label="Nodes of a tree, at most")
                branching = gr.Slider(1, 16, own["branching_factor"], step=1, label="Branching factor")
        verdict = gr.HTML()
        with gr.Row(equal_height=False):
            with gr.Column():
                plain_text = gr.HTML(elem_id="without")
            with gr.Column():
                drafted_text = gr.HTML(elem_id="with")
        gr.HTML(legend_html())
        number = gr.Slider(1, 2, 1, step=1, label="Step", interactive=False)
        tree, steps = gr.HTML(elem_id="tree"), gr.State([])
        running = run.click(
            compare,
            [prompt, chat, temperature, max_new_tokens, seed, policy, depth, num_nodes, branching],
            [plain_text, drafted_text, verdict, steps, number, tree],
            api_name="compare",
            concurrency_limit=1,
        )
        stop.click(None, cancels=[running])
        number.input(draw, [steps, number], tree, show_progress="hidden")
    return app


# The Space.

APP = '''"""The same prompt without and with an EAGLE-3 draft: see `hf_eagle3.demo`."""

from hf_eagle3.demo import Comparison, make_app


app = make_app(Comparison.from_pretrained({target!r}, {draft!r}))

if __name__ == "__main__":
    app.launch()
'''
CARD = """---
{metadata}
---

The same prompt without and with the EAGLE-3 draft [{draft}](https://huggingface.co/{draft}) of
[{target}](https://huggingface.co/{target}): the texts side by side, how fast each is written, where each token came
from, and the tree of each step.
"""


def push_space(
    repo_id: str, target: str, draft: str, package: str = "hf-eagle3[demo]", private: bool | None = None
) -> CommitInfo:
    """
    Makes the page a Space on the Hub, in one commit.

    Args:
        repo_id (`str`): `<owner>/<name>`; made if it is not there.
        target, draft (`str`): Hub ids.
        package (`str`, *optional*, defaults to `"hf-eagle3[demo]"`): What its requirements.txt asks for.
        private (`bool`, *optional*): Whether the Space is private, if it is not there yet.

    Raises:
        ValueError: if target or draft are not on the Hub.
        ModuleNotFoundError: if gradio, whose version the Space gets, is not installed.
    """
    for name in (target, draft):
        if is_path(name) or name.count("/") != 1:
            raise ValueError(
                f"{name} is no id of the Hub, where a Space reads its models from. Push it first (a draft by "
                "`recipes/push.py`), and pass `<owner>/<name>`."
            )
    try:
        gradio_version = version("gradio")
    except PackageNotFoundError as error:
        raise ModuleNotFoundError(NEEDS_GRADIO) from error
    api = HfApi()
    for name in (target, draft):
        api.model_info(name)
    card = SpaceCardData(
        title=repo_id.split("/")[-1],
        sdk="gradio",
        sdk_version=gradio_version,
        app_file="app.py",
        models=[target, draft],
        tags=["eagle3", "speculative-decoding"],
    )
    files = {
        "app.py": APP.format(target=target, draft=draft),
        "requirements.txt": package + "\n",
        "README.md": CARD.format(metadata=card.to_yaml(), target=target, draft=draft),
    }
    repo_id = api.create_repo(repo_id, repo_type="space", space_sdk="gradio", exist_ok=True, private=private).repo_id
    return api.create_commit(
        repo_id,
        [CommitOperationAdd(name, content.encode()) for name, content in files.items()],
        commit_message="Show what the draft does",
        repo_type="space",
    )
