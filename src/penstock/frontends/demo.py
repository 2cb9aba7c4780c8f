"""`make demo`: a document of several thousand tokens that every Python carries, and a question about it."""

from collections.abc import Callable, Mapping
from pydoc_data.topics import topics

from penstock.frontends.answer import answer, loaded, write
from penstock.frontends.display import make_display
from penstock.frontends.exits import INTERRUPTED, reported, run_main

MODEL = "smollm2"
# A topic that would lead beyond the upper limit is left out; the model's context has 8,192 tokens.
MIN_TOKENS, MAX_TOKENS = 4300, 5000
# Topics of Python's reference. Their texts differ between versions, so there are more than any should need.
TOPICS = ("lambda", "try", "with", "raise", "for", "while", "if", "break", "continue", "return", "import")
# The answer is in the first topic, so that all of the others lie between it and the question.
QUESTION = "According to the text above, what are lambda expressions used for? Answer in one sentence."
NEXT = '.venv/bin/penstock generate --prompt-file README.md --prompt "What is Penstock for?"'


def make_document(
    texts: Mapping[str, str],
    count: Callable[[str], int],
    *,
    at_least: int = MIN_TOKENS,
    at_most: int = MAX_TOKENS,
) -> str:
    """Whole topics in a fixed order, as many as it takes to have enough tokens."""
    document = ""
    for name in (*TOPICS, *sorted(set(texts) - set(TOPICS))):
        if name in texts:
            longer = f"{document}\n\n{texts[name].strip()}".lstrip()
            if count(longer) <= at_most:
                document = longer
            if count(document) >= at_least:
                break
    return document


def main(model: str = MODEL) -> None:
    with reported():
        display = make_display()
        with loaded(model, display) as llm:
            document = make_document(topics, lambda text: len(llm.tokenize(text, raw=True)))
            prompt = f"{document}\n\n{QUESTION}"
            write(
                f"{model} reads {len(llm.tokenize(prompt))} tokens of Python's reference (pydoc_data.topics).\n"
            )
            write(f"Question: {QUESTION}\n")
            result = answer(llm, prompt, display, max_tokens=80)
        if result.finish_reason == "cancelled":
            raise SystemExit(INTERRUPTED)
        write(f"\nNext, try a document and a question of your own:\n  {NEXT}\n")


if __name__ == "__main__":
    run_main(main)
