"""``draftwise benchmark --server``: OpenAI-compatible servers under load."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from draftwise.benchmark.servers.settings import LoadSettings
from draftwise.cli.arguments import shown_command
from draftwise.cli.benchmark_files import write_results
from draftwise.cli.benchmark_server_tables import show_contenders, show_server_cell, show_slower
from draftwise.cli.fields import Group, Own
from draftwise.cli.flags import was_given
from draftwise.cli.option_values import check_max_tokens, parse_numbers
from draftwise.errors import InvalidParameterError

if TYPE_CHECKING:
    from draftwise.audit.client import Server
    from draftwise.benchmark.servers.contenders import ServerContender
    from draftwise.benchmark.servers.run import Cell, OnTurn, Questions

_PANEL = "Servers"
REQUESTS, SUMMARY = "requests.jsonl", "summary.jsonl"
_MOST_PROBES = 1_000


def _parse_concurrency(text: str) -> tuple[int, ...]:
    return tuple(parse_numbers("concurrency", text))


SERVER_LOAD_OPTIONS = Group(
    LoadSettings,
    _PANEL,
    {
        "servers": Own(flag="--server", kind=list[str], metavar="[NAME=]URL"),
        "concurrency": Own(kind=str, parse=_parse_concurrency),
        "request_rate": Own(),
        "requests": Own(),
        "model": Own(),
        "allow_hosts": Own(flag="--allow-host", kind=list[str], metavar="NAME"),
        "api_key": Own(envvar="DRAFTWISE_API_KEY"),
        "notes": Own(flag="--note", kind=list[str], metavar="TEXT"),
    },
    {"concurrency": "1,4,16"},
)
# Options of the command that say what servers are asked. The others are about models.
_SHARED = (
    *("workload", "output", "policies", "num_prompts", "rounds", "learning_turns", "max_tokens"),
    *("stop_at_eos", "chat", "multi_turn", "temperature", "top_p", "top_k", "seed"),
)


def check_options(context: typer.Context) -> None:
    """Refuse options that have no effect with servers, or without.

    Raises:
        InvalidParameterError: such an option was given.
    """
    asks_servers = bool(context.params["servers"])
    own = [name for name in SERVER_LOAD_OPTIONS.own if name not in ("servers", "api_key")]
    for option in context.command.params:
        name = str(option.name)
        if not was_given(context, name):
            continue
        if not asks_servers and name in own:
            raise InvalidParameterError(name, "requires --server")
        if asks_servers and name not in (*_SHARED, *SERVER_LOAD_OPTIONS.own):
            raise InvalidParameterError(name, "has no effect on servers; leave it out")


def benchmark_servers(
    load: LoadSettings,
    options: Mapping[str, Any],
    temperatures: Sequence[float],
    policies: Sequence[str] | None,
) -> None:
    """Measure servers under load, and write the results.

    Args:
        load: the servers and the load.
        options: values of the options of the command; its output folder exists.
        temperatures: temperatures, each of which is measured.
        policies: settings of the speculation of servers of Draftwise; ``None`` if not given.

    Raises:
        DraftwiseError: a file cannot be read, a server does not respond, or it has no such policy.
    """
    try:
        from draftwise.benchmark.report import provenance, summary_lines
        from draftwise.benchmark.servers.contenders import describe_server, server_contenders
        from draftwise.benchmark.servers.figures import figures_of_servers, slower
        from draftwise.benchmark.servers.run import Measurement, Questions
    except ModuleNotFoundError as error:
        raise InvalidParameterError(
            "servers", f"{error.name} is missing: pip install 'draftwise[audit]'"
        ) from error

    console = Console(highlight=False)
    output, max_tokens, seed = options["output"], options["max_tokens"], options["seed"]
    check_max_tokens(max_tokens)
    files = [Questions.read(path, options["num_prompts"]) for path in options["workload"]]
    fields: dict[str, Any] = {"top_p": options["top_p"]}
    if options["top_k"] > 0:
        fields["top_k"] = options["top_k"]
    shared = {name: options[name] for name in _SHARED}
    settings = shared | {name: each for name, each in vars(load).items() if name != "api_key"}
    with ExitStack() as stack:
        servers = _connected(load, options["chat"] or options["multi_turn"], stack)
        contenders = [
            each
            for label, server in servers.items()
            for each in server_contenders(
                label, server, policies, fields, stop_at_eos=options["stop_at_eos"]
            )
        ]
        about = {
            "started": time.strftime("%Y-%m-%d"),
            "command": shown_command(),
            **provenance(settings),
            "servers": [describe_server(server, label) for label, server in servers.items()],
            "contenders": {each.name: each.describe() for each in contenders},
            "commands": _example_requests(contenders, files, temperatures[0], max_tokens, seed),
        }
        show_contenders(console, about)
        cells: list[dict[str, Any]] = []
        with (output / REQUESTS).open("w", encoding="utf-8") as raw:

            def write(record: Mapping[str, Any]) -> None:
                raw.write(json.dumps(record, ensure_ascii=False) + "\n")

            measurement = Measurement(
                contenders,
                max_tokens,
                seed=seed,
                multi_turn=options["multi_turn"],
                learning_turns=options["learning_turns"],
                write=write,
            )
            for cell in _cells(load, files, temperatures, options["rounds"]):
                with _progress(console, measurement.num_turns(cell)) as on_turn:
                    results = measurement.run(cell, on_turn)
                raw.flush()
                cells.append(figures_of_servers(cell, contenders, results))
                show_server_cell(console, cells[-1])
                # An interrupted run keeps what it has measured.
                write_results(output, {**about, "is_complete": False, "cells": cells})
    losing = slower(cells)
    write_results(output, {**about, "is_complete": True, "cells": cells, "slower": losing})
    origin = {**provenance(settings), "servers": about["servers"]}
    lines = "\n".join(summary_lines(output.name, origin, {"cells": cells}))
    (output / SUMMARY).write_text(lines + "\n", encoding="utf-8")
    show_slower(console, losing, cells)
    console.print(f"written to {output}: results.json, {REQUESTS}, {SUMMARY}", soft_wrap=True)


def _connected(load: LoadSettings, chat: bool, stack: ExitStack) -> dict[str, Server]:
    """The servers by their names; those without a name have that of their engine.

    Raises:
        ServerError: a server does not respond.
    """
    from draftwise.audit.budget import Budget
    from draftwise.audit.client import Server
    from draftwise.audit.speculation import engine_of

    found: dict[str, Server] = {}
    for name, url in load.addresses():
        budget = Budget(_MOST_PROBES, math.inf)
        server = Server(url, budget, model=load.model, api_key=load.api_key, chat=chat)
        stack.callback(server.close)
        label = name or engine_of(server)
        found[label if label not in found else f"{label} at {url.partition('://')[2]}"] = server
    return found


def _cells(
    load: LoadSettings, files: Sequence[Questions], temperatures: Sequence[float], rounds: int
) -> Iterator[Cell]:
    from draftwise.benchmark.servers.run import Cell

    clients = load.concurrency if load.request_rate is None else (None,)
    for questions, temperature, concurrency in product(files, temperatures, clients):
        count = load.num_requests(concurrency)
        yield Cell(questions, temperature, concurrency, load.request_rate, count, rounds)


def _example_requests(
    contenders: Sequence[ServerContender],
    files: Sequence[Questions],
    temperature: float,
    max_tokens: int,
    seed: int | None,
) -> dict[str, str]:
    """A command of a shell for each contender, which sends it the shortest question."""
    questions = [each for file in files for each in file.questions]
    prompt = min((each.turns[0] for each in questions), key=len)
    fields = {"max_tokens": max_tokens, "temperature": temperature}
    return {
        each.name: each.server.command(prompt, **fields, **each.fields_of(seed, "example"))
        for each in contenders
    }


@contextmanager
def _progress(console: Console, num_turns: int) -> Iterator[OnTurn]:
    """Show a bar over the turns of a cell; yields what is called before each turn."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("turns"),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=num_turns)

        def on_turn(name: str, kind: str) -> None:
            bar.update(task, advance=1, description=f"{name} ({kind})")

        yield on_turn
