"""Chat templates are rendered as by transformers, and a template's errors become RequestErrors."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from proa.errors import RequestError, TokenizerError
from proa.text.template import ChatTemplate
from proa.types import Chat

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": '2 < 3 & "ü"?\n'},
    {"role": "assistant", "content": "Yes. "},
    {"role": "user", "content": "And 😀?"},
]
ANSWERED = [*TALK, {"role": "assistant", "content": "Sure, it is  "}]
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "wetter",
            "description": "Gibt <Wetter> für einen Ort",
            "parameters": {"type": "object", "properties": {"ort": {"type": "string"}}, "required": ["ort"]},
        },
    }
]
CALLING: list[dict[str, Any]] = [
    {"role": "user", "content": "Wetter in Köln?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "I must ask.",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "wetter", "arguments": {"ort": "Köln"}}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "12 °C"},
]

# Small templates in the style of published ones.
TEMPLATES = {
    "chatml": "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "trimmed blocks": """{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {{- '<<SYS>>' + message.content | trim + '<</SYS>>' }}
    {% else %}
  [{{ message.role | upper }}] {{ message.content }}
    {% endif %}
{% endfor %}
{%- if add_generation_prompt %}[ASSISTANT]{% endif %}
""",
    "namespace and reversed": """{%- set ns = namespace(last_user=-1, count=0) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.last_user < 0 and message.role == "user" %}{%- set ns.last_user = index %}{%- endif %}
    {%- set ns.count = ns.count + 1 %}
{%- endfor %}
{{- ns.last_user ~ '/' ~ ns.count }}{% for m in messages if m.role != 'system' %}|{{ m.content.strip() }}{% endfor %}
{%- if add_generation_prompt %}>
{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{% endif %}""",
    "loop controls": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}"
    "{% if loop.index > 2 %}{% break %}{% endif %};{% endfor %}",
    "tools": "{%- if tools %}{{ tools | tojson }}|{% for tool in tools %}{{ tool | tojson(indent=4) }}"
    "{{ tool.function.parameters | tojson(ensure_ascii=True, separators=(',', ':'), sort_keys=True) }}"
    "{% endfor %}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content if m.content is not none }}"
    "{% if m.reasoning_content is defined and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% for k, v in c.function.arguments | items %}[{{ k }}={{ v }}]{% endfor %}</call>{% endfor %}{% endfor %}",
    "macro": """{%- macro turn(m, last=false) -%}
<{{ m.role }}{% if last %} last{% endif %}>{{ caller() if caller else m.content }}
{%- endmacro -%}
{%- for m in messages %}{{ turn(m, last=loop.last) }}{% endfor %}""",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}"
    "{% endgeneration %}{% else %}[{{ m.content }}]{% endif %}{% endfor %}",
    "date": "{{ strftime_now('%Y') }}"
    "{% if not date_string is defined %}{% set date_string = '26 Jul 2024' %}{% endif %}"
    "{{ date_string }}{% for m in messages %}{{ m['content'] }}{% endfor %}",
    "undefined variables": "{{ pad_token }}{% if documents %}D{% endif %}"
    "{% for m in messages %}{{ m.name }}{{ m.content }}"
    "{{ m.get('missing', '-') }}{% endfor %}{{ dict(a=1) }}",
    "typed content": "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}",
}  # fmt: skip


def render(template: str, chat: Chat) -> str:
    return ChatTemplate({"default": template}, SPECIAL).render(chat)


def reference(template: str, chat: Chat) -> str:
    rendered, _ = render_jinja_template(
        [chat.messages],
        tools=chat.tools,
        chat_template=template,
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
        **{**SPECIAL, **chat.template_kwargs},
    )
    return str(rendered[0])


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(
    "chat",
    [
        Chat(messages=TALK),
        Chat(messages=TALK, add_generation_prompt=False),
        Chat(messages=TALK, template_kwargs={"enable_thinking": False, "date_string": "today"}),
        Chat(messages=ANSWERED, add_generation_prompt=False, tools=TOOLS),
    ],
    ids=["plain", "no generation prompt", "kwargs", "tools"],
)
def test_as_transformers_renders(name: str, chat: Chat) -> None:
    assert render(TEMPLATES[name], chat) == reference(TEMPLATES[name], chat)


def test_tool_calls_as_transformers_renders() -> None:
    chat = Chat(messages=CALLING, tools=TOOLS)
    assert render(TEMPLATES["tools"], chat) == reference(TEMPLATES["tools"], chat)
    assert "I must ask." in render(TEMPLATES["tools"], chat)


def test_openai_sends_arguments_as_json_text() -> None:
    """Templates expect arguments as objects; OpenAI's JSON text must give the same prompt."""
    as_text = json.loads(json.dumps(CALLING))
    function = as_text[1]["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(function["arguments"])
    template = TEMPLATES["tools"]
    assert render(template, Chat(messages=as_text)) == render(template, Chat(messages=CALLING))
    assert isinstance(function["arguments"], str)  # the caller's messages are not modified


@pytest.mark.parametrize("arguments", [{"ort": "Köln"}, '{"ort": "Köln"}', {}, "", None])
def test_templates_that_join_arguments_to_text_get_json(arguments: Any) -> None:
    """Those of DeepSeek-V3 and R1 refuse objects."""
    source = (
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c.type + ':' + c.function.name + c.function.arguments }}"
        "{% endfor %}{% endfor %}"
    )
    call = {"id": "c1", "type": "function", "function": {"name": "wetter", "arguments": arguments}}
    chat = Chat(messages=[{"role": "assistant", "content": "", "tool_calls": [call]}])
    template = ChatTemplate({"default": source}, {})
    assert template.render(chat) == "function:wetter" + ('{"ort": "Köln"}' if arguments else "{}")
    assert template.renders_calls


@pytest.mark.parametrize("function", [{"arguments": ""}, {"arguments": " "}, {"arguments": None}, {}])
def test_a_call_without_arguments(function: dict[str, Any]) -> None:
    """Agents send what they got: an empty text for a function without parameters."""
    source = "{% for k, v in messages[0].tool_calls[0].function.arguments | items %}{{ k }}{% endfor %}called"
    call = {"id": "c1", "type": "function", "function": {"name": "now", **function}}
    chat = Chat(messages=[{"role": "assistant", "content": "", "tool_calls": [call]}])
    assert ChatTemplate({"default": source}, {}).render(chat) == "called"


@pytest.mark.parametrize("name", ["chatml", "trimmed blocks", "macro", "generation", "typed content"])
@pytest.mark.parametrize("end", ["", " ", "  \n"], ids=["bare", "space", "spaces"])
def test_continue_final_message_as_transformers_renders(name: str, end: str) -> None:
    final = {"role": "assistant", "content": "Sure, it" + end}
    chat = Chat(messages=[*TALK, final], add_generation_prompt=False, continue_final_message=True)
    text = render(TEMPLATES[name], chat)
    assert text == reference(TEMPLATES[name], chat)
    assert text.rstrip().endswith("Sure, it")


@pytest.mark.parametrize(
    ("messages", "generation_prompt", "says"),
    [
        ([{"role": "assistant", "content": None}], False, "no text to continue"),
        ([], False, "no text to continue"),
        ([{"role": "system", "content": "dropped"}], False, "drops the final message"),
        ([{"role": "assistant", "content": "x"}], True, "exclude each other"),
    ],
)
def test_continue_final_message_errors(messages: list[dict[str, Any]], generation_prompt: bool, says: str) -> None:
    chat = Chat(messages=messages, add_generation_prompt=generation_prompt, continue_final_message=True)
    with pytest.raises(RequestError, match=says):
        render(TEMPLATES["loop controls"], chat)


def test_text_parts_are_joined_where_the_template_knows_no_parts() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    as_parts, as_text = ([{"role": "user", "content": content}] for content in (parts, "one\ntwo"))
    for name in ("chatml", "trimmed blocks", "loop controls"):
        assert render(TEMPLATES[name], Chat(messages=as_parts)) == render(TEMPLATES[name], Chat(messages=as_text))
    assert render(TEMPLATES["typed content"], Chat(messages=as_parts)) == "onetwo"


def test_an_image_is_refused() -> None:
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    with pytest.raises(RequestError, match=r"image_url.*reads text only") as caught:
        render(TEMPLATES["chatml"], Chat(messages=[message]))
    assert caught.value.http_status == 400


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('Roles must alternate user/assistant.') }}", "Roles must alternate user/assistant. "),
        ("{{ messages[0]['content'] + 1 }}", "rejects this conversation"),
        ("{{ messages[9].content.x }}", "rejects this conversation"),
        ("{{ ''.__class__.__mro__ }}", r"unsafe.*--chat-template"),
        ("{% set ns = namespace(_x=1) %}", r"underscore.*--chat-template"),
        ("{% set ids = [] %}{% set _ = ids.append(1) %}", r"'append'.*unsafe.*--chat-template"),
        ("{{ 1 / 0 }}", "rejects this conversation"),
    ],
)
def test_template_errors_are_request_errors(template: str, says: str) -> None:
    with pytest.raises(RequestError, match=says) as caught:
        render(template, Chat(messages=TALK))
    assert caught.value.http_status == 400


def test_invalid_jinja_is_a_tokenizer_error() -> None:
    with pytest.raises(TokenizerError, match=r"not valid Jinja.*--chat-template"):
        ChatTemplate({"default": "{% if %}"}, {})


def test_the_tool_template_is_taken_with_tools_only() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "tools"}, {})
    assert template.render(Chat(messages=TALK)) == "plain"
    assert template.render(Chat(messages=TALK, tools=TOOLS)) == "tools"
    assert ChatTemplate({"default": "plain"}, {}).render(Chat(messages=TALK, tools=TOOLS)) == "plain"


def test_without_a_default_template_the_others_are_named() -> None:
    with pytest.raises(RequestError, match="only rag"):
        ChatTemplate({"rag": "x"}, {}).render(Chat(messages=TALK))
