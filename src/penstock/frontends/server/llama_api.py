"""`/completion` and `/infill`, as llama.cpp's own server has them: prompts as they are, and its names for timings."""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, PlainValidator

from penstock.engine.events import Finished, PromptProgress, TokenGenerated
from penstock.errors import SettingError
from penstock.frontends.server.bodies import Biases, CompletionBody, Prompt, prompts_of
from penstock.frontends.server.parts import Part, at_most
from penstock.frontends.server.responses import Answer, ChatLogprobs, prompt_progress, sent, to_json
from penstock.models.text.tokenizer import Tokenizer

# Marks of what comes before the gap, what comes after it, and where the filling begins, as families call them.
_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("[PREFIX]", "[SUFFIX]", "[MIDDLE]"),
)
_MAX_FILES = 256


def _pairs(value: object) -> object:
    """Biases as a list of pairs; false is never."""
    if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        return value
    return {str(token): -100.0 if bias is False else bias for token, bias in value}


class NativeBody(CompletionBody):
    aliases: ClassVar[Mapping[str, str]] = {
        **CompletionBody.aliases,
        "n_probs": "logprobs",
        "return_tokens": "return_token_ids",
    }

    logit_bias: Annotated[Biases | None, BeforeValidator(_pairs)] = None


class OtherFile(Part):
    text: str
    filename: str | None = None


class InfillBody(NativeBody):
    prompt_param = "input_prefix"

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[OtherFile] | None, at_most(_MAX_FILES)] = None
    # What the filling begins with.
    prompt: Annotated[list[Prompt], PlainValidator(prompts_of)] = Field(default=[""])

    def parts(self, tokenizer: Tokenizer) -> list[int | str]:
        """The prompt around the gap, by the marks that the tokenizer has."""
        ids = next((found for marks in _MARKS if (found := _ids_of(marks, tokenizer))), None)
        if ids is None:
            because = "the model's tokenizer has no marks for filling in"
            raise SettingError("input_prefix", ..., because=because)
        before, after, middle = ids
        files = "".join(f"{file.filename or ''}\n{file.text}\n" for file in self.input_extra or ())
        begun = self.prompt[0] if isinstance(self.prompt[0], list) else [self.prompt[0]]
        return [before, files + self.input_prefix, after, self.input_suffix, middle, *begun]


def _ids_of(marks: Sequence[str], tokenizer: Tokenizer) -> list[int]:
    """One token for each mark; none where it is not so."""
    parts = [tokenizer.split_special(mark) for mark in marks]
    ids = [part[0] for part in parts if len(part) == 1 and isinstance(part[0], int)]
    return ids if len(ids) == len(marks) else []


class NativeAnswer(Answer):
    prefix = "native-"

    def _content(self, tokens: list[list[TokenGenerated]]) -> Any:
        told = []
        for index in range(len(self._turns)):
            content = {**self._last_part(index), "content": self._turns[index].text}
            told.append(content | self._tokens(index, tokens[index]))
        return told[0] if len(told) == 1 else told

    async def _chunks(self) -> AsyncIterator[dict[str, Any]]:
        async for index, event, pieces in self._parts():
            if isinstance(event, PromptProgress) and self._prepared.returns_progress:
                progress = prompt_progress(event.progress)
                yield {
                    "index": index,
                    "content": "",
                    "stop": False,
                    "tokens": [],
                    "prompt_progress": progress,
                }
            text = "".join(getattr(piece, "text", "") for piece in pieces)
            if isinstance(event, TokenGenerated) or (isinstance(event, Finished) and text):
                own = [event] if isinstance(event, TokenGenerated) else []
                ids = [each.token for each in own]  # told of a stream whatever return_tokens says
                yield {
                    "index": index,
                    "content": text,
                    "stop": False,
                    **self._tokens(index, own),
                    "tokens": ids,
                }
            if isinstance(event, Finished):
                yield {**self._last_part(index), "content": "", "tokens": []}

    def _sent(self, chunk: dict[str, Any]) -> bytes:
        return sent(to_json(chunk))

    def _tokens(self, index: int, events: Sequence[TokenGenerated]) -> dict[str, Any]:
        told: dict[str, Any] = {"tokens": [event.token for event in events if self._prepared.tells_ids]}
        if self._prepared.requests[index].num_logprobs is not None:
            known = [event for event in events if not self._is_end(index, event)]
            told["completion_probabilities"] = ChatLogprobs(self._pieces).write(known)["content"]
        return told

    def _last_part(self, index: int) -> dict[str, Any]:
        end = self._ends[index]
        assert end is not None
        usage = end.usage
        num_read = usage.prompt_tokens - usage.cached_tokens
        return {
            "index": index,
            "stop": True,
            "model": self._model_name,
            "tokens_evaluated": usage.prompt_tokens,
            "tokens_predicted": usage.completion_tokens,
            "tokens_cached": usage.prompt_tokens + usage.completion_tokens,
            "truncated": False,
            "has_new_line": "\n" in self._turns[index].text,
            "stop_type": "limit" if end.reason == "length" else "word" if end.stop else "eos",
            "stopping_word": end.stop or "",
            "timings": {
                "cache_n": usage.cached_tokens,
                **_timing("prompt", num_read, end.prefill_s),
                **_timing("predicted", usage.completion_tokens, end.decode_s),
            },
        }


def _timing(name: str, count: int, seconds: float) -> dict[str, float]:
    return {
        f"{name}_n": count,
        f"{name}_ms": 1000 * seconds,
        f"{name}_per_token_ms": 1000 * seconds / max(count, 1),
        f"{name}_per_second": count / seconds if seconds else 0.0,
    }
