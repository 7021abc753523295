"""Writes data/transcripts.json: conversations as the published chat templates write them, turn by turn.

    python tests/record_transcripts.py

What a template writes for an assistant's turn, behind the prompt that it writes without this turn, is what the model
was trained to say. Turns that a template cannot write are left out; reasoning that it drops is put back in front.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from answer_texts import THINKS, WRITERS
from proa.errors import RequestError
from proa.parsers.choose import ModelFacts, choose
from proa.text.template import ChatTemplate
from proa.types import Chat
from templates import published_templates

FILE = Path(__file__).parent / "data" / "transcripts.json"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES = (
    *("ByteDance-Seed-OSS", "GLM-4.6", "GLM-4.7-Flash", "LFM2.5-8B-A1B", "MiniMax-M2", "Mistral-Nemo-Instruct-2407"),
    *("Mistral-Small-3.2-24B-Instruct-2506", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"),
    *(
        "Qwen-Qwen2.5-7B-Instruct",
        "Qwen-Qwen3-0.6B",
        "Qwen3-Coder",
        "Qwen3.5-4B",
        "StepFun3.5-Flash",
        "Bielik-11B-v3.0",
    ),
    *("deepseek-ai-DeepSeek-V3.1", "deepseek-ai-DeepSeek-V3.2", "deepseek-ai-DeepSeek-V4", "google-gemma-4-31B-it"),
    *("inclusionai-ling-3.0-flash", "meta-llama-Llama-3.1-8B-Instruct", "moonshotai-Kimi-K2", "MiniMax-M1"),
    *("mistralai-Ministral-3-14B-Reasoning-2512", "openai-gpt-oss-120b", "poolside-Laguna-XS.2", "unsloth-Apriel-1.5"),
    *("ibm-granite-granite-4.0", "unsloth-mistral-Devstral-Small-2507", "NousResearch-Hermes-3-Llama-3.1-8B-tool_use"),
)
# Formats of calls that none of these templates writes, with the reasoning of their models.
WRITTEN = {
    "deepseek_v3": "deepseek_r1",
    "kimi_k2": "kimi_k2",
    "nemotron": "qwen3",
    "pythonic": "none",
    "step3p5": "step3p5",
}
_TEXT = {"type": "string", "description": "text"}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Look it up.",
            "parameters": {"type": "object", "properties": properties, "required": []},
        },
    }
    for name, properties in (
        (
            "get_weather",
            {
                "city": _TEXT,
                "days": {"type": "integer", "description": "number"},
                "units": {"type": "array", "items": {"type": "string"}, "description": "some"},
                "zip": _TEXT,
            },
        ),
        ("get_time", {"zone": _TEXT}),
    )
]


def _call(number: int, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": f"call{number:05d}", "type": "function", "function": {"name": name, "arguments": arguments}}


WEATHER = _call(1, "get_weather", {"city": "Köln", "days": 3, "units": ["C", "F"], "zip": "00742"})
TIMES = [_call(2, "get_time", {"zone": "CET"}), _call(3, "get_time", {"zone": 'a "b" {c}, <d>'})]
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "How is the weather in Köln?"},
    {
        "role": "assistant",
        "reasoning_content": "The user wants the weather.\nI must look it up.",
        "content": "One moment.",
        "tool_calls": [WEATHER],
    },
    {"role": "tool", "tool_call_id": "call00001", "name": "get_weather", "content": "21"},
    {"role": "assistant", "reasoning_content": "It is warm.", "content": "It is 21 °C: {warm}, <b>sunny</b>."},
    {"role": "user", "content": "How do I pick my neighbour's lock?"},
    {
        "role": "assistant",
        "reasoning_content": "That may be a crime. I decline.",
        "content": "I'm sorry, I can't help with that.",
    },
    {"role": "user", "content": "Then the time in both zones."},
    {"role": "assistant", "content": "", "tool_calls": TIMES},
]
_END = (
    r"<\|im_end\|>|<seed:eos>|\[e~\[|</s>|<\|eot_id\|>|<｜end▁of▁sentence｜>|<turn\|>|<\|tool_response>|<\|end_of_text\|>"
    r"|<SPECIAL_1[12]>|</assistant>|<\|role_end\|>|<\|return\|>|<\|call\|>|\[e~\[|<end_of_sentence>"
)
_ENDS = re.compile(rf"(\s*({_END}|<\|end\|>))*\s*\Z")
_THINKING = {"enable_thinking": True, "thinking": True}


def turns_of(source: str) -> list[dict[str, Any]]:
    """Return the assistant's turns: the prompt's end, the answer, and what it says."""
    template = ChatTemplate({"default": source}, SPECIAL)
    calls, reasoning = (row.got for row in choose("auto", "auto", ModelFacts(source, True, {})).decisions)
    turns = []
    for number, said in enumerate(TALK):
        if said["role"] != "assistant":
            continue
        for kwargs in (_THINKING, {}, {"enable_thinking": False, "thinking": False}):
            for form in _forms(said, calls, has_reasoning=reasoning != "none"):
                turn = _turn(template, [*map(_plain, TALK[:number])], form, kwargs, reasoning)
                if turn is not None:
                    break
            if turn is not None:
                turns.append(turn)
                break
    return turns


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """History without reasoning, and without text beside calls, which some templates refuse."""
    kept = {key: value for key, value in message.items() if key != "reasoning_content"}
    return {**kept, "content": "", "tool_calls": kept["tool_calls"][:1]} if "tool_calls" in kept else kept


def _forms(said: dict[str, Any], calls: str, *, has_reasoning: bool) -> list[dict[str, Any]]:
    """The turn, then simpler ones: without text beside calls, with one call."""
    whole = said if has_reasoning else {key: value for key, value in said.items() if key != "reasoning_content"}
    if "tool_calls" not in said:
        return [whole]
    return [whole, {**whole, "content": ""}, {**whole, "content": "", "tool_calls": whole["tool_calls"][:1]}]


def _turn(
    template: ChatTemplate, before: list[dict[str, Any]], said: dict[str, Any], kwargs: dict[str, Any], reasoning: str
) -> dict[str, Any] | None:
    try:
        prompt = template.render(Chat(messages=before, tools=TOOLS, template_kwargs=kwargs))
        whole = template.render(
            Chat(messages=[*before, said], tools=TOOLS, template_kwargs=kwargs, add_generation_prompt=False)
        )
    except RequestError:
        return None
    if not whole.startswith(prompt):
        return None
    answer = _ENDS.sub("", whole[len(prompt) :])
    thought = said.get("reasoning_content", "")
    if thought and thought not in answer and reasoning in THINKS:
        begin, end = THINKS[reasoning]
        is_open = prompt.rstrip().endswith(begin.strip())
        if not is_open and prompt.rstrip().endswith(end):
            thought = ""  # the template has ended it
        else:
            answer = f"{'' if is_open else begin}{thought}{end}{answer.removeprefix(end)}"
    functions = [call["function"] for call in said.get("tool_calls", ())]
    num_written = sum(answer.count(name) for name in {f["name"] for f in functions})
    if num_written != len(functions) or said["content"] not in answer or re.search(_END, answer):
        return None
    return {
        "prompt": prompt[-60:],
        "answer": answer,
        "text": said["content"],
        "reasoning": thought,
        "calls": [[f["name"], f["arguments"]] for f in functions],
    }


def written(calls: str, reasoning: str) -> list[dict[str, Any]]:
    """Return the turns in a format, written by answer_texts.py; the prompt opens the reasoning if there is any."""
    begin, end = THINKS.get(reasoning, ("", ""))
    turns = []
    for said in TALK:
        if said["role"] != "assistant":
            continue
        functions = [call["function"] for call in said.get("tool_calls", ())]
        thought = said.get("reasoning_content", "") if begin else ""
        # A list of calls in Python's form begins the answer, and there is one.
        text = "" if functions and calls == "pythonic" else said["content"]
        functions = functions[:1] if calls == "pythonic" else functions
        wrote = "".join("\n" + WRITERS[calls][0](f["name"], f["arguments"]) for f in functions)
        answer = f"{thought}\n{end}\n\n{text}{wrote}" if begin else text + wrote.strip()
        called = [[f["name"], f["arguments"]] for f in functions]
        turns.append({"prompt": f"<|assistant|>{begin}", "answer": answer, "text": text, "reasoning": thought,
                      "calls": called})  # fmt: skip
    return turns


def main() -> None:
    published = published_templates()
    recorded = {}
    for wanted in TEMPLATES:
        name = next(name for name in published if wanted in name)
        calls, reasoning = (row.got for row in choose("auto", "auto", ModelFacts(published[name], True, {})).decisions)
        turns = turns_of(published[name])
        recorded[name] = {"calls": calls, "reasoning": reasoning, "turns": turns}
    for calls, reasoning in WRITTEN.items():
        recorded[f"{calls}, written"] = {"calls": calls, "reasoning": reasoning, "turns": written(calls, reasoning)}
    FILE.write_text(json.dumps(recorded, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
