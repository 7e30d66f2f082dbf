"""``moe-compile``: what was rewritten, what was not and why, from the command line."""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moe_compile._version import __version__
from moe_compile.block_errors import THRESHOLD
from moe_compile.errors import (
    BackendRefused,
    BenchError,
    CheckpointError,
    FactoryError,
    MissingPackage,
    ModelFailed,
    MoeCompileError,
    OptionError,
    RewriteRefused,
)
from moe_compile.options import ACTIVATION_FORMATS, MOE_BACKENDS, CompileOptions
from moe_compile.quiet import one_line, without_torch_noise
from moe_compile.report import CompileReport, counted

OK, NOT_REWRITTEN, USAGE, FAILED, INTERRUPTED = 0, 1, 2, 3, 130
_EXIT_CODES: tuple[tuple[type[MoeCompileError], int], ...] = (
    (RewriteRefused, NOT_REWRITTEN),
    (OptionError, USAGE),
    (BackendRefused, USAGE),
    (FactoryError, USAGE),
    (BenchError, USAGE),
    (CheckpointError, USAGE),
    (MissingPackage, USAGE),
    (MoeCompileError, FAILED),
)
# Typer carries its own copy of click since 0.20, so the base class of argument errors is asked for, not imported.
_ArgumentError: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

app = typer.Typer(
    help="Fused MXFP8 mixture-of-experts for torch.compile: see what is rewritten, and what is not and why.",
    epilog="Exit codes: 0 done; 1 nothing was rewritten, or a block was left alone under --strict; "
    "2 wrong usage, such as an unknown option, factory or backend; 3 the factory or its model raised.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Factory = Annotated[
    str,
    typer.Argument(
        metavar="FACTORY",
        help="file.py:function or package.module:function. Called without arguments, it returns a model with "
        "dummy_inputs (any Hugging Face model), (model, args), (model, kwargs) or (model, args, kwargs). Or a "
        "folder with a Hugging Face config.json, or the name of a model in the local cache.",
    ),
]
MoeBackend = Annotated[
    str | None, typer.Option(metavar="NAME", help=f"Kernels to use: {', '.join(MOE_BACKENDS)}. Default: auto.")
]
Activations = Annotated[
    str | None, typer.Option(metavar="FORMAT", help=f"GEMM inputs: {', '.join(ACTIVATION_FORMATS)}. Default: auto.")
]
Inductor = Annotated[
    bool | None,
    typer.Option("--inductor/--no-inductor", help="Compile the rest with Inductor, or only trace it (fast)."),
]
Strict = Annotated[
    bool | None, typer.Option("--strict/--no-strict", help="Fail if a block that looks like MoE is left alone.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else on stdout.")]
RandomWeights = Annotated[
    bool,
    typer.Option("--random-weights", help="Of a Hugging Face folder or name: a model of few layers, random weights."),
]
ShowTraceback = Annotated[bool, typer.Option("--traceback", help="Show the Python traceback of an error.")]


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"moe-compile {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def demo(
    moe_backend: MoeBackend = None,
    activations: Activations = None,
    inductor: Inductor = None,
    strict: Strict = None,
    show_traceback: ShowTraceback = False,
) -> None:
    r"""Build a tiny MiniMax-M3 with random weights, compile it, generate with it and measure its error.

    Nothing is downloaded. Runs on the GPU if there is one. Needs transformers: pip install "moe_compile\[hf]".
    """
    from moe_compile.demo import print_demo

    with _reported_errors(show_traceback):
        options = _options(moe_backend, activations, inductor, strict)
        result = print_demo(options, _wide_console(), may_disable_inductor=inductor is None)
        _exit_for(result.report, options)


@app.command(
    epilog="Exit codes: 0 at least one block was rewritten; 1 none was, or one was left alone under --strict; 2 the "
    "factory does not exist or returns something else, or an option is wrong; 3 the factory or the model raised."
)
def explain(
    factory: Factory,
    moe_backend: MoeBackend = None,
    activations: Activations = None,
    inductor: Inductor = None,
    strict: Strict = None,
    as_json: Json = False,
    random_weights: RandomWeights = False,
    show_traceback: ShowTraceback = False,
) -> None:
    """Compile the model that FACTORY returns, run it once, and say what happened to each expert block."""
    from moe_compile.factory import load_model_call

    with _reported_errors(show_traceback):
        options = _options(moe_backend, activations, inductor, strict)
        # What the factory prints must not end up in the JSON.
        with contextlib.redirect_stdout(sys.stderr):
            call = load_model_call(factory, random_weights)
            # Here, because it imports Inductor: a mistake in FACTORY is answered without that wait.
            from moe_compile.explanation import explain_with

            # Without strict, so that the report is there to be printed; strict decides the exit code.
            with _model_errors(factory, show_traceback):
                report = explain_with(replace(options, strict=False), call.model, call.args, call.kwargs)
        if as_json:
            typer.echo(report.to_json())
        else:
            _print_report(report)
        _exit_for(report, options)


@app.command(
    epilog="Exit codes: those of explain. DIR/rank0 is the folder of this process (rank1 and so on "
    "where the variable RANK says so); where it exists, rank0_run2 is made, and nothing is overwritten."
)
def dump(
    factory: Factory,
    output: Annotated[str, typer.Option("--output", "-o", metavar="DIR", help="Folder for the files.")],
    moe_backend: MoeBackend = None,
    activations: Activations = None,
    inductor: Inductor = None,
    strict: Strict = None,
    random_weights: RandomWeights = False,
    show_traceback: ShowTraceback = False,
) -> None:
    """Write the graphs of FACTORY's model before and after as runnable Python, with diffs, output code and guards."""
    from moe_compile.factory import load_model_call

    with _reported_errors(show_traceback):
        options = _options(moe_backend, activations, inductor, strict)
        options = replace(options, dump_dir=output)  # a wrong DIR is refused before anything is made
        console = _wide_console()
        with contextlib.redirect_stdout(sys.stderr):
            _step("building the model")
            call = load_model_call(factory, random_weights)
            from moe_compile.dump import start
            from moe_compile.explanation import explain_with

            written = start(output)
            _step("compiling without caches, running once")
            with _model_errors(factory, show_traceback):
                report = explain_with(options, call.model, call.args, call.kwargs)
            written.finish(report)
        console.print(report)
        for problem in dict.fromkeys(problem for graph in written.graphs for problem in graph.problems):
            console.print(Text(f"  not complete: {problem}"))
        console.print(Text(f"wrote {counted(len(written.graphs), 'graph')}. Start at {written.folder}/index.html"))
        _exit_for(report, options)


@app.command(
    epilog="Exit codes: 0 every rewritten block is within the threshold; 1 one is not, or none was rewritten; 2 and 3 "
    "as for explain. A block is compared on the inputs that it has in the rewritten model, so errors do not add up "
    "from block to block; in the logits they do, and there they decide nothing unless --bisect is given."
)
def verify(
    factory: Factory,
    threshold: Annotated[
        float, typer.Option(metavar="ERROR", min=0.0, help="Largest relative L2 error that is right.")
    ] = THRESHOLD,
    bisect: Annotated[
        bool, typer.Option("--bisect", help="Also find the first block whose rewrite takes the output beyond it.")
    ] = False,
    moe_backend: MoeBackend = None,
    activations: Activations = None,
    inductor: Inductor = None,
    strict: Strict = None,
    as_json: Json = False,
    random_weights: RandomWeights = False,
    show_traceback: ShowTraceback = False,
) -> None:
    """Run FACTORY's model as it is and rewritten, and compare them block by block and at the output."""
    from moe_compile.factory import load_model_call

    with _reported_errors(show_traceback):
        options = _options(moe_backend, activations, inductor, strict)
        with contextlib.redirect_stdout(sys.stderr):
            _step("building the model")
            call = load_model_call(factory, random_weights)
            from moe_compile import verification

            arguments = (options, call.model, call.args, call.kwargs, threshold)
            with _model_errors(factory, show_traceback):
                _step("running the original, compiling, running the rewritten")
                result = verification.verify(*arguments)
                found = None
                if bisect:
                    _step("bisecting")
                    found = verification.bisect(*arguments, step=lambda one: _step(verification.describe_step(one)))
        if as_json:
            bisected = {"first_wrong_block": found} if bisect else {}
            typer.echo(json.dumps({**result.to_dict(), **bisected}, indent=2))
        else:
            for line in verification.text(result):
                typer.echo(line)
            if bisect:
                where = (
                    f"the first wrong block is {found}" if found else "no block takes the output beyond the threshold"
                )
                typer.echo(f"bisect: {where}")
        if not result.passed or found:
            raise typer.Exit(NOT_REWRITTEN)


@app.command()
def backends(as_json: Json = False) -> None:
    """List every moe_backend in the order in which auto tries them: usable here or not, why, and what would help."""
    from moe_compile import available_backends
    from moe_compile.machine import gpus, versions

    found = available_backends()
    packages = {name: versions()[name] for name in ("torch", "triton", "aiter", "flydsl")}
    if as_json:
        listed = [
            {
                "name": backend.name,
                "usable": backend.usable,
                "rejections": [{"reason": r.reason, "remedy": r.remedy} for r in backend.rejections],
                "cautions": [{"text": c.text, "remedy": c.remedy} for c in backend.cautions],
                "versions": dict(backend.versions),
            }
            for backend in found
        ]
        typer.echo(json.dumps({"backends": listed, "gpus": gpus(), "versions": packages}, indent=2))
        return
    table = Table("moe_backend", "usable here", "packages", "why not", "what would help", show_lines=True)
    for backend in found:
        reasons = "\n".join(f"{r.reason}" for r in backend.rejections)
        remedies = "\n".join(dict.fromkeys(r.remedy for r in backend.rejections if r.remedy))
        needed = "\n".join(f"{name} {version or '-'}" for name, version in backend.versions)
        table.add_row(*map(Text, (backend.name, "yes" if backend.usable else "no", needed, reasons, remedies)))
    console = _wide_console()
    console.print(table)
    for caution in (caution for backend in found for caution in backend.cautions):
        console.print(Text(f"caution: {caution}"))
    first = next((backend.name for backend in found if backend.usable), "none")
    console.print(Text(f"auto takes the first usable one that can run the block; on this machine: {first}"))
    console.print(Text(f"GPU: {', '.join(gpus()) or 'none'}"))
    for name, version in packages.items():
        console.print(Text(f"{name}: {version}"))


@app.command(
    epilog="Times are medians of CUDA-graph replays over rotating inputs. The floor is the larger of two times: the "
    "MXFP8 bytes of the experts that are hit over the copy bandwidth, and the FLOPs over the bf16 matrix rate. Both "
    "rates are measured first."
)
def bench(
    shape: Annotated[
        list[str], typer.Option(help="A named shape or HxIxExK (hidden, intermediate, experts, top-k). Repeatable.")
    ] = ["m3-tp4"],  # noqa: B006 - typer reads it once
    tokens: Annotated[str, typer.Option(help="Token counts, separated by commas.")] = "1,4,16,64,256,1024,4096",
    against: Annotated[
        str,
        typer.Option(help="What to measure, separated by commas: triton, triton-a8w8, hf-grouped_mm, hf-batched_mm."),
    ] = "triton,triton-a8w8,hf-grouped_mm",
    csv: Annotated[str | None, typer.Option(metavar="FILE", help="Write the measurements as CSV, too.")] = None,
    show_traceback: ShowTraceback = False,
) -> None:
    """Time one expert block on this GPU, beside transformers' own under Inductor, as multiples of a floor."""
    from moe_compile import bench as benchmark

    with _reported_errors(show_traceback):
        counts = benchmark.parse_tokens(tokens)
        shapes = [benchmark.find_shape(one) for one in shape]
        console, ceilings, found = _wide_console(), None, []
        for one in shapes:
            with console.status(f"measuring {one.name}"):
                ceilings, measured = benchmark.run_bench(
                    one, counts, against.split(","), lambda m: console.print(Text(benchmark.line(m))), ceilings
                )
            found += measured
        if ceilings is not None:
            console.print(Text(benchmark.summary(ceilings)))
            if csv is not None:
                benchmark.write_csv(csv, found, ceilings)


@app.command(
    epilog="Exit codes: 0 done; 2 the source cannot be quantised, or the destination is not empty and not ours; 130 "
    "interrupted: the same command goes on where it stopped."
)
def quantize(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="A checkpoint folder: config.json and safetensors files.")
    ],
    destination: Annotated[
        str, typer.Argument(metavar="DST", help="A new folder, or one that this command did not finish.")
    ],
    show_traceback: ShowTraceback = False,
) -> None:
    """Write a float checkpoint with its expert weights in MXFP8, as transformers loads it (quant_method mxfp8).

    All other weights and files are copied as they are. Works tensor by tensor, and can be interrupted at any time.
    """
    from pathlib import Path

    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from moe_compile.checkpoint import quantize_checkpoint

    columns = (BarColumn(), DownloadColumn(binary_units=False), TimeRemainingColumn(), TextColumn("{task.description}"))
    with _reported_errors(show_traceback):
        try:
            with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
                task = bar.add_task("", total=None)
                summary = quantize_checkpoint(
                    Path(source),
                    Path(destination),
                    lambda done, total, name: bar.update(task, completed=done, total=total, description=name),
                )
        except KeyboardInterrupt:
            typer.echo("moe-compile: interrupted; the same command goes on where it stopped", err=True)
            raise typer.Exit(INTERRUPTED) from None
        except OSError as error:
            raise CheckpointError(f"{error}; the same command goes on where it stopped") from error
    resumed = f" ({summary.resumed} of them by an earlier run)" if summary.resumed else ""
    typer.echo(
        f"{summary.quantised} expert weights in {summary.shards} files{resumed}: "
        f"{summary.bytes_before / 1e9:.2f} GB -> {summary.bytes_after / 1e9:.2f} GB in {destination}"
    )


@app.command()
def env(as_json: Json = False) -> None:
    """Print versions, GPU and environment variables, to paste into an issue."""
    from moe_compile import machine

    typer.echo(json.dumps(machine.to_dict(), indent=2) if as_json else machine.describe())


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script: run a command and exit with its code. Wrong arguments are one line on stderr, exit code 2."""
    try:
        code = app(arguments, prog_name="moe-compile", standalone_mode=False)
    except _ArgumentError as error:
        message = " ".join(str(error.format_message()).split()).removesuffix(".")  # type: ignore[attr-defined]
        commands = ", ".join(command.callback.__name__ for command in app.registered_commands if command.callback)
        typer.echo(f"moe-compile: {message}. Commands are {commands}; see moe-compile --help.", err=True)
        code = USAGE
    sys.exit(code or OK)


def _options(
    moe_backend: str | None, activations: str | None, inductor: bool | None, strict: bool | None
) -> CompileOptions:
    """The command line over the environment over the defaults."""
    given: dict[str, Any] = {
        "moe_backend": moe_backend,
        "activations": activations,
        "inductor": inductor,
        "strict": strict,
    }
    return CompileOptions.parse({name: value for name, value in given.items() if value is not None})


@contextlib.contextmanager
def _reported_errors(show_traceback: bool) -> Iterator[None]:
    """An error of ours becomes a line on stderr and its exit code."""
    try:
        yield
    except MoeCompileError as error:
        if show_traceback:
            traceback.print_exception(error)
        code = next(code for kind, code in _EXIT_CODES if isinstance(error, kind))
        hint = " (--traceback shows where)" if code == FAILED and not show_traceback else ""
        typer.echo(f"moe-compile: {str(error).removeprefix('moe_rocm: ')}{hint}", err=True)
        raise typer.Exit(code) from None


@contextlib.contextmanager
def _model_errors(factory: str, show_traceback: bool) -> Iterator[None]:
    """What the user's model raises becomes a ModelFailed."""
    try:
        with without_torch_noise(quiet=not show_traceback):
            yield
    except MoeCompileError:
        raise
    except Exception as error:  # the user's model may raise anything
        raise ModelFailed(f"the model of {factory!r} raised {one_line(error)}") from error


def _step(what: str) -> None:
    """Progress, on stderr."""
    typer.echo(f"... {what}", err=True)


def _exit_for(report: CompileReport, options: CompileOptions) -> None:
    if not report.rewritten or (options.strict and report.skipped):
        raise typer.Exit(NOT_REWRITTEN)


def _wide_console() -> Console:
    """The terminal, or 160 columns where the output goes to a file or a pipe (rich would assume 80)."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


def _print_report(report: CompileReport) -> None:
    _wide_console().print(report)
