"""Small random models whose tokens are bytes, as folders that can be opened."""

import json
import shutil
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.oracle import make_oracle

CONTEXT = 6000
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"


@cache
def byte_backend() -> Tokenizer:
    """Every token a byte."""
    vocab = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def model_of_bytes(family: str, folder: Path) -> Path:
    """The folder, with a random model of the family and a chat template in it."""
    oracle = make_oracle(family, vocab_size=256, max_position_embeddings=CONTEXT)
    shutil.copytree(oracle.folder, folder)
    byte_backend().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder
