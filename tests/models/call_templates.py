"""Short chat templates of our own that write calls as families of models do, and what an answer of each looks like."""

from typing import Any

_TURN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
_END = "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
_EACH = "{% for c in m.tool_calls or [] %}"
_ARGUMENTS = "{{ c.function.arguments | tojson }}"
_VALUE = "{{ v if v is string else v | tojson }}"
_ITEMS = "{% for k, v in c.function.arguments.items() %}"
_TOOLS = "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"


def _template(call: str, before: str = "", after: str = "") -> str:
    calls = (
        "{% if m.tool_calls %}" + before + "{% endif %}" + _EACH + call + "{% endfor %}"
        "{% if m.tool_calls %}" + after + "{% endif %}"
    )
    return _TOOLS + _TURN + calls + _END


_PYTHONIC = (
    "{{ c.function.name }}("
    + _ITEMS
    + "{{ k }}={{ v | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}){% if not loop.last %}, {% endif %}"
)
_SORTED = (
    "{{ '{' }}{% for k, v in c.function.arguments | dictsort %}{{ k }}:{{ 'QUOTE' ~ v ~ 'QUOTE' if v is string else v | tojson }}"
    "{% if not loop.last %},{% endif %}{% endfor %}{{ '}' }}"
)
_HERMES = '<tool_call>\\n{"name": "\' ~ c.function.name ~ \'", "arguments": \' ~ c.function.arguments|tojson ~ \'}\\n</tool_call>'
# By family: the template, and the answer with one call and with two of `WEATHER` and `MAIL`. None: it refuses two.
TEMPLATES: dict[str, tuple[str, str, str | None]] = {
    "hermes": (
        _template("{% if not loop.first %}{{ '\\n' }}{% endif %}{{ '" + _HERMES + "' }}"),
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 3}}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 3}}\n</tool_call>\n'
        '<tool_call>\n{"name": "mail", "arguments": {"text": "a \\"b\\" }]{\\n</tool_call>", "urgent": true}}\n</tool_call>',
    ),
    "coder": (
        _template(
            "{{ '<tool_call>\\n<function=' ~ c.function.name ~ '>\\n' }}"
            + _ITEMS
            + "{{ '<parameter=' ~ k ~ '>\\n' }}"
            + _VALUE
            + "{{ '\\n</parameter>\\n' }}{% endfor %}{{ '</function>\\n</tool_call>' }}"
            "{% if not loop.last %}{{ '\\n' }}{% endif %}"
        ),
        "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>",
        "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        '</function>\n</tool_call>\n<tool_call>\n<function=mail>\n<parameter=text>\na "b" }]{\n</tool_call>\n'
        "</parameter>\n<parameter=urgent>\ntrue\n</parameter>\n</function>\n</tool_call>",
    ),
    "glm": (
        _template(
            "{{ '<tool_call>' ~ c.function.name ~ '\\n' }}"
            + _ITEMS
            + "<arg_key>{{ k }}</arg_key>{{ '\\n' }}<arg_value>"
            + _VALUE
            + "</arg_value>{{ '\\n' }}{% endfor %}</tool_call>"
        ),
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call><tool_call>mail\n<arg_key>text</arg_key>\n"
        '<arg_value>a "b" }]{\n</tool_call></arg_value>\n<arg_key>urgent</arg_key>\n<arg_value>true</arg_value>\n</tool_call>',
    ),
    "minimax": (
        _template(
            "<invoke name=\"{{ c.function.name }}\">{{ '\\n' }}"
            + _ITEMS
            + '<parameter name="{{ k }}">'
            + _VALUE
            + "</parameter>{{ '\\n' }}{% endfor %}</invoke>{{ '\\n' }}",
            "{{ '<mini:tool_call>\\n' }}",
            "</mini:tool_call>",
        ),
        '<mini:tool_call>\n<invoke name="weather">\n<parameter name="city">Köln</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n</mini:tool_call>',
        '<mini:tool_call>\n<invoke name="weather">\n<parameter name="city">Köln</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="mail">\n<parameter name="text">a "b" }]{\n</tool_call>'
        '</parameter>\n<parameter name="urgent">true</parameter>\n</invoke>\n</mini:tool_call>',
    ),
    "nemo": (
        _template(
            '{"name": "{{ c.function.name }}", "arguments": ' + _ARGUMENTS + ', "id": "{{ c.id }}"}'
            "{% if not loop.last %}, {% endif %}",
            "[TOOL_CALLS][",
            "]",
        ),
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Köln", "days": 3}, "id": "abcdefghi"}]',
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Köln", "days": 3}, "id": "abcdefghi"}, '
        '{"name": "mail", "arguments": {"text": "a \\"b\\" }]{\\n</tool_call>", "urgent": true}, "id": "abcdefgh2"}]',
    ),
    "small": (
        _template("[TOOL_CALLS]{{ c.function.name }}[ARGS]" + _ARGUMENTS),
        '[TOOL_CALLS]weather[ARGS]{"city": "Köln", "days": 3}',
        '[TOOL_CALLS]weather[ARGS]{"city": "Köln", "days": 3}'
        '[TOOL_CALLS]mail[ARGS]{"text": "a \\"b\\" }]{\\n</tool_call>", "urgent": true}',
    ),
    "llama": (
        _TOOLS
        + _TURN
        + "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endif %}"
        '{% set c = m.tool_calls[0] %}{"name": "{{ c.function.name }}", "parameters": '
        + _ARGUMENTS
        + "}{% endif %}"
        + _END,
        '{"name": "weather", "parameters": {"city": "Köln", "days": 3}}',
        None,
    ),
    "deepseek": (
        _template(
            "<｜call▁begin｜>{{ c.function.name }}<｜sep｜>{{ c.function.arguments }}<｜call▁end｜>",
            "<｜calls▁begin｜>",
            "<｜calls▁end｜>",
        ),
        '<｜calls▁begin｜><｜call▁begin｜>weather<｜sep｜>{"city": "Köln", "days": 3}<｜call▁end｜><｜calls▁end｜>',
        '<｜calls▁begin｜><｜call▁begin｜>weather<｜sep｜>{"city": "Köln", "days": 3}<｜call▁end｜>'
        '<｜call▁begin｜>mail<｜sep｜>{"text": "a \\"b\\" }]{\\n</tool_call>", "urgent": true}<｜call▁end｜><｜calls▁end｜>',
    ),
    "kimi": (
        _template(
            "<|call_begin|>functions.{{ c.function.name }}:{{ loop.index0 }}<|args|>"
            + _ARGUMENTS
            + "<|call_end|>",
            "<|section_begin|>",
            "<|section_end|>",
        ),
        '<|section_begin|><|call_begin|>functions.weather:0<|args|>{"city": "Köln", "days": 3}<|call_end|><|section_end|>',
        '<|section_begin|><|call_begin|>functions.weather:0<|args|>{"city": "Köln", "days": 3}<|call_end|>'
        '<|call_begin|>functions.mail:1<|args|>{"text": "a \\"b\\" }]{\\n</tool_call>", "urgent": true}'
        "<|call_end|><|section_end|>",
    ),
    "seed": (
        _template(
            "{{ '<seed:tool_call>\\n<function=' ~ c.function.name ~ '>\\n' }}"
            + _ITEMS
            + "<parameter={{ k }}>"
            + _VALUE
            + "</parameter>{{ '\\n' }}{% endfor %}{{ '</function>\\n</seed:tool_call>' }}"
        ),
        "<seed:tool_call>\n<function=weather>\n<parameter=city>Köln</parameter>\n<parameter=days>3</parameter>\n"
        "</function>\n</seed:tool_call>",
        "<seed:tool_call>\n<function=weather>\n<parameter=city>Köln</parameter>\n<parameter=days>3</parameter>\n"
        "</function>\n</seed:tool_call><seed:tool_call>\n<function=mail>\n"
        '<parameter=text>a "b" }]{\n</tool_call></parameter>\n<parameter=urgent>true</parameter>\n</function>\n</seed:tool_call>',
    ),
    "glm4.7": (
        _template(
            "<tool_call>{{ c.function.name }}"
            + _ITEMS
            + "<arg_key>{{ k }}</arg_key><arg_value>"
            + _VALUE
            + "</arg_value>{% endfor %}</tool_call>"
        ),
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Köln</arg_value><arg_key>days</arg_key>"
        "<arg_value>3</arg_value></tool_call>",
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Köln</arg_value><arg_key>days</arg_key>"
        "<arg_value>3</arg_value></tool_call><tool_call>mail<arg_key>text</arg_key>"
        '<arg_value>a "b" }]{\n</tool_call></arg_value><arg_key>urgent</arg_key><arg_value>true</arg_value></tool_call>',
    ),
    "small3.2": (
        _template("[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]" + _ARGUMENTS),
        '[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{"city": "Köln", "days": 3}',
        '[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{"city": "Köln", "days": 3}'
        '[TOOL_CALLS]mail[CALL_ID]abcdefgh2[ARGS]{"text": "a \\"b\\" }]{\\n</tool_call>", "urgent": true}',
    ),
    "r1": (
        _template(
            "<|call_begin|>function<|sep|>{{ c.function.name }}{{ '\\n```json\\n' }}"
            "{{ c.function.arguments }}{{ '\\n```' }}<|call_end|>",
            "<|calls_begin|>",
            "<|calls_end|>",
        ),
        '<|calls_begin|><|call_begin|>function<|sep|>weather\n```json\n{"city": "Köln", "days": 3}\n```<|call_end|>'
        "<|calls_end|>",
        '<|calls_begin|><|call_begin|>function<|sep|>weather\n```json\n{"city": "Köln", "days": 3}\n```<|call_end|>'
        '<|call_begin|>function<|sep|>mail\n```json\n{"text": "a \\"b\\" }]{\\n</tool_call>", "urgent": true}\n```'
        "<|call_end|><|calls_end|>",
    ),
    "command": (
        _template(
            '{"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ c.function.name }}", "parameters": '
            + _ARGUMENTS
            + "}{% if not loop.last %},{{ '\\n' }}{% endif %}",
            "<|START_ACTION|>[",
            "]<|END_ACTION|>",
        ),
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Köln", "days": 3}}]'
        "<|END_ACTION|>",
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Köln", "days": 3}},\n'
        '{"tool_call_id": "1", "tool_name": "mail", "parameters": {"text": "a \\"b\\" }]{\\n</tool_call>", "urgent": true}}]'
        "<|END_ACTION|>",
    ),
    "dsml": (
        _template(
            "{{ '<DSML_invoke name=\"' ~ c.function.name ~ '\">\\n' }}"
            + _ITEMS
            + "<DSML_parameter name=\"{{ k }}\" string=\"{{ 'true' if v is string else 'false' }}\">"
            + _VALUE
            + "</DSML_parameter>{{ '\\n' }}{% endfor %}{{ '</DSML_invoke>\\n' }}",
            "{{ '<DSML_calls>\\n' }}",
            "</DSML_calls>",
        ),
        '<DSML_calls>\n<DSML_invoke name="weather">\n<DSML_parameter name="city" string="true">Köln</DSML_parameter>\n'
        '<DSML_parameter name="days" string="false">3</DSML_parameter>\n</DSML_invoke>\n</DSML_calls>',
        '<DSML_calls>\n<DSML_invoke name="weather">\n<DSML_parameter name="city" string="true">Köln</DSML_parameter>\n'
        '<DSML_parameter name="days" string="false">3</DSML_parameter>\n</DSML_invoke>\n<DSML_invoke name="mail">\n'
        '<DSML_parameter name="text" string="true">a "b" }]{\n</tool_call></DSML_parameter>\n'
        '<DSML_parameter name="urgent" string="false">true</DSML_parameter>\n</DSML_invoke>\n</DSML_calls>',
    ),
    "granite3": (
        _TOOLS + "{% set told = '<|tool_call|>' %}" + _TURN + _END,
        '<|tool_call|>[{"name": "weather", "arguments": {"city": "Köln", "days": 3}}]',
        '<|tool_call|>[{"name": "weather", "arguments": {"city": "Köln", "days": 3}}, '
        '{"name": "mail", "arguments": {"text": "a \\"b\\" }]{\\n</tool_call>", "urgent": true}}]',
    ),
    "lfm2": (
        "{% if tools %}<|system|>List of tools: {{ tools | tojson }}<|end|>{% endif %}" + _TURN + _END,
        "<|tool_call_start|>[weather(city='Köln', days=3)]<|tool_call_end|>",
        "<|tool_call_start|>[weather(city='Köln', days=3), "
        "mail(text='a \"b\" }]{\\n</tool_call>', urgent=True)]<|tool_call_end|>",
    ),
    "llama4": (
        _template(_PYTHONIC, "<|python_start|>[", "]<|python_end|>"),
        '<|python_start|>[weather(city="Köln", days=3)]<|python_end|>',
        '<|python_start|>[weather(city="Köln", days=3), '
        'mail(text="a \\"b\\" }]{\\n</tool_call>", urgent=True)]<|python_end|>',
    ),
    "pythonic": (
        _template(_PYTHONIC, "[", "]"),
        '[weather(city="Köln", days=3)]',
        """[weather(city='Köln', days=3), mail(text='a "b" }]{\\n</tool_call>', urgent=True)]""",
    ),
    "gemma4": (
        _template(
            "<|tool_call>call:{{ c.function.name }}" + _SORTED.replace("QUOTE", '<|"|>') + "<tool_call|>",
            "",
            "<|tool_response>",
        ),
        '<|tool_call>call:weather{city:<|"|>Köln<|"|>,days:3}<tool_call|>',
        '<|tool_call>call:weather{city:<|"|>Köln<|"|>,days:3}<tool_call|>'
        '<|tool_call>call:mail{text:<|"|>a "b" }]{\n</tool_call><|"|>,urgent:true}<tool_call|>',
    ),
    "functiongemma": (
        _template(
            "<start_function_call>call:{{ c.function.name }}"
            + _SORTED.replace("QUOTE", "<escape>")
            + "<end_function_call>"
        ),
        "<start_function_call>call:weather{city:<escape>Köln<escape>,days:3}<end_function_call>",
        "<start_function_call>call:weather{city:<escape>Köln<escape>,days:3}<end_function_call>"
        '<start_function_call>call:mail{text:<escape>a "b" }]{\n</tool_call><escape>,urgent:true}<end_function_call>',
    ),
    "harmony": (
        _TOOLS + "{% set told = '<|channel|>commentary' %}" + _TURN + _END,
        '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Köln", "days": 3}<|call|>',
        None,
    ),
}
# Says nothing of tools.
PLAIN = _TURN + _END
THINKING = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}{{ '<think>\\n' ~ m.reasoning_content ~ '\\n</think>\\n\\n' }}"
    "{% endif %}{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is not defined or enable_thinking %}{{ '<think>\\n' }}{% endif %}{% endif %}"
)


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


WEATHER = tool("weather", city={"type": "string"}, days={"type": "integer"})
MAIL = tool("mail", text={"type": "string"}, urgent={"type": "boolean"})
CALLS = [
    ("weather", {"city": "Köln", "days": 3}),
    ("mail", {"text": 'a "b" }]{\n</tool_call>', "urgent": True}),
]
