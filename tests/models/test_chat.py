"""Templates render as in transformers, and what they do to their process is not done to ours."""

import os
import resource
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from penstock.errors import ModelFileError, PromptError
from penstock.models.text import chat
from penstock.models.text.chat import ChatTemplate

MESSAGES = [
    {"role": "system", "content": "Be <b>brief</b> & kind."},
    {"role": "user", "content": "  What's “up”?\n"},
]
TEMPLATES = [
    "{% for message in messages %}\n    {{ message.role }}: {{ message['content'] | trim }}\n{% endfor %}",
    "{{ bos_token }}{%- if add_generation_prompt %}go{% endif %}",
    "{{ messages | tojson }}|{{ messages[0] | tojson(indent=2) }}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{% if tools is none and not documents %}none{% endif %}{{ undefined_name }}",
    "{{ messages[0].role ~ 1 ~ none ~ '%s!' % 'x' + '{:>8}'.format('y') ~ 'ab' * 3 }}{{ 2 ** 10 * 3 }}",
    "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{{ loop.nextitem }}{% endfor %}",
    "{% macro two(x) %}{{ x }}{{ x }}{% endmacro %}{{ two(messages[1].content.split(' ')[-1] | upper) }}",
    "{{ messages[1].content | replace('a', 'o') | indent(4) }}{{ ['a', 'b'] | join(', ') }}{{ 'x'.join('abc') }}",
    "{{ strftime_now('%Y %Z') }} {{ dict(a=1) }} {{ messages[1:] | map(attribute='role') | join }}",
    "{% set ns = namespace(self=1, b=messages) %}{{ ns.self }}{{ ns.b[1].content }}{{ '\\ud800' | length }}",
    "{{ messages[0].content | striptags }}",  # by a module that is imported late
]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
def test_as_transformers(template: str, prompt: bool) -> None:
    theirs: Any = render_jinja_template(
        [MESSAGES], chat_template=template, add_generation_prompt=prompt, bos_token="<s>"
    )
    ours = ChatTemplate(template, {"bos_token": "<s>"}).render(MESSAGES, add_generation_prompt=prompt)
    assert ours == theirs[0][0]


def test_a_template_may_refuse_messages() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(PromptError, match="roles must alternate"):
        template.render(MESSAGES)


# Faults of a template, attempts to reach out, and files, programs and modules for one that did.
@pytest.mark.parametrize(
    "template",
    [
        "{% for %}",
        "{{ 1 / 0 }}",
        "{{ messages.nothing.at.all }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% include 'etc' %}",
        "{% for i in range(10000000) %}{% endfor %}",
        "{{ namespace(_x=1) }}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ 'a'.encode('idna') }}",  # a module that is not loaded yet
        "{{ '" + "(" * 5000 + "' ~ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    ],
)
def test_a_template_that_fails_or_reaches_out_is_an_error(template: str) -> None:
    with pytest.raises(ModelFileError, match=r"chat template fails: .*$") as raised:
        ChatTemplate(template, {}).render(MESSAGES)
    assert "\n" not in str(raised.value)


def loop(turns: int, body: str, start: str = "'a'") -> str:
    return f"{{% set ns = namespace(x={start}, y=[]) %}}{{% for i in range({turns}) %}}{body}{{% endfor %}}"


NESTED = loop(200, "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}", "[]")
LONG = "{% set x = 'ab' * 10**6 %}"
HOSTILE = [
    "{{ 'a' * 10**10 }}",
    "{{ [1] * 10**10 }}",
    "{{ ([1] * 10**7) | tojson | length }}{{ 'x' * 10**8 }}",
    "{{ 10 ** (10**10) }}",
    "{% set x = 10 ** (10**6) %}{% for i in range(99999) %}{% set y = x * x %}{% endfor %}",
    "{% for i in range(10**9) %}x{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}xx{% endfor %}{% endfor %}",
    "{% set x = 'a' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60,
    *(
        loop(60, f"{{% set ns.x = {grown} %}}")
        for grown in (
            "ns.x + ns.x",
            "ns.x ~ ns.x",
            "ns.x * 2",
            "ns.x | replace('a', 'aa')",
            "ns.x.replace('a', 'aa')",
            "[ns.x, ns.x] | join",
            "''.join([ns.x, ns.x])",
            "'%s%s' % (ns.x, ns.x)",
            "'{0}{0}'.format(ns.x)",
            "[ns.x, ns.x] | tojson",
        )
    ),
    "{{ 'a' | center(10**10) }}",
    "{{ 'a'.ljust(10**10) }}",
    "{{ ('\\t' * 10**4).expandtabs(10**6) }}",
    "{{ '%9999999999d' % 1 }}",
    "{{ '%*d' % (10**10, 1) }}",
    "{{ '%9999999999d' | format(1) }}",
    "{{ '{:9999999999}'.format(1) }}",
    "{{ '{:{width}}'.format(1, width=10**10) }}",
    "{{ [1] | tojson(indent=10**10) }}",
    "{{ lipsum(n=10**6) }}",
    NESTED + "{{ ns.x == ns.y }}",
    NESTED + "{{ ns.x | string }}",
    LONG + "{% for i in range(99999) %}{% if x[1:] == x[:-1] %}{% endif %}{% endfor %}",
    LONG + "{% for i in range(99999) %}{% if x.find('ba' * 10**5 + 'c') %}{% endif %}{% endfor %}",
    LONG + "{% for i in range(99999) %}{% if x.count('a') and x.split('a') %}{% endif %}{% endfor %}",
    LONG + "{{ x | list | map('string') | groupby('x') | sort | unique | join(x) }}",
    LONG + "{% for i in range(99999) %}{% if (x | list | sort)[0] %}{% endif %}{% endfor %}",
    LONG + "{{ x | wordwrap(1) | urlize | xmlattr }}{{ x | list | batch(1) | list | pprint }}",
]


def peak_bytes() -> int:
    """Of this process: what a template takes is its own process's."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize("template", HOSTILE)
def test_a_template_without_bounds_is_an_error_and_not_a_hang(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ChatTemplate("{{ messages[0].role }}", {}).render(MESSAGES) == "system"  # whatever came before
    monkeypatch.setattr(chat, "LIMIT_S", 0.5)
    started, before = time.monotonic(), peak_bytes()
    with pytest.raises(ModelFileError, match=r"chat template fails: .+$"):
        ChatTemplate(template, {}).render(MESSAGES)
    assert time.monotonic() - started < 10
    assert peak_bytes() - before < 256 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the limit may be none")
def test_its_memory_has_a_limit_of_its_own() -> None:
    with pytest.raises(ModelFileError, match="more than 512 MiB of memory"):
        ChatTemplate("{{ ('a' * 10**9) | length }}", {}).render(MESSAGES)


def test_a_process_stays_and_is_replaced_where_it_died() -> None:
    def process_of(template: str = "x") -> int:
        ChatTemplate(template, {}).render(MESSAGES)
        assert chat._process._process is not None
        return chat._process._process.pid

    first = process_of()
    assert process_of("y") == first
    os.kill(first, signal.SIGKILL)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    assert process_of() != first


def test_it_opens_nothing_and_loads_no_torch() -> None:
    ChatTemplate("x", {}).render(MESSAGES)
    assert chat._process._process is not None
    folder = Path(f"/proc/{chat._process._process.pid}")
    assert "torch" not in (folder / "maps").read_text()
    assert sorted(file.name for file in (folder / "fd").iterdir()) == ["0", "1", "2"]
    (files,) = [line for line in (folder / "limits").read_text().splitlines() if "open files" in line]
    assert files.split()[3] == "3"


def test_threads_share_it() -> None:
    def render(index: int) -> str:
        return ChatTemplate(f"{{{{ messages[0].content }}}} {index % 7}", {}).render(
            [{"content": "x" * index}]
        )

    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(render, range(0, 20_000, 100)))
    assert texts == ["x" * index + f" {index % 7}" for index in range(0, 20_000, 100)]


def test_a_process_that_was_forked_off_has_its_own() -> None:
    ChatTemplate("x", {}).render(MESSAGES)
    child = os.fork()
    if child == 0:
        os._exit(0 if ChatTemplate("y", {}).render(MESSAGES) == "y" else 1)
    assert ChatTemplate("z", {}).render(MESSAGES) == "z"
    assert os.waitpid(child, 0)[1] == 0


OWNER = """
import sys, threading, time
from penstock.models.text import chat
chat.LIMIT_S = 1
chat.ChatTemplate("x", {}).render([])
print(chat._process._process.pid, flush=True)
if sys.argv[1] == "busy":
    chat.ChatTemplate("{{ 9**9**9 }}", {}).render([])
time.sleep(60)
"""


@pytest.mark.parametrize("kind", ["idle", "busy"])
def test_it_ends_with_the_process_that_started_it(kind: str) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER, kind], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        renderer = Path(f"/proc/{owner.stdout.readline().strip()}")
        time.sleep(0.3)  # it has begun
        assert renderer.exists()
        owner.kill()
    deadline = time.monotonic() + 9
    while renderer.exists() and "(zombie)" not in (renderer / "status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_long_conversations_are_within_bounds() -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] ~ '\n' + (m['content'] | trim) }}\n{% endfor %}"
    )
    long = [{"role": "user", "content": "é" * 10_000_000}, *({"role": "user", "content": "y"},) * 20_000]
    assert len(ChatTemplate(template, {}).render(long)) > 10_000_000


def test_messages_of_anything_else_are_refused() -> None:
    with pytest.raises(PromptError, match="messages"):
        ChatTemplate("x", {}).render([{"role": "user", "content": object()}])
