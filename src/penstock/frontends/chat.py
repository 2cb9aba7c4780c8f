"""The commands `penstock chat` and `penstock run`: a conversation in the terminal."""

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from penstock.frontends import options
from penstock.frontends.exits import FULL, OutputError, reported

if TYPE_CHECKING:
    from penstock.engine.llm import LLM
    from penstock.frontends.display import Display

_answer = options.in_panel("Answer")

HELP = """/file PATH   put a document into the next message
/save PATH   write the conversation to a file
/load PATH   go on with one from a file
/clear       begin anew
/help        this
/exit        end; so does Ctrl-D
A line that ends with \\ goes on in the next; lines between two of \"\"\" are one message. Ctrl-C ends an answer."""
_FENCE = '"""'
# Tokens of an answer, where the context has room for them.
_ANSWER_TOKENS = 2048
# What a chat keeps in memory of what was read, so that a turn reads only what is new.
_REUSE_TOKENS = 1 << 15


def chat(
    name: str | None = typer.Argument(
        None, metavar="[MODEL]", help="The same as --model.", show_default=False
    ),
    model: str = options.MODEL,
    system: str | None = options.option(None, "The system message.", metavar="TEXT"),
    load: str | None = options.option(None, "Go on with a conversation that /save wrote.", metavar="PATH"),
    dtype: options.Dtype = options.DTYPE,
    weights: str | None = options.WEIGHTS,
    activations: str | None = options.ACTIVATIONS,
    model_impl: str | None = options.MODEL_IMPL,
    device: str | None = options.DEVICE,
    threads: int | None = options.THREADS,
    chunk: str | None = options.CHUNK,
    max_activation: str | None = options.MAX_ACTIVATION,
    target_itl_ms: str | None = options.TARGET_ITL_MS,
    target_ttft_ms: str | None = options.TARGET_TTFT_MS,
    align: bool | None = options.ALIGN,
    cache_dir: str | None = options.CACHE_DIR,
    cache_size: str | None = options.CACHE_SIZE,
    max_tokens: int | None = _answer(None, "Tokens of an answer at most.", min=1),
    temperature: float = _answer(0.7, "0 takes the likeliest token; above 0, tokens are drawn."),
    top_p: float = _answer(0.95, "Draw from the likeliest tokens that make up this probability."),
    seed: int | None = _answer(None, "Makes what is drawn repeatable."),
    quiet: bool = options.on_output(False, "Nothing on standard error but errors.", "--quiet"),
) -> None:
    """Talk with a model. /help tells what else a line may be.

    What was read of the conversation stays in memory, and with --cache-dir on disk, so that only what is new is read.
    """
    given = locals()
    with reported(chat):
        from penstock.frontends.answer import check_text, loaded
        from penstock.frontends.display import make_display

        check_text("--system", system or "")
        settings = options.engine_settings({**given, "reuse_tokens": _REUSE_TOKENS})
        talk = Talk(system)
        if isinstance(sys.stdin, io.TextIOWrapper):  # a line that is no text is told of, and ends nothing
            sys.stdin.reconfigure(errors="surrogateescape")
        if load is not None:
            talk.load(load)
        display = make_display(quiet)
        display.is_brief = True
        with display.busy("starting"):
            from penstock.engine.sampler import SamplingParams
            from penstock.kernels.device import find_devices

            settings = settings.on(find_devices())
            sampling = SamplingParams(temperature=temperature, top_p=top_p, seed=seed)
        with loaded(name or model, display, settings) as llm:
            llm.tokenizer.chat  # noqa: B018  # a model without a template cannot talk: better now than later
            if load is not None:
                display.note(f"{len(talk.messages)} messages from {load}")
            if talk.is_typed:
                with contextlib.suppress(ImportError):
                    import readline  # lines before this one by the arrow keys

                    readline.parse_and_bind("tab: complete")  # names of files
                display.note("/help tells what a line may be; Ctrl-D ends the chat")
            while (line := talk.read()) is not None:
                talk.take(line, llm, display, max_tokens=max_tokens, sampling=sampling)


class Talk:
    """A conversation, and what a line does to it."""

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self.messages = [] if system is None else [{"role": "system", "content": system}]
        self._document: str | None = None

    @property
    def is_typed(self) -> bool:
        return sys.stdin is not None and sys.stdin.isatty()

    def read(self) -> str | None:
        """The next message or command; None at the end."""
        from penstock.errors import PromptError

        lines: list[str] = []
        is_fenced = False
        while True:
            try:
                if sys.stdin is None:
                    raise EOFError
                line = input("> " if self.is_typed and not lines and not is_fenced else "")
            except EOFError:
                return "\n".join(lines) if lines else None
            except OSError as error:
                if isinstance(error, BrokenPipeError) or error.errno in FULL:  # of standard output
                    raise
                raise PromptError(f"standard input cannot be read: {error.strerror or error}") from None
            except KeyboardInterrupt:
                print(file=sys.stderr)
                lines, is_fenced = [], False
                continue
            if line.strip() == _FENCE:
                if is_fenced:
                    return "\n".join(lines)
                is_fenced = True
            elif not is_fenced and line.endswith("\\"):
                lines.append(line[:-1])
            elif is_fenced:
                lines.append(line)
            else:
                return "\n".join([*lines, line])

    def take(self, line: str, llm: "LLM", display: "Display", **request: Any) -> None:
        """A command, or a message, which is answered. What goes wrong is told, and the chat goes on."""
        from penstock.errors import PenstockError, PromptError
        from penstock.frontends.answer import answer, check_text

        command, _, rest = line.strip().partition(" ")
        try:
            check_text("the message", line)
            if command in _COMMANDS:
                if not rest.strip() and f"{command} PATH" in HELP:
                    raise PromptError(f"{command} needs the path of a file")
                with contextlib.suppress(KeyboardInterrupt):  # of a file that has no end, say
                    _COMMANDS[command](self, rest.strip(), display)
                return
            if command.startswith("/") and command[1:].isalpha():
                display.note(f"there is no {command}: /help tells what there is")
                return
            text = line if self._document is None else f"{self._document}\n\n{line}"
            if not text.strip():
                return
            turn = [*self.messages, {"role": "user", "content": text}]
            if request["max_tokens"] is None:
                room = llm.context_length - len(llm.tokenizer.encode_chat(turn))
                request["max_tokens"] = min(room, _ANSWER_TOKENS) if room > 0 else None
            result = answer(llm, turn, display, **request)
            if result.finish_reason == "cancelled" and not result.text:
                display.note(
                    "the message is taken back" + (": the file goes into the next" if self._document else "")
                )
                return
            self._document = None
            self.messages = [*turn, {"role": "assistant", "content": result.text}]
        except OutputError:  # nobody would see what follows
            raise
        except PenstockError as error:
            display.note(str(error))

    def load(self, path: str) -> None:
        from penstock.errors import PromptError
        from penstock.frontends.answer import read_bytes

        try:
            saved = json.loads(read_bytes(Path(os.path.expanduser(path))))
            messages = [
                {"role": str(each["role"]), "content": str(each["content"])} for each in saved["messages"]
            ]
        except OSError as error:
            raise PromptError(f"{path} cannot be read: {error.strerror or error}") from None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise PromptError(f"{path} is no conversation that /save wrote") from error
        self.messages = messages

    def _save(self, path: str, display: "Display") -> None:
        from penstock.errors import PromptError
        from penstock.files import replace_text

        try:
            target = Path(os.path.expanduser(path))
            content = json.dumps({"messages": self.messages}, ensure_ascii=False, indent=1)
            if target.is_file() or not target.exists():
                replace_text(target.resolve(), content)
            else:  # a pipe, say
                target.write_text(content)
        except (OSError, ValueError) as error:
            raise PromptError(
                f"{path} cannot be written: {getattr(error, 'strerror', None) or error}"
            ) from None
        display.note(f"written to {path}: {len(self.messages)} messages")

    def _load(self, path: str, display: "Display") -> None:
        self.load(path)
        display.note(f"{len(self.messages)} messages from {path}")

    def _file(self, path: str, display: "Display") -> None:
        from penstock.frontends.answer import read_text

        self._document = read_text(path, "/file")
        display.note(f"{len(self._document)} characters go into the next message")

    def _clear(self, _: str, display: "Display") -> None:
        self.__init__(self.system)  # type: ignore[misc]
        display.note("the conversation begins anew")

    def _help(self, _: str, display: "Display") -> None:
        for line in HELP.splitlines():
            display.note(line)

    def _exit(self, _: str, display: "Display") -> None:
        raise SystemExit(0)


_COMMANDS = {
    "/file": Talk._file,
    "/save": Talk._save,
    "/load": Talk._load,
    "/clear": Talk._clear,
    "/help": Talk._help,
    "/exit": Talk._exit,
}
