"""``completion``: a script for shell completion of commands and flags."""

import argparse
from collections.abc import Iterator, Mapping

from hetero_gateway.cli import COMMANDS
from hetero_gateway.cli.arguments import add_command

_BASH = """\
_hetero_gateway() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} words=
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
    [ "$COMP_CWORD" -gt 1 ] || words="{commands}"
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    [ ${{#COMPREPLY[@]}} -gt 0 ] || COMPREPLY=($(compgen -f -- "$word"))
}}
complete -o filenames -F _hetero_gateway hetero-gateway
"""
_ZSH = "autoload -U +X bashcompinit && bashcompinit\n"


def run(args: argparse.Namespace) -> int:
    words = _words()
    if args.shell == "fish":
        print("\n".join(_fish(words)))
        return 0
    cases = "\n".join(
        f'        {name}) words="{" ".join(each)}" ;;' for name, each in words.items()
    )
    script = _BASH.format(cases=cases, commands=" ".join(words))
    print((_ZSH if args.shell == "zsh" else "") + script, end="")
    return 0


def _words() -> dict[str, list[str]]:
    """By command: its flags, its actions and their flags."""
    root = argparse.ArgumentParser()
    subparsers = root.add_subparsers()
    for name in COMMANDS:
        add_command(subparsers, name)
    return {name: sorted(set(_of(parser))) for name, parser in subparsers.choices.items()}


def _of(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, each in action.choices.items():
                yield name
                yield from _of(each)
        elif action.help is not argparse.SUPPRESS:
            yield from (flag for flag in action.option_strings if flag.startswith("--"))


def _fish(words: Mapping[str, list[str]]) -> Iterator[str]:
    yield f"complete -c hetero-gateway -n __fish_use_subcommand -f -a '{' '.join(words)}'"
    for name, each in words.items():
        when = f"-n '__fish_seen_subcommand_from {name}'"
        if names := [word for word in each if not word.startswith("-")]:
            yield f"complete -c hetero-gateway {when} -a '{' '.join(names)}'"
        for flag in each:
            if flag.startswith("--"):
                yield f"complete -c hetero-gateway {when} -l {flag.removeprefix('--')}"
