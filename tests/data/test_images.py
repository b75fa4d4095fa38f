"""Images of single rows. For targets that read them see tests/training/test_images.py."""

from base64 import b64encode

import pytest
from PIL.Image import DecompressionBombError

from hf_eagle3.data.images import load
from hf_eagle3.data.rows import RowError, UnreachableError, read_images


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
