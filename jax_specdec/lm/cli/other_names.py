"""What servers and tools of others call their options, and what to write here.

`parsing` ends its message about an unknown option with what this table has for it.
"""

from __future__ import annotations

_ONE_DEVICE = (
    "a command runs on one device; in the library, TensorParallelLlama splits a model over several"
)
_MEMORY = (
    "caches take --num-slots times --max-length positions; XLA_PYTHON_CLIENT_MEM_FRACTION bounds "
    "what JAX takes"
)
_ITS_OWN = "tokenizer and chat template are those in the directory of --target"
_OF_A_REQUEST = "requests to a server have their own"

BY_OURS = {
    "--target": "--model --model-path -m",
    "--draft": """--speculative-model --spec-model --speculative-draft-model-path
        --speculative-algorithm --spec-method --spec-type --model-draft --spec-draft-model -md""",
    "who drafts is --draft, how many tokens -k, and the rule that verifies them --method": (
        "--speculative-config"
    ),
    "--num-speculative-tokens": """--speculative-num-steps --spec-tokens --num-draft-tokens
        --draft-max --spec-draft-n-max""",
    "--tree": "--speculative-num-draft-tokens --speculative-eagle-topk",
    "--max-length": "--max-model-len --context-length --ctx-size -c",
    "--num-slots": "--max-num-seqs --max-running-requests --parallel -np",
    "--max-queue": "--max-queued-requests",
    "--model-name": "--served-model-name --alias",
    "the key is read from $JAX_SPECDEC_API_KEY or from a file, --api-key-file": "--api-key",
    "--weights int8": "--quantization -q --load-in-8bit",
    "the cache has the dtype of the model, --dtype": """--kv-cache-dtype --cache-type-k
        --cache-type-v""",
    "prompts that begin alike are read once by default; --prefix-caching off turns it off": """
        --enable-prefix-caching --cache-reuse""",
    "--prefix-caching off": "--no-enable-prefix-caching --disable-radix-cache",
    "prompts are always read in chunks, of --chunk-size tokens": """--enable-chunked-prefill
        --no-enable-chunked-prefill""",
    "--chunk-size": """--max-num-batched-tokens --chunked-prefill-size --max-prefill-tokens
        --batch-size --ubatch-size -b -ub""",
    "--exact": "--enable-deterministic-inference",
    "--temperature": "--temp",
    "--repetition-penalty": "--repeat-penalty",
    "--max-new-tokens": "--max-tokens --n-predict --predict",
    "a prompt has no option: it follows the command": "--prompt -p",
    "--prompt-file": "--file -f",
    _OF_A_REQUEST: "--seed --random-seed --json-schema --grammar",
    _ONE_DEVICE: """--tensor-parallel-size -tp --tp --tp-size --pipeline-parallel-size -pp
        --data-parallel-size -dp --dp --dp-size --distributed-executor-backend""",
    "JAX_PLATFORMS names the device, such as cpu or cuda": "--device",
    "the whole model is on the device": """--n-gpu-layers --gpu-layers -ngl --cpu-offload-gb
        --swap-space""",
    _MEMORY: "--gpu-memory-utilization --mem-fraction-static --kv-cache-memory-bytes",
    "a slot has room for --max-length tokens; there are no pages": "--block-size --page-size",
    "all programs are compiled, and kept for the next start": """--enforce-eager
        --disable-cuda-graph --compilation-config""",
    "attention and sampling have no backends to choose": """--attention-backend --sampling-backend
        --flash-attn -fa""",
    _ITS_OWN: """--tokenizer --tokenizer-path --tokenizer-mode --chat-template --chat-template-file
        --jinja""",
    "no code of a checkpoint runs but its chat template": "--trust-remote-code",
    "`hf download OWNER/MODEL --local-dir DIR` downloads what --target DIR then names": """
        --download-dir --revision --hf-repo -hf --load-format""",
    "sampling defaults are those of OpenAI's API, and stop tokens those of the checkpoint": """
        --generation-config --override-generation-config""",
    "JSON schemas need the extra grammar and no option": """--guided-decoding-backend
        --structured-outputs-config --grammar-backend""",
    "there are no adapters: merge them into the checkpoint": "--enable-lora --lora-modules --lora",
    "calls of tools and thoughts are text here": """--enable-auto-tool-choice --tool-call-parser
        --reasoning-parser""",
    "there is no TLS: put a proxy in front": """--ssl-keyfile --ssl-certfile --ssl-key-file
        --ssl-cert-file""",
    "requests are not logged, and /metrics is always there": """--disable-log-requests
        --disable-log-stats --log-requests --enable-metrics --metrics""",
    "requests are always batched continuously": "--cont-batching -cb",
}
"""By what to write here, an option or a sentence: options of vLLM, SGLang and llama.cpp."""

OTHER_NAMES = {name: ours for ours, names in BY_OURS.items() for name in names.split()}
"""By the name of an option of others: what to write here."""
