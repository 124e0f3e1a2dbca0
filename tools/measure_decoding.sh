#!/bin/sh
# Checks and measures decoding on one GPU or on two, and writes records: sh tools/measure_decoding.sh GPUS FOLDER
#
# One GPU takes about 5 minutes and at most 8, two take at most 9; a command that takes too long is ended, and its record
# holds what it had measured until then. Where the package ring-attention-pytorch can be imported, its decoding is
# measured as well. docs/measurements/ has decode.json as DATE-decode-MACHINE.json, and so on.
gpus=$1 out=$2 python=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
peers="ringlearn.bench.peers:tree_attn_decode ringlearn.bench.peers:tree_attn_decode_plain"
failed=0

run() { # seconds at most, name of the files, command
    limit=$1 name=$2
    shift 2
    echo "+ $*"
    timeout -k 10 "$limit" "$@" >"$out/$name.txt" 2>&1 || { echo "exit status $?"; failed=1; }
    tail -n 40 "$out/$name.txt"
}

if [ "$gpus" = 1 ]; then
    run 200 decode "$python" -m ringlearn.bench --decode --graph --compare $peers --json "$out/decode.json"
    run 40 decode-48g "$python" -m ringlearn.bench --decode --graph --parts attention --cached 1048576 --batch 12 \
        --error-tokens 0 --json "$out/decode-48g.json"
    run 60 decode-pages "$python" -m ringlearn.bench --decode --graph --page 256 --batch 1 --json "$out/decode-pages.json"
    run 160 checks "$python" tests/gpu/check_decoding.py --quick --out "$out/checks.json"
else
    torchrun="$python -m torch.distributed.run --standalone --nproc-per-node $gpus"
    bench="$torchrun -m ringlearn.bench --decode --timeout 60"
    run 60 exchange $torchrun tests/gpu/check_exchange.py --out "$out/exchange.json"
    run 140 decode $bench --graph --parts attention --batch 1 8 --json "$out/decode.json"
    run 120 prefill $bench --parts prefill --json "$out/prefill.json"
    run 120 appends $bench --graph --parts appends --json "$out/appends.json"
    run 50 peers $bench --graph --graph-compare --compare $peers --parts attention --cached 131072 1048576 --batch 1 \
        --json "$out/peers.json"
fi
exit $failed
