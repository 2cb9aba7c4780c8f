"""What a request may ask of a model: up to its last token, and nothing beyond."""

from typing import Any

import pytest

from penstock.engine.events import GenerationRequest, Grammar, JsonFormat
from penstock.engine.prompt_rows import PooledRows, PromptScores
from penstock.engine.sampler import SamplingParams
from penstock.errors import ContextLengthError, PenstockError, PromptError, SettingError
from penstock.plan.model import ModelConfig

MODEL = ModelConfig(1, 8, 8, 1, 1, 8, vocab_size=50, max_position=20)
GOOD: list[tuple[list[int], int, dict[str, Any]]] = [
    ([0], 0, {}),
    ([49], 19, {}),
    ([1] * 20, 0, {}),
    ([1], 1, {"num_logprobs": 0, "prompt_logprobs": 0}),
    ([1], 0, {"pooling": "mean"}),
    ([1], 0, {"pooling": "last"}),
    ([1], 1, {"json_format": JsonFormat(None)}),
    ([1], 1, {"json_format": Grammar("start: /a/"), "sampling": SamplingParams(temperature=1.0)}),
    ([1], 1, {"sampling": SamplingParams(min_tokens=1, allowed_token_ids=(49,), bad_sequences=((3,),))}),
    ([1], 1, {"stop": ("a", "b")}),
]
BAD: list[tuple[Any, Any, dict[str, Any], type[PenstockError]]] = [
    ([], 1, {}, PromptError),
    ([1.0], 1, {}, PromptError),
    ([True], 1, {}, PromptError),
    ([-1], 1, {}, PromptError),
    ([50], 1, {}, PromptError),
    ([0, 50], 1, {}, PromptError),
    ([1], 20, {}, ContextLengthError),
    ([1] * 21, 0, {}, ContextLengthError),
    (5, 1, {}, SettingError),
    ([1], -1, {}, SettingError),
    ([1], True, {}, SettingError),
    ([1], 1, {"num_logprobs": -1}, SettingError),
    ([1], 1, {"prompt_logprobs": -1}, SettingError),
    ([1], 1, {"pooling": "mean"}, SettingError),
    ([1], 0, {"pooling": "other"}, SettingError),
    ([1], 0, {"pooling": "mean", "prompt_logprobs": 0}, SettingError),
    ([1], 1, {"sampling": None}, SettingError),
    ([1], 1, {"sampling": SamplingParams(logit_bias={50: 1.0})}, SettingError),
    ([1], 1, {"ignore_eos": 1}, SettingError),
    ([1], 1, {"json_format": {}}, SettingError),
    ([1], 1, {"cache_salt": 1}, SettingError),
    ([1], 1, {"stop": ("",)}, SettingError),
    *(
        ([1], 1, {"json_format": JsonFormat(None), "sampling": SamplingParams(**setting)}, SettingError)
        for setting in ({"min_tokens": 1}, {"allowed_token_ids": (1,)}, {"bad_sequences": ((1,),)})
    ),
]


@pytest.mark.parametrize(("prompt", "max_tokens", "more"), GOOD)
def test_what_a_model_can_run(prompt: list[int], max_tokens: int, more: dict[str, Any]) -> None:
    GenerationRequest(prompt, max_tokens, **more).check(MODEL)


@pytest.mark.parametrize(("prompt", "max_tokens", "more", "error"), BAD)
def test_what_it_cannot_is_refused(
    prompt: Any, max_tokens: Any, more: Any, error: type[PenstockError]
) -> None:
    with pytest.raises(error):
        GenerationRequest(prompt, max_tokens, **more).check(MODEL)


def test_rows_of_a_prompt_are_read_where_they_are_asked_for() -> None:
    assert GenerationRequest([1], 1).rows() is None
    assert isinstance(GenerationRequest([1], 1, prompt_logprobs=0).rows(), PromptScores)
    assert isinstance(GenerationRequest([1], 0, pooling="mean").rows(), PooledRows)


def test_grammars_of_patterns_and_choices() -> None:
    assert Grammar.regex("a/b\\/c\n").text == r"start: /a\/b\/c\n/"
    assert Grammar.choice(["a", 'b"', "a"]).text == r'start: "a" | "b\""'
    for pattern in ("", None, 1):
        with pytest.raises(SettingError):
            Grammar.regex(pattern)  # type: ignore[arg-type]
    for texts in ("ab", [], [""], ["a", ""], ["a", 1]):
        with pytest.raises(SettingError):
            Grammar.choice(texts)  # type: ignore[arg-type]
