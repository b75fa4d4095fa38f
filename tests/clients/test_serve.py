"""`recipes/serve.py`: OpenAI's format over HTTP, in a process of its own (opt-in: needs `transformers[serving]`)."""

import json
import socket
import subprocess
import sys
import urllib.request

import pytest
from conftest import RECIPES, make_draft, make_prompt, make_target
from transformers.utils.import_utils import is_serve_available


pytestmark = pytest.mark.skipif(not is_serve_available(), reason="transformers[serving] is not installed")


def serve(folder, port, **kwargs):
    command = [sys.executable, RECIPES / "serve.py", "--target", folder / "target", "--draft", folder]
    command += ["--draft_subfolder", "draft"]
    command += ["--host", "127.0.0.1", "--port", port, "--device", "cpu"]
    return subprocess.Popen(list(map(str, command)), text=True, **kwargs)


@pytest.fixture(scope="module")
def url(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("served")
    target = make_target("llama")
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    make_draft(target, [make_prompt(9)]).save_pretrained(folder / "draft")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = serve(folder, port, stdout=subprocess.PIPE)
    for line in process.stdout:
        if line.startswith("Serving"):
            break
    yield f"http://127.0.0.1:{port}", folder / "target"
    process.kill()
    process.wait()


@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_the_target_s(url, tokenizer, stream):
    address, name = url
    prompt, target = "what is 3", make_target("llama")
    expected = target.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=12, do_sample=False)
    expected = tokenizer.decode(expected[0, len(tokenizer(prompt)["input_ids"]) :], skip_special_tokens=True)
    body = {"model": str(name), "prompt": prompt, "max_tokens": 12, "temperature": 0.0, "stream": stream}
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        content = response.read().decode()
    if stream:
        parts = [line.removeprefix("data: ") for line in content.splitlines() if line.startswith("data: {")]
        text = "".join(choice["text"] for part in parts for choice in json.loads(part)["choices"])
    else:
        text = json.loads(content)["choices"][0]["text"]
    assert text == expected


def test_a_port_that_is_in_use(url):
    address, target = url
    process = serve(target.parent, address.rpartition(":")[2], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1 and "Serving" not in out
    assert "address already in use" in err and "pass another `--port`" in err
