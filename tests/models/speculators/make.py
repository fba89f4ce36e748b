"""Makes the tiny heads beside this file, and what the `speculators` package computes with them.

Run in an environment of its own, with speculators 0.9.0, torch 2.13 and transformers 5:

    HF_HUB_OFFLINE=1 python tests/models/speculators/make.py

A head's folder is what its `save_pretrained` writes. `expected.npz` has the target's embedding and
output matrix, features and tokens of a text, and for each anchor the logits of the block without
and with the bias of the token before, and the logits of confidences.
"""

from pathlib import Path

import numpy as np
import torch
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.dflash import DFlashSpeculatorConfig
from speculators.models.dflash.core import DFlashDraftModel
from speculators.models.dspark import DSparkSpeculatorConfig
from speculators.models.dspark.core import DSparkDraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import Qwen3Config

HERE = Path(__file__).parent
VOCAB, HIDDEN, LENGTH, ANCHORS = 24, 16, 14, (1, 4, 8)
KINDS = {
    "dflash": (DFlashSpeculatorConfig, DFlashDraftModel),
    "dspark": (DSparkSpeculatorConfig, DSparkDraftModel),
}


def layers(kinds: list[str], window: int) -> Qwen3Config:
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=24,
        num_hidden_layers=len(kinds),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        layer_types=kinds,
        use_sliding_window=True,
        sliding_window=window,
        rope_parameters={"rope_type": "default", "rope_theta": 50.0},
    )
    config._attn_implementation = "eager"
    return config


def make(name: str, anchors: tuple[int, ...], shared: dict[str, torch.Tensor], **fields) -> None:
    config_class, model_class = KINDS[name]
    block, from_anchor = fields["block_size"], name == "dspark"
    drafts = block if from_anchor else block - 1
    config = config_class(
        aux_hidden_state_layer_ids=[1, 2, 4],
        mask_token_id=VOCAB - 1,
        speculators_config=SpeculatorsConfig(
            algorithm=name,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=drafts)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path="tiny", architectures=[]),
        ),
        **fields,
    )
    model = model_class(config).eval()
    torch.manual_seed(len(name) + block)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            scale = 0.3 if weight.ndim > 1 else 0.2
            weight.copy_(scale * torch.randn_like(weight) + ("norm" in key))
        model.embed_tokens.weight.copy_(shared["embed_tokens"])
        if fields["draft_vocab_size"] < VOCAB:
            ids = torch.arange(fields["draft_vocab_size"]) * 3
            t2d = torch.zeros(VOCAB, dtype=torch.bool)
            t2d[ids] = True
            model.load_vocab_mappings(t2d, ids - torch.arange(len(ids)))
        else:
            model.lm_head.weight.copy_(shared["lm_head"])
        features = torch.randn(1, LENGTH, 3 * HIDDEN)
        tokens = torch.randint(0, VOCAB - 1, (1, LENGTH))
        loss_mask = torch.zeros(1, LENGTH)
        loss_mask[0, list(anchors)] = 1
        documents = torch.zeros(1, LENGTH, dtype=torch.long)
        hidden, logits, *_ = model._backbone_forward(
            features, tokens, loss_mask, features[..., :HIDDEN], documents,
            max_anchors=len(anchors),
        )  # fmt: skip
        hidden, logits = (x.view(len(anchors), block, -1) for x in (hidden, logits))
        found = {"features": features[0], "tokens": tokens[0], "anchors": torch.tensor(anchors)}
        found |= {"logits": logits}
        if name == "dspark":
            before = torch.stack([tokens[0, a : a + block] for a in anchors])
            embedded = model.markov_head.prev_embeddings(before)
            bias = model.markov_head.block_bias(prev_token_ids=before, hidden_states=hidden)
            found["biased"] = logits + bias
            both = torch.cat([hidden, embedded], dim=-1)
            found["confidence_logits"] = model.confidence_head(both)
    model.save_pretrained(HERE / name)
    (HERE / name / "config.py").unlink()  # a copy of theirs
    arrays = {key: x.numpy() for key, x in (shared | found).items()}
    np.savez_compressed(HERE / name / "expected.npz", **arrays)


def main() -> None:
    torch.manual_seed(0)
    shared = {name: torch.randn(VOCAB, HIDDEN) * 0.5 for name in ("embed_tokens", "lm_head")}
    full, sliding = "full_attention", "sliding_attention"
    make(
        "dflash",
        ANCHORS,
        shared,
        transformer_layer_config=layers([full, sliding], 3),
        draft_vocab_size=VOCAB,
        block_size=5,
    )
    make(
        "dspark",
        ANCHORS,
        shared,
        transformer_layer_config=layers([sliding, full], 2),
        draft_vocab_size=8,
        block_size=4,
        sliding_window_non_causal=True,
        markov_rank=3,
    )


if __name__ == "__main__":
    main()
