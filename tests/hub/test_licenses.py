"""Licenses and what goes with them."""

from contextlib import nullcontext

import pytest
from huggingface_hub import ModelCard, ModelCardData

from hf_eagle3.hub import check_license
from hf_eagle3.hub.licenses import license_of


@pytest.mark.parametrize(
    "stated, reason",
    [
        *(((license,), None) for license in (None, "apache-2.0", "llama3.1")),
        (("other", "nvidia-open-model-license", "LICENSE"), None),
        (("other",), "needs a name and a link"),
        (("other", "nvidia-open-model-license"), "needs a name and a link"),
        (("mit", "mine"), "are for the license 'other', not for 'mit'"),
        ((None, "mine", "LICENSE"), "Pass `--license other`"),
    ],
)
def test_what_is_taken(stated, reason):
    with nullcontext() if reason is None else pytest.raises(ValueError, match=reason):
        check_license(*stated)


def test_in_a_card():
    stated = {"license": "other", "license_name": "my-license", "license_link": "https://example.com"}
    card = ModelCard.from_template(ModelCardData(**stated), template_str="---\n{{ card_data }}\n---")
    assert license_of(card) == stated
    assert set(license_of(None).values()) == {None}
