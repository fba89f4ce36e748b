#!/bin/bash
# Trains four heads of SmolLM2-135M-Instruct (or of the chat model in TARGET) on text that it writes.
#
#     python tools/make_model.py smollm2-135m build/smollm2
#     training/train_smollm2.sh build/smollm2 build/heads [SECONDS [OPTION...]]
#
# All GPUs write text for a quarter of the time, then each trains one head or several. SECONDS bounds
# the whole, 560 by default. HEADS are the heads to train; a head that is in OUT already is trained
# further. Give each run on the same OUT another RUN: it adds text of another seed. OPTIONs are for
# own_text.py. README.md of this folder says more.
set -u
target=$1 out=$2 seconds=${3:-560} begin=$SECONDS
shift $(($# < 3 ? $# : 3))
here=$(dirname "$0")
heads=(${HEADS:-eagle3 eagle3-16k dflash dspark})
gpus=$(nvidia-smi -L 2>/dev/null | grep -c GPU)
gpus=$((gpus > ${#heads[@]} ? ${#heads[@]} : gpus < 1 ? 1 : gpus))
run=${RUN:-0}
export PYTHONPATH=$here/..${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
export XLA_PYTHON_CLIENT_MEM_FRACTION=0.9
mkdir -p "$out/own" "$out/logs" "$out/before"

train() { # NAME SECONDS
  local common=(--target "$target" --windows "$out"/own/*.npz --out "$out/$1" --seed 0)
  common+=(--batch-size "${BATCH:-20}" --steps 1000000 --intermediate-size 512 --print-every 4)
  local before=("$out/$1"/*/model.safetensors)
  [[ -f ${before[0]} ]] && cp -r "$(dirname "${before[0]}")" "$out/before/$1-$run" && common+=(--init "$out/before/$1-$run")
  case $1 in
    eagle3*)
      local ids=()
      [[ $1 == *-16k ]] && ids=(--vocab-size 16000)
      python3 "$here/train_eagle3.py" "${common[@]}" "${ids[@]}" --leave-out-shared \
        --minutes "$(awk "BEGIN {print ($2 - 50) / 60}")" ;;
    *)
      python3 "$here/train_block.py" "${common[@]}" --kinds "$1" --num-layers 2 --markov-rank 8 \
        --anchors "${ANCHORS:-192}" --learning-rate 1e-3 --seconds "$2" ;;
  esac
}

for ((gpu = 0; gpu < gpus; gpu++)); do
  (
    export CUDA_VISIBLE_DEVICES=$gpu
    log=$out/logs/gpu$gpu.txt
    held_out=()
    ((gpu)) && held_out=(--held-out 0) # those of the first are enough
    python3 "$here/own_text.py" --target "$target" --out "$out/own/$run-$gpu.npz" \
      --seed $((10 * run + gpu)) --seconds $((seconds / 4)) "${held_out[@]}" "$@" >>"$log" 2>&1
    # All that the GPUs write is for all heads; one that is late is not waited for.
    until (($(ls "$out"/own/"$run"-*.npz 2>/dev/null | wc -l) >= gpus)); do
      ((SECONDS - begin > seconds * 2 / 5)) && break
      sleep 1
    done
    for ((index = gpu; index < ${#heads[@]}; index += gpus)); do
      left=$((seconds - SECONDS + begin))
      still=$(((${#heads[@]} - index + gpus - 1) / gpus))
      train "${heads[index]}" $((left / still)) >>"$log" 2>&1
    done
  ) &
done
wait
tail -n 12 "$out"/logs/*.txt
