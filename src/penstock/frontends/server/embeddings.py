"""`/v1/embeddings`: texts as vectors, of the loaded model's own last hidden states."""

import base64
import struct
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import PlainValidator

from penstock.engine.events import TokenGenerated
from penstock.engine.prompt_rows import Pooling
from penstock.frontends.server.bodies import Prompt, Salt, prompts_of
from penstock.frontends.server.parts import Body, Unsupported
from penstock.frontends.server.responses import Answer

_UNSUPPORTED: Unsupported = {"dimensions": ("vectors of another length than the model's", ())}


class EmbeddingBody(Body):
    prompt_param = "input"
    unsupported = _UNSUPPORTED
    aliases: ClassVar[Mapping[str, str]] = {"content": "input"}  # llama.cpp's

    input: Annotated[
        list[Prompt], PlainValidator(prompts_of, json_schema_input_type=str | list[Prompt] | list[int | str])
    ]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    pooling: Pooling | None = None
    cache_salt: Salt | None = None
    # Accepted, without effect.
    user: str | None = None

    def about(self) -> dict[str, Any]:
        return {"is_text": self.encoding_format == "base64"}


class EmbeddingAnswer(Answer):
    prefix = "embd-"

    def _content(self, tokens: list[list[TokenGenerated]]) -> dict[str, Any]:
        num_tokens = self._prepared.num_prompt_tokens
        data = [
            {"object": "embedding", "index": index, "embedding": self._written(vector)}
            for index, end in enumerate(self._ends)
            if end is not None and (vector := end.vector) is not None
        ]
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return {"object": "list", "data": data, "model": self._model_name, "usage": usage}

    def _written(self, vector: Sequence[float]) -> list[float] | str:
        if not self._prepared.about["is_text"]:
            return list(vector)
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
