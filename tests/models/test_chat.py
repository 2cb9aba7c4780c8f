"""Templates render as in transformers, and cannot reach out of their sandbox."""

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from penstock.errors import ModelFileError, PromptError
from penstock.models.chat import ChatTemplate

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
