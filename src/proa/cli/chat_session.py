"""The conversation of `proa chat`: its messages, sampling settings and slash commands."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from proa.cli.api_client import ApiClient, Served, Usage
from proa.cli.prompt_bar import PromptBar, can_show
from proa.config.suggest import did_you_mean
from proa.errors import ProaError, UsageError
from proa.obs.console import write_out
from proa.obs.units import format_duration
from proa.types import SamplingParams

# Fields of SamplingParams that are of no use for one streamed answer in a terminal, or no fields of a request.
_NOT_HERE = {
    "n", "logprobs", "prompt_logprobs", "logit_bias", "constraint", "thinking", "return_progress",
    "use_beam_search", "best_of", "length_penalty", "early_stopping",
}  # fmt: skip
SETTINGS = {f.name: f for f in msgspec.structs.fields(SamplingParams) if f.name not in _NOT_HERE}


def parse_setting(key: str, text: str) -> Any:
    """Parse and check the value of one sampling setting: ("temperature", "0.7") -> 0.7. List items are separated by
    commas. Raises UsageError, RequestError.
    """
    if key not in SETTINGS:
        hint = did_you_mean(key, SETTINGS) or f"The settings are {', '.join(SETTINGS)}."
        raise UsageError(f"There is no setting {key}.", hint, param=key)
    declared = SETTINGS[key].type
    raw: Any = text.split(",") if declared in (tuple[str, ...], tuple[int, ...]) else text
    try:
        value = msgspec.convert(raw, declared, strict=False)
    except msgspec.ValidationError as e:
        raise UsageError(f"{key} is {text!r}: {str(e).lower()}.", "For example: temperature 0.7.") from e
    SamplingParams(**{key: value})  # raises RequestError if out of range
    return value


class Session:
    """One conversation with one model of a server."""

    def __init__(self, client: ApiClient, served: Served, system: str | None, settings: dict[str, Any],
                 notes: Console) -> None:  # fmt: skip
        self._client = client
        self._served = served
        self._roof_tokens_per_s = client.roof_tokens_per_s()
        self._system = system
        self._settings = settings
        self._notes = notes
        self._messages: list[dict[str, str]] = []  # without the system message
        self._commands: dict[str, Callable[[str], None]] = {
            "help": self._help, "clear": self._clear, "system": self._set_system, "set": self._set,
            "retry": self._retry, "save": self._save,
        }  # fmt: skip

    def ask(self, text: str) -> None:
        """Send a user message; stream the answer to stdout, then print its speed to stderr. After KeyboardInterrupt,
        which is raised on, the partial answer stays in the conversation. Raises ProaError."""
        self._messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        reasons = False
        timing = _Timing()
        usage: Usage | None = None
        try:
            shows = can_show(self._notes)
            stream = self._client.stream_chat(self._served.name, self._prompt(), self._settings, progress=shows)
            with closing(stream), PromptBar(self._notes) as bar:
                for piece in stream:
                    if piece.progress is not None:
                        bar.update(piece.progress)
                    if piece.text or piece.reasoning:
                        bar.close()
                        timing.mark()
                    if piece.reasoning:  # on stderr, so that only the answer can be piped on
                        self._notes.print(piece.reasoning, style="dim", markup=False, soft_wrap=True, end="")
                        reasons = True
                    if piece.text:
                        if reasons and not pieces:
                            self._notes.print("\n")
                        pieces.append(piece.text)
                        write_out(piece.text)
                    usage = piece.usage or usage
        finally:
            if reasons and not pieces:
                self._notes.print()  # ends the line
            if pieces:
                write_out("" if pieces[-1].endswith("\n") else "\n")
                self._messages.append({"role": "assistant", "content": "".join(pieces)})
            else:
                self._messages.pop()  # unanswered: remove the user's message
        if usage:
            self._notes.print(timing.line(usage, self._roof_tokens_per_s), style="dim", markup=False, soft_wrap=True)

    def repl(self, read_line: Callable[[], str]) -> None:
        """Read messages and commands until /exit or end of input. Ctrl-C stops the answer, not the program."""
        while True:
            try:
                line = read_line().strip()
                if line in ("/exit", "/quit", "/bye"):
                    return
                self._obey(line)
            except EOFError:
                return
            except KeyboardInterrupt:
                self._note("(stopped; /exit or Ctrl-D exits)")
            except ProaError as error:
                self._note(str(error))

    def _obey(self, line: str) -> None:
        if not line:
            return
        if not line.startswith("/"):
            self.ask(line)
            return
        word, _, rest = line[1:].partition(" ")
        if word not in self._commands:
            hint = did_you_mean(f"/{word}", [f"/{c}" for c in (*self._commands, "exit")])
            raise UsageError(f"There is no command /{word}.", f"{hint} /help lists the commands.".strip())
        self._commands[word](rest.strip())

    def _prompt(self) -> list[dict[str, str]]:
        return [*([{"role": "system", "content": self._system}] if self._system else []), *self._messages]

    def _note(self, text: str) -> None:
        self._notes.print(text, style="dim", markup=False, soft_wrap=True)

    def _help(self, _: str) -> None:
        self._note(HELP)

    def _clear(self, _: str) -> None:
        self._messages.clear()
        self._note("The conversation is cleared.")

    def _set_system(self, text: str) -> None:
        self._system = text or None
        self._note("System message set." if text else "System message removed.")

    def _set(self, text: str) -> None:
        key, _, value = text.replace("=", " ", 1).partition(" ")
        if key and not value.strip():
            raise UsageError(f"/set {key} has no value.", "Write /set KEY VALUE, or /set KEY default.")
        if value.strip() == "default":
            self._settings.pop(key, None)
        elif key:
            self._settings[key] = parse_setting(key, value.strip())
        shown = ", ".join(f"{k} {v}" for k, v in self._settings.items())
        self._note(f"Settings: {shown or 'the defaults of the model'}.")

    def _retry(self, _: str) -> None:
        if len(self._messages) < 2:
            raise UsageError("There is no answer to retry.")
        before = list(self._messages)
        self._messages.pop()
        try:
            self.ask(self._messages.pop()["content"])
        except (ProaError, KeyboardInterrupt) as error:
            if isinstance(error, ProaError) or len(self._messages) < len(before):  # else a partial answer replaces it
                self._messages = before
            raise

    def _save(self, file: str) -> None:
        if not file:
            raise UsageError("/save has no file name.", "Write /save FILE.")
        conversation = {"model": self._served.name, "settings": self._settings, "messages": self._prompt()}
        try:
            Path(file).expanduser().write_text(json.dumps(conversation, indent=2, ensure_ascii=False) + "\n", "utf-8")
        except OSError as e:
            raise UsageError(f"{file} cannot be written: {e.strerror}.", "Choose another file.") from e
        self._note(f"Saved to {file}.")


class _Timing:
    """Arrival times of an answer's pieces, measured at the client."""

    def __init__(self) -> None:
        self._asked_s = time.monotonic()
        self._marks_s: list[float] = []

    def mark(self) -> None:
        self._marks_s.append(time.monotonic())

    def line(self, usage: Usage, roof_tokens_per_s: float | None) -> str:
        """Format the answer's speed; tokens/s is measured from the first token to the last, so it is decode only."""
        words = [f"{usage.completion_tokens} tokens"]
        if self._marks_s:
            first_s, last_s = self._marks_s[0], self._marks_s[-1]
            if usage.completion_tokens > 1 and last_s > first_s:
                rate = (usage.completion_tokens - 1) / (last_s - first_s)
                roof = f" of at most {roof_tokens_per_s:.0f}" if roof_tokens_per_s else ""
                share = f" ({100 * rate / roof_tokens_per_s:.0f} %)" if roof_tokens_per_s else ""
                words.append(f"{rate:.1f} tokens/s{roof}{share}")
            words.append(f"first token after {format_duration(first_s - self._asked_s)}")
        cached = f", {usage.cached_tokens} of them cached" if usage.cached_tokens else ""
        words.append(f"prompt {usage.prompt_tokens} tokens{cached}")
        return "; ".join(words)


HELP = f"""\
/system TEXT      set the system message; without TEXT, remove it
/set KEY VALUE    {", ".join(SETTINGS)}
                  /set KEY default resets a setting; /set alone shows the settings
/retry            generate the last answer again
/clear            start a new conversation
/save FILE        write the conversation as JSON
/exit             exit (or Ctrl-D); Ctrl-C stops an answer"""
