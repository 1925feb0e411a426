#!/bin/bash
# All that waits for a card, in one command of at most ALL seconds (default 560) on a machine with 16 cores, from the root of
# the repository; results and logs go to the folder $1. JAX, equinox, pytest-xdist and SpikingJelly are used if they are
# there; with FEW=1 only the most important contenders take part. First, for WARM seconds, all is compiled at once, beside
# the tests; then each measurement runs alone, its kernels cached. Called again with the same folder and build/card, it goes
# on: tests that passed (tests*.log) are left out, as is what is measured.
set -u
OUT=$1; ALL=${ALL:-560}; WARM=${WARM:-120} EACH=${EACH:-110} WORKERS=${WORKERS:-8}
begin=$(date +%s); left() { echo $((ALL - ($(date +%s) - begin))); }
mkdir -p "$OUT" .editable/reroll build/card/dist/reroll-0.2.0.dist-info
(cd .editable/reroll && find . -xtype l -delete; ln -sfn ../../compiler/* ../../passes ../../backends .)
printf 'Metadata-Version: 2.1\nName: reroll\nVersion: 0.2.0\n' > build/card/dist/reroll-0.2.0.dist-info/METADATA
printf '[torch_dynamo_backends]\nreroll = reroll.backends.dynamo:reroll\n' > build/card/dist/reroll-0.2.0.dist-info/entry_points.txt
export PYTHONPATH=$PWD/.editable:$PWD/build/card/dist:${PYTHONPATH:-} PYTHONUNBUFFERED=1 TORCHINDUCTOR_COMPILE_THREADS=4
export REROLL_CACHE_DIR=$PWD/build/card/reroll TORCHINDUCTOR_CACHE_DIR=$PWD/build/card/inductor
export JAX_COMPILATION_CACHE_DIR=$PWD/build/card/jax JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
NETWORKS=("Linear + LIF" "feed-forward LIF" "recurrent LIF" "LSTM" "convolutional spiking")
WAYS=("eager BPTT" "torch.utils.checkpoint" "torch.compile segments" "torch.compile segments, checkpoint" store_all standard auto
    "remote (host)" "double (host)" "double (local), as on host" "JAX lax.scan" "JAX nested remat" "equinox, 8 checkpoints"
    "nn.LSTM" "SpikingJelly, Triton")
[ -n "${FEW:-}" ] && WAYS=("eager BPTT" "torch.compile segments" store_all standard auto "double (host)" "JAX lax.scan"
    "JAX nested remat" "nn.LSTM" "SpikingJelly, Triton")  # where there is less time
BLOCKS=("each block by torch.compile" "reroll, budget 0.5" "reroll" "eager" "checkpoint of each compiled block" "reroll, budget 0.2")
WHOLE=("torch.compile, activation budget 0.5")
CARD=tests/backends/card
TESTS=($CARD/test_memory.py $CARD/test_recordings.py $CARD/test_random.py $CARD/test_schedules.py $CARD/test_networks.py
    $CARD/test_depth.py $CARD/test_losses.py $CARD/test_precision.py)
mapfile -t PASSED < <(cat "$OUT"/tests*.log 2>/dev/null | sed -n 's/^PASSED /--deselect=/p')

(TORCHINDUCTOR_CACHE_DIR=$PWD/build/card/tests TORCHINDUCTOR_COMPILE_THREADS=1 timeout -s INT "$WARM" \
    python3 -m pytest -n "$WORKERS" --dist load --maxschedchunk=1 -m gpu -q -rpfE --tb=short --show-capture=no -p no:cacheprovider \
    "${PASSED[@]}" "${TESTS[@]}" > "$OUT/tests $begin.log" 2>&1) &
for network in "${NETWORKS[@]}"; do
    timeout -s INT "$WARM" python3 benchmarks/card.py --only "$network" --contenders "${WAYS[@]}" --most-steps 1100 \
        --seconds "$WARM" --out "$(mktemp -d)" > "$OUT/warm $network.log" 2>&1 &
done
timeout -s INT "$WARM" python3 benchmarks/card_depth.py --ways "${BLOCKS[@]}" --rounds 1 --out "$(mktemp -d)" > "$OUT/warm depth.log" 2>&1 &
timeout -s INT "$WARM" python3 benchmarks/card_depth.py --ways "$BLOCKS" "${WHOLE[@]}" --rounds 1 --out "$(mktemp -d)" > "$OUT/warm whole.log" 2>&1 &
wait

alone() {  # SECONDS LOG COMMAND...: for so long, or for as long as is left; a part that was cut goes on when called again
    local most=$1 log=$2; shift 2
    [ "$(left)" -lt "$most" ] && most=$(left)
    [ "$most" -lt 15 ] && { echo "left out: $*"; return; }
    timeout -s INT "$most" "$@" --seconds $((most - 5)) --out "$OUT" > "$OUT/$log.log" 2>&1
}
alone 75 depth python3 benchmarks/card_depth.py --ways "${BLOCKS[@]}"
for network in "${NETWORKS[@]}"; do
    alone "$EACH" "$network" python3 benchmarks/card.py --only "$network" --contenders "${WAYS[@]}" --most-steps 1100
done
alone 45 layers python3 benchmarks/card_layers.py
alone 45 whole python3 benchmarks/card_depth.py --ways "${WHOLE[@]}"
alone 45 profile python3 benchmarks/card_profile.py
alone "$ALL" rest python3 benchmarks/card.py
tail -q -n 1 "$OUT"/tests*.log; left
