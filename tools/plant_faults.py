"""Plants faults one at a time and prints which test of the default suite catches each.

    python tools/plant_faults.py [NAME...]

Of the checkout in the current directory, with the Python that runs this; all faults by default. A
fault changes one line of the package and names the tests to run, where the line is put back
afterwards. Fails where a fault is caught by none of them.
"""

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PACKAGE = Path("jax_specdec/_src")


@dataclasses.dataclass(frozen=True)
class Fault:
    file: str
    old: str
    new: str
    tests: str  # what to run, under tests/


FAULTS = {
    "greedy ties go to the highest id": Fault(
        "verify/rows.py",
        "jnp.where(x == peak[:, None], index, x.shape[1])",
        "jnp.where(x == peak[:, None], index, x.shape[1]) * 0",
        "verify/test_xla.py",
    ),
    "a ratio equal to u is accepted": Fault(
        "verify/rules.py", "(u * q < p)", "(u * q <= p)", "verify/test_xla.py"
    ),
    "the residual is not clamped at 0": Fault(
        "verify/rules.py", "jnp.maximum(left, 0.0)", "left", "verify/test_xla.py"
    ),
    "the normalizer is not relative to row_max": Fault(
        "verify/draft_rows.py",
        "zero if d.row_max is None else d.row_max[rows]",
        "zero",
        "verify/test_xla.py",
    ),
    "one large normalizer makes all drafts of its request one-hot": Fault(
        "verify/requests.py",
        "has_q &= usable",
        "has_q &= jnp.all(usable, axis=1, keepdims=True)",
        "verify/test_normalizers.py",
    ),
    "log_normalizer is ignored": Fault(
        "verify/draft_rows.py",
        "isinstance(d, DraftLogits) and d.log_normalizer is None",
        "isinstance(d, DraftLogits)",
        "verify/test_xla.py",
    ),
    "the status of a bad draft row is dropped": Fault(
        "verify/draw.py",
        "source.uses_q & (jnp.isnan(total[:, 0]) | source.draft_scale.bad)",
        "source.uses_q & source.draft_scale.bad",
        "verify/test_xla.py",
    ),
    "a request's rows begin one too early": Fault(
        "ragged.py",
        "first_row = start + index if",
        "first_row = start + jnp.maximum(index - 1, 0) if",
        "verify/test_xla.py",
    ),
    "the block rule does not multiply ratios": Fault(
        "verify/rules.py",
        "jnp.minimum(weight * ratio, 1.0)",
        "jnp.minimum(ratio, 1.0)",
        "verify/test_xla.py",
    ),
    "top-p keeps one more": Fault(
        "verify/threshold.py",
        "mass(candidates) >= goal",
        "mass(candidates) - jnp.exp((candidates - peak) * inv_temperature) >= goal",
        "verify/test_threshold.py verify/test_xla.py",
    ),
    "rows read at once: the bonus row is never reached": Fault(
        "verify/rules.py",
        "stop = tiles.first_true(~self.goes_on(positions))\n",
        "stop = tiles.first_true(~self.goes_on(positions)[:, :-2])\n",
        "verify/test_xla_all_at_once.py",
    ),
    "rows read at once: a row is read at the temperature of the request before": Fault(
        "verify/reader.py",
        "jnp.where(owns, x[None, :],",
        "jnp.where(owns, jnp.roll(x, 1)[None, :],",
        "verify/test_xla_all_at_once.py",
    ),
    "rows read at once: ids of the tile before are drawn with the last tile": Fault(
        "verify/draw.py",
        "is_inside = ids // tiles.TILE == tile[:, None]",
        "is_inside = ids >= 0",
        "verify/test_xla_all_at_once.py verify/test_numbers.py",
    ),
    "blocks of rows: what is left after the last whole one is not read": Fault(
        "blocks.py", "-(-size // length)", "size // length", "verify/test_forms.py"
    ),
    "keys of four words lose two": Fault(
        "noise.py",
        "jnp.stack(_threefry((w, x), (y, z)), axis=-1)",
        "jnp.stack((w, x), axis=-1)",
        "test_keys.py",
    ),
    "a part of the vocabulary begins too late": Fault(
        "verify/rows.py",
        "None if exchange.axis is None else exchange.part * logits.shape[1]",
        "None if exchange.axis is None else exchange.part * (logits.shape[1] + 1)",
        "verify/test_sharded.py",
    ),
    "a tile that an edge between parts cuts is the first part's": Fault(
        "verify/draw.py",
        "piece = inverse_cdf(held[:, None], u)[0][:, 0]",
        "piece = jnp.zeros_like(chosen)",
        "verify/test_sharded.py",
    ),
    "a threshold of a split row is found by one part": Fault(
        "verify/rows.py",
        "lambda fn, candidates: exchange.sum(",
        "lambda fn, candidates: (lambda x: x)(",
        "verify/test_sharded.py",
    ),
    "rows past the end are read": Fault(
        "verify/requests.py",
        "valid_input &= end <= arrays.target_logits.shape[0]",
        "valid_input &= end <= arrays.target_logits.shape[0] + 100",
        "verify/test_padded_rows.py",
    ),
    "a part counts tiles from its own first id": Fault(
        "verify/draw.py",
        "return self.target.first // tiles.TILE",
        "return (self.target.first + tiles.TILE - 1) // tiles.TILE",
        "verify/test_sharded.py",
    ),
    "a map of ids is not followed": Fault(
        "verify/draft_rows.py",
        "self.columns[jnp.clip(ids, 0, self.size - 1)]",
        "jnp.clip(ids, 0, self.unlisted)",
        "verify/test_listed.py",
    ),
    "candidates take nothing from their tile": Fault(
        "verify/draw.py",
        "jnp.maximum(source.weight[:, None] * p_masses - taken, 0.0)",
        "source.weight[:, None] * p_masses",
        "verify/test_listed.py",
    ),
    "requests that vary over an axis of shard_map are traced with it": Fault(
        "verify/sharding.py", "if not axes:", "if True:", "integrations/test_explicit_sharding.py"
    ),
    "a chain's places do not begin at its own": Fault(
        "../integrations/sglang_jax.py",
        "arrays.slots[:, None] * n + offset",
        "offset + 0 * arrays.slots[:, None]",
        "integrations/test_sglang_jax.py",
    ),
    "a greedy request of a flat batch keeps temperature -1": Fault(
        "../integrations/tpu_inference.py",
        "is_greedy |= temperature == GREEDY_TEMPERATURE",
        "is_greedy |= temperature == 1 - GREEDY_TEMPERATURE",
        "integrations/test_tpu_inference.py",
    ),
    "all slots of a step have one key": Fault(
        "../integrations/keys.py",
        "(threefry_keys(key), slots)",
        "(threefry_keys(key), slots * 0)",
        "integrations/test_step_keys.py",
    ),
    "kernel: the last of many tiles is not weighed": Fault(
        "verify/mosaic_gpu/rows.py",
        "return lax.fori_loop(0, self.count(), run, state)",
        "return lax.fori_loop(0, self.count() - (self.count() > 4), run, state)",
        "verify/test_mosaic_gpu.py::"
        "test_recovered_tokens_come_from_all_tiles_that_the_oracle_draws_from",
    ),
    "kernel: recovering and accepting share a stream": Fault(
        "verify/mosaic_gpu/request.py",
        "jnp.where(recovers, int(noise.Stream.RECOVER), int(noise.Stream.ACCEPT))",
        "jnp.where(recovers, int(noise.Stream.ACCEPT), int(noise.Stream.ACCEPT))",
        "verify/test_mosaic_gpu.py::test_noise_from_keys_is_what_draw_noise_gives",
    ),
    "kernel: the normalizer is not relative to row_max": Fault(
        "verify/mosaic_gpu/launch.py",
        "row_max=None if logits is None else logits.row_max,",
        "row_max=None,",
        "verify/test_mosaic_gpu.py",
    ),
    "kernel: a greedy tie goes to the highest id": Fault(
        "verify/mosaic_gpu/statistics.py",
        "lax.bitcast_convert_type(threads.warp_min(place), jnp.float32)",
        "lax.bitcast_convert_type("
        "-threads.warp_min(jnp.where(place < 2**30, -place, 0)), jnp.float32)",
        "verify/test_mosaic_gpu.py::test_greedy_ties_go_to_the_lowest_id",
    ),
    "kernel: what is listed has no weight in its tile": Fault(
        "verify/mosaic_gpu/draw.py",
        "jnp.where(here & (tile == i), weight, 0.0)",
        "jnp.where(here & (tile < i), weight, 0.0)",
        "verify/test_mosaic_gpu_lists.py::"
        "test_what_is_left_on_many_candidates_of_a_tile_is_drawn_from",
    ),
    "kernel: a candidate after another is passed over": Fault(
        "verify/mosaic_gpu/lists.py",
        "(place < TILE) & (mine > column)",
        "(place < TILE) & (mine > column + 1)",
        "verify/test_mosaic_gpu_lists.py::"
        "test_what_is_left_on_many_candidates_of_a_tile_is_drawn_from",
    ),
    "kernel: an id may be listed twice": Fault(
        "verify/mosaic_gpu/lists.py",
        " | threads.has_twin(ids)",
        "",
        "verify/test_mosaic_gpu_lists.py::"
        "test_a_row_that_lists_an_id_twice_or_one_that_is_none_is_bad",
    ),
    "kernel: two requests may share a row": Fault(
        "verify/mosaic_gpu/request.py",
        "in_bounds &= start >= -threads.scalar(threads.warp_min(-reached))",
        "in_bounds &= start >= -threads.scalar(threads.warp_min(0 * reached))",
        "verify/test_mosaic_gpu.py::test_a_request_sees_all_before_it_whose_rows_it_would_share",
    ),
    "a drafter draws with the verifier's bits": Fault(
        "drafting/sample.py",
        "return uniforms(key, position, Stream.DRAFT, offset)",
        "return uniforms(key, position, Stream.ACCEPT, offset)",
        "drafting/test_sample.py",
    ),
    "a stored row of another position is used": Fault(
        "drafting/store.py",
        "(drawn_at >= 0) & (drawn_at == positions[None, :])",
        "drawn_at >= 0",
        "drafting/test_store.py",
    ),
    "a lookup proposes what is not written yet": Fault(
        "drafting/ngram.py",
        "(length - source, 1)",
        "(length - source + 1, 1)",
        "drafting/test_ngram.py",
    ),
    "a request without drafts gets a pass of one token, whatever its neighbours have": Fault(
        "serving/core.py",
        '"may_abstain", False) and tokens.shape[0] == 1:',
        '"may_abstain", False):',
        "serving/test_abstaining.py",
    ),
    "the loop draws the same bits at every step": Fault(
        "serving/core.py",
        "            positions=batch.lengths,\n            active",
        "            positions=batch.lengths * 0,\n            active",
        "serving/test_lossless.py serving/test_loop.py",
    ),
    "a stop token ends the text before itself": Fault(
        "serving/batch.py",
        "jnp.where(is_stopped, stop_at + 1, num_kept)",
        "jnp.where(is_stopped, stop_at, num_kept)",
        "serving/test_greedy.py",
    ),
    "a new request of an engine has drafts": Fault(
        "serving/core.py",
        "if not self.drafts_in_first_step:",
        "if False:",
        "serving/test_engine.py",
    ),
    "a drafter forgets its drafts where bad words and penalties count them": Fault(
        "drafting/context.py",
        "processors=self.processors and self.processors.append(token_ids)",
        "processors=self.processors",
        "serving/test_options.py",
    ),
    "the mask of allowed ids is left out": Fault(
        "drafting/context.py",
        "if self.token_bitmask is not None:",
        "if False:",
        "serving/test_options.py",
    ),
    "a slot keeps the cache of the request before": Fault(
        "serving/engine.py",
        "all_ = lax.dynamic_update_slice(all_, one, start)",
        "del one",
        "serving/test_engine.py",
    ),
    "a long prompt keeps what the one before it left in its caches": Fault(
        "serving/engine.py",
        "is_first = start == 0",
        "is_first = start < 0",
        "serving/test_steps_ahead.py",
    ),
    "whoever comes into a slot gets what a step ahead did for the request before": Fault(
        "serving/bookkeeping.py",
        "if request is None or request is not slots[slot]:",
        "if (request := slots[slot]) is None:",
        "serving/test_steps_ahead.py",
    ),
    "a request ends at its second failed call, whatever max_retries says": Fault(
        "serving/driver.py",
        "if count > self.max_retries else None",
        "if count > 1 else None",
        "serving/test_engine_continuity.py",
    ),
    "a preempted request does not wait for the steps ahead": Fault(
        "serving/driver.py",
        "            while self._ahead:\n",
        "            while False:\n",
        "serving/test_steps_ahead.py",
    ),
    "a bad word is looked for without the drafts before a row": Fault(
        "processors.py",
        "[bad_words.recent, token_ids]",
        "[bad_words.recent, 0 * token_ids - 1]",
        "serving/test_processors.py",
    ),
    "all rows of a step forbid stop tokens like its first": Fault(
        "processors.py",
        "is_early = offset < ",
        "is_early = 0 * offset < ",
        "serving/test_processors.py",
    ),
    "matchers stay where a step's drafts led them": Fault(
        "grammar.py", "if matcher is not None and count:", "if False:", "serving/test_grammar.py"
    ),
    "a grammar that begins in mid-draft begins a token late": Fault(
        "grammar.py",
        "return self._before[-len(self._begin) :] == self._begin",
        "return self._before[-len(self._begin) - 1 : -1] == self._begin",
        "serving/test_grammar.py",
    ),
    "features are those of the layer before": Fault(
        "models/llama.py",
        "chosen = [streams[i] for i in feature_layers]",
        "chosen = [streams[max(i - 1, 0)] for i in feature_layers]",
        "models/test_llama.py",
    ),
    "a head drafts one position too far": Fault(
        "drafting/eagle3.py",
        "jnp.minimum(lengths - 2 + offset, longest - 1)",
        "jnp.minimum(lengths - 1 + offset, longest - 1)",
        "drafting/test_eagle3.py",
    ),
    "a head reads what was accepted one position too late": Fault(
        "drafting/eagle3.py",
        "jnp.clip(lengths - 1 - num_features, 0, longest - size)",
        "jnp.clip(lengths - num_features, 0, longest - size)",
        "drafting/test_eagle3.py",
    ),
    "a head keeps its own states where true features have come": Fault(
        "drafting/eagle3.py",
        "logits, state, cache = self.head.apply(params, states, shifted, start, cache, row)",
        "logits, state, _ = self.head.apply(params, states, shifted, start, cache, row)",
        "drafting/test_eagle3.py",
    ),
    "a head's own state goes through fc": Fault(
        "drafting/eagle3.py",
        "self.head.apply(params, state, last[:, None], start, cache)",
        "self.head.apply(params, self.head.project(params, jnp.tile(state, "
        "len(self.feature_layers))), last[:, None], start, cache)",
        "drafting/test_eagle3.py",
    ),
    "features of rejected drafts count as those of the text": Fault(
        "serving/core.py",
        "num_features = record.num_kept",
        "num_features = jnp.where(record.num_kept > 0, features.shape[1], 0)",
        "drafting/test_eagle3.py",
    ),
    "the last row of a chunk does not know the token after it": Fault(
        "serving/core.py",
        "following = zeros if next_token_ids is None else next_token_ids",
        "following = zeros",
        "drafting/test_eagle3.py",
    ),
    "a loop over layers copies the cache": Fault(
        "models/llama.py",
        "lax.optimization_barrier(written)",
        "written",
        "models/test_scan_layers.py",
    ),
}


def caught_by(fault: Fault) -> str | None:
    """The first test that fails with the fault; None where none does."""
    path = PACKAGE / fault.file
    text = path.read_text("utf-8")
    assert text.count(fault.old) == 1, f"{path} must hold {fault.old!r} once"
    path.write_text(text.replace(fault.old, fault.new), "utf-8")
    try:
        files = [f"tests/{file}" for file in fault.tests.split()]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *files]
        result = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"}
        )
    finally:
        path.write_text(text, "utf-8")
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", result.stdout, re.MULTILINE)
    assert found or result.returncode == 0, result.stdout + result.stderr
    return found and found[1]


def main(names: Sequence[str]) -> int:
    missed = 0
    for name in names or FAULTS:
        test = caught_by(FAULTS[name])
        missed += test is None
        print(f"| {name} | {f'`{test}`' if test else 'nothing'} |", flush=True)
    return min(missed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
