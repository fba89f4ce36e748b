"""The command line: `jax-specdec generate`, `bench` and `serve`.

`__main__` calls `command.run`. `process` gives the command a thread, so that signals are handled
at any time; `parsing` makes a dataclass of `options` of the arguments; `prompts` and `models` read
what it names; then `show` prints what `run` decodes, with `report` for tables and JSON, or `serve`
starts the server. Texts, tables and JSON go to standard output, all else to standard error.
"""
