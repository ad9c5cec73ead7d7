"""Chats as the model reads them: messages through the checkpoint's own chat template, special tokens and all."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from keys35.errors import PlanError, SourceError
from keys35.files.atomic import read_json

TEMPLATE, CONFIG = "chat_template.jinja", "tokenizer_config.json"


class ChatTemplate:
    """A checkpoint's chat template, run in a sandbox: it comes with the weights and may not reach anything."""

    def __init__(self, root: Path) -> None:
        """Read `chat_template.jinja`, else what tokenizer_config.json holds; raises SourceError without either."""
        self._root = root
        text = _find(root)
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        try:
            self._template = environment.from_string(text)
        except TemplateError as error:
            raise SourceError(f"{root}: its chat template cannot be read: {error}") from None

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """One chat as text, without a prompt for a next answer; raises PlanError where the template refuses it."""
        try:
            return self._template.render(messages=messages, add_generation_prompt=False)
        except (TemplateError, TypeError, ValueError) as error:
            roles = [message.get("role") for message in messages]
            raise PlanError(f"a chat with roles {roles} does not fit {self._root}'s template: {error}") from None


def _find(root: Path) -> str:
    if (root / TEMPLATE).is_file():
        return (root / TEMPLATE).read_text(encoding="utf-8")
    found = read_json(root / CONFIG).get("chat_template") if (root / CONFIG).is_file() else None
    if not isinstance(found, str):
        raise SourceError(f"calibration text holds chats, and {root} has no {TEMPLATE}, nor one in {CONFIG}: "
                          "fetch it with the checkpoint, or give the chats as text")
    return found


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
