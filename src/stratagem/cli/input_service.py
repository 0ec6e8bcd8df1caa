"""`stratagem input-service`: a dispatcher and input workers, or workers of another dispatcher."""

from __future__ import annotations

import contextlib
import signal
import threading

import click

from stratagem import errors as exit_codes

_POLL_S = 0.2


@click.command("input-service")
@click.option(
    "--workers", type=click.IntRange(0), default=1, show_default=True, help="Number of workers."
)
@click.option(
    "--dispatcher",
    metavar="HOST:PORT",
    help="Start only workers, which join the dispatcher at this address.",
)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address of this machine for trainers and workers; a network needs a secret.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    help="Port of the dispatcher.  [default: a free one]",
)
def command(workers: int, dispatcher: str | None, host: str, port: int) -> None:
    """Read datasets for trainers, in processes of their own.

    Prints the address for sg.input.service.distribute, and runs until it receives SIGTERM. On a
    network, all processes of the run share a secret: STRATAGEM_SECRET or STRATAGEM_SECRET_FILE.
    """
    from stratagem.input.service.address_book import DispatcherConfig
    from stratagem.input.service.workers import InputService, InputWorkers

    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    try:
        with contextlib.ExitStack() as stack:
            if dispatcher is None:
                config = DispatcherConfig(port=port, host=host)
                service = stack.enter_context(InputService(config, workers))
                click.echo(f"Input service at {service.target} has {workers} workers.")
            else:
                stack.enter_context(InputWorkers(dispatcher, workers, host=host))
                click.echo(f"{workers} input workers joined {dispatcher}.")
            while not ended.wait(_POLL_S):  # A signal may arrive in another thread.
                pass
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        raise SystemExit(exit_codes.INTERRUPTED) from None
