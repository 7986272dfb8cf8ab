"""Writes docs/configuration.md from the settings: `python -m agentrl.config.docs`, with `--check` for CI."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from agentrl.config.compatibility import TRANSLATIONS, UNAVAILABLE
from agentrl.config.load import ENVIRONMENT_PREFIX, PLAIN_VARIABLES
from agentrl.config.settings import Setting, sections, settings_index, show_value

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "configuration.md"

_PLAIN = ", ".join(f"`{name}`" for name in PLAIN_VARIABLES)
_HEAD = f"""# Configuration

Written by `python -m agentrl.config.docs`; do not edit by hand.

Every setting is a flag of every command that takes a RUN_NAME: `--learning_rate 1e-4`, `--learning-rate 1e-4` and
`--learning_rate=1e-4` are the same, and a boolean may stand alone (`--bf16`). Sources, later wins:

1. the defaults below
2. a profile: `--profile laptop` reads `assets/profiles/laptop.yml`
3. a file: `--config run.yaml`, with settings at the top level or under their section
4. the environment: `{ENVIRONMENT_PREFIX}LEARNING_RATE=1e-4`, and without the prefix
   {_PLAIN}
5. the command line

An unknown name is refused with the nearest known one. `--dry_run` prints the resolved configuration and exits.
Passwords in URIs and tokens are masked wherever the configuration is printed or stored.
"""

_TRANSLATED = """## Names from other launch scripts

These flags keep their meaning and are translated:

| flag | meaning here |
|---|---|
"""

_REFUSED = """
These are known, but what they ask for is not available: the neutral value is accepted, any other one is refused with
the reason.

| flag | accepted | why nothing else |
|---|---|---|
"""


def render() -> str:
    """The whole document."""
    parts = [_HEAD]
    for name, model in sections().items():
        rows = [_row(setting) for setting in settings_index().values() if setting.section == name]
        summary = (model.__doc__ or "").splitlines()[0]
        parts.append(
            f"## {name}\n\n{summary}\n\n| setting | value | default | meaning |\n|---|---|---|---|\n"
            + "\n".join(rows)
            + "\n"
        )
    translated = [f"| {_code(*item.names)} | {item.meaning} |" for item in TRANSLATIONS]
    refused = [
        f"| {_code(name)} | {_code(*item.neutral) or 'none'} | {item.reason} |" for name, item in UNAVAILABLE.items()
    ]
    parts.append(_TRANSLATED + "\n".join(translated) + "\n" + _REFUSED + "\n".join(refused) + "\n")
    return "\n".join(parts)


def main(arguments: Sequence[str]) -> int:
    """Write the document, or with `--check` say whether the one on disk is up to date (exit code 1 if not)."""
    text = render()
    if "--check" not in arguments:
        DOCUMENT.parent.mkdir(exist_ok=True)
        DOCUMENT.write_text(text, encoding="utf-8")
        return 0
    if DOCUMENT.is_file() and DOCUMENT.read_text(encoding="utf-8") == text:
        return 0
    sys.stderr.write(f"docs/{DOCUMENT.name} is out of date; run: python -m agentrl.config.docs\n")
    return 1


def _row(setting: Setting) -> str:
    kind = setting.kind.replace("|", "\\|")
    default = show_value(setting.default).strip("'")
    return f"| `{setting.name}` | {kind} | `{default}` | {setting.description} |"


def _code(*names: str) -> str:
    return ", ".join(f"`{name}`" if name else "empty" for name in names)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
