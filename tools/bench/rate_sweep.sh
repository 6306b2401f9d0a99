#!/usr/bin/env bash
# Serves in one mode and loads it with `vllm bench serve` from another environment: 512 tokens in, 64 out, Poisson arrivals.
# usage: rate_sweep.sh disaggregated|colocated BENCH_VENV OUT "RATES" [NUM_PROMPTS] [TTFT_MS TPOT_MS]
# OUT gets one JSON per rate (vLLM bench's format, every request's timings) and the server's counters after each rate.
set -uo pipefail
mode=$1 bench=$2 out=$3 rates=$4 prompts=${5:-100} ttft_ms=${6:-2000} tpot_ms=${7:-100}
cd "$(dirname "$0")/../.." && mkdir -p "$out"
port=8021 model=$(.venv/bin/ridgeline model)
.venv/bin/ridgeline serve --config deploy/local.yaml --mode "$mode" --port $port >"$out/serve-$mode.log" 2>&1 &
server=$!
trap 'kill -INT $server 2>/dev/null; wait $server' EXIT
until grep -q '^ready' "$out/serve-$mode.log"; do
  kill -0 $server 2>/dev/null || { cat "$out/serve-$mode.log"; exit 1; }
  sleep 1
done
load() { # input output prompts rate seed file
  VLLM_LOGGING_LEVEL=ERROR "$bench/bin/vllm" bench serve --backend openai --base-url http://127.0.0.1:$port \
    --model smollm2-135m --tokenizer "$model" --dataset-name random --random-input-len "$1" --random-output-len "$2" \
    --num-prompts "$3" --request-rate "$4" --seed "$5" --ignore-eos --percentile-metrics ttft,tpot,itl \
    --metric-percentiles 50,90,99 --goodput "ttft:$ttft_ms" "tpot:$tpot_ms" \
    --save-result --save-detailed --result-dir "$out" --result-filename "$6"
}
load 64 8 4 1 1 warm-up.json >/dev/null 2>&1
seed=100 # another seed per rate: the same prompts again would hit the prefix cache
for rate in $rates; do
  seed=$((seed + 1))
  load 512 64 "$prompts" "$rate" $seed "$mode-rate$rate.json" >"$out/$mode-rate$rate.log" 2>&1
  .venv/bin/python - "$out/$mode-rate$rate.json" "$rate" <<'P'
import json, sys
d = json.load(open(sys.argv[1]))
print(f"rate {sys.argv[2]}: {d['completed']} completed, {d['failed']} failed, {d['request_throughput']:.2f} req/s, "
      f"goodput {d['request_goodput']:.2f}, TTFT p50/p90 {d['p50_ttft_ms']:.0f}/{d['p90_ttft_ms']:.0f} ms, "
      f"TPOT p50/p90 {d['p50_tpot_ms']:.0f}/{d['p90_tpot_ms']:.0f} ms", flush=True)
P
  curl -s "http://127.0.0.1:$port/metrics" | grep '^ridgeline' | grep -v -e _bucket -e _created >"$out/$mode-rate$rate.metrics"
done
