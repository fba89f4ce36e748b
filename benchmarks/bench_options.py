"""What `Engine(request_options=True)` costs a step: where nobody asks for anything, and one does.

The models are lookups of one row, so that a step is little else than drafting and verification.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import measure
import numpy as np

import jax_specdec as sd
from jax_specdec import lm

SLOTS, K = 8, 4
WAYS: dict[str, lm.RequestOptions | None] = {
    "request_options=False": None,
    "True, nobody asks": lm.RequestOptions(),
    "the same, and the host says so": lm.RequestOptions(),  # as the driver does
    "True, one asks for top-p": lm.RequestOptions(top_p=0.9),
    "True, one asks for a penalty": lm.RequestOptions(frequency_penalty=0.5),
    "True, one asks for allowed ids": lm.RequestOptions(allowed_token_ids=range(100)),
    "True, one asks for a bias": lm.RequestOptions(logit_bias={7: 1.0}),
}


def row_of_last(params: Any, token_ids: Any, start: Any, cache: Any) -> tuple[Any, Any]:
    """Logits are a row of ``params [64, V]``, by the last token."""
    return params[token_ids % params.shape[0]], cache


@functools.partial(jax.jit, static_argnames=("engine", "steps", "all_neutral"))
def run(
    params: Any,
    draft_params: Any,
    state: lm.DecodeState,
    engine: lm.Engine,
    steps: int,
    all_neutral: bool,
) -> Any:
    """Tokens that each request emits in some steps."""
    step = functools.partial(engine.step, params, draft_params, all_neutral=all_neutral)
    after = jax.lax.fori_loop(0, steps, lambda _, state: step(state)[0], state)
    return after.batch.lengths - state.batch.lengths


def main() -> None:
    parser = measure.parser(__doc__, repeats=15)
    parser.add_argument("--vocab-size", type=int, default=128256)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    model, steps = lm.models.PlainModel(options.vocab_size, row_of_last), options.steps
    rng = np.random.default_rng(0)
    draft_params = jnp.asarray(rng.standard_normal((64, model.vocab_size)), options.dtype) * 3
    noise = jnp.asarray(rng.standard_normal(draft_params.shape), options.dtype)
    params = draft_params + noise / 2

    def begin(asked: lm.RequestOptions | None) -> tuple[lm.Engine, lm.DecodeState]:
        engine = lm.Engine(
            model,
            lm.ModelDrafter(model),
            sd.SpecDecodeConfig(num_speculative_tokens=K),
            num_slots=SLOTS,
            max_length=32 + steps * (K + 1),
            prefill_sizes=(32,),
            request_options=asked is not None,
        )
        state = engine.init_state(draft_params)
        admit = jax.jit(engine.admit)
        for slot in range(SLOTS):
            own = asked if asked is not None and slot == 0 else lm.RequestOptions()
            own = dataclasses.replace(own, temperature=0.8, max_new_tokens=steps * (K + 1))
            new = lm.NewRequests(
                slots=jnp.array([slot]),
                prompts=engine.pad_prompt([1, 2, 3, slot])[None],
                lengths=jnp.array([4]),
                keys=jax.random.key(slot)[None],
                options=engine.options_of([own], [4]),
            )
            state = admit(params, draft_params, state, new)
        return engine, state

    begun = {name: begin(asked) for name, asked in WAYS.items()}
    runs = {
        name: functools.partial(
            run, params, draft_params, state, engine, steps, "the host says so" in name
        )
        for name, (engine, state) in begun.items()
    }
    samples = measure.alternate(runs, options.repeats)
    base = measure.median(samples["request_options=False"])
    kind = jax.devices()[0].device_kind
    results = measure.Results(f"options_{jax.default_backend()}")
    results.add(
        [
            {"engine": name, "ms_per_step": measure.median(one) / steps * 1e3, "samples": one}
            for name, one in samples.items()
        ]
    )
    measure.show(
        f"V = {model.vocab_size}, S = {SLOTS}, K = {K}, {options.dtype}, {kind}",
        [
            {
                "engine": row["engine"],
                "ms per step": f"{row['ms_per_step']:.2f}",
                "ratio": f"{measure.median(row['samples']) / base:.3f}",
            }
            for row in results.rows
        ],
    )


if __name__ == "__main__":
    main()
