# /// script
# dependencies = ["hf-eagle3[demo]"]
# ///
"""
Opens a page that compares the same prompt without and with a draft, and shows where each token came from and the tree of each step.

    python recipes/demo.py --target Qwen/Qwen3-8B --draft RedHatAI/Qwen3-8B-speculator.eagle3

The environment variables `GRADIO_SERVER_NAME` and `GRADIO_SERVER_PORT` set the page's address.
"""

import copy
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from html import escape

import torch
from transformers import BatchEncoding, set_seed
from transformers.generation.streamers import BaseStreamer

from hf_eagle3 import Eagle3GenerationStats, Eagle3Step
from hf_eagle3.checkpoints.target import load_on_device
from hf_eagle3.drawing import NUM_DEPTHS, color, decode, describe_origin, describe_step, tree_svg
from hf_eagle3.environment import machine_name, public_name
from hf_eagle3.evaluation.drafts import load_draft
from hf_eagle3.remote_code.configuration_eagle3 import tree_settings
from hf_eagle3.scripts import (
    DTYPES,
    ScriptParser,
    add_device,
    add_place_of_draft,
    add_trust_remote_code,
    folder_or_hub_id,
    place_of_draft,
    run_script,
)
from hf_eagle3.tokenizer import PromptEncoder, load_tokenizer


SECONDS_PER_FRAME = 0.1


# What is compared.


def encode(tokenizer, prompt: str, is_chat: bool) -> BatchEncoding:
    """Returns the prompt as a batch of one row: a user's message in the chat template, or a text that goes on."""
    encoder = PromptEncoder(tokenizer)
    tokens = encoder.chat([{"role": "user", "content": prompt}]) if is_chat else encoder.text(prompt)
    if not tokens:
        raise ValueError("There is no prompt. Write one.")
    input_ids = torch.tensor([tokens])
    return BatchEncoding({"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)})


class Pieces:
    """The text of each token of a growing text. If several tokens spell one character, the last of them has it."""

    def __init__(self, tokenizer):
        self.tokenizer, self.tokens, self.texts = tokenizer, [], []
        # A token's spaces may depend on the tokens before it, so the tokens from `start` to `known` are decoded with it.
        self.start, self.known = 0, 0

    def read(self, tokens: Sequence[int]) -> list[str]:
        """Returns the text of each token. `tokens` must begin with the tokens of the last call."""
        for token in tokens[len(self.tokens) :]:
            self.tokens.append(token)
            before = decode(self.tokenizer, self.tokens[self.start : self.known])
            text = decode(self.tokenizer, self.tokens[self.start :])
            is_complete = len(text) > len(before) and not text.endswith("\N{REPLACEMENT CHARACTER}")
            self.texts.append(text[len(before) :] if is_complete else "")
            if is_complete:
                self.start, self.known = self.known, len(self.tokens)
        return self.texts


@dataclass
class Written:
    """One of the two texts, while it is written."""

    pieces: Pieces
    streamed: list[int] = field(default_factory=list)  # the new tokens without the draft
    stats: Eagle3GenerationStats | None = None  # of the call with the draft, while it goes on
    started: float | None = None  # by `time.perf_counter`
    seconds: float | None = None  # how long the call took, with its prompt
    returned: list[int] | None = None  # the new tokens that the call returned

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
    """Ends a call that nobody reads any more."""


class Listener(BaseStreamer):
    """Appends new tokens to a list."""

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
    Writes the same text without and with a draft. The calls run one after the other, so that each has the machine for itself.
    Raises `ValueError` if the draft is for another target.
    """

    def __init__(self, target, draft, tokenizer):
        draft.validate_target(target)
        self.target, self.draft, self.tokenizer = target, draft, tokenizer
        self.worker = ThreadPoolExecutor(max_workers=1)

    @classmethod
    def from_pretrained(
        cls,
        target: str,
        draft: str,
        dtype: str = "auto",
        device: str | None = None,
        device_map: str | None = None,
        trust_remote_code: bool = False,
        **place: str,
    ) -> "Comparison":
        """
        Loads both models, by folder or Hub id, and warms them up with a short text. `device_map` and `trust_remote_code` are for
        the target, and `place` is the `revision` and `subfolder` of the draft.
        """
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        tokenizer = load_tokenizer(target, trust_remote_code=trust_remote_code)
        model = load_on_device(target, device, dtype, device_map=device_map, trust_remote_code=trust_remote_code)
        assistant = load_draft(draft, dtype=dtype, **place).to(model.device)
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
        Yields both texts, without and with the draft, while they grow. Closing the iterator ends the running call.

        Args:
            prompt (`str`): The prompt.
            is_chat (`bool`, *optional*): Whether to use the chat template. By default it is used if there is one.
            temperature (`float`, *optional*, defaults to 0): 0 decodes greedily.
            max_new_tokens, seed (`int`, *optional*, defaults to 128 and 0): The same for both texts.
            settings (*optional*): Settings of the tree, such as `tree_depth` (docs/decoding.md). By default the draft's own.

        Raises:
            ValueError: if the prompt is empty, or a setting is out of range.
        """
        inputs = encode(self.tokenizer, prompt, self.has_chats if is_chat is None else is_chat)
        call = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0, "return_dict_in_generate": False}
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
        """Calls `generate`, and keeps `written` up to date. Ends early if `is_unwanted` is set."""
        earlier = self.draft.last_generation

        # A forward hook, because custom streamers and stopping criteria make sampling with a draft slower.
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
        before_forward()  # A call of one forward ends before its hook has seen any stats.
        written.returned = returned

    def verdict(self, plain: Written, drafted: Written) -> str:
        """Returns whether two complete texts are the same, and what the second one took."""
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
            "In float32 only a tie within its rounding can do that. Please report it if it happens with other seeds, too."
            if self.target.dtype == torch.float32
            else f"In {dtype} a forward pass over several tokens rounds differently than one over a single token. So texts may "
            "differ once two tokens are nearly tied. In float32 they are identical."
        )
        return f"The two texts differ from token {place + 1} on. {why} {took}"


# The page.


def text_html(label: str, written: Written) -> str:
    """Returns a text below its number of tokens and its speed. Tokens of the call with the draft are colored by origin."""
    texts, spans = written.texts, []
    origins = written.stats.origins() if written.stats is not None else []
    for text, origin in zip(texts, origins):
        style = f"background:{color(*origin)};color:#111;border-radius:3px"
        spans.append(f'<span style="{style}" title="{describe_origin(*origin)}">{escape(text)}</span>')
    spans += map(escape, texts[len(spans) :])
    speed = (
        "waiting" if written.started is None else f"{len(texts)} tokens, {written.tokens_per_second:.1f} per second"
    )
    text_style = "font-family:monospace;white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.5"
    return f'<div><b>{escape(label)}</b>: {speed}</div><div style="{text_style}">{"".join(spans)}</div>'


def legend_html() -> str:
    """Returns what the colors mean."""
    style = "color:#111;border-radius:3px;padding:0 .5em;margin-right:.4em"

    def sample(text, *origin):
        return f'<span style="background:{color(*origin)};{style}">{text}</span>'

    levels = "".join(sample(depth, "draft", depth) for depth in range(1, NUM_DEPTHS))
    levels += sample(f"{NUM_DEPTHS}+", "draft", NUM_DEPTHS)
    own, looked_up = sample("the target&#39;s own", "target", 0), sample("looked up", "lookup", 1)
    return f"<div>{own} drafted at depth {levels} {looked_up}</div>"


def step_html(steps: Sequence[Eagle3Step], number: int, tokenizer) -> str:
    """Returns a drawing of a step. The first step has number 1."""
    step = steps[number - 1]
    return (
        f"<div>Step {number} of {len(steps)}: {describe_step(step)}</div>"
        f'<div style="overflow-x:auto">{tree_svg(step, tokenizer)}</div>'
    )


def import_gradio():
    try:
        import gradio
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"The page needs gradio: pip install 'gradio>=6' ({error})") from error
    return gradio


def make_app(comparison: Comparison):
    """Returns the page: a `gradio.Blocks` to `launch()`."""
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
        steps = drafted.stats.steps[1:]  # the first one is the prompt's
        shown = (steps, gr.Slider(interactive=False), "")
        if steps:
            # Begin with the tree of which most was accepted, or the lookup if there is no tree.
            best = max(range(len(steps)), key=lambda i: (steps[i].source == "draft", len(steps[i].accepted[0])))
            slider = gr.Slider(value=best + 1, minimum=1, maximum=max(len(steps), 2), interactive=len(steps) > 1)
            shown = (steps, slider, step_html(steps, best + 1, tokenizer))
        texts = text_html("Without", plain), text_html("With the draft", drafted)
        yield *texts, f"<b>{escape(comparison.verdict(plain, drafted))}</b>", *shown

    def draw(steps, number):
        return step_html(steps, min(int(number), len(steps)), tokenizer) if steps else ""

    with gr.Blocks(title="Speculative decoding", analytics_enabled=False) as app:
        gr.Markdown(
            f"## {names[0]} without and with {names[1]}\n\nThe same prompt twice, one after the other: each text has the "
            f"machine for itself, in {dtype} on {machine_name(target.device)}. With the policy `auto` the first run with new "
            "settings also measures them, so run twice for its speed."
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
                depth = gr.Slider(1, max(12, own["tree_depth"]), own["tree_depth"], step=1, label="Tree depth")
                most = max(64, own["num_assistant_tokens"])
                num_nodes = gr.Slider(1, most, own["num_assistant_tokens"], step=1, label="Nodes of a tree, at most")
                branching = gr.Slider(
                    1, max(16, own["branching_factor"]), own["branching_factor"], step=1, label="Branching factor"
                )
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


def main():
    parser = ScriptParser(description=__doc__)
    parser.add_argument("--target", type=folder_or_hub_id, required=True, help="Folder or Hub id")
    parser.add_argument("--draft", type=folder_or_hub_id, required=True, help="Folder or Hub id")
    add_place_of_draft(parser)
    parser.add_argument(
        "--dtype", choices=DTYPES, default="auto", help="Dtype of target and draft; float32 for identical texts"
    )
    add_device(parser)
    add_trust_remote_code(parser)
    args = parser.parse_args()
    import_gradio()  # Fails before models are loaded.
    comparison = Comparison.from_pretrained(
        args.target,
        args.draft,
        args.dtype,
        args.device,
        args.device_map,
        args.trust_remote_code,
        **place_of_draft(args),
    )
    make_app(comparison).launch()


if __name__ == "__main__":
    run_script(main)
