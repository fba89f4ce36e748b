"""`jax-specdec serve`: loads and compiles, then serves until Ctrl-C or SIGTERM.

In the order of what can go wrong soonest: the key, the address, the models, the engine, all of its
programs, and then the loop of `server.app`. One line goes to standard output, the address, when
clients are answered: a script may wait for it. All else is on standard error. Lines that cannot be
written are dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import ipaddress
import os
import socket
import sys
import time

import jax

import jax_specdec as sd
from jax_specdec import lm
from jax_specdec.lm import terminal
from jax_specdec.lm.cli import process
from jax_specdec.lm.cli.models import load_served
from jax_specdec.lm.cli.options import API_KEY_VARIABLE, SERVED_LENGTH, Serve
from jax_specdec.lm.cli.prompts import InputError
from jax_specdec.lm.drafters import NO_DRAFTS
from jax_specdec.lm.loading import Models
from jax_specdec.lm.models.fields import shown
from jax_specdec.lm.server.app import Server
from jax_specdec.lm.server.limits import Limits
from jax_specdec.lm.server.request import MAX_BIASES
from jax_specdec.lm.server.worker import EngineFailed


def serve(options: Serve) -> None:
    """Loads the models, compiles every program, and serves until Ctrl-C or SIGTERM.

    Raises:
      InputError: a file or an option is wrong, or the address cannot be had.
    """
    key = _read_key(options)
    # Before the models, which take long: a port may be in use.
    listener, is_local = _bind(options, key)
    with listener:
        with terminal.progress("loading the models"):
            models = load_served(options)
        driver = make_driver(options, models)
        begin = time.monotonic()

        # Called before the first program, too.
        def on_progress(done: int, total: int) -> None:
            if done:
                terminal.log(
                    f"compiled {done} of {total} programs, {time.monotonic() - begin:.1f} s"
                )

        # Clients may send schemas, if the server can have them. On CPUs what only some requests
        # need is compiled behind the first answers.
        driver.warm_up(on_progress, grammars=True, behind=True)
        default = "jax-specdec" if options.target is None else options.target.resolve().name
        # Answers are UTF-8, but what the system names a file or an argument need not be.
        name = (options.model_name or default).encode(errors="backslashreplace").decode()
        limits = Limits(
            client_seconds=options.client_seconds,
            drain_seconds=options.drain_seconds,
            plain_messages=options.plain_messages,
        )
        server = Server(
            models.text, driver, model_name=name, key=key, is_local=is_local, limits=limits
        )
        # A collection stops all threads: the one that steps the driver, too.
        gc.collect()
        gc.freeze()  # what is there now stays, and takes .1 s to be looked at
        host, port = listener.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"

        # From here on the first signal calls `stop`, in the main thread, and the second one ends
        # the process; up to here the first one did.
        with process.handling_interrupt(server.stop):
            ready = functools.partial(_announce, f"Serving {name} at {url}")
            try:
                asyncio.run(server.run(listener, ready))
            except EngineFailed as error:
                terminal.log(f"jax-specdec serve: {error}")
                sys.exit(1)


def _announce(line: str) -> None:
    """Writes the only line of standard output, or on standard error why it cannot be written.

    The server goes on, as in `serve | true`: its answers are what it is for. A `generate` whose
    output cannot be written would work for nobody, and ends.
    """
    try:
        terminal.write(f"{line}\n")
    except OSError as error:
        terminal.log(f"{line}; standard output cannot be written: {error.strerror}")
        process.drop_unwritten()


def make_driver(options: Serve, models: Models) -> lm.EngineDriver:
    """Returns the driver for models that were loaded.

    Raises:
      InputError: `--max-length` is more than the target was made for, or there is no such
        `--chunk-size`.
    """
    length = options.max_length or min(SERVED_LENGTH, models.text.max_length)
    if length > models.text.max_length:
        raise InputError(f"--max-length must be at most {models.text.max_length}, but is {length}")
    (draft,) = models.drafters.values()
    logprobs = sd.LogprobsConfig(options.max_logprobs) if options.max_logprobs else None
    drafter, config = draft.drafting(options.config, options.tree)
    agrees = config.rejection_sample_method == "agreement"
    k = options.config.num_speculative_tokens
    # Numbers of drafts that the driver chooses from, step by step; None for K in every step.
    budget: tuple[int, ...] | None = None
    if options.drafters == (NO_DRAFTS,):
        budget = (0,)
    elif options.tree is not None:
        # Of trees these are nodes beside the newest token: none, as many as a chain, half a tree, a
        # tree.
        budget = tuple(sorted({0, k, max(k, options.tree // 2 - 1), options.tree - 1}))
    elif not options.exact and (agrees or jax.default_backend() == "cpu"):
        # By agreement the driver chooses. Under other rules it keeps to K (`is_fixed` below), and
        # on CPUs the status line says where none would be faster. Of `exact` both cost the same.
        budget = (0, k)
    engine = lm.Engine(
        models.target.model,
        drafter,
        config,
        num_slots=options.num_slots,
        max_length=length,
        # Short chunks let running requests go on sooner; `exact` reads prompts by one program.
        prefill_sizes=(64, 128, 256) if length > 256 and not options.exact else None,
        request_options=True,
        # Arrays for what clients may send; a prediction is at most as long as a text.
        option_sizes=lm.OptionSizes(
            logit_bias=MAX_BIASES, prediction=length if drafter.serves.predictions else 0
        ),
        # Every request has those of the model; clients name none by their ids.
        max_stop_tokens=max(8, len(models.text.stop_token_ids)),
        draft_budget=budget,
        logprobs=logprobs,
        exact=options.exact,
        prefix_caching=options.prefix_caching == "on",
    )
    # After the engine, which makes the sizes of its `max_length`.
    size = options.chunk_size
    if size not in (None, *engine.chunk_sizes):
        sizes = ", ".join(map(str, engine.chunk_sizes))
        raise InputError(f"--chunk-size must be one of {sizes}, but is {size}")
    driver = lm.EngineDriver(
        engine,
        models.target.params,
        draft.params,
        max_queue=options.max_queue,
        chunk_size=size,
        prompts_in_steps=options.prompts_in_steps,
    )
    if driver.draft_choice is not None:
        # How many drafts pay depends on the load, and under other rules sampled text on them.
        driver.draft_choice.is_fixed = not agrees
    return driver


def _read_key(options: Serve) -> str | None:
    """Returns what clients have to send; the message of an error never has it."""
    if options.api_key_file is None:
        where = API_KEY_VARIABLE
        key = os.environ.get(API_KEY_VARIABLE)
    else:
        where = shown(options.api_key_file)
        try:
            # One character more than a key may have.
            with options.api_key_file.open(encoding="utf-8") as file:
                key = file.read(4097)
        except UnicodeDecodeError:
            raise InputError(f"{where} must be text in UTF-8") from None
        except OSError as error:
            raise InputError(f"{where} cannot be read: {error.strerror}") from None
    if key is None:
        return None
    key = key.strip()
    if not (key.isascii() and key.isprintable() and 0 < len(key) <= 4096 and " " not in key):
        raise InputError(f"{where} must hold a key: printable ASCII characters without a space")
    return key


def _bind(options: Serve, key: str | None) -> tuple[socket.socket, bool]:
    """Returns a socket that listens, and whether its address is a loopback address.

    From here on no other server gets the address. Who connects waits until requests are read.
    """
    where = f"--host {options.host} --port {options.port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # The address that a name has, not the name, says who can reach it. %eth0 is no part of it.
        is_local = ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback
        if not is_local and key is None:
            raise InputError(
                f"--host {options.host} needs a key, in ${API_KEY_VARIABLE} or --api-key-file"
            )
        with contextlib.ExitStack() as undo:
            listener = undo.enter_context(socket.socket(family, kind, protocol))
            # A server that is started again gets its port though old connections linger.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen()
            # All went well: the listener stays open.
            undo.pop_all()
        return listener, is_local
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{where} cannot be listened on: {reason}") from error
