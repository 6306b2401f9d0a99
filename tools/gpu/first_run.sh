#!/usr/bin/env bash
# The first ten minutes on a machine with vLLM and two GPUs: does it start, is it right, what does it cost?
#
#   bash tools/gpu/first_run.sh                     # Qwen3-8B on two GPUs, by gRPC and by CUDA IPC; writes runs/gpu-first-run/
#   MODEL=Qwen/Qwen3-0.6B bash tools/gpu/first_run.sh    # BIN: the folder with python and ridgeline, if not .venv/bin
#   SHARED=1 MODEL=Qwen/Qwen3-0.6B bash tools/gpu/first_run.sh   # two engines on one GPU, with 8 GiB of KV cache each
#   CONFIG=deploy/local.yaml TRANSPORTS="grpc shm" LONGEST_CHARS=6000 CHECK=--dry-run bash tools/gpu/first_run.sh   # no GPU
#
# Plain vLLM answers 60 prompts on one GPU first, then a deployment does by each transport: tokens must be the same but
# for ties. A step that fails is told at the end, and the others run all the same. Exit status: steps that failed.
set -uo pipefail
cd "$(dirname "$0")/../.."
config=${CONFIG:-deploy/one-host-gpu.yaml} transports=${TRANSPORTS:-grpc cuda-ipc} out=${OUT:-runs/gpu-first-run}
longest_chars=${LONGEST_CHARS:-16000} tie_nat=${TIE_NAT:-0.25} check=${CHECK:-}
bin=${BIN:-.venv/bin} name=first-run
[[ -x $bin/python ]] || bin=$(dirname "$(command -v python3)") # installed elsewhere: in the environment that is active
python=$bin/python ridgeline=$bin/ridgeline
[[ -x $ridgeline ]] || { echo "there is no $ridgeline: run make setup, or set BIN to the folder that has it"; exit 1; }
mkdir -p "$out"
failed=()

step() { # title, command...: its output is shown and kept; a failure is counted
  local title=$1 began=$SECONDS
  shift
  printf '\n== %s\n' "$title"
  if "$@" 2>&1 | tee "$out/${title//[^a-zA-Z0-9]/-}.log"; then
    printf -- '-- %d s\n' $((SECONDS - began))
  else
    printf -- '-- FAILED after %d s\n' $((SECONDS - began))
    failed+=("$title")
    return 1
  fi
}

shared=()
[[ -n ${SHARED:-} ]] && shared=(
  --set ray.share_gpus=true --set engine_args.gpu_memory_utilization=0.45
  --set "pools.prefill.kv_cache_memory_bytes=8 GiB" --set "pools.decode.kv_cache_memory_bytes=8 GiB"
)
settings=(--name "$name" --port 8000 ${MODEL:+--model "$MODEL"} "${shared[@]}")

plain_vllm() { # one engine with the settings of a decode worker
  $python -m tools.gpu.answers plain "$config" "$out/plain.json" ${MODEL:+--model "$MODEL"} --longest-chars "$longest_chars"
}

all_fetched() { # metrics file: equal tokens prove nothing of a transport if decode computed the prompts itself
  # One that the client has cancelled, as the timing of first tokens does, says nothing of it.
  grep -q '^ridgeline_fetches_total{.*result="ok"' "$1" &&
    ! grep '^ridgeline_fetches_total' "$1" | grep -qv 'result="\(ok\|cancelled\)"\| 0\.0$' && return 0
  echo "not every prompt's KV was fetched: see ridgeline_fetches_total and ridgeline_recompute_total in $1"
  return 1
}

split() { # transport
  "$ridgeline" serve -c "$config" "${settings[@]}" --set "transfer.transport=$1" --detach || return 1
  $python -m tools.gpu.answers record http://127.0.0.1:8000 "$out/$1.json" --longest-chars "$longest_chars"
  local status=$?
  curl -sf http://127.0.0.1:8000/metrics >"$out/metrics-$1.txt" || status=1
  grep -E '^ridgeline_(kv_pair|fetches_total|kv_transfer_bytes_total)' "$out/metrics-$1.txt"
  all_fetched "$out/metrics-$1.txt" || status=1
  "$ridgeline" stop --name "$name" || status=1
  return $status
}

step "device" $python -m tools.gpu.check $check --out "$out/check.json"
step "doctor" "$ridgeline" doctor -c "$config" ${MODEL:+--set "model.path=$MODEL"} "${shared[@]}"
step "plain vLLM" plain_vllm
for transport in $transports; do
  step "split by $transport" split "$transport" &&
    step "$transport beside plain vLLM" \
      $python -m tools.gpu.answers compare "$out/plain.json" "$out/$transport.json" --tie-nat "$tie_nat"
done
step "transfer" "$ridgeline" bench transfer

printf '\n%d s, in %s. ' "$SECONDS" "$out"
if ((${#failed[@]})); then
  printf 'FAILED: %s\n' "$(IFS=,; echo "${failed[*]}")"
else
  printf 'every step passed.\n'
fi
exit ${#failed[@]}
