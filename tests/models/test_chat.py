"""Templates render as in transformers, and cannot reach out of their sandbox."""

import time
import tracemalloc
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from penstock.errors import ModelFileError, PromptError
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
    "{{ strftime_now('%Y') }} {{ dict(a=1) }} {{ messages[1:] | map(attribute='role') | join }}",
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
    ],
)
def test_a_template_that_fails_or_reaches_out_is_an_error(template: str) -> None:
    with pytest.raises(ModelFileError, match="chat template fails"):
        ChatTemplate(template, {}).render(MESSAGES)


GROWING = [
    "ns.x + ns.x",
    "ns.x ~ ns.x",
    "ns.x * 2",
    "ns.x | replace('a', 'aa')",
    "ns.x.replace('a', 'aa')",
    "[ns.x, ns.x] | join",
    "''.join([ns.x, ns.x])",
]


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10**10 }}",
        "{{ [1] * 10**10 }}",
        "{{ 10 ** (10**10) }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}xx{% endfor %}{% endfor %}",
        "{% set x = 'a' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60,
        *(
            "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = "
            + grown
            + " %}{% endfor %}"
            for grown in GROWING
        ),
        "{{ 'a' | center(10**10) }}",
        "{{ 'a'.ljust(10**10) }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ '%*d' % (10**10, 1) }}",
        "{{ '%9999999999d' | format(1) }}",
        "{{ '{:9999999999}'.format(1) }}",
        "{{ '{:{width}}'.format(1, width=10**10) }}",
        "{{ [1] | tojson(indent=10**10) }}",
        "{{ lipsum(n=10**6) }}",
    ],
)
def test_a_template_without_bounds_is_an_error_and_not_a_hang(template: str) -> None:
    started = time.monotonic()
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError, match=r"chat template fails: (?!MemoryError)"):
            ChatTemplate(template, {}).render(MESSAGES)
        assert tracemalloc.get_traced_memory()[1] < 1 << 30
    finally:
        tracemalloc.stop()
    assert time.monotonic() - started < 120


def test_long_conversations_are_within_bounds() -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] ~ '\n' + (m['content'] | trim) }}\n{% endfor %}"
    )
    long = [{"role": "user", "content": "x" * 10_000_000}, *({"role": "user", "content": "y"},) * 20_000]
    assert len(ChatTemplate(template, {}).render(long)) > 10_000_000
