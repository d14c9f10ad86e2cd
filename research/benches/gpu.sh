#!/usr/bin/env bash
# What has to be seen on a GPU, in stages of at most 8 minutes, each complete in itself. It is rehearsed on a CPU; what has been
# run on a GPU so far lies in research/results/gpu.
#
#   research/benches/gpu.sh [--device cuda] [--out DIR] [--tiny] [STAGE ...]      default: all stages, in this order
#
#   tests     parity, replay of a rollout, bit-equal resume, compile, CUDA graphs: tests/test_device.py
#   base      countdown_gpu_base.yaml, 4,000 of its 40,000 steps; called again it goes on where it was stopped
#   run       countdown_gpu.yaml, 400 of its 1,000 steps, on that base, or on one of 1,000 steps if there is none yet
#   sampler   forwards, rollouts and an RL step of the 12 M network against their floors: as they are, and compiled
#   llada     an RL step at the shape of LLaDA-8B with random weights: predicted, and measured
#   shapes    a reduced step of the other models at full size, from files: predicted, and measured
#   caches    seconds of block-causal generation with and without its cache
#   memory    an RL step of every row: seconds, bytes as predicted and as counted
#
# A stage writes DIR/STAGE.txt: date, device, versions, commands, what they printed, exit status. DIR, seen from the repository,
# is research/results/gpu, to be committed; weights and logs of runs go to runs/gpu. A stage that fails does not stop the
# others; the exit status is then 1. SIGTERM ends the stage that runs, which says so in its file, and begins no other. --tiny
# --device cpu rehearses all of it at sizes that mean nothing. PYTHON: the interpreter (default: that of .venv, else python).
set -eu
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root"
stages="tests base run sampler llada shapes caches memory"
limit=480 # seconds of a stage

device=cuda out=research/results/gpu tiny= chosen=
while [ $# -gt 0 ]; do
  case $1 in
    --device | --out)
      [ $# -gt 1 ] || { echo "gpu.sh: $1: no value given" >&2; exit 2; }
      if [ "$1" = --device ]; then device=$2; else out=$2; fi
      shift ;;
    --tiny) tiny=1 ;;
    *)
      case " $stages " in
        *" $1 "*) chosen="$chosen $1" ;;
        *) echo "gpu.sh: got $1; allowed --device, --out, --tiny, $stages" >&2; exit 2 ;;
      esac ;;
  esac
  shift
done

python=${PYTHON:-}
[ -n "$python" ] || { python=.venv/bin/python; [ -x "$python" ] || python=python; }
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} MINIDRL_DEVICE=$device TQDM_DISABLE=1
mkdir -p "$out"

# Sizes: those of the configs but for the steps, or the smallest that there are.
runs=runs/gpu
pretrain="--steps 4000 --optimizer.warmup 50 --save_every 500" short="--steps 1000 --optimizer.warmup 50"
train="--steps 400 --evaluate.every 50"
speed="--config tiny_configs/countdown_gpu.yaml --random tiny_configs/countdown_gpu_base.yaml" compile=--compile
shape=8b shapes="a2d-0.6b sdar-1.7b sdar-4b sdar-8b dream-7b" blocks= rows=all
if [ -n "$tiny" ]; then
  runs=$out/runs
  small="--network.hidden_size 16 --network.num_hidden_layers 1 --network.num_attention_heads 2 --network.intermediate_size 16"
  pretrain="--steps 2 --batch_size 4 --evaluate.n 2 --compile false $small" short=$pretrain
  train="--steps 1 --num_prompts 2 --num_generations 2 --evaluate.n 2 --compile false"
  speed="--quick --threads 1 --steps 2 --config tiny_configs/countdown_cpu.yaml" compile=
  shape=tiny shapes=tiny blocks="--rows 8 --repeats 1" rows=reinforce,gdpo,justgrpo
fi
base_config=tiny_configs/countdown_gpu_base.yaml run_config=tiny_configs/countdown_gpu.yaml

# A stage's commands, one a line.
commands_of() {
  case $1 in
    tests) echo "CUBLAS_WORKSPACE_CONFIG=:4096:8 $python -m pytest -q -rs -p no:cacheprovider tests/test_device.py" ;;
    base)
      begun=$(ls -d "$runs"/base/checkpoint-* 2>/dev/null || true)
      if [ -n "$begun" ] && [ ! -e "$runs/base/model.safetensors" ]; then
        pretrain="$pretrain --resume"
      else
        echo "rm -rf $runs/base"
      fi
      echo "$python -m minidrl pretrain $base_config --device $device --out $runs/base $pretrain" ;;
    run)
      base=$runs/base
      if [ ! -e "$base/model.safetensors" ]; then
        base=$runs/short_base
        echo "rm -rf $base && $python -m minidrl pretrain $base_config --device $device --out $base $short"
      fi
      echo "rm -rf $runs/run && $python -m minidrl train $run_config --device $device --out $runs/run --model $base $train"
      echo "cat $runs/run/summary.json" ;;
    sampler)
      echo "$python -m research.benches.speed --device $device $speed"
      [ -z "$compile" ] || echo "$python -m research.benches.speed --device $device $speed --compile" ;;
    llada)
      [ -n "$tiny" ] || echo "$python -m research.benches.llada_8b --predict"
      echo "$python -m research.benches.llada_8b --device $device --shape $shape" ;;
    shapes) for one in $shapes; do echo "$python -m research.benches.llada_8b --device $device --shape $one --reduced"; done ;;
    caches) echo "$python -m research.benches.block_generation --device $device $blocks" ;;
    memory)
      echo "$python -m research.benches.speed --device $device $speed --steps 2 --methods $rows" ;;
  esac
}

# What is measured, said once; a device that is not there is refused, since tests that skip would pass.
if ! machine=$("$python" - 2>&1 <<'END'
import os, platform, torch
device = torch.device(os.environ["MINIDRL_DEVICE"])
torch.empty(0, device=device)
print("device  ", torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads")
print("versions", f"Python {platform.python_version()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
END
); then
  echo "gpu.sh: --device: got $device; allowed what torch finds here: $(echo "$machine" | tail -n 1)" >&2
  exit 2
fi

failed= child= stopped=
trap 'stopped=1; [ -z "$child" ] || kill "$child"' TERM INT # timeout hands it to all that it started
for stage in ${chosen:-$stages}; do
  file=$out/$stage.txt commands=$(commands_of "$stage") status=0
  echo "$stage -> $file"
  printf 'stage    %s\ndate     %s\ncommand  research/benches/gpu.sh --device %s%s %s\n%s\n\n%s\n\n' "$stage" \
    "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$device" "${tiny:+ --tiny}" "$stage" "$machine" "$commands" >"$file"
  started=$(date +%s)
  timeout "$limit" bash -euo pipefail -c "$commands" >>"$file" 2>&1 & child=$!
  wait "$child" || status=$?
  [ -z "$stopped" ] || wait "$child" || true
  said="exit status $status after $(($(date +%s) - started)) s"
  [ "$status" -ne 124 ] || said="$said: stopped at the limit of $limit s"
  [ -z "$stopped" ] || said="$said: stopped by a signal"
  printf '\n%s\n' "$said" >>"$file"
  [ "$status" -eq 0 ] || { failed="$failed $stage"; echo "$stage: $said" >&2; }
  [ -z "$stopped" ] || exit 143
done
[ -z "$failed" ] || { echo "gpu.sh: failed:$failed" >&2; exit 1; }
