"""Images of single rows. For targets that read them see tests/training/test_images.py."""

import threading
import time
from base64 import b64encode
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO

import datasets
import numpy as np
import pytest
from PIL import Image
from PIL.Image import DecompressionBombError

from hf_eagle3.data import images, plain_rows
from hf_eagle3.data.images import load, storable, with_unread_images
from hf_eagle3.data.rows import read_images
from hf_eagle3.data.values import RowError, UnreachableError


LONG = b64encode(b"no image" * 1000).decode()


@pytest.mark.parametrize("image", [LONG, f"data:image/png;base64,{LONG}"], ids=["base64", "data URL"])
def test_errors_have_only_the_beginning_of_an_image(image):
    error = RowError if image.startswith("data:") else UnreachableError
    with pytest.raises(error, match="there is no image|an image cannot be read") as caught:
        load(image)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("error", [OSError, ValueError, DecompressionBombError])
def test_columns_that_cannot_be_decoded(error):
    class Row(dict):  # as `datasets` opens images: at the first look
        def get(self, name):
            if name == "image":
                raise error("broken" * 1000)

    with pytest.raises(RowError, match="'image' cannot be read: broken") as caught:
        read_images(Row())
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("read", [with_unread_images, partial(plain_rows, name="train")])
def test_a_broken_image_of_a_message_spoils_its_row_alone(read):
    file = BytesIO()
    Image.new("RGB", (2, 2)).save(file, format="PNG")
    part = {"type": datasets.Value("string"), "image": datasets.Image()}
    features = datasets.Features({"messages": [{"content": [part]}]})
    contents = [file.getvalue(), b"no image"]
    parts = [{"type": "image", "image": {"bytes": content, "path": None}} for content in contents]
    rows = [{"messages": [{"content": [part]}]} for part in parts]
    found = [row["messages"][0]["content"][0]["image"] for row in read(datasets.Dataset.from_list(rows, features))]
    assert load(found[0]).size == (2, 2)
    with pytest.raises(RowError, match="cannot be read"):
        load(found[1])


def turned():
    """A picture that its EXIF turns."""
    picture, exif = Image.effect_noise((8, 4), 50), Image.Exif()
    exif[0x0112] = 6
    return picture, {"format": "JPEG", "exif": exif}


def transparent():
    pixels = np.random.default_rng(0).integers(0, 255, (4, 8, 4), dtype=np.uint8)
    return Image.fromarray(pixels), {"format": "PNG"}


@pytest.mark.parametrize("make", [turned, transparent])
def test_a_picture_is_the_same_in_each_form(tmp_path, make):
    picture, settings = make()
    path = tmp_path / "picture"
    picture.save(path, **settings)
    content = path.read_bytes()
    forms = [
        str(path),
        Image.open(path),
        datasets.Image().decode_example({"bytes": content, "path": None}),
        {"bytes": content, "path": None},
        {"path": str(path)},
        f"data:image/png;base64,{b64encode(content).decode()}",
    ]
    forms += [storable(form) for form in forms]  # in rows with the target's answers
    first, *others = (np.asarray(load(form)) for form in forms)
    assert first.shape == ((8, 4, 3) if make is turned else (4, 8, 3))
    assert all(np.array_equal(first, other) for other in others)


def test_what_servers_answer(monkeypatch):
    file = BytesIO()
    Image.new("RGB", (2, 2)).save(file, format="PNG")
    answers = {"/image": (200, file.getvalue()), "/page": (200, b"<html>"), "/busy": (503, b"<html>")}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path == "/silent":
                return time.sleep(1)
            status, body = answers.get(self.path, (200, b""))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    monkeypatch.setattr(images, "SECONDS", 0.3)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert load(f"{url}/image").size == (2, 2)
        with pytest.raises(RowError, match="cannot be read") as caught:  # and will not be later
            load(f"{url}/page")
        assert not isinstance(caught.value, UnreachableError)
        for path in ("/busy", "/silent"):
            with pytest.raises(UnreachableError, match="cannot be reached"):
                load(url + path)
        server.shutdown()
