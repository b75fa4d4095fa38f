"""LangChain's `HuggingFacePipeline` with a draft (opt-in: needs `langchain_huggingface`)."""

import pytest
from conftest import make_draft, make_prompt, make_target
from transformers import pipeline

from hf_eagle3 import assist


langchain_huggingface = pytest.importorskip("langchain_huggingface")


def test_answers_are_the_target_s(tokenizer):
    target = make_target("llama")
    generate = pipeline("text-generation", model=target, tokenizer=tokenizer, max_new_tokens=12, do_sample=False)
    chain = langchain_huggingface.HuggingFacePipeline(pipeline=generate)
    expected = chain.invoke("what is 3")
    draft = make_draft(target, [make_prompt(9)])
    with assist(chain.pipeline.model, draft):
        assert chain.invoke("what is 3") == expected
    assert draft.last_generation.new_tokens == 12
