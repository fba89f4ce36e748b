"""`jax-specdec serve`: an engine behind the API of OpenAI.

A request passes a `Connection`, which bounds bytes and time; the `Server`, which checks host, key
and JSON; `read_parameters`; the `Worker`, which has a place for it, or refuses it; `read_request`,
which makes tokens of its prompts and tries its schema; the thread of the `Worker`, which steps the
driver; and an `Answer`, which turns updates into text. One task does all of this from its place on:
it is cancelled when the client leaves.

Tasks run in one event loop, in the thread of the command. Other threads step the driver (one), run
tokenizers and chat templates (two), wait for schemas or compile them (`Limits.schema_processes`),
and read bodies (those of `asyncio.to_thread`).
"""
