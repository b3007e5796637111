"""``tensorizer completion``: scripts with which shells complete the command."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from .arguments import options_of_commands
from .standard_streams import print_line


def run(options: argparse.Namespace) -> int:
    """Print the script of a shell."""
    print_line(_SCRIPTS[options.shell](options_of_commands()))
    return 0


def _bash(commands: Mapping[str, Mapping[str, str]]) -> str:
    cases = "\n".join(
        f"    {name}) words='{' '.join(options)}' ;;" for name, options in commands.items()
    )
    return f"""\
_tensorizer() {{
  local words='{" ".join(commands)}' word=${{COMP_WORDS[COMP_CWORD]}}
  if [ "$COMP_CWORD" -gt 1 ]; then
    case ${{COMP_WORDS[1]}} in
{cases}
    esac
    [ "${{word:0:1}}" = - ] || {{ compopt -o default; COMPREPLY=(); return; }}
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -F _tensorizer tensorizer"""


def _zsh(commands: Mapping[str, Mapping[str, str]]) -> str:
    return f"autoload -U +X bashcompinit && bashcompinit\n{_bash(commands)}"


def _fish(commands: Mapping[str, Mapping[str, str]]) -> str:
    lines = [f"complete -c tensorizer -n __fish_use_subcommand -f -a {name}" for name in commands]
    for name, options in commands.items():
        seen = f"-n '__fish_seen_subcommand_from {name}'"
        lines += [
            f"complete -c tensorizer {seen} -l {option[2:]} -d {_quoted(text)}"
            for option, text in options.items()
            if option.startswith("--")
        ]
    return "\n".join(lines)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


_SCRIPTS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
