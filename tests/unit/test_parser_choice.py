"""Which parsers a model gets: from its template, vocabulary and config, or by name; and the rewriting of messages."""

from __future__ import annotations

import re
from typing import Any

import pytest

from proa.errors import RequestError, UsageError
from proa.parsers.choose import CALL_NAMES, REASONING_NAMES, ModelFacts, choose
from proa.parsers.formats import CALL_ALIASES, REASONING_ALIASES
from proa.text.conversation import Rendered, SystemTools, render
from proa.text.template import ChatTemplate
from proa.types import Chat
from templates import published_templates

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
# (tool calls, reasoning) of published templates; the others have formats that are not known, and get none.
EXPECTED = {
    "Bielik-11B-v3.0-Instruct": ("hermes", "qwen3"),
    "ByteDance-Seed-OSS": ("qwen3_coder", "seed_oss"),
    "GLM-4.6": ("glm45", "glm45"),
    "GLM-4.7-Flash": ("glm47", "glm45"),
    "Kimi-K2-Instruct": ("kimi_k2", "none"),
    "Kimi-K2-Thinking": ("kimi_k2", "kimi_k2"),
    "LFM2.5-8B-A1B": ("lfm2", "qwen3"),
    "MiMo-VL": ("hermes", "none"),
    "MiniMax-M2": ("minimax_m2", "minimax_m2"),
    "MiniMax-M3": ("none", "minimax_m3"),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral", "none"),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("qwen3_coder", "qwen3"),
    "NVIDIA-Nemotron-Nano-v2": ("nemotron", "qwen3"),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": ("hermes", "none"),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("hermes", "none"),
    "Qwen-QwQ-32B": ("hermes", "qwen3"),
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", "none"),
    "Qwen-Qwen3-0.6B": ("hermes", "qwen3"),
    "Qwen3-Coder": ("qwen3_coder", "none"),
    "Qwen3.5-4B": ("qwen3_coder", "qwen3"),
    "StepFun3.5-Flash": ("qwen3_coder", "qwen3"),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": ("deepseek_v3", "deepseek_r1"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("deepseek_v3", "deepseek_r1"),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek_v31", "deepseek_r1"),
    "deepseek-ai-DeepSeek-V3.2": ("deepseek_v32", "deepseek_r1"),
    "deepseek-ai-DeepSeek-V4": ("deepseek_v32", "deepseek_r1"),
    "fireworks-ai-llama-3-firefunction-v2": ("hermes", "none"),  # the template ignores tools
    "google-gemma-2-2b-it": ("hermes", "none"),  # the template ignores tools
    "google-gemma-4-31B-it": ("gemma4", "gemma4"),
    "ibm-granite-granite-4.0": ("hermes", "none"),
    "inclusionai-ling-3.0-flash": ("glm47", "glm45"),
    "llama-cpp-deepseek-r1": ("deepseek_v3", "deepseek_r1"),
    "meta-llama-Llama-3.1-8B-Instruct": ("llama3_json", "none"),
    "meta-llama-Llama-3.2-3B-Instruct": ("llama3_json", "none"),
    "meta-llama-Llama-3.3-70B-Instruct": ("llama3_json", "none"),
    "microsoft-Phi-3.5-mini-instruct": ("hermes", "none"),  # the template ignores tools
    "mistralai-Ministral-3-14B-Reasoning-2512": ("mistral", "mistral"),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", "none"),
    "moonshotai-Kimi-K2": ("kimi_k2", "none"),
    "openai-gpt-oss-120b": ("gpt_oss", "gpt_oss"),
    "poolside-Laguna-XS.2": ("glm47", "glm45"),
    "Apriel-1.6-15b-Thinker-fixed": ("apriel", "none"),
    "MiniMax-M1": ("apriel", "none"),
    "unsloth-Apriel-1.5": ("apriel", "none"),
    "unsloth-mistral-Devstral-Small-2507": ("mistral", "none"),
}
UNKNOWN = (
    *("Apertus-8B-Instruct", "Cohere2MoE", "GigaChat3-10B-A1.8B", "Kimi-K3"),
    *("meetkai-functionary-medium-v3.1", "openbmb-MiniCPM5-1B", "tencent-Hy3", "upstage-Solar-Open-100B"),
)
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "wetter", "parameters": {"type": "object", "properties": {}}}}
]


@pytest.fixture(scope="module")
def published() -> dict[str, str]:
    return published_templates()


def described(source: str) -> ModelFacts:
    template = ChatTemplate({"default": source}, SPECIAL)
    return ModelFacts(template.source, template.renders_tools, {})


def test_published_templates(published: dict[str, str]) -> None:
    assert len(published) == 70
    got = {}
    for name in EXPECTED:
        calls, reasoning = choose("auto", "auto", described(published[name])).decisions
        got[name] = (calls.got, reasoning.got)
        assert calls.why
        assert reasoning.why
    assert got == EXPECTED
    for name in UNKNOWN:
        calls, _ = choose("auto", "auto", described(published[name])).decisions
        assert (calls.got, calls.why) == ("none", "the chat template has no known form of calls"), name


def test_every_published_template_is_read(published: dict[str, str]) -> None:
    """No template makes the choice fail, whatever it contains."""
    for name, source in published.items():
        chosen = choose("auto", "auto", described(source))
        assert chosen.format.parser(None, "", "", 0).finish("stop") == [], name


def test_prompts_that_open_the_reasoning(published: dict[str, str]) -> None:
    """The state in which an answer begins comes from the prompt's end."""
    for name, variables, opens in (
        ("Qwen-Qwen3-0.6B", {}, False),
        ("Qwen-Qwen3-0.6B", {"enable_thinking": False}, False),
        ("Qwen-QwQ-32B", {}, False),
        ("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", {"enable_thinking": True}, True),
        ("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", {}, False),
        ("GLM-4.7-Flash", {}, True),
        ("Qwen3.5-4B", {"enable_thinking": True}, True),
        ("Qwen3.5-4B", {"enable_thinking": False}, False),
        ("MiniMax-M2", {}, True),
        ("GLM-4.6", {}, False),
        ("deepseek-ai-DeepSeek-V3.1", {"thinking": True}, True),
        ("deepseek-ai-DeepSeek-V3.1", {"thinking": False}, False),
        ("openai-gpt-oss-120b", {}, False),
    ):
        source = published[name]
        chat = Chat(messages=[{"role": "user", "content": "What is <think>?"}], template_kwargs=variables)
        prompt = ChatTemplate({"default": source}, SPECIAL).render(chat)
        parser = choose("auto", "auto", described(source)).format.parser(None, prompt, "", 0)
        assert parser.in_reasoning == opens, (name, variables)


def test_a_continued_answer_goes_on_in_its_reasoning() -> None:
    format_ = choose("hermes", "qwen3", ModelFacts("", True, {})).format
    assert format_.parser(None, "<think>\nI am", "<think>\nI am", 0).in_reasoning
    assert not format_.parser(None, "<think>a</think>So", "<think>a</think>So", 0).in_reasoning


@pytest.mark.parametrize("name", [*CALL_NAMES, *CALL_ALIASES, "qwen3-coder", "Kimi-K2", "deepseek-v3"])
def test_names_of_call_parsers(name: str) -> None:
    reasoning = "gpt_oss" if choose_is_harmony(name) else "none"
    assert choose(name, reasoning, ModelFacts("", True, {})).decisions[0].asked == name


def choose_is_harmony(name: str) -> bool:
    return CALL_ALIASES.get(name, name) == "gpt_oss"


@pytest.mark.parametrize("name", [*REASONING_NAMES, *REASONING_ALIASES, "deepseek-r1", "qwen3-thinking", "gpt-oss"])
def test_names_of_reasoning_parsers(name: str) -> None:
    is_harmony = REASONING_ALIASES.get(name, name).replace("-", "_") == "gpt_oss"
    choose("gpt_oss" if is_harmony else "none", name, ModelFacts("", True, {}))


def test_names_that_are_refused() -> None:
    with pytest.raises(UsageError, match="--tool-call-parser is 'hermess'"):
        choose("hermess", "auto", ModelFacts("", True, {}))
    with pytest.raises(UsageError, match="both to gpt_oss"):
        choose("gpt_oss", "qwen3", ModelFacts("", True, {}))


def test_the_vocabulary_and_the_type_decide_without_a_template() -> None:
    by_token = choose("auto", "auto", ModelFacts("{{ messages }} {{ tools }}", True, {7: "<think>", 8: "</think>"}))
    assert by_token.decisions[1].got == "qwen3"
    assert "the token <think>" in by_token.decisions[1].why
    by_type = choose("auto", "auto", ModelFacts("{{ messages }} {{ tools }}", True, {}, "gpt_oss"))
    assert [row.got for row in by_type.decisions] == ["gpt_oss", "gpt_oss"]


def chatml(*, alternates: bool = False, refuses_system: bool = False) -> ChatTemplate:
    checks = "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}" if refuses_system else ""
    if alternates:
        checks += (
            "{% if loop.index0 and m.role == 'system' %}{{ raise_exception('late system') }}{% endif %}"
            "{% if loop.index0 and messages[loop.index0 - 1].role == m.role %}{{ raise_exception('twice') }}{% endif %}"
        )
    source = "{% for m in messages %}" + checks + "[{{ m.role }}]{{ m.content }}{% endfor %}"
    return ChatTemplate({"default": source}, SPECIAL)


TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "A"},
    {"role": "user", "content": "B"},
    {"role": "user", "content": [{"type": "text", "text": "C"}]},
    {"role": "assistant", "content": "D"},
    {"role": "system", "content": "E"},
    {"role": "user", "content": "F"},
]


def test_messages_are_merged_only_where_the_template_refuses_them() -> None:
    plain = render(chatml().render, Chat(messages=TALK), None)
    assert (plain.text, plain.is_merged) == ("[system]A[user]B[user]C[assistant]D[system]E[user]F", False)
    merged = render(chatml(alternates=True).render, Chat(messages=TALK), None)
    assert (merged.text, merged.is_merged) == ("[system]A\n\nE[user]B\n\nC[assistant]D[user]F", True)
    moved = render(chatml(alternates=True, refuses_system=True).render, Chat(messages=TALK), None)
    assert (moved.text, moved.is_merged) == ("[user]A\n\nE\n\nB\n\nC[assistant]D[user]F", True)
    never = ChatTemplate({"default": "{{ raise_exception('never') }}"}, SPECIAL)
    with pytest.raises(RequestError, match="never"):
        render(never.render, Chat(messages=TALK), None)


def called(number: int, **more: Any) -> dict[str, Any]:
    return {
        "id": f"call{number}",
        "type": "function",
        "function": {"name": "wetter", "arguments": {"n": number}},
        **more,
    }


FIRST_ONLY = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}<{{ m.role }}>{{ m.content | trim }}{% endif %}"
    "{% endfor %}"
)


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([("system", "One."), ("system", "Two."), ("user", "Hi")], "<system>One.\n\nTwo.<user>Hi"),
        ([("user", "Hi"), ("assistant", "Ho"), ("system", " Be brief.\n"), ("user", "So?")],
         "<system>Be brief.<user>Hi<assistant>Ho<user>So?"),
        ([("system", "One."), ("user", "Hi"), ("system", " "), ("user", "So?")], "<system>One.<user>Hi<user>So?"),
    ],
    ids=["two", "late", "empty"],
)  # fmt: skip
def test_system_messages_that_a_template_leaves_out(messages: list[tuple[str, str]], text: str) -> None:
    """gpt-oss' and MiniMax-M2's templates write only the first message's, and refuse none."""
    template = ChatTemplate({"default": FIRST_ONLY}, {})
    chat = Chat(messages=[{"role": role, "content": content} for role, content in messages])
    assert render(template.render, chat, None) == Rendered(text, is_merged="One.\n" in text or "Be brief" in text)


def test_tools_without_descriptions_beside_a_late_system_message() -> None:
    source = FIRST_ONLY + "{% for t in tools %}{{ t.function.description + '' }}{% endfor %}"
    tools = [{"type": "function", "function": {"name": "f"}}]
    talk = [{"role": "user", "content": "Hi"}, {"role": "system", "content": "Be brief."}]
    rendered = render(ChatTemplate({"default": source}, {}).render, Chat(messages=talk, tools=tools), None)
    assert rendered == Rendered("<system>Be brief.<user>Hi", is_merged=True)


def test_a_template_that_shows_no_system_message() -> None:
    template = ChatTemplate({"default": "{{ messages | length }}"}, {})
    talk = [{"role": "user", "content": "Hi"}, {"role": "system", "content": "Be brief."}]
    assert render(template.render, Chat(messages=talk), None) == Rendered("2")


@pytest.mark.parametrize("name", ["openai-gpt-oss-120b", "meta-llama-Llama-3.1-8B-Instruct"])
def test_calls_in_a_form_that_the_template_refuses(name: str, published: dict[str, str]) -> None:
    """gpt-oss' template takes no text beside reasoning and a call; Llama 3's takes one call a message."""
    template = ChatTemplate({"default": published[name]}, SPECIAL)
    calls = [called(1)] if "gpt-oss" in name else [called(1), called(2)]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": f"result {call['id']}"} for call in calls]
    answer = {"role": "assistant", "content": "One moment.", "reasoning_content": "I must ask.", "tool_calls": calls}
    chat = Chat(messages=[{"role": "user", "content": "Wetter?"}, answer, *reversed(results)], tools=TOOLS)
    with pytest.raises(RequestError):
        template.render(chat)
    rendered = render(template.render, chat, None)
    assert rendered.is_merged
    found = [rendered.text.index(text) for text in ("Wetter?", *(f"result {call['id']}" for call in calls))]
    assert found == sorted(found)
    if "gpt-oss" in name:
        assert "analysis<|message|>I must ask.\n\nOne moment.<|end|>" in rendered.text
    else:
        assert rendered.text.count('{"name": "wetter"') == 2


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be brief."}]], ids=["plain", "late system"])
@pytest.mark.parametrize("name", ["mistralai-Mistral-Nemo-Instruct-2407", "Mistral-Small-3.2-24B-Instruct-2506"])
def test_ids_of_calls_that_the_template_refuses(
    name: str, system: list[dict[str, Any]], published: dict[str, str]
) -> None:
    """Mistral's templates take ids of nine letters and digits; the ids of another model's calls are longer."""
    template = ChatTemplate({"default": published[name]}, SPECIAL)
    ids = ["call_x1y2z3", "a1B2c3D4e", "call_x1y2z4"]
    calls = [called(number, id=call_id) for number, call_id in enumerate(ids)]
    results = [
        {"role": "tool", "tool_call_id": call_id, "content": f"result {number}"} for number, call_id in enumerate(ids)
    ]
    answer = {"role": "assistant", "content": "", "tool_calls": calls}
    end = [{"role": "assistant", "content": "Fine."}, *system, {"role": "user", "content": "And then?"}]
    chat = Chat(messages=[{"role": "user", "content": "Wetter?"}, answer, *results, *end], tools=TOOLS)
    rendered = render(template.render, chat, None)
    assert rendered == render(ChatTemplate({"default": published[name]}, SPECIAL).render, chat, None)
    assert rendered.is_merged == bool(system)
    shown = re.findall(r'"id": "(\w{9})"|\[CALL_ID\](\w{9})\[ARGS\]', rendered.text)
    first, kept, last = ("".join(pair) for pair in shown)
    assert kept == ids[1]
    assert first != last
    assert chat.messages[1]["tool_calls"][0]["id"] == ids[0]
    assert [rendered.text.count(short) for short in (first, kept, last)] == [2, 2, 2]
    assert all(f"result {number}" in rendered.text for number in range(3))


@pytest.mark.parametrize("name", ["wetter", "ARGUMENTS_of_NAME"])
def test_tools_for_a_template_that_ignores_them(name: str) -> None:
    template = chatml()
    chosen = choose("auto", "auto", ModelFacts(template.source, template.renders_tools, {}))
    assert "the chat template ignores tools" in chosen.decisions[0].why
    calling = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Wetter?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": name, "arguments": '{"a": 1}'}}]},
        {"role": "tool", "content": "12"},
        {"role": "tool", "content": "13"},
    ]
    tools = SystemTools(chosen.system_call, template.renders_calls)
    rendered = render(template.render, Chat(messages=calling, tools=TOOLS), tools)
    assert rendered.has_system_tools
    assert rendered.text.count("[system]") == 1
    assert '"name": "wetter"' in rendered.text
    assert "Be brief." in rendered.text
    assert f'[assistant]<tool_call>\n{{"name": "{name}", "arguments": {{"a": 1}}}}\n</tool_call>[user]' in rendered.text
    assert rendered.text.endswith("12\n</tool_response>\n\n<tool_response>\n13\n</tool_response>")
    later = render(template.render, Chat(messages=calling), tools)  # a request without tools keeps earlier calls
    assert later.text == "[system]Be brief." + rendered.text[rendered.text.index("[user]") :]
    assert (later.has_system_tools, later.is_merged) == (False, True)
    without = render(template.render, Chat(messages=calling[:2]), tools)
    assert (without.text, without.has_system_tools) == ("[system]Be brief.[user]Wetter?", False)
