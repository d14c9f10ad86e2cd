"""Chat templates: programs of a stranger, rendered in a process of their own, with limits.

A template is Jinja in the sandbox of transformers: it reaches no file and no Python object. What a
sandbox does not bound is work: ``{% for %}`` in ``{% for %}``, ``9 ** (9 ** 9)``, ``"x" * 10**9``.
The operating system does: the process that renders has ``SECONDS`` of CPU time, ``BYTES`` of memory
and no files to write, and answers with at most ``LONGEST`` characters a chat. One process renders
all the chats of a call; it imports Jinja and nothing else.

The names that a template finds are those of transformers' ``apply_chat_template``.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

SECONDS, BYTES, LONGEST = 10, 2**30, 2**18
PATIENCE = 60  # seconds of CPU time may take so many more on a crowded machine


def render(
    template: str, chats: list[list[dict]], words: Mapping[str, Any], model: str = "the model"
) -> list[str]:
    """Each chat (messages of role and content) as text that opens the answer's turn.

    ``words``: the special tokens; ``model``: its folder, for a message. Raises ValueError for a
    template that fails or does not end.
    """
    asked = json.dumps({"template": template, "chats": chats, "words": words, "seconds": SECONDS})
    command = [sys.executable, "-P", str(Path(__file__))]
    try:
        done = subprocess.run(
            command, input=asked.encode(), capture_output=True, timeout=SECONDS * PATIENCE
        )
        failed = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        told = {"error": failed[0]} if done.returncode > 0 and failed else json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        told = {"error": f"it took more than {SECONDS} s or {BYTES >> 20} MiB"}
    if "error" in told:
        allowed = "one that renders, in its limits"
        raise ValueError(
            f"chat_template: that of {model} fails: {told['error']}; allowed {allowed}"
        )
    return told["chats"]


# ------------------------------------------------------------------------------- the other process
def environment() -> Any:
    """Jinja as transformers sets it up."""
    import jinja2
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` marks what an assistant wrote; here it says nothing."""

        tags = {"generation"}

        def parse(self, parser: Any) -> list:
            """The statements inside."""
            next(parser.stream)
            return parser.parse_statements(["name:endgeneration"], drop_needle=True)

    class Names(jinja2.utils.Namespace):
        """``namespace(..)``, without names that begin with an underscore."""

        def __init__(*args: Any, **words: Any) -> None:  # as Jinja's: a word may be ``self``
            self, given = args[0], dict(*args[1:], **words)
            jinja2.utils.Namespace.__init__(self, {_public(key): given[key] for key in given})

        def __setitem__(self, name: str, value: Any) -> None:
            super().__setitem__(_public(name), value)

    def _public(name: Any) -> Any:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"namespace: got {name!r}; allowed no underscore")
        return name

    def tojson(x: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        how = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
        return json.dumps(x, ensure_ascii=ensure_ascii, **how)  # Jinja's own escapes HTML

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    extensions = [Generation, "jinja2.ext.loopcontrols"]
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions
    )
    made.filters["tojson"] = tojson
    made.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda pattern: datetime.now().strftime(pattern),
        "dict": lambda *args, **words: dict(*args, **words),  # a class would show its attributes
        "namespace": Names,
    }
    return made


def _answer(asked: dict) -> dict:
    try:
        template = environment().from_string(asked["template"])
        words = asked["words"] | {"tools": None, "documents": None, "add_generation_prompt": True}
        found = [template.render(messages=chat, **words) for chat in asked["chats"]]
    except MemoryError:
        return {"error": f"it needs more than {BYTES >> 20} MiB"}
    except Exception as error:  # whatever a stranger's program may raise
        return {"error": f"{type(error).__name__}: {str(error)[:500]}"}
    if not all(text.strip() for text in found):
        return {"error": "it renders nothing"}
    longest = max(map(len, found), default=0)
    if longest > LONGEST:
        return {"error": f"it wrote {longest} characters; allowed up to {LONGEST}"}
    return {"chats": found}


def _limit(seconds: int) -> None:
    limits = {"RLIMIT_CPU": seconds, "RLIMIT_AS": BYTES, "RLIMIT_FSIZE": 0, "RLIMIT_CORE": 0}
    for name, most in limits.items():
        kind = getattr(resource, name)
        _, hard = resource.getrlimit(kind)
        low = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (low, hard))


def _main() -> None:
    asked = json.loads(sys.stdin.buffer.read())
    _limit(asked["seconds"])
    sys.stdout.buffer.write(json.dumps(_answer(asked)).encode())


if __name__ == "__main__":
    _main()
