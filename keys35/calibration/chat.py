"""Chats as the model reads them: messages through the checkpoint's own chat template, special tokens and all."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from keys35.calibration.text import read_utf8
from keys35.errors import PlanError, SourceError
from keys35.files.atomic import read_json

TEMPLATE, CONFIG = "chat_template.jinja", "tokenizer_config.json"
SPECIAL = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


class ChatTemplate:
    """A checkpoint's chat template, run in a sandbox: it comes with the weights and may not reach anything.

    It finds what transformers gives one: loop controls, the special tokens by name, and no tools or documents.
    """

    def __init__(self, root: Path) -> None:
        """Read `chat_template.jinja`, else what tokenizer_config.json holds; raises SourceError without either."""
        self._root = root
        config = _config(root)
        text = _find(root, config)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "tools": None, "documents": None, **_special_tokens(config)}
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


def _config(root: Path) -> dict[str, Any]:
    found = read_json(root / CONFIG, SourceError, "fetch it again") if (root / CONFIG).is_file() else {}
    return found if isinstance(found, dict) else {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """By the names that templates use; each is text, or an object that holds it."""
    given = {name: config.get(name) for name in SPECIAL}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in given.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _find(root: Path, config: Mapping[str, Any]) -> str:
    if (root / TEMPLATE).is_file():
        return read_utf8(root / TEMPLATE, SourceError)
    found = config.get("chat_template")
    if not isinstance(found, str):
        raise SourceError(f"calibration text holds chats, and {root} has no {TEMPLATE}, nor one in {CONFIG}: "
                          "fetch it with the checkpoint, or give the chats as text")
    return found


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
